"""What a call is asked for, besides models and optimizers: checked where all ranks hear of it, and compared between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from datetime import timedelta
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from fsdp_optim.errors import StateError

_MOST_SECONDS = 366 * 24 * 3600.0


MAY_DIFFER: Mapping[str, Any] = MappingProxyType({"said": None})
"""The `metadata` of a field of `Asked` whose value may be another one on each rank."""


def said_as(said: Callable[[Any], object]) -> Mapping[str, Any]:
    """The `metadata` of a field of `Asked` that ranks compare by something that all of them can name."""
    return {"said": said}


@dataclass(frozen=True)
class Asked:
    """Parent of the dataclasses of arguments. Making one never raises: the ranks have not met yet, and would wait for this one.

    A new option is a new field. Ranks compare it by its `repr`, or as its metadata (`MAY_DIFFER`, `said_as`) say; what it can
    be is said in `validate`.
    """

    def validate(self) -> None:
        """Raise where an argument cannot be what it is. Called where every rank hears of it."""
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Asked):
                value.validate()

    def said(self) -> str:
        """Everything that has to be the same on all ranks."""
        return ", ".join(text for one in fields(self) if (text := _said(one, getattr(self, one.name))))


def _said(one: Field[Any], value: Any) -> str:
    if isinstance(value, Asked):
        return value.said()
    if "said" not in one.metadata:
        return f"{one.name}={int(value)!r}" if is_integer(value) else f"{one.name}={value!r}"
    said = one.metadata["said"]
    return f"{one.name}={said(value)!r}" if said is not None else ""


def name_of_group(group: dist.ProcessGroup | None) -> str:
    """A process group's name, which its ranks have in common; None stands for the group of all ranks."""
    found = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
    return str(getattr(found, "group_name", None))


def is_integer(value: object) -> bool:
    """Whether it counts something: True and False do not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_one_of(name: str, value: object, choices: Sequence[object], error: type[Exception] = StateError) -> None:
    """Raise for a value that is none of a few."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        *most, last = map(repr, choices)
        raise error(f"{name} has to be {', '.join(most)} or {last}, not {value!r}")


def check_at_least(name: str, value: object, least: int, what: str = "", error: type[Exception] = StateError) -> None:
    """Raise for a value that is no whole number, or too small a one."""
    if not is_integer(value) or value < least:  # type: ignore[operator]  # a number
        raise error(f"{name} has to be at least {least}{what}, a whole number, not {value!r}")


def check_rank(name: str, value: object) -> None:
    """Raise for a value that is no rank."""
    if not is_integer(value):
        raise StateError(f"{name} has to be a global rank, a whole number, not {value!r}")


def check_callable(name: str, value: object) -> None:
    """Raise for a value that is neither a function nor None."""
    if value is not None and not callable(value):
        raise StateError(f"{name} has to be a function or None, not {value!r}")


def seconds_of(timeout: object) -> float | None:
    """A timeout in seconds; None: as long as is usual. Raises StateError for what is none."""
    if timeout is None:
        return None
    seconds: object = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = float(seconds) if isinstance(seconds, Real) else 0.0
    if not 0 < number <= _MOST_SECONDS:
        raise StateError(
            f"timeout has to be a number of seconds above 0 and at most {_MOST_SECONDS:.0f}, a timedelta or None, not {timeout!r}"
        )
    return number
