"""A checkpoint that `load` sees as a tree, seen through Views: its model's dict, and the dicts of its optimizers.

    {"model": {"w13": InFile}, "optim": {"state": {"w13": {"exp_avg": InFile}}, ...}}
    ->  {"model": {"w1": InFile, "w3": InFile}, "optim": {"state": {"w1": {"exp_avg": InFile}, "w3": ...}, ...}}

A View of a name that the live model's dict has makes it of its parts; all others take apart what is fused in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from msgspec import structs

from fsdp_optim.arguments import check_views
from fsdp_optim.checkpoint.load.reading import read_constants
from fsdp_optim.checkpoint.views import MappedFiles, Seen, SeenState, Through
from fsdp_optim.dcp.dicts.options import not_of_dicts
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.index import CheckpointIndex, StoredExtra
from fsdp_optim.formats.base.protocols import COMMON, Reader, StoredTensor
from fsdp_optim.formats.base.tree_values import InFile
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import View, ViewsByName
from fsdp_optim.options import Views
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.dicts.torch_trees import GROUPS, PARAMS, STATE, OptimFace, Place, ReadFace, in_face


@dataclass(frozen=True)
class TreeViews:
    """The Views of a load, and the names in the live model's dict. `place`: the keys that lead to it; None: there is none."""

    given: Views
    live: frozenset[str]
    place: Place | None

    @property
    def views(self) -> Sequence[View]:
        """The Views. Raises StateError for those that only a live model shows."""
        if isinstance(self.given, str):
            raise StateError(not_of_dicts(self.given))
        return tuple(self.given)

    def seen(self, reader: Reader) -> Reader:
        """Return an open checkpoint, which is seen as a tree, as the Views see it; the same one without Views."""
        check_views(self.given)
        return SeenTree(reader, self, MappedFiles()) if self.views else reader

    @cached_property
    def by_name(self) -> ViewsByName:
        """The Views by the names of fused parameters."""
        return ViewsByName(self.views)

    @cached_property
    def through(self) -> Through:
        """The Views, those of live names read the other way."""
        is_live = {view: any(map(view.matches, self.live)) for view in self.views}
        return Through.of([view.inverse if is_live[view] else view for view in self.views])

    def check_used(self, where: str, names: frozenset[str]) -> None:
        """Refuse a View of no name, neither in the live model's dict nor in the checkpoint's."""
        for view in self.by_name.unmatched(self.live | names):
            raise StateError(
                f"{view}: no tensor in the model's dict, and none in that of {where}, has its name, or the name of one of "
                "its parts: compare it with the names there, or leave the View out"
            )


