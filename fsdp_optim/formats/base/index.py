"""The index of a checkpoint: all that it says, without the elements of its tensors.

A reader of any format makes an index when it opens a checkpoint. Only the places of tensors are read then; the optimizer and the
values of the trainer are decoded when they are asked for, because pickles in them need the caller's permission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.records import UNKNOWN_WEIGHTS, SavedWeights, StoredTensor
from fsdp_optim.layout import Shape
from fsdp_optim.results.fingerprints import Fingerprint

ReadSmall: TypeAlias = Callable[[Sequence[StoredTensor]], Sequence[torch.Tensor]]
"""A function that reads some small tensors whole, on this rank."""


class StoredExtra(Protocol):
    """One value of the trainer in a checkpoint. Reading it raises CheckpointError where it is damaged."""

    def decoded(self, *, allow_pickle: bool) -> Any:
        """Return the value. Raises CheckpointError for a pickle unless `allow_pickle` is True."""

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        """Return the value, but with `codec.Withheld` in the place of each item of a dict that is a pickle and not allowed."""

    def as_tree(self, *, allow_pickle: bool) -> Any:
        """Return as `decoded_each`, but with an `InFile` in the place of each tensor that is among the `trees` of the index.

        The other two methods read these tensors completely.
        """
        return self.decoded_each(allow_pickle=allow_pickle)


@dataclass(frozen=True)
class KnownExtra(StoredExtra):
    """A value that is in memory."""

    value: Any

    def decoded(self, *, allow_pickle: bool) -> Any:
        return self.value

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self.value


@dataclass(frozen=True)
class NewTree(StoredExtra):
    """The values of a new checkpoint. `tree` has an `InFile` for each tensor that is still in the memory of ranks."""

    tree: Any

    def decoded(self, *, allow_pickle: bool) -> Any:
        raise CheckpointError("the tensors of a new tree are in the memory of ranks: a writer takes as_tree()")

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self.decoded(allow_pickle=allow_pickle)

    def as_tree(self, *, allow_pickle: bool) -> Any:
        return self.tree


@dataclass(frozen=True)
class SavedOptim:
    """The state of an optimizer, decoded.

    Attributes:
        full: its full dict, in any dialect that `fsdp_optim.state.dicts.dialects` reads, by FQN or by id, with a StoredTensor in
            the place of each tensor in files. Under "kinds" it has the kinds of its values, if the save has recorded them.
        other_keys: those keys of the optimizer's own dict that are recorded apart from `full`.
        shapes: the shapes of its parameters by FQN, where they are recorded.
        is_checked: whether `full` is known to be written as a full dict is, so that an error in reading it is no damage.
        through: what sees its parameters through Views, when they have names (`checkpoint.views`); None: they stay.
    """

    full: Mapping[str, Any]
    other_keys: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    is_checked: bool = False
    through: Any = None


@dataclass(frozen=True)
class StoredOptim:
    """The optimizer in a checkpoint that is there, or that will be written.

    Attributes:
        tensors: the tensors of its state that are in files, by key.
        decode: a function of `allow_pickle` and `records`.
        num_joined: how many optimizers of the checkpoint are joined in it.
        read: a function that reads small tensors, for a writer; None in the index of a reader.
    """

    tensors: Mapping[str, StoredTensor]
    decode: Callable[[bool, Mapping[str, type]], SavedOptim] = field(repr=False)
    num_joined: int = 1
    read: ReadSmall | None = field(default=None, repr=False)

    def read_small(self, tensors: Sequence[StoredTensor]) -> Sequence[torch.Tensor]:
        """Return the elements of some small tensors.

        Raises CheckpointError for the index of a reader, which reads them itself.
        """
        if self.read is None:
            raise CheckpointError("the index of an open checkpoint has no elements: read them with its reader")
        return self.read(tensors)

    def decoded(self, *, allow_pickle: bool, records: Mapping[str, type]) -> SavedOptim:
        """Return the state. `records`: the dataclasses that may occur in it, by name.

        Raises CheckpointError where it is damaged, and for a pickle unless `allow_pickle` is True.
        """
        return self.decode(allow_pickle, records)


@dataclass(frozen=True)
class Facts:
    """Facts about the save of a checkpoint.

    Attributes:
        format_name: the name of the format, for users.
        world_size: the number of ranks that saved; 0 if unknown.
        step: the `step` that was given to `save`.
        weights: the treatment of the model's weights by the save.
        has_checksums: whether every byte of a tensor that is read is compared with a checksum.
        names_are_fqns: whether parameters have their FQNs. False: another library has named them, and the names may have parts
            that wrappers insert.
        about: other facts for users: the author of the save and its time.
        notes: what users should know about the choice of files, a line for each.
        was_thinned: whether the optimizer was saved, and `thin` has removed it.
        wrapper: what wrapped the model that was saved, for users; empty if unknown, or for a plain model.
        cut: how parameters were flattened and cut, as a writer of the same family of formats takes it; None if unknown.
        models: the names of several models that were saved together: all FQNs begin with one of them; empty for one model, and
            where the format does not record them.
        with_optim: those of `models` that have an optimizer.
        views: the Views through which the save has seen fused parameters, as text. The names in the checkpoint are canonical.
        fused_state: fused parameters whose state has their own names, because no View can cut it.
        joint_steps: the optimizers that have stepped fused parameters as one: an unfused run would have taken other steps.
    """

    format_name: str
    world_size: int = 0
    step: int | None = None
    weights: SavedWeights = UNKNOWN_WEIGHTS
    has_checksums: bool = False
    names_are_fqns: bool = True
    about: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    was_thinned: bool = False
    wrapper: str = ""
    cut: Any = None
    models: tuple[str, ...] = ()
    with_optim: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    fused_state: tuple[str, ...] = ()
    joint_steps: tuple[str, ...] = ()


def _no_fingerprint() -> Fingerprint | None:
    return None


@dataclass(frozen=True)
class CheckpointIndex:
    """All that a checkpoint says: one that is open, or one that will be written, whose tensors have no places in files yet.

    Attributes:
        where: the name of the place of the checkpoint.
        weights: the tensors of parameters and buffers, by FQN.
        facts: facts about the save.
        aliases: other names of parameters and buffers, each with the stored name.
        optim: the optimizer; None if none was saved.
        extras: the values of the trainer and of modules, by the names in `records`: COMMON, MODULES, and one for each rank.
        trees: the tensors of trees among the values of the trainer (`InFile`), by key.
        left_out: the shapes of those parameters and buffers of the model that a save has left out, for a writer.
        source: the reader of the checkpoint that is converted, of which a writer of the same format may copy files.
        identify: a function that returns the `identity`.
        read_fingerprint: a function that returns the `fingerprint`.
    """

    where: str
    weights: Mapping[str, StoredTensor]
    facts: Facts
    aliases: Mapping[str, str] = field(default_factory=dict)
    optim: StoredOptim | None = None
    extras: Mapping[str, StoredExtra] = field(default_factory=dict)
    trees: Mapping[str, StoredTensor] = field(default_factory=dict)
    left_out: Mapping[str, Shape] = field(default_factory=dict)
    source: object = None
    identify: Callable[[], Mapping[str, Any]] = field(default=dict, repr=False)
    read_fingerprint: Callable[[], Fingerprint | None] = field(default=_no_fingerprint, repr=False)

    @cached_property
    def fingerprint(self) -> Fingerprint | None:
        """The fingerprints of the values, under their names in the checkpoint; None if the save has made none.

        Raises CheckpointError where their file is damaged.
        """
        return self.read_fingerprint()

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """JSON values that differ between any two checkpoints. Ranks compare them."""
        return self.identify()

    @property
    def has_optim_only(self) -> bool:
        """Whether this is a file of an optimizer alone, which says nothing about weights.

        A save that left the weights out says so in `facts.weights`.
        """
        return self.optim is not None and not self.weights and self.facts.weights.which is None

    @property
    def optim_tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors of the optimizer's state, by key; empty without an optimizer."""
        return self.optim.tensors if self.optim is not None else {}


