"""What a load is asked for, and what it says when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
