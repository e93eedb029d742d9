"""The operations of the pickle in a `.metadata` file, checked piece by piece before anything is made of them.

Operations that ask for memory without bringing as many bytes are refused, and so is a pickle with more objects in its bytes than
torch writes: by the first piece that has too many, so that not even the bytes are all read. Behind each tuple an operation is
added that lets the reader look at it, because hashing deeply nested tuples crashes the process, and hashing tuples that share
others never ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_ALONE = rb"[" + re.escape(b"()0]}NRabesu\x81\x88\x89\x93\x94") + rb"]"
_WITH_ARGUMENT = rb"[hKq\x80].|M..|[Jj]....|G.{8}"
_TUPLE = rb"[t\x85\x86\x87]"
_RUN = re.compile(rb"(?:" + _ALONE + rb"+|" + _TUPLE + rb"|" + _WITH_ARGUMENT + rb"){1,4096}", re.DOTALL)
"""Operations without an argument, and with an argument of a fixed length: numbers, and places in the memo."""

_UP_TO_TUPLE = re.compile(rb"((?:" + _ALONE + rb"+|" + _WITH_ARGUMENT + rb")*)(" + _TUPLE + rb"|\Z)", re.DOTALL)
"""Operations of a run up to the next tuple, or up to its end: so that it matches at once, wherever it begins."""

_NBYTES_OF_LENGTH = {b"\x8c": 1, b"X": 4, b"\x8d": 8, b"\x8a": 1, b"C": 1, b"B": 4}
"""Operations with a str, bytes or a long number, by the number of bytes of its length."""

_MOST_FIXED = 9  # bytes of an operation without a length, unless it ends at a line
_MOST_LINE = 4096  # bytes of the two names of a class
_BEFORE_ARGUMENTS = frozenset((b"h", b"K", b"q", b"\x80", b"M", b"J", b"j", b"G"))
_FRAME = b"\x95"  # says how many bytes follow, which is no longer true
_LOOK = b"Q"  # gives the value on the stack to `persistent_load`; no metadata has it

_PIECE_NBYTES = 1 << 20  # bytes that are checked at once
_FEW = 1 << 16  # of each kind of object, which even a short pickle may have
_NBYTES_EACH = {b"}": 16, b"]": 16, b"\x81": 16, b"R": 12}
"""Bytes for each further dict, list, object and shape. In the metadata of torch, the part with the chunks is the densest: it has
one dict, one object and two shapes in 42 bytes. An argument that looks like one of these operations is counted too.
"""

_NBYTES_OF_TUPLE = 6  # the same 42 bytes have four
_NAMES = {b"}": "dicts", b"]": "lists", b"\x81": "objects", b"R": "results of functions"}


class Operations:
    """The check of one pickle, whose pieces come in order. `is_done`: whether its last operation has come."""

    def __init__(self) -> None:
        self.is_done = False
        self._at = 0  # bytes before `_waiting`
        self._waiting = b""  # the beginning of an operation whose end has not come
        self._skip = 0  # bytes of a text that are still to come
        self._counts = dict.fromkeys(_NBYTES_EACH, 0)
        self._num_tuples = 0

    def checked(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the pieces with the added operations. Raises ValueError for operations that torch's pickles do not have."""
        for piece in pieces:
            for start in range(0, len(piece), _PIECE_NBYTES):
                yield b"".join(self._add(piece[start : start + _PIECE_NBYTES], is_last=False))
                if self.is_done:
                    return
        yield b"".join(self._add(b"", is_last=True))
        if not self.is_done:
            raise ValueError("it was cut short")

    def _add(self, piece: bytes, *, is_last: bool) -> Iterator[bytes]:
        text = piece[: self._skip]
        if text:
            yield text
            piece, self._skip, self._at = piece[len(text) :], self._skip - len(text), self._at + len(text)
        data, at, runs = self._waiting + piece, 0, list[bytes]()
        while at < len(data) and not self.is_done:
            if len(data) - at < _MOST_FIXED and not is_last:
                break
            run = _RUN.match(data, at)
            end = run.end() if run is not None else self._end(data, at)
            if end is None:
                if is_last:
                    raise ValueError("it was cut short")
                break
            if data[at : at + 1] != _FRAME:
                yield data[at:end] if run is None else self._looked_at(run[0])
            if run is not None:
                runs.append(run[0])
            self._skip, at = max(end - len(data), 0), end
        at = min(at, len(data))
        self._waiting, self._at = data[at:], self._at + at
        self._count(b"".join(runs))
        if self._skip and is_last:
            raise ValueError("it was cut short")

    def _end(self, data: bytes, at: int) -> int | None:
        """Return the end of the operation with a text that begins at a byte; None if it is not there yet."""
        operation = data[at : at + 1]
        if operation in _NBYTES_OF_LENGTH:
            start = at + 1 + _NBYTES_OF_LENGTH[operation]
            return start + int.from_bytes(data[at + 1 : start], "little") if start <= len(data) else None
        if operation == _FRAME:
            return at + _MOST_FIXED if at + _MOST_FIXED <= len(data) else None
        if operation in _BEFORE_ARGUMENTS:
            return None  # else it would be in a run
        if operation == b"r":
            if at + 5 > len(data):
                return None
            if int.from_bytes(data[at + 1 : at + 5], "little") <= self._at + at:
                return at + 5
        if operation == b"c":
            ends = [
                newline.end()
                for newline, _ in zip(re.finditer(b"\n", data[at : at + _MOST_LINE]), range(2), strict=False)
            ]
            if len(ends) == 2 or len(data) - at < _MOST_LINE:
                return at + ends[1] if len(ends) == 2 else None
        if operation == b".":
            self.is_done = True
            return at + 1
        raise ValueError(f"the operation {operation!r} at byte {self._at + at} is not known")

    def _looked_at(self, run: bytes) -> bytes:
        """Return a run of operations, with one more behind each tuple."""
        parts = [before + made + _LOOK if made else before for before, made in _UP_TO_TUPLE.findall(run)]
        looked = b"".join(parts)
        self._num_tuples += len(looked) - len(run)
        return looked

    def _count(self, runs: bytes) -> None:
        """Raise ValueError for more objects than the bytes so far would have from torch."""
        for operation in self._counts:
            self._counts[operation] += runs.count(operation)
        counts = [(_NAMES[operation], number, _NBYTES_EACH[operation]) for operation, number in self._counts.items()]
        for what, number, nbytes_each in (*counts, ("tuples", self._num_tuples, _NBYTES_OF_TUPLE)):
            if number > _FEW + self._at // nbytes_each:
                raise ValueError(
                    f"{number} {what} in its first {self._at} bytes, and beyond {_FEW} at most one in {nbytes_each} bytes is "
                    "read: they would take many times the memory of the file"
                )
