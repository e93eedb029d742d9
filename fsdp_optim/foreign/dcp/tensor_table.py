"""The tensors of a checkpoint as columns: an object for a tensor is made when it is asked for, because there may be a million."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from math import prod
from typing import Any, NamedTuple

import numpy
from msgspec import Struct

from fsdp_optim.foreign.dcp.metadata_patterns import Numbers
from fsdp_optim.foreign.dcp.metadata_tables import Tables
from fsdp_optim.layout import Shape
from fsdp_optim.tensors.memory import dtype_name, dtype_named

Cut = tuple[tuple[Shape, Shape], ...]
"""(offsets, sizes) of each chunk of a tensor."""

_MOST_NBYTES = 1 << 62  # of a file
_MOST = 1 << 58  # elements; a tensor has fewer, and its bytes are below the largest number of numpy


class ItemPlace(Struct, frozen=True, gc=False):
    """A range of a file: an archive of torch.save.

    Attributes:
        file, start, nbytes: the place. The name of the file is relative to the folder of the checkpoint.
        transforms: how the bytes were transformed when they were written, such as "stream.zstd/1".
        key: the key of the value.
    """

    file: str
    start: int
    nbytes: int
    transforms: tuple[str, ...]
    key: str


class Tensor(Struct, frozen=True, gc=False):
    """A tensor without its elements. `boxes`: (offsets, sizes) of each chunk; `items`: the item of each chunk."""

    dtype: str
    shape: Shape
    boxes: Cut
    items: tuple[ItemPlace, ...]


class _Columns(NamedTuple):
    """The columns of a table. Dtypes, shapes and cuts are indices into lists.

    Attributes:
        dtypes, shapes, cuts: of each tensor.
        ends: one past the last chunk of each tensor; its chunks begin at the end of the tensor before.
        files, starts, nbytes: of each chunk, its place.
    """

    dtypes: Numbers
    shapes: Numbers
    cuts: Numbers
    ends: Numbers
    files: Numbers
    starts: Numbers
    nbytes: Numbers


class TensorTable(Mapping[str, Tensor]):
    """The tensors by key. Each question makes a new object.

    `files`: the files, by number. `transforms`: the transforms of those chunks that have some, by the number of the chunk.
    """

    def __init__(
        self,
        keys: Iterable[str],
        lists: tuple[Sequence[str], Sequence[Shape], Sequence[Cut], Sequence[str]],
        columns: _Columns,
        transforms: Mapping[int, tuple[str, ...]],
    ) -> None:
        self._row_of = {key: row for row, key in enumerate(keys)}
        self.dtypes, self.shapes, self.cuts, self.files = lists
        small = [_small(column, len(of)) for column, of in zip(columns[:3], lists[:3], strict=True)]
        self.columns = columns._replace(
            dtypes=small[0], shapes=small[1], cuts=small[2], files=_small(columns.files, len(self.files))
        )
        self.transforms = transforms
        if len(columns.starts) and int((columns.starts | columns.nbytes).max()) >= _MOST_NBYTES:
            raise ValueError("a place that no file has")

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> TensorTable:
        """Return the table of tensors that are there as objects."""
        lists: tuple[dict[Any, int], ...] = ({}, {}, {}, {})
        rows = [
            [_id_in(of, value) for of, value in zip(lists, (each.dtype, each.shape, each.boxes), strict=False)]
            for each in tensors.values()
        ]
        items = [item for each in tensors.values() for item in each.items]
        places = [[_id_in(lists[3], item.file), item.start, item.nbytes] for item in items]
        ends = numpy.cumsum([len(each.items) for each in tensors.values()], dtype=numpy.int64)
        by_row, by_chunk = (numpy.array(table, numpy.int64).reshape(-1, 3).T for table in (rows, places))
        transforms = {number: item.transforms for number, item in enumerate(items) if item.transforms}
        dtypes, shapes, cuts, files = map(list, lists)
        by_tensor = dict(zip(("dtypes", "shapes", "cuts"), by_row, strict=True))
        columns = _Columns(**by_tensor, ends=ends, **dict(zip(("files", "starts", "nbytes"), by_chunk, strict=True)))
        return cls(tensors, (dtypes, shapes, cuts, files), columns, transforms)

    def __getitem__(self, key: str) -> Tensor:
        columns, row = self.columns, self._row_of[key]
        start, end = int(columns.ends[row - 1]) if row else 0, int(columns.ends[row])
        files, transforms = self.files, self.transforms
        in_files, starts = columns.files[start:end].tolist(), columns.starts[start:end].tolist()
        nbytes = columns.nbytes[start:end].tolist()
        items = [
            ItemPlace(files[file], first, length, transforms.get(number, ()) if transforms else (), key)
            for number, file, first, length in zip(range(start, end), in_files, starts, nbytes, strict=True)
        ]
        return Tensor(
            self.dtypes[columns.dtypes[row]],
            self.shapes[columns.shapes[row]],
            self.cuts[columns.cuts[row]],
            tuple(items),
        )

    def __contains__(self, key: object) -> bool:
        return key in self._row_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)

    def row_of(self, key: str) -> int:
        return self._row_of[key]

    def keys_of(self, rows: Sequence[int]) -> list[str]:
        """Return the keys of some rows."""
        keys = list(self._row_of)
        return [keys[row] for row in rows]

    def keys_of_dtype(self, dtype: str) -> list[str]:
        """Return the keys of the tensors of a dtype, in the order of the table."""
        if dtype not in self.dtypes:
            return []
        return self.keys_of(numpy.flatnonzero(self.columns.dtypes == self.dtypes.index(dtype)).tolist())

    def keys_of_chunks(self, numbers: Sequence[int]) -> list[str]:
        """Return the keys of the tensors that have these chunks."""
        return self.keys_of(numpy.searchsorted(self.columns.ends, numbers, side="right").tolist())

    def places(self) -> Iterator[tuple[tuple[str, int, int], str]]:
        """Yield the file, the first byte and the number of bytes of each chunk, with the key of its tensor."""
        columns = self.columns
        files = map(self.files.__getitem__, columns.files.tolist())
        keys = chain.from_iterable(map(repeat, self._row_of, numpy.diff(columns.ends, prepend=0).tolist()))
        return zip(zip(files, columns.starts.tolist(), columns.nbytes.tolist(), strict=True), keys, strict=True)

    def dimensions(self) -> dict[str, int]:
        """Return the number of dimensions of each tensor."""
        each = numpy.array([*map(len, self.shapes)], numpy.int64)
        return dict(zip(self._row_of, each[self.columns.shapes].tolist(), strict=True))

    def kinds(self) -> tuple[Numbers, Numbers]:
        """Return a row of each kind of tensor, of equal shape and cut, and the number of the kind of each tensor."""
        code = self.columns.shapes.astype(numpy.int64) * len(self.cuts) + self.columns.cuts
        _, rows, kinds = numpy.unique(code, return_index=True, return_inverse=True)
        return rows, _small(kinds, len(rows))

    def too_long(self) -> tuple[int, int] | None:
        """Return the row of a tensor that has a chunk with more bytes than its item, and which chunk; None if there is none."""
        columns, lengths = self.columns, [*map(len, self.cuts)]
        rows = numpy.repeat(numpy.arange(len(self)), numpy.diff(columns.ends, prepend=0))
        numels = numpy.array([min(prod(sizes), _MOST) for cut in self.cuts for _, sizes in cut], numpy.int64)
        itemsizes = numpy.array([dtype_named(dtype).itemsize for dtype in self.dtypes], numpy.int64)
        of_cuts = numpy.cumsum([0, *lengths])[:-1][columns.cuts]
        starts = numpy.concatenate([[0], columns.ends[:-1]])[: len(self)]
        at = numpy.arange(len(rows)) + (of_cuts - starts)[rows]
        needed = numels[at] * itemsizes[columns.dtypes[rows]]
        places = numpy.flatnonzero(needed > columns.nbytes)
        if not len(places):
            return None
        row = int(rows[places[0]])
        return row, int(places[0] - starts[row])

    def ends_of_files(self) -> dict[str, tuple[int, str]]:
        """Return the highest byte of each file, and a key that it belongs to. Files come in the order of their first tensors."""
        files, ends = self.columns.files, self.columns.starts + self.columns.nbytes
        highest = numpy.zeros(len(self.files), numpy.int64)
        numpy.maximum.at(highest, files, ends)
        _, firsts = numpy.unique(files, return_index=True)
        at_end = numpy.flatnonzero(ends == highest[files])
        numbers, lasts = numpy.unique(files[at_end], return_index=True)
        by_file = dict(zip(numbers.tolist(), at_end[lasts].tolist(), strict=True))
        ordered = [int(files[first]) for first in sorted(firsts.tolist())]
        keys = self.keys_of_chunks([by_file[file] for file in ordered])
        return {self.files[file]: (int(highest[file]), key) for file, key in zip(ordered, keys, strict=True)}


def as_table(tensors: Mapping[str, Tensor]) -> TensorTable:
    """Return tensors as a table, which they may be."""
    return tensors if isinstance(tensors, TensorTable) else TensorTable.of(tensors)


def _id_in(numbers: dict[Any, int], value: Any) -> int:
    return numbers.setdefault(value, len(numbers))


def _small(column: Numbers, length: int) -> Any:
    """Return indices into a list of this length in few bytes each."""
    return column.astype(numpy.uint8 if length <= 1 << 8 else numpy.uint16 if length <= 1 << 16 else numpy.int64)


# ------------------------------------------------------------------------------------------- from the rows of metadata


def table_of(tables: Tables, folder: str) -> tuple[TensorTable, dict[str, ItemPlace]] | None:
    """Return the tensors and the places of other values; None where a key is listed twice, or a value or a chunk is in no file.

    `folder`: the beginning of the names of files.
    """
    rows, places = tables.tensors, tables.places
    row_of = dict(zip(rows.keys, range(len(rows.keys)), strict=True))
    chunks = _Chunks.of(tables, row_of) if len(row_of) == len(rows.keys) else None
    if chunks is None:
        return None
    is_value, starts = rows.column("dtype") < 0, chunks.ends - numpy.diff(chunks.ends, prepend=0)
    files: dict[str, int] = {}
    of_files = numpy.fromiter(map(files.setdefault, places.files, _new_ids(files)), numpy.int64, len(places.files))
    listed, which = [folder + file for file in files], places.which
    keys, values = rows.keys, dict[str, ItemPlace]()
    for row in numpy.flatnonzero(is_value).tolist():
        place = which[chunks.items[starts[row]]]
        first, length = places.starts[place], places.nbytes[place]
        values[keys[row]] = ItemPlace(listed[of_files[place]], first, length, (), keys[row])
    cuts, of_cuts = _cuts(chunks, starts, [*tables.memo.sizes, ()])
    kept = ~numpy.repeat(is_value, numpy.diff(chunks.ends, prepend=0))
    items = which[chunks.items[kept]]
    is_tensor = ~is_value
    columns = _Columns(
        dtypes=rows.column("dtype")[is_tensor],
        shapes=rows.column("size")[is_tensor],
        cuts=of_cuts[is_tensor],
        ends=numpy.cumsum((chunks.ends - starts)[is_tensor]),
        files=of_files[items],
        starts=numpy.array(places.starts, numpy.int64)[items],
        nbytes=numpy.array(places.nbytes, numpy.int64)[items],
    )
    if len(values):
        keys = [key for key, is_one in zip(keys, is_tensor.tolist(), strict=True) if is_one]
    lists = [*map(dtype_name, rows.dtypes)], tables.memo.sizes, cuts, listed
    return TensorTable(keys, lists, columns, {}), values


def _new_ids(numbers: Mapping[Any, int]) -> Iterator[int]:
    """Yield the number that a new key would get."""
    while True:
        yield len(numbers)


def _cuts(chunks: _Chunks, starts: Numbers, sizes: Sequence[Shape]) -> tuple[list[Cut], Numbers]:
    """Return all cuts, and the number of that of each row. Rows with the same boxes have the same cut."""
    data, nbytes = chunks.boxes.astype(numpy.int64).tobytes(), 16
    numbers: dict[bytes, int] = {}
    ranges = zip((starts * nbytes).tolist(), (chunks.ends * nbytes).tolist(), strict=True)
    of_rows = [numbers.setdefault(data[start:end], len(numbers)) for start, end in ranges]
    boxes = [numpy.frombuffer(cut, numpy.int64).reshape(-1, 2).tolist() for cut in numbers]
    cuts = [tuple([(sizes[offsets], sizes[box]) for offsets, box in cut]) for cut in boxes]
    return cuts, numpy.array(of_rows, numpy.int64)


class _Chunks(NamedTuple):
    """The chunks of all rows that have elements, and one for each value that is no tensor.

    Attributes:
        boxes: the ids of offsets and of sizes.
        items: the row of the place of each.
        ends: for each row of a tensor, one past its last chunk.
    """

    boxes: Numbers
    items: Numbers
    ends: Numbers

    @classmethod
    def of(cls, tables: Tables, row_of: Mapping[str, int]) -> _Chunks | None:
        """Find the place of each chunk by its key and offsets; None if one has no place."""
        rows, places, sizes = tables.tensors, tables.places, tables.memo.sizes
        is_value = (rows.column("dtype") < 0).astype(numpy.int64)
        nums = rows.column("num_chunks") + is_value
        boxes = numpy.full((int(nums.sum()), 2), len(sizes))  # the id behind the last one is that of no offsets
        is_chunk = numpy.repeat(is_value == 0, nums)
        boxes[is_chunk] = numpy.stack([rows.column("offsets"), rows.column("sizes")], axis=1)
        is_full = numpy.array([*(0 not in size for size in sizes), True])[boxes[:, 1]]
        row, boxes = numpy.repeat(numpy.arange(len(nums)), nums)[is_full], boxes[is_full]
        num_ids = len(sizes) + 1
        offsets = numpy.where(places.offsets < 0, len(sizes), places.offsets)
        there = numpy.fromiter(map(row_of.get, places.keys, repeat(-1)), numpy.int64, len(places.keys))
        there = there * num_ids + offsets
        wanted = row * num_ids + boxes[:, 0]
        order = numpy.argsort(there, kind="stable")
        at = numpy.searchsorted(there[order], wanted, side="right") - 1  # the last of several that are alike
        if len(wanted) and (not len(there) or (there[order[at]] != wanted).any()):
            return None
        return cls(boxes, order[at], numpy.cumsum(numpy.bincount(row, minlength=len(nums))))
