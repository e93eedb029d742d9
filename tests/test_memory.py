"""Memory for tensors: slabs of huge pages that tensors share, each with a storage of its own."""

from __future__ import annotations

import gc
import io
import unittest
import unittest.mock
import weakref

import torch
from parameterized import parameterized
from wrapping import check_same

from fsdp_optim import memory
from fsdp_optim.memory import Slabs

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)


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
            self.assertEqual(tensor.view(torch.uint8).unique().tolist(), [number], number)
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

    def test_without_huge_pages(self) -> None:
        with unittest.mock.patch.object(memory, "_madvise", return_value=None):
            slabs = Slabs()
            tensor = slabs.empty((1 << 18,), torch.float32, CPU).fill_(1)
        self.assertIsNone(slabs._slab)
        self.assertEqual(float(tensor.sum()), float(1 << 18))


if __name__ == "__main__":
    unittest.main()
