"""The trainer's own values in a safetensors file: JSON in its metadata, and the tensors that are in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.checksums import hash_of, hex_of
from fsdp_optim.formats.codec import Decoder, Encoder
from fsdp_optim.formats.header import Header, length_of_header, parse_header
from fsdp_optim.formats.json_text import parse_json
from fsdp_optim.formats.marker import FileInfo
from fsdp_optim.formats.opened import OpenFolder
from fsdp_optim.memory import dtype_name, dtype_named


def encode_extra(where: str, value: Any, *, allow_pickle: bool, records: Mapping[str, type] | None = None) -> bytes:
    """A file that has one value. Raises CheckpointError that names a part that cannot be saved."""
    encoder = Encoder(allow_pickle=allow_pickle, records=records)
    text = json.dumps(encoder.encode(where, value), separators=(",", ":"), allow_nan=False)
    tensors = encoder.tensors
    wide_first = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)
    data = b"".join(tensors[i].reshape(-1).view(torch.uint8).numpy().tobytes() for i in wide_first)
    described = [(str(i), dtype_name(tensors[i].dtype), tuple(tensors[i].shape)) for i in wide_first]
    sums = f"{hash_of(text.encode()):016x}{hash_of(data):016x}"
    return Header.of(described, {"json": text, "xxh3_64": sums}).encoded() + data


def info_of(encoded: bytes) -> FileInfo:
    """What the marker says of such a file."""
    start = 8 + length_of_header("extra", encoded, len(encoded))
    return FileInfo(len(encoded), hex_of(encoded[:start]), None)


def read_extra(
    folder: OpenFolder,
    name: str,
    info: FileInfo,
    *,
    verify: bool,
    allow_pickle: bool,
    records: Mapping[str, type] | None = None,
) -> Any:
    """The value in such a file. Raises CheckpointError where it is not what was saved."""
    path, whole = folder.path / name, folder.read_whole(name, info.nbytes)
    length = length_of_header(str(path), whole, len(whole))
    data = whole[8 + length :]
    if verify and hex_of(whole[: 8 + length]) != info.header:
        raise CheckpointError(f"{path}: its header is not what was saved: its checksum differs")
    header = parse_header(str(path), whole[8 : 8 + length], len(data))
    text = header.metadata.get("json")
    if text is None:
        raise CheckpointError(f"{path}: has no values of a trainer in it")
    if verify and header.metadata.get("xxh3_64") != f"{hash_of(text.encode()):016x}{hash_of(data):016x}":
        raise CheckpointError(f"{path}: is not what was saved: its checksum differs (verify=False reads it as it is)")
    tensors: dict[str, torch.Tensor] = {}
    for entry in header.entries:
        dtype = dtype_named(entry.dtype)
        body = torch.frombuffer(bytearray(data[entry.start : entry.stop]) or bytearray(1), dtype=torch.uint8)
        tensors[entry.key] = body[: entry.stop - entry.start].view(dtype).reshape(entry.shape)
    if set(tensors) != {str(index) for index in range(len(tensors))}:
        raise CheckpointError(f"{path}: its tensors are not numbered from 0")
    said = parse_json(f"{path}: its values", text.encode())
    ordered = [tensors[str(index)] for index in range(len(tensors))]
    return Decoder(str(path), ordered, allow_pickle=allow_pickle, records=records).decode(said)
