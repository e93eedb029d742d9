"""Many short ranges as one table: the bytes, the places and the hashes are those of ranges that are written one by one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fsdp_optim.checkpoint.save import writing
from fsdp_optim.checkpoint.save.file_plan import FilePlan
from fsdp_optim.checkpoint.save.trace import Trace
from fsdp_optim.checkpoint.save.writing import RankWriter
from fsdp_optim.formats.base import packed as packed_module
from fsdp_optim.formats.base.packed import PackedExtents, write_packed
from fsdp_optim.layout import FlatChunks, MeshBoxes, Placement, Whole
from fsdp_optim.move import Slice, StateValue
from fsdp_optim.plan import Plans
from fsdp_optim.tensors.memory import Budget

OFFSET = 7  # bytes of a file before its data section


class Disk:
    """A file in memory, and how often it is written to. A byte that is written twice is an error."""

    def __init__(self) -> None:
        self.content: dict[int, int] = {}
        self.num_writes = 0

    def write(self, pieces: Sequence[Any], at: int) -> None:
        self.num_writes += 1
        for piece in pieces:
            for number in bytes(piece):
                if at in self.content:
                    raise ValueError(f"byte {at} is written twice")
                self.content[at] = number
                at += 1


@st.composite
def tables(draw: Any) -> tuple[list[tuple[int, int, int]], bytes]:
    """Ranges (start, length, byte of memory) that do not overlap in the section, in any order, and the memory."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=20))
    starts, at = [], 0
    for length in lengths:
        at += draw(st.integers(0, 3))
        starts.append(at)
        at += length
    memory = draw(st.binary(min_size=sum(lengths) + 5, max_size=sum(lengths) + 5))
    places = np.cumsum([0, *lengths[:-1]]).tolist()
    order = draw(st.permutations(range(len(lengths))))
    if draw(st.booleans()):  # in memory in another order than in the section
        places = [int(sum(lengths) - place - length) for place, length in zip(places, lengths, strict=True)]
    return [(starts[i], lengths[i], places[i]) for i in order], memory


def packed_of(rows: list[tuple[int, int, int]], memory: bytes) -> PackedExtents:
    starts, nbytes, at = np.array(rows, np.int64).T
    return PackedExtents.of(starts, nbytes, at, memoryview(memory))


