"""The options of the public calls, and the types of their arguments. Each field is documented in its class only."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from os import PathLike
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.arguments import (
    MAY_DIFFER,
    Arguments,
    check_at_least,
    check_callable,
    check_names,
    check_one_of,
    check_rank,
    check_rename,
    check_switch,
    check_views,
    compared_as,
    is_integer,
    seconds_of,
    text_of_list,
    text_of_views,
)
from fsdp_optim.errors import CheckpointError, StateError

if TYPE_CHECKING:
    from fsdp_optim.layout.views import InverseView, View

BUCKET_NBYTES = 64 << 20
"""Bytes that a rank may hold for temporary buffers while a call moves data."""

LEAST_BUCKET_NBYTES = 4 << 10
"""With fewer bytes, every few elements would be a message, and a range of a file."""

CONVERT_NBYTES, LEAST_CONVERT_NBYTES = 512 << 20, 16 << 20
"""Bytes that a process may hold for the elements of a checkpoint that it converts."""

DEFAULT_TIMEOUT = 600.0
"""Seconds that ranks wait for each other before the missing ones are named."""

Model = nn.Module | Sequence[nn.Module]
"""A model, or the list of the pipeline stages that this rank has."""

Collect = Literal["wrapper", "all"]
OnReplicaMismatch = Literal["error", "lowest_rank"]
ParamGroups = Literal["saved", "live"]
KeyBy = Literal["id", "name"]
Strategy = Literal["auto", "in_place", "per_rank_files"]
OnDamage = Literal["error", "previous"]
Best = Literal["min", "max"]
FusedState = Literal["error", "keep"]
WhichWeights = Literal["all", "trainable", "none"]
NameOf = Callable[[str, int], str]
"""(clean FQN on this rank, lowest global rank that holds the parameter) -> name that is unique in the job."""

Rename = Callable[[str], str] | Mapping[str, str]
"""A function from a name to its replacement, or prefixes with theirs: at a load from the checkpoint's name to the model's."""

CAST_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that `weights_dtype` takes, and that are cast. Smaller floating dtypes mean nothing without their scales."""


def name_of_group(group: dist.ProcessGroup | None) -> str:
    """Return the name of a process group, equal on all ranks of the group. None stands for the group of all ranks."""
    known = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
    return str(getattr(known, "group_name", None))


Views = Sequence["View"] | Literal["hooks", "hub"]
"""Views that are given, or that each rank learns from its own modules."""


