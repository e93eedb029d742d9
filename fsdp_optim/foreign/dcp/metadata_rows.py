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

from fsdp_optim.foreign.dcp.metadata_memo import (
    NO_SIZE,
    Memo,
    SizeColumn,
    TextColumn,
    check_before,
    joined,
    nums_memoized,
    resolved,
)
from fsdp_optim.foreign.dcp.metadata_patterns import (
    CHUNK,
    INTS,
    NONE,
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
        self._heads: dict[bytes, int] = {}  # the dtypes of new properties
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

    def add(self, matched: Sequence[tuple[bytes, ...]]) -> None:
        """Add entries that `TENSORS` has matched."""
        memo = self._memo
        forms = forms_of([entry or begun for entry, begun, _, _ in matched], TensorParts.of)
        boxes = _Boxes(memo, forms, [chunks for _, _, chunks, _ in matched])
        for form, parts in forms:
            self._check(form, parts)
        starts = memo.grow(boxes.nums_memoized)
        keys = TextColumn(memo, len(matched))
        for form, parts in forms:
            keys.add(form, parts.key, form.rows, starts[form.rows])
        boxes.add(starts)
        texts = keys.listed()
        size, offsets, sizes = boxes.ids()
        self._add_objects(forms, starts)
        dtypes = numpy.full(len(matched), _PLAIN)
        for form, parts in forms:
            if not parts.is_plain:
                dtypes[form.rows] = self._dtypes_of(form, parts, starts[form.rows])
            elif not parts.is_new:
                self._check_shared(form.refs(parts.shared), starts[form.rows])
        self._add(texts, dtype=dtypes, size=size, num_chunks=boxes.nums, offsets=offsets, sizes=sizes)

    def _check(self, form: Form, parts: TensorParts) -> None:
        """Check the classes and attributes of a form, and find out the dtype of new properties."""
        memo, head = self._memo, form.first[slice(*parts.head)]
        if parts.is_plain:
            if parts.is_new:
                memo.check_span(head, SavedBytes)
            return
        memo.check_span(form.first[slice(*parts.attribute)], "chunks")
        if head in self._heads:
            return
        if parts.is_new:
            of_class, properties, of_properties, dtype, *others, size = refs_in(head)
            for other in others:
                memo.value(other)  # the layout and the like, which are not needed, and must be there
            memo.check(of_properties, SavedProperties)
            self._heads[head] = self._id_of(memo.value(dtype))
        else:
            of_class, properties, _, size = refs_in(head)
        memo.check(of_class, SavedTensor)
        memo.check(properties, "properties")
        memo.check(size, "size")

    def _add_objects(self, forms: Sequence[tuple[Form, TensorParts]], starts: Numbers) -> None:
        """Add what stands for new properties and for new values that are no tensors."""
        properties, plains = [], []
        for form, parts in forms:
            if not parts.is_new:
                continue
            if parts.is_plain:
                plains.append((starts[form.rows] + _BEFORE_OBJECT, numpy.zeros(len(form.rows), numpy.int64)))
            else:
                dtypes = numpy.full(len(form.rows), self._heads[form.first[slice(*parts.head)]])
                properties.append((starts[form.rows] + _BEFORE_PROPERTIES, dtypes))
        self._properties.add(*joined(properties))
        self._plains.add(*joined(plains))

    def _dtypes_of(self, form: Form, parts: TensorParts, starts: Numbers) -> Numbers:
        """Return the ids of the dtypes. `starts`: how many values the memo has before each entry."""
        if parts.is_new:
            return numpy.array([self._heads[form.first[slice(*parts.head)]]])
        numbers = form.refs(parts.shared)
        check_before(numbers, starts)
        return resolved(numbers, self._properties.at(numbers), self._dtype_at)

    def _dtype_at(self, number: int) -> int:
        return self._id_of(self._memo.object_of(number, SavedProperties).dtype)

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
    """The sizes of tensors, and the offsets and sizes of their chunks.

    `several`: of each entry its chunks, where it has several. `nums`: how many chunks each entry has; `nums_memoized`: how many
    values each entry adds to the memo.
    """

    def __init__(self, memo: Memo, forms: Sequence[tuple[Form, TensorParts]], several: Sequence[bytes]) -> None:
        self._memo, self._forms, self._num = memo, forms, len(several)
        self.nums, self._num_before = numpy.zeros(self._num, numpy.int64), nums_memoized(forms, self._num)
        for form, parts in forms:
            self.nums[form.rows] = bool(parts.chunk)
        matched = {row: CHUNK.borders.findall(text) for row, text in enumerate(several) if text}
        self._of_rows = numpy.repeat(numpy.array([*matched], numpy.int64), [len(each) for each in matched.values()])
        self.nums += numpy.bincount(self._of_rows, minlength=self._num)
        listed = [chunk for of_row in matched.values() for chunk, _ in of_row]
        if sum(map(len, listed)) != sum(map(len, several)):
            raise ValueError("bytes between chunks")
        self._chunk_forms = forms_of(listed, chunk_parts)
        self._memoized = nums_memoized(self._chunk_forms, len(listed))
        in_chunks = numpy.bincount(self._of_rows, self._memoized, self._num).astype(numpy.int64)
        self.nums_memoized = self._num_before + in_chunks
        self._in_chunks_before = numpy.cumsum(in_chunks) - in_chunks
        self._firsts = numpy.cumsum(self.nums) - self.nums
        self._total = int(self.nums.sum())
        self._sizes = SizeColumn(memo, self._num + 2 * self._total)

    def add(self, starts: Numbers) -> None:
        """Add all. `starts`: how many values the memo has before each entry."""
        for form, parts in self._forms:
            if not parts.is_plain:
                self._sizes.add(form, parts.size, form.rows, starts[form.rows])
            if parts.chunk:
                self._add_chunks(form, parts.chunk, self._firsts[form.rows], starts[form.rows])
        rows, num = self._of_rows, len(self._of_rows)
        places = self._firsts[rows] + numpy.arange(num) - numpy.searchsorted(rows, rows)
        before = starts[rows] + self._num_before[rows] - self._in_chunks_before[rows]
        before += numpy.cumsum(self._memoized) - self._memoized
        for form, spans in self._chunk_forms:
            self._add_chunks(form, spans, places[form.rows], before[form.rows])

    def _add_chunks(self, form: Form, parts: Spans, places: Numbers, starts: Numbers) -> None:
        """Add chunks of a form at some places. `starts`: how many values the memo has before each entry of the form."""
        made, offsets, attribute, sizes = parts
        self._memo.check_new(form.first[slice(*made)], SavedChunk, "offsets")
        self._memo.check_span(form.first[slice(*attribute)], "sizes")
        self._sizes.add(form, offsets, self._num + places, starts)
        self._sizes.add(form, sizes, self._num + self._total + places, starts)

    def ids(self) -> list[Numbers]:
        """Return the ids of the sizes of all entries, and of the offsets and the sizes of all chunks."""
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

    def add(self, matched: Sequence[tuple[bytes, ...]]) -> None:
        """Add entries that `PATHS` has matched."""
        forms = forms_of([entry for entry, _ in matched], path_parts)
        nums = numpy.zeros(len(matched), numpy.int64)
        for form, spans in forms:
            nums[form.rows] = len(spans)
        firsts = numpy.cumsum(nums) - nums
        starts = self._memo.grow(nums_memoized(forms, len(matched)))
        texts = TextColumn(self._memo, int(nums.sum()))
        for form, spans in forms:
            for number, span in enumerate(spans):
                texts.add(form, span, firsts[form.rows] + number, starts[form.rows])
        values, at = texts.listed(), [*firsts.tolist(), int(nums.sum())]
        self._add(
            [values[first] for first in at[:-1]], [tuple(values[first + 1 : stop]) for first, stop in pairwise(at)]
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

    def add(self, matched: Sequence[tuple[bytes, ...]]) -> None:
        """Add entries that `PLACES` has matched."""
        memo, num = self._memo, len(matched)
        forms = forms_of([entry for entry, _ in matched], PlaceParts.of)
        starts = memo.grow(nums_memoized(forms, num))
        texts, offsets = TextColumn(memo, 2 * num), SizeColumn(memo, num)  # keys and files
        new, shared = list[tuple[Numbers, ...]](), list[tuple[Numbers, Numbers]]()
        for form, parts in forms:
            rows, before = form.rows, starts[form.rows]
            index = self._attributes(form.first, parts.index, SavedIndex)
            texts.add(form, index["fqn"], rows, before)
            if form.first[index["index"][0]] not in (*INTS, NONE):
                raise ValueError("the index of a chunk that is no number")
            if "offset" in index:
                offsets.add(form, index["offset"], rows, before)
            if parts.place:
                place = self._attributes(form.first, parts.place, SavedPlace)
                texts.add(form, place["relative_path"], num + rows, before)
                number = before + form.num_before(parts.place[0][0])
                new.append((rows, number, form.ints(place["offset"]), form.ints(place["length"])))
            else:
                numbers = form.refs(parts.shared)
                check_before(numbers, before)
                shared.append((rows, numbers))
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
        return resolved(of_memo, self._numbers.at(of_memo), self._added)

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
        """Return the spans of the values of attributes by name. `parts`: class and first attribute, value, attribute, ..."""
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
