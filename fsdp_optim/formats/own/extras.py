"""Extras: values of the trainer in a safetensors file, as JSON in the metadata and as tensors."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.bools import BOOL, check_bytes
from fsdp_optim.formats.base.checksums import hash_of, hex_of
from fsdp_optim.formats.base.codec import Decoder, Encoder, Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.header import Header, length_of_header, parse_header
from fsdp_optim.formats.base.index import StoredExtra
from fsdp_optim.formats.base.json_text import parse_json
from fsdp_optim.formats.base.records import COMMON, PLANNED
from fsdp_optim.formats.own.manifest import FileInfo
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.memory import bytes_in_memory, dtype_name, dtype_named


def encode_extra(where: str, value: Any, *, allow_pickle: bool, records: Mapping[str, type] | None = None) -> bytes:
    """Return the bytes of a file for one value. Raises CheckpointError that names a part which cannot be saved."""
    encoder = Encoder(allow_pickle=allow_pickle, records=records)
    text = json.dumps(encoder.encode(where, value), separators=(",", ":"), allow_nan=False)
    parse_json(where, text.encode())  # refuses a text that no reader accepts
    tensors = encoder.tensors
    wide_first = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)
    data = b"".join(bytes_in_memory(tensors[i]) for i in wide_first)
    described = [(str(i), dtype_name(tensors[i].dtype), tuple(tensors[i].shape)) for i in wide_first]
    sums = f"{hash_of(text.encode()):016x}{hash_of(data):016x}"
    return Header.of(described, {"json": text, "xxh3_64": sums}).encoded() + data


def info_of(encoded: bytes) -> FileInfo:
    """Return the manifest's entry for the file of an extra."""
    start = 8 + length_of_header("extra", encoded, len(encoded))
    return FileInfo(len(encoded), hex_of(encoded[:start]), None)


@dataclass(frozen=True)
class Extra:
    """The content of the file of an extra, verified but not decoded."""

    path: str
    values: Any
    tensors: tuple[torch.Tensor, ...]

    def decoded(self, *, allow_pickle: bool, records: Mapping[str, type] | None = None) -> Any:
        """Return the value. Raises CheckpointError for a pickle unless `allow_pickle` is True."""
        return Decoder(self.path, self.tensors, allow_pickle=allow_pickle, records=records).decode(self.values)

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        """Return the value, but with Withheld in the place of each item of a dict that is a pickle and not allowed."""
        return Decoder(self.path, self.tensors, allow_pickle=allow_pickle).decode_each(self.values)


def read_extra(opened: Opened, name: str, info: FileInfo, *, verify: bool) -> Extra:
    """Read the file of an extra. Raises CheckpointError if the bytes are not as they were saved."""
    path, whole = opened.named(name), opened.read_whole(name, info.nbytes)
    length = length_of_header(path, whole, len(whole))
    head, data = whole[: 8 + length], memoryview(whole)[8 + length :]
    if verify and hex_of(head) != info.header:
        raise CheckpointError(f"{path}: its header is not the one that was saved: the checksum differs")
    header = parse_header(path, head[8:], len(data))
    text = header.metadata.get("json")
    if text is None:
        raise CheckpointError(f"{path}: its metadata has no key json, so it is not the file of an extra")
    with as_checkpoint_error(path):
        encoded = text.encode()
        if verify and header.metadata.get("xxh3_64") != f"{hash_of(encoded):016x}{hash_of(data):016x}":
            raise CheckpointError(
                f"{path}: is not the file that was saved: its checksum differs (verify=False reads the damaged bytes)"
            )
        tensors: dict[str, torch.Tensor] = {}
        for entry in header.entries:
            dtype = dtype_named(entry.dtype)
            if entry.code == BOOL:
                check_bytes(path, entry.key, data[entry.start : entry.stop])
            body = torch.frombuffer(bytearray(data[entry.start : entry.stop]) or bytearray(1), dtype=torch.uint8)
            tensors[entry.key] = body[: entry.stop - entry.start].view(dtype).reshape(entry.shape)
    if set(tensors) != {str(index) for index in range(len(tensors))}:
        raise CheckpointError(f"{path}: its tensors are not numbered from 0")
    values = parse_json(f"{path}: its values", encoded)
    return Extra(path, values, tuple(tensors[str(index)] for index in range(len(tensors))))


@dataclass(frozen=True)
class PlannedValues(StoredExtra):
    """The values of the trainer in a checkpoint that torch's planner has filled, which has pickled the objects among them.

    Such an object is made with `allow_pickle=True` only, as any other pickle.

    Attributes:
        where: the checkpoint.
        kept: the values as the file has them, with torch's bytes in the place of such an object.
        record: the record of the save. Its "raw" are the keys of these objects, its "paths" the places of all keys.
    """

    where: str
    kept: StoredExtra
    record: StoredExtra

    def decoded(self, *, allow_pickle: bool) -> Any:
        return self._made(self.kept.decoded(allow_pickle=allow_pickle), allow_pickle=allow_pickle, each=False)

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self._made(self.kept.decoded_each(allow_pickle=allow_pickle), allow_pickle=allow_pickle, each=True)

    def as_tree(self, *, allow_pickle: bool) -> Any:
        return self._made(self.kept.as_tree(allow_pickle=allow_pickle), allow_pickle=allow_pickle, each=True)

    def _made(self, values: Any, *, allow_pickle: bool, each: bool) -> Any:
        """Return the values with the objects. `each`: those that are not allowed are withheld, and raise nothing."""
        for path in self._pickled():
            name = ".".join(map(str, path))
            with as_checkpoint_error(f"{self.where}: {name}"):
                if allow_pickle:
                    values = _replaced(values, path)
                    continue
                why = (
                    f"{self.where}: {name}: is an object that torch's planner has pickled: allow_pickle=True makes it, and can "
                    "run any code of its author"
                )
                if not each:
                    raise CheckpointError(why)
                values = {**values, path[0]: Withheld(why)}
        return values

    def _pickled(self) -> list[Sequence[str | int]]:
        """Return the paths of the objects that torch has pickled."""
        with as_checkpoint_error(f"{self.where}: the record of its keys"):
            record = self.record.decoded(allow_pickle=False)
            raw = record.get("raw", ()) if isinstance(record, Mapping) else ()
            return [record["paths"][key] for key in raw]


def planned_extras(where: str, extras: Mapping[str, StoredExtra]) -> Mapping[str, StoredExtra]:
    """Return the extras of a checkpoint, with `PlannedValues` where they have the record of a planner's save."""
    if COMMON not in extras or PLANNED not in extras:
        return extras
    return {**extras, COMMON: PlannedValues(where, extras[COMMON], extras[PLANNED])}


def _replaced(tree: Any, path: Sequence[str | int]) -> Any:
    """Return a tree with the object in the place of torch's bytes, which are at a path."""
    if not path:
        return torch.load(io.BytesIO(tree), map_location="cpu", weights_only=False)
    first, *rest = path
    inner = _replaced(tree[first], rest)
    if isinstance(tree, Mapping):
        return {**tree, first: inner}
    return [inner if number == first else item for number, item in enumerate(tree)]
