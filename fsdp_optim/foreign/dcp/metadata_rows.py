"""The entries of torch's metadata as rows of tables, thousands at once. `metadata_patterns.py` has what they look like.

Sizes are ids of the memo (`metadata_memo.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import Any

import numpy
import torch

from fsdp_optim.foreign.dcp.metadata_memo import NO_SIZE, NONE, Memo, check_before
from fsdp_optim.foreign.dcp.metadata_patterns import (
    CHUNKS,
    PATH_TOKENS,
    Numbers,
    Tokens,
    refs_in,
)
from fsdp_optim.foreign.dcp.metadata_pickle import (
    SavedBytes,
    SavedChunk,
    SavedIndex,
    SavedPlace,
    SavedProperties,
    SavedTensor,
)

_PLAIN = -1  # in the place of a dtype: a value that is no tensor
_TUPLES = tuple(b"t\x85\x86\x87")
_OF_OBJECT = 2  # values that an object adds to the memo: itself, and its attributes
_HEAD = 5  # values that a tensor adds to the memo before its size: key, object, attributes, properties, their tuple
_SHARED_HEAD = 3  # the same, where the properties are those of another tensor
_NEW_PLAIN, _SHARED_PLAIN = 2, 1  # values that an entry of no tensor adds to the memo: key and object, or the key alone
_REFS_OF_SHARED_HEAD = 4  # class, the attribute of the properties, these, the attribute of the size

Row = tuple[bytes, ...]


def _starts(lengths: Numbers, first: int) -> Numbers:
    """Return where each of several ranges begins that lie end to end."""
    return numpy.cumsum(lengths) - lengths + first


def _first_rows(tokens: Row, known: Iterable[bytes]) -> dict[bytes, int]:
    """Return the first row of each token that is not known."""
    unknown = set(tokens).difference(known)
    if not unknown:
        return {}  # nearly always
    return {token: row for row, token in reversed(list(enumerate(tokens))) if token in unknown}


def _is_new(plain: bytes) -> bool:
    """Return whether the span of a value that is no tensor makes an object of a class, and does not name one."""
    return len(plain) > (2 if plain[:1] == b"h" else 5)


class TensorRows:
    """The tensors and other values: keys, dtypes and sizes, and the boxes of chunks. Sizes are ids of the memo."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self.keys: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self._columns: dict[str, list[Numbers]] = {
            name: [] for name in ("dtype", "size", "num_chunks", "offsets", "sizes")
        }
        self._heads: dict[bytes, int] = {b"": _PLAIN}
        self._adds_of_head: dict[bytes, int] = {b"": 0}
        self._adds_of_plain: dict[bytes, int] = {b"": 0}
        self._checked: set[bytes] = {b""}
        self._properties = memo.objects(self._properties_of)
        self._plains = memo.objects(lambda _: SavedBytes())

    def column(self, name: str) -> Numbers:
        """Return one of the columns: `dtype`, `size`, `num_chunks` of each row, or `offsets`, `sizes` of each chunk."""
        return numpy.concatenate(self._columns[name] or [numpy.empty(0, numpy.int64)])

    def _add(self, keys: Sequence[str], **columns: Numbers) -> None:
        self.keys += keys
        for name, column in columns.items():
            self._columns[name].append(column)

    def add_one(self, key: Any, value: Any) -> bool:
        """Add an object that was made of one entry; False: it is none, or not complete."""
        if type(key) is not str:
            return False
        sizes: list[tuple[int, int]] = []
        dtype, size = _PLAIN, NO_SIZE
        if isinstance(value, SavedTensor):
            if not isinstance(value.properties, SavedProperties) or type(value.size) is not tuple:
                return False
            dtype, size = self._id_of(value.properties.dtype), self._memo.id_of_size(value.size)
            for chunk in value.chunks:
                if not isinstance(chunk, SavedChunk) or {type(chunk.offsets), type(chunk.sizes)} != {tuple}:
                    return False
                sizes.append((self._memo.id_of_size(chunk.offsets), self._memo.id_of_size(chunk.sizes)))
        elif not isinstance(value, SavedBytes):
            return False
        boxes = numpy.array(sizes, numpy.int64).reshape(-1, 2)
        self._add(
            [key],
            dtype=numpy.array([dtype]),
            size=numpy.array([size]),
            num_chunks=numpy.array([len(sizes)]),
            offsets=boxes[:, 0],
            sizes=boxes[:, 1],
        )
        return True

    def _id_of(self, dtype: Any) -> int:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"a {type(dtype).__name__} in the place of a dtype")
        if dtype not in self.dtypes:
            self.dtypes.append(dtype)
        return self.dtypes.index(dtype)

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows of `TENSORS`."""
        keys, heads, size_tokens, lists, *of_single, several, plains, _ = zip(*rows, strict=True)
        memo = self._memo
        for span in {*lists} - self._checked:
            memo.check(refs_in(span)[0], "chunks")
            self._checked.add(span)
        for head in set(heads) - self._adds_of_head.keys():
            self._adds_of_head[head] = adds = _HEAD if len(refs_in(head)) > _REFS_OF_SHARED_HEAD else _SHARED_HEAD
            if adds == _HEAD:
                self._heads[head] = self._dtype_in(head)
        for plain in set(plains) - self._adds_of_plain.keys():
            self._adds_of_plain[plain] = adds = _NEW_PLAIN if _is_new(plain) else _SHARED_PLAIN
            if adds == _NEW_PLAIN:
                memo.check(refs_in(plain)[0], SavedBytes)
                self._checked.add(plain)
        of_heads = numpy.array([self._adds_of_head[head] for head in heads])
        of_plains = numpy.array([self._adds_of_plain[plain] for plain in plains])
        (firsts, offset_tokens, seconds, sizes_tokens), nums = _chunks(of_single, several)
        for first, second in set(zip(firsts, seconds, strict=True)):
            memo.check_new(first, SavedChunk, "offsets")
            memo.check(refs_in(second)[0], "sizes")
        size_tokens = tuple([token or NONE for token in size_tokens])
        (size, of_size), (offsets, of_offsets), (sizes, of_sizes) = map(
            memo.new_sizes, (size_tokens, offset_tokens, sizes_tokens)
        )
        before = of_plains + numpy.where(of_heads > 0, of_heads + of_size + 1, 0)
        per_chunk = 2 + of_offsets + of_sizes
        row_of = numpy.repeat(numpy.arange(len(rows)), nums)
        in_chunks = numpy.bincount(row_of, per_chunk, len(rows)).astype(numpy.int64)
        starts = _starts(before + in_chunks, memo.length)
        of_chunks = _starts(per_chunk, 0)
        of_chunks += (starts + before - _starts(in_chunks, 0))[row_of]
        memo.length += int(before.sum() + per_chunk.sum())
        texts = memo.texts(Tokens(keys), starts)
        dtypes = self._dtypes(heads, starts, of_heads)
        self._check_plains(plains, starts, of_plains)
        after = of_chunks + 2 + of_offsets
        memo.add_sizes(
            [starts + of_heads + of_size - 1, after - 1, after + of_sizes - 1],
            [size, offsets, sizes],
        )
        columns = [size_tokens, offset_tokens, sizes_tokens]
        befores = [starts + of_heads, of_chunks + 2, after]
        for tokens, ids, before in zip(columns, (size, offsets, sizes), befores, strict=True):
            memo.resolve_sizes(tokens, ids, before)
        self._add(texts, dtype=dtypes, size=size, num_chunks=nums, offsets=offsets, sizes=sizes)

    def _dtypes(self, heads: Row, starts: Numbers, of_heads: Numbers) -> Numbers:
        """Return the ids of the dtypes of some rows. `starts`: how many values the memo has before each."""
        are_new = numpy.flatnonzero(of_heads == _HEAD)
        new = [self._heads[heads[at]] for at in are_new.tolist()]
        self._properties.add(starts[are_new] + _HEAD - 2, numpy.array(new, numpy.int64))
        for head, at in _first_rows(heads, self._heads).items():
            self._heads[head] = self._shared_dtype_in(head, int(starts[at]))
        return numpy.array([self._heads[head] for head in heads])

    def _shared_dtype_in(self, head: bytes, length: int) -> int:
        """Return the id of the dtype of properties of another tensor. `length`: of the memo before the first row of this kind."""
        of_class, attribute, number, size = refs_in(head)
        self._memo.check(of_class, SavedTensor)
        self._memo.check(attribute, "properties")
        self._memo.check(size, "size")
        check_before(number, length)
        return self._id_of(self._memo.object_of(number, SavedProperties).dtype)

    def _properties_of(self, dtype: int) -> SavedProperties:
        properties = SavedProperties()
        properties.dtype = self.dtypes[dtype]
        return properties

    def _check_plains(self, plains: Row, starts: Numbers, of_plains: Numbers) -> None:
        """Add what stands for values that are no tensors, where it is new, and check the rest. `starts`: as for `_dtypes`."""
        are_new = numpy.flatnonzero(of_plains == _NEW_PLAIN)
        self._plains.add(starts[are_new] + 1, numpy.zeros(len(are_new), numpy.int64))
        for plain, at in _first_rows(plains, self._checked).items():
            (number,) = refs_in(plain)
            check_before(number, int(starts[at]))
            self._memo.object_of(number, SavedBytes)
            self._checked.add(plain)

    def _dtype_in(self, head: bytes) -> int:
        of_class, properties, of_properties, dtype, *others, size = refs_in(head)
        for other in others:
            self._memo.value(other)  # the layout and the like, which are not needed, and must be there
        self._memo.check(of_class, SavedTensor)
        self._memo.check(properties, "properties")
        self._memo.check(of_properties, SavedProperties)
        self._memo.check(size, "size")
        return self._id_of(self._memo.value(dtype))


def _chunks(of_single: Sequence[Row], several: Row) -> tuple[list[Row], Numbers]:
    """Return the four columns of the chunks of all rows, and their number in each row.

    `of_single`: the columns of the rows that have one chunk; `several`: the chunks of the others.
    """
    firsts = of_single[0]
    if all(firsts):
        return list(of_single), numpy.ones(len(firsts), numpy.int64)
    if not any(several):
        return [tuple(compress(column, firsts)) for column in of_single], numpy.array([*map(bool, firsts)], numpy.int64)
    of_rows = [
        [row] if row[0] else CHUNKS.findall(chunks)
        for row, chunks in zip(zip(*of_single, strict=True), several, strict=True)
    ]
    columns = list(zip(*chain.from_iterable(of_rows), strict=True)) or [()] * len(of_single)
    return columns, numpy.array([*map(len, of_rows)], numpy.int64)


class PathRows:
    """The places of keys in the saved tree."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.num = 0

    def add_one(self, key: Any, value: Any) -> bool:
        """Add one path that was made of one entry; False: it is none."""
        if type(key) is not str or type(value) is not tuple or not all(type(part) in (str, int) for part in value):
            return False
        self._add([key], [value])
        return True

    def _add(self, keys: Sequence[str], paths: Iterable[tuple[str | int, ...]]) -> None:
        self.paths.update(zip(keys, paths, strict=True))
        self.num += len(keys)

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows of `PATHS`: first all texts, in the order of the memo, and then the values that refer to them."""
        memo = self._memo
        tokens = Tokens(PATH_TOKENS.findall(b"".join([entry for entry, _ in rows])))
        is_end = numpy.isin(tokens.codes, _TUPLES)
        adds = tokens.are_texts.astype(numpy.int64) + is_end
        values = memo.texts(tokens, _starts(adds, memo.length))
        memo.length += int(adds.sum())
        ends = numpy.flatnonzero(is_end).tolist()
        starts = [0, *[end + 1 for end in ends[:-1]]]
        self._add(
            [values[start] for start in starts],
            [tuple(values[start + 1 : end]) for start, end in zip(starts, ends, strict=True)],
        )


class PlaceRows:
    """The places of chunks and values: of each row the key, the offsets (an id of the memo, or -1) and the number of its place.

    Rows may share a place, of which there are the file, the first byte and the number of bytes.
    """

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._numbers = memo.objects(self._place_of)
        self.keys: list[str] = []
        self.files: list[str] = []
        self.starts: list[int] = []
        self.nbytes: list[int] = []
        self._offsets: list[Numbers] = []
        self._which: list[Numbers] = []

    @property
    def offsets(self) -> Numbers:
        return numpy.concatenate(self._offsets or [numpy.empty(0, numpy.int64)])

    @property
    def which(self) -> Numbers:
        """The number of the place of each row."""
        return numpy.concatenate(self._which or [numpy.empty(0, numpy.int64)])

    def _add(self, keys: Sequence[str], offsets: Numbers, which: Numbers) -> None:
        self.keys += keys
        self._offsets.append(offsets)
        self._which.append(which)

    def _add_places(self, files: Sequence[str], starts: Sequence[int], nbytes: Sequence[int]) -> Numbers:
        """Add places, and return their numbers."""
        first = len(self.files)
        self.files += files
        self.starts += starts
        self.nbytes += nbytes
        return numpy.arange(first, len(self.files))

    def add_one(self, index: Any, place: Any) -> bool:
        """Add one place that was made of one entry; False: it is none, or not complete."""
        if not isinstance(index, SavedIndex) or not isinstance(place, SavedPlace) or place.transforms != ():
            return False
        if type(index.fqn) is not str or type(index.offset) not in (tuple, type(None)):
            return False
        offset = NO_SIZE if index.offset is None else self._memo.id_of_size(index.offset)
        self._add([index.fqn], numpy.array([offset]), self._add_places([place.file], [place.start], [place.nbytes]))
        return True

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows of `PLACES`."""
        memo, columns = self._memo, list(zip(*rows, strict=True))
        shared = columns[12]
        are_new = numpy.array([not ref for ref in shared])
        index = self._by_name(columns[:6], SavedIndex)
        index.setdefault("offset", (NONE,) * len(rows))
        place: dict[str, Row] = {"relative_path": (), "offset": (), "length": ()}
        if are_new.any():
            place = self._by_name([tuple(compress(column, are_new)) for column in columns[6:12]], SavedPlace)
        texts = Tokens((*index["fqn"], *place["relative_path"]))
        of_keys = texts.are_texts[: len(rows)].astype(numpy.int64)
        of_places = numpy.zeros(len(rows), numpy.int64)
        of_places[are_new] = _OF_OBJECT + texts.are_texts[len(rows) :]
        if not {token[:1] for token in index["index"]} <= {b"K", b"M", b"J", NONE}:
            raise ValueError("the index of a chunk that is no number")
        offsets, of_offsets = memo.new_sizes(index["offset"])
        adds = {"fqn": of_keys, "offset": of_offsets}
        total = _OF_OBJECT + sum(adds.values()) + of_places
        starts = _starts(total, memo.length)
        memo.length += int(total.sum())
        numbers, at = dict[str, Numbers](), starts + _OF_OBJECT
        for name in index:
            numbers[name] = at
            at = at + adds.get(name, 0)
        memo.add_sizes([numbers["offset"] + of_offsets - 1], [offsets])
        named = memo.texts(texts, numpy.concatenate([numbers["fqn"], at[are_new] + _OF_OBJECT]))
        if {*map(type, named)} != {str}:
            raise ValueError("a key or a file that is no text")
        memo.resolve_sizes(index["offset"], offsets, numbers["offset"])
        which = numpy.empty(len(rows), numpy.int64)
        which[are_new] = self._add_places(
            named[len(rows) :], Tokens(place["offset"]).ints(), Tokens(place["length"]).ints()
        )
        self._numbers.add(at[are_new], which[are_new])
        which[~are_new] = self._named(tuple(compress(shared, shared)), starts[~are_new])
        self._add(named[: len(rows)], offsets, which)

    def _named(self, refs: Row, starts: Numbers) -> Numbers:
        """Return the numbers of places of entries before. `starts`: how many values the memo has before each of these."""
        of_memo = Tokens(refs).numbers(numpy.arange(len(refs)))
        check_before(of_memo, starts)
        numbers = self._numbers.at(of_memo)
        missing = of_memo[numbers < 0].tolist()  # of entries that were read slowly
        added = {number: self._added(number) for number in set(missing)}
        numbers[numbers < 0] = [added[number] for number in missing]
        return numbers

    def _added(self, number: int) -> int:
        """Add the place with a number of the memo, and return its own."""
        place = self._memo.object_of(number, SavedPlace)
        if place.transforms != ():
            raise ValueError("a place with transforms")
        return int(self._add_places([place.file], [place.start], [place.nbytes])[0])

    def _place_of(self, number: int) -> SavedPlace:
        place = SavedPlace()
        place.file, place.start, place.nbytes = self.files[number], self.starts[number], self.nbytes[number]
        place.transforms = ()
        return place

    def _by_name(self, columns: Sequence[Row], cls: object) -> dict[str, Row]:
        """Return the values of three attributes by name. Raises ValueError for rows with other attributes.

        Where a row lacks the last one, its value is None.
        """
        span, second = columns[0][0], columns[2][0]
        if columns[0].count(span) + columns[2].count(second) != 2 * len(columns[0]):
            raise ValueError("entries with several classes or attributes in one place")
        of_class, first = refs_in(span)
        self._memo.check(of_class, cls)
        third = {*columns[4]} - {b""}
        numbers = [first, *(number for attribute in (second, *third) for number in refs_in(attribute))]
        if len(third) > 1:
            raise ValueError("entries with several attributes in one place")
        values = [*columns[1:4:2], tuple([value or NONE for value in columns[5]])]
        names = list(map(self._memo.text, numbers))
        if len({*names}) < len(names):
            raise ValueError("an attribute that is there twice")
        return dict(zip(names, values, strict=False))
