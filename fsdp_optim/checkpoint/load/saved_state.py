"""The values of the trainer in a checkpoint, as one rank has them: what `state=` of a save contained, by name."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

from msgspec import Struct

from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.retry import retry_if_replaced
from fsdp_optim.checkpoint.common.run_state import BY_NAME, OLD_RANDOM, OLD_RANK, OLD_STATE, RANDOM, RESERVED
from fsdp_optim.checkpoint.load.reading import read_constants
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.protocols import COMMON, OpenedAs, Reader, StoredTensor, TensorReader, rank_extra_name
from fsdp_optim.formats.base.tree_values import keys_in, with_tensors
from fsdp_optim.storage.base import Store

log = logging.getLogger("fsdp_optim")

_EXTRA, _PER_RANK_EXTRA = "extra", "per_rank_extra"
"""The names of values that were saved without names, by older versions and by other libraries."""


class UnreadTree(Struct, frozen=True):
    """Stands for a value with large tensors that a load was not asked for. It is read when it is accessed."""

    tree: Any
    later: Later

    def read(self) -> Any:
        with self.later.opened() as checkpoint:
            return complete(checkpoint, self.tree)


class Guarded(dict[str, Any]):
    """A dict that reads a value on first access where it was not read yet.

    Raises CheckpointError on access to a value that is a pickle and not allowed, but not on other values.
    """

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, UnreadTree):
            value = value.read()
            self[key] = value
        return checked(value)

    def __iter__(self) -> Iterator[str]:  # makes dict(guarded) access each value, instead of copying the internal ones
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  # not dict.get, which would not look at the value

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self[key]  # reads it, or raises before it is removed
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        super().setdefault(key, default)
        return self[key]

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
        common: the values that all ranks have in common, with an `InFile` in the place of each tensor of a tree.
        own: this rank's own values.
        absent: the names of values that each saving rank has of its own, and this rank lacks, because fewer ranks saved.
        random: this rank's random states; None: it has none.
        has_random: whether any rank has random states.
        read_all_ranks: reads the own values of every rank.
        stored: the tensors of trees, by key.
        later: the checkpoint, which is opened again for what is read later.
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
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    later: Later | None = None
    num_ranks: int = 0
    read_each: Callable[[], tuple[Mapping[str, Any], ...]] = tuple
    kept: tuple[str, ...] = ()
    resharded: tuple[str, ...] = ()

    @property
    def by_name(self) -> dict[str, Any]:
        """All values, with an `InFile` in the place of each tensor of a tree."""
        return {**self.common, **self.own, **({RANDOM: self.random} if self.random is not None else {})}

    def nbytes_of(self, tree: Any) -> int:
        """Return the bytes of the tensors of a tree that are in files."""
        stored = [self.stored[key] for key in keys_in(tree)]
        return sum(prod(tensor.shape) * tensor.itemsize for tensor in stored)

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


def read_state(checkpoint: Reader, store: Store, position: int, options: LoadArguments, format: OpenedAs) -> SavedState:
    """Return the values of the trainer for one rank. `position`: its index among the loading ranks. `store`: for later reads."""

    def read(name: str) -> Any:
        return names[name].as_tree(allow_pickle=options.allow_pickle)

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
    later = Later(store, checkpoint.index.identity, options.verify, options.allow_pickle, format)
    return SavedState(
        {name: value for name, value in common.items() if not name.startswith(RESERVED)},
        shown if has_own else {},
        () if has_own else tuple(shown),
        random if has_own else None,
        random is not None,
        read_all_ranks=later.all_ranks,
        stored=checkpoint.index.trees,
        later=later,
        num_ranks=num,
        read_each=lambda: tuple(map(of_rank, range(num))),
    )


def complete(checkpoint: TensorReader, tree: Any) -> Any:
    """Return a tree with its tensors, each read completely on this rank."""
    keys, trees = keys_in(tree), checkpoint.index.trees
    tensors = read_constants(checkpoint, [trees[key] for key in keys])
    # Tensors without dimensions are views of one memory, which each would keep alive.
    return with_tensors(
        tree, {key: tensor if tensor.dim() else tensor.clone() for key, tensor in zip(keys, tensors, strict=True)}
    )


class Later(Struct, frozen=True):
    """A checkpoint that is opened again for what few callers need: the own values of all ranks, and large tensors."""

    store: Store
    identity: Mapping[str, Any]
    verify: bool
    allow_pickle: bool
    format: OpenedAs

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        """Open the checkpoint. Raises CheckpointError if it is another one by now."""

        def reopen() -> Reader:
            return open_checkpoint(self.store, verify=self.verify, format=self.format)

        with closing(retry_if_replaced(reopen)) as checkpoint:
            if checkpoint.index.identity != self.identity:
                raise CheckpointError(
                    f"{self.store.where}: was replaced by another checkpoint after the load: read result.all_ranks, and large "
                    "tensors in result.state, before the next save"
                )
            yield checkpoint

    def all_ranks(self) -> tuple[Mapping[str, Any], ...]:
        """Return the own values of each rank that saved."""
        with self.opened() as checkpoint:
            extras = checkpoint.index.extras

            def read(name: str) -> Any:
                return extras[name].decoded(allow_pickle=self.allow_pickle) if name in extras else None

            common = _by_name(_EXTRA, extras[COMMON].as_tree(allow_pickle=True) if COMMON in extras else None)
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
        in_common = common[OLD_STATE] if isinstance(common.get(OLD_STATE), dict) and len(common) == 1 else common
        random = {RANDOM: own[OLD_RANDOM]} if OLD_RANDOM in own else {}
        return dict(in_common), {**own[OLD_STATE], **random}
    values = _by_name(_PER_RANK_EXTRA, own)
    values.pop(BY_NAME, None)
    return common, values


def _is_old_managers(common: Mapping[str, Any], own: Any) -> bool:
    """Return whether an older version's CheckpointManager or plug-in saved these values, for all ranks and for one rank."""
    keys = {OLD_RANK, OLD_STATE, OLD_RANDOM}
    if not isinstance(own, dict) or own.keys() - keys or not isinstance(own.get(OLD_STATE), dict):
        return False
    random = own.get(OLD_RANDOM)
    if isinstance(random, dict):
        return type(own.get(OLD_RANK)) is int and {"python", "torch"} <= random.keys()
    return own.keys() == {OLD_RANK, OLD_STATE} and isinstance(common.get(OLD_STATE), dict)


def checked(value: Any) -> Any:
    """Return a value. Raises CheckpointError where it is a pickle and not allowed."""
    if isinstance(value, Withheld):
        raise CheckpointError(value.why)
    return value
