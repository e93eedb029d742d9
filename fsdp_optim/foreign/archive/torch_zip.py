"""The bytes of a torch.save archive around the elements of its tensors, so that ranks can write the elements into it in place.

An archive is a zip file without compression. It has a record `data.pkl`, the pickled object, and a record with the elements of
each tensor, which begins at a multiple of 64 bytes, as torch.load(mmap=True) wants it. The checksums of records with elements
are 0, as torch.save writes them after `torch.serialization.set_crc32_options(False)`: torch.load does not look at them.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import torch

from fsdp_optim.layout import Shape
from fsdp_optim.tensors.memory import dtype_named

ALIGNMENT = 64
"""The tensors of an archive begin at multiples of this number of bytes."""

_ROOT = "archive"  # the folder of all records; torch.load takes any
_PROTOCOL = 2  # of pickle, as torch.save uses it
_FIRST_RECORDS = {
    ".format_version": b"1",
    ".storage_alignment": b"%d" % ALIGNMENT,
    "byteorder": b"little",
    "version": b"3\n",
}

# The names of the classes by which torch.save writes dtypes. All other dtypes are written as bytes and a dtype.
_STORAGE_OF = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END_64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR_64 = struct.Struct("<IIQI")
_EXTRA = struct.Struct("<HH")
_UTF8, _VERSION, _VERSION_64 = 0x800, 20, 45
_MOST_32, _MOST_16 = 0xFFFFFFFF, 0xFFFF
_DAY_ONE = 33  # 1980-01-01: zip knows no earlier day


@dataclass(frozen=True)
class TensorStub:
    """A tensor in an object to pickle, without its elements. `number`: which record of the archive has these."""

    dtype: str
    shape: Shape
    number: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * dtype_named(self.dtype).itemsize


@dataclass(frozen=True)
class _StorageStub:
    dtype: str
    number: int
    numel: int


class _Pickler(pickle.Pickler):
    """Writes stubs as torch.save writes tensors."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageStub):
            return None
        name = _STORAGE_OF.get(value.dtype)
        if name is not None:
            return ("storage", getattr(torch, name), str(value.number), "cpu", value.numel)
        nbytes = value.numel * dtype_named(value.dtype).itemsize
        return ("storage", torch.UntypedStorage, str(value.number), "cpu", nbytes)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, TensorStub):
            return NotImplemented
        strides = tuple(accumulate(reversed([max(size, 1) for size in value.shape[1:]]), lambda a, b: a * b, initial=1))
        strides = strides[::-1] if value.shape else ()
        storage = _StorageStub(value.dtype, value.number, value.numel)
        arguments: tuple[Any, ...] = (storage, 0, tuple(value.shape), strides, False, OrderedDict())
        if value.dtype in _STORAGE_OF:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, dtype_named(value.dtype))


def pickled(value: Any) -> bytes:
    """Return an object with stubs in the place of tensors, as the record `data.pkl` has it."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=_PROTOCOL).dump(value)
    return buffer.getvalue()


@dataclass(frozen=True)
class _Record:
    name: bytes
    nbytes: int
    crc: int
    start: int  # of its header in the archive


@dataclass
class ArchiveFrames:
    """Makes the bytes of an archive around its tensors, from the beginning on. `at`: the number of bytes up to here."""

    at: int = 0
    _records: list[_Record] = field(default_factory=list)

    def header(self, name: str, nbytes: int, crc: int = 0) -> bytes:
        """Return the header of a record, whose content must begin right after it."""
        path = f"{_ROOT}/{name}".encode()
        self._records.append(_Record(path, nbytes, crc, self.at))
        is_big = nbytes >= _MOST_32
        sizes = _EXTRA.pack(1, 16) + struct.pack("<QQ", nbytes, nbytes) if is_big else b""
        before = self.at + _LOCAL.size + len(path) + len(sizes) + _EXTRA.size
        padding = -before % ALIGNMENT
        extra = sizes + _EXTRA.pack(0x4246, padding) + b"Z" * padding
        size, version = min(nbytes, _MOST_32), _VERSION_64 if is_big else _VERSION
        fields = (0x04034B50, version, _UTF8, 0, 0, _DAY_ONE, crc, size, size, len(path), len(extra))
        made = _LOCAL.pack(*fields) + path + extra
        self.at += len(made) + nbytes
        return made

    def small(self, name: str, content: bytes) -> bytes:
        """Return a whole record."""
        return self.header(name, len(content), zlib.crc32(content)) + content

    def first(self, value: Any) -> bytes:
        """Return the records before those with elements. `value`: the object, with stubs in the place of tensors."""
        return self.small("data.pkl", pickled(value)) + b"".join(
            self.small(*record) for record in _FIRST_RECORDS.items()
        )

    def tensor(self, number: int, nbytes: int) -> bytes:
        """Return the header of the record with the elements of a tensor, which begins at a multiple of 64 bytes."""
        return self.header(f"data/{number}", nbytes)

    def end(self) -> bytes:
        """Return the directory at the end of the archive."""
        listed = b"".join(map(_listed, self._records))
        start, num, after = self.at, len(self._records), self.at + len(listed)
        end = b""
        if num >= _MOST_16 or start >= _MOST_32 or len(listed) >= _MOST_32:
            end += _END_64.pack(0x06064B50, 44, _VERSION_64, _VERSION_64, 0, 0, num, num, len(listed), start)
            end += _LOCATOR_64.pack(0x07064B50, 0, after, 1)
        few = min(num, _MOST_16)
        end += _END.pack(0x06054B50, 0, 0, few, few, min(len(listed), _MOST_32), min(start, _MOST_32), 0)
        self.at = after + len(end)
        return listed + end


def _listed(record: _Record) -> bytes:
    big = [number for number in (record.nbytes, record.nbytes, record.start) if number >= _MOST_32]
    extra = _EXTRA.pack(1, 8 * len(big)) + struct.pack(f"<{len(big)}Q", *big) if big else b""
    size, start, version = min(record.nbytes, _MOST_32), min(record.start, _MOST_32), _VERSION_64 if big else _VERSION
    numbers = (
        0x02014B50,
        version,
        version,
        _UTF8,
        0,
        0,
        _DAY_ONE,
        record.crc,
        size,
        size,
        len(record.name),
        len(extra),
    )
    return _CENTRAL.pack(*numbers, 0, 0, 0, 0, start) + record.name + extra


def frames_around(value: Any, stubs: Sequence[TensorStub]) -> Iterator[bytes]:
    """Yield the bytes before each tensor of an archive, in the order of the stubs, and those after the last one."""
    frames = ArchiveFrames()
    pending = frames.first(value)
    for stub in stubs:
        yield pending + frames.tensor(stub.number, stub.nbytes)
        pending = b""
    yield pending + frames.end()
