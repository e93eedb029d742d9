"""The results of a save and a load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Saved:
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


@dataclass(frozen=True)
class LoadSummary:
    """Facts about a load.

    Attributes:
        num_tensors: the number of loaded tensors.
        nbytes: the bytes that this rank read.
        absent: the FQNs of the optimizer's parameters without state in the checkpoint.
        world_size: the number of ranks that saved.
        step: the `step` that was given to `save`.
    """

    num_tensors: int = 0
    nbytes: int = 0
    absent: tuple[str, ...] = ()
    world_size: int = 0
    step: int | None = None


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
    """

    path: Path | str
    step: int | None
    world_size: int
    nbytes: int
    complete: bool
    reason: str = ""
    metric: float | None = None
