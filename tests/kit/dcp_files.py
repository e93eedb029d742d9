"""Folders of torch.distributed.checkpoint, chunk by chunk, with torch's own classes, also such as no trainer would write."""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
import tempfile
import unittest
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

from fsdp_optim import CheckpointError
from fsdp_optim.foreign.dcp.reader import DCP
from fsdp_optim.foreign.reader import ForeignReader
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.base import Opened
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing.foreign_readers import read_elements

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


TALL = torch.arange(70, dtype=torch.float32).reshape(10, 7)
WIDE = torch.arange(48, dtype=torch.bfloat16).reshape(4, 12)
CUBE = torch.arange(120, dtype=torch.int64).reshape(4, 5, 6)
TURNED = torch.arange(24, dtype=torch.float64).reshape(4, 6).t()
MOMENT = TALL * 2


def fill(files: DcpFiles) -> DcpFiles:
    """A model in chunks of all kinds, an optimizer, and values of a trainer."""
    files.tensor(["model", "größe"], TALL, rows(TALL, 3, 0, 6, 1))
    files.tensor(["model", "wide"], WIDE, grid(WIDE, 3, 5))
    cubes = [((0, 0, 0), (4, 2, 6)), ((0, 2, 0), (2, 3, 6)), ((2, 2, 0), (2, 3, 1)), ((2, 2, 1), (2, 3, 5))]
    files.tensor(["model", "cube"], CUBE, cubes)
    files.tensor(["model", "turned"], TURNED, rows(TURNED, 2, 4))
    files.tensor(["model", "scalar"], torch.tensor(-0.0))
    files.tensor(["model", "flags"], torch.tensor([True, False, True]))
    files.tensor(["model", "none"], torch.empty(0, 4), [])
    files.tensor(["optim", "state", "größe", "exp_avg"], MOMENT, rows(MOMENT, 4, 6))
    files.tensor(["optim", "state", "größe", "step"], torch.tensor(3.0))
    files.value(["optim", "param_groups", 0, "lr"], 0.5)
    files.value(["optim", "param_groups", 0, "betas"], (0.5, 0.75))
    files.value(["optim", "param_groups", 0, "params"], ["größe"])
    return files.value(["epoch"], 3).tensor(["rng", "cpu"], torch.arange(5, dtype=torch.uint8))


MODEL = {
    "größe": TALL,
    "wide": WIDE,
    "cube": CUBE,
    "turned": TURNED,
    "scalar": torch.tensor(-0.0),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
}


def open_any(folder: Path) -> Opened:
    return Folder(folder, PROBE).open_any()


def opened(folder: Path) -> ForeignReader:
    files = open_any(folder)
    try:
        return DCP.open(files, verify=True)
    except BaseException:
        files.close()
        raise


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name) / "checkpoint"

    def check_refused(self, *words: str) -> str:
        """Opening is an error that has these words."""
        with self.assertRaises(CheckpointError) as caught:
            opened(self.folder).close()
        for word in words:
            self.assertIn(word, str(caught.exception))
        return str(caught.exception)

    def check_model(self, reader: ForeignReader) -> None:
        for name, tensor in MODEL.items():
            elements = read_elements(reader, reader.model[name], 0, tensor.numel())
            self.assertEqual(
                elements, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if elements else b"", name
            )