@dataclass(frozen=True)
class CallOptions(Arguments):
    """Options of every call in which ranks take part.

    A wrong value raises no error here: the call raises the same error on all ranks.

    Attributes:
        process_group: the ranks that make this call, if the model does not show them (None: all ranks of its wrappers).
        timeout: seconds to wait for a missing rank, or a timedelta (None: 600 seconds).
        bucket_nbytes: the memory for elements that move between ranks, in bytes: at least 4096.
        name_of: a function `(fqn, rank) -> name`, for models in which ranks call different parameters by the same name (the own
            expert of every rank is `experts.0`). The function gives each parameter its own name; `rank` is the lowest global
            rank that holds the parameter.
        on_replica_mismatch: the reaction to different state on ranks that hold the same part of a parameter, such as norms next
            to tensor parallel layers, which no wrapper keeps equal: "error", or "lowest_rank", which uses the state of the
            lowest rank and logs a warning. For a save it also counts for weights and buffers, BatchNorm statistics included. A
            load replaces all replicas, whatever this option says.
        views: Views (`fsdp_optim.View`) of live parameters that trainers have fused, stacked or interleaved. The call sees their
            canonical parts in their place: weights, moments and every other value of the parameter's shape under the names of
            the parts; scalars, such as `step`, in every part, which must have equal ones when they are loaded. A value of
            another shape is an error that names it. A View of a name that a model does not have changes nothing, if the model
            has the parts; one that names nothing on any rank is an error. "hooks": each rank learns them from the state-dict
            hooks of its own modules; a model without such hooks has its live names, so that one option serves a run with the
            fusion on and off; hooks that do anything but rename, cut or permute are an error that names them. "hub": as
            "hooks", by the names that transformers' `save_pretrained` gives the weights of its models.
    """

    process_group: dist.ProcessGroup | None = field(default=None, metadata=compared_as(name_of_group))
    timeout: float | timedelta | None = field(default=None, metadata=MAY_DIFFER)
    bucket_nbytes: int = BUCKET_NBYTES  # equal on all ranks: both ends of a message derive the message's size from it
    name_of: NameOf | None = field(default=None, metadata=MAY_DIFFER)
    on_replica_mismatch: OnReplicaMismatch = "error"
    views: Views = field(default=(), metadata=compared_as(text_of_views))

    def validate(self) -> None:
        """Raise an error for a wrong value. The call does this, on all ranks."""
        check_one_of("on_replica_mismatch", self.on_replica_mismatch, ("error", "lowest_rank"))
        check_callable("name_of", self.name_of)
        check_views(self.views)
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
class SaveOptions(CallOptions):
    """Options of `save` and `async_save`, besides the options of `CallOptions`.

    Attributes:
        strategy: "in_place": all ranks write into the same files. "per_rank_files": each rank first gets full tensors and then
            writes its own files, for file systems without sparse files. "auto" finds out which of the two the file system needs.
        max_file_size: the most bytes of a file with tensors, with its header. If the weights or the state exceed it, they are
            split into several files with an index, as Hugging Face does. A larger tensor gets a file of its own.
        checksums: write a table of checksums next to each file, so that readers can verify the bytes that they read.
        durable: return only when the bytes are on the disk. A save that replaces or removes another checkpoint is flushed to the
            disk before that in any case.
        allow_pickle: pickle values that are neither JSON nor tensors, in `state=`, in the optimizer's state, and in values of
            modules. False: such a value is an error that names it.
        progress: show a bar on the lowest rank. None: for long saves, a bar on a terminal, and lines in the log elsewhere.
        rename: the names in the checkpoint, of weights and optimizer state alike: a function from a name of the model to the
            name in the checkpoint, or a dict of prefixes, such as `{"": "model."}`; the longest prefix that fits is replaced. Two
            parameters of one name are an error. `LoadOptions.rename` is the inverse.
        weights_dtype: for export: torch.bfloat16, float16, float32 or float64, to which floating parameters and buffers are cast
            as they are written, in bounded memory. The live model, parameters and buffers of 8 bits or less, and the optimizer's
            state stay as they are. A number that would become infinite is an error. The checkpoint records the dtype; a load
            into other dtypes needs `cast=True`.
        fingerprint: make the fingerprint of the live model and optimizer, as `fingerprint` does, and keep it in the checkpoint: a
            load then proves that what it has loaded, at any world size, is what was saved, and `verify` compares the files.
            Weights that are cast have none. docs/benchmarks.md says what it costs.
        fused_state: of parameters that a View takes apart, and whose state has values of other shapes (factors, blocks): "error",
            or "keep": the state keeps the name of the fused parameter, beside canonical weights, and loads into that View alone.
        storage_options: the options of a URL: `endpoint_url`, `region_name`, credentials, and all options of boto3's client or of
            the fsspec file system; `part_nbytes`: the size of uploaded parts in bytes; `dead_after`: the seconds without sign of
            life after which a save is dead and its leftovers are removed (300). The options may differ between ranks.
        trace: a file of the lowest rank's machine for the timeline of the save: what each rank did when, as JSON that
            https://ui.perfetto.dev and chrome://tracing show. Give it on all ranks; a rank without it has no line. It is replaced
            by the next save, and a failure to write it is a warning.
    """

    strategy: Strategy = "auto"
    max_file_size: int = 4_000_000_000
    checksums: bool = True
    durable: bool = True
    allow_pickle: bool = False
    progress: bool | None = field(default=None, metadata=MAY_DIFFER)
    rename: Rename | None = field(default=None, metadata=compared_as(lambda value: value is not None))
    weights_dtype: torch.dtype | None = None
    fingerprint: bool = False
    fused_state: FusedState = "error"
    storage_options: Mapping[str, Any] | None = field(default=None, metadata=MAY_DIFFER, repr=False)
    trace: str | PathLike[str] | None = field(default=None, metadata=MAY_DIFFER)

    def validate(self) -> None:
        """Raise an error for a wrong value. The call does this, on all ranks."""
        super().validate()
        check_rename(self.rename)
        if not isinstance(self.trace, (str, PathLike, NoneType)) or self.trace == "":
            raise CheckpointError(f"trace must be the path of a file, not {self.trace!r}")
        check_one_of("weights_dtype", self.weights_dtype, (*CAST_DTYPES, None), CheckpointError)
        check_one_of("strategy", self.strategy, ("auto", "in_place", "per_rank_files"), CheckpointError)
        check_switch("fingerprint", self.fingerprint)
        check_one_of("fused_state", self.fused_state, ("error", "keep"))
        check_at_least("max_file_size", self.max_file_size, 1, " byte", CheckpointError)


