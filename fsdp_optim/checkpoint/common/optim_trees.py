"""An optimizer's dict in the trees of `state=`: a save stores it as the optimizer of the model whose weights it saves beside it.

{"optim": {"state": {"w": {"exp_avg": InFile("optim.state.w.exp_avg")}}, "param_groups": [...]}, "step": 7}
->  {"step": 7}, the tensor "state.w.exp_avg" in the half "optim", and its description
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import structs

from fsdp_optim.checkpoint.common.contents import SavedHalf, SavedValue, with_distinct_keys
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.index import SavedOptim
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.tree_values import BRANCHES, InFile, items_of, leaves_of, with_leaves
from fsdp_optim.layout import Shape, Whole, cut_of
from fsdp_optim.state.dicts.torch_trees import GROUPS, MODEL, MODEL_KEYS, STATE, OptimFace, Place, ReadFace
from fsdp_optim.state.values.kinds import Evidence, Kind, infer_kind, observation_of
from fsdp_optim.tensors.memory import detached_copy, dtype_name


@dataclass(frozen=True)
class TreeModel:
    """The model in the trees of a save.

    Attributes:
        place: the keys that lead to its dict; empty where its tensors are at the top.
        shapes: those of its weights, by FQN.
        renamed: gives the names of parameters in the checkpoint.
    """

    place: Place
    shapes: Mapping[str, Shape]
    renamed: Callable[[str], str]

    def has(self, face: OptimFace, listed: Collection[str], values: Mapping[str, Any]) -> bool:
        """Return whether an optimizer's dict is this model's and no other's: an average of the weights has the same names.

        It is if the two are side by side, and if no other dict has the names of its parameters, which are `listed`.
        """
        above = self.place[:-1]
        others = list(_places_of(listed, values, face.place))
        if face.place[:-1] != above:
            return not others
        rivals = [place for place in others if place[:-1] == above and (not place or place[-1] in MODEL_KEYS)]
        return not rivals or self.place[-1:] == (MODEL,)


def _places_of(names: Collection[str], tree: Any, left_out: Place, place: Place = ()) -> Iterator[Place]:
    """Yield the places in a tree that have tensors with all of some names, but for a place that is left out."""
    if type(tree) not in BRANCHES or place == left_out:
        return
    if isinstance(tree, Mapping) and all(isinstance(tree.get(name), InFile) for name in names):
        yield place
    for key, item in items_of(tree):
        yield from _places_of(names, item, left_out, (*place, key))


@dataclass(frozen=True)
class OptimTree:
    """The optimizer in the trees of a save. It is the same on all ranks, but for `tensors`.

    Attributes:
        face, read: its dict in the trees, with an `InFile` in the place of each tensor.
        shapes: the shapes of the parameters that it lists, by FQN.
        values: its tensors by (FQN, name), with the names that they get in the file.
        inside: the keys of tensors in its param groups, which have no file.
        tensors: the tensors of this rank, by key.
    """

    face: OptimFace
    read: ReadFace
    shapes: Mapping[str, Shape]
    values: Mapping[tuple[str, Any], SavedValue]
    inside: frozenset[str]
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        trees: SavedHalf | None,
        tensors: Mapping[str, torch.Tensor],
        model: TreeModel,
    ) -> OptimTree | None:
        """Find the optimizer of a model.

        None where no dict or several have its form, and where one has what no optimizer has, or may be that of other weights.

        Args:
            values: the trees of all ranks, without the model's dict.
            trees: their tensors; None: they have none.
            tensors: those of this rank, by key.
            model: the model.
        """
        faces, shapes = OptimFace.all_in(values), model.shapes
        known = [
            (face, read) for face in faces if (read := ReadFace.of(face, face.dict_in(values), shapes)) is not None
        ]
        if len(known) != 1:
            return None
        face, optim = known[0]
        if not model.has(face, {fqn for _, fqns in optim.hypers for fqn in fqns}, values):
            return None
        by_key = {value.stored_name: value for value in trees.tensors} if trees is not None else {}
        in_files: dict[tuple[str, Any], SavedValue] = {}
        for fqn, entries in optim.state.items():
            for name, entry in entries.items():
                if isinstance(entry, InFile):
                    in_files[fqn, name] = by_key[entry.key]
                elif any(isinstance(leaf, InFile) for _, leaf in leaves_of(entry)):
                    return None
        others = (*(hyper for hyper, _ in optim.hypers), optim.other_keys)
        inside = frozenset(leaf.key for tree in others for _, leaf in leaves_of(tree) if _in_file(leaf))
        if not all(isinstance(by_key[key].placement, Whole) for key in inside):
            return None
        named = [
            structs.replace(value, stored_name=f"{STATE}.{model.renamed(fqn)}.{name}", of_optim=(fqn, str(name)))
            for (fqn, name), value in in_files.items()
        ]
        listed = {fqn: tuple(shapes[fqn]) for _, fqns in optim.hypers for fqn in fqns}
        return cls(face, optim, listed, dict(zip(in_files, with_distinct_keys(named), strict=True)), inside, tensors)

    def rest_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the trees without it."""
        return _without(values, self.face.place)

    def saved(self, trees: SavedHalf) -> SavedHalf:
        """Return the tensors of the trees, those of the optimizer as its half, and without those in its param groups."""
        by_fqn = {value.fqn: value for value in self.values.values()}
        tensors = (by_fqn.get(value.fqn, value) for value in trees.tensors if value.stored_name not in self.inside)
        return replace(trees, tensors=tuple(tensors))

    @property
    def absent(self) -> tuple[str, ...]:
        """The parameters without state."""
        return tuple(fqn for fqn in self.shapes if fqn not in self.read.state)

    def stored(self) -> tuple[SavedOptim, dict[str, StoredTensor]]:
        """Return the optimizer as a checkpoint has it, and its tensors by key. On the lowest rank of a save.

        Raises StateError for a tensor in a param group that this rank does not have.
        """
        stored = {
            at: StoredTensor(value.stored_name, dtype_name(value.dtype), value.placement.shape, "the new file", 0)
            for at, value in self.values.items()
        }
        by_shape = {shape: torch.empty(shape, device="meta") for shape in {tensor.shape for tensor in stored.values()}}
        metas = {at: by_shape[tensor.shape] for at, tensor in stored.items()}
        evidence = Evidence.of(
            observation_of(name, metas.get((fqn, name), value), self.shapes[fqn])
            for fqn, entries in self.read.state.items()
            if self.shapes[fqn]
            for name, value in entries.items()
        )
        state: dict[str, dict[Any, Any]] = {fqn: {} for fqn in self.shapes}
        kinds: dict[str, dict[Any, str]] = {}
        for fqn, entries in self.read.state.items():
            words = kinds[fqn] = {}
            for name, value in entries.items():
                state[fqn][name] = stored.get((fqn, name), value)
                kind = infer_kind(name, metas.get((fqn, name), value), self.shapes[fqn], evidence)
                words[name] = kind.value
                if kind is Kind.OPAQUE and (fqn, name) in stored:
                    words[name] = f"{Kind.PLACED.value} {cut_of(self.values[fqn, name].placement)}".strip()
        hypers = tuple((self._with_tensors(hyper), fqns) for hyper, fqns in self.read.hypers)
        groups = replace(self.read, hypers=hypers).groups()
        saved = SavedOptim(
            {STATE: state, GROUPS: groups, "kinds": kinds}, self._with_tensors(self.read.other_keys), self.shapes
        )
        return saved, {tensor.key: tensor for tensor in stored.values()}

    def _with_tensors(self, values: Mapping[str, Any]) -> Any:
        def tensor(leaf: Any) -> Any:
            if not _in_file(leaf):
                return leaf
            if leaf.key not in self.tensors:
                raise StateError(f"state: {leaf.key} is not on the lowest rank: give all ranks the same param groups")
            return detached_copy(self.tensors[leaf.key])

        return with_leaves(dict(values), tensor)


def _in_file(leaf: Any) -> bool:
    return isinstance(leaf, InFile)


def _without(values: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return a tree without the dict at a place, and without dicts that only lead to it."""
    key, *inner = place
    below = _without(values[key], tuple(inner)) if inner else {}
    if below:
        return {**values, key: below}
    return {name: item for name, item in values.items() if name != key}
