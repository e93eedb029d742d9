"""The ranges that a rank writes of values that share one cut are those of values with cuts of their own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec import structs

from fsdp_optim.checkpoint.common.files import WRITTEN_TOGETHER
from fsdp_optim.checkpoint.save.file_plan import FilePlan
from fsdp_optim.checkpoint.save.short_parts import Kind, ShortParts
from fsdp_optim.checkpoint.save.trace import Trace
from fsdp_optim.checkpoint.save.writing import RankWriter
from fsdp_optim.formats.base.packed import PackedExtents
from fsdp_optim.layout import FlatChunks, Placement, Whole
from fsdp_optim.move import Parts, Slice, StateValue
from fsdp_optim.plan import Copy, Plans
from fsdp_optim.tensors.memory import Budget

NUMEL = 1 << 15  # storage has four parts, one part or two parts of a value
STARTS = (0, WRITTEN_TOGETHER, 5 * WRITTEN_TOGETHER + 8, 8 * WRITTEN_TOGETHER, 10 * WRITTEN_TOGETHER)
DTYPES = (torch.float64, torch.uint8, torch.float32, torch.int8, torch.uint8)


def cut() -> FlatChunks:
    """Two replicas, each in two shards."""
    return FlatChunks((NUMEL,), 0, NUMEL // 2, ((0, 1), (2, 3)), own_tensor=True)


def ranges(rank: int, *, shared: bool) -> list[list[tuple[int, int]]]:
    """The written ranges of each value, as pairs (start, stop)."""
    shared_cut, pairs = cut(), []
    values = [
        StateValue("a", str(number), dtype, shared_cut if shared else cut()) for number, dtype in enumerate(DTYPES)
    ]
    plan = SimpleNamespace(starts=STARTS, segment_nbytes=2048)
    file: Any = SimpleNamespace(name="file", values=values, plan=plan)
    writer = RankWriter(
        mock.Mock(),
        FilePlan((file,)),
        rank,
        checksums=True,
        budget=Budget(1 << 20),
        plans=Plans(),
        trace=Trace(None),
    )
    for value in values:
        part = Slice(value, value.placement, torch.zeros(NUMEL // 2, dtype=value.dtype))
        extents = writer.extents_of([part]).get("file", [])
        pairs.append([pair for extent in extents for pair in pairs_of(extent)])
    return pairs


def pairs_of(extent: Any) -> list[tuple[int, int]]:
    if isinstance(extent, PackedExtents):
        return [*zip(extent.starts.tolist(), extent.stops.tolist(), strict=True)]
    return [(extent.start, extent.stop)]


@pytest.mark.parametrize("rank", range(4))
def test_values_that_share_a_cut(rank: int) -> None:
    assert ranges(rank, shared=True) == ranges(rank, shared=False)


def test_all_replicas_together_write_each_byte_once() -> None:
    by_rank = [ranges(rank, shared=True) for rank in range(4)]
    for number, (start, dtype) in enumerate(zip(STARTS, DTYPES, strict=True)):
        at = start
        for first, stop in sorted(pair for rank_values in by_rank for pair in rank_values[number]):
            assert first == at
            at = stop
        assert at == start + NUMEL * dtype.itemsize


def test_replicas_share_small_values() -> None:
    """Each replica writes some of the values that are too small for a part of each: their places in the file decide."""
    writers = [{rank for rank in range(4) if ranges(rank, shared=True)[number]} for number in (1, 3)]
    assert [len(ranks) for ranks in writers] == [2, 2]
    assert writers[0].isdisjoint(writers[1])


def test_short_parts_of_any_dtypes_lie_side_by_side() -> None:
    """Whatever their order and their lengths, each is at a multiple of the size of its elements, with its own bytes."""
    parts, section, begin = ShortParts(), bytearray(), 3
    for number, (dtype, numel) in enumerate(itertools.product((torch.uint8, torch.float64, torch.bfloat16), (1, 3, 6))):
        flat = torch.arange(1 + number, 1 + number + numel).to(dtype)
        run = Copy(0, -1, (numel,), 0, (1,), 0, (1,))
        parts.add(begin, Kind.of([(0, run)], dtype.itemsize, 0, numel), flat)
        section += bytes(begin - len(section)) + flat.view(torch.uint8).numpy().tobytes()
        begin = len(section) + number % 2
    packed, written = parts.packed(), bytearray(len(section))
    for start, part in zip(packed.starts.tolist(), packed.parts(), strict=True):
        written[start : start + len(part)] = part
    assert written == section


ROWS = torch.arange(24, dtype=torch.float32).reshape(4, 6)
TURNED = (torch.arange(6) + 1j * torch.arange(6)).reshape(2, 3).conj()
HELD = (
    *(ROWS, ROWS.t(), ROWS[:, 1:4], ROWS.to(memory_format=torch.contiguous_format)[::2], ROWS.reshape(2, 2, 6)),
    *(torch.tensor(7.0), torch.tensor(8, dtype=torch.int64), torch.ones(5, dtype=torch.bool), torch.zeros(0, 3)),
    *(torch.nn.Parameter(ROWS + 1), TURNED, torch.ones(3).bfloat16(), torch.arange(40.0)[8:20], torch.ones(20_000)),
)


@pytest.mark.parametrize("are_files", [True, False], ids=["the values of the file", "equal values"])
def test_parts_in_any_shape_and_strides_have_their_elements_in_order(are_files: bool) -> None:
    """Short and long, with and without dimensions, of flat parameters, lazily conjugated: as one slice after the other.

    Values that are moved may be other objects than those of the file, with equal keys: those that are cast are.
    """
    values, cuts, starts, parts, at = [], list[Placement](), [], list[int](), 3
    for number, held in enumerate(HELD):
        offset = 8 if held.shape == (12,) else 0
        place = Whole(tuple(held.shape), (0,), offset)
        values.append(StateValue(f"p{number}", "exp_avg", held.dtype, place))
        cuts.append(place)
        starts.append(offset)
        parts.append(at)
        at += held.nbytes + number % 3
    plan = SimpleNamespace(starts=tuple(parts), segment_nbytes=2048)
    file: Any = SimpleNamespace(name="file", values=values, plan=plan)
    budget = Budget(1 << 20)
    writer = RankWriter(
        mock.Mock(), FilePlan((file,)), 0, checksums=True, budget=budget, plans=Plans(), trace=Trace(None)
    )
    moved = values if are_files else [structs.replace(value) for value in values]
    extents = writer.extents_of(Parts(moved, cuts, starts, [held.detach() for held in HELD]))["file"]
    written, wanted = bytearray(at), bytearray(at)
    for extent in extents:
        ranges = zip(extent.starts.tolist(), extent.parts(), strict=True) if isinstance(extent, PackedExtents) else []
        for start, piece in ranges or [(extent.start, extent.memory)]:  # type: ignore[union-attr]
            written[start : start + len(piece)] = piece
    for start, held in zip(parts, HELD, strict=True):
        data = bytes(held.detach().resolve_conj().contiguous().flatten().view(torch.uint8).numpy())
        wanted[start : start + len(data)] = data
    assert written == wanted
