"""The values of the trainer in a DCP folder, which every rank reads completely, and the tensors of their trees, read in parts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.dcp.full_dict import filled, keys_in
from fsdp_optim.foreign.dcp.items import Items, read_values, unread_class_in
from fsdp_optim.foreign.dcp.tensor_table import ItemPlace, Tensor
from fsdp_optim.foreign.dcp.values import CLASSES, KEYS, OF_RANKS, classes_by_path, with_classes, with_keys
from fsdp_optim.foreign.reader import ForeignValues
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import StoredTensor, rank_extra_name
from fsdp_optim.formats.base.tree_values import InFile
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.memory import dtype_named

_MOST_EXTRA_NBYTES = 64 << 20  # in one value of the trainer, which every rank reads completely


class SavedItems(Protocol):
    """What the metadata of a checkpoint say: its tensors and its other values, by key."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def values(self) -> Mapping[str, ItemPlace]: ...


def keys_in_parts(where: str, extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the trees of the recorded keys of dicts that have others than str, by the part that has the dicts."""
    keys = extra.get(KEYS, {})
    if not isinstance(keys, Mapping):
        raise CheckpointError(f"{where}: {KEYS}: is not a dict")
    return keys


def with_keys_of(where: str, value: Any, keys: Mapping[str, Any], part: str) -> Any:
    """Return the value of one part with its own keys, which are withheld where these are objects of unknown classes.

    Its dicts have their own classes too.
    """
    listed = keys.get(part)
    if isinstance(listed, Withheld):
        return dict.fromkeys(value, listed) if isinstance(value, Mapping) else listed
    made = value if listed is None else with_keys(where, value, listed)
    classes = classes_of(keys, part)
    return made if classes is None else with_classes(where, made, classes_by_path(where, classes), ())


def classes_of(keys: Mapping[str, Any], part: str) -> Any:
    """Return what is recorded of the classes of dicts in one part; None for nothing."""
    classes = keys.get(CLASSES)
    return classes.get(part) if isinstance(classes, Mapping) else None


def trees_of_ranks(extra: Mapping[str, Any]) -> list[Any] | None:
    """Return the trees of the ranks' own values, in the order of the ranks; None if there are none."""
    by_rank = extra.get(OF_RANKS)
    if not isinstance(by_rank, Mapping) or set(by_rank) != {str(rank) for rank in range(len(by_rank))}:
        return None
    return [by_rank[str(rank)] for rank in range(len(by_rank))]


@dataclass(frozen=True)
class RankValues(ForeignValues):
    """The values of one rank, which are read when they are asked for: only the same rank needs them, however large they are."""

    read: Callable[[bool], Any] = bool

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self.read(allow_pickle)


@dataclass(frozen=True)
class WholeReading:
    """What reads values whole."""

    opened: Opened
    saved: SavedItems
    stored: Mapping[str, StoredTensor]
    places: Items

    def values(self, trees: Mapping[str, Any], most_nbytes: int = _MOST_EXTRA_NBYTES) -> WholeValues:
        """Read the values of each tree, by name. A tree with more than `most_nbytes` of tensors is withheld."""
        return WholeValues.of(self, trees, most_nbytes)

    def of_rank(self, rank: int, tree: Any, keys: WholeValues) -> RankValues:
        """Return the values of a rank. `tree`: theirs; `keys`: the recorded ones of all parts."""
        by_name = tree if isinstance(tree, Mapping) else {OF_RANKS: tree}

        def read(allow_pickle: bool) -> Any:
            with as_checkpoint_error(self.opened.where):
                whole = self.values(by_name, sys.maxsize)
                values = whole.pickled() if allow_pickle else whole.values
                value = values if isinstance(tree, Mapping) else values[OF_RANKS]
                recorded = keys.pickled() if allow_pickle else keys.values
                return with_keys_of(self.opened.where, value, recorded, rank_extra_name(rank))

        return RankValues(None, None, read=read)


@dataclass(frozen=True)
class WholeValues:
    """Values that every rank reads whole: trees of them by name, and the items of their keys.

    `apart`: the tensors, already read, that are in no archive of torch.save.
    """

    opened: Opened
    trees: Mapping[str, Any]
    items: Mapping[str, ItemPlace]
    apart: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    loaded: Mapping[str, Any]

    @classmethod
    def of(cls, reading: WholeReading, trees: Mapping[str, Any], most_nbytes: int) -> WholeValues:
        """Read the values. Values that are too large, or have objects of unknown classes, are withheld."""
        opened, saved, stored, places = reading.opened, reading.saved, reading.stored, reading.places
        nbytes = {name: sum(_nbytes(stored, key) for key in keys_in(tree)) for name, tree in trees.items()}
        read = [key for name, tree in trees.items() if nbytes[name] <= most_nbytes for key in keys_in(tree)]
        apart = {key: made for key in read if (made := _empty(saved, key)) is not None}
        apart.update(places.read_apart(read))
        read += [key for tree in trees.values() for key in keys_in(tree) if key in saved.values]
        items = {
            key: item for key in dict.fromkeys(read) if key not in apart and (item := _item(saved, key)) is not None
        }
        loaded = {**read_values(opened, items), **apart}
        values: dict[str, Any] = {}
        for name, tree in trees.items():
            there = [key for key in keys_in(tree) if key in loaded]
            if there != [*keys_in(tree)]:
                values[str(name)] = Withheld(
                    f"{opened.where}: {name}: has tensors of {nbytes[name]} bytes that are neither the model's nor the "
                    "optimizer's, and that are large or cut: they are not read",
                    is_unsafe=False,
                )
                continue
            value = filled(tree, loaded.__getitem__)
            what = unread_class_in(value)
            values[str(name)] = value if not what else withheld(opened, name, what)
        return cls(opened, trees, items, apart, values, loaded)

    def as_trees(self, stored: Mapping[str, StoredTensor]) -> Mapping[str, Any]:
        """Return the values with an `InFile` in the place of each tensor that is an item of its own."""
        made: dict[str, Any] = {}
        for name, tree in self.trees.items():
            value = filled(tree, lambda key: InFile(key) if key in stored else self.loaded[key])
            what = unread_class_in(value)
            made[str(name)] = value if not what else withheld(self.opened, name, what)
        return made

    def pickled(self) -> Mapping[str, Any]:
        """Return the values with objects of all classes, which can run any code."""
        withheld = [name for name, value in self.values.items() if isinstance(value, Withheld)]
        loaded = read_values(
            self.opened,
            {key: self.items[key] for name in withheld for key in keys_in(self.trees[name]) if key in self.items},
            allow_pickle=True,
        )
        loaded.update(self.apart)
        there = {name for name in withheld if all(key in loaded for key in keys_in(self.trees[name]))}
        made = {name: filled(self.trees[name], loaded.__getitem__) for name in there}
        return {**self.values, **made}


def withheld(opened: Opened, name: object, what: str) -> Withheld:
    """Return what stands for a value that has an object of a class that is not read."""
    return Withheld(
        f"{opened.where}: {name}: has an object of the class {what}: allow_pickle=True makes it, and can run any "
        "code of its author"
    )


def _item(saved: SavedItems, key: str) -> ItemPlace | None:
    """Return the item with the whole value; None for a tensor in several chunks or without elements."""
    if key in saved.values:
        return saved.values[key]
    items = saved.tensors[key].items
    return items[0] if len(items) == 1 else None


def _empty(saved: SavedItems, key: str) -> torch.Tensor | None:
    """Return a tensor without elements, which is in no file; None for all other values."""
    tensor = saved.tensors.get(key)
    if tensor is None or tensor.items or 0 not in tensor.shape:
        return None
    return torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype))


def _nbytes(stored: Mapping[str, StoredTensor], key: str) -> int:
    return stored[key].placement.numel * stored[key].itemsize if key in stored else 0
