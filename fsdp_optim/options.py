"""The options of all calls: checked where all ranks hear of it, and compared between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from datetime import timedelta
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal

import torch.distributed as dist

from fsdp_optim.errors import CheckpointError, StateError

BUCKET_NBYTES = 64 << 20
"""Bytes that a rank may hold beyond what it keeps, while a call moves data."""

DEFAULT_TIMEOUT = 600.0
"""Seconds that ranks wait for each other before the missing ones are named."""

Collect = Literal["wrapper", "all"]
OnReplicaMismatch = Literal["error", "lowest_rank"]
GroupsFrom = Literal["saved", "live"]
KeyBy = Literal["id", "name"]
Strategy = Literal["auto", "in_place", "per_rank_files"]
Check = Literal["bitwise"]
NameOf = Callable[[str, int], str]
"""(clean FQN on this rank, lowest global rank that holds the parameter) -> name that is unique in the whole job."""

_MOST_SECONDS = 366 * 24 * 3600.0
_MOST_STEPS = 1 << 63


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


@dataclass(frozen=True)
class Options(Asked):
    """What all collective calls accept besides the model and the optimizer."""

    collect: Collect = "wrapper"
    name_of: NameOf | None = field(default=None, metadata=MAY_DIFFER)
    process_group: dist.ProcessGroup | None = field(default=None, metadata=said_as(name_of_group))
    timeout: float | timedelta | None = field(default=None, metadata=MAY_DIFFER)
    strict: bool = True
    bucket_nbytes: int = BUCKET_NBYTES  # it cuts the messages, on both ends
    on_replica_mismatch: OnReplicaMismatch = "error"
    groups: GroupsFrom = "saved"

    def validate(self) -> None:
        check_one_of("collect", self.collect, ("wrapper", "all"))
        check_one_of("groups", self.groups, ("saved", "live"))
        check_one_of("on_replica_mismatch", self.on_replica_mismatch, ("error", "lowest_rank"))
        check_callable("name_of", self.name_of)
        check_at_least("bucket_nbytes", self.bucket_nbytes, 1)
        seconds_of(self.timeout)

    @property
    def seconds(self) -> float:
        """How long to wait for ranks that do not come; as usual where `timeout` is wrong, until all have heard of it."""
        try:
            return seconds_of(self.timeout) or DEFAULT_TIMEOUT
        except StateError:
            return DEFAULT_TIMEOUT


@dataclass(frozen=True)
class GatherOptions(Asked):
    """What gather and iterate are asked for."""

    call: Options
    recipient_rank: int | None = 0
    key_by: KeyBy = "id"

    def validate(self) -> None:
        super().validate()
        check_one_of("key_by", self.key_by, ("id", "name"))
        if self.recipient_rank is not None:
            check_rank("recipient_rank", self.recipient_rank)


@dataclass(frozen=True)
class ScatterOptions(Asked):
    """What scatter is asked for."""

    call: Options
    source_rank: int = 0

    def validate(self) -> None:
        super().validate()
        check_rank("source_rank", self.source_rank)


@dataclass(frozen=True)
class SaveOptions(Asked):
    """What save accepts besides the model and the optimizer."""

    call: Options
    step: int | None = None
    extra: Any = field(default=None, metadata=MAY_DIFFER)
    per_rank_extra: Any = field(default=None, metadata=said_as(lambda value: value is not None))
    overwrite: bool = False
    strategy: Strategy = "auto"
    max_file_size: int = 4_000_000_000
    checksums: bool = True
    durable: bool = True
    keep_last: int | None = None
    allow_pickle: bool = False
    progress: bool | None = field(default=None, metadata=MAY_DIFFER)

    def validate(self) -> None:
        super().validate()
        check_one_of("strategy", self.strategy, ("auto", "in_place", "per_rank_files"), CheckpointError)
        check_at_least("max_file_size", self.max_file_size, 1, " byte", CheckpointError)
        if self.keep_last is not None:
            check_at_least("keep_last", self.keep_last, 1, error=CheckpointError)
        if self.step is not None:
            check_at_least("step", self.step, 0, error=CheckpointError)
            if self.step >= _MOST_STEPS:
                raise CheckpointError(f"step has to be at most {_MOST_STEPS - 1}, not {self.step}")


@dataclass(frozen=True)
class LoadOptions(Asked):
    """What load accepts besides the model and the optimizer."""

    call: Options
    keep: Sequence[str] = field(default=(), metadata=said_as(sorted))
    verify: bool = True
    check: Check | None = None
    allow_pickle: bool = False
    progress: bool | None = field(default=None, metadata=MAY_DIFFER)
    cast: bool = False

    def validate(self) -> None:
        super().validate()
        check_one_of("check", self.check, (None, "bitwise"), CheckpointError)
        names = self.keep if isinstance(self.keep, (list, tuple, set, frozenset)) else [None]
        if not all(isinstance(name, str) for name in names):
            raise StateError(f"keep has to be a list of names of hyperparameters, as in keep=['lr'], not {self.keep!r}")
