"""Fingerprints in checkpoints without ranks: compared with the bytes of the files, and with those of another checkpoint."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_optim.checkpoint.common.files import File
from fsdp_optim.checkpoint.common.printing import prints_by_key
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.offline.values.diff_names import ValuePair
from fsdp_optim.plan import Copy
from fsdp_optim.prints import LocalSums, RowsOfValues, RowSums
from fsdp_optim.results.differences import ValueDiff
from fsdp_optim.results.fingerprints import Fingerprint, ValueFingerprint
from fsdp_optim.storage.base import StoreWriter
from fsdp_optim.tensors.memory import dtype_name

_HALVES = {"model": "weights", "optim": "optim", "state": "state"}
_SCRATCH_NBYTES = 1 << 20
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class FilePrints:
    """The fingerprints of the tensors in files, made of the bytes that pass by.

    Attributes:
        files: one file for each half, with all of its tensors.
        saved: the fingerprint in the checkpoint; None: there is none, and nothing is computed.
    """

    files: Sequence[File]
    saved: Fingerprint | None
    _made: list[_Passing] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def writer(self) -> StoreWriter:
        """Return a place for the bytes of one thread, which keeps nothing but sums."""
        passing = _Passing(self.files if self.saved is not None else ())
        with self._lock:
            self._made.append(passing)
        return passing

    def compare(self) -> tuple[int, list[str]]:
        """Return how many tensors have the fingerprints that were saved, and a text for each of the others."""
        if self.saved is None:
            return 0, []
        expected = prints_by_key(self.saved)
        places = [(file.name, value) for file in self.files for value in file.values]
        total = LocalSums.zeros(len(places), 0)
        for passing in self._made:
            total += passing.sums()
        wrong, num = [], 0
        for index, (name, value) in enumerate(places):
            want = expected.get((_HALVES[name], value.stored_name))
            if want is None:
                continue
            is_same = (want.dtype, want.shape) == (dtype_name(value.dtype), tuple(value.placement.shape))
            if is_same and total.bits_of(index) == want.bits:
                num += 1
            else:
                wrong.append(
                    f"{value.stored_name}: its elements are not those of which the save has made the fingerprint"
                )
        return num, wrong


class _Passing(StoreWriter):
    """A place for new files that keeps nothing but the sums over their bytes. One thread writes to it."""

    def __init__(self, files: Sequence[File]) -> None:
        num = sum(len(file.values) for file in files)
        self._sums = RowSums(num, _CPU) if num else None
        self._rows = RowsOfValues(self._sums, _CPU, _SCRATCH_NBYTES) if self._sums is not None else None
        self._starts: dict[str, tuple[int, Sequence[int], Sequence[int]]] = {}
        first = 0
        for file in files:
            self._starts[file.name] = first, file.plan.starts, [value.nbytes for value in file.values]
            first += len(file.values)

    def create(self, name: str, nbytes: int, head: bytes) -> None:
        pass

    def write(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        if self._rows is None or name not in self._starts:
            return
        first, starts, sizes = self._starts[name]
        for piece in pieces:
            stop = offset + len(piece)
            index = max(bisect.bisect_right(starts, offset) - 1, 0)
            while index < len(starts) and starts[index] < stop:
                begin, end = max(offset, starts[index]), min(stop, starts[index] + sizes[index])
                if begin < end:
                    data = torch.frombuffer(piece, dtype=torch.uint8, count=end - begin, offset=begin - offset)
                    copy = Copy(0, 0, (end - begin,), 0, (1,), begin - starts[index], (1,))
                    self._rows.add([copy], data, first + index)
                index += 1
            offset = stop

    def put(self, name: str, data: bytes) -> None:
        pass

    def finish(self) -> bytes:
        return b""

    def discard(self) -> None:
        pass

    def sums(self) -> LocalSums:
        """Return the sums over all bytes."""
        if self._sums is None or self._rows is None:
            return LocalSums.zeros(0, 0)
        self._rows.flush()
        return self._sums.local()


def equal_by_prints(a: CheckpointIndex, b: CheckpointIndex, pairs: Sequence[ValuePair]) -> Mapping[str, ValueDiff]:
    """Return the result for each pair of values whose fingerprints are equal, by name: their elements need not be read.

    Values with elements that are not finite are read, because a fingerprint does not say how many of them are NaN.
    """
    sides = [(index, prints_by_key(index.fingerprint)) for index in (a, b) if index.fingerprint is not None]
    equal: dict[str, ValueDiff] = {}
    for pair in pairs if len(sides) == len((a, b)) else ():
        first, second = (_print_of(*side, value.stored) for side, value in zip(sides, pair.sides, strict=True))
        if first is not None and first == second and not first.num_nonfinite:
            equal[pair.name] = ValueDiff(
                pair.name,
                pair.a.info,
                pair.b.info,
                num_differing=0,
                max_abs=0.0,
                norm=first.norm,
                norm_of_difference=0.0,
            )
    return equal


def _print_of(
    index: CheckpointIndex, prints: Mapping[tuple[str, str], ValueFingerprint], stored: StoredTensor | None
) -> ValueFingerprint | None:
    """Return the fingerprint of a stored tensor; None if there is none."""
    if stored is None:
        return None
    return next(
        (prints.get((half, stored.key)) for half, tensors in _halves_of(index) if tensors.get(stored.key) == stored),
        None,
    )


def _halves_of(index: CheckpointIndex) -> Iterator[tuple[str, Mapping[str, StoredTensor]]]:
    yield from (("weights", index.weights), ("optim", index.optim_tensors), ("state", index.trees))
