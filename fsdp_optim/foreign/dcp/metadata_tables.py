"""The metadata of torch, read as tables: what its writers write today, in a fraction of the time that objects take.

`inert_pickle.py` reads the pickle, safely and slowly. Where an entry of one of the three large dicts may begin, a pattern takes
all entries that follow and look alike (`metadata_patterns.py`), and rows of tables are made of those that are the same operations
(`metadata_rows.py`). So nothing is called, no key is hashed but texts, and the bytes of the file bound the memory. Of a pickle
that is written otherwise, `read_tables` returns None: soon, as the slow reader may do a bounded part of the work.
`metadata_pickle.py` then reads the file, and says what is wrong, if anything is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.inert_pickle import Unpickler
from fsdp_optim.foreign.archive.pickle_table import Known, Table
from fsdp_optim.foreign.archive.torch_globals import dtypes
from fsdp_optim.foreign.dcp.metadata_memo import Memo
from fsdp_optim.foreign.dcp.metadata_patterns import PATHS, PLACES, TENSORS
from fsdp_optim.foreign.dcp.metadata_pickle import (
    CLASSES,
    WORDS,
    SavedBytes,
    SavedChunk,
    SavedIndex,
    SavedMetadata,
    SavedStorageMeta,
    SavedTensor,
    size_of,
)
from fsdp_optim.foreign.dcp.metadata_rows import PathRows, PlaceRows, TensorRows

_WINDOW = 1 << 20  # bytes in which entries are looked for at once
_MOST_READ = 1 << 20  # bytes of one argument
_FEW, _NBYTES_EACH = 50_000, 64
"""Small reads of the slow reader that any pickle may take, and bytes of entries for each further one."""

_FRAME, _FRAME_NBYTES = b"\x95", 9
_FEW_FRAMES, _NBYTES_OF_FRAME = 64, 1 << 13  # that any pickle may have, and bytes for each further one

_PATTERNS = {"state_dict_metadata": TENSORS, "planner_data": PATHS, "storage_data": PLACES}


class Tables:
    """The entries of the metadata: three tables and the values that their numbers mean."""

    def __init__(self) -> None:
        self.memo = Memo()
        self.tensors, self.paths, self.places = TensorRows(self.memo), PathRows(self.memo), PlaceRows(self.memo)
        rows = self.tensors, self.paths, self.places
        self.by_name: dict[str, TensorRows | PathRows | PlaceRows] = dict(zip(_PATTERNS, rows, strict=True))


def read_tables(where: str, pieces: Iterator[bytes]) -> Tables | None:
    """Return the tables of a pickle that comes in pieces; None if it is not written as torch writes it today."""
    reader = _Tabulator(where, _Pieces(pieces))
    try:
        return reader.read()
    except CheckpointError:
        return None


class _Pieces:
    """A file that comes in pieces. What was read is forgotten. The operations that say where a frame begins are left out."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self.data, self.at = b"", 0
        self._waiting = b""
        self._in_frame: int | None = None  # bytes of the frame that have not come; None: outside of frames
        self._num_reads = self._num_taken = self._length = self._num_frames = self._num_given = 0

    def fill(self, nbytes: int) -> None:
        """Have so many bytes in memory, or all that there are."""
        while len(self.data) - self.at < nbytes:
            piece = next(self._pieces, None)
            if piece is None:
                self.data, self._waiting = self.data + self._waiting, b""
                return
            self.data, self.at = b"".join([self.data[self.at :], *self._without_frames(self._waiting + piece)]), 0

    def begin_frame(self, nbytes: int) -> None:
        """Leave out all operations that say where the next frame begins, as long as frames lie end to end from here on."""
        self._count_frame()
        self._in_frame = nbytes
        self.data, self.at = b"".join(self._without_frames(self.data[self.at :] + self._waiting)), 0

    def _without_frames(self, data: bytes) -> Iterator[bytes]:
        self._waiting, at = b"", 0
        self._num_given += len(data)
        while self._in_frame is not None and at < len(data):
            yield data[at : at + self._in_frame]
            at, self._in_frame = at + self._in_frame, max(at + self._in_frame - len(data), 0)
            if self._in_frame or at >= len(data):
                return
            if data[at : at + 1] != _FRAME:
                self._in_frame = None
            elif len(data) - at < _FRAME_NBYTES:
                self._waiting = data[at:]
                return
            else:
                self._count_frame()
                self._in_frame = int.from_bytes(data[at + 1 : at + _FRAME_NBYTES], "little")
                at += _FRAME_NBYTES
        yield data[at:]

    def _count_frame(self) -> None:
        self._num_frames += 1
        if self._num_frames > _FEW_FRAMES + self._num_given // _NBYTES_OF_FRAME:
            raise ValueError("it has more frames than torch writes")

    def take(self, end: int) -> None:
        """Go on behind entries that were read at once."""
        self._num_taken += end - self.at
        self.at = end

    def read(self, size: int = -1, /) -> bytes:
        self._num_reads += 1
        if self._num_reads > _FEW + self._num_taken // _NBYTES_EACH or not 0 <= size <= _MOST_READ:
            raise ValueError("it is not written as torch writes it")
        self.fill(size)
        data = self.data[self.at : self.at + size]
        self.at += len(data)
        self._length += len(data)
        return data

    def readline(self) -> bytes:
        raise ValueError("it is of an old protocol")

    def tell(self) -> int:
        return self._length


