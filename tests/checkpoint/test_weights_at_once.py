"""The weights of a load are written in one call of torch, where a Handle's `install` does nothing but copy."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import ClassVar

import torch
from kit.adapters import Claiming
from kit.compare import check_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

import fsdp_optim
from fsdp_optim.adapters import use_adapters
from fsdp_optim.layout import Whole
from fsdp_optim.plugins import Handle, Original
from fsdp_optim.testing import run_on_ranks


class Marked(torch.Tensor):
    """A subclass of Tensor, which torch's bulk operations may not support."""


class OwnInstall(Handle):
    """A Handle that does more than copy: it also counts, and wants 1-D tensors, as the protocol says."""

    shapes: ClassVar[list[torch.Size]] = []

    def install(self, flat: torch.Tensor) -> None:
        self.shapes.append(flat.shape)
        super().install(flat)


class OwnForm(Handle):
    """A Handle that makes state values in its own way, from 1-D tensors."""

    shapes: ClassVar[list[torch.Size]] = []

    def from_local(self, flat: torch.Tensor) -> torch.Tensor:
        self.shapes.append(flat.shape)
        return torch.cat(torch.split(flat, 1)).view(self.local_shape)


def handle_of(param: torch.Tensor, cls: type[Handle] = Handle) -> Handle:
    shape = tuple(param.shape)
    return cls(param, (Original(nn.Module(), "weight", Whole(shape, (0,))),), shape)


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        optim.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optim.step()
    return model, optim


class FilledTest(unittest.TestCase):
    def test_an_ordinary_parameter(self) -> None:
        param = nn.Parameter(torch.zeros(2, 3))
        filled = handle_of(param).filled()
        assert filled is not None
        self.assertEqual(
            (filled.data_ptr(), filled.shape, filled.requires_grad), (param.data_ptr(), param.shape, False)
        )

    def test_what_is_filled_one_by_one(self) -> None:
        """A Handle with an `install` of its own, a subclass of Tensor, and a tensor of inference mode outside of it."""
        with torch.inference_mode():
            of_inference = torch.zeros(2)
            self.assertIsNotNone(handle_of(of_inference).filled())
        self.assertIsNone(handle_of(of_inference).filled())
        self.assertIsNone(handle_of(torch.zeros(2).as_subclass(Marked)).filled())
        self.assertIsNone(handle_of(nn.Parameter(torch.zeros(2)), OwnInstall).filled())


def dtensors_of_inference(folder: str) -> None:
    """Load into DTensors that were made in inference mode, outside of it."""
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(3, 2)
    fsdp_optim.save(Path(folder) / "saved", model, None)
    with torch.inference_mode():
        other = distribute_module(nn.Linear(3, 2), mesh)
    fsdp_optim.load(Path(folder) / "saved", other, None)
    for name, param in other.named_parameters():
        check_same(name, param._local_tensor, model.get_parameter(name).detach())  # type: ignore[attr-defined]


class LoadTest(unittest.TestCase):
    def test_dtensors_made_in_inference_mode(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(dtensors_of_inference, 1, folder)

    def test_handles_with_methods_of_their_own_get_flat_tensors(self) -> None:
        for cls in (OwnInstall, OwnForm):
            with (
                self.subTest(cls.__name__),
                tempfile.TemporaryDirectory() as folder,
                use_adapters([Claiming(handle=cls)]),
            ):
                model, optim = trained(0)
                fsdp_optim.save(Path(folder) / "saved", model, optim)
                other, _ = trained(1)
                fresh = torch.optim.Adam(other.parameters(), lr=0.1)
                cls.shapes.clear()
                fsdp_optim.load(Path(folder) / "saved", other, fresh)
                self.assertEqual({len(shape) for shape in cls.shapes}, {1})
                check_same("model", other.state_dict(), model.state_dict())
                check_same("optimizer", fresh.state_dict(), optim.state_dict())

    def test_weights_made_in_inference_mode(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model, _ = trained(0)
            fsdp_optim.save(Path(folder) / "saved", model, None)
            with torch.inference_mode():
                other = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
            mixed = nn.Sequential(other[0], trained(1)[0][1])  # one half made in inference mode, the other not
            for inside in (False, True):
                with self.subTest(inside=inside), torch.inference_mode(mode=inside), torch.no_grad():
                    for param in mixed.parameters():
                        if param.is_inference() == inside:
                            param.zero_()
                    fsdp_optim.load(Path(folder) / "saved", mixed, None)
                check_same("model", mixed.state_dict(), model.state_dict())


if __name__ == "__main__":
    unittest.main()