@dataclass(frozen=True, eq=False)
class SeenTree(Reader):
    """An open checkpoint that is seen as a tree, seen through Views. It closes the checkpoint with itself."""

    reader: Reader
    views: TreeViews
    files: MappedFiles

    @cached_property
    def index(self) -> CheckpointIndex:
        index = self.reader.index
        if COMMON not in index.extras:
            return index
        extra = index.extras[COMMON]
        # Which tensors there are does not depend on values that are pickles.
        _, tensors = self._seen(extra.as_tree(allow_pickle=False))
        extras = {**index.extras, COMMON: _SeenExtra(extra, lambda values: self._seen(values)[0])}
        return replace(index, trees={**index.trees, **tensors}, extras=extras, read_fingerprint=lambda: None)

    def _seen(self, values: Any) -> tuple[Any, dict[str, StoredTensor]]:
        """Return the values as the Views see them, and the tensors that are among them, by key."""
        trees, place = self.reader.index.trees, self.views.place
        if not isinstance(values, Mapping) or place is None:
            return values, {}
        tensors: dict[str, StoredTensor] = {}
        model = _dict_at(values, place)
        shapes = {name: trees[leaf.key].shape for name, leaf in model.items() if isinstance(leaf, InFile)}
        self.views.check_used(self.reader.index.where, frozenset(shapes))
        through = replace(self.views.through, recorded=tuple(map(View.from_text, self.reader.index.facts.views)))
        names = through.find(self.reader.index.where, shapes)
        through.check_joined(self.reader.index.where, names)
        tree = values if names.is_empty else _put(values, place, dict(self._model(model, names, tensors)))
        for face in OptimFace.all_in(values):
            optim = face.dict_in(values)
            read = ReadFace.of(face, optim, {*shapes, *self._fused_in(face.fqns_in(optim))})
            changed = self._optim(face, read, shapes, through, tensors) if read is not None else None
            if changed is not None:
                tree = _put(tree, face.place, changed)
        return tree, tensors

    def _fused_in(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the names of fused parameters among those of an optimizer, whose weights a program's own hooks may have cut."""
        return filter(self.views.by_name.of, names)

    def _model(
        self, model: Mapping[str, Any], names: Seen, tensors: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, Any]]:
        trees, done = self.reader.index.trees, set[str]()
        for name, leaf in model.items():
            joined = names.joined_of.get(name)
            if name in names.split:
                parts = self.files.split(trees[leaf.key], names.split[name].parts, f"{leaf.key} as ".__add__)
                for part, stored in parts:
                    tensors[stored.key] = stored
                    yield part, InFile(stored.key)
            elif joined is None:
                yield name, leaf
            elif joined not in done:
                done.add(joined)
                sources = [(trees[model[part].key], how) for part, how in names.joined[joined].parts]
                key = f"{leaf.key} in {joined}"
                tensors[key] = self.files.joined(sources, key)
                yield joined, InFile(key)

    def _optim(
        self,
        face: OptimFace,
        read: ReadFace,
        known: Mapping[str, Shape],
        through: Through,
        tensors: dict[str, StoredTensor],
    ) -> dict[str, Any] | None:
        """Return an optimizer's dict as the Views see it; None where they change nothing. `known`: the shapes of weights."""
        index = self.reader.index

        def stored(leaf: Any) -> Any:
            return index.trees[leaf.key] if isinstance(leaf, InFile) else leaf

        def in_file(fqn: str, name: Any, value: Any) -> Any:
            if not isinstance(value, StoredTensor):
                return value
            before = read.state.get(fqn, {}).get(name)
            if isinstance(before, InFile) and index.trees[before.key] is value:
                return before
            key = f"{'.'.join(face.place)} as {fqn}: {name}"
            tensors[key] = structs.replace(value, key=key)
            return InFile(key)

        before = {fqn: {name: stored(leaf) for name, leaf in values.items()} for fqn, values in read.state.items()}
        groups = [({k: v for k, v in group.items() if k != PARAMS}, tuple(group[PARAMS])) for group in read.groups()]
        full = FullState(before, tuple(groups), {})
        unseen = SeenState(index.where, full, known, self.files, partial(read_constants, self.reader))
        names = through.find(index.where, unseen.shapes, unseen.listed)
        if names.names.isdisjoint(unseen.listed):
            return None
        state = unseen.seen(names)
        after = {
            fqn: {name: in_file(fqn, name, value) for name, value in values.items()}
            for fqn, values in state.state.items()
        }
        listed = [{**hyper, PARAMS: list(fqns)} for hyper, fqns in state.groups]
        return in_face({**read.other_keys, STATE: after, GROUPS: listed}, is_flat=face.is_flat)

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self.files.read(extents, self.reader.read, did_read)

    def verified(self) -> Reader:
        return SeenTree(self.reader.verified(), self.views, self.files)

    def check_unchanged(self) -> None:
        self.reader.check_unchanged()

    def close(self) -> None:
        self.reader.close()


@dataclass(frozen=True)
class _SeenExtra(StoredExtra):
    """The values of a checkpoint as Views see them."""

    extra: StoredExtra
    seen: Callable[[Any], Any]

    def decoded(self, *, allow_pickle: bool) -> Any:
        return self.as_tree(allow_pickle=allow_pickle)

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self.as_tree(allow_pickle=allow_pickle)

    def as_tree(self, *, allow_pickle: bool) -> Any:
        return self.seen(self.extra.as_tree(allow_pickle=allow_pickle))


def _dict_at(tree: Any, place: Place) -> Mapping[str, Any]:
    """Return the dict at a place; an empty one where there is none."""
    for key in place:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, Mapping) else {}


def _put(tree: Any, place: Place, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with another dict at a place."""
    if not place:
        return dict(values)
    key, *inner = place
    return {**tree, key: _put(tree[key], tuple(inner), values)}
