"""Checkpoints of other libraries: the result of each of their formats, and the reader that all of them share.

A format of another library recognises its files, and its `open` returns a `ForeignReader`: the weights by name, and the
optimizer's full dict as that library has it, both with StoredTensors in the place of tensors. The loader resolves ids to FQNs,
strips what wrappers add to names, and reads the elements that a rank needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from fsdp_optim.errors import CheckpointError, ReplacedError
from fsdp_optim.foreign.lazy import BoolsInFiles, places_of
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.extents import DataSection, Extent, read_extents, without_overlaps
from fsdp_optim.formats.base.index import CheckpointIndex, Facts, SavedOptim, StoredExtra, StoredOptim, stored_in
from fsdp_optim.formats.base.protocols import (
    COMMON,
    MODULES,
    UNKNOWN_WEIGHTS,
    Format,
    SavedWeights,
    StoredTensor,
    Writer,
    rank_extra_name,
)
from fsdp_optim.storage.base import CheckpointProbe, Opened
from fsdp_optim.tensors.model_dict import module_path


@dataclass(frozen=True)
class Source:
    """The bytes under a name that a StoredTensor gives: a part of a file, or memory.

    Attributes:
        file: the file.
        start: the byte of the file at which the part begins, or a function that finds it out, called at the first read.
        memory: the bytes themselves, of a tensor that cannot be read by ranges, or a function that makes them; then there is no
            file.
    """

    file: str = ""
    start: int | Callable[[], int] = 0
    memory: memoryview | Callable[[], memoryview] | None = None

    @cached_property
    def first_byte(self) -> int:
        """The byte of the file at which the part begins."""
        return self.start() if callable(self.start) else self.start

    def made(self) -> memoryview | None:
        """Return the bytes of `memory`, which this call may make; None if a file has them."""
        return self.memory() if callable(self.memory) else self.memory


class Archive(NamedTuple):
    """A part of a file that may be an archive of `torch.save`. `name`: the value in it, for errors."""

    file: str
    start: int
    nbytes: int
    name: str = ""


class _LastMade(threading.local):
    """The bytes of the source that a thread made last: a tensor is read in several parts. `name`: the name of that source."""

    name = ""
    data: memoryview | None = None


class ForeignFormat(Format):
    """The parent of the formats of other libraries; a child gives `name`, `recognises` and `open`."""

    opens_any = True
    probe: CheckpointProbe[Any] | None = None

    def writer(self) -> Writer | None:
        return None

    def sequence_in(self, opened: Opened) -> int:
        return 0


@dataclass(frozen=True)
class ForeignReader:
    """An open checkpoint of another library.

    Attributes:
        opened: the files.
        format_name: the name of the format, for errors.
        model: the weights and buffers, by the names in the checkpoint.
        full_dict: the optimizer's full dict in any dialect that `fsdp_optim.state.dicts.dialects` reads, with a StoredTensor in
            the place of each tensor; None if no optimizer was saved.
        optim_tensors: the tensors of `full_dict`, by their keys; None: as many as there are in it.
        is_checked: whether all tensors are known to lie inside their files.
        num_optims: the number of optimizers that `full_dict` has joined.
        sources: the objects that the StoredTensors name, where these are not simply files of the place.
        aliases: other names of weights, each with the stored name.
        extra_values: the values of the trainer, with `Withheld` in the place of each that is not decoded; None if there are none.
        extra_trees: the same with an `InFile` in the place of each tensor of `trees`; None: there are no such tensors.
        trees: the tensors of the trainer that are read in parts as weights are, by key.
        module_values: by FQN, what modules add to a state dict: the version of the module's code, and the value; or Withheld.
        rank_extras: the values of each rank, in the order of the ranks that saved; a ForeignValues where some are withheld.
        pickled: a function that returns `extra_values` with all pickles loaded; None if no value is withheld.
        cut: as for `Facts`.
        tells_all: whether `metadata_digest` is of all bytes that say the names, dtypes and shapes of tensors.
        metadata_digest: a hash of the metadata, by which ranks see that they have opened the same checkpoint.
        files: further files that are read, whose change during the load is noticed.
        notes: what users should know about the choice of files, a line for each.
        archives: a function that returns the archives of `torch.save` in the files; None: each file is one, or none.
    """

    opened: Opened
    format_name: str
    model: Mapping[str, StoredTensor]
    full_dict: Mapping[str, Any] | None = None
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False)
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra_values: Mapping[str, Any] | None = None
    extra_trees: Mapping[str, Any] | None = None
    trees: Mapping[str, StoredTensor] = field(default_factory=dict)
    module_values: Mapping[str, Any] = field(default_factory=dict)
    num_optims: int = 1
    rank_extras: Sequence[Any] = ()
    pickled: Callable[[], Mapping[str, Any]] | None = None
    world_size: int = 0
    step: int | None = None
    weights: SavedWeights = UNKNOWN_WEIGHTS
    metadata_digest: str = ""
    cut: Any = None
    files: Sequence[str] = field(default=(), repr=False)
    notes: Sequence[str] = field(default=(), repr=False)
    archives: Callable[[], Sequence[Archive]] | None = field(default=None, repr=False)
    optim_tensors: Mapping[str, StoredTensor] | None = field(default=None, repr=False)
    is_checked: bool = False
    tells_all: bool = False
    _versions: dict[str, tuple[object, ...] | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _last: _LastMade = field(default_factory=_LastMade, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that all tensors lie inside their files. Raises CheckpointError that names the file and the tensor."""
        _check_names(self.where, [*self.model, *self.aliases, *self.aliases.values(), *self.optim])
        sizes: dict[str, int] = {}
        halves = [] if self.is_checked else [self.model, self.optim, self.trees]
        for stored in (stored for half in halves for stored in half.values()):
            if stored.chunks is not None and stored.chunks.is_checked:
                continue
            for name, start, nbytes in places_of(stored):
                if name in sizes and name not in self.sources and 0 <= start <= sizes[name] - nbytes:
                    continue  # the answer for nearly all tensors, at once
                source = self._source(name)
                if callable(source.memory):
                    continue  # not known before the first read, which checks it
                if source.memory is None and source.file not in sizes:
                    sizes[source.file] = self.opened.size_of(source.file)
                if callable(source.start):
                    continue  # not known before the first read, which fails at the end of the file
                where = self.opened.named(source.file) if source.memory is None else name
                size = sizes[source.file] if source.memory is None else source.memory.nbytes
                if start < 0 or source.start + start + nbytes > size:
                    raise CheckpointError(
                        f"{where}: {stored.key} ends at byte {source.start + start + nbytes}, but the file has {size} bytes: it "
                        "was cut short or changed"
                    )
        for name in {**sizes, **dict.fromkeys(self.files)}:
            self._versions[name] = self.opened.version_of(name) if self.opened.num_requests == 1 else ()

    def _source(self, name: str) -> Source:
        return self.sources[name] if name in self.sources else Source(name)

    @cached_property
    def optim(self) -> Mapping[str, StoredTensor]:
        """The tensors of the optimizer's full dict, by their keys."""
        if self.optim_tensors is not None:
            return self.optim_tensors
        by_key: dict[str, StoredTensor] = {}
        for stored in stored_in(self.full_dict):
            if by_key.setdefault(stored.key, stored) is not stored and by_key[stored.key] != stored:
                raise CheckpointError(f"{self.where}: two tensors of the optimizer have the name {stored.key}")
        return by_key

    @cached_property
    def index(self) -> CheckpointIndex:
        full = self.full_dict
        return CheckpointIndex(
            self.where,
            self.model,
            Facts(
                self.format_name,
                self.world_size,
                self.step,
                self.weights,
                names_are_fqns=False,
                notes=self.notes,
                cut=self.cut,
            ),
            self.aliases,
            StoredOptim(self.optim, lambda *_: SavedOptim(full), self.num_optims) if full is not None else None,
            self._extras(),
            trees=self.trees,
            identify=self._identity,
        )

    def _extras(self) -> Mapping[str, StoredExtra]:
        common: dict[str, StoredExtra] = {}
        if self.extra_values is not None:
            common[COMMON] = ForeignValues(self.extra_values, self.pickled, self.extra_trees)
        of_modules = {MODULES: ForeignValues(self.module_values, None)} if self.module_values else {}
        of_ranks = {
            rank_extra_name(position): value if isinstance(value, ForeignValues) else ForeignValues(value, None)
            for position, value in enumerate(self.rank_extras)
        }
        return {**common, **of_modules, **of_ranks}

    def _identity(self) -> Mapping[str, Any]:
        halves = {} if self.tells_all else {"model": self.model, "optim": self.optim}
        listed = {
            half: [[stored.key, stored.dtype, list(stored.shape)] for stored in tensors.values()]
            for half, tensors in halves.items()
        }
        return {"format": self.format_name, "digest": self.metadata_digest, **listed}

    @property
    def where(self) -> str:
        return self.opened.where

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        for name, ranges in extents.items():
            source = self._source(name)
            path = self.opened.named(source.file or name)
            data = self._made(name, source)
            if data is not None:
                for extent in ranges:
                    extent.memory[:] = data[extent.start : extent.stop]
                    did_read(len(extent.memory))
            else:
                fill = partial(self.opened.read_into, source.file)
                section = DataSection(path, fill, source.first_byte, _no_names, self.opened.num_requests)
                for apart in without_overlaps(ranges):
                    read_extents(section, apart, None, did_read)
            self._bools.check(name, path, ranges)

    def _made(self, name: str, source: Source) -> memoryview | None:
        """Return the bytes of a source without a file. A thread keeps one, so that many do not fill the memory."""
        last = self._last
        if source.memory is not None and last.name != name:
            last.name, last.data = "", None  # freed before the next one is made
            last.data = source.made()
            last.name = name
        return last.data if source.memory is not None else None

    @cached_property
    def _bools(self) -> BoolsInFiles:
        return BoolsInFiles([self.model, self.optim, self.trees])

    def all_files(self) -> list[str]:
        """Return the files that have been read, or will be."""
        return sorted({*self._versions, *self.files})

    def tensors_in(self, file: str, start: int, stop: int, storage: str) -> list[str]:
        """Return the tensors with elements in the bytes [start, stop) of a file, or in the storage of this name in it."""
        keys = []
        for stored in (*self.model.values(), *self.optim.values()):
            for name, at, nbytes in places_of(stored):
                source = self._source(name)
                is_inside = name == f"{file}!{storage}" or name.startswith(f"{file}!{storage}[")
                if not is_inside and source.memory is None and source.file == file:
                    first = source.first_byte + at
                    is_inside = first < stop and start < first + nbytes
                if is_inside:
                    keys.append(stored.key)
        return list(dict.fromkeys(keys))

    def verified(self) -> ForeignReader:
        return self

    def check_unchanged(self) -> None:
        """Raise ReplacedError if a file was written again since the checkpoint was opened. Object stores notice it at a read."""
        for name, version in self._versions.items():
            if version != () and self.opened.version_of(name) != version:
                raise ReplacedError(f"{self.opened.named(name)}: was written again during the load: load it once more")

    def close(self) -> None:
        self.opened.close()


