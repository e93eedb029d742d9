"""The tensors of DCP files that FileSystemWriter(serialization_format=SerializationFormat.SAFETENSORS) has written.

Such a file has its values that are no tensors first, each as an archive of torch.save, and then all its tensors as one
safetensors file. The metadata of the checkpoint say of each tensor that it begins where that one begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.dcp.sharding_info import offsets_in
from fsdp_optim.foreign.dcp.tensor_table import ItemPlace
from fsdp_optim.formats.base.header import length_of_header, parse_header
from fsdp_optim.formats.base.header_entries import HeaderEntry
from fsdp_optim.layout import Shape
from fsdp_optim.storage.base import Opened

_LENGTH = 8  # bytes before the header


@dataclass(frozen=True)
class _Inside:
    """A safetensors file inside of a DCP file. `start`: where it begins; `data`: where the bytes of its tensors begin."""

    start: int
    data: int
    entries: Mapping[str, HeaderEntry]
    offsets: Mapping[str, Shape]


class SafetensorsInside:
    """The safetensors files inside DCP files. Each is looked up once."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._insides: dict[str, _Inside | None] = {}

    def place(self, name: str, item: ItemPlace, dtype: str, offsets: Shape, sizes: Shape) -> tuple[str, int] | None:
        """Return the file of a chunk and the byte at which its elements begin; None for a file whose tensors are no safetensors.

        `name`: for errors. Raises CheckpointError where the file has another tensor than the metadata say.
        """
        if item.file not in self._insides:
            self._insides[item.file] = self._read(item)
        inside = self._insides[item.file]
        if inside is None:
            return None
        where = f"{self._opened.named(item.file)}: {name}"
        entry = inside.entries.get(item.key) if isinstance(item.key, str) else None
        if entry is None or item.start != inside.start:
            raise CheckpointError(
                f"{where}: is not among its {len(inside.entries)} tensors: the checkpoint was changed"
            )
        first = inside.offsets[entry.key]
        if (entry.dtype, entry.shape, first) != (dtype, sizes, offsets):
            raise CheckpointError(
                f"{where}: holds {entry.dtype} {list(entry.shape)} from {list(first)} on, and the metadata says {dtype} "
                f"{list(sizes)} from {list(offsets)} on: torch writes one chunk of a tensor to each such file; or it was changed"
            )
        return item.file, inside.data + entry.start

    def _read(self, item: ItemPlace) -> _Inside | None:
        opened, where, start = self._opened, self._opened.named(item.file), item.start
        size = opened.size_of(item.file)
        head = opened.read(item.file, start, min(_LENGTH + 1, size - start))
        if head[_LENGTH:] != b"{" or head.startswith(b"PK\3\4"):
            return None
        text = opened.read(item.file, start + _LENGTH, length_of_header(where, head, size - start))
        data = start + _LENGTH + len(text)
        header = parse_header(where, text, size - data)
        offsets = offsets_in(where, header)
        if offsets is None:
            raise CheckpointError(f"{where}: does not say where its chunks begin: it was changed")
        return _Inside(start, data, {entry.key: entry for entry in header.entries}, offsets)
