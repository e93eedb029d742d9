"""A digest of a large tensor that is taken where the tensor lies: on a device that is faster than bringing it to the host."""

from __future__ import annotations

import torch
import xxhash

from fsdp_optim.memory import is_plain, pieces

_MOST_NUMEL = 1 << 20  # elements that are folded together
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by the bytes of an element
_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


def is_folded(value: object) -> bool:
    """Whether it is a dense tensor on a device: to fold it there is cheaper than to digest its bytes on the host."""
    return (
        isinstance(value, torch.Tensor)
        and is_plain(value)
        and value.layout is torch.strided
        and value.device.type not in ("cpu", "meta")
    )


def fold_of(value: torch.Tensor) -> str:
    """Stands for the bits of a dense tensor: equal on all ranks that have the same, wherever the tensor lies.

    Each element counts by an odd number of its place, so that one other bit anywhere gives another sum.
    """
    weights = _weights(min(value.numel(), _MOST_NUMEL) * max(value.itemsize // 8, 1), value.device)
    sums = []
    for _, flat in pieces(value, _MOST_NUMEL):
        for start in range(0, len(flat), _MOST_NUMEL):
            words = flat[start : start + _MOST_NUMEL].view(_WORDS[value.itemsize]).to(torch.int64)
            sums.append((words * weights[: len(words)]).sum())
    digest = xxhash.xxh3_128(f"{value.dtype} {list(value.shape)}".encode())
    if sums:
        digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.hexdigest()


def _weights(num: int, device: torch.device) -> torch.Tensor:
    mixed = torch.arange(1, num + 1, dtype=torch.int64, device=device) * _FIRST
    return (((mixed >> 29) ^ mixed) * _SECOND) | 1