def _set_attributes(target: Any, state: Any) -> None:
    if type(state) is not dict:
        raise ValueError("attributes that are no dict")
    for name in type(target).__annotations__:
        if name in state:
            setattr(target, name, state[name])


def _table() -> Table:
    calls: dict[str, Any] = {"torch.Size": size_of, **dict.fromkeys(WORDS, lambda *args: "")}
    known = {name: Known(name, call) for name, call in calls.items()}
    build: dict[type, Any] = dict.fromkeys((SavedMetadata, SavedTensor, SavedChunk, SavedIndex), _set_attributes)
    build |= dict.fromkeys((SavedBytes, SavedStorageMeta), lambda target, state: None)
    return Table({**dtypes(), **known}, build).with_stand_ins(CLASSES)


class _Tabulator(Unpickler):
    """The reader of one pickle."""

    def __init__(self, where: str, file: _Pieces) -> None:
        super().__init__(where, _table())
        self._file = file
        self._tables = Tables()
        self._places: dict[str, Any] = {}  # the dict of each table, which stays empty
        self._depth_of_taken = 0  # marks where the entries lie that were taken, until they are put into their dict

    def read(self) -> Tables:
        saved = self.load(self._file)
        if not isinstance(saved, SavedMetadata) or {*self._places} != {*_PATTERNS}:
            raise CheckpointError(f"{self._where}: has other values than torch's metadata")
        for name, place in self._places.items():
            if getattr(saved, name) is not place or place:
                raise CheckpointError(f"{self._where}: {name} has other entries than torch writes")
        return self._tables

    # -------------------------------------------------------------------------------------- entries

    def _name_here(self) -> str | None:
        """Return the name of the table whose entries are being read, if all before are complete."""
        if len(self._marks) != 2 or len(self._marks[1]) < 2:
            return None
        name, target = self._marks[1][-2:]
        if type(name) is not str or name not in _PATTERNS or type(target) is not dict:
            return None
        if self._places.setdefault(name, target) is not target:
            raise ValueError(f"{name} is there twice")
        return name

    def _take_entries(self) -> None:
        """Make rows of an entry that was read slowly, and of those that follow and look alike."""
        if len(self._stack) not in (0, 2):
            return
        name = self._name_here()
        if name is None:
            return
        rows = self._tables.by_name[name]
        if self._stack:
            if not rows.add_one(*self._stack):
                return
            self._stack.clear()
            self._depth_of_taken = len(self._marks)
        pattern, file = _PATTERNS[name], self._file
        while True:
            file.fill(_WINDOW)
            end = min(file.at + _WINDOW, len(file.data))
            matched = pattern.borders.findall(file.data, file.at, end)
            if not any(matched[0][:-1] if matched else ()):
                return
            rest = matched[-1][-1]
            rows.add(matched[:-1] if rest else matched)
            file.take(end - len(rest))
            self._depth_of_taken = len(self._marks)

    def _pop_mark(self) -> list[Any]:
        if self._depth_of_taken == len(self._marks) > 0:
            raise ValueError("entries that are not put into their dict")
        return super()._pop_mark()

    def do_setitems(self, argument: Any) -> None:
        if self._depth_of_taken == len(self._marks):
            self._depth_of_taken = 0
        super().do_setitems(argument)

    def do_mark(self, argument: Any) -> None:
        super().do_mark(argument)
        self._take_entries()

    def do_build(self, argument: Any) -> None:
        super().do_build(argument)
        self._take_entries()

    def do_frame(self, argument: int) -> None:
        self._file.begin_frame(argument)

    # -------------------------------------------------------------------------------------- the memo

    def do_memoize(self, argument: Any) -> None:
        memo = self._tables.memo
        memo.others[memo.length] = self._stack[-1]
        memo.length += 1
        self._take_entries()

    def do_get(self, index: int) -> None:
        self._stack.append(self._tables.memo.value(index))
        self._take_entries()

    do_binget = do_long_binget = do_get

    def do_put(self, index: int) -> None:
        raise ValueError("it is of an old protocol")

    do_binput = do_long_binput = do_put
