"""The pickles of values that cache what they are asked."""

from __future__ import annotations

from typing import Any


class PickledByFields:
    """A dataclass whose pickle has its fields alone: equal values are equal bytes, and a hash counts in one process only.

    `hash(None)` is an address before Python 3.12, and the hash of a range of one element has it inside.
    """

    def __getstate__(self) -> dict[str, Any]:
        fields = getattr(type(self), "__dataclass_fields__", self.__dict__)
        return {name: value for name, value in self.__dict__.items() if name in fields}
