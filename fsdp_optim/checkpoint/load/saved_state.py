"""The values of the trainer in a checkpoint, as one rank has them: what `state=` of a save contained, by name."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.retry import retry_if_replaced
from fsdp_optim.checkpoint.common.run_state import RANDOM, RESERVED
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.protocols import COMMON, Format, Reader, rank_extra_name
from fsdp_optim.storage.base import Store

log = logging.getLogger("fsdp_optim")

_EXTRA, _PER_RANK_EXTRA = "extra", "per_rank_extra"
"""The names of values that were saved without names, by older versions and by other libraries."""

_OLD_STATE, _OLD_RANK, _OLD_RANDOM = "state", "rank", "random"
"""The keys under which older versions of a CheckpointManager saved the state of objects, for all ranks and for each rank."""


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


@dataclass(frozen=True)
class SavedState:
    """The values of the trainer for one rank. A value that is a pickle and not allowed is `Withheld`.

    Attributes:
        common: the values that all ranks have in common.
        own: this rank's own values.
        absent: the names of values that each saving rank has of its own, and this rank lacks, because fewer ranks saved.
        random: this rank's random states; None: it has none.
        has_random: whether any rank has random states.
        read_all_ranks: reads the own values of every rank.
        num_ranks: the number of ranks that have values of their own.
        read_each: reads them as `own` has them, from the checkpoint that is open.
        kept, resharded: after `resharded`, the names of objects of this rank that keep their state, because they could not be
            resharded, and those of objects that got a state on all ranks.
    """

    common: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    random: Any = None
    has_random: bool = False
    read_all_ranks: Callable[[], tuple[Mapping[str, Any], ...]] = tuple
    num_ranks: int = 0
    read_each: Callable[[], tuple[Mapping[str, Any], ...]] = tuple
    kept: tuple[str, ...] = ()
    resharded: tuple[str, ...] = ()

    @property
    def by_name(self) -> dict[str, Any]:
        """All values. Access to a value that is a pickle and not allowed raises CheckpointError."""
        values = {**self.common, **self.own, **({RANDOM: self.random} if self.random is not None else {})}
        return Guarded(values) if any(isinstance(value, Withheld) for value in values.values()) else values

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of absent and kept values, as `missing_keys` has them."""
        return tuple(map(key_of, (*self.absent, *self.kept)))

    def warn_of_absent(self, position: int, checkpoint: Reader) -> None:
        """Log a warning for a rank that loads alone, and lacks values of its own. Ranks that load together say so in one line."""
        if self.absent:
            log.warning(
                "rank %d had no values of its own when %s was saved by %d ranks, so it gets none for %s (result.all_ranks has "
                "those of every rank)",
                position,
                checkpoint.index.where,
                checkpoint.index.facts.world_size,
                ", ".join(map(repr, self.absent)),
            )


def key_of(name: str) -> str:
    """Return the name of a value in `state=` among the names of parameters."""
    return f"state[{name!r}]"


def read_state(
    checkpoint: Reader, store: Store, position: int, options: LoadArguments, format: Format | None
) -> SavedState:
    """Return the values of the trainer for one rank. `position`: its index among the loading ranks. `store`: for later reads."""

    def read(name: str) -> Any:
        return names[name].decoded_each(allow_pickle=options.allow_pickle)

    def of_rank(position: int) -> dict[str, Any]:
        values = _named(all_common, read(rank_extra_name(position)))[1]
        return {name: value for name, value in values.items() if not name.startswith(RESERVED)}

    names, own, first = checkpoint.index.extras, rank_extra_name(position), rank_extra_name(0)
    num = next(rank for rank in itertools.count() if rank_extra_name(rank) not in names)
    common = all_common = _by_name(_EXTRA, read(COMMON) if COMMON in names else None)
    has_own = own in names
    example = read(own) if has_own else read(first) if first in names else None
    common, of_example = _named(common, example)
    if common.keys() & of_example.keys():  # of older versions and other libraries: neither hides the other
        of_example = {_PER_RANK_EXTRA: example}
    random = of_example.pop(RANDOM, None)
    shown = {name: value for name, value in of_example.items() if not name.startswith(RESERVED)}
    return SavedState(
        {name: value for name, value in common.items() if not name.startswith(RESERVED)},
        shown if has_own else {},
        () if has_own else tuple(shown),
        random if has_own else None,
        random is not None,
        _OfAllRanks(store, checkpoint.index.identity, options.verify, options.allow_pickle, format).read,
        num_ranks=num,
        read_each=lambda: tuple(map(of_rank, range(num))),
    )


class _OfAllRanks(Struct, frozen=True):
    """The place of the own values of all ranks, which are read on demand, because most ranks need only their own."""

    store: Store
    identity: Mapping[str, Any]
    verify: bool
    allow_pickle: bool
    format: Format | None

    def _open(self) -> Reader:
        return open_checkpoint(self.store, verify=self.verify, format=self.format)

    def read(self) -> tuple[Mapping[str, Any], ...]:
        with closing(retry_if_replaced(self._open)) as checkpoint:
            if checkpoint.index.identity != self.identity:
                raise CheckpointError(
                    f"{self.store.where}: was replaced by another checkpoint after the load: read all_ranks before the next save"
                )

            def read(name: str) -> Any:
                file = checkpoint.index.extras.get(name)
                return file.decoded(allow_pickle=self.allow_pickle) if file is not None else None

            common = _by_name(_EXTRA, read(COMMON))
            values = [read(rank_extra_name(position)) for position in range(checkpoint.index.facts.world_size)]
        own = [_named(common, value)[1] for value in values]
        return tuple(own) if any(own) else ()


def _by_name(name: str, value: Any) -> dict[str, Any]:
    """Return values by name. A value of older versions that is no dict of names gets a name."""
    if value is None:
        return {}
    is_named = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return dict.copy(value) if is_named else {name: value}


def _named(common: dict[str, Any], own: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of all ranks and those of one rank by name, whatever version has saved them."""
    if _is_old_managers(common, own):
        in_common = common[_OLD_STATE] if isinstance(common.get(_OLD_STATE), dict) and len(common) == 1 else common
        random = {RANDOM: own[_OLD_RANDOM]} if _OLD_RANDOM in own else {}
        return dict(in_common), {**own[_OLD_STATE], **random}
    return common, _by_name(_PER_RANK_EXTRA, own)


def _is_old_managers(common: Mapping[str, Any], own: Any) -> bool:
    """Return whether an older version's CheckpointManager or plug-in saved these values, for all ranks and for one rank."""
    keys = {_OLD_RANK, _OLD_STATE, _OLD_RANDOM}
    if not isinstance(own, dict) or own.keys() - keys or not isinstance(own.get(_OLD_STATE), dict):
        return False
    random = own.get(_OLD_RANDOM)
    if isinstance(random, dict):
        return type(own.get(_OLD_RANK)) is int and {"python", "torch"} <= random.keys()
    return own.keys() == {_OLD_RANK, _OLD_STATE} and isinstance(common.get(_OLD_STATE), dict)


def _checked(value: Any) -> Any:
    if isinstance(value, Withheld):
        raise CheckpointError(value.why)
    return value
