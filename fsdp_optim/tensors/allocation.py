"""Uninitialised memory for tensors: alone, in pages that go back to the operating system, or many in a slab."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import sys
from collections.abc import Callable, Sequence
from math import prod

import torch

_HUGE_PAGE_FROM = 4 << 20  # bytes; smaller tensors do not fill a few huge pages
_IN_SLABS_FROM, _SLAB_NBYTES = 256 << 10, 32 << 20  # bytes; tensors larger than half a slab get separate pages
_SMALL_NBYTES = 16 << 10
_IN_PAGES_FROM = 256 << 10  # bytes
_ALIGNMENT = 64  # bytes, as torch aligns tensors


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised contiguous tensor with a storage of its own.

    Large CPU tensors ask the kernel for huge pages, because the first touch of fresh 4 KiB pages costs more than the
    transfer of the bytes.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and tensor.nbytes >= _HUGE_PAGE_FROM:
        _advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def in_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised CPU tensor whose memory goes back to the operating system when the tensor is freed.

    `malloc` keeps freed blocks of up to 32 MiB, more and more of them where their sizes differ. The storage cannot be resized.
    """
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < _IN_PAGES_FROM or _madvise() is None:
        return empty(shape, dtype, torch.device("cpu"))
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_FROM:
        with contextlib.suppress(OSError):  # the kernel may have no huge pages, and the advice is optional
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=prod(shape)).view(shape)


class Pages:
    """Memory for the tensors of one window after another. `is_kept`: each is kept by who gets it, so that none is used again.

    The first touch of fresh memory takes longer than the copy of elements, and on a virtual machine many times as long.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self._pages = torch.empty(0, dtype=torch.uint8)

    def flats(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor | None]:
        """Return an uninitialised 1-D CPU tensor for each number of elements; None for 0. Those of the last call end here."""
        if self.is_kept:
            return [in_pages((numel,), dtype) if numel else None for numel, dtype in wanted]
        sizes = [-(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for numel, dtype in wanted]
        if sum(sizes) > len(self._pages):
            self._pages = torch.empty(0, dtype=torch.uint8)  # frees the former ones first
            self._pages = in_pages((sum(sizes),), torch.uint8)
        starts = itertools.accumulate(sizes, initial=0)
        return [
            self._pages[start : start + numel * dtype.itemsize].view(dtype) if numel else None
            for start, (numel, dtype) in zip(starts, wanted, strict=False)
        ]


class Slabs:
    """Memory for tensors that are made together and live equally long: tensors of medium size share huge pages.

    Each tensor has a storage of its own, which cannot be resized. A slab is freed with the last tensor in the slab.
    """

    def __init__(self) -> None:
        self._slab: mmap.mmap | None = None
        self._at = 0
        self._examples: dict[tuple[tuple[int, ...], torch.dtype, torch.device], torch.Tensor] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate as `empty` of this module does, from a slab where that is possible."""
        example = self.example(shape, dtype, device)
        if example is not None:
            return torch.empty_like(example)  # takes half as long
        numel = prod(shape)
        nbytes = numel * dtype.itemsize
        if device.type != "cpu" or not _IN_SLABS_FROM <= nbytes <= _SLAB_NBYTES // 2 or _madvise() is None:
            return empty(shape, dtype, device)
        if self._slab is None or self._at + nbytes > len(self._slab):
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared mapping gets no huge pages
            self._slab = mmap.mmap(-1, _SLAB_NBYTES, flags=private)
            with contextlib.suppress(OSError):  # the kernel may have no huge pages, and the advice is optional
                self._slab.madvise(mmap.MADV_HUGEPAGE)
            self._at = 0
        offset, self._at = self._at, -(-(self._at + nbytes) // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(self._slab, dtype=dtype, count=numel, offset=offset).view(shape)

    def example(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return a tensor from which `torch.empty_like` makes what `empty` does; None for one that may be in a slab."""
        key = shape, dtype, device
        known = self._examples.get(key)
        if known is None and prod(shape) * dtype.itemsize <= _SMALL_NBYTES:
            known = self._examples[key] = torch.empty(shape, dtype=dtype, device=device)
        return known


def _advise_huge_pages(address: int, nbytes: int) -> None:
    advise = _madvise()
    if advise is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, stop - start, mmap.MADV_HUGEPAGE)  # the result is ignored: the memory works without the advice


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
