"""The result of a load: the values of the trainer, and facts about the load."""

from __future__ import annotations

import logging
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.results import LoadSummary
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.protocols import COMMON, Format, Reader, rank_extra_name
from fsdp_optim.options import LoadOptions
from fsdp_optim.storage.base import Store

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class OfAllRanks:
    """The place of the `per_rank_extra` of all ranks, which is read on demand, because most ranks need only their own."""

    store: Store
    identity: Mapping[str, Any]
    verify: bool
    allow_pickle: bool
    format: Format | None

    def read(self) -> tuple[Any, ...]:
        with closing(open_checkpoint(self.store, verify=self.verify, format=self.format)) as checkpoint:
            if checkpoint.index.identity != self.identity:
                raise CheckpointError(
                    f"{self.store.where}: was replaced by another checkpoint after the load: read all_ranks before the next save"
                )
            names = [rank_extra_name(position) for position in range(checkpoint.index.facts.world_size)]
            extras = [checkpoint.index.extras.get(name) for name in names]
            values = [extra.decoded(allow_pickle=self.allow_pickle) if extra is not None else None for extra in extras]
        return tuple(values) if any(value is not None for value in values) else ()


class Guarded(dict[str, Any]):
    """A dict that raises CheckpointError on access to a value that is a pickle and not allowed, but not on other values."""

    def __getitem__(self, key: str) -> Any:
        return _checked(super().__getitem__(key))

    def __iter__(self) -> Iterator[str]:  # makes dict(guarded) access each value, instead of copying the internal ones
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        return _checked(super().get(key, default))

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self[key]  # raises before the value is removed
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return _checked(super().setdefault(key, default))

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return ItemsView(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)


class Restored(Guarded):
    """The saved `extra` as a dict, with facts about the load as attributes.

    Attributes:
        missing: FQNs that the model or the optimizer has and the checkpoint does not have (`strict=False`).
        unexpected: FQNs that the checkpoint has and the model or the optimizer does not have (`strict=False`).
        unmatched_hyperparameters, unmatched_values: names that only one of two optimizers of different classes has
            (`strict=False`).
        summary: the numbers of tensors and bytes that were loaded, and more.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unmatched_hyperparameters: tuple[str, ...] = ()
    unmatched_values: tuple[str, ...] = ()
    summary: LoadSummary = LoadSummary()
    _per_rank: Any = None
    _of_all: OfAllRanks | None = None
    _all: tuple[Any, ...] | None = None

    def __repr__(self) -> str:
        passed_over = {
            name: getattr(self, name)
            for name in ("missing", "unexpected", "unmatched_hyperparameters", "unmatched_values")
            if getattr(self, name)
        }
        facts = "".join(f", {name}={value!r}" for name, value in {**passed_over, "summary": self.summary}.items())
        return f"Restored({dict.__repr__(self)}{facts})"

    @property
    def per_rank(self) -> Any:
        """This rank's `per_rank_extra`; rank 0's if this rank had none at the save."""
        return _checked(self._per_rank)

    @property
    def all_ranks(self) -> tuple[Any, ...]:
        """The `per_rank_extra` of every rank that saved, in the order of these ranks; empty if none was saved.

        The first access reads them from the checkpoint, on this process alone. Raises CheckpointError if another checkpoint has
        replaced the loaded one.
        """
        if self._all is None:
            self._all = self._of_all.read() if self._of_all is not None else ()
        return self._all


def _checked(value: Any) -> Any:
    if isinstance(value, Withheld):
        raise CheckpointError(value.why)
    return value


def read_extras(
    checkpoint: Reader, store: Store, position: int, options: LoadOptions, format: Format | None
) -> Restored:
    """The values of the trainer for one rank. `position`: its index among the loading ranks. `store`: for later reads."""

    def read(name: str) -> Any:
        return extras[name].decoded_each(allow_pickle=options.allow_pickle)

    def guarded(value: Any) -> Any:
        withheld = isinstance(value, dict) and any(isinstance(item, Withheld) for item in value.values())
        return Guarded(value) if withheld else value

    extras, mine, first = checkpoint.index.extras, rank_extra_name(position), rank_extra_name(0)
    extra = read(COMMON) if COMMON in extras else None
    restored = Restored(extra if isinstance(extra, dict) else {} if extra is None else {"extra": extra})
    restored._of_all = OfAllRanks(store, checkpoint.index.identity, options.verify, options.allow_pickle, format)
    if mine in extras:
        restored._per_rank = guarded(read(mine))
    elif first in extras and (of_first := read(first)) is not None:
        log.warning(
            "rank %d had no per_rank_extra when %s was saved by %d ranks, so it gets that of rank 0: give this rank a random "
            "state of its own (restored.all_ranks has the per_rank_extra of every rank)",
            position,
            checkpoint.index.where,
            checkpoint.index.facts.world_size,
        )
        restored._per_rank = guarded(of_first)
    return restored
