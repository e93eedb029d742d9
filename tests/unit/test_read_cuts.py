"""Which rank reads a small tensor of a store: one for its neighbours in the file, and all ranks about as much."""

from __future__ import annotations

import unittest
from collections import Counter
from types import SimpleNamespace
from typing import Any

from parameterized import parameterized

from fsdp_optim.checkpoint.load.reading import CheckpointEnd, StoredValue
from fsdp_optim.layout import FlatRuns
from fsdp_optim.plugins import StoredTensor
from fsdp_optim.tensors.memory import Budget

MIB = 1 << 20
RANKS = (0, 1, 2, 3)


def readers(start: int, numel: int = 2048) -> tuple[int, ...]:
    """The ranks that read a float32 tensor that each rank has a quarter of."""
    shares = tuple(numel // 4 * rank for rank in range(5))
    cut = FlatRuns((numel,), shares[:-1], shares[1:], RANKS)
    stored = StoredTensor("weight", "float32", (numel,), "model.safetensors", start, request_nbytes=MIB)
    checkpoint: Any = SimpleNamespace()
    end = CheckpointEnd(checkpoint, 0, Budget(MIB))
    return tuple(end.io_placement(StoredValue.of("weight", "weight", stored, cut, None, is_state=False), cut).ranks)


class ReadersTest(unittest.TestCase):
    @parameterized.expand([("all alike", 32 * MIB), ("two in turn", 8 * MIB), ("uneven", 33 * MIB + 12345)])
    def test_small_tensors_of_equal_layers(self, _: str, distance: int) -> None:
        """However far the layers are apart, no rank reads most of them."""
        num_layers_of = Counter(readers(distance * layer) for layer in range(64))
        self.assertEqual({len(ranks) for ranks in num_layers_of}, {1})
        self.assertEqual(len(num_layers_of), len(RANKS))
        self.assertLessEqual(max(num_layers_of.values()), 2 * 64 // len(RANKS))

    def test_one_load_spreads_values_of_one_cut_as_loads_of_each_do(self) -> None:
        """Values of equal layers share their cut, and what is kept for it depends on the file and the place of each."""
        shares = tuple(512 * rank for rank in range(5))
        cut = FlatRuns((2048,), shares[:-1], shares[1:], RANKS)
        checkpoint: Any = SimpleNamespace()
        values = [
            StoredValue.of("weight", "weight", stored, cut, None, is_state=False)
            for file in ("1.safetensors", "2.safetensors")
            for layer in range(64)
            for stored in [StoredTensor("weight", "float32", (2048,), file, 5 * MIB * layer, request_nbytes=MIB)]
        ]
        together: Any = CheckpointEnd(checkpoint, 0, Budget(MIB))
        alone: list[Any] = [CheckpointEnd(checkpoint, 0, Budget(MIB)) for _ in values]
        cuts = together.io_placements(values, [cut] * len(values))
        self.assertEqual(cuts, [end.io_placement(value, cut) for end, value in zip(alone, values, strict=True)])
        self.assertEqual(len({each.ranks for each in cuts[:64]}), len(RANKS))
        self.assertNotEqual(cuts[:64], cuts[64:])

    def test_neighbours_have_one_reader(self) -> None:
        self.assertEqual(len({readers(40 * MIB + 8192 * index) for index in range(100)}), 1)

    def test_large_tensors_are_read_where_they_are_needed(self) -> None:
        self.assertEqual(readers(0, 4 * MIB), RANKS)

    def test_the_dtypes_of_one_cut_are_told_apart(self) -> None:
        """Each is read as by a load that has read no other, in either order."""
        numel = 2 * MIB  # 8 MiB of float32, which each rank reads for itself, and 2 MiB of bytes
        shares = tuple(numel // 4 * rank for rank in range(5))
        cut = FlatRuns((numel,), shares[:-1], shares[1:], RANKS)
        values = [
            StoredValue.of(dtype, "weight", stored, cut, None, is_state=False)
            for dtype in ("float32", "uint8")
            for stored in [StoredTensor(dtype, dtype, (numel,), "model.safetensors", 0, request_nbytes=MIB)]
        ]
        checkpoint: Any = SimpleNamespace()
        alone = [CheckpointEnd(checkpoint, 0, Budget(MIB)).io_placement(value, cut) for value in values]
        self.assertNotEqual(*alone)
        for order in ((0, 1), (1, 0)):
            end = CheckpointEnd(checkpoint, 0, Budget(MIB))
            for index in order:
                self.assertEqual(end.io_placement(values[index], cut), alone[index])


if __name__ == "__main__":
    unittest.main()
