"""Elements in another order of their dimensions, in the memory that they are in."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from kit.compare import check_same
from kit.peaks import Peak

from fsdp_optim.tensors import rearranged
from fsdp_optim.tensors.memory import laid_out_like

SHAPES = [(), (5,), (1, 7), (6, 4), (4, 6), (5, 7), (16, 8), (0, 3), (3, 1, 4), (4, 6, 3), (2, 3, 4, 5), (3, 4, 2, 6)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex128]


@pytest.mark.parametrize(("at_once", "scratch"), [(0, 1), (7, 64), (7, 1 << 20), (100, 64), (200, 1)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_order_of_dimensions_is_what_a_copy_has(monkeypatch, shape, at_once, scratch):
    """A matrix of one element is a large one here; a scratch of one byte makes each pass go over one column or row."""
    monkeypatch.setattr(rearranged, "_AT_ONCE_NBYTES", at_once)
    monkeypatch.setattr(rearranged, "_SCRATCH_NBYTES", scratch)
    monkeypatch.setattr(rearranged, "_SCRATCH_SHARE", 1 << 30)
    before = torch.arange(prod(shape))
    for order in itertools.permutations(range(len(shape))):
        flat = before.clone()
        rearranged.rearrange(flat, shape, order)
        check_same(str(order), flat, before.view(shape).permute(order).reshape(-1))


@pytest.mark.parametrize("at_once", [7, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_each_dtype_keep_their_bits(monkeypatch, dtype, at_once):
    monkeypatch.setattr(rearranged, "_AT_ONCE_NBYTES", at_once)
    nbytes = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * 4 * 5 * dtype.itemsize,), dtype=torch.uint8)
    flat = nbytes.clone().view(dtype)
    rearranged.rearrange(flat, (6, 4, 5), (2, 0, 1))
    wanted = nbytes.view(6, 4, 5, dtype.itemsize).permute(2, 0, 1, 3).reshape(-1)
    check_same("bits", flat.view(torch.uint8), wanted)


@pytest.fixture
def on_one_thread():
    """As ranks are: with several, other work on the machine would keep each of many short steps waiting."""
    num = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num)


@pytest.mark.usefixtures("on_one_thread")
@pytest.mark.parametrize(
    "like",
    [
        torch.empty(1024, 3072).t(),
        torch.empty(1, 3100, 1024).transpose(1, 2),
        torch.empty(8, 256, 32, 64).to(memory_format=torch.channels_last),
    ],
    ids=lambda like: str(tuple(like.shape)),
)
def test_a_large_value_is_laid_out_in_its_own_memory(like):
    strides = torch.empty_like(like).stride()
    most = 5 if like.dim() < 4 else 11  # MiB; images are copied, some at a time
    peaks = []
    for _ in range(3):  # the least counts: pages of code that run for the first time are memory of the process too
        flat = torch.arange(like.numel(), dtype=torch.float32)
        with Peak() as peak:
            value = laid_out_like(flat, like)
        check_same("where", (value.data_ptr(), value.stride()), (flat.data_ptr(), strides))
        check_same("elements", value.contiguous().view(-1), torch.arange(like.numel(), dtype=torch.float32))
        peaks.append(peak.mib)
    assert min(peaks) < most, f"{peaks} MiB beside {flat.nbytes >> 20} MiB"
