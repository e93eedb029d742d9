"""Comparisons of values, and where their memory is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kit.compare import Differs, check_value

Full = dict[str, Any]


def check_keys(where: str, got: Mapping[Any, Any], want: Mapping[Any, Any]) -> None:
    lacks, extra = [k for k in want if k not in got], [k for k in got if k not in want]
    if lacks or extra:
        raise Differs(f"{where}: lacks {lacks}, has {extra} too many")


def check_close(where: str, got: Any, want: Any, rtol: float, atol: float) -> None:
    """As `check_value`, but floating tensors may differ by rounding."""
    if isinstance(want, Mapping) and isinstance(got, Mapping):
        check_keys(where, got, want)
        for key in want:
            check_close(f"{where}[{key!r}]", got[key], want[key], rtol, atol)
    elif isinstance(want, Tensor) and isinstance(got, Tensor) and want.is_floating_point():
        if got.dtype != want.dtype or got.shape != want.shape:
            raise Differs(f"{where}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}")
        if not torch.allclose(got, want, rtol=rtol, atol=atol):
            raise Differs(f"{where}: differs by up to {float((got - want).abs().max())}")
    else:
        check_value(where, got, want)


def tensors_in(value: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{where}[{i}]")


def check_own_memory(full: Full, *others: Any) -> None:
    """Every tensor is on the CPU and has a storage of just its own size, shared with nothing in `full` or `others`."""
    seen = {t.untyped_storage().data_ptr(): f"a live tensor {where}" for where, t in tensors_in(others)}
    for where, tensor in tensors_in(full):
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or tensor.requires_grad:
            raise Differs(f"{where}: on {tensor.device}, requires_grad {tensor.requires_grad}")
        if storage.nbytes() != tensor.numel() * tensor.element_size():
            raise Differs(f"{where}: {tensor.numel()} elements in a storage of {storage.nbytes()} bytes")
        if storage.nbytes() and storage.data_ptr() in seen:
            raise Differs(f"{where}: shares its storage with {seen[storage.data_ptr()]}")
        seen[storage.data_ptr()] = where


def storages(value: Any) -> set[int]:
    """Addresses of the memory of all tensors."""
    found = {tensor.untyped_storage().data_ptr() for _, tensor in tensors_in(value)}
    return found - {0}  # tensors without elements