_LEAVES = frozenset({str, int, float, bool, type(None)})


def stored_in(tree: Any) -> list[StoredTensor]:
    """Return all StoredTensors in dicts and lists, in their order."""
    stored: list[StoredTensor] = []
    _collect([tree], stored)
    return stored


def _collect(values: Iterable[Any], stored: list[StoredTensor]) -> None:
    for value in values:
        if type(value) in _LEAVES:
            continue  # names and numbers, as most are
        if isinstance(value, StoredTensor):
            stored.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, stored)
        elif type(value) is dict or isinstance(value, Mapping):  # the second question takes ten times as long
            _collect(value.values(), stored)


def in_class_of(tree: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return other values of the same keys as a dict of the same class: an OrderedDict, a Counter, a defaultdict."""
    if type(tree) is dict or not isinstance(tree, dict):
        return values
    made = copy(tree)
    dict.update(made, values)  # a Counter would add them
    return made


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a dict or a list with `function(item)` in the place of each item; the same object if nothing changes."""
    if type(tree) in _LEAVES:
        return tree
    if type(tree) is dict or isinstance(tree, Mapping):
        new = {key: function(value) for key, value in tree.items()}
        return tree if all(new[key] is value for key, value in tree.items()) else in_class_of(tree, new)
    if isinstance(tree, (list, tuple)):
        items = [function(value) for value in tree]
        return tree if all(new is value for new, value in zip(items, tree, strict=True)) else type(tree)(items)
    return tree
