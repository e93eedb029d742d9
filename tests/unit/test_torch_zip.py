"""The archives that are written around tensors, beside those of torch.save: torch.load reads both alike."""

from __future__ import annotations

import io
import tempfile
import unittest
import zipfile
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.compare import check_same
from parameterized import parameterized

from fsdp_optim.foreign.archive import torch_zip
from fsdp_optim.foreign.archive.torch_zip import ALIGNMENT, TensorStub, frames_around, pickled
from fsdp_optim.formats.base.header_entries import DTYPES
from fsdp_optim.plugins import dtype_name

SHAPES = ((), (0,), (1,), (7,), (3, 4), (2, 0, 3), (1, 2, 3, 4), (5, 1))
NAMES = sorted(name for name, _ in DTYPES.values())


def stub_of(tensor: torch.Tensor, number: int = 0) -> TensorStub:
    return TensorStub(dtype_name(tensor.dtype), tuple(tensor.shape), number)


def archive(value: Any, tensors: list[torch.Tensor], stubs: list[TensorStub]) -> bytes:
    *before, end = frames_around(value, stubs)
    contents = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return b"".join(frame + content for frame, content in zip(before, contents, strict=True)) + end


def saved_by_torch(value: Any) -> zipfile.ZipFile:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return zipfile.ZipFile(buffer)


class TorchZipTest(unittest.TestCase):
    @parameterized.expand(NAMES)
    def test_one_tensor(self, name: str) -> None:
        """The same pickle as torch.save writes, and elements that torch.load reads, mapped and plain, without a pickle's code."""
        if not hasattr(torch, name):
            self.skipTest(f"this torch has no {name}")
        for shape in SHAPES:
            dtype = getattr(torch, name)
            numbers = torch.randint(0, 2, (prod(shape) * dtype.itemsize,), dtype=torch.uint8)
            tensor = numbers.view(dtype).reshape(shape)
            self.assertEqual(pickled(stub_of(tensor)), saved_by_torch(tensor).read("archive/data.pkl"), shape)
            data = archive(stub_of(tensor), [tensor], [stub_of(tensor)])
            self.check(data, tensor)

    def check(self, data: bytes, wanted: Any) -> None:
        check_same("torch.load", torch.load(io.BytesIO(data), weights_only=True), wanted)
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(data)
            check_same("torch.load", torch.load(file.name, weights_only=True), wanted)
            check_same("torch.load", torch.load(file.name, weights_only=True, mmap=True), wanted)

    def test_a_tree(self) -> None:
        """Dicts, lists and numbers around several tensors."""
        tensors = [torch.randn(3, 5), torch.arange(7, dtype=torch.int64), torch.zeros(0), torch.tensor(2.5).bfloat16()]
        stubs = [stub_of(tensor, number) for number, tensor in enumerate(tensors)]

        def tree(of: Any) -> Any:
            return {
                "model": OrderedDict(a=of[0], b=of[1]),
                "optimizer": {
                    "state": {0: {"step": of[3], "x": of[2]}},
                    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
                },
            }

        data = archive(tree(stubs), tensors, stubs)
        self.check(data, tree(tensors))
        self.assertEqual(zipfile.ZipFile(io.BytesIO(data)).read("archive/version"), b"3\n")

    def test_elements_are_aligned(self) -> None:
        """Each tensor begins at a multiple of 64 bytes of the archive."""
        stubs = [TensorStub("uint8", (n,), n) for n in (1, 63, 64, 65, 200)]
        at = 0
        for stub, frame in zip(stubs, frames_around(None, stubs), strict=False):
            at += len(frame)
            self.assertEqual(at % ALIGNMENT, 0)
            at += stub.nbytes

    def test_tensors_and_files_above_4_gib(self) -> None:
        """The sizes and places that need 64 bits, in a sparse file, and more records than 16 bits count."""
        big = (1 << 32) + 5
        stubs = [TensorStub("uint8", (3,), 0), TensorStub("uint8", (big,), 1), TensorStub("uint8", (4,), 2)]
        *before, end = frames_around(stubs, stubs)
        with tempfile.NamedTemporaryFile() as file:
            at = 0
            for stub, frame in zip(stubs, before, strict=True):
                file.seek(at)
                file.write(frame + b"\1\2\3")
                at += len(frame) + stub.nbytes
                file.seek(at - 1)
                file.write(b"\7")
            file.write(end)
            file.flush()
            small, large, last = torch.load(file.name, weights_only=True, mmap=True)
            self.assertEqual(small.tolist(), [1, 2, 7])
            self.assertEqual((large.numel(), large[:3].tolist(), large[-2:].tolist()), (big, [1, 2, 3], [0, 7]))
            self.assertEqual(last.tolist(), [1, 2, 3, 7])

    def test_many_records(self) -> None:
        """More records than 16 bits count, with a lower limit."""
        tensors = [torch.tensor(n, dtype=torch.int32) for n in range(9)]
        stubs = [stub_of(tensor, number) for number, tensor in enumerate(tensors)]
        with mock.patch.object(torch_zip, "_MOST_16", 8):
            data = archive(stubs, tensors, stubs)
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        self.assertEqual([scalar.item() for scalar in loaded], list(range(9)))
        self.assertIn(b"PK\6\6", data)
