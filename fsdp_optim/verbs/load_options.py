"""What a load is asked for, and what it says when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.verbs.asked import MAY_DIFFER, Asked, check_one_of, said_as
from fsdp_optim.verbs.call import Options

Check = Literal["bitwise"]


@dataclass(frozen=True)
class LoadOptions(Asked):
    """What load accepts besides the model and the optimizer."""

    call: Options
    keep: Sequence[str] = field(default=(), metadata=said_as(sorted))
    verify: bool = True
    check: Check | None = None
    allow_pickle: bool = False
    progress: bool | None = field(default=None, metadata=MAY_DIFFER)
    cast: bool = False

    def validate(self) -> None:
        super().validate()
        check_one_of("check", self.check, (None, "bitwise"), CheckpointError)
        names = self.keep if isinstance(self.keep, (list, tuple, set, frozenset)) else [None]
        if not all(isinstance(name, str) for name in names):
            raise StateError(f"keep has to be a list of names of hyperparameters, as in keep=['lr'], not {self.keep!r}")


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
