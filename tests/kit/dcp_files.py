"""Folders of torch.distributed.checkpoint, chunk by chunk, with torch's own classes, also such as no trainer would write."""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

Box = tuple[Sequence[int], Sequence[int]]
_VERSION = {"version": "1.0.0"} if any(field.name == "version" for field in dataclasses.fields(Metadata)) else {}
"""torch 2.6 writes no version."""


class DcpFiles:
    """A checkpoint under construction. The chunks go to the files in turn; `metadata` may be changed before `finish`."""

    def __init__(self, folder: Path, num_files: int = 2) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.metadata = Metadata({}, {}, {}, StorageMeta(folder, "save"), **_VERSION)
        self._files = [f"__{number}_0.distcp" for number in range(num_files)]
        self._data = {name: bytearray() for name in self._files}
        self._next = itertools.cycle(self._files)

    def tensor(self, path: Sequence[str | int], tensor: Tensor, boxes: Sequence[Box] | None = None) -> DcpFiles:
        """Add a tensor, whole or in chunks. The memory of a chunk has the order of dimensions of the tensor's."""
        key = self._listed(path)
        whole: Sequence[Box] = [((0,) * tensor.dim(), tuple(tensor.shape))]
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in (whole if boxes is None else boxes)]
        properties = TensorProperties(dtype=tensor.dtype)
        self.metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, tensor.size(), chunks)
        for number, chunk in enumerate(chunks):
            part = tensor[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
            self._add(MetadataIndex(key, chunk.offsets, number), part.clone())
        return self

    def value(self, path: Sequence[str | int], value: Any) -> DcpFiles:
        key = self._listed(path)
        self.metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self._add(MetadataIndex(key), value)
        return self

    def _listed(self, path: Sequence[str | int]) -> str:
        key = ".".join(map(str, path))
        self.metadata.planner_data[key] = tuple(path)
        return key

    def _add(self, index: MetadataIndex, value: Any) -> None:
        name, archive = next(self._next), io.BytesIO()
        torch.save(value, archive)
        data = archive.getvalue()
        self.metadata.storage_data[index] = _StorageInfo(name, len(self._data[name]), len(data))
        self._data[name] += data

    def info(self, key: str) -> _StorageInfo:
        """The place of the first item of a key."""
        return next(info for index, info in self.metadata.storage_data.items() if index.fqn == key)

    def finish(self, protocol: int | None = None, name: str = ".metadata") -> Path:
        """Write the files."""
        for file, data in self._data.items():
            (self.folder / file).write_bytes(data)
        (self.folder / name).write_bytes(pickle.dumps(self.metadata, protocol))
        return self.folder


def rows(tensor: Tensor, *counts: int) -> list[Box]:
    """Chunks of so many rows each."""
    starts = itertools.accumulate(counts, initial=0)
    return [
        ((start, *[0] * (tensor.dim() - 1)), (num, *tensor.shape[1:]))
        for start, num in zip(starts, counts, strict=False)
    ]


def grid(tensor: Tensor, height: int, width: int) -> list[Box]:
    """Chunks of a matrix: rows and columns."""
    num_rows, num_columns = tensor.shape
    return [
        ((i, j), (min(height, num_rows - i), min(width, num_columns - j)))
        for i in range(0, num_rows, height)
        for j in range(0, num_columns, width)
    ]
