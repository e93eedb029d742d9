"""Records that ranks send each other: msgspec Structs with `array_like=True`, and NamedTuples, as JSON arrays.

The JSON is the standard library's, because a message may name a file whose name is no UTF-8 (a lone surrogate in Python), which
msgspec's own encoder refuses.
"""

from __future__ import annotations

import json
from typing import TypeVar

import msgspec

RecordT = TypeVar("RecordT")


def encode(record: msgspec.Struct | tuple[object, ...]) -> str:
    """Return a record as JSON on one line, in ASCII."""
    return json.dumps(msgspec.to_builtins(record))


def decode(kind: type[RecordT], data: str | bytes) -> RecordT:
    """Decode a record, the inverse of `encode`; `kind` may be a union of tagged Structs.

    Raises msgspec.ValidationError for a record of another kind.
    """
    return msgspec.convert(json.loads(data), kind)
