"""The function behind fingerprints: against integers of Python, however a value is cut, and what it tells apart."""

from __future__ import annotations

import math
import unittest
from unittest import mock

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.cases import examples
from kit.oracle import placements
from kit.prints import bits_of, bytes_of, column, mix, print_of
from parameterized import parameterized
from torch import Tensor

from fsdp_optim.layout import MeshBoxes, Placement, Whole
from fsdp_optim.plan import Copy, copies_of
from fsdp_optim.prints import LocalSums, RowsOfValues, RowSums
from fsdp_optim.prints import sums as sums_of_rows

CPU = torch.device("cpu")
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
]


def random_value(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits that are numbers of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    if dtype.is_complex:
        return torch.complex(real, real.flip(0) - 1).to(dtype)
    return (real > 0) if dtype is torch.bool else real.abs().to(dtype) if dtype is torch.uint8 else real.to(dtype)


def whole(value: Tensor) -> list[Copy]:
    return [Copy(0, 0, (value.numel(),), 0, (1,), 0, (1,))]


def sums_over(parts: list[tuple[list[Copy], Tensor]], nbytes: int = 1 << 20, projections: int = 0) -> LocalSums:
    """The sums over local tensors of one value, as ranks add them."""
    total = LocalSums.zeros(1, projections)
    for copies, flat in parts:
        sums = RowSums(1, CPU, projections)
        rows = RowsOfValues(sums, CPU, nbytes)
        rows.add(copies, flat, 0)
        rows.flush()
        total += sums.local()
    return total


def bits_over(value: Tensor, nbytes: int = 1 << 20) -> int:
    return sums_over([(whole(value), value.contiguous().view(-1))], nbytes).bits_of(0)


class TestBits(unittest.TestCase):
    @parameterized.expand([(str(dtype).removeprefix("torch."), dtype) for dtype in DTYPES])
    def test_any_dtype(self, name: str, dtype: torch.dtype) -> None:
        for shape in ((), (3,), (37, 5), (0,), (23, 31)):
            value = random_value(shape, dtype)
            sums = sums_over([(whole(value), value.contiguous().view(-1))], projections=3)
            want = print_of(value.double() if dtype.itemsize == 1 and dtype.is_floating_point else value, 3)
            self.assertEqual(sums.bits_of(0), bits_of(bytes_of(value)), shape)
            self.assertAlmostEqual(float(sums.squares[0]) ** 0.5, want.norm, delta=1e-12 * (1 + want.norm))
            numpy.testing.assert_allclose(sums.projections[0], want.projections, atol=1e-9 * (1 + want.norm))
            self.assertEqual(sums.num_nonfinite[0], 0)

    @parameterized.expand([(0,), (1,), (31,), (32, 1024), (33,), (64,), (100, 1000), (5000, 700)])
    def test_any_number_of_rows(self, *shape: int) -> None:
        """Rows are added in chunks, by products of matrices or without, and where they lie or from the scratch."""
        value = random_value((*shape, 256)[:2], torch.float32)
        value = value[:, :77] if value.numel() > 1 << 20 else value
        reference = _by_numpy(value.contiguous())
        for nbytes in (2048, 1 << 16, 1 << 22):
            self.assertEqual(bits_over(value.contiguous(), nbytes), reference, nbytes)
        if value.numel() < 3000:
            self.assertEqual(reference, bits_of(bytes_of(value)))

    @parameterized.expand([(torch.float8_e4m3fn,), (torch.float8_e5m2,)])
    def test_small_floats(self, dtype: torch.dtype) -> None:
        """Rows of one value are counted; those of several are not."""
        value = torch.arange(256, dtype=torch.uint8).repeat(2048)[:-77].view(dtype)
        real = value.double()
        finite = torch.isfinite(real)
        sums = sums_over([(whole(value), value)])
        self.assertEqual(int(sums.num_nonfinite[0]), int((~finite).sum()))
        self.assertAlmostEqual(float(sums.squares[0]) / float(real[finite].square().sum()), 1, places=12)

    @parameterized.expand([("int8",), ("float32",), ("",)])
    def test_all_ways_give_the_same(self, way: str) -> None:
        for value in (
            random_value((300, 256), torch.float32),
            torch.full((100, 1024), -128, dtype=torch.int8),
            torch.full((100, 1024), 127, dtype=torch.int8),
        ):
            with mock.patch.object(sums_of_rows, "_way_on", return_value=way):
                self.assertEqual(bits_over(value), _by_numpy(value))

    def test_a_single_byte_is_seen_for_certain(self) -> None:
        for w in range(2):
            for k in range(2048):
                self.assertNotEqual(column(w, k) % (1 << 56), 0)
        self.assertEqual(len({column(w, k) for w in range(2) for k in range(2048)}), 4096)


def _by_numpy(value: Tensor) -> int:
    """The definition for larger values, checked against integers of Python for small ones."""
    data = numpy.frombuffer(value.view(torch.uint8).numpy().tobytes(), numpy.int8).astype(numpy.int64)
    halves = []
    with numpy.errstate(over="ignore"):
        rows = -(-len(data) // 2048)
        padded = numpy.zeros(rows * 2048, numpy.int64)
        padded[: len(data)] = data
        for w in range(2):
            columns = numpy.array([column(w, k) for k in range(2048)], numpy.uint64).view(numpy.int64)
            factors = numpy.array([mix(2 * q + w, 4 << 56) | 1 for q in range(rows)], numpy.uint64).view(numpy.int64)
            halves.append(int(((padded.reshape(rows, 2048) * columns).sum(1) * factors).sum()) & ((1 << 64) - 1))
    return halves[1] << 64 | halves[0]


def parts_of(placement: Placement, value: Tensor) -> list[tuple[list[Copy], Tensor]]:
    """The local tensors of all ranks of a placement, with padding and holes that are not zero, and their copies to storage."""
    parts = []
    copies = copies_of(placement, Whole(placement.shape, (-1,)))
    for rank in placement.ranks:
        own = [copy for copy in copies if copy.source_rank == rank]
        shard = placement.shard_of(rank)
        blocks = placement.blocks(shard) if shard is not None else ()
        local = torch.full((max((block.end for block in blocks), default=0) + 3,), 77, dtype=value.dtype)
        for block in blocks:
            box = tuple(slice(o, o + n) for o, n in zip(block.box.offsets, block.box.sizes, strict=True))
            local.as_strided(block.box.sizes, block.local_strides, block.offset).copy_(value[box])
        parts.append((own, local))
    return parts


class TestCuts(unittest.TestCase):
    @examples(150)
    @given(st.data())
    def test_every_placement(self, data: st.DataObject) -> None:
        """Padding, holes, empty shards, replicas, boxes, strides: none of them changes anything."""
        shape = tuple(data.draw(st.lists(st.integers(0, 40), max_size=3)))
        placement = data.draw(placements(shape))
        value = random_value(shape, data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.complex128))))
        parts = parts_of(placement, value)
        sums = sums_over(parts, data.draw(st.sampled_from((2048, 1 << 16))), projections=2)
        want = sums_over([(whole(value), value.contiguous().view(-1))], projections=2)
        self.assertEqual(sums.bits_of(0), want.bits_of(0))
        numpy.testing.assert_allclose(sums.squares, want.squares, rtol=1e-12)
        numpy.testing.assert_allclose(sums.projections, want.projections, atol=1e-9 * (1 + float(want.squares[0])))

    @parameterized.expand([(1024, 8), (1024, 3), (512, 2), (4096, 7), (1536, 2), (2048, 300)])
    def test_blocks_of_columns(self, width: int, num: int) -> None:
        """As tensor parallel cuts: rows of columns that begin anywhere in a row of bytes, which are added by themselves."""
        value = random_value((11, width), torch.float32)
        cut = MeshBoxes((11, width), (num,), ((0, 1),), (tuple(range(num)),))
        parts = parts_of(cut, value)
        for nbytes in (4096, 1 << 15, 1 << 20):
            self.assertEqual(sums_over(parts, nbytes).bits_of(0), _by_numpy(value), nbytes)

    def test_values_together(self) -> None:
        """Rows of several values, of several dtypes, go through one scratch."""
        values = [
            random_value((n,), dtype, n)
            for n in (1, 300, 5000)
            for dtype in (torch.float32, torch.int16, torch.float32)
        ]
        sums = RowSums(len(values), CPU)
        rows = RowsOfValues(sums, CPU, 1 << 16)
        for index, value in enumerate(values):
            rows.add(whole(value), value, index)
        rows.flush()
        local = sums.local()
        for index, value in enumerate(values):
            self.assertEqual(local.bits_of(index), bits_over(value))
            self.assertAlmostEqual(float(local.squares[index]), float(value.double().square().sum()), places=6)
        again = LocalSums.from_bytes(local.to_bytes(), len(values), 0)
        self.assertTrue(
            all(numpy.array_equal(a, b) for a, b in zip(vars(local).values(), vars(again).values(), strict=True))
        )

    @parameterized.expand([(4096,), (1 << 15,), (1 << 20,)])
    def test_boxes_of_several_values_together(self, nbytes: int) -> None:
        """Small boxes, runs between them, and blocks of columns that are added by themselves, on two ranks."""
        shapes = [(8, 8), (3, 10), (70, 90), (11, 1024), (8, 8), (40,), (5, 6, 4)] * 3
        values = [random_value(shape, torch.float32, seed) for seed, shape in enumerate(shapes)]
        total, num_adds = LocalSums.zeros(len(values), 0), 0
        for rank in (0, 1):
            sums = RowSums(len(values), CPU)
            rows = RowsOfValues(sums, CPU, nbytes)
            with mock.patch.object(sums, "add", wraps=sums.add) as added:
                for index, value in enumerate(values):
                    cut = MeshBoxes(tuple(value.shape), (2,), ((0, value.dim() - 1),), ((0, 1),))
                    rows.add(*parts_of(cut, value)[rank], index)
                rows.flush()
            total += sums.local()
            num_adds = max(num_adds, added.call_count)
        for index, value in enumerate(values):
            self.assertEqual(total.bits_of(index), bits_over(value), shapes[index])
            self.assertAlmostEqual(float(total.squares[index]), float(value.double().square().sum()), places=6)
        if nbytes == 1 << 20:
            self.assertLess(
                num_adds, 3 * len({*shapes})
            )  # the blocks of columns are one each, and what is between them


