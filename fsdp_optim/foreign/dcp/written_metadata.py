"""Torch's metadata of a DCP folder that is written: the tensors, their chunks, and the values, each with its place.

Each key is that of one value, and the names of the trainer's values are known beside weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.dcp.values import KEYS, OF_RANKS, Path, ValueItem, key_of
from fsdp_optim.formats.base.protocols import PlannedTensor
from fsdp_optim.layout import Shape
from fsdp_optim.tensors.memory import dtype_named

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_BEGINS = (f"{OF_RANKS}.", f"{KEYS}.")
_MOST_NAMES_NBYTES = 512 << 10  # half of what the summary of `.metadata` may have


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
    _sizes: dict[Shape, Any] = field(default_factory=dict)
    _properties: dict[str, Any] = field(default_factory=dict)
    _files: dict[str, str] = field(default_factory=dict)
    _last_place: tuple[object, Any] = (None, None)

    @cached_property
    def _torchs(self) -> Any:
        """The modules with torch's classes, which take long to import."""
        from torch.distributed.checkpoint import filesystem, metadata

        return metadata, filesystem

    @cached_property
    def _bytes(self) -> Any:
        """What is listed of each value that is no tensor."""
        metadata, _ = self._torchs
        return metadata.BytesStorageMetadata()

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
            raise self._twice(key)
        if item.tensor is None:
            self._tensors[key] = self._bytes
            self._put(key, None, None, file, item.start, item.nbytes)
            return
        dtype, shape = item.tensor
        size, offsets = self._size(shape), self._size((0,) * len(shape))
        self._tensors[key] = self._tensor(dtype, size)
        self._tensors[key].chunks.append(metadata.ChunkStorageMetadata(offsets, size))
        self._put(key, offsets, 0, file, item.start, item.nbytes)

    def _key(self, path: Path) -> str:
        key = key_of(path)
        if self._paths.setdefault(key, path) != path:
            raise self._twice(key)
        return key

    def _twice(self, key: str) -> CheckpointError:
        return CheckpointError(f"{key}: two values of the checkpoint have this key: give one of them another name")

    def _size(self, shape: Shape) -> Any:
        """Return a torch.Size, one object for equal shapes, which a pickle has once."""
        size = self._sizes.get(shape)
        if size is None:
            import torch

            size = self._sizes[shape] = torch.Size(shape)
        return size

    def _tensor(self, dtype: str, size: Any) -> Any:
        metadata, _ = self._torchs
        properties = self._properties.get(dtype)
        if properties is None:
            properties = self._properties[dtype] = metadata.TensorProperties(dtype=dtype_named(dtype))
        return metadata.TensorStorageMetadata(properties, size, [])

    def _put(self, key: str, offsets: Any, index: int | None, file: str, start: int, nbytes: int) -> None:
        metadata, filesystem = self._torchs
        if self._last_place[0] != (file, start, nbytes):  # neighbours are often one value under several keys
            path = self._files.setdefault(file, f"{self.folder}{file}")  # one object, which a pickle has once
            self._last_place = (file, start, nbytes), filesystem._StorageInfo(path, start, nbytes)
        self._places[metadata.MetadataIndex(key, offsets, index)] = self._last_place[1]

    def metadata(self, token: str) -> Metadata:
        """Torch's Metadata of all that was added."""
        metadata, _ = self._torchs
        made: Metadata = metadata.Metadata(
            self._tensors, self._paths, self._places, metadata.StorageMeta(save_id=token)
        )
        if "version" in {field.name for field in fields(metadata.Metadata)}:
            made.version = "1.0.0"
        return made


def check_keys(paths: Iterable[Path]) -> None:
    """Refuse values that torch.distributed.checkpoint would save under one key, whose parts are joined by dots."""
    known: dict[str, Path] = {}
    for path in paths:
        key = key_of(path)
        other = known.setdefault(key, path)
        if other is not path:
            raise CheckpointError(
                f"{key}: {_named(other)} and {_named(path)} both have this key in a DCP checkpoint, which joins names by "
                'dots: give one of them another name, or format="safetensors"'
            )
        if key.startswith(_BEGINS) and path[0] not in (OF_RANKS, KEYS):
            raise CheckpointError(
                f"{_named(path)}: a DCP checkpoint has its own values under keys that begin with {OF_RANKS!r} or {KEYS!r}: give "
                "the value another name"
            )


def names_beside_weights(names: Sequence[str]) -> list[str]:
    """Return the names of the trainer's values as a summary records them.

    Raises CheckpointError where they are too many for a summary.
    """
    recorded = [ascii(name) for name in names]
    nbytes = sum(map(len, recorded))
    if nbytes > _MOST_NAMES_NBYTES:
        raise CheckpointError(
            f"state=: has {len(names)} names of {nbytes} bytes, and with the weights at the top level a checkpoint records at "
            f"most {_MOST_NAMES_NBYTES} bytes of them: put the values into one dict under one name"
        )
    return recorded


def _named(path: Path) -> str:
    return "".join(f"[{part!r}]" for part in path)
