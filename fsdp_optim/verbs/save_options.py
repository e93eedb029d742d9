"""What a save is asked for, and what it says when it is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fsdp_optim.errors import CheckpointError
from fsdp_optim.verbs.call import Options

Strategy = Literal["auto", "in_place", "per_rank_files"]


@dataclass(frozen=True)
class SaveOptions:
    """What save accepts besides the model and the optimizer."""

    call: Options
    extra: Any = None
    per_rank_extra: Any = None
    overwrite: bool = False
    strategy: Strategy = "auto"
    max_file_size: int = 4_000_000_000
    checksums: bool = True
    durable: bool = True
    keep_last: int | None = None
    allow_pickle: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.strategy not in ("auto", "in_place", "per_rank_files"):
            raise CheckpointError(f"strategy has to be 'auto', 'in_place' or 'per_rank_files', not {self.strategy!r}")
        if self.max_file_size < 1:
            raise CheckpointError(f"max_file_size has to be at least 1 byte, not {self.max_file_size}")
        if self.keep_last is not None and self.keep_last < 1:
            raise CheckpointError(f"keep_last has to be at least 1, not {self.keep_last}")


@dataclass(frozen=True)
class Saved:
    """What was saved: `nbytes` of tensors in all, and those that this rank wrote; FQNs without optimizer state."""

    path: Path
    num_tensors: int
    nbytes: int
    nbytes_written: int
    absent: tuple[str, ...]
