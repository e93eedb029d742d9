"""Copy: a checkpoint of this library to another place byte for byte, verified meanwhile, in bounded memory and several threads.

The copy is written aside and committed like a save: it is complete or absent, and the next save beside it removes what a killed
copy has left.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fsdp_optim.arguments import check_at_least
from fsdp_optim.checkpoint.common.progress import Progress
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, options_of, path_of, store_at
from fsdp_optim.errors import CheckpointError, shortened, wrong_use
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.formats.own.manifest import MOST_NBYTES, NAME
from fsdp_optim.formats.own.reader import Checkpoint
from fsdp_optim.offline.conversion.workers import unit_nbytes_in
from fsdp_optim.offline.keeping.copied_files import (
    CopiedFile,
    CopiedUnit,
    files_beside,
    large_files,
    opened_source,
    small_files,
)
from fsdp_optim.options import LEAST_CONVERT_NBYTES
from fsdp_optim.results.offline import CopyResult
from fsdp_optim.storage.base import Opened, Staging, Store, StoreWriter
from fsdp_optim.tensors.memory import Budget

_MOST_THREADS = 8
_USES = 2  # of a thread's memory: a unit, and its bytes that the store keeps

log = logging.getLogger("fsdp_optim")


def copy(
    source: Place,
    target: Place,
    *,
    overwrite: bool,
    durable: bool,
    bucket_nbytes: int,
    progress: bool | None,
    storage_options: StorageOptions,
) -> CopyResult:
    """Copy a checkpoint, and verify it meanwhile."""
    check_at_least("bucket_nbytes", bucket_nbytes, LEAST_CONVERT_NBYTES, " bytes (16 MiB)", CheckpointError)
    store = store_at(source, OURS, options_of(source, storage_options))
    target_store = store_at(target, OURS, options_of(target, storage_options))
    budget = Budget(bucket_nbytes, "bytes of a checkpoint that is copied")
    with store.open() as opened, store.open_any() as beside:
        checkpoint = opened_source(opened)
        manifest = opened.read_whole(NAME, most_nbytes=MOST_NBYTES)
        with _staged(target_store, overwrite=overwrite, durable=durable) as staging:
            work = _Copy(
                checkpoint,
                beside,
                target_store,
                staging,
                budget,
                durable or staging.replaces,
                in_folder=store.on_file_system,
            )
            copied = work.run(progress)
            checkpoint.check_unchanged()
            staging.commit(NAME, manifest, durable=work.durable)
    return CopyResult(
        path=path_of(target_store),
        num_files=copied.num_files + 1,
        nbytes=copied.nbytes + len(manifest),
        has_checksums=checkpoint.index.facts.has_checksums,
        left_out=copied.left_out,
    )


@contextmanager
def _staged(store: Store, *, overwrite: bool, durable: bool) -> Iterator[Staging]:
    """Begin to write in a place, and remove what was written if the block fails."""
    staging = store.begin(overwrite=overwrite, durable=durable)
    try:
        if staging.inner_folder:
            raise wrong_use(
                f"{store.where}: has objects, and a copy, byte for byte, needs a place without any: copy to another place, or "
                "remove the objects first"
            )
        yield staging
    except BaseException:
        staging.abandon()
        raise


@dataclass(frozen=True)
class _Copied:
    num_files: int
    nbytes: int
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Copy:
    """A copy under way. `beside`: the source, with the files that no save has written. `in_folder`: whether it is a folder."""

    checkpoint: Checkpoint
    beside: Opened
    store: Store
    staging: Staging
    budget: Budget
    durable: bool
    in_folder: bool

    def run(self, progress: bool | None) -> _Copied:
        """Copy everything but the manifest."""
        files = list(large_files(self.checkpoint, self.unit_nbytes))
        strangers, left_out = files_beside(self.beside, self.checkpoint, in_folder=self.in_folder)
        if left_out:
            log.warning("%s: not copied, because no checkpoint has such names: %s", self.where, shortened(left_out))
        shared = self.staging.capabilities.writes_ranges in ("anywhere", "on one machine")
        units = [unit for file in files for unit in file.units]
        total = sum(unit.stop - unit.start for unit in units)
        first, num_small, nbytes = self._join(), 0, sum(file.nbytes for file in files)
        with Progress(progress, "copying", total, shown=True) as bar:
            try:
                for name, data in small_files(self.checkpoint):
                    first.put(name, data)
                    num_small, nbytes = num_small + 1, nbytes + len(data)
                for name in strangers:
                    nbytes += self._copy_stranger(first, name)
                self._create(first, files, shared=shared)
                receipts = self._copy_units(first, units, bar.up_to, num_threads=self._num_threads if shared else 1)
            finally:
                first.discard()
            self.staging.seal([file.name for file in files], receipts, durable=self.durable)
            bar.done()
        return _Copied(len(files) + num_small + len(strangers), nbytes, tuple(left_out))

    @property
    def where(self) -> str:
        return self.checkpoint.where

    @property
    def unit_nbytes(self) -> int:
        return unit_nbytes_in(self.budget)

    @property
    def _num_threads(self) -> int:
        fitting = self.budget.num_fitting(_USES * self.unit_nbytes)
        return max(min(torch.get_num_threads(), _MOST_THREADS, fitting), 1)

    def _join(self) -> StoreWriter:
        budget = self.budget.share(_USES, "units, and their bytes that the store keeps")
        return self.store.join(self.staging.address, durable=self.durable, who="the copy", budget_nbytes=budget.nbytes)

    def _create(self, first: StoreWriter, files: Sequence[CopiedFile], *, shared: bool) -> None:
        for file in files:
            make = self.staging.create if shared else first.create
            make(file.name, file.nbytes, file.head)

    def _copy_stranger(self, writer: StoreWriter, name: str) -> int:
        """Copy a file that no save has written; return its size."""
        size = self.beside.size_of(name)
        writer.create(name, size, self.beside.read(name, 0, min(size, self.unit_nbytes)))
        for start in range(self.unit_nbytes, size, self.unit_nbytes):
            data = self.beside.read(name, start, min(self.unit_nbytes, size - start))
            writer.write(name, [memoryview(data)], start)
        return size

    def _copy_units(
        self, first: StoreWriter, units: Sequence[CopiedUnit], shown: Callable[[int], None], *, num_threads: int
    ) -> list[bytes]:
        """Copy units, each thread its own range of them; return the receipts of all writers."""
        num, done = min(num_threads, max(len(units), 1)), _Done(shown)
        writers = [first, *(self._join() for _ in range(num - 1))]
        parts = [units[len(units) * number // num : len(units) * (number + 1) // num] for number in range(num)]
        try:
            with ThreadPoolExecutor(num, thread_name_prefix="fsdp_optim: copy") as pool:
                futures = [pool.submit(self._run_thread, *pair, done) for pair in zip(writers, parts, strict=True)]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    done.stopped.set()
                    raise
            return [writer.finish() for writer in writers]
        finally:
            for writer in writers[1:]:
                writer.discard()

    def _run_thread(self, writer: StoreWriter, units: Sequence[CopiedUnit], done: _Done) -> None:
        buffer = memoryview(bytearray(max((unit.stop - unit.start for unit in units), default=0)))
        for unit in units:
            if done.stopped.is_set():
                return
            data = buffer[: unit.stop - unit.start]
            self.checkpoint.opened.read_into(unit.name, [data], unit.start)
            unit.check(self.where, data)
            writer.write(unit.name, [data], unit.start)
            done.add(len(data))


class _Done:
    """The bytes that all threads have copied. `stopped`: set when a thread has failed, so that the others end."""

    def __init__(self, shown: Callable[[int], None]) -> None:
        self.stopped = threading.Event()
        self._shown, self._nbytes, self._lock = shown, 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes, and show them."""
        with self._lock:
            self._nbytes += nbytes
            self._shown(self._nbytes)
