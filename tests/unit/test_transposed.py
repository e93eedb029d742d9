"""Large transposed tensors are copied element by element where torch would, whatever their strides are."""

from __future__ import annotations

import itertools
import unittest
from unittest import mock

import torch
from kit.compare import check_same
from parameterized import parameterized

from fsdp_optim.tensors.memory import copy_all

HEIGHT, WIDTH = 600, 1024  # a MiB in bf16, and rows that compete for places in the cache
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.complex64)


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Bits of all kinds, NaNs among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return (
        torch.arange(count, dtype=torch.int64)
        .mul_(2_654_435_761)
        .bitwise_and_(255)
        .to(torch.uint8)
        .view(dtype)
        .view(shape)
    )


def views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Matrices of one shape that lie in memory in different ways."""
    return {
        "row by row": numbers(dtype, HEIGHT, WIDTH),
        "transposed": numbers(dtype, WIDTH, HEIGHT).t(),
        "alternating": numbers(dtype, HEIGHT, WIDTH, 2)[..., 1],
        "transposed and alternating": numbers(dtype, WIDTH, HEIGHT, 2)[..., 0].t(),
        "between others": numbers(dtype, WIDTH + 8, HEIGHT + 424)[3 : 3 + WIDTH, 5 : 5 + HEIGHT].t(),
    }


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


class TransposedTest(unittest.TestCase):
    @parameterized.expand([(dtype,) for dtype in DTYPES])
    def test_each_element(self, dtype: torch.dtype) -> None:
        for (what, source), (where, like) in itertools.product(views(dtype).items(), repeat=2):
            target = like.clone(memory_format=torch.preserve_format) if like.is_contiguous() else like
            around = like._base if like._base is not None else target
            wanted = around.clone()
            wanted.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(source)
            copy_all([(target, source)])
            check_same(f"{what} to {where}", bits(around), bits(wanted))

    def test_stacks(self) -> None:
        source = numbers(torch.float32, 3, 256, 2, 2048)
        for order in itertools.permutations(range(4)):
            target = torch.empty([source.shape[dim] for dim in order])
            copy_all([(target, source.permute(order))])
            check_same(str(order), bits(target), bits(source.permute(order)))

    def test_no_large_transposed_tensor_is_left_to_torch(self) -> None:
        """torch copies each element of these by itself, and takes several times as long."""
        source = numbers(torch.float32, WIDTH, HEIGHT, 2)[..., 0]
        with mock.patch("torch._foreach_copy_") as by_torch:
            copy_all([(torch.empty(HEIGHT, WIDTH), source.t())])
            by_torch.assert_not_called()
            copy_all([(torch.empty(30, 20), torch.empty(20, 30).t()), (torch.empty(7), torch.empty(7))])
            self.assertEqual([len(listed) for listed in by_torch.call_args.args], [2, 2])
