"""Ranges of a data section, written with checksums and read again: every byte of a segment that a range touches is verified."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.cases import examples

from fsdp_optim import CheckpointError
from fsdp_optim.formats.base.checksums import rows_of
from fsdp_optim.formats.base.extents import without_overlaps
from fsdp_optim.plugins import DataSection, Extent, Sums, hash_of, join_tables, read_extents, write_extents

Range = tuple[int, int]
OFFSET = 5  # of the section in its file


class Memory:
    """A file in memory, and the reads or writes of it: pairs (first byte, number of bytes)."""

    def __init__(self, content: bytes) -> None:
        self.content, self.moves = bytearray(content), list[Range]()

    def section(self, *, writes: bool) -> DataSection:
        return DataSection("a.file", self.write if writes else self.read, OFFSET, lambda start, stop: "w")

    def read(self, pieces: Sequence[memoryview], place: int) -> None:
        self.moves.append((place, sum(map(len, pieces))))
        for piece in pieces:
            piece[:] = self.content[place : place + len(piece)]
            place += len(piece)

    def write(self, pieces: Sequence[memoryview], place: int) -> None:
        self.moves.append((place, sum(map(len, pieces))))
        for piece in pieces:
            self.content[place : place + len(piece)] = piece
            place += len(piece)


def bytes_up_to(nbytes: int) -> bytes:
    return bytes((7 * index + index // 251) % 256 for index in range(nbytes))


def pairs_of(borders: Sequence[int]) -> list[Range]:
    return list(itertools.pairwise(borders))


@st.composite
def sections(draw: st.DrawFn) -> tuple[int, list[Range], list[Range]]:
    """The length of a section, its segments, and ranges that do not overlap; many begin or end where a segment does."""
    nbytes = draw(st.integers(1, 40))
    inner = st.sets(st.integers(1, nbytes - 1), max_size=6) if nbytes > 1 else st.just(set())
    borders = sorted({0, nbytes, *draw(inner)})
    places = sorted({0, nbytes, *draw(inner), *draw(st.sets(st.sampled_from(borders)))})
    ranges = [pair for pair in pairs_of(places) if draw(st.booleans())]
    return nbytes, pairs_of(borders), draw(st.permutations(ranges))


def sums_of(content: bytes, segments: Sequence[Range]) -> Sums:
    rows = rows_of((start, stop, hash_of(content[start:stop])) for start, stop in segments)
    return join_tables("a.file", [rows], len(content))


def read(file: Memory, ranges: Sequence[Range], sums: Sums | None) -> dict[int, bytes]:
    """The bytes of each range, by its beginning."""
    memory = {start: bytearray(stop - start) for start, stop in ranges}
    extents = [Extent(start, memoryview(memory[start])) for start, _ in ranges]
    read_extents(file.section(writes=False), extents, sums, lambda nbytes: None)
    return {start: bytes(data) for start, data in memory.items()}


@examples(300)
@given(sections())
def test_ranges_are_filled_and_every_segment_that_they_touch_is_verified(
    case: tuple[int, list[Range], list[Range]],
) -> None:
    nbytes, segments, ranges = case
    content = bytes_up_to(nbytes)
    file, sums = Memory(bytes(OFFSET) + content), sums_of(content, segments)
    for verified in (sums, None):
        assert read(file, ranges, verified) == {start: content[start:stop] for start, stop in ranges}
    for first, last in segments:
        is_touched = any(start < last and first < stop for start, stop in ranges)
        for at in range(first, last):
            file.content[OFFSET + at] ^= 0x20
            if is_touched:
                with pytest.raises(
                    CheckpointError, match=rf"bytes \[{first}, {last}\) of its data, in w, are not those"
                ):
                    read(file, ranges, sums)
            else:
                read(file, ranges, sums)
            file.content[OFFSET + at] ^= 0x20


@examples(100)
@given(sections())
def test_no_byte_is_read_twice_and_only_touched_segments_are_read(case: tuple[int, list[Range], list[Range]]) -> None:
    nbytes, segments, ranges = case
    content = bytes_up_to(nbytes)
    file = Memory(bytes(OFFSET) + content)
    read(file, ranges, sums_of(content, segments))
    bytes_read = [place - OFFSET + index for place, length in file.moves for index in range(length)]
    wanted = {
        index
        for first, last in segments
        for index in range(first, last)
        if any(start < last and first < stop for start, stop in ranges)
    }
    assert sorted(bytes_read) == sorted(wanted)


@examples(100)
@given(sections(), st.integers(1, 16))
def test_the_segments_do_not_depend_on_the_order_of_the_ranges(
    case: tuple[int, list[Range], list[Range]], grid: int
) -> None:
    """They are the adjacent ranges, cut at the multiples of the grid."""
    nbytes, _, ranges = case
    content, file = bytes_up_to(nbytes), Memory(bytes(OFFSET + nbytes))
    extents = [Extent(start, memoryview(content)[start:stop]) for start, stop in ranges]
    rows = write_extents(file.section(writes=True), extents, grid).tolist()
    covered = {index for start, stop in ranges for index in range(start, stop)}
    begins = [at for at in sorted(covered) if at - 1 not in covered or not at % grid]
    wanted = []
    for begin in begins:
        end = begin + 1
        while end in covered and end % grid:
            end += 1
        wanted.append([begin, end, hash_of(content[begin:end])])
    assert rows == wanted
    for at in range(nbytes):
        assert file.content[OFFSET + at] == (content[at] if at in covered else 0)


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=6))
def test_overlapping_ranges_are_read_in_rounds(ranges: list[Range]) -> None:
    """Each range once, no byte twice in a round, and not more rounds than ranges that share a byte."""
    extents = [Extent(start, memoryview(bytearray(length))) for start, length in ranges]
    rounds = [list(apart) for apart in without_overlaps(extents)]
    assert sorted(id(extent) for apart in rounds for extent in apart) == sorted(map(id, extents))
    for apart in rounds:
        read_bytes = [at for extent in apart for at in range(extent.start, extent.stop)]
        assert len(read_bytes) == len(set(read_bytes))
    most = max((sum(start <= at < start + length for start, length in ranges) for at in range(20)), default=0)
    assert len(rounds) == most
