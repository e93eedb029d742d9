"""What a save is asked for, and what it says when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fsdp_optim.errors import CheckpointError
from fsdp_optim.verbs.asked import MAY_DIFFER, Asked, check_at_least, check_one_of, said_as
from fsdp_optim.verbs.call import Options

Strategy = Literal["auto", "in_place", "per_rank_files"]

_MOST_STEPS = 1 << 63


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
class Saved:
    """What was saved: `nbytes` of tensors in all, and those that this rank wrote; FQNs without optimizer state."""

    path: Path
    num_tensors: int
    nbytes: int
    nbytes_written: int
    absent: tuple[str, ...]
