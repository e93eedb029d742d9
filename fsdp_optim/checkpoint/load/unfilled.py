"""Buffers with persistent=False at a load of weights. No checkpoint has them, so after `to_empty()` they stay uninitialised."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch

from fsdp_optim.errors import WrapperError, counted_noun, shortened
from fsdp_optim.tensors.memory import flatten, is_plain
from fsdp_optim.view import Handle, NamedHandle

_NUM_WEIGHTS, _NUM_ELEMENTS = 8, 1024  # that are looked at: reads of device memory cost time

_FIX = (
    "compute them as the constructor of the model does, after to_empty() and in place (docs/interop.md, 'Models on the meta "
    "device', shows how)"
)

log = logging.getLogger("fsdp_optim")


def check_memory(unsaved: Mapping[str, torch.Tensor], rank: int) -> None:
    """Raise WrapperError for buffers with persistent=False that are on the meta device, so that no load can fill them."""
    on_meta = [fqn for fqn, buffer in unsaved.items() if buffer.is_meta]
    if on_meta:
        raise WrapperError(
            f"{shortened(on_meta)}: on rank {rank} {counted_noun(len(on_meta), 'buffer')} with persistent=False "
            f"{'is' if len(on_meta) == 1 else 'are'} on the meta device, and no checkpoint has them: give them memory, and "
            f"{_FIX}"
        )


def warn_of_unfilled(unsaved: Mapping[str, torch.Tensor], weights: Iterable[NamedHandle], rank: int) -> None:
    """Name the buffers with persistent=False that nothing has filled, as far as their values and the weights before a load show.

    A NaN in a buffer is a sign by itself. If most weights hold what fresh memory holds, the model was materialised empty, and so
    were the buffers that nothing has written to since they were allocated. A warning, because neither is a proof.
    """
    unsaved = {fqn: buffer for fqn, buffer in unsaved.items() if buffer.numel()}
    if not unsaved:
        return
    is_empty = _is_empty(weights)
    unfilled = [
        fqn for fqn, buffer in unsaved.items() if (is_empty and not _written(buffer)) or _sample(buffer).isnan().any()
    ]
    if unfilled:
        log.warning(
            "rank %d: nothing has filled %s with persistent=False, which no checkpoint has: %s: %s",
            rank,
            counted_noun(len(unfilled), "buffer"),
            shortened(unfilled),
            _FIX,
        )


def _is_empty(weights: Iterable[NamedHandle]) -> bool:
    """Return whether most matrices of a model hold zeros, NaN or subnormal numbers, which no initialization gives them."""
    handles = [named.handle for named in weights if _is_matrix(named.handle)]
    step = max(len(handles) // _NUM_WEIGHTS, 1)
    samples = [_sample(handle.weights()) for handle in handles[::step]]
    empty = [bool(sample.isnan().any() or _subnormal(sample).any()) or _has_no_number(sample) for sample in samples]
    return 2 * sum(empty) > len(empty)


def _is_matrix(handle: Handle) -> bool:
    is_2d = any(len(original.placement.shape) > 1 for original in handle.originals)
    return is_2d and handle.weights_dtype.is_floating_point and handle.local_numel > 1 and is_plain(handle.weights())


def _written(buffer: torch.Tensor) -> bool:
    """Return whether anything has written to a tensor in place since it was allocated."""
    return buffer.is_inference() or buffer._version > 0


def _sample(value: torch.Tensor) -> torch.Tensor:
    """Return some floating elements, on the host; no elements of another dtype or of a tensor subclass."""
    value = value.detach()
    if not is_plain(value) or value.layout != torch.strided or not (value.is_floating_point() or value.is_complex()):
        return torch.empty(0)
    if value.itemsize < 2:  # torch computes little with floats of less than 16 bits
        return torch.empty(0)
    while value.numel() > _NUM_ELEMENTS and value.dim() > 1 and not value.is_contiguous():
        value = value[0]  # flatten() would copy all of it
    first = flatten(value)[:_NUM_ELEMENTS].cpu()
    return torch.view_as_real(first).flatten() if first.is_complex() else first


def _subnormal(sample: torch.Tensor) -> torch.Tensor:
    if sample.dtype == torch.float16:  # its least normal number, 6e-5, is an ordinary weight
        return torch.zeros_like(sample, dtype=torch.bool)
    return (sample != 0) & (sample.abs() < torch.finfo(sample.dtype).tiny)


def _has_no_number(sample: torch.Tensor) -> bool:
    """Return whether all elements are zeros, or numbers so small that only uninitialised memory has them."""
    return bool(((sample == 0) | _subnormal(sample)).all()) and bool(sample.numel())
