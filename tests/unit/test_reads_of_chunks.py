"""Reads of tensors that files have in several pieces, as those of torch's DCP, against the elements of the complete tensors."""

from __future__ import annotations

import random
import unittest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from kit.short_values import DTYPES, SHAPES, cuts, elements, local
from parameterized import parameterized

from fsdp_optim.checkpoint.load import short_ranges
from fsdp_optim.checkpoint.load.reading import CheckpointEnd, StoredValue, read_constants
from fsdp_optim.formats.base.extents import without_overlaps
from fsdp_optim.formats.base.protocols import Chunks, StoredTensor, TensorReader
from fsdp_optim.layout import Placement, Whole
from fsdp_optim.move import Slice, StateValue
from fsdp_optim.plugins import Extent
from fsdp_optim.tensors.memory import Budget, bytes_in_memory, dtype_name

LONG = (150, 40)  # its ranges are read by themselves
WITH_PADDING = 2  # of the ways to cut: no file has padding


@dataclass
class Files:
    """A reader of files in memory, which notes what each call reads."""

    data: dict[str, bytearray] = field(default_factory=dict)
    reads: list[list[tuple[str, int, int]]] = field(default_factory=list)

    def add(self, file: str, piece: bytes, gap: int) -> int:
        data = self.data.setdefault(file, bytearray())
        data += bytes([251]) * gap  # what a file has between two pieces
        start = len(data)
        data += piece
        return start

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self.reads.append([(file, each.start, each.stop) for file, some in extents.items() for each in some])
        for file, some in extents.items():
            if len(list(without_overlaps(some))) != 1:
                raise AssertionError("a byte is read twice at once")
            for extent in some:
                extent.memory[:] = self.data[file][extent.start : extent.stop]
                did_read(len(extent.memory))


def stored(files: Files, value: StateValue, chosen: random.Random, **more: Any) -> StoredTensor:
    """Put a value into files, a piece for each rank of its placement."""
    at, placement = {}, value.placement
    for rank in placement.ranks:
        piece = local(value, rank, strided=False)
        if piece is not None and placement.numel_on(rank):
            file = f"{rank % 3}.distcp"
            at[rank] = file, files.add(file, bytes_in_memory(piece), chosen.choice((0, 1, 700, 5000)))
    chunks = Chunks(placement, at)
    return StoredTensor(value.fqn, dtype_name(value.dtype), placement.shape, "", 0, chunks=chunks, **more)


def filled(
    files: Files, target: StateValue, tensor: StoredTensor, rank: int
) -> tuple[torch.Tensor | None, list[Slice]]:
    """This rank's memory for a value, with 77 in each byte, and the slices that fill it: two of them, if there is room."""
    expected = local(target, rank, strided=False)
    if expected is None:
        return None, []
    memory = torch.full((expected.nbytes,), 77, dtype=torch.uint8).view(target.dtype)
    value = StoredValue.of(target.fqn, "", tensor, target.placement, memory, is_state=True)
    middle = len(memory) // 2 if int(target.fqn) % 2 else 0
    borders = [(0, middle), (middle, len(memory))]
    return memory, [
        Slice(value, target.placement, memory[first:last], first) for first, last in borders if first < last
    ]


class ChunksTest(unittest.TestCase):
    @parameterized.expand([(saved, loaded) for saved in (1, 2, 4) for loaded in (1, 2, 4)])
    def test_every_element(self, saved: int, loaded: int) -> None:
        for seed in range(4):
            chosen, files = random.Random(seed), Files()
            made: dict[Any, Placement] = {}
            ways = [way for index, way in enumerate(cuts(saved)) if index != WITH_PADDING]
            pairs: list[tuple[StateValue, StoredTensor]] = []
            for number in range(60):
                shape, dtype = chosen.choice((*SHAPES, LONG, ())), chosen.choice(DTYPES)
                kept = Whole if not shape else chosen.randrange(len(ways))
                place = Whole((), (saved - 1,)) if not shape else ways[kept](shape)
                if chosen.random() < 0.7:
                    place = made.setdefault((shape, kept), place)  # the same object, as for layers that are alike
                tensor = stored(
                    files,
                    StateValue(str(number), "", dtype, place),
                    chosen,
                    request_nbytes=chosen.choice((0, 0, 0, 1 << 20)),
                )
                cut = chosen.choice(cuts(loaded))(shape) if shape else Whole((), tuple(range(loaded)))
                cut = made.setdefault((shape, "loaded", type(cut), cut), cut)
                pairs.append((StateValue(str(number), "", dtype, cut), tensor))
            for rank in range(loaded):
                self.check(files, pairs, rank)

    def check(self, files: Files, pairs: Sequence[tuple[StateValue, StoredTensor]], rank: int) -> None:
        end = CheckpointEnd(cast(TensorReader, files), rank, Budget(1 << 20, "test"))
        parts: list[Slice] = []
        memories = []
        for target, tensor in pairs:
            memory, slices = filled(files, target, tensor, rank)
            parts += slices
            memories.append(memory)
        end.fill(parts)
        for (target, _), memory in zip(pairs, memories, strict=True):
            if memory is None:
                continue
            expected, seen = local(target, rank, strided=False), memory.view(torch.uint8)
            covered = target.placement.numel_on(rank)
            if expected is None:
                raise AssertionError("no elements on a rank that has some")
            padding = len(memory) - covered
            self.assertEqual(
                bytes_in_memory(seen)[padding * memory.itemsize :],
                bytes_in_memory(expected)[padding * memory.itemsize :],
                (target, rank),
            )
            self.assertEqual(set(seen[: padding * memory.itemsize].tolist()) - {77}, set(), "padding is not read")

    def test_short_pieces_are_read_together(self) -> None:
        """Also of tensors in pieces: hundreds of ranges in one call."""
        chosen, files = random.Random(0), Files()
        way, there = cuts(2)[0], Whole((8, 8), (0,))
        place = way((8, 8))
        pairs = []
        for number in range(200):
            tensor = stored(files, StateValue(str(number), "", torch.float32, place), chosen)
            pairs.append((StateValue(str(2 * number), "", torch.float32, there), tensor))
        parts = [part for target, tensor in pairs for part in filled(files, target, tensor, 0)[1]]
        CheckpointEnd(cast(TensorReader, files), 0, Budget(1 << 20, "test")).fill(parts)
        self.assertEqual(len(files.reads), 2)  # one for each file
        self.assertLessEqual(len(files.reads[0]), short_ranges._TOGETHER)

    def test_numbers_in_pieces(self) -> None:
        files, chosen = Files(), random.Random(1)
        values = [
            StateValue(str(number), "", dtype, Whole((), ranks))
            for number, (dtype, ranks) in enumerate(
                (dtype, ranks) for dtype in DTYPES for ranks in ((0,), (2,), (0, 1))
            )
        ]
        tensors = [stored(files, value, chosen) for value in values]
        read = read_constants(cast(TensorReader, files), [*tensors, tensors[0]])
        for value, number in zip([*values, values[0]], read, strict=True):
            self.assertEqual((number.shape, number.dtype), ((), value.dtype))
            self.assertEqual(bytes_in_memory(number.view(1)), bytes_in_memory(elements(value)))
        self.assertLessEqual(len(files.reads), 3)


if __name__ == "__main__":
    unittest.main()
