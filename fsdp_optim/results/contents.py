"""What a checkpoint contains, as `checkpoints` lists it and `inspect` reads it, without elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_optim.errors import counted_noun
from fsdp_optim.results.shown import shown


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
        return shown(
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
