"""The header of a safetensors file. No content of a header that is read is trusted.

The format is that of the safetensors project: 8 bytes (the header's length, little-endian), the header (JSON, padded with
spaces), and the bytes of the tensors, row-major and without gaps.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy
from msgspec import Meta, Struct

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.header_entries import DTYPES, IN_PAIRS, Entries, HeaderEntry, code_of
from fsdp_optim.formats.base.json_text import check_density, parse_json

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8  # bytes; the data section begins at a multiple of it
_MOST_NBYTES = 100_000_000  # in a header; the limit of safetensors itself
_MOST_DIMENSIONS = 64  # of a tensor; the limit of torch
_METADATA = "__metadata__"
_ENTRIES_TOGETHER = 1 << 12
_BEGINS = re.compile(rb'[ \t\n\r]*\{[ \t\n\r]*"__metadata__"[ \t\n\r]*:[ \t\n\r]*')
_FOLLOWS = re.compile(rb'[ \t\n\r]*(,[ \t\n\r]*(?=")|(?=\}))')
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True)
class Header:
    """The tensors of one file, in the order of their bytes, and its metadata."""

    entries: Sequence[HeaderEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Header:
        """Return the header for tensors that are given as (key, torch's name of the dtype, shape) and lie end to end."""
        entries, at = [], 0
        kinds: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
        listed = list(tensors)
        keys = [key for key, _, _ in listed]
        if _METADATA in keys or not "".join(keys).isascii():
            for key in keys:
                _check_key(key)
        for key, dtype, shape in listed:
            kind = kinds.get((dtype, shape))
            if kind is None:
                kind = kinds[dtype, shape] = _kind_of(key, dtype, shape)
            code, nbytes = kind
            entries.append(HeaderEntry(key, code, shape, at, at + nbytes))
            at += nbytes
        return cls(tuple(entries), metadata)

    @property
    def data_nbytes(self) -> int:
        return self.entries[-1].stop if self.entries else 0

    def tensors_in(self, start: int, stop: int) -> str:
        """Return the names of the tensors in a range of the data section."""
        return shortened(entry.key for entry in self.entries if entry.start < stop and start < entry.stop)

    def encoded(self) -> bytes:
        """Return the bytes of the file before the data section."""
        return self._bytes

    @functools.cached_property
    def _bytes(self) -> bytes:
        texts = [f'"{_METADATA}":{_JSON.encode(dict(self.metadata))}'] if self.metadata else []
        are_plain = _is_plain("".join([entry.key for entry in self.entries]))  # nearly always
        joined: list[bytes] = []  # bytes of some thousand entries each, whose texts take more memory
        kinds: dict[tuple[str, tuple[int, ...]], str] = {}
        for entry in self.entries:
            kind = entry.code, entry.shape
            between = kinds.get(kind)
            if between is None:
                shape = ",".join(map(str, _shown_shape(entry)))
                between = kinds[kind] = f':{{"dtype":"{entry.code}","shape":[{shape}],"data_offsets":['
            key = f'"{entry.key}"' if are_plain else _json_of(entry.key)
            texts.append(f"{key}{between}{entry.start},{entry.stop}]}}")
            if len(texts) == _ENTRIES_TOGETHER:
                joined.append(",".join(texts).encode())
                texts.clear()
        if texts or not joined:
            joined.append(",".join(texts).encode())
        length = sum(map(len, joined)) + len(joined) - 1 + len("{}")
        spaces = b" " * (-length % _ALIGNMENT)
        # What comes before and after is joined to the ends: around the complete text it would take a copy of all.
        joined[0] = _LENGTH.pack(length + len(spaces)) + b"{" + joined[0]
        joined[-1] += b"}" + spaces
        return b",".join(joined)

    def files_within(self, most_nbytes: int, others: Mapping[str, str]) -> Iterator[int]:
        """How many of the tensors, in their order, are in each file, so that a file has at most `most_nbytes` with its header,
        or one tensor that is larger. `others`: the metadata of all files but the first one.
        """
        if len(self.encoded()) + self.data_nbytes <= most_nbytes:
            yield len(self.entries)
            return
        num, text, first = 0, _nbytes_of_metadata(self.metadata), 0
        for entry in self.entries:
            more = _nbytes_of_entry(entry, first)
            header = _LENGTH.size - (-(text + more) // _ALIGNMENT) * _ALIGNMENT
            if num and header + entry.stop - first > most_nbytes:
                yield num
                num, text, first = 0, _nbytes_of_metadata(others), entry.start
                more = _nbytes_of_entry(entry, first)
            num, text = num + 1, text + more
        yield num


def _check_key(key: str) -> None:
    """Raise CheckpointError for a name that no safetensors file can have."""
    if key == _METADATA:
        raise CheckpointError(f"{key}: a safetensors file keeps its metadata under this name: rename the parameter")
    if key.isascii():
        return  # nearly always
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{key!r}: cannot be a name in a safetensors file: {error.reason}: rename the parameter"
        ) from error


def _kind_of(key: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, int]:
    """Return the code of a tensor's dtype, and the bytes of its elements."""
    code = code_of(key, dtype)
    if code == IN_PAIRS and not shape:
        raise CheckpointError(f"{key}: is a tensor of {dtype} without dimensions, which safetensors cannot store")
    return code, prod(shape) * DTYPES[code][1]


def _json_of(key: str) -> str:
    """Return the JSON of a str."""
    return f'"{key}"' if _is_plain(key) else _JSON.encode(key)


def _is_plain(text: str) -> bool:
    """Return whether JSON has a text as it is, between quotes."""
    return text.isascii() and text.isprintable() and '"' not in text and "\\" not in text


def _shown_shape(entry: HeaderEntry) -> tuple[int, ...]:
    return (*entry.shape[:-1], 2 * entry.shape[-1]) if entry.code == IN_PAIRS else entry.shape


def _nbytes_of_metadata(metadata: Mapping[str, str]) -> int:
    """Return the bytes of the JSON of a header before its tensors: the brace, and the metadata with what follows them."""
    return 1 + (len(_JSON.encode({_METADATA: dict(metadata)}).encode()) - 1 if metadata else 0)


def _nbytes_of_entry(entry: HeaderEntry, first: int) -> int:
    """Return the bytes of a tensor, and of what follows it, in the JSON of the header of a file whose data begin at `first`."""
    shape = ",".join(map(str, _shown_shape(entry)))
    rest = f':{{"dtype":"{entry.code}","shape":[{shape}],"data_offsets":[{entry.start - first},{entry.stop - first}]}},'
    return len(_json_of(entry.key).encode()) + len(rest)


def length_of_header(name: str, prefix: bytes, file_nbytes: int) -> int:
    """Return the length of the JSON of a file's header in bytes, from the first 8 bytes of the file."""
    if len(prefix) < _LENGTH.size:
        raise CheckpointError(f"{name}: {file_nbytes} bytes are too few for a safetensors file: the file was cut short")
    (length,) = _LENGTH.unpack(prefix[: _LENGTH.size])
    if length > min(_MOST_NBYTES, file_nbytes - _LENGTH.size):
        raise CheckpointError(f"{name}: says that its header has {length} bytes, but the file has {file_nbytes}")
    return int(length)


@dataclass(frozen=True)
class ReadHeader(Header):
    """The header of a file that is there."""

    entries: Entries


def parse_header(name: str, text: bytes, data_nbytes: int) -> ReadHeader:
    """Decode a header. Raises CheckpointError unless its tensors fill the data section without gaps."""
    check_density(f"{name}: its header", text)
    listed = _listed_at_once(name, text)
    tensors, metadata = listed if listed is not None else _listed(name, text)
    entries = _in_columns(tensors, data_nbytes)
    if entries is None:
        entries = _in_columns(_checked(name, tensors, data_nbytes), data_nbytes)
    if entries is None:
        raise CheckpointError(f"{name}: its tensors do not fill its data")
    return ReadHeader(entries, metadata)


def _in_columns(tensors: Mapping[str, _Tensor], data_nbytes: int) -> Entries | None:
    """Return tensors as columns, in the order of their bytes; None where something is wrong, which `_checked` says."""
    offsets = chain.from_iterable([tensor.data_offsets for tensor in tensors.values()])
    ranges = numpy.fromiter(offsets, numpy.int64, 2 * len(tensors)).reshape(-1, 2)
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    kinds = numpy.array([numbers.setdefault((t.dtype, t.shape), len(numbers)) for t in tensors.values()], numpy.int64)
    shapes = [_shape_in_memory(code, shape) for code, shape in numbers]
    if None in shapes:
        return None
    known = [(code, shape) for (code, _), shape in zip(numbers, shapes, strict=True) if shape is not None]
    lengths = [prod(shape) * DTYPES[code][1] for code, shape in known]
    if max(lengths, default=0) > data_nbytes:
        return None
    keys, starts, stops = [*tensors], ranges[:, 0], ranges[:, 1]
    if (starts[1:] < starts[:-1]).any() or (stops[1:] < stops[:-1]).any():
        order = numpy.lexsort((stops, starts))
        keys, kinds, starts, stops = [keys[at] for at in order.tolist()], kinds[order], starts[order], stops[order]
    if (stops - starts != numpy.array(lengths, numpy.int64)[kinds]).any():
        return None
    if (numpy.concatenate([[0], stops]) != numpy.concatenate([starts, [data_nbytes]])).any():
        return None
    return Entries(keys, kinds.astype(numpy.uint16) if len(known) <= 1 << 16 else kinds, starts.copy(), known)


def _checked(name: str, tensors: Mapping[str, _Tensor], data_nbytes: int) -> Mapping[str, _Tensor]:
    """Return the same tensors. Raises CheckpointError that says what is wrong with them."""
    entries = [_entry(name, key, tensor) for key, tensor in tensors.items()]
    entries.sort(key=attrgetter("start", "stop"))
    at = 0
    for entry in entries:
        if entry.start != at:
            problem = "overlaps the tensor before" if entry.start < at else "leaves a gap before itself"
            raise CheckpointError(f"{name}: {entry.key} begins at byte {entry.start}, not {at}: it {problem}")
        at = entry.stop
    if at != data_nbytes:
        raise CheckpointError(
            f"{name}: its tensors end at byte {at}, but its data at byte {data_nbytes}: the file was cut short or changed"
        )
    return tensors


def _shape_in_memory(code: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that torch has of a shape in a file; None for an unknown dtype, or numbers that no bytes have."""
    if code not in DTYPES:
        return None
    if code != IN_PAIRS:
        return shape
    return (*shape[:-1], shape[-1] // 2) if shape and shape[-1] % 2 == 0 else None


_Size = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _Tensor(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The entry of one tensor in the JSON of a header."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=_MOST_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


@functools.cache
def _decoder() -> msgspec.json.Decoder[dict[str, _Tensor]]:
    return msgspec.json.Decoder(dict[str, _Tensor])


_Listed = tuple[Mapping[str, _Tensor], Mapping[str, str]]


def _listed_at_once(name: str, text: bytes) -> _Listed | None:
    """Decode a header in C, without an object for each step: the tensors by key, and the metadata. None for a header to doubt.

    Such a decoder takes the last of two equal keys. Each key has a colon behind it, so as many colons as keys that were decoded
    prove that no key occurs twice; there are more if a key has a colon in it. `_listed` says what is wrong, if anything is.
    """
    try:
        metadata, of_tensors = _without_metadata(text)
        tensors = _decoder().decode(of_tensors)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if of_tensors.count(b":") != len(tensors) * (1 + len(_Tensor.__struct_fields__)) or _METADATA in tensors:
        return None
    return tensors, _metadata(name, parse_json(f"{name}: its header", metadata))


def _without_metadata(text: bytes) -> tuple[bytes, bytes]:
    """Return the metadata of a header, if they come first, as nearly always, and the header without them.

    Raises ValueError or RecursionError where no header has such a beginning.
    """
    begins = _BEGINS.match(text)
    if begins is None:
        return b"{}", text
    _, end = json.JSONDecoder().raw_decode(text.decode("latin-1"), begins.end())
    follows = _FOLLOWS.match(text, end)
    if follows is None:
        raise ValueError("neither a tensor nor the end follows the metadata")
    return text[begins.end() : end], b"{" + text[follows.end() :]


def _listed(name: str, text: bytes) -> _Listed:
    values = parse_json(f"{name}: its header", text)
    if not isinstance(values, dict):
        raise CheckpointError(f"{name}: its header is a {type(values).__name__}, not an object")
    metadata = _metadata(name, values.pop(_METADATA, {}))
    return {key: _tensor(name, key, value) for key, value in values.items()}, metadata


def _metadata(name: str, value: Any) -> dict[str, str]:
    with as_checkpoint_error(f"{name}: the metadata in its header"):
        return msgspec.convert(value, dict[str, str])


def _tensor(name: str, key: str, value: Any) -> _Tensor:
    try:
        return msgspec.convert(value, _Tensor)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{name}: the entry of {key} does not describe a tensor: {error}: {str(value)[:200]}"
        ) from error


def _entry(name: str, key: str, tensor: _Tensor) -> HeaderEntry:
    code, shape, (start, stop) = tensor.dtype, tensor.shape, tensor.data_offsets
    if code not in DTYPES:
        raise CheckpointError(f"{name}: {key} has the dtype {code!r}, which this library does not know")
    in_memory = _shape_in_memory(code, shape)
    if in_memory is None:
        raise CheckpointError(f"{name}: {key} is {code} of shape {list(shape)}, but bytes have two numbers each")
    shape = in_memory
    if stop - start != prod(shape) * DTYPES[code][1]:
        raise CheckpointError(
            f"{name}: {key} is {code} of shape {list(shape)}, {prod(shape) * DTYPES[code][1]} bytes, but has the bytes "
            f"[{start}, {stop}), {stop - start}"
        )
    return HeaderEntry(key, code, shape, start, stop)
