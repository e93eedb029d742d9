"""Copies of large transposed tensors on the CPU, by torch's fast transpose of contiguous matrices.

torch copies other transposed memory element by element. Where rows are a multiple of a KiB apart, as they are in most models,
nearly every element then takes a cache line of its own.
"""

from __future__ import annotations

import itertools

import torch

_TURNED_FROM = 1 << 20  # bytes; less of a transposed tensor lies in the processor's cache anyway
_COLLIDING = 1 << 10  # bytes; rows that are a multiple of this apart compete for few places in the cache
_STRIP = 64  # rows: enough to use the cache lines of the source, few enough to stay in the cache


def copy_transposed(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy a large transposed tensor on the CPU, of one dtype; return False for any other, which torch copies as quickly."""
    is_turned = _is_turned(target, source)
    if is_turned:
        _copy_turned(target, source)
    return is_turned


def _is_turned(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether torch would copy element by element what is near in one tensor and far apart in the other, and slowly."""
    if target.nbytes < _TURNED_FROM or target.dtype is not source.dtype or not target.is_cpu or not source.is_cpu:
        return False
    outer, inner = _nearest(source), _nearest(target)
    far = (target.stride(outer) * target.itemsize, source.stride(inner) * source.itemsize)
    return outer != inner and any(step % _COLLIDING == 0 for step in far)


def _nearest(value: torch.Tensor) -> int:
    """Return the dimension whose indices are nearest to one another in memory."""
    steps = ((step, -dim) for dim, (step, size) in enumerate(zip(value.stride(), value.shape, strict=True)) if size > 1)
    return -min(steps)[1]


def _copy_turned(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy matrix by matrix: contiguous ones at once, of others some rows at a time."""
    outer, inner = _nearest(source), _nearest(target)
    targets, sources = (value.movedim((outer, inner), (-2, -1)) for value in (target, source))
    for index in itertools.product(*map(range, targets.shape[:-2])):
        rows, columns = targets[index], sources[index].t()
        if rows.is_contiguous() and columns.is_contiguous():
            rows.copy_(columns.t())
        else:
            _copy_in_strips(rows, columns)


def _copy_in_strips(rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Copy the transposed `columns` into `rows`: collected as they lie in the source, transposed, laid out in the target."""
    height, width = rows.shape
    collected, across = (torch.empty(min(_STRIP, height) * width, dtype=rows.dtype) for _ in range(2))
    for first in range(0, height, _STRIP):
        strip, source = rows[first : first + _STRIP], columns[:, first : first + _STRIP]
        turned = collected[: strip.numel()].view(source.shape).copy_(source).t()
        if strip.is_contiguous():
            strip.copy_(turned)
        else:
            strip.copy_(across[: strip.numel()].view(strip.shape).copy_(turned))
