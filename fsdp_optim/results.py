"""The results of the public calls: frozen records, with a representation that fits on a screen and no other code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_optim.errors import counted_noun, shortened
from fsdp_optim.saying import LoadReceipt

_MOST_SHOWN = 4  # names of a list


@dataclass(frozen=True)
class SaveResult:
    """The result of a save.

    Attributes:
        path: the path of the checkpoint.
        num_tensors: the number of saved tensors.
        nbytes: the bytes of all tensors.
        nbytes_written: the bytes that this rank wrote.
        absent: the FQNs of the optimizer's parameters without state.
    """

    path: Path | str
    num_tensors: int
    nbytes: int
    nbytes_written: int
    absent: tuple[str, ...]

    def __repr__(self) -> str:
        return _shown(
            self,
            path=repr(str(self.path)),
            num_tensors=self.num_tensors,
            nbytes=self.nbytes,
            nbytes_written=self.nbytes_written,
            absent=_names(self.absent),
        )


@dataclass(frozen=True)
class AverageResult:
    """The result of `average`.

    Attributes:
        path: the path of the new checkpoint.
        sources: the checkpoints that were averaged, in their order.
        weights: the share of each in the average; their sum is 1.
        num_tensors: the number of tensors of the new checkpoint.
        num_averaged: how many of them are averages. The others are integers, flags and the like, of the last checkpoint.
        nbytes: the bytes of all tensors.
        differing: what was not averaged and is not the same in all checkpoints, so that the last one decided: the FQNs of integer
            and bool tensors; numbers of the optimizer, as in `weight:step`; and hyperparameters, as in `lr of param group 0`.
    """

    path: Path | str
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    num_tensors: int
    num_averaged: int
    nbytes: int
    differing: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return _shown(
            self,
            path=repr(str(self.path)),
            weights=self.weights,
            num_tensors=self.num_tensors,
            num_averaged=self.num_averaged,
            nbytes=self.nbytes,
            differing=_names(self.differing),
        )


@dataclass(frozen=True)
class ThinResult:
    """The result of `thin`.

    Attributes:
        path: the path or URL of the checkpoint.
        freed_nbytes: the bytes of the files that were removed; 0 where there was no optimizer to remove.
    """

    path: Path | str
    freed_nbytes: int


@dataclass(frozen=True)
class LoadResult:
    """The result of a load.

    Attributes:
        state: everything that was saved by `state=`, by name, as this rank has it: a value of `per_rank` is this rank's own, and
            so are the random states that a manager has saved, under the name "fsdp_optim.rng". Access to a value that is a pickle
            and not allowed raises CheckpointError.
        step: the `step` that was given to `save`.
        world_size: the number of ranks that saved.
        missing_keys: what the model, the optimizer or `state=` has and the checkpoint does not have, and keeps its live value:
            FQNs, and names as `state['scheduler']` (`strict=False`); and, whatever `strict` says, values of `per_rank` that this
            rank did not get, because there were fewer ranks at the save, or because an object's `reshard` gave it none.
        unexpected_keys: what the checkpoint has and the model, the optimizer or `state=` does not have (`strict=False`).
        unmatched_hyperparameters, unmatched_values: names that only one of two optimizers of different classes has
            (`strict=False`).
        absent: the FQNs of the optimizer's parameters without state in the checkpoint.
        begun_anew: the FQNs of the parts of fused parameters that begin without state, because the checkpoint has state of some
            of the parts alone, or state that cannot be cut into them (`strict=False`).
        num_tensors, nbytes: the number of loaded tensors, and the bytes that this rank read.
        receipt: on the lowest rank, what the load has done; as text the line that says it. None on the others.
        read_all_ranks: reads what `all_ranks` returns.
    """

    state: dict[str, Any]
    step: int | None = None
    world_size: int = 0
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    unmatched_hyperparameters: tuple[str, ...] = ()
    unmatched_values: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    begun_anew: tuple[str, ...] = ()
    num_tensors: int = 0
    nbytes: int = 0
    receipt: LoadReceipt | None = field(default=None, repr=False, compare=False)
    read_all_ranks: Callable[[], tuple[Mapping[str, Any], ...]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def all_ranks(self) -> tuple[Mapping[str, Any], ...]:
        """The values of `per_rank` of every rank that saved, in the order of these ranks; empty if none was saved.

        The first access reads them from the checkpoint, on this process alone. Raises CheckpointError if another checkpoint has
        replaced the loaded one.
        """
        return self.read_all_ranks()

    def __repr__(self) -> str:
        """Show the names in the state, because their values may be large."""
        return _shown(
            self,
            state=f"<{', '.join(map(repr, self.state.keys())) or 'nothing'}>",
            step=self.step,
            world_size=self.world_size,
            missing_keys=_names(self.missing_keys),
            unexpected_keys=_names(self.unexpected_keys),
            unmatched_hyperparameters=_names(self.unmatched_hyperparameters),
            unmatched_values=_names(self.unmatched_values),
            absent=_names(self.absent),
            begun_anew=_names(self.begun_anew),
            num_tensors=self.num_tensors,
            nbytes=self.nbytes,
        )


@dataclass(frozen=True)
class Incompatible:
    """The differences that `strict=False` has passed over.

    Attributes:
        missing_keys: FQNs that the full dict does not have, and that keep their live state.
        unexpected_keys: FQNs that the optimizer does not have, and that were not loaded.
        unmatched_hyperparameters, unmatched_values: names that only one of two optimizers of different classes has. Saved values
            with such names were left out, live values stay.
        begun_anew: the FQNs of the parts of fused parameters that begin without state, because the full dict has state of some of
            the parts alone.
    """

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    unmatched_hyperparameters: tuple[str, ...] = ()
    unmatched_values: tuple[str, ...] = ()
    begun_anew: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there is any difference."""
        return any(vars(self).values())

    def __repr__(self) -> str:
        return _shown(self, **{name: _names(value) for name, value in vars(self).items()})


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a folder, as `checkpoints` lists it.

    Attributes:
        path: a Path in a folder, a URL (str) under a URL.
        step: the `step` that was given to `save`; None without one, or where it cannot be read.
        world_size: the number of ranks that saved; 0 where it cannot be read.
        nbytes: the bytes of all files but the manifest; 0 where they cannot be read.
        complete: whether all files are there in their sizes. Their bytes are verified by a load.
        reason: why the checkpoint is not complete, or cannot be read just now.
        metric: the `metric` that was given to `CheckpointManager.step`.
        saved_at: the time of the save in seconds since the epoch, by the clock of the machine that saved; None where it cannot
            be read.
        thinned: whether `thin` has removed its optimizer.
        wrapper: what wrapped the saved model, such as "FSDP2"; empty for a plain model, and where an older version saved.
    """

    path: Path | str
    step: int | None
    world_size: int
    nbytes: int
    complete: bool
    reason: str = ""
    metric: float | None = None
    saved_at: float | None = None
    thinned: bool = False
    wrapper: str = ""


@dataclass(frozen=True)
class VerifyResult:
    """The result of `verify`, which has found nothing wrong.

    Attributes:
        path, format, num_tensors, nbytes: the place, the name of its format, the tensors that were read, and their bytes.
        has_checksums: whether every byte of the tensors was compared with a checksum: this library's own, or the CRC32 that files
            of `torch.save` have. False: there are none, and changed bytes show in `num_proven` tensors alone.
        num_proven: tensors with the fingerprints that the save has made of its live values.
        num_extras: the number of other values that were read: of the trainer, of ranks and of modules.
    """

    path: str
    format: str
    num_tensors: int
    nbytes: int
    has_checksums: bool
    num_extras: int
    num_proven: int = 0


@dataclass(frozen=True)
class PruneResult:
    """The result of `prune`.

    Attributes:
        root: the folder of checkpoints.
        removed: the checkpoints that were removed, or would be with `dry_run=True`, the newest first.
        kept: the complete checkpoints that stay, the newest first.
        passed_over: damaged and unreadable checkpoints, and symbolic links: they neither count nor go.
        not_removed: the checkpoints that no rule keeps and that could not be removed; the log says why.
        nbytes: the bytes of the removed checkpoints.
        dry_run: whether nothing was removed.
    """

    root: str
    removed: tuple[Path | str, ...]
    kept: tuple[Path | str, ...]
    passed_over: tuple[Path | str, ...]
    not_removed: tuple[Path | str, ...]
    nbytes: int
    dry_run: bool


@dataclass(frozen=True)
class CopyResult:
    """The result of `copy`.

    Attributes:
        path: the new checkpoint.
        num_files, nbytes: the files that were copied, with the manifest, and their bytes.
        has_checksums: whether all bytes of the tensors were compared with their checksums; False: the save wrote none.
        left_out: files that somebody had put into the folder under names that no checkpoint has, and that were not copied.
    """

    path: Path | str
    num_files: int
    nbytes: int
    has_checksums: bool
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` has seen at a path.

    Attributes:
        path: the path or URL.
        kind: "checkpoint", "root" (a folder of checkpoints), "unfinished" (the folder of a save that has not ended), or "none".
        complete: whether everything is there; of a root, whether all its checkpoints are complete. Bytes are not compared.
        problems: what is missing or damaged, a sentence for each.
        load: the line of Python that loads it; empty where nothing can be loaded.
        format, step, world_size, has_optim, nbytes: of a checkpoint, as for `inspect`; None, 0 and empty where unknown.
        checkpoints: the checkpoints of a root, the newest first.
    """

    path: str
    kind: str
    complete: bool
    problems: tuple[str, ...] = ()
    load: str = ""
    format: str = ""
    step: int | None = None
    world_size: int = 0
    has_optim: bool | None = None
    nbytes: int = 0
    checkpoints: tuple[CheckpointInfo, ...] = ()


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        dtype: torch's name of the dtype.
        shape: the shape.
        nbytes: the number of bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class GroupInfo:
    """One param group of a checkpoint.

    Attributes:
        hyperparameters: their values by name.
        params: the parameters by FQN, or by id where there are no names.
    """

    hyperparameters: Mapping[str, Any]
    params: tuple[Any, ...]


