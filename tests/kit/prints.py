"""The oracle of fingerprints: one byte and one element at a time, in integers of Python."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fsdp_optim import ValueFingerprint

ROW = 2048
MASK = (1 << 64) - 1


def mix(number: int, begin: int) -> int:
    """The number at a place of a sequence, unsigned."""
    mixed = ((number + 1) * 0x9E3779B97F4A7C15 + begin) & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return mixed ^ mixed >> 31


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


@functools.cache
def column(w: int, k: int) -> int:
    joins = [mix(w * 16 + n, 2 << 56) | 1 for n in range(16)]
    return sum(join * signed(mix(k * 16 + n, 1 << 56) >> 56) for n, join in enumerate(joins)) & MASK


def bits_of(data: bytes) -> int:
    """The 128 bits of the bytes of a whole value."""
    halves = [0, 0]
    for index, byte in enumerate(data):
        q, k = divmod(index, ROW)
        for w in range(2):
            halves[w] += (mix(2 * q + w, 4 << 56) | 1) * column(w, k) * signed(byte)
    return (halves[1] & MASK) << 64 | halves[0] & MASK


def bytes_of(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if value.numel() else b""


def sign(j: int, index: int) -> int:
    """The sign of an element in a projection."""
    row, place = divmod(index, 64)
    is_negative = (mix(j * 64 + place, 3 << 56) >> 63) ^ (mix(row, (5 << 56) + (j << 48)) >> 63)
    return -1 if is_negative else 1


def print_of(value: Tensor, projections: int = 0) -> ValueFingerprint:
    """The fingerprint of a whole value."""
    numbers: list[Any] = value.detach().cpu().reshape(-1).tolist() if value.dtype.itemsize else []
    finite = [number if abs(number) < math.inf else 0 for number in numbers]
    pairs = value.dtype.is_complex
    reals = [part for number in finite for part in ((number.real, number.imag) if pairs else (float(number),))]
    return ValueFingerprint(
        bits_of(bytes_of(value)),
        str(value.dtype).removeprefix("torch."),
        tuple(value.shape),
        math.sqrt(math.fsum(real * real for real in reals)),
        sum(not abs(number) < math.inf for number in numbers),
        tuple(math.fsum(sign(j, i) * real for i, real in enumerate(reals)) for j in range(projections)),
    )
