"""Torch's metadata of a DCP folder that is written: the tensors, their chunks, and the values, each with its place."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.dcp.values import Path, ValueItem, key_of
from fsdp_optim.formats.base.protocols import PlannedTensor
from fsdp_optim.layout import Shape
from fsdp_optim.tensors.memory import dtype_named

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


@dataclass(frozen=True)
class Chunk:
    """One item with rows of a tensor. `start`, `nbytes`: its bytes in the file."""

    key: str
    offsets: Shape
    sizes: Shape
    start: int
    nbytes: int


@dataclass
class WrittenItem:
    """Torch's Metadata while it is built. `folder`: the folder of the files, relative to the folder of `.metadata`."""

    folder: str
    _tensors: dict[str, Any] = field(default_factory=dict)
    _paths: dict[str, Path] = field(default_factory=dict)
    _places: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def _torchs(self) -> Any:
        """The modules with torch's classes, which take long to import."""
        from torch.distributed.checkpoint import filesystem, metadata

        return metadata, filesystem

    def add_chunk(self, path: Path, tensor: PlannedTensor, chunk: Chunk, file: str) -> None:
        """List a chunk of a tensor."""
        key, size = self._key(path), self._size(tensor.shape)
        entry = self._tensors.get(key)
        if entry is None:
            entry = self._tensors[key] = self._tensor(tensor.dtype, size)
        metadata, _ = self._torchs
        offsets = self._size(chunk.offsets)
        entry.chunks.append(metadata.ChunkStorageMetadata(offsets, self._size(chunk.sizes)))
        self._put(key, offsets, len(entry.chunks) - 1, file, chunk.start, chunk.nbytes)

    def add_value(self, item: ValueItem, file: str) -> None:
        """List a value of a file of values."""
        metadata, _ = self._torchs
        key = self._key(item.path)
        if key in self._tensors:
            raise CheckpointError(f"{key}: two values of the checkpoint have this key: give one of them another name")
        if item.tensor is None:
            self._tensors[key] = metadata.BytesStorageMetadata()
            self._put(key, None, None, file, item.start, item.nbytes)
            return
        dtype, shape = item.tensor
        size, offsets = self._size(shape), self._size((0,) * len(shape))
        self._tensors[key] = self._tensor(dtype, size)
        self._tensors[key].chunks.append(metadata.ChunkStorageMetadata(offsets, size))
        self._put(key, offsets, 0, file, item.start, item.nbytes)

    def _key(self, path: Path) -> str:
        key = key_of(path)
        self._paths[key] = path
        return key

    def _size(self, shape: Shape) -> Any:
        import torch

        return torch.Size(shape)

    def _tensor(self, dtype: str, size: Any) -> Any:
        metadata, _ = self._torchs
        return metadata.TensorStorageMetadata(metadata.TensorProperties(dtype=dtype_named(dtype)), size, [])

    def _put(self, key: str, offsets: Any, index: int | None, file: str, start: int, nbytes: int) -> None:
        metadata, filesystem = self._torchs
        place = filesystem._StorageInfo(f"{self.folder}{file}", start, nbytes)
        self._places[metadata.MetadataIndex(key, offsets, index)] = place

    def metadata(self, token: str) -> Metadata:
        """Torch's Metadata of all that was added."""
        metadata, _ = self._torchs
        made: Metadata = metadata.Metadata(
            self._tensors, self._paths, self._places, metadata.StorageMeta(save_id=token)
        )
        if "version" in {field.name for field in fields(metadata.Metadata)}:
            made.version = "1.0.0"
        return made
