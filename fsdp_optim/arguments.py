"""The parent of the options and arguments of a call, and checks of their values. A wrong value raises the same on all ranks."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from datetime import timedelta
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from fsdp_optim.errors import CheckpointError, StateError

_MOST_SECONDS = 366 * 24 * 3600.0
_MODEL = re.compile(r"(?!extra$|[0-9a-f]{16}$)[A-Za-z0-9_][A-Za-z0-9_-]{0,99}", re.IGNORECASE)

MAY_DIFFER: Mapping[str, Any] = MappingProxyType({"compared_as": None})
"""The `metadata` of a field of `Arguments` whose value may differ between ranks."""


def compared_as(function: Callable[[Any], object]) -> Mapping[str, Any]:
    """Return the `metadata` of a field of `Arguments` that ranks compare by `function(value)` in place of the value's `repr`."""
    return {"compared_as": function}


def text_of_list(values: object) -> str:
    """Return a short text that is equal only for lists of values with equal `repr`s, which are long."""
    listed = [repr(value) for value in values] if isinstance(values, (list, tuple)) else [repr(values)]
    return f"{len(listed)} ({zlib.crc32(repr(listed).encode()):08x})" if listed else ""


@dataclass(frozen=True)
class Arguments:
    """Parent of the dataclasses of a call's arguments.

    The constructor never raises: the ranks have not met yet, and the other ranks would wait for a rank that raised here.

    A new option is a new field. Ranks compare the `repr` of its value, unless its metadata (`MAY_DIFFER`, `compared_as`)
    says otherwise. `validate` checks the values.
    """

    def validate(self) -> None:
        """Raise an error for a wrong argument. The caller makes all ranks raise it."""
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, Arguments):
                value.validate()

    def compared_text(self) -> str:
        """Return the options that must be the same on all ranks, as text."""
        return ", ".join(
            text for option in fields(self) if (text := _compared_text(option, getattr(self, option.name)))
        )


def _compared_text(option: Field[Any], value: Any) -> str:
    if isinstance(value, Arguments):
        return value.compared_text()
    if "compared_as" not in option.metadata:
        return f"{option.name}={int(value)!r}" if is_integer(value) else f"{option.name}={value!r}"
    function = option.metadata["compared_as"]
    return f"{option.name}={function(value)!r}" if function is not None else ""


def text_of_format(format: object) -> str:
    """Return the name of a format, or a `Format` with its options, as text that is equal on all ranks.

    A class without a `repr` of its own would show the address of the object.
    """
    if isinstance(format, str) or type(format).__repr__ is not object.__repr__:
        return repr(format)
    return f"{type(format).__module__}.{type(format).__qualname__}"


def is_integer(value: object) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_one_of(name: str, value: object, choices: Sequence[object], error: type[Exception] = StateError) -> None:
    """Raise an error for a value that is not among the choices."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        *most, last = map(repr, choices)
        raise error(f"{name} must be {', '.join(most)} or {last}, not {value!r}")


def check_at_least(name: str, value: object, least: int, what: str = "", error: type[Exception] = StateError) -> None:
    """Raise an error for a value that is not a whole number of at least `least`."""
    if not is_integer(value) or value < least:  # type: ignore[operator]  # is_integer does not narrow the type
        raise error(f"{name} must be at least {least}{what}, an integer, not {value!r}")


def check_rank(name: str, value: object) -> None:
    """Raise an error for a value that is not a whole number."""
    if not is_integer(value):
        raise StateError(f"{name} must be a global rank, an integer, not {value!r}")


def check_callable(name: str, value: object) -> None:
    """Raise an error for a value that is neither a function nor None."""
    if value is not None and not callable(value):
        raise StateError(f"{name} must be a function or None, not {value!r}")


def check_which_weights(value: object) -> None:
    """Raise an error for a value that is no `WhichWeights`."""
    check_one_of("weights", value, ("all", "trainable", "none"), CheckpointError)


def check_rename(rename: object) -> None:
    """Raise an error for a value that is no `Rename`, nor None."""
    if not isinstance(rename, Mapping):
        check_callable("rename", rename)
    elif not all(isinstance(old, str) and isinstance(new, str) for old, new in rename.items()):
        raise StateError(f"rename must map beginnings of names to others, as in {{'model.': ''}}, not {rename!r}")


def seconds_of(timeout: object) -> float | None:
    """Return a timeout in seconds; None: the default timeout. Raises StateError for a value that is not a timeout."""
    if timeout is None:
        return None
    seconds: object = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = float(seconds) if isinstance(seconds, Real) else 0.0
    if not 0 < number <= _MOST_SECONDS:
        raise StateError(
            f"timeout must be a number of seconds above 0 and at most {_MOST_SECONDS:.0f}, a timedelta or None, not {timeout!r}"
        )
    return number


def check_switch(name: str, value: object) -> None:
    """Raise an error for a value that is neither True nor False."""
    check_one_of(name, value, (True, False))


def check_names(name: str, value: object, example: str) -> None:
    """Raise an error for a value that is not a list of names."""
    names = value if isinstance(value, (list, tuple, set, frozenset)) else [None]
    if not all(isinstance(listed, str) for listed in names):
        raise StateError(f"{name} must be a list of names, as in {example}, not {value!r}")


def is_model_name(name: object) -> bool:
    """Return whether one of several models of a checkpoint may have this name, which is also that of its folder.

    Checkpoints have other folders: `extra`, and in buckets 16 hexadecimal digits.
    """
    return isinstance(name, str) and _MODEL.fullmatch(name) is not None


def text_of_views(views: object) -> str:
    """Return a short text that is equal only for equal Views."""
    return views if isinstance(views, str) else text_of_list(views)


def check_views(views: object, *, of_checkpoints: bool = False) -> None:
    """Raise an error for a value that is no list of Views. `of_checkpoints`: it may have inverse ones, and no model shows any."""
    if views == () or (not of_checkpoints and isinstance(views, str) and views in ("hooks", "hub")):
        return
    from fsdp_optim.layout.views.given import check_given  # here, so that the command line does not load it

    check_given(views, of_checkpoints=of_checkpoints)