class TestFaults(unittest.TestCase):
    """What must be told apart, on a value of ordinary size."""

    value = random_value((64, 100), torch.float32)

    @parameterized.expand(
        [
            ("one bit", lambda v: v.view(torch.int32).bitwise_xor(torch.eye(64, 100, dtype=torch.int32)).view(v.dtype)),
            ("one sign", lambda v: _negated(v, 1)),
            ("all signs", lambda v: -v),
            ("two signs", lambda v: _negated(v, 2)),
            ("a shift", lambda v: v.roll(1)),
            ("a shift by a row", lambda v: v.roll(1, 0)),
            ("a shift by rows of 2048 bytes", lambda v: v.view(-1).roll(512).view(v.shape)),
            ("an offset", lambda v: v + 1e-3),
            ("a scale", lambda v: v * 2),
            ("a transposition", lambda v: v.view(100, 64).T.contiguous().view(64, 100)),
            ("the reverse", lambda v: v.flip(0, 1)),
            ("two elements exchanged", lambda v: _exchanged(v, 0, 1)),
            ("two distant elements exchanged", lambda v: _exchanged(v, 3, 5 * 1024 + 3)),
            ("zeros", torch.zeros_like),
            ("one element zero", lambda v: v * (torch.arange(6400).view(64, 100) != 4321)),
            ("through bfloat16", lambda v: v.bfloat16().float()),
        ]
    )
    def test_is_seen(self, name: str, change: object) -> None:
        assert callable(change)
        other = change(self.value.clone()).contiguous()
        self.assertFalse(torch.equal(other, self.value), "the fault does nothing")
        self.assertNotEqual(bits_over(other), bits_over(self.value))

    def test_raw_bits_count(self) -> None:
        def bits(*numbers: float) -> int:
            return bits_over(torch.tensor(numbers, dtype=torch.float64))

        self.assertNotEqual(bits(0.0), bits(-0.0))
        self.assertNotEqual(bits(-0.0, 0.0), bits(0.0, -0.0))
        self.assertNotEqual(bits(-0.0, -0.0), bits(0.0, 0.0))
        quiet = torch.tensor([0x7FF8000000000000, 0x7FF8000000000001]).view(torch.float64)
        self.assertNotEqual(bits_over(quiet[:1]), bits_over(quiet[1:]))

    def test_signs_of_many_float64_elements(self) -> None:
        """Whose lowest changed bit is the highest of a word: sums of words that wrap would lose pairs of them."""
        value = random_value((512,), torch.float64)
        seen = {bits_over(value)}
        for a in range(0, 512, 37):
            for b in range(a + 1, 512, 41):
                other = value.clone()
                other[[a, b]] *= -1
                seen.add(bits_over(other))
        self.assertEqual(len(seen), 1 + sum(len(range(a + 1, 512, 41)) for a in range(0, 512, 37)))

    def test_elements_that_are_not_finite(self) -> None:
        value = torch.tensor([[1.0, math.inf, -math.inf], [math.nan, 2.0, 2.0]])
        sums = sums_over([(whole(value), value.view(-1))], projections=1)
        self.assertEqual((float(sums.squares[0]), int(sums.num_nonfinite[0])), (9.0, 3))
        want = print_of(value, 1)
        self.assertEqual((want.norm, want.num_nonfinite), (3.0, 3))
        self.assertAlmostEqual(float(sums.projections[0, 0]), want.projections[0])
        pairs = torch.tensor([complex(1, math.inf), complex(3, 4)])
        sums = sums_over([(whole(pairs), pairs)])
        self.assertEqual((float(sums.squares[0]), int(sums.num_nonfinite[0])), (25.0, 1))


def _negated(value: Tensor, num: int) -> Tensor:
    value[0, :num] *= -1
    return value


def _exchanged(value: Tensor, a: int, b: int) -> Tensor:
    flat = value.view(-1)
    flat[[a, b]] = flat[[b, a]]
    return value
