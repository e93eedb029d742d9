"""`max_file_size` counts every byte of a file: its header, with names of any length, and what a format has between tensors."""

from __future__ import annotations

import pickle
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from kit.checkpoints import load, save
from kit.compare import check_same
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Trained
from parameterized import parameterized
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import fsdp_optim
from fsdp_optim.formats.base.header import Header

QUIET: dict[str, Any] = {"durable": False, "progress": False, "overwrite": True}
NAMES = {
    "short names": [str(number) for number in range(40)],
    "long names": [f"{'layer' * 40}{number}" for number in range(40)],
    "names that JSON escapes": [f'größe "{number}"\\\t' for number in range(40)],
}


class Named(nn.Module):
    """Parameters with given names, of many sizes, some of them empty or without dimensions."""

    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for number, name in enumerate(names):
            shape = [(), (0,), (1, 3), (number + 1,), (2, number, 2)][number % 5]
            self.register_parameter(
                name, nn.Parameter(torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape))
            )


def tensors_in(folder: Path) -> dict[str, list[str]]:
    """The keys of the tensors in each file, as the formats' own readers find them."""
    by_file: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            by_file[path.name] = list(file.keys())
    if (folder / ".metadata").exists():
        saved = pickle.loads((folder / ".metadata").read_bytes())
        for index, place in saved.storage_data.items():
            keys = by_file.setdefault(place.relative_path, [])
            if isinstance(saved.state_dict_metadata[index.fqn], TensorStorageMetadata) and index.fqn not in keys:
                keys.append(index.fqn)
    return {name: keys for name, keys in by_file.items() if keys}


class FileSizesTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fsdp_optim_sizes_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    @parameterized.expand([(format, names) for format in ("safetensors", "dcp") for names in NAMES])
    def test_no_file_is_larger(self, format: str, names: str) -> None:
        """Or it has one tensor."""
        model, target = Named(NAMES[names]), Named(NAMES[names])
        for most in (1, 200, 700, 1000, 2040, 4096, 5001, 20_000, 1 << 20):
            path = self.root / str(most)
            fsdp_optim.save(
                path, model, format=format, **as_options(fsdp_optim.SaveOptions, **QUIET, max_file_size=most)
            )
            with self.subTest(most=most):
                self.check_sizes(path, most)
            with torch.no_grad():
                for param in target.parameters():
                    param.fill_(-1)
            fsdp_optim.load(path, target)
            check_same("weights", dict(target.named_parameters()), dict(model.named_parameters()))
            fsdp_optim.convert(
                path,
                f"{path}-again",
                format=format,
                **as_options(fsdp_optim.ConvertOptions, **QUIET, max_file_size=2 * most),
            )
            self.check_sizes(Path(f"{path}-again"), 2 * most)

    def check_sizes(self, folder: Path, most: int) -> None:
        for name, keys in tensors_in(folder).items():
            nbytes = (folder / name).stat().st_size
            self.assertTrue(nbytes <= most or len(keys) == 1, f"{name}: {nbytes} of {most} bytes, {len(keys)} tensors")

    def test_the_moments_too(self) -> None:
        """Whose first file has the param groups in its header."""
        trained = Trained("plain", adam, 2)
        for most in (300, 1000, 3000):
            path = self.root / str(most)
            save(path, trained, max_file_size=most)
            self.check_sizes(path, most)
            load(path, trained)

    def test_as_many_as_fit(self) -> None:
        """The sizes that are planned are those of the headers, to the byte: one byte less makes another file."""
        tensors = [(name, "float32", (number, 3)) for number, name in enumerate(NAMES["names that JSON escapes"])]
        metadata = {"format": "pt", "param_groups": '[{"lr": 0.1}]'}
        every = Header.of(tensors, metadata)
        for num in range(2, len(tensors) + 1):
            whole = Header.of(tensors[:num], metadata)
            nbytes = len(whole.encoded()) + whole.data_nbytes
            self.assertGreaterEqual(next(every.files_within(nbytes, {})), num)
            self.assertLess(next(every.files_within(nbytes - 1, {})), num)
