"""A file that a store takes in equal parts, assembled from ranges in any order."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_optim.errors import CheckpointError

_IN_PAGES_FROM = 64 << 10  # bytes


def pages(nbytes: int) -> memoryview:
    """Zeroed memory that goes back to the operating system as soon as nobody uses it.

    `malloc` keeps freed memory of this size, more and more of it: its own threshold grows with the largest block that is freed.
    """
    if nbytes < _IN_PAGES_FROM or not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(bytearray(nbytes))
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel may have no huge pages, and the advice is optional
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


@dataclass
class _OpenPart:
    memory: memoryview
    num_missing: int  # bytes


class MultipartFile:
    """A file on its way to a store that takes parts of `part_nbytes` bytes in any order. The last part may be shorter.

    `send(number, data)` gets each part when all its bytes have been written, and may keep `data`; parts are counted from 0.
    `reserve(nbytes)` is called before the memory of a part is made. Ranges that come in the order of the file need the memory of
    one part.
    """

    def __init__(
        self,
        name: str,
        nbytes: int,
        part_nbytes: int,
        send: Callable[[int, memoryview], None],
        reserve: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._name, self._nbytes, self._part_nbytes, self._send, self._reserve = (
            name,
            nbytes,
            part_nbytes,
            send,
            reserve,
        )
        self._open: dict[int, _OpenPart] = {}
        self._num_sent = 0

    def write(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Write pieces of memory, one after the other, from byte `offset` of the file on."""
        for piece in pieces:
            at = 0
            while at < len(piece):
                at += self._add(piece[at:], offset + at)
            offset += len(piece)

    def _add(self, piece: memoryview, offset: int) -> int:
        """Copy the beginning of a piece that lies in one part; return the number of bytes."""
        number, inside = divmod(offset, self._part_nbytes)
        nbytes = min(self._part_nbytes, self._nbytes - number * self._part_nbytes)
        if inside >= nbytes:
            raise CheckpointError(f"{self._name}: has {self._nbytes} bytes, so byte {offset} cannot be written")
        part = self._open.get(number)
        if part is None:
            self._reserve(nbytes)
            part = self._open[number] = _OpenPart(pages(nbytes), nbytes)
        taken = min(len(piece), nbytes - inside)
        part.memory[inside : inside + taken] = piece[:taken]
        part.num_missing -= taken
        if not part.num_missing:
            self._send(number, self._open.pop(number).memory)
            self._num_sent += 1
        return taken

    def check_whole(self) -> None:
        """Raise CheckpointError unless all parts have been sent."""
        num_parts = -(-self._nbytes // self._part_nbytes)
        if self._num_sent != num_parts:
            raise CheckpointError(f"{self._name}: only {self._num_sent} of {num_parts} parts were written")

    def check_no_part_open(self) -> None:
        """Raise CheckpointError where a part has some of its bytes, and lacks others."""
        for number, part in self._open.items():
            raise CheckpointError(f"{self._name}: {part.num_missing} bytes of part {number} were not written")