@dataclass(frozen=True)
class LoadOptions(CallOptions):
    """Options of `load` and `resume`, besides the options of `CallOptions`.

    Attributes:
        param_groups: "saved": the optimizer has the saved groups, and gets their hyperparameters. "live": the groups and
            hyperparameters of the optimizer stay, and the state of every parameter is found by name.
        keep_hyperparameters: the hyperparameters whose current values stay, such as `("lr",)`.
        cast: allow weights and buffers with another floating dtype in the model than in the checkpoint. State keeps its saved
            dtype, unless the live optimizer has another dtype for it, or is an optimizer of torch.optim and the state had the
            saved dtype of the weights: then the state follows the weights. A number that would become infinite is an error.
        rename: the model's names, if the checkpoint has other names: a function from a stored name to the model's name, or a
            dict of prefixes, such as `{"model.": ""}`; the longest prefix that fits is replaced.
        verify: compare the checksums of all bytes that are read. Other libraries' checkpoints have no checksums.
        compare: at the end, read the checkpoint again and compare it bit for bit with the live model, optimizer and trees.
        fingerprint: at the end, where the save has kept a fingerprint, compare it with that of the live model and optimizer,
            without reading anything again: weights, the optimizer's state, tensors of `state=` that are loaded in place. What
            the load casts is not compared.
        allow_pickle: load pickled values, which can run any code, so only give True if you trust the author. With False, the
            model loads, and only the access to a pickled value in `result.state` raises CheckpointError. A pickled value of a
            module (`get_extra_state`) raises CheckpointError, or counts as missing with `strict=False`.
        progress: show a bar on the lowest rank. None: for long loads, a bar on a terminal, and lines in the log elsewhere.
        local_cache: a folder of this machine that keeps the bytes read from a URL, in blocks of 1 MiB, for later loads. Blocks
            are verified when they are used. The ranks on one machine may share the folder.
        silent: write no line about what was loaded: `result.receipt` has it, for a line of your own.
        storage_options: the options of a URL, as for `SaveOptions`.
    """

    param_groups: ParamGroups = "saved"
    keep_hyperparameters: Sequence[str] = field(default=(), metadata=compared_as(sorted))
    cast: bool = False
    rename: Rename | None = field(default=None, metadata=MAY_DIFFER)
    verify: bool = True
    compare: bool = False
    fingerprint: bool = True
    allow_pickle: bool = False
    progress: bool | None = field(default=None, metadata=MAY_DIFFER)
    local_cache: str | PathLike[str] | None = field(default=None, metadata=MAY_DIFFER)
    silent: bool = field(default=False, metadata=MAY_DIFFER)
    storage_options: Mapping[str, Any] | None = field(default=None, metadata=MAY_DIFFER, repr=False)

    def validate(self) -> None:
        """Raise an error for a wrong value. The call does this, on all ranks."""
        super().validate()
        check_one_of("param_groups", self.param_groups, ("saved", "live"))
        check_names("keep_hyperparameters", self.keep_hyperparameters, "keep_hyperparameters=['lr']")
        check_switch("compare", self.compare)
        check_switch("fingerprint", self.fingerprint)
        check_rename(self.rename)


@dataclass(frozen=True)
class ConvertOptions(Arguments):
    """Options of `convert`.

    Attributes:
        process_group: the ranks that make the call (None: the default group).
        timeout: seconds to wait for a missing rank, or a timedelta (None: 600 seconds).
        bucket_nbytes: the most bytes of elements that each process holds at a time, at least 16 MiB. The description of the
            checkpoint (names, shapes) comes on top, and for each thread one tensor, if torch files have compressed tensors or
            tensors that are not in row-major order.
        param_names: the FQNs of the optimizer's parameters in the order of their ids, for checkpoints that have ids without
            names.
        durable: return only when the bytes are on the disk.
        max_file_size: the most bytes of a file with tensors, as for `SaveOptions`.
        allow_pickle: read and write values that need pickle, which can run any code of the author of the source.
        progress: show a bar on the lowest rank. None: for long conversions, a bar on a terminal, and lines in the log elsewhere.
        views: Views (`fsdp_optim.View`) of fused parameters in the source, which the new checkpoint has as their parts; or
            inverse ones (`View.inverse`) of parts in the source, which it has as the parameter that they make: weights,
            state and param groups. For `convert` alone. A View that changes nothing is an error.
        storage_options: the options of a URL, as for `SaveOptions`, for both places that are URLs.
    """

    process_group: dist.ProcessGroup | None = field(default=None, metadata=compared_as(name_of_group))
    timeout: float | timedelta | None = field(default=None, metadata=MAY_DIFFER)
    bucket_nbytes: int = CONVERT_NBYTES
    param_names: Sequence[str] | None = None
    durable: bool = True
    max_file_size: int = 4_000_000_000
    allow_pickle: bool = False
    progress: bool | None = field(default=None, metadata=MAY_DIFFER)
    views: Sequence[View | InverseView] = field(default=(), metadata=compared_as(text_of_list))
    storage_options: Mapping[str, Any] | None = field(default=None, metadata=MAY_DIFFER, repr=False)

    def validate(self) -> None:
        """Raise an error for a wrong value. The call does this, on all ranks."""
        seconds_of(self.timeout)
        check_views(self.views, of_checkpoints=True)
        check_at_least("bucket_nbytes", self.bucket_nbytes, LEAST_CONVERT_NBYTES, " bytes (16 MiB)", CheckpointError)
        check_at_least("max_file_size", self.max_file_size, 1, " byte", CheckpointError)
        names = self.param_names if isinstance(self.param_names, (list, tuple, NoneType)) else [None]
        if not all(isinstance(name, str) for name in names or ()):
            raise StateError(
                f"param_names must be a list of FQNs in the order of the optimizer's ids, not {self.param_names!r}"
            )


