"""What load gives back: the trainer's own values, and what was loaded."""

from __future__ import annotations

import logging
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from fsdp_optim.checkpoint.formats import open_checkpoint
from fsdp_optim.checkpoint.results import LoadSummary
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base import COMMON, Format, Reader, of_rank
from fsdp_optim.formats.codec import Withheld
from fsdp_optim.options import LoadOptions
from fsdp_optim.storage.base import Store

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class OfAllRanks:
    """Where the `per_rank_extra` of every rank is, to be read when it is asked for: most ranks need only their own."""

    store: Store
    identity: Mapping[str, Any]
    verify: bool
    allow_pickle: bool
    format: Format | None

    def read(self) -> tuple[Any, ...]:
        with closing(open_checkpoint(self.store, verify=self.verify, format=self.format)) as checkpoint:
            if checkpoint.identity != self.identity:
                raise CheckpointError(
                    f"{self.store.where}: was replaced by another checkpoint after it was loaded: read all_ranks before that"
                )
            names = [of_rank(position) for position in range(checkpoint.world_size)]
            files = [
                checkpoint.extra(name, verify=self.verify) if name in checkpoint.extras else None for name in names
            ]
        if not any(files):
            return ()
        return tuple(file.decoded(allow_pickle=self.allow_pickle) if file is not None else None for file in files)


class Guarded(dict[str, Any]):
    """A dict in which a pickled value that nobody has allowed raises CheckpointError when it is asked for; the rest is there."""

    def __getitem__(self, key: str) -> Any:
        return _given(super().__getitem__(key))

    def __iter__(self) -> Iterator[str]:  # so that dict(guarded) asks for each value, instead of copying what is inside
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        return _given(super().get(key, default))

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self[key]  # raises while it is still there
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return _given(super().setdefault(key, default))

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return ItemsView(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)


class Restored(Guarded):
    """The saved `extra`, and what else came back.

    Attributes:
        missing, unexpected: FQNs that the model or the optimizer has and the checkpoint does not have, and the other way round
            (`strict=False`).
        unmatched_hyperparameters, unmatched_values: names that only one side has, where the optimizers' classes differ
            (`strict=False`).
        summary: what was loaded.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unmatched_hyperparameters: tuple[str, ...] = ()
    unmatched_values: tuple[str, ...] = ()
    summary: LoadSummary = LoadSummary()
    _per_rank: Any = None
    _of_all: OfAllRanks | None = None
    _all: tuple[Any, ...] | None = None

    @property
    def per_rank(self) -> Any:
        """This rank's `per_rank_extra`; rank 0's where this rank had none when it was saved."""
        return _given(self._per_rank)

    @property
    def all_ranks(self) -> tuple[Any, ...]:
        """The `per_rank_extra` of every rank that saved, by its place among them; empty where none was saved.

        Read from the checkpoint when it is first asked for, on this process alone. Raises CheckpointError where another
        checkpoint has replaced it since.
        """
        if self._all is None:
            self._all = self._of_all.read() if self._of_all is not None else ()
        return self._all


def _given(value: Any) -> Any:
    if isinstance(value, Withheld):
        raise CheckpointError(value.why)
    return value


def read_extras(
    checkpoint: Reader, store: Store, position: int, options: LoadOptions, format: Format | None
) -> Restored:
    """The trainer's values for the rank at this place among those that load. `store`: where the checkpoint is found again."""

    def read(name: str) -> Any:
        return checkpoint.extra(name, verify=options.verify).decoded_each(allow_pickle=options.allow_pickle)

    def guarded(value: Any) -> Any:
        withheld = isinstance(value, dict) and any(isinstance(item, Withheld) for item in value.values())
        return Guarded(value) if withheld else value

    mine, first, names = of_rank(position), of_rank(0), checkpoint.extras
    extra = read(COMMON) if COMMON in names else None
    restored = Restored(extra if isinstance(extra, dict) else {} if extra is None else {"extra": extra})
    restored._of_all = OfAllRanks(store, checkpoint.identity, options.verify, options.allow_pickle, format)
    if mine in names:
        restored._per_rank = guarded(read(mine))
    elif first in names:
        log.warning(
            "rank %d had no per_rank_extra when %s was saved by %d ranks: it gets rank 0's, so give it a random state of its own "
            "(restored.all_ranks has what every rank saved)",
            position,
            checkpoint.where,
            checkpoint.world_size,
        )
        restored._per_rank = guarded(read(first))
    return restored
