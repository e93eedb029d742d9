"""Frames: bytes of a file that stand between the tensors' bytes, such as the headers of a zip archive's records.

# file    | head | weight 0 . . . | frame | weight 1 . . . . . | frame | weight 2 . | frame |
# data           | 0 . . . . . . .        | 8 . . . . . . . . .        | 18 . . . . |

Tensors are planned, cut, hashed and copied by the byte of the data, as if there were no frames. Only a write counts in bytes
of the file. A frame is written together with the byte of the data that follows it, the last one with the byte before it, so
that nobody writes frames by themselves.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

Pieces = Sequence[memoryview]


@dataclass(frozen=True)
class Frames:
    """The frames of one file.

    Attributes:
        head_nbytes: the number of bytes before the data.
        data_nbytes: the number of bytes of the data.
        at: for each frame, the byte of the data before which it stands, in increasing order; above 0.
        contents: the bytes of each frame.
    """

    head_nbytes: int
    data_nbytes: int
    at: tuple[int, ...] = ()
    contents: tuple[bytes, ...] = field(default=(), repr=False)

    @cached_property
    def _nbytes_before(self) -> list[int]:
        """For each frame, and for the end, the number of bytes of all frames before it."""
        return list(itertools.accumulate(map(len, self.contents), initial=0))

    @cached_property
    def starts(self) -> list[int]:
        """The byte of the file at which each frame begins."""
        return [self.head_nbytes + at + before for at, before in zip(self.at, self._nbytes_before[:-1], strict=True)]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the file."""
        return self.head_nbytes + self.data_nbytes + self._nbytes_before[-1]

    def place_of(self, byte: int) -> int:
        """Return the byte of the file at which a byte of the data is."""
        return self.head_nbytes + byte + self._nbytes_before[bisect.bisect_right(self.at, byte)]

    def data_before(self, place: int) -> int:
        """Return the number of bytes of the data that are before a byte of the file."""
        index = bisect.bisect_right(self.starts, place)
        in_last = min(place - self.starts[index - 1], len(self.contents[index - 1])) if index else 0
        before = self._nbytes_before[index - 1] + in_last if index else 0
        return min(max(place - self.head_nbytes - before, 0), self.data_nbytes)

    def touched(self, start: int, stop: int) -> range:
        """Return the frames between which, before which and after which the bytes [start, stop) of the data are, by index."""
        return range(bisect.bisect_left(self.at, start), bisect.bisect_right(self.at, stop))

    def with_frames(self, pieces: Pieces, start: int) -> tuple[int, list[memoryview]]:
        """Bytes of the data from `start` on, and the frames that are written with them, which are adjacent in the file.

        Returns the byte of the file at which they begin, and the pieces.
        """
        stop = start + sum(map(len, pieces))
        indices = self.touched(start, stop)
        if indices and self.at[indices[-1]] == stop < self.data_nbytes:
            indices = indices[:-1]
        if not indices:
            return self.place_of(start), list(pieces)
        begin = self.starts[indices[0]] if self.at[indices[0]] == start else self.place_of(start)
        joined: list[memoryview] = []
        at = start
        for index, parts in zip((*indices, -1), _split(pieces, [self.at[i] - start for i in indices]), strict=True):
            joined += parts
            at += sum(map(len, parts))
            if index >= 0:
                joined.append(memoryview(self.contents[index]))
        return begin, joined

    def without_frames(self, pieces: Pieces, start: int) -> Iterator[tuple[int, list[memoryview]]]:
        """Bytes of the data from `start` on, each adjacent part with the byte of the file at which it begins."""
        stop = start + sum(map(len, pieces))
        borders = [self.at[i] - start for i in self.touched(start, stop)]
        at = start
        for parts in _split(pieces, borders):
            nbytes = sum(map(len, parts))
            if nbytes:
                yield self.place_of(at), parts
            at += nbytes


def joined(frames: Iterable[tuple[int, bytes]], head: bytes = b"") -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
    """Return the head of a file and its frames, each with the byte of the data before which it stands, from frames in order.

    Frames at the same place become one; those before the first byte of the data join the head.
    """
    merged: dict[int, bytes] = {}
    for at, content in frames:
        merged[at] = merged[at] + content if at in merged else content
    head += merged.pop(0, b"")
    return head, tuple(merged.items())


def _split(pieces: Pieces, borders: Sequence[int]) -> Iterator[list[memoryview]]:
    """Cut pieces of memory at some bytes of their whole; one list of pieces more than there are borders."""
    left, at = deque(pieces), 0
    for border in borders:
        part: list[memoryview] = []
        while at < border:
            piece = left.popleft()
            part.append(piece[: border - at])
            if len(piece) > border - at:
                left.appendleft(piece[border - at :])
            at += len(part[-1])
        yield part
    yield list(left)
