"""Torch's metadata of a DCP folder that is written: the tensors, their chunks, and the values, each with its place.

It is written as the operations of a pickle, since objects of torch's classes, of which each key has four, would take many times
its bytes and its time. Each key is that of one value, and the names of the trainer's values are known beside weights.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.pickle_stream import (
    BUILD,
    END_OF_ITEMS,
    FALSE,
    LIST_OF_MORE,
    LIST_OF_ONE,
    MARK,
    NONE,
    START,
    STOP,
    PickleStream,
    around_last,
    frame,
    number,
    ref,
    refs,
)
from fsdp_optim.foreign.archive.torch_archives import TensorKind
from fsdp_optim.foreign.dcp.values import KEYS, OF_RANKS, Path, PathGroup, key_of, keys_in
from fsdp_optim.layout import Shape

_BEGINS = (f"{OF_RANKS}.", f"{KEYS}.")
_MOST_NAMES_NBYTES = 512 << 10  # half of what the summary of `.metadata` may have

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"  # of torch's metadata
_BATCH = 1000  # entries that are put into a dict at once, as torch's pickles do


@dataclass(frozen=True, slots=True)
class ListedItem:
    """Data that torch reads under some paths. `kind`: of a tensor, None for another value.

    `places`: of each chunk, or of the value, the first byte in the file and the number of bytes.
    """

    paths: PathGroup
    kind: TensorKind | None
    file: str
    places: Sequence[tuple[int, int]]


def written_pickle(folder: str, items: Sequence[ListedItem], token: str) -> Iterator[bytes]:
    """Yield the bytes of the pickle of torch's Metadata.

    Args:
        folder: that of the files, relative to the folder of `.metadata`.
        items: all that the checkpoint has; their keys are different (`check_keys`).
        token: names the save.
    """
    return _Writing(folder, items).pieces(token)


@dataclass
class _Writing:
    """One pickle while it is written. `keys`: the number of each key in the memo."""

    folder: str
    items: Sequence[ListedItem]
    keys: array[int] = field(default_factory=lambda: array("Q"))
    stream: PickleStream = field(default_factory=PickleStream)

    def pieces(self, token: str) -> Iterator[bytes]:
        stream = self.stream
        yield START + frame(
            stream.new(_METADATA, "Metadata")
            + self._attributes()
            + stream.text("state_dict_metadata")
            + stream.empty_dict()
        )
        yield from _in_batches(self._tensors())
        yield frame(stream.text("planner_data") + stream.empty_dict())
        yield from _in_batches(self._paths())
        yield frame(stream.text("storage_data") + stream.empty_dict())
        yield from _in_batches(self._places())
        yield frame(
            stream.text("storage_meta")
            + self._storage_meta(token)
            + stream.text("version")
            + stream.text(_VERSION)
            + END_OF_ITEMS
            + BUILD
            + STOP
        )

    def _attributes(self) -> bytes:
        """Return the beginning of the attributes of an object: `END_OF_ITEMS` and `BUILD` end them."""
        return self.stream.empty_dict() + MARK

    def _storage_meta(self, token: str) -> bytes:
        stream = self.stream
        return b"".join(
            [
                stream.new(_METADATA, "StorageMeta"),
                self._attributes(),
                *(stream.text("checkpoint_id"), NONE),
                *(stream.text("save_id"), stream.text(token)),
                *(stream.text("load_id"), NONE),
                *(stream.text("modules"), stream.empty_list()),
                END_OF_ITEMS + BUILD,
            ]
        )

    # ------------------------------------------------------------------------- tensors and other values

    def _tensors(self) -> Iterator[list[bytes]]:
        """Yield the entries of `state_dict_metadata`: each key, and what it is the key of."""
        stream = self.stream
        for item in self.items:
            make: Callable[[], bytes] = self._bytes if item.kind is None else partial(self._tensor, item.kind)
            first, *others = keys_in(item.paths)
            self.keys.append(stream.length)
            entries = [stream.new_texts([first])[0] + stream.repeated(item.kind, make)]
            if others:
                begin = stream.length
                data, adds = stream.repetition(item.kind)
                entries += [text + data for text in stream.new_texts(others)]
                stream.length += adds * len(others)
                self.keys.extend(range(begin, stream.length, 1 + adds))
            yield entries

    def _bytes(self) -> bytes:
        """Return what is listed of each value that is no tensor."""
        name = "BytesStorageMetadata"
        return self.stream.memoized(("object", name), partial(self.stream.new, _METADATA, name))

    def _tensor(self, kind: TensorKind) -> bytes:
        stream = self.stream
        data = [
            stream.new(_METADATA, "TensorStorageMetadata"),
            self._attributes(),
            *(stream.text("properties"), self._properties(kind.dtype)),
            *(stream.text("size"), stream.size(kind.shape)),
            *(stream.text("chunks"), stream.empty_list()),
        ]
        chunks = b"".join([self._chunk(*chunk) for chunk in kind.chunks])
        data += [chunks, LIST_OF_ONE] if len(kind.chunks) == 1 else [MARK, chunks, LIST_OF_MORE]
        return b"".join([*data, END_OF_ITEMS, BUILD])

    def _chunk(self, offsets: Shape, sizes: Shape) -> bytes:
        stream = self.stream
        return b"".join(
            [
                stream.new(_METADATA, "ChunkStorageMetadata"),
                self._attributes(),
                *(stream.text("offsets"), stream.size(offsets)),
                *(stream.text("sizes"), stream.size(sizes)),
                END_OF_ITEMS + BUILD,
            ]
        )

    def _properties(self, dtype: str) -> bytes:
        """Return the properties of a tensor, whose state is a tuple; only the dtype is this library's choice.

        The object is in the memo before its state.
        """
        stream, key = self.stream, ("properties", dtype)
        known = stream.known(key)
        if known is not None:
            return known
        made = stream.new(_METADATA, "TensorProperties")
        stream.remember(key)
        items = [
            stream.named("torch", dtype),
            stream.called(stream.named("torch.serialization", "_get_layout"), [stream.text("torch.strided")]),
            FALSE,  # requires_grad
            stream.called(stream.named(_METADATA, "_MEM_FORMAT_ENCODING"), [number(0)]),  # torch.contiguous_format
            FALSE,  # pin_memory
        ]
        return made + stream.tuple(items) + BUILD

    # ------------------------------------------------------------------------- paths and places

    def _paths(self) -> Iterator[list[bytes]]:
        """Yield the entries of `planner_data`: each key, and the path of the value in nested dicts and lists."""
        stream, at = self.stream, 0
        for item in self.items:
            prefix, name, others = item.paths.prefix, item.paths.name, item.paths.others
            entries = [ref(self.keys[at]) + stream.tuple([self._part(part) for part in (*prefix, name)])]
            if others:  # texts that no other path has
                begin, end = around_last([self._part(part) for part in prefix])
                keys, texts = refs(self.keys[at + 1 : at + len(item.paths)]), stream.new_texts(others)
                stream.length += len(texts)  # the tuples
                entries += [b"".join([key, begin, text, end]) for key, text in zip(keys, texts, strict=True)]
            yield entries
            at += len(item.paths)

    def _part(self, part: str | int) -> bytes:
        return self.stream.text(part) if isinstance(part, str) else number(part)

    def _places(self) -> Iterator[list[bytes]]:
        """Yield the entries of `storage_data`: the index of each chunk or value, and its place."""
        stream, at = self.stream, 0
        for item in self.items:
            offsets = [None] if item.kind is None else [offsets for offsets, _ in item.kind.chunks]
            num = len(item.paths)
            keys = self.keys[at : at + num]
            is_shared = item.kind is None or num > 1
            for index, (offset, place) in enumerate(zip(offsets, item.places, strict=True)):
                after = ("index", offset, index)
                parts = [
                    stream.repeated("index", self._index),
                    ref(keys[0]),
                    stream.repeated(after, partial(self._in_index, offset, index)),
                    self._place(item.file, *place, is_shared=is_shared),
                ]
                entries = [b"".join(parts)]
                if num > 1:
                    known = self._place(item.file, *place, is_shared=True)
                    entries += self._indices(keys[1:], stream.repetition(after)[0] + known)
                yield entries
            at += num

    def _indices(self, keys: Sequence[int], end: bytes) -> list[bytes]:
        """Return the entries of further keys of a place. `end`: what follows the key in each."""
        begin, adds = self.stream.repetition("index")
        self.stream.length += len(keys) * adds
        return [begin + key + end for key in refs(keys)]

    def _index(self) -> bytes:
        """Return an index up to its key."""
        return self.stream.new(_METADATA, "MetadataIndex") + self._attributes() + self.stream.text("fqn")

    def _in_index(self, offset: Shape | None, index: int) -> bytes:
        """Return the rest of an index, behind its key. `offset`: None for a value, which has no index in a list of chunks."""
        stream = self.stream
        return b"".join(
            [
                *(stream.text("offset"), NONE if offset is None else stream.size(offset)),
                *(stream.text("index"), NONE if offset is None else number(index)),
                END_OF_ITEMS + BUILD,
            ]
        )

    def _place(self, file: str, start: int, nbytes: int, *, is_shared: bool) -> bytes:
        """Return a place, or a reference to an equal one. `is_shared`: whether there may be one."""
        stream, key = self.stream, (file, start, nbytes)
        known = stream.known(key) if is_shared else None
        if known is not None:
            return known
        new = stream.repeated("place", partial(stream.new, _FILES, "_StorageInfo"))
        if is_shared:
            stream.remember(key)
        return b"".join(
            [
                *(new, stream.repeated(("file", file), partial(self._in_file, file))),
                *(stream.text("offset"), number(start)),
                *(stream.text("length"), number(nbytes)),
                END_OF_ITEMS + BUILD,
            ]
        )

    def _in_file(self, file: str) -> bytes:
        """Return the attributes of a place up to its bytes."""
        stream = self.stream
        return self._attributes() + stream.text("relative_path") + stream.text(f"{self.folder}{file}")


def _in_batches(lists: Iterator[list[bytes]]) -> Iterator[bytes]:
    """Yield frames that put entries into the dict which stands before them, a thousand at once."""
    entries = chain.from_iterable(lists)
    while batch := list(islice(entries, _BATCH)):
        yield frame(b"".join([MARK, *batch, END_OF_ITEMS]))


def check_keys(groups: Iterable[PathGroup]) -> None:
    """Refuse values that torch.distributed.checkpoint would save under one key, whose parts are joined by dots."""
    groups = list(groups)
    known = set[str]()
    num_keys = 0
    for group in groups:
        keys = keys_in(group)
        known.update(keys)
        num_keys += len(keys)
        if group.prefix[:1] not in ((OF_RANKS,), (KEYS,)):
            for at, key in enumerate(keys):
                if key.startswith(_BEGINS):
                    raise _kept_for_own(list(group)[at])
    if len(known) < num_keys:
        _refuse_equal_keys(groups)


def _kept_for_own(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{_named(path)}: a DCP checkpoint has its own values under keys that begin with {OF_RANKS!r} or {KEYS!r}: give "
        "the value another name"
    )


def _refuse_equal_keys(groups: Iterable[PathGroup]) -> None:
    known: dict[str, Path] = {}
    for path in chain.from_iterable(groups):
        key = key_of(path)
        if key in known:
            raise CheckpointError(
                f"{key}: {_named(known[key])} and {_named(path)} both have this key in a DCP checkpoint, which joins names by "
                'dots: give one of them another name, or format="safetensors"'
            )
        known[key] = path


def names_beside_weights(names: Sequence[str]) -> list[str]:
    """Return the names of the trainer's values as a summary records them.

    Raises CheckpointError where they are too many for a summary.
    """
    recorded = [ascii(name) for name in names]
    nbytes = sum(map(len, recorded))
    if nbytes > _MOST_NAMES_NBYTES:
        raise CheckpointError(
            f"state=: has {len(names)} names of {nbytes} bytes, and with the weights at the top level a checkpoint records at "
            f"most {_MOST_NAMES_NBYTES} bytes of them: put the values into one dict under one name"
        )
    return recorded


def _named(path: Path) -> str:
    return "".join(f"[{part!r}]" for part in path)
