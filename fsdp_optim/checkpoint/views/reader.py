"""A `Reader` of a checkpoint that is seen through Views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

from fsdp_optim.adapters.known import wrapper_parts
from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.checkpoint.views.listed import names_before
from fsdp_optim.checkpoint.views.mapped import SCRATCH_NBYTES, MappedFiles
from fsdp_optim.checkpoint.views.names import Seen, Through
from fsdp_optim.checkpoint.views.state import SeenState, as_full_state, check_dtypes, with_full_state
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.index import CheckpointIndex, ReadSmall, SavedOptim, stored_in
from fsdp_optim.formats.base.protocols import Reader, StoredTensor
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import InverseView, View
from fsdp_optim.results.fingerprints import Fingerprint
from fsdp_optim.state.dicts.flattened import is_flattened
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.dicts.names import Names, cut

_IN_DDP = "module."


def seen(
    reader: Reader,
    views: Sequence[View | InverseView],
    *,
    named: Callable[[str], str] = str,
    scratch_nbytes: int = SCRATCH_NBYTES,
) -> Reader:
    """Return a checkpoint as it is seen through Views; the same one without Views.

    Args:
        named: a function from a name in the checkpoint to that which Views have.
        scratch_nbytes: the most memory for what lies between short rows; a read never has more than 4 MiB.
    """
    if not views:
        return reader
    files = MappedFiles(min(scratch_nbytes, SCRATCH_NBYTES))
    # State that no View can cut keeps the name of the fused parameter, beside canonical weights.
    facts = reader.index.facts
    whole = frozenset(map(named, facts.fused_state))
    with as_checkpoint_error(f"{reader.index.where}: the Views of the save"):
        # Weights alone of another library are those of a hub, under canonical names.
        is_known = facts.names_are_fqns or reader.index.optim is not None
        recorded = tuple(map(View.from_text, facts.views)) if is_known else None
    return SeenReader(reader, Through.of(views, named, whole, recorded), files)


def reader_inside(reader: Reader) -> Reader:
    """Return the checkpoint itself, which may be seen through Views."""
    return reader.reader if isinstance(reader, SeenReader) else reader


def check_used(*readers: Reader) -> None:
    """Raise StateError for a View of a call that has changed nothing in any of these checkpoints, when all was looked at."""
    of_views = [reader for reader in readers if isinstance(reader, SeenReader)]
    names = [names for reader in of_views for names in (reader.names, *reader.seen_at)]
    unused = of_views[0].through.unused(names) if of_views else ()
    if unused:
        where = " or ".join(dict.fromkeys(reader.index.where for reader in of_views))
        raise StateError(
            f"{unused[0]}: no parameter of {where} has a name that it changes: compare it with the names that inspect lists, or "
            "leave the View out"
        )


@dataclass(frozen=True, eq=False)
class SeenReader(Reader):
    """An open checkpoint that is seen through Views. It closes the checkpoint with itself.

    `seen_at`: what was found, as often as it was looked for.
    """

    reader: Reader
    through: Through
    files: MappedFiles
    seen_at: list[Seen] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        """Whether any name changes, of those that were looked at."""
        return not all(names.is_empty for names in (self.names, *self.seen_at))

    @property
    def _where(self) -> str:
        return self.reader.index.where

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """The weights by the names that Views have, each with its name there."""
        named = dict[str, str]()
        for key, name in self._name_of_key.items():
            if name not in named or key == name:
                named[name] = key
        return named

    @cached_property
    def _name_of_key(self) -> Mapping[str, str]:
        """All weights by key. Two keys may have one name; of these `_names` has one, and the others stay as they are."""
        keys = list(self.reader.index.weights)
        return dict(zip(keys, self._clean(keys), strict=True))

    def _clean(self, keys: Sequence[str]) -> Iterator[str]:
        """Yield names without the parts of wrappers, as Views have them."""
        names = list(keys)
        if not self.reader.index.facts.names_are_fqns:
            names = [cut(key, wrapper_parts()) for key in keys]
            if all(name.startswith(_IN_DDP) for name in names):
                names = [name.removeprefix(_IN_DDP) for name in names]
        yield from map(self.through.named, names)

    @cached_property
    def _shapes(self) -> Mapping[str, Shape]:
        weights = self.reader.index.weights
        return {name: weights[key].shape for name, key in self._names.items()}

    @cached_property
    def names(self) -> Seen:
        """Which weights change."""
        names = self.through.find(self._where, self._shapes)
        self.seen_at.append(names)
        self._check_keys(names)
        return names

    def _check_keys(self, names: Seen) -> None:
        """Refuse a key of the checkpoint that keeps its tensor, and is the name that another one gets."""
        new = names.shapes
        for key, name in self._name_of_key.items():
            is_changed = self._names[name] == key and (name in names.split or name in names.joined_of)
            if key in new and key != name and not is_changed:
                raise StateError(
                    f"{self._where}: {key}: is in the checkpoint, where it is another parameter, {name}, and the Views give its "
                    "name to a part: convert the checkpoint with Views of the names in it first, then rename"
                )

    @cached_property
    def index(self) -> CheckpointIndex:
        index, names = self.reader.index, self.names
        optim = index.optim
        if optim is not None:
            optim = replace(optim, decode=partial(_decode, optim.decode, self))
        if names.is_empty:
            return replace(index, optim=optim)
        other = {key: name for name, key in self._names.items()}
        aliases = {
            new: other.get(index.aliases[old], index.aliases[old])
            for old, new in zip(index.aliases, self._clean(list(index.aliases)), strict=True)
        }
        return replace(
            index,
            weights=dict(self._weights()),
            aliases=self._aliases(aliases) if aliases else {},
            optim=optim,
            facts=replace(index.facts, views=self._views(names)),
            read_fingerprint=partial(_fingerprint_of, index, names),
        )

    def _weights(self) -> Iterator[tuple[str, StoredTensor]]:
        weights, done = self.reader.index.weights, set[str]()
        for key, name in self._name_of_key.items():
            joined = self.names.joined_of.get(name)
            if self._names[name] != key:
                yield key, weights[key]
            elif name in self.names.split:
                yield from self.files.split(weights[key], self.names.split[name].parts)
            elif joined is None:
                yield key, weights[key]
            elif joined not in done:
                done.add(joined)
                yield joined, self._joined(joined)

    def _joined(self, live: str) -> StoredTensor:
        """Return the tensor that parts make. Raises StateError where they have different dtypes."""
        weights, bound = self.reader.index.weights, self.names.joined[live]
        keys = [self._names[name] for name in bound.names]
        sources = [weights[key] for key in keys]
        check_dtypes(f"{self._where}: {live}", keys, sources)
        parts = [part for _, part in bound.parts]
        return self.files.joined(list(zip(sources, parts, strict=True)), live)

    def _aliases(self, aliases: Mapping[str, str]) -> dict[str, str]:
        changed = self.names.aliases(self._where, aliases, self.through)
        return {
            alias: self._names.get(name, name) if name not in self.names.names else name
            for alias, name in changed.items()
        }

    def _views(self, names: Seen) -> tuple[str, ...]:
        """The Views of the save and of this call, as far as the names are canonical by them."""
        undone = {repr(bound.view) for bound in names.joined.values()}
        applied = {repr(bound.view) for bound in names.split.values()}
        used = [text for text in map(repr, self.through.views) if text in applied]
        kept = [view for view in self.reader.index.facts.views if view not in undone]
        return tuple(dict.fromkeys([*kept, *used]))

    # ------------------------------------------------------------------------------------------------ the optimizer

    def state(self, full: FullState, shapes: Mapping[str, Shape], read: ReadSmall) -> FullState:
        """Return the optimizer's state by name as it is seen through the Views.

        Args:
            shapes: the shapes that are recorded of its parameters.
            read: reads small tensors.
        """
        renamed = SeenState.named(self._where, full, self._name_of)
        known = {**{self._name_of(fqn): shape for fqn, shape in shapes.items()}, **self._shapes}
        state = SeenState(self._where, renamed, known, self.files, read)
        names = self.through.find(self._where, state.shapes, state.listed)
        self.seen_at.append(names)
        return state.seen(names) if not names.is_empty else full

    def names_in(self, names: Names, full: Mapping[str, Any]) -> Names:
        """Return the names by which a full dict is read, before it is seen through the Views."""
        changed = self.names
        if is_flattened(full):
            stored: dict[str, Shape] = {}
            for key, value in full.items():
                if isinstance(value, StoredTensor) and value.shape and str(key).startswith("state."):
                    fqn = str(key).partition(".")[2].rpartition(".")[0]
                    name = self._name_of(self.through.named(names.canonical(fqn)))
                    stored[name] = max(stored.get(name, ()), value.shape, key=prod)
            changed = self.through.find(self._where, {**stored, **self._shapes}, stored)
        return names_before(self._where, names, full, changed, list(self._names))

    def _name_of(self, fqn: str) -> str:
        """Return the name that Views have for a name in the optimizer's dict."""
        if self.reader.index.facts.names_are_fqns or fqn in self._shapes:
            return fqn
        clean = cut(fqn, wrapper_parts())
        candidates = [
            name for name in (clean, clean.removeprefix(_IN_DDP)) if name in self.names.names or self._may_change(name)
        ]
        return candidates[0] if candidates else fqn

    def _may_change(self, name: str) -> bool:
        through = self.through
        return through.view_of(self._where, name) is not None or any(each.has_part(name) for each in through.inverses)

    def recorded(self, read: ReadSmall, *, allow_pickle: bool) -> CheckpointIndex:
        """Return the index with an optimizer that is seen through the Views, of a checkpoint that records names and kinds.

        Raises CheckpointError for a pickle unless `allow_pickle` is True.
        """
        index, optim = self.index, self.reader.index.optim
        if optim is None or index.optim is None:
            return index
        saved = optim.decoded(allow_pickle=allow_pickle, records=RECORDS)
        full = self.state(as_full_state(saved), saved.shapes, read)
        names = self.seen_at[-1]
        if names.is_empty:
            return replace(index, optim=optim)
        new = with_full_state(saved, full, {**saved.shapes, **names.shapes})
        tensors = {tensor.key: tensor for tensor in stored_in(new.full["state"])}
        new_optim = replace(optim, tensors=tensors, decode=lambda *_: new)
        return replace(index, optim=new_optim, facts=replace(index.facts, views=self._views(names)))

    # ------------------------------------------------------------------------------------------------ reading

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self.files.read(extents, self.reader.read, did_read)

    def verified(self) -> SeenReader:
        return SeenReader(self.reader.verified(), self.through, self.files, self.seen_at)

    def check_unchanged(self) -> None:
        self.reader.check_unchanged()

    def close(self) -> None:
        self.reader.close()


def _decode(
    decode: Callable[[bool, Mapping[str, type]], SavedOptim],
    through: SeenReader,
    allow_pickle: bool,
    records: Mapping[str, type],
) -> SavedOptim:
    """Decode an optimizer that is seen through Views once its parameters have names."""
    return replace(decode(allow_pickle, records), through=through)


def _fingerprint_of(index: CheckpointIndex, names: Seen) -> Fingerprint | None:
    """Return the fingerprints of the values that no View changes: those of parts are not known from those of the whole."""
    saved = index.fingerprint
    if saved is None:
        return None
    return replace(
        saved,
        weights={name: value for name, value in saved.weights.items() if name not in names.names},
        optim={name: values for name, values in saved.optim.items() if name not in names.names},
    )
