"""The results of saves and loads, and of a checkpoint that is thinned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_optim.results.shown import names_shown, shown
from fsdp_optim.saying import LoadReceipt


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
        return shown(
            self,
            path=repr(str(self.path)),
            num_tensors=self.num_tensors,
            nbytes=self.nbytes,
            nbytes_written=self.nbytes_written,
            absent=names_shown(self.absent),
        )


@dataclass(frozen=True)
class LoadResult:
    """The result of a load.

    Attributes:
        state: everything that was saved by `state=`, by name, as this rank has it: a value of `per_rank` is this rank's own, and
            so are the random states that a manager has saved, under the name "fsdp_optim.rng". Access to a value that is a pickle
            and not allowed raises CheckpointError. The state of an object is no copy: what the object changes in it shows here.
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
        return shown(
            self,
            state=f"<{', '.join(map(repr, self.state.keys())) or 'nothing'}>",
            step=self.step,
            world_size=self.world_size,
            missing_keys=names_shown(self.missing_keys),
            unexpected_keys=names_shown(self.unexpected_keys),
            unmatched_hyperparameters=names_shown(self.unmatched_hyperparameters),
            unmatched_values=names_shown(self.unmatched_values),
            absent=names_shown(self.absent),
            begun_anew=names_shown(self.begun_anew),
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
        return shown(self, **{name: names_shown(value) for name, value in vars(self).items()})


@dataclass(frozen=True)
class ThinResult:
    """The result of `thin`.

    Attributes:
        path: the path or URL of the checkpoint.
        freed_nbytes: the bytes of the files that were removed; 0 where there was no optimizer to remove.
    """

    path: Path | str
    freed_nbytes: int
