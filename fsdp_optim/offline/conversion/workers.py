"""The worker threads of one rank in a conversion. Each copies units until the share of the rank is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy
import torch

from fsdp_optim.checkpoint.common.files import File
from fsdp_optim.errors import CheckpointError, ReplacedError
from fsdp_optim.formats.base.checksums import Rows, rows_of
from fsdp_optim.offline.conversion.copy_ranges import Copier, CopyRange
from fsdp_optim.offline.conversion.unit_sources import UnitSource
from fsdp_optim.storage.base import StoreWriter
from fsdp_optim.tensors.memory import Budget

_UNIT_NBYTES, _MOST_WORKERS = 8 << 20, 16
_USES = 4  # of a worker's memory, at most a unit each: a unit, the bytes around it that are read or kept by the store


def unit_nbytes_in(budget: Budget, num_extra: int = 0) -> int:
    """Return the length of units, so that at least two worker threads fit into a budget.

    `num_extra`: as `UnitSource.num_extra_units`.
    """
    worker = budget.share(2, "two worker threads")
    uses = _USES + num_extra
    return min(
        _UNIT_NBYTES, worker.share(uses, "a unit, and bytes around it that are read or kept by the store").nbytes
    )


def num_threads_in(budget: Budget, unit_nbytes: int, source: UnitSource) -> int:
    """Return the number of worker threads that fit into a budget: at most one per core; more if they wait for a remote store."""
    wanted = _MOST_WORKERS if source.is_remote else torch.get_num_threads()
    uses = _USES + source.num_extra_units
    return max(min(wanted, _MOST_WORKERS, budget.num_fitting(uses * unit_nbytes)), 1)


@dataclass
class RankWork:
    """The units of one rank, and the progress of their copies.

    Attributes:
        source: where the elements come from.
        files: all new files.
        join: gives a worker thread its access to the new files.
        unit_nbytes: the length of the longest unit.
        shown: called with the number of bytes that are done.
        failed: takes the error of a unit that cannot be read, and the other units continue; None: the error ends all threads.
    """

    source: UnitSource
    files: Sequence[File]
    units: Sequence[CopyRange]
    join: Callable[[], StoreWriter]
    unit_nbytes: int
    shown: Callable[[int], None] = lambda nbytes: None
    failed: Callable[[CheckpointError], None] | None = None
    nbytes_done: int = 0
    receipts: list[bytes] = field(default_factory=list)
    _rows: dict[str, list[Rows]] = field(default_factory=dict)
    _left: list[deque[CopyRange]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def rows(self) -> dict[str, Rows]:
        """The segments of this rank, by file."""
        return {file.name: numpy.concatenate([rows_of(()), *self._rows.get(file.name, ())]) for file in self.files}

    def run(self, first: StoreWriter, num_workers: int) -> None:
        """Copy all units. `first`: the access of the first thread to the new files. Raises the first error of a thread."""
        writers = [first]
        try:
            writers += [self.join() for _ in range(min(num_workers, len(self.units)) - 1)]
            num, of_all = len(self.units), len(writers)
            for worker in range(of_all):  # far from each other, because writes to one file wait for each other
                self._left.append(deque(self.units[num * worker // of_all : num * (worker + 1) // of_all]))
            if of_all == 1:
                self._work(first, 0)
            else:
                with ThreadPoolExecutor(of_all, thread_name_prefix="fsdp_optim: convert") as pool:
                    workers = [pool.submit(self._work, writer, number) for number, writer in enumerate(writers)]
                    try:
                        for done in workers:
                            done.result()
                    except BaseException:
                        self._stopped.set()
                        raise
            self.receipts = [writer.finish() for writer in writers]
        finally:
            for writer in writers:
                writer.discard()

    def _next(self, worker: int) -> CopyRange | None:
        """Return the next unit of a worker: from its own queue, in order; else the last unit of the longest queue."""
        with self._lock:
            if self._left[worker]:
                return self._left[worker].popleft()
            longest = max(self._left, key=len)
            return longest.pop() if longest else None

    def _work(self, writer: StoreWriter, number: int) -> None:
        try:
            copier = Copier(self.source.filler(self.unit_nbytes), writer, self.unit_nbytes)
            while not self._stopped.is_set():
                unit = self._next(number)
                if unit is None:
                    return
                try:
                    rows = copier.copy(unit)
                except CheckpointError as error:
                    if self.failed is None or isinstance(error, ReplacedError):
                        raise
                    self.failed(error)
                else:
                    self._done(unit, rows)
        except BaseException:
            self._stopped.set()
            raise

    def _done(self, unit: CopyRange, rows: Rows) -> None:
        with self._lock:
            self._rows.setdefault(unit.file.name, []).append(rows)
            self.nbytes_done += unit.nbytes
            self.shown(self.nbytes_done)
