"""Short ranges of a file that are read together, against a loop over bytes."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy
from hypothesis import given
from hypothesis import strategies as st

from fsdp_optim.checkpoint.load.short_ranges import ShortRanges
from fsdp_optim.formats.base.extents import without_overlaps
from fsdp_optim.formats.base.protocols import TensorReader
from fsdp_optim.plugins import Extent

FILE = "model.safetensors"
GAP = 4 << 10  # bytes between two ranges that are read with them

# Where a tensor begins in the file, and the ranges of it: (byte of the tensor, number of bytes).
Tensor = tuple[int, int, list[tuple[int, int]]]


@dataclass
class Content:
    """A reader of one file, which notes what was read."""

    data: bytes
    read_at_once: list[list[tuple[int, int]]] = field(default_factory=list)

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        assert len(list(without_overlaps(extents[FILE]))) == 1, "a byte is read twice at once"
        self.read_at_once.append([(extent.start, extent.stop) for extent in extents[FILE]])
        for extent in extents[FILE]:
            extent.memory[:] = self.data[extent.start : extent.stop]
            did_read(len(extent.memory))


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """Draw tensors, which may share bytes, with ranges that do not."""
    drawn: list[Tensor] = []
    at = 0
    for _ in range(draw(st.integers(1, 6))):
        at = max(at + draw(st.sampled_from([0, 0, 1, 100, GAP, GAP + 1, -8])), 0)
        nbytes = draw(st.integers(1, 3 * GAP))
        ranges = []
        first = 0
        for _ in range(draw(st.integers(1, 3))):
            first += draw(st.integers(0, nbytes // 2))
            length = draw(st.integers(1, 300))
            if first + length <= nbytes:
                ranges.append((first, length))
                first += length
        drawn.append((at, nbytes, ranges or [(0, min(nbytes, 5))]))
        at += nbytes
    return draw(st.permutations(drawn))


def content_of(nbytes: int) -> bytes:
    return numpy.random.default_rng(nbytes).bytes(nbytes)


class ShortRangesTest(unittest.TestCase):
    def read(self, listed: list[Tensor], most_nbytes: int) -> tuple[Content, int]:
        """Read all ranges, and compare each byte of the memory."""
        content = Content(content_of(max(start + nbytes for start, nbytes, _ in listed)))
        counted: list[int] = []
        parts, memory = [], []
        for start, nbytes, ranges in listed:
            # The memory has a byte before and after each range, which stays.
            places = [
                (offset, 1 + index + sum(n for _, n in ranges[:index]), n) for index, (offset, n) in enumerate(ranges)
            ]
            held = numpy.full(1 + sum(n + 1 for _, n in ranges), 77, numpy.uint8)
            memory.append((start, places, held))
            parts.append(ShortRanges.of([start], [held.ctypes.data], nbytes, places))
        ShortRanges.joined(parts).read(cast(TensorReader, content), FILE, most_nbytes, counted.append)
        for start, places, held in memory:
            expected = [77] * len(held)
            for offset, place, number in places:
                for byte in range(number):
                    expected[place + byte] = content.data[start + offset + byte]
            self.assertEqual(held.tolist(), expected)
        return content, sum(counted)

    @given(tensors(), st.sampled_from([1, 64, 5000, 1 << 30]))
    def test_every_byte_arrives(self, listed: list[Tensor], most_nbytes: int) -> None:
        content, counted = self.read(listed, most_nbytes)
        needed = {byte for start, nbytes, _ in listed for byte in range(start, start + nbytes)}
        read = [pair for extents in content.read_at_once for pair in extents]
        self.assertEqual(sum(stop - start for start, stop in read), counted)
        for start, stop in read:
            self.assertLessEqual(set(range(start, stop)), needed, "bytes of a tensor that this load does not need")

    def check_reads(self, listed: list[Any], expected: list[list[tuple[int, int]]], most_nbytes: int = 1 << 20) -> None:
        content, _ = self.read(listed, most_nbytes)
        self.assertEqual(content.read_at_once, expected)

    def test_adjacent_tensors_are_one_read(self) -> None:
        self.check_reads([(0, 256, [(0, 128)]), (256, 256, [(0, 128)]), (512, 8, [(0, 8)])], [[(0, 520)]])

    def test_what_lies_between_other_tensors_is_not_read(self) -> None:
        self.check_reads([(0, 256, [(0, 128)]), (257, 256, [(0, 128)])], [[(0, 128), (257, 385)]])

    def test_long_gaps_are_not_read(self) -> None:
        self.check_reads(
            [(0, 3 * GAP, [(0, 8), (GAP + 8, 8), (2 * GAP + 17, 8)])], [[(0, GAP + 16), (2 * GAP + 17, 2 * GAP + 25)]]
        )

    def test_tensors_that_share_bytes_are_read_once(self) -> None:
        self.check_reads([(0, 256, [(0, 256)]), (0, 256, [(0, 256)]), (128, 256, [(0, 256)])], [[(0, 384)]])

    def test_the_buffer_is_bounded(self) -> None:
        rows = [(row * 100, 100, [(0, 100)]) for row in range(1000)]
        content, counted = self.read(rows, 5000)
        self.assertEqual(counted, 100_000)
        self.assertLessEqual(max(sum(stop - start for start, stop in read) for read in content.read_at_once), 5000)
