"""Every dtype that safetensors and torch both have is saved, loaded, and the same for the safetensors package."""

from __future__ import annotations

import unittest
from pathlib import Path

import torch
from kit.compare import check_same
from kit.folders import InFolder
from safetensors.torch import load_file, save_file
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.formats.base.header import Header, parse_header
from fsdp_optim.formats.base.header_entries import DTYPES


class Holding(nn.Module):
    """A buffer of each dtype, with the same bytes; `first`: the first byte."""

    def __init__(self, first: int) -> None:
        super().__init__()
        for name, nbytes in DTYPES.values():
            data = torch.arange(first, first + 24 * nbytes, dtype=torch.uint8)
            data = data % 2 if name == "bool" else data
            self.register_buffer(f"of_{name}", data.view(getattr(torch, name)).view(4, 6))


def bytes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.contiguous().view(torch.uint8) for name, buffer in model.named_buffers()}


class SmallDtypesTest(InFolder):
    root: Path

    def test_there_and_back(self) -> None:
        saved, loaded = Holding(1), Holding(0)
        fsdp_optim.save(self.root / "ours", saved, options=fsdp_optim.SaveOptions(durable=False))
        stored = load_file(self.root / "ours" / "model.safetensors")
        check_same("dtypes and shapes", described(stored), described(dict(saved.named_buffers())))
        check_same("their reader", {k: t.view(torch.uint8) for k, t in sorted(stored.items())}, sorted_bytes(saved))
        fsdp_optim.load(self.root / "ours", loaded, options=fsdp_optim.LoadOptions(compare=True))
        check_same("ours", bytes_of(loaded), bytes_of(saved))

    def test_from_their_writer(self) -> None:
        saved, loaded = Holding(1), Holding(0)
        save_file(dict(saved.named_buffers()), self.root / "theirs.safetensors")
        fsdp_optim.load(self.root / "theirs.safetensors", loaded, options=fsdp_optim.LoadOptions(compare=True))
        check_same("ours", bytes_of(loaded), bytes_of(saved))

    def test_pairs_of_numbers(self) -> None:
        """Two numbers of F4 are one byte, so an odd number of them, and a tensor without dimensions, cannot be."""
        for shape in ("[3]", "[2,3]", "[]"):
            text = b'{"a":{"dtype":"F4","shape":%s,"data_offsets":[0,3]}}' % shape.encode()
            with self.assertRaisesRegex(CheckpointError, "a is F4 of shape"):
                parse_header("x", text, 3)
        with self.assertRaisesRegex(CheckpointError, "a: .* without dimensions"):
            Header.of([("a", "float4_e2m1fn_x2", ())], {})

    def test_dtypes_that_torch_lacks(self) -> None:
        """A dtype of six bits is refused by name."""
        text = b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
        with self.assertRaisesRegex(CheckpointError, "a has the dtype 'F6_E2M3'"):
            parse_header("x", text, 3)


def described(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in sorted(tensors.items())}


def sorted_bytes(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(sorted(bytes_of(model).items()))


if __name__ == "__main__":
    unittest.main()
