"""Files of torch.save, written and changed by hand, and a store that counts what is read of one."""

from __future__ import annotations

import io
import re
import tempfile
import unittest
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fsdp_optim.foreign.archive.torch_archive import TorchArchive, read_archive
from fsdp_optim.storage.base import Opened
from fsdp_optim.storage.posix.opened_any import OpenFiles

_OTHERS = re.compile(r"torch\.(q|bits|complex32|u?int[1-7]$|float4)")  # quantized numbers, and parts of bytes
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype) and not _OTHERS.match(str(v))}, key=str)


def numbers(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random bytes; of zeros and ones for bools."""
    numel = int(np.prod(shape, dtype=np.int64))
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), dtype=torch.uint8).bool()
    return torch.randint(0, 255, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def values() -> dict[str, Any]:
    """Every kind of value that torch.load accepts with weights_only=True."""
    torch.manual_seed(1)
    tied, base = nn.Parameter(torch.randn(3, 5)), torch.randn(6, 4)
    model = OrderedDict(a=tied, b=tied, plain=torch.randn(2).requires_grad_())
    model._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    with_attribute = torch.ones(2)
    with_attribute.tag = "x"  # type: ignore[attr-defined]
    return {
        "dtypes": {str(dtype): numbers((3, 2), dtype) for dtype in DTYPES},
        "model": model,
        "views": [base, base[2:4], base[:, 1:3], base.t(), base[5], base.view(2, 12), base[1, 1:]],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "small": [torch.tensor(3.5), torch.zeros(0), torch.zeros(0, 4), torch.zeros(2, 0, 3), torch.tensor(True)],
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "attribute": with_attribute,
        "plain": [
            1,
            -(2**80),
            1.5,
            float("inf"),
            "text \u20ac",
            b"bytes",
            bytearray(b"more"),
            None,
            True,
            2j,
            (1, (2,)),
            (),
        ],
        "sets": [{1, "b"}, set(), {(1, 2)}],
        "torch": [torch.Size([2, 3]), torch.float16, torch.device("cuda", 1), torch.strided],
        "counter": Counter("abca"),
        1: {2: {"three": [{}, [], ""]}},
    }


def written(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, file, **options)
    return file.getvalue()


def zipped(data: bytes, compression: int = zipfile.ZIP_STORED, **changed: bytes) -> bytes:
    """The same archive as another program writes it, with other contents of records."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, changed.get(name.partition("/")[2].replace(".", "_"), old.read(name)))
    return file.getvalue()


def same(a: Any, b: Any) -> None:
    """Raise AssertionError for two values that differ in anything."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (a, b)
        a, b = (x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for x in (a, b))
        assert torch.equal(a, b), (a, b)
        return
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert list(a) == list(b), (a, b)
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), (a, b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b, (a, b)


class ArchiveTestCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def opened(self, data: bytes) -> Opened:
        (self.folder / "a.pt").write_bytes(data)
        opened = OpenFiles.at(self.folder)
        self.addCleanup(opened.close)
        return opened

    def archive(self, data: bytes, **options: Any) -> TorchArchive:
        return read_archive(self.opened(data), "a.pt", **options)

    def whole(self, data: bytes, **options: Any) -> Any:
        with closing(self.opened(data)) as opened:
            archive = read_archive(opened, "a.pt", **options)
            return archive.materialised(archive.value)