@dataclass(frozen=True)
class ManagerOptions(SaveOptions):
    """Options of a `CheckpointManager`, besides the options of `SaveOptions`.

    `rename` and `weights_dtype` stay at their defaults, because a manager's checkpoints are for its own resume.

    Attributes:
        rng: save and load the random states of each rank: of Python, numpy, torch and the accelerator. New ranks keep their own.
        signals: if any rank has received one of these signals, the ranks save at the end of a step and wait for the save, and
            `should_stop` is True. The handlers, which only the main thread can install, call the previous handlers, and `close`
            restores these. (): no handlers.
        agree_every: the number of steps after which the ranks agree whether any of them has received a signal, or its save has
            failed. None: the lowest rank chooses it: about once a second, with more than 20 ranks at most every 10 s. They agree
            at a step that saves in any case.
        best: whether the lowest ("min") or the highest ("max") metric is the best, for `keep_best`.
    """

    rng: bool = True
    signals: Collection[int] = field(
        default=(signal.SIGTERM,), metadata=compared_as(lambda numbers: sorted(map(int, numbers)))
    )
    agree_every: int | None = None
    best: Best = "min"

    def validate(self) -> None:
        """Raise an error for a wrong value. The call does this, on all ranks."""
        super().validate()
        for name in ("rename", "weights_dtype"):
            if getattr(self, name) is not None:
                raise StateError(
                    f"{name}={getattr(self, name)!r} cannot be an option of a CheckpointManager: leave it out"
                )
        check_switch("rng", self.rng)
        check_one_of("best", self.best, ("min", "max"))
        if self.agree_every is not None:
            check_at_least("agree_every", self.agree_every, 1, " step")
        known = {int(number) for number in signal.Signals}
        numbers = self.signals if isinstance(self.signals, (list, tuple, set, frozenset)) else [None]
        if not all(is_integer(number) and number in known for number in numbers):
            raise StateError(f"signals must be a list of signals, as in [signal.SIGTERM], not {self.signals!r}")


# ------------------------------------------------------------------------------- the arguments of a call, with its options


def fields_of(kind: type[Arguments], options: object) -> dict[str, Any]:
    """Return the fields of the options of a call, for its arguments. Options of a wrong type become `wrong_options`."""
    if isinstance(options, kind):
        return {option.name: getattr(options, option.name) for option in fields(kind)}
    given = options.__name__ if isinstance(options, type) else type(options).__name__
    return {"wrong_options": f"options must be a {kind.__name__}, as in options={kind.__name__}(...), not {given}"}


@dataclass(frozen=True)
class CallArguments(CallOptions):
    """The options of a call, and how it treats parameters. `fused`: the names in the checkpoint that it reads through Views."""

    collect: Collect = "wrapper"
    strict: bool = True
    param_groups: ParamGroups = "saved"
    fused: tuple[str, ...] = field(default=(), metadata=MAY_DIFFER)
    wrong_options: str = field(default="", metadata=MAY_DIFFER)

    @classmethod
    def of(cls, options: CallOptions, **arguments: Any) -> CallArguments:
        """Return the arguments of a call that was given these options."""
        return cls(**fields_of(CallOptions, options), **arguments)

    def validate(self) -> None:
        if self.wrong_options:
            raise StateError(self.wrong_options)
        super().validate()
        check_one_of("collect", self.collect, ("wrapper", "all"))
        check_one_of("param_groups", self.param_groups, ("saved", "live"))


@dataclass(frozen=True)
class GatherArguments(Arguments):
    """The arguments of gather and iterate."""

    call: CallArguments
    recipient_rank: int | None = 0
    key_by: KeyBy = "id"
    weights: WhichWeights = "all"

    def validate(self) -> None:
        super().validate()
        check_one_of("key_by", self.key_by, ("id", "name"))
        check_one_of("weights", self.weights, ("all", "trainable"))
        if self.recipient_rank is not None:
            check_rank("recipient_rank", self.recipient_rank)


@dataclass(frozen=True)
class ScatterArguments(Arguments):
    """The arguments of scatter."""

    call: CallArguments
    source_rank: int = 0

    def validate(self) -> None:
        super().validate()
        check_rank("source_rank", self.source_rank)
