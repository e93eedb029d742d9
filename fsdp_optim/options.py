"""The options of all calls. The ranks compare them, and a wrong option raises the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from datetime import timedelta
from numbers import Integral, Real
from os import PathLike
from types import MappingProxyType, NoneType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.errors import CheckpointError, StateError

BUCKET_NBYTES = 64 << 20
"""Bytes that a rank may hold for temporary buffers while a call moves data."""

LEAST_BUCKET_NBYTES = 4 << 10
"""With fewer bytes a call would do nothing but talk: every few elements would be a message, and a range of a file."""

CONVERT_NBYTES, LEAST_CONVERT_NBYTES = 512 << 20, 16 << 20
"""Bytes that a process may hold for the elements of a checkpoint that it converts."""

DEFAULT_TIMEOUT = 600.0
"""Seconds that ranks wait for each other before the missing ones are named."""

Model = nn.Module | Sequence[nn.Module]
"""A model, or the list of the pipeline stages that this rank has."""

Collect = Literal["wrapper", "all"]
OnReplicaMismatch = Literal["error", "lowest_rank"]
GroupsFrom = Literal["saved", "live"]
KeyBy = Literal["id", "name"]
Strategy = Literal["auto", "in_place", "per_rank_files"]
Check = Literal["bitwise"]
OnDamage = Literal["error", "previous"]
WhichWeights = Literal["all", "trainable", "none"]
NameOf = Callable[[str, int], str]
"""(clean FQN on this rank, lowest global rank that holds the parameter) -> name that is unique in the job."""

Rename = Callable[[str], str] | Mapping[str, str]
"""A name -> the name in its place: at a load from the checkpoint's to the model's, at a save the reverse. Or beginnings of such
names, each with its replacement."""

CAST_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that `weights_dtype` takes, and casts. Smaller floating dtypes mean nothing without their scales."""

_MOST_SECONDS = 366 * 24 * 3600.0
_MOST_STEPS = 1 << 63


MAY_DIFFER: Mapping[str, Any] = MappingProxyType({"compared_as": None})
"""The `metadata` of a field of `Arguments` whose value may differ between ranks."""


def compared_as(function: Callable[[Any], object]) -> Mapping[str, Any]:
    """The `metadata` of a field of `Arguments` that ranks compare by `function(value)` in place of the value's `repr`."""
    return {"compared_as": function}


@dataclass(frozen=True)
class Arguments:
    """Parent of the dataclasses of a call's arguments.

    The constructor never raises: the ranks have not met yet, and the others would wait for a rank that raised here.

    A new option is a new field. Ranks compare the `repr` of its value, unless its metadata (`MAY_DIFFER`, `compared_as`)
    says otherwise. `validate` checks the values.
    """

    def validate(self) -> None:
        """Raise an error for a wrong argument. The caller sees to it that all ranks raise the error."""
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, Arguments):
                value.validate()

    def compared_text(self) -> str:
        """The options that must be the same on all ranks, as text."""
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


def name_of_group(group: dist.ProcessGroup | None) -> str:
    """The name of a process group, equal on all ranks of the group. None stands for the group of all ranks."""
    found = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
    return str(getattr(found, "group_name", None))


def text_of_format(format: object) -> str:
    """The name of a format, or a `Format` with its options, as text that is equal on all ranks.

    The `repr` of a class that has none of its own is the address of the object.
    """
    if isinstance(format, str) or type(format).__repr__ is not object.__repr__:
        return repr(format)
    return f"{type(format).__module__}.{type(format).__qualname__}"


def is_integer(value: object) -> bool:
    """Whether a value is a whole number; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_one_of(name: str, value: object, choices: Sequence[object], error: type[Exception] = StateError) -> None:
    """Raise an error for a value that is not among the choices."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        *most, last = map(repr, choices)
        raise error(f"{name} must be {', '.join(most)} or {last}, not {value!r}")


def check_at_least(name: str, value: object, least: int, what: str = "", error: type[Exception] = StateError) -> None:
    """Raise an error for a value that is not a whole number of at least `least`."""
    if not is_integer(value) or value < least:  # type: ignore[operator]  # is_integer does not narrow the type
        raise error(f"{name} must be at least {least}{what}, a whole number, not {value!r}")


def check_rank(name: str, value: object) -> None:
    """Raise an error for a value that is not a whole number."""
    if not is_integer(value):
        raise StateError(f"{name} must be a global rank, a whole number, not {value!r}")


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
    """A timeout in seconds; None: the default timeout. Raises StateError for a value that is not a timeout."""
    if timeout is None:
        return None
    seconds: object = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = float(seconds) if isinstance(seconds, Real) else 0.0
    if not 0 < number <= _MOST_SECONDS:
        raise StateError(
            f"timeout must be a number of seconds above 0 and at most {_MOST_SECONDS:.0f}, a timedelta or None, not {timeout!r}"
        )
    return number