@dataclass(frozen=True)
class ForeignValues(StoredExtra):
    """Values of the trainer.

    `pickled`: a function that returns the values with all pickles loaded. `trees`: the values with an `InFile` in the place of
    each tensor of a tree; None: there are no such tensors.
    """

    values: Any
    pickled: Callable[[], Any] | None
    trees: Mapping[str, Any] | None = None

    def decoded(self, *, allow_pickle: bool) -> Any:
        values = self.decoded_each(allow_pickle=allow_pickle)
        for value in values.values() if isinstance(values, Mapping) else [values]:
            if isinstance(value, Withheld):
                raise CheckpointError(value.why)
        return values

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self.pickled() if allow_pickle and self.pickled is not None else self.values

    def as_tree(self, *, allow_pickle: bool) -> Any:
        if self.trees is None:
            return self.decoded_each(allow_pickle=allow_pickle)
        if not allow_pickle or self.pickled is None:
            return dict(self.trees)
        complete = self.pickled()
        return {name: complete[name] if isinstance(tree, Withheld) else tree for name, tree in self.trees.items()}


def versioned(versions: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of modules, each with the version of the code that made it. `versions`: of the code of modules, by path."""
    return {
        name: value if isinstance(value, Withheld) else [versions.get(module_path(name)), value]
        for name, value in values.items()
    }


def _check_names(where: str, keys: Sequence[object]) -> None:
    """Raise CheckpointError for names of tensors that cannot be written into files. All are asked at once, which is fast."""
    if not _are_text(keys):
        key = next(key for key in keys if not _are_text([key]))
        raise CheckpointError(f"{where}: {key!r:.200} is no name of a tensor")


def _are_text(keys: Sequence[Any]) -> bool:
    try:
        "".join(keys).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return True


def _no_names(start: int, stop: int) -> str:
    """Return the tensors in a range, which only errors about checksums name; these files have none."""
    return "a tensor"