@given(tables(), st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
def test_bytes_places_and_hashes(table: Any, grid: int, together: int, most_ranges: int) -> None:
    rows, memory = table
    wanted = {OFFSET + start + i: memory[at + i] for start, length, at in rows for i in range(length)}
    disk = Disk()
    with mock.patch.multiple(packed_module, _TOGETHER=together, _MOST_RANGES=most_ranges):
        segments = write_packed(packed_of(rows, memory), grid, disk.write, OFFSET)
    assert disk.content == wanted
    covered = []
    for start, stop, digest in segments.tolist():
        body = bytes(wanted[OFFSET + i] for i in range(start, stop))
        assert digest == xxhash.xxh3_64_intdigest(body)
        assert start // grid == (stop - 1) // grid
        covered += range(start, stop)
    assert sorted(covered) == sorted(place - OFFSET for place in wanted)


@given(tables())
def test_without_checksums(table: Any) -> None:
    rows, memory = table
    disk, packed = Disk(), packed_of(rows, memory)
    segments = write_packed(packed, 0, disk.write, OFFSET)
    assert len(disk.content) == packed.nbytes == sum(length for _, length, _ in rows)
    assert not segments[:, 2].any()
    assert sum(stop - start for start, stop, _ in segments.tolist()) == packed.nbytes


@pytest.mark.parametrize("places", [(0, 4, 8, 12), (0, 8, 4, 12)])  # in memory as in the section, and otherwise
def test_adjacent_ranges_are_one_write(places: tuple[int, ...]) -> None:
    disk = Disk()
    rows = [(start, 4, place) for start, place in zip((0, 4, 8, 12), places, strict=True)]
    write_packed(packed_of([rows[2], rows[0], rows[3], rows[1]], bytes(range(16))), 1 << 20, disk.write, 0)
    assert disk.num_writes == 1


def flat_unit(offset: int) -> FlatChunks:
    """One of several parameters in a flat parameter on two ranks, `offset` elements into it."""
    return FlatChunks((3, 5), offset, 17, ((0, 1),))


CUTS: dict[str, Placement] = {
    "rows": MeshBoxes((5, 4), (2,), ((0, 0),), ((0, 1),)),
    "columns": MeshBoxes((6, 7), (2,), ((0, 1),), ((0, 1),)),
    "replicas": MeshBoxes((4, 3), (2,), (), ((0, 1),)),
    "flat, first": flat_unit(0),
    "flat, across": flat_unit(10),
    "complete": Whole((9,), (1,)),
    "one number": Whole((), (0,)),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.int16)


def written(rank: int, *, short: int) -> tuple[dict[int, int], list[list[int]], int]:
    """What a rank writes of values of all cuts and dtypes: the bytes, the segments, and the number of writes."""
    values = [StateValue(name, str(dtype), dtype, cut) for dtype in DTYPES for name, cut in CUTS.items()]
    starts = np.cumsum([0, *(value.nbytes for value in values[:-1])]).tolist()
    disk = Disk()
    plan = SimpleNamespace(
        starts=starts,
        segment_nbytes=64,
        name="file",
        tensors_in=lambda start, stop: "",
        section=lambda move: SimpleNamespace(move=move, offset=OFFSET, tensors_in=None, name="file"),
    )
    file: Any = SimpleNamespace(name="file", values=values, plan=plan)
    store: Any = SimpleNamespace(write=lambda name, pieces, at: disk.write(pieces, at))
    writer = RankWriter(
        store, FilePlan((file,)), rank, checksums=True, budget=Budget(1 << 20), plans=Plans(), trace=Trace(None)
    )
    parts = []
    for number, value in enumerate(values):
        start, stop = value.placement.local_range(rank)
        numbers = torch.arange(stop - start) + 10 * number + 100 * rank
        flat = (numbers % 2 == 0) if value.dtype == torch.bool else (numbers % 50).float().to(value.dtype)
        if "replicas" in value.fqn:
            flat = torch.ones(stop - start).to(value.dtype)
        parts.append(Slice(value, value.placement, flat if stop > start else None, start))
    with mock.patch.object(writing, "SHORT_NBYTES", short):
        writer.write(writer.extents_of(parts))
    return disk.content, sorted(writer.rows["file"].tolist()), disk.num_writes


@pytest.mark.parametrize("rank", [0, 1])
def test_short_parts_are_written_as_long_ones(rank: int) -> None:
    content, rows, num_writes = written(rank, short=1 << 20)
    by_itself, rows_by_itself, num_by_itself = written(rank, short=-1)
    assert content == by_itself
    assert num_writes <= num_by_itself
    assert rows == rows_by_itself
    mixed, rows_of_both, _ = written(rank, short=60)  # short ones between longer ones
    assert (mixed, rows_of_both) == (content, rows)
    for start, stop, digest in rows:
        body = bytes(content[OFFSET + i] for i in range(start, stop))
        assert digest == xxhash.xxh3_64_intdigest(body)


def test_all_ranks_together_write_every_byte_once() -> None:
    by_rank = [written(rank, short=1 << 20)[0] for rank in (0, 1)]
    assert not by_rank[0].keys() & by_rank[1].keys()
    values = [StateValue(name, str(dtype), dtype, cut) for dtype in DTYPES for name, cut in CUTS.items()]
    total = sum(value.nbytes for value in values)
    assert sorted([*by_rank[0], *by_rank[1]]) == list(range(OFFSET, OFFSET + total))
