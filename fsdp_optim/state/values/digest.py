"""A digest of a large tensor, computed on the tensor's device, which is faster than a copy to the host."""

from __future__ import annotations

import torch
import xxhash

from fsdp_optim.memory import is_plain, pieces

_MOST_NUMEL = 1 << 20  # elements in one sum
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # itemsize -> integer dtype
_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


def is_folded(value: object) -> bool:
    """Return whether a value is a dense tensor on a device, where `fold_of` is cheaper than a digest on the host."""
    return (
        isinstance(value, torch.Tensor)
        and is_plain(value)
        and value.layout is torch.strided
        and value.device.type not in ("cpu", "meta")
    )


def fold_of(value: torch.Tensor) -> str:
    """Return a digest of the bits of a dense tensor, independent of the tensor's device.

    Each element is multiplied by an odd weight of its index, so a single different bit gives a different sum.
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
