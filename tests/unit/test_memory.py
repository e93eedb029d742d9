"""Memory for tensors: slabs of huge pages that tensors share, each with a storage of its own."""

from __future__ import annotations

import errno
import gc
import io
import itertools
import math
import mmap
import os
import unittest
import unittest.mock
import weakref

import torch
from kit.compare import check_same
from parameterized import parameterized

from fsdp_optim.tensors import allocation, memory
from fsdp_optim.tensors.allocation import Pages, Slabs

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)


class PagesTest(unittest.TestCase):
    WANTED = ((300_001, torch.bfloat16), (0, torch.float32), (7, torch.float64), (200_000, torch.float32))

    def test_tensors_of_one_call_do_not_overlap(self) -> None:
        for is_kept in (False, True):
            flats = Pages(is_kept=is_kept).flats(self.WANTED)
            self.assertIsNone(flats[1])
            made = [flat for flat in flats if flat is not None]
            for number, flat in enumerate(made):
                flat.fill_(number)
            for number, (flat, (numel, dtype)) in enumerate(zip(made, (w for w in self.WANTED if w[0]), strict=True)):
                check_same("elements", flat, torch.full((numel,), number, dtype=dtype))

    def test_the_next_call_uses_the_memory_again_unless_it_is_kept(self) -> None:
        for is_kept in (False, True):
            pages = Pages(is_kept=is_kept)
            first, then = (pages.flats(wanted)[0] for wanted in (self.WANTED, self.WANTED[:1]))
            self.assertEqual(first.data_ptr() == then.data_ptr(), not is_kept)
            (larger,) = pages.flats([(1 << 20, torch.float64)])
            check_same("elements", larger.zero_(), torch.zeros(1 << 20, dtype=torch.float64))


class SlabsTest(unittest.TestCase):
    def test_tensors_do_not_overlap(self) -> None:
        slabs, made = Slabs(), []
        for number in range(240):
            dtype = DTYPES[number % len(DTYPES)]
            nbytes = (
                (1 << 10, 300_007, 1 << 20, (5 << 20) + 1, 17 << 20)[number % 5] if number < 60 else 262_144 + number
            )
            tensor = slabs.empty((nbytes // dtype.itemsize,), dtype, CPU)
            tensor.view(torch.uint8).fill_(number)
            made.append(tensor)
        for number, tensor in enumerate(made):
            self.assertTrue(bool((tensor.view(torch.uint8) == number).all()), number)
            self.assertEqual(tensor.dtype, DTYPES[number % len(DTYPES)])
            self.assertEqual(tensor.data_ptr() % 64, 0)
        storages = {tensor.untyped_storage().data_ptr() for tensor in made}
        self.assertEqual(len(storages), len(made))

    def test_a_storage_is_as_large_as_its_tensor(self) -> None:
        slabs = Slabs()
        for shape in ((300, 1000), (1 << 20,), (0,), (), (7, 0), (3,)):
            tensor = slabs.empty(shape, torch.float32, CPU)
            check_same("shape", tuple(tensor.shape), shape)
            self.assertTrue(tensor.is_contiguous())
            self.assertEqual(tensor.untyped_storage().nbytes(), tensor.nbytes)
            file = io.BytesIO()
            torch.save(tensor, file)
            self.assertLess(len(file.getvalue()), tensor.nbytes + 4096)

    def test_medium_ones_share_a_slab_that_goes_with_the_last(self) -> None:
        slabs = Slabs()
        first, second = (slabs.empty((1 << 17,), torch.float32, CPU) for _ in range(2))
        slab = slabs._slab
        self.assertEqual(second.data_ptr() - first.data_ptr(), first.nbytes)
        ref = weakref.ref(slab) if slab is not None else None
        del slabs, slab, first
        gc.collect()
        if ref is None:
            self.skipTest("huge pages: this system has none to ask for")
        self.assertIsNotNone(ref())
        second.fill_(3)
        del second
        gc.collect()
        self.assertIsNone(ref())

    @parameterized.expand(((1,), (1 << 15,), (1 << 25,)))
    def test_small_and_large_ones_have_pages_of_their_own(self, numel: int) -> None:
        slabs = Slabs()
        slabs.empty((numel,), torch.float32, CPU)
        self.assertIsNone(slabs._slab)

    def test_a_kernel_that_refuses_the_advice(self) -> None:
        class Refuses(mmap.mmap):
            def madvise(self, *_: int) -> None:  # type: ignore[override]
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        with unittest.mock.patch.object(mmap, "mmap", Refuses):
            tensor = Slabs().empty((1 << 18,), torch.float32, CPU).fill_(1)
        self.assertEqual(float(tensor.sum()), float(1 << 18))

    def test_without_huge_pages(self) -> None:
        with unittest.mock.patch.object(allocation, "_madvise", return_value=None):
            slabs = Slabs()
            tensor = slabs.empty((1 << 18,), torch.float32, CPU).fill_(1)
        self.assertIsNone(slabs._slab)
        self.assertEqual(float(tensor.sum()), float(1 << 18))


class PiecesTest(unittest.TestCase):
    @parameterized.expand(itertools.product(((5,), (4, 3), (2, 3, 4), (1, 7), (3, 1, 2), (0, 3)), (1, 2, 3, 5, 7, 100)))
    def test_row_after_row(self, shape: tuple[int, ...], most: int) -> None:
        whole = torch.arange(math.prod(shape)).reshape(shape)
        for order in itertools.permutations(range(len(shape))):
            # the same values, laid out in another order of dimensions
            value = whole.permute(order).contiguous().permute(tuple(map(order.index, range(len(shape)))))
            self.assertTrue(torch.equal(value, whole))
            pieces, at = [], 0
            for start, piece in memory.pieces(value, most):
                self.assertEqual((start, piece.dim()), (at, 1))
                self.assertTrue(len(piece) <= most or value.is_contiguous())
                pieces.append(piece)
                at += len(piece)
            check_same("elements", torch.cat([torch.empty(0, dtype=whole.dtype), *pieces]), whole.reshape(-1))

    def test_no_copy_where_it_is_contiguous(self) -> None:
        value = torch.zeros(4, 5)
        ((start, piece),) = memory.pieces(value, 3)
        self.assertEqual((start, piece.data_ptr(), piece.numel()), (0, value.data_ptr(), 20))

    def test_every_second_column(self) -> None:
        value = torch.arange(40).reshape(4, 10)[:, ::2]
        check_same("elements", torch.cat([piece for _, piece in memory.pieces(value, 7)]), value.reshape(-1).clone())


class OrdinaryTest(unittest.TestCase):
    def test_neither_inference_mode_nor_a_default_device(self) -> None:
        with torch.inference_mode(), torch.device("meta"), memory.ordinary_tensors():
            made = torch.zeros(1)
        self.assertEqual((made.device.type, made.is_inference()), ("cpu", False))


if __name__ == "__main__":
    unittest.main()
