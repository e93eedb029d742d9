"""The entries of torch's metadata as rows of tables, thousands at once. `metadata_patterns.py` has what they look like.

Entries that are the same operations are one form: what it means is found out once, and what differs are columns of numbers. Sizes
are ids of the memo (`metadata_memo.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy
import torch

from fsdp_optim.foreign.dcp.metadata_memo import NO_SIZE, Memo, SizeColumn, TextColumn, check_before, joined
from fsdp_optim.foreign.dcp.metadata_patterns import (
    NOTHING,
    Form,
    Numbers,
    PlaceParts,
    Span,
    Spans,
    TensorParts,
    chunk_parts,
    forms_of,
    path_parts,
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
_BEFORE_OBJECT = 1  # values that an entry adds to the memo before the object of its value: the key
_BEFORE_PROPERTIES = 3  # the same before new properties: key, object, attributes


class TensorRows:
    """The tensors and other values: keys, dtypes and sizes, and the boxes of chunks. Sizes are ids of the memo."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self.keys: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self._columns: dict[str, list[Numbers]] = {
            name: [] for name in ("dtype", "size", "num_chunks", "offsets", "sizes")
        }
        self._heads: dict[bytes, int] = {}  # the dtypes
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

    def add(self, entries: Sequence[bytes]) -> None:
        """Add entries of `TENSORS`."""
        memo = self._memo
        forms = forms_of(entries, TensorParts.of)
        for form, parts in forms:
            self._check(form, parts)
        starts = memo.grow([form for form, _ in forms], len(entries))
        keys, boxes = TextColumn(memo, len(entries)), _Boxes(memo, len(entries), forms)
        for form, parts in forms:
            keys.add(form, parts.key, form.rows, starts[form.rows])
            boxes.add(form, parts, starts[form.rows], entries)
        texts = keys.listed()
        size, offsets, sizes = boxes.ids()
        self._add_objects(forms, starts)
        dtypes = numpy.full(len(entries), _PLAIN)
        for form, parts in forms:
            if not parts.is_plain:
                dtypes[form.rows] = self._dtype_of(parts.head, int(starts[form.rows[0]]))
            elif parts.is_shared:
                self._check_shared(form.refs(parts.plain), starts[form.rows])
        self._add(texts, dtype=dtypes, size=size, num_chunks=boxes.nums, offsets=offsets, sizes=sizes)

    def _check(self, form: Form, parts: TensorParts) -> None:
        """Check the classes and attributes of a form, and find out the dtype of new properties."""
        if parts.is_plain:
            if parts.is_new_plain:
                self._memo.check_span(form.first[slice(*parts.plain)], SavedBytes)
            return
        self._memo.check_span(parts.attribute, "chunks")
        if parts.has_new_head and parts.head not in self._heads:
            self._heads[parts.head] = self._dtype_in(parts.head)

    def _add_objects(self, forms: Sequence[tuple[Form, TensorParts]], starts: Numbers) -> None:
        """Add what stands for new properties and for new values that are no tensors."""
        properties, plains = [], []
        for form, parts in forms:
            if parts.is_new_plain:
                plains.append((starts[form.rows] + _BEFORE_OBJECT, numpy.zeros(len(form.rows), numpy.int64)))
            elif parts.has_new_head:
                dtypes = numpy.full(len(form.rows), self._heads[parts.head])
                properties.append((starts[form.rows] + _BEFORE_PROPERTIES, dtypes))
        self._properties.add(*joined(properties))
        self._plains.add(*joined(plains))

    def _dtype_in(self, head: bytes) -> int:
        """Return the id of the dtype of new properties."""
        of_class, properties, of_properties, dtype, *others, size = refs_in(head)
        for other in others:
            self._memo.value(other)  # the layout and the like, which are not needed, and must be there
        self._memo.check(of_class, SavedTensor)
        self._memo.check(properties, "properties")
        self._memo.check(of_properties, SavedProperties)
        self._memo.check(size, "size")
        return self._id_of(self._memo.value(dtype))

    def _dtype_of(self, head: bytes, length: int) -> int:
        """Return the id of the dtype of new properties, or of another tensor's.

        `length`: how many values the memo has before the first entry with these.
        """
        if head not in self._heads:
            of_class, attribute, number, size = refs_in(head)
            self._memo.check(of_class, SavedTensor)
            self._memo.check(attribute, "properties")
            self._memo.check(size, "size")
            check_before(number, length)
            self._heads[head] = self._id_of(self._memo.object_of(number, SavedProperties).dtype)
        return self._heads[head]

    def _properties_of(self, dtype: int) -> SavedProperties:
        properties = SavedProperties()
        properties.dtype = self.dtypes[dtype]
        return properties

    def _check_shared(self, numbers: Numbers, starts: Numbers) -> None:
        """Check that values of the memo are of no tensors. `starts`: how many values the memo has before each entry."""
        check_before(numbers, starts)
        for number in numpy.unique(numbers[self._plains.at(numbers) < 0]).tolist():  # of entries that were read slowly
            self._memo.object_of(number, SavedBytes)


