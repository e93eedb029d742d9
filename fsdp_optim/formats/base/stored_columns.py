"""The tensors of safetensors files as columns: an object for a tensor is made when it is asked for.

Each rank of a load opens all files of a checkpoint, so every rank of a machine keeps what is kept of a tensor: its name and some
numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from itertools import chain, repeat
from typing import NamedTuple

from fsdp_optim.formats.base.header_entries import DTYPES, Entries
from fsdp_optim.formats.base.records import StoredTensor


class StoredEntries(NamedTuple):
    """The tensors of one file.

    Attributes:
        file: the name of the file.
        keys: the names of the tensors, in the order of the entries.
        entries: the tensors.
        first: the byte at which the data begin, as `start` of a StoredTensor counts.
        short_nbytes: as for a StoredTensor.
    """

    file: str
    keys: Sequence[str]
    entries: Entries
    first: int = 0
    short_nbytes: int = 128 << 10


class StoredColumns(Mapping[str, StoredTensor]):
    """The tensors of several files by name. Each question makes a new object. `request_nbytes`: as for a StoredTensor."""

    def __init__(self, request_nbytes: int = 0) -> None:
        self._request_nbytes = request_nbytes
        self._files: list[StoredEntries] = []
        self._ends: list[int] = []
        self._row_of: dict[str, int] = {}

    def add(self, file: StoredEntries) -> str | None:
        """Add the tensors of one more file. Returns None, or a name that is there already: then the columns are of no use."""
        start = len(self._row_of)
        stop = start + len(file.keys)
        if not self._row_of.keys().isdisjoint(file.keys):
            return next(key for key in file.keys if key in self._row_of)
        self._row_of.update(zip(file.keys, range(start, stop), strict=True))
        self._files.append(file)
        self._ends.append(stop)
        return None

    def file_of(self, key: str) -> str:
        """Return the file of a tensor."""
        return self._files[bisect_right(self._ends, self._row_of[key])].file

    def file_of_each(self) -> dict[str, str]:
        """Return the file of each tensor."""
        by_key: dict[str, str] = {}
        for file in self._files:
            by_key.update(zip(file.keys, repeat(file.file)))
        return by_key

    def each(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield each name and its tensor, in a fifth of the time that one by one takes."""
        return chain.from_iterable(zip(file.keys, self._tensors_of(file), strict=True) for file in self._files)

    def _tensors_of(self, file: StoredEntries) -> Iterator[StoredTensor]:
        kinds, starts, shapes = file.entries.columns()
        of_kinds = [DTYPES[code][0] for code, _ in shapes], [shape for _, shape in shapes]
        columns = (  # in the order of the fields
            file.keys,
            *(map(values.__getitem__, kinds) for values in of_kinds),
            repeat(file.file),
            map(file.first.__add__, starts),
            repeat(file.short_nbytes),
            repeat(self._request_nbytes),
        )
        return map(StoredTensor, *columns)

    def items(self) -> ItemsView[str, StoredTensor]:
        return _Items(self)

    def values(self) -> ValuesView[StoredTensor]:
        return _Values(self)

    def __getitem__(self, key: str) -> StoredTensor:
        row = self._row_of[key]
        number = bisect_right(self._ends, row)
        file = self._files[number]
        entry = file.entries[row - (self._ends[number - 1] if number else 0)]
        dtype, _ = DTYPES[entry.code]
        start, short = file.first + entry.start, file.short_nbytes
        return StoredTensor(key, dtype, entry.shape, file.file, start, short, request_nbytes=self._request_nbytes)

    def __contains__(self, key: object) -> bool:
        return key in self._row_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)


class _Items(ItemsView[str, StoredTensor]):
    def __init__(self, columns: StoredColumns) -> None:
        super().__init__(columns)
        self._columns = columns

    def __iter__(self) -> Iterator[tuple[str, StoredTensor]]:
        return self._columns.each()


class _Values(ValuesView[StoredTensor]):
    def __init__(self, columns: StoredColumns) -> None:
        super().__init__(columns)
        self._columns = columns

    def __iter__(self) -> Iterator[StoredTensor]:
        return (stored for _, stored in self._columns.each())
