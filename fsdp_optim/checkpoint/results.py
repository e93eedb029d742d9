"""What a save and a load say when they are done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Saved:
    """What was saved: `nbytes` of tensors in all, and those that this rank wrote; FQNs without optimizer state."""

    path: Path
    num_tensors: int
    nbytes: int
    nbytes_written: int
    absent: tuple[str, ...]


@dataclass(frozen=True)
class LoadSummary:
    """What was loaded: tensors, the bytes that this rank read, FQNs without optimizer state, how many ranks saved it.

    `step`: as it was given to save.
    """

    num_tensors: int = 0
    nbytes: int = 0
    absent: tuple[str, ...] = ()
    world_size: int = 0
    step: int | None = None
