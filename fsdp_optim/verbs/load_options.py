"""What a load is asked for, and what it says when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_optim.errors import CheckpointError
from fsdp_optim.verbs.call import Options

Check = Literal["bitwise"]


@dataclass(frozen=True)
class LoadOptions:
    """What load accepts besides the model and the optimizer."""

    call: Options
    keep: Sequence[str] = ()
    verify: bool = True
    check: Check | None = None
    allow_pickle: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.check not in (None, "bitwise"):
            raise CheckpointError(f"check has to be None or 'bitwise', not {self.check!r}")


@dataclass(frozen=True)
class LoadSummary:
    """What was loaded: tensors, the bytes that this rank read, FQNs without optimizer state, how many ranks saved it."""

    num_tensors: int = 0
    nbytes: int = 0
    absent: tuple[str, ...] = ()
    world_size: int = 0


class Restored(dict[str, Any]):
    """The saved `extra`, and what else came back.

    Attributes:
        per_rank: this rank's `per_rank_extra`; rank 0's where this rank had none when it was saved.
        missing, left_out: FQNs that the model or the optimizer has and the checkpoint has not, and the other way round
            (`strict=False`).
        summary: what was loaded.
    """

    per_rank: Any = None
    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    summary: LoadSummary = LoadSummary()