@dataclass(frozen=True)
class Options(Arguments):
    """The options that all collective calls accept."""

    collect: Collect = "wrapper"
    name_of: NameOf | None = field(default=None, metadata=MAY_DIFFER)
    process_group: dist.ProcessGroup | None = field(default=None, metadata=compared_as(name_of_group))
    timeout: float | timedelta | None = field(default=None, metadata=MAY_DIFFER)
    strict: bool = True
    bucket_nbytes: int = BUCKET_NBYTES  # equal on all ranks: both ends of a message derive the message's size from it
    on_replica_mismatch: OnReplicaMismatch = "error"
    groups: GroupsFrom = "saved"

    def validate(self) -> None:
        check_one_of("collect", self.collect, ("wrapper", "all"))
        check_one_of("groups", self.groups, ("saved", "live"))
        check_one_of("on_replica_mismatch", self.on_replica_mismatch, ("error", "lowest_rank"))
        check_callable("name_of", self.name_of)
        check_at_least("bucket_nbytes", self.bucket_nbytes, LEAST_BUCKET_NBYTES, " bytes")
        seconds_of(self.timeout)

    @property
    def seconds(self) -> float:
        """How long to wait for missing ranks. A wrong `timeout` counts as the default until all ranks raise the error."""
        try:
            return seconds_of(self.timeout) or DEFAULT_TIMEOUT
        except StateError:
            return DEFAULT_TIMEOUT


@dataclass(frozen=True)
class GatherOptions(Arguments):
    """The options of gather and iterate."""

    call: Options
    recipient_rank: int | None = 0
    key_by: KeyBy = "id"

    def validate(self) -> None:
        super().validate()
        check_one_of("key_by", self.key_by, ("id", "name"))
        if self.recipient_rank is not None:
            check_rank("recipient_rank", self.recipient_rank)


@dataclass(frozen=True)
class ScatterOptions(Arguments):
    """The options of scatter."""

    call: Options
    source_rank: int = 0

    def validate(self) -> None:
        super().validate()
        check_rank("source_rank", self.source_rank)


@dataclass(frozen=True)
class SaveOptions(Arguments):
    """The options of save."""

    call: Options
    step: int | None = None
    extra: Any = field(default=None, metadata=MAY_DIFFER)
    per_rank_extra: Any = field(default=None, metadata=compared_as(lambda value: value is not None))
    overwrite: bool = False
    strategy: Strategy = "auto"
    max_file_size: int = 4_000_000_000
    checksums: bool = True
    durable: bool = True
    allow_pickle: bool = False
    progress: bool | None = field(default=None, metadata=MAY_DIFFER)
    storage_options: Mapping[str, Any] | None = field(default=None, metadata=MAY_DIFFER, repr=False)
    format: object = field(default="safetensors", metadata=compared_as(text_of_format))
    weights: WhichWeights = "all"
    rename: Rename | None = field(default=None, metadata=compared_as(lambda value: value is not None))
    weights_dtype: torch.dtype | None = None

    def validate(self) -> None:
        super().validate()
        check_which_weights(self.weights)
        check_rename(self.rename)
        check_one_of("weights_dtype", self.weights_dtype, (*CAST_DTYPES, None), CheckpointError)
        check_one_of("strategy", self.strategy, ("auto", "in_place", "per_rank_files"), CheckpointError)
        check_at_least("max_file_size", self.max_file_size, 1, " byte", CheckpointError)
        if self.step is not None:
            check_at_least("step", self.step, 0, error=CheckpointError)
            if self.step >= _MOST_STEPS:
                raise CheckpointError(f"step must be at most {_MOST_STEPS - 1}, not {self.step}")


@dataclass(frozen=True)
class LoadOptions(Arguments):
    """The options of load."""

    call: Options
    keep: Sequence[str] = field(default=(), metadata=compared_as(sorted))
    verify: bool = True
    check: Check | None = None
    allow_pickle: bool = False
    progress: bool | None = field(default=None, metadata=MAY_DIFFER)
    cast: bool = False
    rename: Rename | None = field(default=None, metadata=MAY_DIFFER)
    local_cache: str | PathLike[str] | None = field(default=None, metadata=MAY_DIFFER)
    storage_options: Mapping[str, Any] | None = field(default=None, metadata=MAY_DIFFER, repr=False)
    weights: WhichWeights = "all"

    def validate(self) -> None:
        super().validate()
        check_which_weights(self.weights)
        check_one_of("check", self.check, (None, "bitwise"), CheckpointError)
        names = self.keep if isinstance(self.keep, (list, tuple, set, frozenset)) else [None]
        if not all(isinstance(name, str) for name in names):
            raise StateError(f"keep must be a list of names of hyperparameters, as in keep=['lr'], not {self.keep!r}")
        check_rename(self.rename)


@dataclass(frozen=True)
class ConvertOptions(Arguments):
    """The options of convert."""

    call: Options
    format: object = field(default="safetensors", metadata=compared_as(text_of_format))
    memory: int = CONVERT_NBYTES
    names: Sequence[str] | None = None
    overwrite: bool = False
    durable: bool = True
    max_file_size: int = 4_000_000_000
    allow_pickle: bool = False
    progress: bool | None = field(default=None, metadata=MAY_DIFFER)
    storage_options: Mapping[str, Any] | None = field(default=None, metadata=MAY_DIFFER, repr=False)

    def validate(self) -> None:
        super().validate()
        check_at_least("memory", self.memory, LEAST_CONVERT_NBYTES, " bytes (16 MiB)", CheckpointError)
        check_at_least("max_file_size", self.max_file_size, 1, " byte", CheckpointError)
        names = self.names if isinstance(self.names, (list, tuple, NoneType)) else [None]
        if not all(isinstance(name, str) for name in names or ()):
            raise StateError(f"names must be a list of FQNs in the order of the optimizer's ids, not {self.names!r}")


@dataclass(frozen=True)
class ResumeOptions(LoadOptions):
    """The options of resume."""

    on_damage: OnDamage = "error"

    def validate(self) -> None:
        super().validate()
        check_one_of("on_damage", self.on_damage, ("error", "previous"), CheckpointError)
