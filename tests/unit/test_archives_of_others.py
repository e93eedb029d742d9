"""Archives that torch.load reads, written in other ways than torch's own: each tensor is where its writer has put it."""

from __future__ import annotations

import io
import pickletools
import tempfile
import unittest
import zipfile
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_same, error_text
from parameterized import parameterized
from torch import nn

import fsdp_optim


class Stream(io.RawIOBase):
    """A file that cannot seek: what it holds has its sizes behind it, in a descriptor."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


class Holding(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.zeros_like(tensor))


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def written_again(data: bytes, folder: str, into: Any, **options: Any) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(into, "w", zipfile.ZIP_STORED) as other:
        for name in archive.namelist():
            with other.open(f"{folder}/{name.partition('/')[2]}", "w", **options) as record:
                record.write(archive.read(name))


class ArchivesOfOthers(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name, "model.pt")

    def check(self, data: bytes, tensors: dict[str, torch.Tensor]) -> None:
        self.path.write_bytes(data)
        check_same("torch.load", torch.load(self.path, weights_only=True), tensors)
        model = Holding(tensors)
        fsdp_optim.load(self.path, model)
        check_same("load", dict(model.state_dict()), tensors)
        self.assertTrue(fsdp_optim.verify(self.path))

    @parameterized.expand([("stream", True), ("stream, 64 bits", True), ("file", False), ("file, 64 bits", False)])
    def test_zip_archives(self, kind: str, is_stream: bool) -> None:
        """Of any length of name: headers and descriptors have other lengths than torch's, and may end at the same bytes."""
        tensors = {f"w{number}": torch.arange(number * 100.0, number * 100 + 6 + number) for number in range(4)}
        data = saved(tensors)
        for length in range(1, 68):
            into: Any = Stream() if is_stream else io.BytesIO()
            written_again(data, "a" * length, into, force_zip64="64 bits" in kind)
            self.check(bytes(into.data) if is_stream else into.getvalue(), tensors)

    def test_a_storage_of_two_sizes(self) -> None:
        """Of one storage, the second tensor says another size: it would get what lies behind it in the file."""
        whole = torch.arange(8.0)
        data = saved({"a": whole, "b": whole[0:8], "other": torch.full((64,), -7.0)})
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            pickled = bytearray(archive.read("archive/data.pkl"))
            operations = list(pickletools.genops(bytes(pickled)))
            first, last = (next(k for k, each in enumerate(operations) if each[1] == name) for name in ("b", "other"))
            for code, argument, at in operations[first:last]:
                if code.name == "BININT1" and argument == 8 and at is not None:
                    pickled[at + 1] = 40
            changed = io.BytesIO()
            with zipfile.ZipFile(changed, "w") as other:
                for name in archive.namelist():
                    other.writestr(name, bytes(pickled) if name.endswith("data.pkl") else archive.read(name))
        self.path.write_bytes(changed.getvalue())
        model = Holding({"a": torch.zeros(8), "b": torch.zeros(40), "other": torch.zeros(64)})
        kind, text = error_text(lambda: fsdp_optim.load(self.path, model))
        check_same(
            "refused", (kind, "['b']" in text, "32 bytes" in text, "160" in text), ("CheckpointError", *[True] * 3)
        )

    def test_empty_tensors_of_one_storage_in_files_of_old_torch(self) -> None:
        values = torch.empty(0, dtype=torch.complex128)
        tensors = {"whole": values, "real": values.real, "imag": values.imag}
        self.check(saved(tensors, _use_new_zipfile_serialization=False), tensors)


if __name__ == "__main__":
    unittest.main()
