"""Ranges of a file put together to the equal parts in which a store takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_optim.errors import CheckpointError


@dataclass
class _Part:
    memory: bytearray
    left: int


class Parts:
    """One file on its way to a store that takes it in parts of `part_nbytes`, the last one shorter, in any order.

    `send(number, data)` gets each part as soon as all its bytes were written, and may keep it; parts are counted from 0. What is
    written in the order of the file needs the memory of one part.
    """

    def __init__(self, name: str, nbytes: int, part_nbytes: int, send: Callable[[int, bytearray], None]) -> None:
        self._name, self._nbytes, self._part_nbytes, self._send = name, nbytes, part_nbytes, send
        self._begun: dict[int, _Part] = {}
        self._num_sent = 0

    def write(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Take pieces of memory, one after the other, which belong at `offset`."""
        for piece in pieces:
            at = 0
            while at < len(piece):
                at += self._add(piece[at:], offset + at)
            offset += len(piece)

    def _add(self, piece: memoryview, offset: int) -> int:
        """Take as much as is in one part."""
        number, inside = divmod(offset, self._part_nbytes)
        nbytes = min(self._part_nbytes, self._nbytes - number * self._part_nbytes)
        if inside >= nbytes:
            raise CheckpointError(f"{self._name}: has {self._nbytes} bytes, so byte {offset} of it cannot be written")
        part = self._begun.setdefault(number, _Part(bytearray(nbytes), nbytes))
        taken = min(len(piece), nbytes - inside)
        part.memory[inside : inside + taken] = piece[:taken]
        part.left -= taken
        if not part.left:
            self._send(number, self._begun.pop(number).memory)
            self._num_sent += 1
        return taken

    def check_whole(self) -> None:
        """Raise CheckpointError where not all parts are sent."""
        number = -(-self._nbytes // self._part_nbytes)
        if self._num_sent != number:
            raise CheckpointError(f"{self._name}: {self._num_sent} of its {number} parts were written")