@dataclass(frozen=True)
class CheckpointSummary:
    """The contents of a checkpoint, without the elements of its tensors, as `inspect` reads them.

    Attributes:
        path, format: the path or URL of the checkpoint, and the name of its format.
        about: facts about the save, for users.
        world_size, step: the number of ranks that saved (0 if unknown), and the `step` that was given to `save`.
        weights: which of the model's weights were saved: "all", "trainable" or "none"; None if unknown.
        weights_dtype: torch's name of the dtype to which the save cast floating weights; None if it did not, or if unknown.
        model, aliases: the weights and buffers by FQN, and other names of these, each with the FQN.
        has_optim: whether an optimizer was saved.
        state: the optimizer's state by FQN, or by id where there are no names: tensors, and the texts of other values.
        groups: its param groups.
        optimizer_class: the name of its class, or one for each group; empty if unknown.
        extras: the names of other values, of the trainer and of modules: "common", "model", and "rank-00000" and so on.
        trees: the tensors in trees of `state=`, by the names on their path, joined by dots.
    """

    path: str
    format: str
    about: Mapping[str, str]
    world_size: int
    step: int | None
    weights: str | None
    weights_dtype: str | None
    model: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]
    has_optim: bool
    state: Mapping[Any, Mapping[Any, TensorInfo | str]]
    groups: tuple[GroupInfo, ...]
    optimizer_class: tuple[str, ...]
    extras: tuple[str, ...]
    trees: Mapping[str, TensorInfo] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Show the figures, because a tree of all tensors would fill the screen."""
        values = [value for by_name in self.state.values() for value in by_name.values()]
        return _shown(
            self,
            path=repr(self.path),
            format=repr(self.format),
            world_size=self.world_size,
            step=self.step,
            weights=repr(self.weights),
            model=f"<{counted_noun(len(self.model), 'tensor')}>",
            state=f"<{counted_noun(len(values), 'value')} of {counted_noun(len(self.state), 'parameter')}>",
            nbytes=self.nbytes,
            extras=self.extras,
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        trees = (self.model, self.trees, *self.state.values())
        return sum(value.nbytes for tree in trees for value in tree.values() if isinstance(value, TensorInfo))


def _names(names: tuple[str, ...]) -> str | None:
    """Names in a representation; None where there are none."""
    return f"<{shortened(names, _MOST_SHOWN)}>" if names else None


def _shown(result: object, **parts: object) -> str:
    """Return a representation with these parts, except parts that are None."""
    texts = [f"{name}={value}" for name, value in parts.items() if value is not None]
    return f"{type(result).__name__}({', '.join(texts)})"
