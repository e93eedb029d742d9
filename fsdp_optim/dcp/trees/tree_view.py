"""A checkpoint as the state dict that `load` fills: all of it is one tree, the weights and the optimizer too.

    model.safetensors, optim.safetensors, the values of `state=`
    ->  {"model": {"w": InFile}, "optim": {"state": {"w": {"exp_avg": InFile}}, "param_groups": [...]}, "step": 7}

The state dict shows where the two dicts belong, and whether the optimizer's is flattened. A dict that the checkpoint has there
among its values is taken as it is. Folders of torch's own writers are trees already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.checkpoint.common.printing import prints_by_key
from fsdp_optim.checkpoint.load.matching import renamer
from fsdp_optim.dcp.storage.model_places import ModelPlaces
from fsdp_optim.dcp.trees.seen_tree import TreeViews
from fsdp_optim.dcp.trees.state_tree import models_in
from fsdp_optim.errors import StateError, shortened
from fsdp_optim.foreign.dcp.reader import DCP, DCP_TREES, own_summary
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.index import CheckpointIndex, SavedOptim, StoredExtra, mapped
from fsdp_optim.formats.base.protocols import COMMON, MODULES, Format, Reader, StoredTensor, Writer
from fsdp_optim.formats.base.tree_values import InFile, leaves_of
from fsdp_optim.options import Rename
from fsdp_optim.results.fingerprints import Fingerprint
from fsdp_optim.state.dicts.torch_trees import GROUPS, PARAMS, OptimFace, Place, in_face
from fsdp_optim.storage.base import CheckpointProbe, Opened

_WEIGHTS, _OPTIM = "model.", "optimizer."
"""How the keys of weights and of optimizer state begin among those of trees."""


@dataclass(frozen=True)
class Places:
    """The places of a model's and an optimizer's dict in a state dict.

    `optims`: the dicts that have the form of an optimizer's. `named`: gives the name that a parameter of the checkpoint has in
    them.
    """

    models: ModelPlaces
    optims: Sequence[OptimFace]
    named: Callable[[str], str]

    @classmethod
    def in_tree(cls, tree: Mapping[str, Any], rename: Rename | None = None) -> Places:
        """Find them in a state dict that is loaded. `rename`: as in `LoadOptions`."""
        return cls(ModelPlaces(models_in(tree)), OptimFace.all_in(tree), renamer(rename or {}))


@dataclass(frozen=True)
class TreeFormat(Format):
    """A format whose checkpoints are seen as trees. `views`: the Views through which they are seen."""

    inner: Format
    places: Places
    views: TreeViews | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def probe(self) -> CheckpointProbe[Any] | None:
        return self.inner.probe

    def recognises(self, opened: Opened) -> bool:
        return self.inner.recognises(opened)

    def open(self, opened: Opened, *, verify: bool) -> Reader:
        if self.inner.name == DCP.name and not _has_halves(opened):
            reader: Reader = DCP_TREES.open(opened, verify=verify)
        else:
            reader = TreeReader(self.inner.open(opened, verify=verify), self.places)
        return self.views.seen(reader) if self.views is not None else reader

    def writer(self) -> Writer | None:
        return None

    def sequence_in(self, opened: Opened) -> int:
        return self.inner.sequence_in(opened)


def _has_halves(opened: Opened) -> bool:
    """Return whether a DCP folder was written by `fsdp_optim.save`, with a model, and not by `save` of a tree or by torch."""
    summary = own_summary(opened)
    return summary is not None and summary.weights != "none"


@dataclass(frozen=True)
class TreeReader:
    """An open checkpoint that is seen as a tree."""

    inner: Reader
    places: Places

    @cached_property
    def index(self) -> CheckpointIndex:
        """The index without weights and without an optimizer: their tensors are among those of trees."""
        index = self.inner.index
        weights = {
            **index.weights,
            **{alias: index.weights[fqn] for alias, fqn in index.aliases.items() if fqn in index.weights},
        }
        trees = {
            **index.trees,
            **_under(_WEIGHTS, weights, index.trees),
            **_under(_OPTIM, index.optim_tensors, index.trees),
        }
        extras = {name: extra for name, extra in index.extras.items() if name != MODULES}
        extras[COMMON] = _WholeTree(self.inner, self.places, weights)
        facts = replace(index.facts, wrapper="")  # nothing is wrapped in what is loaded
        return replace(
            index,
            facts=facts,
            weights={},
            aliases={},
            optim=None,
            trees=trees,
            extras=extras,
            read_fingerprint=partial(_fingerprint_of, index),
        )

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self.inner.read(extents, did_read)

    def verified(self) -> Reader:
        return TreeReader(self.inner.verified(), self.places)

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def close(self) -> None:
        self.inner.close()


def _fingerprint_of(index: CheckpointIndex) -> Fingerprint | None:
    """Return the fingerprints of a checkpoint under the keys that its tensors have in the tree."""
    saved = index.fingerprint
    if saved is None:
        return None
    prefixes = {"weights": _WEIGHTS, "optim": _OPTIM}
    prints = prints_by_key(saved)
    prints |= {
        ("weights", alias): prints["weights", fqn] for alias, fqn in index.aliases.items() if ("weights", fqn) in prints
    }
    in_tree = {
        key if half == "state" else _key(prefixes[half], key, index.trees): value
        for (half, key), value in prints.items()
    }
    return Fingerprint(state=in_tree)


def _under(prefix: str, tensors: Mapping[str, StoredTensor], taken: Mapping[str, object]) -> dict[str, StoredTensor]:
    return {_key(prefix, name, taken): tensor for name, tensor in tensors.items()}


def _key(prefix: str, name: str, taken: Mapping[str, object]) -> str:
    """Return the key of a tensor of a half, which no tensor of a tree has."""
    key = f"{prefix}{name}"
    while key in taken:
        key += "'"
    return key


@dataclass(frozen=True)
class _WholeTree(StoredExtra):
    """The values of a checkpoint with its weights and its optimizer among them."""

    reader: Reader
    places: Places
    weights: Mapping[str, StoredTensor]

    def decoded(self, *, allow_pickle: bool) -> Any:
        return self.as_tree(allow_pickle=allow_pickle)

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self.as_tree(allow_pickle=allow_pickle)

    def as_tree(self, *, allow_pickle: bool) -> Any:
        index = self.reader.index
        values = index.extras[COMMON].as_tree(allow_pickle=allow_pickle) if COMMON in index.extras else {}
        if not isinstance(values, Mapping):  # of an older version, which kept one value without a name
            return values
        named = self.places.named
        model: dict[str, Any] = {named(fqn): InFile(_key(_WEIGHTS, fqn, index.trees)) for fqn in self.weights}
        if MODULES in index.extras:
            for fqn, kept in index.extras[MODULES].decoded_each(allow_pickle=allow_pickle).items():
                model[named(fqn)] = kept if isinstance(kept, Withheld) else kept[1]
        place = self.places.models.place_of(index, model, partial(_has_tensors, values))
        tree = _put(values, place, model) if model and place is not None else dict(values)
        if index.optim is None:
            return tree
        saved = index.optim.decoded(allow_pickle=allow_pickle, records=RECORDS)
        face = self._face(tree, saved)
        return tree if face is None else _put(tree, face.place, self._optim(saved, face.is_flat))

    def _face(self, tree: Mapping[str, Any], saved: SavedOptim) -> OptimFace | None:
        """Return the dict that gets the optimizer; None where none has its form, or the optimizer has no names.

        Raises StateError where several may get it.
        """
        listed = [fqn for group in saved.full.get(GROUPS, ()) for fqn in group.get(PARAMS, ())]
        if not listed or not all(isinstance(fqn, str) for fqn in listed):
            return None
        faces = [face for face in self.places.optims if not _has_tensors(tree, face.place)]
        if len(faces) > 1:
            named = shortened(".".join(face.place) for face in faces)
            raise StateError(
                f"{self.reader.index.where}: has one optimizer, and each of {named} may be its dict: load one of them"
            )
        return faces[0] if faces else None

    def _optim(self, saved: SavedOptim, is_flat: bool) -> dict[str, Any]:
        taken = self.reader.index.trees

        def in_file(value: Any) -> Any:
            if isinstance(value, StoredTensor):
                return InFile(_key(_OPTIM, value.key, taken))
            return mapped(value, in_file)

        full, named = {**saved.other_keys, **saved.full}, self.places.named
        by_name: dict[str, Any] = {
            key: {named(fqn): values for fqn, values in full[key].items()} for key in ("state", "kinds") if key in full
        }
        groups = [{**group, PARAMS: list(map(named, group[PARAMS]))} for group in full[GROUPS]]
        return in_face({**full, **by_name, "state": in_file(by_name["state"]), GROUPS: groups}, is_flat=is_flat)


def _has_tensors(tree: Any, place: Place) -> bool:
    """Return whether a tree has tensors below a place."""
    for key in place:
        if not isinstance(tree, Mapping) or key not in tree:
            return False
        tree = tree[key]
    return any(isinstance(leaf, InFile) for _, leaf in leaves_of(tree))


def _put(tree: Mapping[str, Any], place: Place, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with the values of a dict at a place too. What it has there with tensors, or as no dict, stays alone."""
    if not place:
        return {**values, **tree}
    key, *inner = place
    below = tree.get(key, {})
    if not isinstance(below, Mapping) or (not inner and _has_tensors(tree, (key,))):
        return dict(tree)
    return {**tree, key: _put(below, tuple(inner), values)}
