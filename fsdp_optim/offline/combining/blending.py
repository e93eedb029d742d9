"""The elements of an average: those of several checkpoints, added in float64 and rounded once.

    source 0   read -> scratch 0 \
    source 1   read -> scratch 1  > windows: sum of weight * element in float64 -> / sum of weights -> rounded -> the unit
    the last   read -> the unit  /

A window is small, so that its sum stays in the cache of a core. Elements that are not averaged stay those of the last source,
and the others are compared with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_optim.move import Key
from fsdp_optim.offline.conversion.unit_sources import MARGIN, CheckpointSource, Fill, UnitPart, UnitSource
from fsdp_optim.tensors.allocation import empty
from fsdp_optim.tensors.memory import dtype_named

_WINDOW = 1 << 14  # elements; torch takes one thread for so few
_CPU = torch.device("cpu")
_MANTISSA_NBITS = 52  # of float64

_KEPT_NBITS = {torch.bfloat16: 10, torch.float16: 13, torch.float8_e4m3fn: 6, torch.float8_e5m2: 5}
"""By dtype to which torch rounds a float64 in two steps: its bits after the first one, and three more."""

_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}

_AVERAGED = (torch.float64, torch.float32, *_KEPT_NBITS, *_REAL_OF)


def is_averaged(dtype: torch.dtype) -> bool:
    """Return whether elements of a dtype are averaged: floating-point and complex numbers that take a byte or more each."""
    return dtype in _AVERAGED


@dataclass(frozen=True)
class BlendSource(UnitSource):
    """The average of several checkpoints as a source of elements.

    Attributes:
        sources: the checkpoints; the keys of all are those of the last one. What one of them lacks is not compared.
        weights: the weight of each.
        averaged: the keys of the values that are averaged.
        differing: the keys of other values in which the checkpoints were seen to differ; grows with each unit.
    """

    sources: tuple[CheckpointSource, ...]
    weights: tuple[float, ...]
    averaged: frozenset[Key]
    differing: set[Key] = field(default_factory=set, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def is_remote(self) -> bool:
        return any(source.is_remote for source in self.sources)

    @property
    def num_extra_units(self) -> int:
        return sum(self._most_ratio(source) for source in self.sources[:-1])

    def _most_ratio(self, source: CheckpointSource) -> int:
        """How many bytes of a source a byte of the last one may stand for."""
        last = self.sources[-1].stored
        pairs = ((tensor.itemsize, last[key].itemsize) for key, tensor in source.stored.items() if key in last)
        return max((-(-size // of_last) for size, of_last in pairs), default=1)

    def check_unchanged(self) -> None:
        for source in self.sources:
            source.check_unchanged()

    def filler(self, unit_nbytes: int) -> Fill:
        fill_last = self.sources[-1].filler(unit_nbytes)
        scratches = [_Scratch(source, unit_nbytes * self._most_ratio(source)) for source in self.sources[:-1]]
        sums = _Sums(self.weights)

        def fill(parts: Sequence[UnitPart]) -> None:
            fill_last(parts)
            others = [scratch.read(parts) for scratch in scratches]
            for part in parts:
                key, flats = part.value.key, [other[part.value.key] for other in others if part.value.key in other]
                if key in self.averaged:
                    sums.average([*flats, part.flat], part.flat)
                elif not all(_are_same(flat, part.flat) for flat in flats):
                    with self._lock:
                        self.differing.add(key)

        return fill


def _are_same(flat: torch.Tensor, of_last: torch.Tensor) -> bool:
    """Return whether two flat tensors are equal, bit for bit."""
    return flat.dtype == of_last.dtype and torch.equal(flat.view(torch.uint8), of_last.view(torch.uint8))


class _Scratch:
    """The memory of one worker thread for the elements of one source."""

    def __init__(self, source: CheckpointSource, most_nbytes: int) -> None:
        self._stored, self._fill = source.stored, source.filler(most_nbytes)
        self._memory = empty((most_nbytes + 2 * MARGIN,), torch.uint8, _CPU)

    def read(self, parts: Sequence[UnitPart]) -> Mapping[Key, torch.Tensor]:
        """Return the elements of all parts that the source has."""
        known = [part for part in parts if part.value.key in self._stored]
        nbytes = sum(self._nbytes_of(part) for part in known)
        if nbytes > self._memory.numel():  # many small tensors: each begins at a multiple of the margin
            self._memory = empty((nbytes,), torch.uint8, _CPU)
        placed = list(self._placed(known))
        self._fill(placed)
        return {part.value.key: part.flat for part in placed}

    def _placed(self, parts: Sequence[UnitPart]) -> Iterator[UnitPart]:
        start = 0
        for part in parts:
            stored, num = self._stored[part.value.key], part.flat.numel()
            memory = self._memory[start : start + num * stored.itemsize]
            yield UnitPart(part.value, part.first, memory.view(dtype_named(stored.dtype)))
            start += self._nbytes_of(part)

    def _nbytes_of(self, part: UnitPart) -> int:
        nbytes = part.flat.numel() * self._stored[part.value.key].itemsize
        return -(-nbytes // MARGIN) * MARGIN


class _Sums:
    """The windows of one worker thread, and the arithmetic in them."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights, self._total = weights, sum(weights)
        self._sum, self._term = (torch.empty(_WINDOW, dtype=torch.float64, device=_CPU) for _ in range(2))
        self._sticky = torch.empty(_WINDOW, dtype=torch.int64, device=_CPU)

    def average(self, flats: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Fill `target` with the average of flat tensors; `target` may be one of them."""
        reals, target = [_as_real(flat) for flat in flats], _as_real(target)
        for start in range(0, target.numel(), _WINDOW):
            stop = min(start + _WINDOW, target.numel())
            added = self._sum[: stop - start]
            term = self._term[: stop - start]
            for index, (real, weight) in enumerate(zip(reals, self._weights, strict=True)):
                into = term if index else added
                into.copy_(real[start:stop])
                if weight != 1.0:
                    into.mul_(weight)
                if index:
                    added.add_(term)
            if self._total != 1.0:
                added.div_(self._total)
            self._round(added, target[start:stop])

    def _round(self, added: torch.Tensor, target: torch.Tensor) -> None:
        """Round a window to the nearest elements of the target's dtype, once; of two equally near ones to the even one.

        torch rounds a float64 to float32 and then to a shorter dtype, which may be off by one. So the bits that the shorter
        dtype cannot have are replaced by one bit that says whether any of them was set: then the first step is exact.
        """
        kept = _KEPT_NBITS.get(target.dtype)
        if kept is not None:
            mask = (1 << (_MANTISSA_NBITS - kept)) - 1
            bits, sticky = added.view(torch.int64), self._sticky[: added.numel()]
            torch.bitwise_and(bits, mask, out=sticky)
            sticky.add_(mask)
            bits.bitwise_or_(sticky).bitwise_and_(~mask)
        target.copy_(added)


def _as_real(flat: torch.Tensor) -> torch.Tensor:
    """Return the same memory as real numbers."""
    real = _REAL_OF.get(flat.dtype)
    return flat if real is None else flat.view(real)
