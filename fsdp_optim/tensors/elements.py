"""Values whose elements cannot be copied: refused by name, before anything is done, with the fix.

A tensor may have no elements at all (a lazy module before its first forward pass, the meta device, FakeTensorMode), or elements
that no copy of bytes gives back (nested tensors, dtypes of less than a byte).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from typing import Any, TypeGuard

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from fsdp_optim.errors import FsdpOptimError, StateError

MOST_DEEP = 100
"""Levels of containers in a value; a reader needs some nested calls for each."""

_LAYOUTS = (torch.strided, torch.sparse_coo)
_FAKE = "torch._subclasses.fake_tensor"
_USUAL = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool})
_OF_LESS_THAN_A_BYTE = frozenset(f"torch.{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8))


def is_usual(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is an ordinary tensor, whose elements can be copied. Nearly all are, and need no further check."""
    return type(value) is torch.Tensor and _has_usual_elements(value)


def is_usual_weight(value: torch.Tensor) -> bool:
    """Return whether a parameter or buffer is an ordinary tensor or Parameter, whose elements can be copied."""
    return type(value) in (torch.nn.Parameter, torch.Tensor) and _has_usual_elements(value)


def _has_usual_elements(value: torch.Tensor) -> bool:
    return value.dtype in _USUAL and value.layout is torch.strided and not value.is_meta and not value.is_nested


def check_elements(where: str, value: Any, error: type[FsdpOptimError] = StateError) -> None:
    """Raise an error that names the part of a value which cannot be copied: a tensor, or containers that are too deep."""
    _check(where, value, error, 0)


def _check(where: str, value: Any, error: type[FsdpOptimError], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        why = why_without_elements(value)
        if why:
            raise error(f"{where} {why}")
    elif isinstance(value, (Mapping, list, tuple, Set)):
        if depth == MOST_DEEP:
            raise error(
                f"{_short(where)} is nested more than {MOST_DEEP} levels deep, or contains itself, which no reader accepts: "
                "save flatter values"
            )
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            if not is_usual(item) and isinstance(item, (torch.Tensor, Mapping, list, tuple, Set)):
                _check(f"{where}[{key!r}]" if depth < 10 else where, item, error, depth + 1)


def why_without_elements(value: torch.Tensor) -> str:
    """Return why the elements of a tensor cannot be copied, and the fix; "" where they can."""
    if hasattr(value, "local_shards"):
        return ""  # a ShardedTensor knows few operations by itself
    if is_lazy(value):
        return "has no shape before the first forward pass of its lazy module: run the model once, then build the optimizer"
    if is_fake(value):
        return "is a fake tensor, which has no elements: make the call outside of FakeTensorMode, with real tensors"
    if value.is_meta:
        return "is on the meta device and has no elements: give it memory (to_empty) and values first"
    if value.is_nested:
        return (
            "is a nested tensor, whose parts differ in shape: give the tensors of its unbind(), or to_padded_tensor()"
        )
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        with torch.no_grad():
            local = value.to_local() if hasattr(value, "to_local") else None  # of a DTensor
        if type(local) is torch.Tensor and local.dtype is not value.dtype:
            return (
                f"is a DTensor of {value.dtype} with a local tensor of {local.dtype}, as torch leaves one whose .data was "
                "assigned in another dtype: give it back its own (x.data = x.detach()), then convert it by module.to(dtype), or "
                "put x.to(dtype) in its place"
            )
        return ""  # the adapters know how to read other classes
    if value.layout not in _LAYOUTS:
        return f"is in the layout {value.layout}, which torch cannot copy as it is: give its to_dense()"
    if str(value.dtype) in _OF_LESS_THAN_A_BYTE or str(value.dtype).startswith("torch.bits"):
        return f"is of {value.dtype}, which torch cannot copy: give its view(torch.uint8)"
    if not value.dim() and value.dtype is getattr(torch, "float4_e2m1fn_x2", None):
        return f"is of {value.dtype} and has no dimensions, which torch cannot read: give its reshape(1)"
    return ""


def check_weight(where: str, value: torch.Tensor, error: type[FsdpOptimError]) -> None:
    """Check a parameter or buffer as `check_elements` does; refuse sparse and quantised tensors too, which cannot be cut."""
    check_elements(where, value, error)
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided:
            raise error(f"{where} is a sparse tensor ({value.layout}), which cannot be cut: register its to_dense()")
        if value.is_quantized:
            raise error(
                f"{where} is a quantised tensor, which cannot be cut: register its int_repr(), or its dequantize()"
            )


def shares_elements(tensor: torch.Tensor) -> bool:
    """Return whether elements of a strided tensor are in one place in memory, as in one of expand()."""
    steps = tensor.stride()
    return 0 in steps and any(num > 1 and not step for num, step in zip(tensor.shape, steps, strict=True))


def is_lazy(value: object) -> bool:
    """Return whether a value is a parameter or buffer that has no shape yet."""
    return isinstance(value, UninitializedTensorMixin)


def is_on_meta(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory. A ShardedTensor has some, and knows few operations."""
    return not hasattr(tensor, "local_shards") and tensor.is_meta


def is_fake(value: object) -> bool:
    """Return whether a value is a tensor of FakeTensorMode, without importing that."""
    module = sys.modules.get(_FAKE)
    return module is not None and isinstance(value, module.FakeTensor)


def check_no_fake_mode() -> None:
    """Refuse a call inside FakeTensorMode, in which no tensor that is made has elements."""
    if _FAKE in sys.modules and is_fake(torch.empty(0)):
        raise StateError(
            "FakeTensorMode is active, in which no tensor has elements: make the call outside of the mode, with real tensors"
        )


def _short(where: str) -> str:
    return where if len(where) <= 200 else f"{where[:200]}..."
