"""Zip archives inside a file, or inside a part of a file: where the bytes of each record are, by few reads."""

from __future__ import annotations

import io
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.reader import Source
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.allocation import in_pages

ZIP = b"PK\3\4"
"""The first bytes of an archive."""

_BLOCK_NBYTES = 64 << 10  # read at once: the end of an archive, and its first records
_HEADER_NBYTES = 30  # of a local header, before the name and the extra field
_ALIGNMENT = 64  # bytes, at which torch lets the bytes of a record begin
_PADDING_NBYTES = 4  # of the extra field by which torch pads, before its zeros
_LARGE = 0xFFFFFFFF  # bytes; sizes and positions from here on need 8 bytes
_HAS_DESCRIPTOR = 8  # a bit of a record's flags
_IS_UTF_8 = 0x800
_PIECE_NBYTES = 1 << 20  # read at once, where a record is compared with its checksum
_FEW_NBYTES = 1 << 20  # that any record may have when it is no longer compressed
_MOST_RATIO_OF_PICKLES = 64  # pickles of large models reach 20
_MOST_RATIO = 1100  # of compression; deflate reaches 1032


class FilePart(io.RawIOBase):
    """A part of a file as a file object, with a cache of its first block, its last one, and the one that was read last."""

    def __init__(self, opened: Opened, name: str, start: int, nbytes: int) -> None:
        super().__init__()
        self._opened, self._name, self._start, self.nbytes = opened, name, start, nbytes
        self._position = 0
        self._blocks: list[tuple[int, bytes]] = []

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        if base + offset < 0:
            raise ValueError("a position before the beginning of the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer).cast("B")
        nbytes = max(min(len(memory), self.nbytes - self._position), 0)
        memory[:nbytes] = self.at(self._position, nbytes)
        self._position += nbytes
        return nbytes

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes: fewer than `size` only at the end, however large the number in a damaged file is."""
        most = max(self.nbytes - self._position, 0)
        data = self.at(self._position, most if size is None or size < 0 else min(size, most))
        self._position += len(data)
        return data

    def at(self, start: int, nbytes: int) -> bytes:
        """`nbytes` bytes from byte `start` of the part on."""
        for first, block in self._blocks:
            if first <= start and start + nbytes <= first + len(block):
                return block[start - first : start - first + nbytes]
        if nbytes >= _BLOCK_NBYTES:
            return self._opened.read(self._name, self._start + start, nbytes)
        first = min(start, max(self.nbytes - _BLOCK_NBYTES, 0))
        block = self._opened.read(self._name, self._start + first, min(_BLOCK_NBYTES, self.nbytes - first))
        self._blocks = [entry for entry in self._blocks if entry[0] == 0 or self._is_last(*entry)]
        self._blocks.append((first, block))
        return block[start - first : start - first + nbytes]

    def _is_last(self, first: int, block: bytes) -> bool:
        return first + len(block) == self.nbytes


class Records:
    """The records of a zip archive in a part of a file. Raises CheckpointError that names the file for all that is damaged."""

    def __init__(self, opened: Opened, name: str, start: int, part: FilePart) -> None:
        self._opened, self._name, self._start, self._part = opened, name, start, part
        self.where = opened.named(name)
        with _trusting_nothing(self.where):
            self._zip = zipfile.ZipFile(part)
            infos = self._zip.infolist()
            self.infos = {info.filename: info for info in infos}
            if len(self.infos) != len(infos):
                raise ValueError("two records have the same name")
            self._borders = sorted({*(info.header_offset for info in infos), self._zip.start_dir})

    def read(self, record: str, most_nbytes: int) -> bytes:
        """Return the bytes of a small record."""
        info = self._info(record)
        if info.file_size > most_nbytes:
            raise CheckpointError(
                f"{self.where}: the record {record} has {info.file_size} bytes, and at most {most_nbytes} are allowed"
            )
        if info.compress_type == zipfile.ZIP_STORED and not info.CRC:  # which zipfile would take for damage
            place = self.source(record)
            return self._opened.read(self._name, place.first_byte, info.file_size)
        if info.compress_type != zipfile.ZIP_STORED:
            self._check_inflated(
                info, info.compress_size * _MOST_RATIO_OF_PICKLES, f"its {info.compress_size} compressed bytes"
            )
        with _trusting_nothing(f"{self.where}: the record {record}"):
            return self._zip.read(info)

    def check_used(self, record: str, nbytes: int) -> None:
        """Refuse a record that is compressed, and much larger than the `nbytes` bytes that its tensors have.

        torch.save compresses nothing: who has compressed its archive has kept what the tensors use.
        """
        info = self._info(record)
        if info.compress_type != zipfile.ZIP_STORED:
            self._check_inflated(info, 2 * nbytes, f"tensors with {nbytes} bytes")

    def _check_inflated(self, info: zipfile.ZipInfo, nbytes: int, what: str) -> None:
        most = nbytes + _FEW_NBYTES
        if info.file_size > most:
            raise CheckpointError(
                f"{self.where}: the record {info.filename} is compressed and has {info.file_size} bytes, and at most {most} are "
                f"read for {what}: save the file again with torch.save, which compresses nothing"
            )

    def crcs(self, record: str) -> tuple[int, int] | None:
        """Return the CRC32 of the bytes of a record, and the one that was saved; None if none was saved. Reads the whole record.

        Raises CheckpointError for a compressed record that is damaged.
        """
        info = self._info(record)
        if not info.CRC and info.file_size:
            return None
        if info.compress_type != zipfile.ZIP_STORED:
            with _trusting_nothing(f"{self.where}: the record {record}"), self._zip.open(info) as opened:
                while opened.read(_PIECE_NBYTES):  # which compares the CRC32 at the end
                    pass
            return info.CRC, info.CRC
        start, crc = self.source(record).first_byte, 0
        if start + info.file_size > self._start + self._part.nbytes:
            raise CheckpointError(f"{self.where}: the record {record}: ends outside of the file: the file was changed")
        for at in range(0, info.file_size, _PIECE_NBYTES):
            crc = zlib.crc32(self._opened.read(self._name, start + at, min(_PIECE_NBYTES, info.file_size - at)), crc)
        return crc, info.CRC

    @property
    def stored_nbytes(self) -> int:
        """The bytes of all records in the file."""
        return sum(info.compress_size for info in self.infos.values())

    def range_of(self, record: str) -> tuple[str, int, int, str]:
        """Return the file of a record, its first byte, the byte after its last one (as far as these say), and its own name."""
        info = self._info(record)
        stored = info.compress_type == zipfile.ZIP_STORED
        start = self.source(record).first_byte if stored else 0
        return self._name, start, start + (info.file_size if stored else 0), record.rpartition("/")[2]

    def source(self, record: str) -> Source:
        """Return the place of the bytes of a record: a range of the file, or memory for a record that is compressed."""
        info = self._info(record)
        if info.compress_type != zipfile.ZIP_STORED:
            return Source(memory=partial(self._decompressed, info))
        if info.compress_size != info.file_size:
            raise CheckpointError(f"{self.where}: the record {record} has two sizes: it was changed")
        start = self._surely_at(info)
        if start is not None:
            return Source(self._name, self._start + start)
        if not 0 <= info.header_offset < self._part.nbytes:
            raise CheckpointError(f"{self.where}: the record {record} begins outside of the file: it was changed")
        return Source(self._name, partial(self._start_by_header, info))

    def size_of(self, record: str) -> int:
        """Return the number of bytes of a record."""
        return self._info(record).file_size

    def _info(self, record: str) -> zipfile.ZipInfo:
        if record not in self.infos:
            raise CheckpointError(f"{self.where}: the record {record} is missing: the file was cut short or changed")
        return self.infos[record]

    def _surely_at(self, info: zipfile.ZipInfo) -> int | None:
        """Return the byte at which a record begins, if torch wrote the archive; None if only the local header says it.

        torch pads each local header so that the record begins at a multiple of 64 bytes. That is certain where the next header
        begins exactly where this record then ends, unless a data descriptor lies between, whose length only its writer knows.
        """
        if info.flag_bits & _HAS_DESCRIPTOR and (info.create_version or info.extract_version):
            return None  # of another writer: torch's gives no version
        header, nbytes = info.header_offset, info.file_size
        is_large = header >= _LARGE or nbytes >= _LARGE
        start = header + _HEADER_NBYTES + len(_encoded_name(info)) + _PADDING_NBYTES
        if is_large:
            start += 4 + (16 if nbytes >= _LARGE else 0) + (8 if header >= _LARGE else 0)
        start += -start % _ALIGNMENT
        end = start + nbytes + ((24 if is_large else 16) if info.flag_bits & _HAS_DESCRIPTOR else 0)
        index = bisect_right(self._borders, header)
        return start if index < len(self._borders) and self._borders[index] == end else None

    def _start_by_header(self, info: zipfile.ZipInfo) -> int:
        """Return the byte of the file at which a record begins, by its local header."""
        where, name = f"{self.where}: the record {info.filename}", _encoded_name(info)
        if info.header_offset + _HEADER_NBYTES + len(name) > self._part.nbytes:
            raise CheckpointError(f"{where}: begins outside of the file: it was changed")
        head = self._opened.read(self._name, self._start + info.header_offset, _HEADER_NBYTES + len(name))
        if head[:4] != b"PK\3\4" or head[_HEADER_NBYTES:] != name:
            raise CheckpointError(f"{where}: does not begin where the archive says: the file was changed")
        num_name, num_extra = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
        start = info.header_offset + _HEADER_NBYTES + num_name + num_extra
        if num_name != len(name) or start + info.file_size > self._part.nbytes:
            raise CheckpointError(f"{where}: ends outside of the file: the file was cut short or changed")
        return self._start + start

    def _decompressed(self, info: zipfile.ZipInfo) -> memoryview:
        where = f"{self.where}: the record {info.filename}"
        if info.file_size > info.compress_size * _MOST_RATIO + _BLOCK_NBYTES:
            raise CheckpointError(f"{where}: has {info.file_size} bytes, which no {info.compress_size} bytes can hold")
        with _trusting_nothing(where), self._zip.open(info) as record:
            memory, at = in_pages((info.file_size,), torch.uint8).numpy().data, 0
            while piece := record.read(_BLOCK_NBYTES):
                memory[at : at + len(piece)] = piece
                at += len(piece)
        if at != info.file_size:
            raise CheckpointError(f"{where}: has {at} bytes, not {info.file_size}: it was changed")
        return memory


def _encoded_name(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & _IS_UTF_8 else "cp437")


@contextmanager
def _trusting_nothing(where: str) -> Iterator[None]:
    """As `as_checkpoint_error`, with the errors of the modules that read zip archives."""
    with as_checkpoint_error(where):
        try:
            yield
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise CheckpointError(f"{where}: is damaged: {error}") from error
