"""The checksums in files of `torch.save`: a zip archive has the CRC32 of each record, and `torch.load` does not look at them.

A record whose CRC32 is given as 0 has none: `torch.serialization.set_crc32_options(False)` and this library's own writers, whose
ranks write the elements in place, leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.foreign.archive.part_in_memory import PartInMemory, close_together, read_together
from fsdp_optim.foreign.archive.zip_records import ZIP, FilePart, Records
from fsdp_optim.foreign.reader import Archive, ForeignReader
from fsdp_optim.formats.base.checksums import hash_of
from fsdp_optim.storage.base import Opened

_SMALL = 64 << 10  # bytes of an archive


@dataclass
class RecordSums:
    """Compares the records of the archives of a checkpoint in several threads.

    Attributes:
        problems: a sentence for each damaged record.
        is_whole: whether every record had a CRC32.
    """

    reader: ForeignReader
    archives: Sequence[Archive]
    shown: Callable[[int], None] = lambda nbytes: None
    problems: list[str] = field(default_factory=list)
    is_whole: bool = True
    _num_done: int = 0
    # Of small archives that are equal, such as thousands of learning rates, one is checked, and of each length what surrounds
    # the elements of the last one is known.
    _small: set[int] = field(default_factory=set)
    _frames: dict[int, tuple[int, int, bytes, bytes]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(cls, reader: object) -> RecordSums | None:
        """Return the checksums of the files of a checkpoint that may be archives of `torch.save`; None for another format."""
        if not isinstance(reader, ForeignReader):
            return None
        if reader.archives is not None:
            return cls(reader, list(reader.archives()))
        return cls(reader, [Archive(name, 0, reader.opened.size_of(name)) for name in reader.all_files()])

    @property
    def nbytes(self) -> int:
        """The bytes of all archives."""
        return sum(archive.nbytes for archive in self.archives)

    def compare(self, num_threads: int, shown: Callable[[int], None]) -> list[str]:
        """Read all records of all archives, and return the problems. `shown` is called with the number of bytes so far."""
        self.is_whole, self.shown = bool(self.archives), shown
        left = close_together(self.archives)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="fsdp_optim: verify") as pool:
            for future in [pool.submit(self._run, left) for _ in range(num_threads)]:
                future.result()
        return self.problems

    def _run(self, left: Iterator[list[Archive]]) -> None:
        while True:
            with self._lock:
                batch = next(left, [])
            if not batch:
                return
            opened = self._read_together(batch)
            for archive in batch:
                problems, is_whole = self._look(archive, opened)
                with self._lock:
                    self.problems += problems
                    self.is_whole = self.is_whole and is_whole
                    self._num_done += archive.nbytes
                    self.shown(self._num_done)

    def _read_together(self, batch: Sequence[Archive]) -> Opened:
        """Return the file of archives that follow each other, with their bytes in memory if they are several."""
        opened = self.reader.opened
        if len(batch) == 1:
            return opened
        try:
            return PartInMemory(opened, batch[0].start, read_together(opened, batch))
        except CheckpointError:
            return opened  # each by itself, to say which of them cannot be read

    def _look(self, archive: Archive, opened: Opened) -> tuple[list[str], bool]:
        """Return the problems of one archive, and whether all of its records have a CRC32."""
        data = b""
        try:
            if archive.nbytes <= _SMALL:
                data = opened.read(archive.file, archive.start, archive.nbytes)
                if self._is_known(data):
                    return [], True
                if self._has_known_frames(data):
                    return [], False
                opened = PartInMemory(opened, archive.start, data)
            if opened.read(archive.file, archive.start, min(len(ZIP), archive.nbytes)) != ZIP:
                return [], False
            part = FilePart(opened, archive.file, archive.start, archive.nbytes)
            records = Records(opened, archive.file, archive.start, part)
        except CheckpointError as error:
            return [_with_name(str(error), archive)], False
        if records.stored_nbytes > archive.nbytes:
            text = (
                f"{records.where}: its records have {records.stored_nbytes} bytes in {archive.nbytes}: it was changed"
            )
            return [_with_name(text, archive)], False
        problems, without = self._compare(archive, records)
        if data and not problems and len(without) == 1:
            _, start, stop, _ = records.range_of(without[0])
            start, stop = start - archive.start, stop - archive.start
            self._frames[len(data)] = start, stop, data[:start], data[stop:]
        return problems, not without

    def _compare(self, archive: Archive, records: Records) -> tuple[list[str], list[str]]:
        """Return the problems of all records of an archive, and the records that have no CRC32."""
        problems, without = list[str](), list[str]()
        for record in records.infos:
            try:
                crcs = records.crcs(record)
            except CheckpointError as error:
                problems.append(_with_name(str(error), archive))
                continue
            if crcs is None:
                without.append(record)
            elif crcs[0] != crcs[1]:
                problems.append(self._in_words(archive, records, record, *crcs))
        return problems, without

    def _is_known(self, data: bytes) -> bool:
        hashed = hash_of(data)
        with self._lock:
            is_known = hashed in self._small
            self._small.add(hashed)
        return is_known

    def _has_known_frames(self, data: bytes) -> bool:
        """Return whether an archive differs from one that was checked only in the record that has no CRC32."""
        start, stop, before, after = self._frames.get(len(data), (0, 0, b"", b""))
        return stop > start and data[:start] == before and data[stop:] == after

    def _in_words(self, archive: Archive, records: Records, record: str, actual: int, saved: int) -> str:
        names = [archive.name] if archive.name else self.reader.tensors_in(*records.range_of(record))
        having = f", with {shortened(names)}," if names else ""
        return (
            f"{records.where}: the record {record}{having} is not what was saved: its CRC32 is {actual:08x}, not {saved:08x}: "
            "the file was damaged; load another checkpoint"
        )


def _with_name(text: str, archive: Archive) -> str:
    return f"{text} ({archive.name} is there, at byte {archive.start})" if archive.name else text