class _Boxes:
    """The sizes of tensors, and the offsets and sizes of their chunks. `nums`: how many chunks each entry has."""

    def __init__(self, memo: Memo, num: int, forms: Sequence[tuple[Form, TensorParts]]) -> None:
        self._memo, self._num = memo, num
        self.nums = numpy.zeros(num, numpy.int64)
        for form, parts in forms:
            self.nums[form.rows] = parts.num_chunks
        self._total = int(self.nums.sum())
        self._firsts = numpy.cumsum(self.nums) - self.nums
        self._sizes = SizeColumn(memo, num + 2 * self._total)
        self._several: list[bytes] = []  # chunks of entries that have several,
        self._places: list[int] = []  # their places among all,
        self._starts: list[int] = []  # and how many values the memo has before each

    def add(self, form: Form, parts: TensorParts, starts: Numbers, entries: Sequence[bytes]) -> None:
        """Add those of a form. `starts`: how many values the memo has before each entry."""
        if parts.is_plain:
            return
        self._sizes.add(form, parts.size, form.rows, starts)
        firsts = self._firsts[form.rows]
        if parts.chunk:
            self._add_chunks(form, parts.chunk, firsts, starts)
        if not parts.chunks:
            return
        adds = [form.num_before(start) for start, _ in parts.chunks]
        for row, first, before in zip(form.rows.tolist(), firsts.tolist(), starts.tolist(), strict=True):
            entry = entries[row]
            self._several += [entry[start:stop] for start, stop in parts.chunks]
            self._places += range(first, first + len(adds))
            self._starts += [before + num for num in adds]

    def _add_chunks(self, form: Form, parts: Spans, places: Numbers, starts: Numbers) -> None:
        made, offsets, attribute, sizes = parts
        self._memo.check_new(form.first[slice(*made)], SavedChunk, "offsets")
        self._memo.check_span(form.first[slice(*attribute)], "sizes")
        self._sizes.add(form, offsets, self._num + places, starts)
        self._sizes.add(form, sizes, self._num + self._total + places, starts)

    def ids(self) -> list[Numbers]:
        """Return the ids of the sizes of all entries, and of the offsets and the sizes of all chunks."""
        places, starts = numpy.array(self._places, numpy.int64), numpy.array(self._starts, numpy.int64)
        for form, parts in forms_of(self._several, chunk_parts):
            self._add_chunks(form, parts, places[form.rows], starts[form.rows])
        return numpy.split(self._sizes.ids(), [self._num, self._num + self._total])


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

    def add(self, entries: Sequence[bytes]) -> None:
        """Add entries of `PATHS`."""
        forms = forms_of(entries, path_parts)
        nums = numpy.zeros(len(entries), numpy.int64)
        for form, spans in forms:
            nums[form.rows] = len(spans)
        firsts = numpy.cumsum(nums) - nums
        starts = self._memo.grow([form for form, _ in forms], len(entries))
        texts = TextColumn(self._memo, int(nums.sum()))
        for form, spans in forms:
            for number, span in enumerate(spans):
                texts.add(form, span, firsts[form.rows] + number, starts[form.rows])
        values, at = texts.listed(), [*firsts.tolist(), int(nums.sum())]
        self._add(
            [values[first] for first in at[:-1]],
            [tuple(values[first + 1 : stop]) for first, stop in pairwise(at)],
        )


class PlaceRows:
    """The places of chunks and values: of each row the key, the offsets (an id of the memo, or -1) and the number of its place.

    Rows may share a place, of which there are the file, the first byte and the number of bytes.
    """

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._numbers = memo.objects(self._place_of)
        self._names: dict[tuple[object, ...], list[str]] = {}  # of attributes, by what they look like
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

    def add(self, entries: Sequence[bytes]) -> None:
        """Add entries of `PLACES`."""
        memo, num = self._memo, len(entries)
        forms = forms_of(entries, PlaceParts.of)
        starts = memo.grow([form for form, _ in forms], num)
        texts, offsets = TextColumn(memo, 2 * num), SizeColumn(memo, num)  # keys and files
        new, shared = list[tuple[Numbers, ...]](), list[tuple[Numbers, Numbers]]()
        for form, parts in forms:
            rows, before = form.rows, starts[form.rows]
            index = self._attributes(form.first, parts.index, SavedIndex)
            texts.add(form, index["fqn"], rows, before)
            if "offset" in index:
                offsets.add(form, index["offset"], rows, before)
            if parts.place:
                place = self._attributes(form.first, parts.place, SavedPlace)
                texts.add(form, place["relative_path"], num + rows, before)
                number = before + form.num_before(parts.place[0][0])
                new.append((rows, number, form.ints(place["offset"]), form.ints(place["length"])))
            else:
                check_before(form.refs(parts.shared), before)
                shared.append((rows, form.refs(parts.shared)))
        values = texts.listed()
        rows, numbers, begins, nbytes = joined(new, 4)
        files = [values[num + row] for row in rows.tolist()]
        if {*map(type, values[:num]), *map(type, files)} != {str}:
            raise ValueError("a key or a file that is no text")
        which = numpy.empty(num, numpy.int64)
        which[rows] = self._add_places(files, begins.tolist(), nbytes.tolist())
        self._numbers.add(numbers, which[rows])
        rows, numbers = joined(shared)
        which[rows] = self._named(numbers)
        self._add(values[:num], offsets.ids(), which)

    def _named(self, of_memo: Numbers) -> Numbers:
        """Return the numbers of places of entries before, by their numbers in the memo."""
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

    def _attributes(self, entry: bytes, parts: Spans, cls: object) -> dict[str, Span]:
        """Return the spans of the values of attributes by name.

        `parts`: class and first attribute, value, attribute, value, ...
        """
        spans = [span for span in parts if span != NOTHING]
        looks = [entry[slice(*span)] for span in spans[::2]]
        key = (cls, *looks)
        names = self._names.get(key)
        if names is None:
            of_class, *attributes = [number for look in looks for number in refs_in(look)]
            self._memo.check(of_class, cls)
            names = self._names[key] = [*map(self._memo.text, attributes)]
            if len({*names}) < len(names):
                raise ValueError("an attribute that is there twice")
        return dict(zip(names, spans[1::2], strict=True))
