"""What a load gives has the strides of the parameter: fused kernels pair a parameter with its state by the order in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.compare import check_same
from kit.ways import by_file, by_scatter, by_transfer
from kit.wraps import in_ddp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_optim import (
    gather_full_optim_state_dict,
    get_shard_from_optim_state_dict,
    load_optim_state_dict,
)
from fsdp_optim.tensors.memory import laid_out_like
from fsdp_optim.testing import run_on_ranks

STEPS = 3


class Strided(nn.Module):
    """A convolution with channels_last weights, a transposed weight, one with a dimension of one, and an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(6, 5, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(7, 5).t())
        self.thin = nn.Parameter(torch.randn(1, 7, 1).transpose(0, 1))
        self.last = nn.Linear(7, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.conv(images).mean((2, 3)) @ self.transposed
        return self.last(torch.tanh(features) * self.thin.sum((1, 2)))


def train(model: nn.Module, optim: torch.optim.Optimizer, first: int) -> None:
    for step in range(first, first + STEPS):
        torch.manual_seed(step)
        optim.zero_grad()
        model(torch.randn(4, 6, 5, 5)).square().sum().backward()
        optim.step()


def made(wrap: Callable[[nn.Module], Any], **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = wrap(Strided())
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def strides(optim: torch.optim.Optimizer) -> list[str]:
    """The state values whose strides are not those of their parameter."""
    differing = []
    for number, (param, values) in enumerate(optim.state.items()):
        for name, value in values.items():
            if value.shape != param.shape or not value.dim():
                continue
            pairs = [(value.stride(), param.stride())]
            if isinstance(value, DTensor):
                pairs.append((value._local_tensor.stride(), param._local_tensor.stride()))
            differing += [f"{number} {name}: {own}, parameter {of}" for own, of in pairs if own != of]
    return differing


def by_shard(model: Any, optim: Any, new: Any, new_optim: Any, path: Path) -> None:
    full = gather_full_optim_state_dict(model, optim, recipient_rank=None)
    load_optim_state_dict(new_optim, get_shard_from_optim_state_dict(new, new_optim, full))


def by_shard_and_torch(model: Any, optim: Any, new: Any, new_optim: Any, path: Path) -> None:
    full = gather_full_optim_state_dict(model, optim, recipient_rank=None)
    new_optim.load_state_dict(get_shard_from_optim_state_dict(new, new_optim, full))


WAYS = [by_shard, by_shard_and_torch, by_scatter, by_transfer, by_file]


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def check_way(wrap: Any, way: Any, path: Path, options: dict[str, bool]) -> None:
    """A run that goes through `way` after three steps is equal to one that does not, bit for bit."""
    model, optim = made(wrap, **options)
    train(model, optim, 0)
    new, new_optim = made(wrap, **options)
    with torch.no_grad():
        for new_param, trained_param in zip(new.parameters(), model.parameters(), strict=True):
            new_param.copy_(trained_param)
    way(model, optim, new, new_optim, path)
    what = f"{way.__name__}, {options}"
    assert not strides(new_optim), f"{what}: {strides(new_optim)}"
    train(new, new_optim, STEPS)
    train(model, optim, STEPS)
    for name, param in model.state_dict().items():
        check_same(f"{what}: {name}", new.state_dict()[name], param)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "plain"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_plain_model_trains_on(way, options, tmp_path):
    check_way(as_it_is, way, tmp_path / "checkpoint", options)


# torch FSDP1 refuses parameters that are not contiguous, and so does FSDP2.
def _wrapped(folder: str) -> None:
    for way in WAYS:
        check_way(in_ddp, way, Path(folder) / way.__name__, {"fused": True})
    _transposed_dtensors(Path(folder))


def _transposed_dtensors(folder: Path) -> None:
    """Tensor parallel weights that are transposed on each rank."""
    mesh = init_device_mesh("cpu", (2,))

    def wrap() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        module = nn.Module()
        whole = torch.randn(5, 7)
        cut = distribute_tensor(whole, mesh, [Shard(1)])
        local = cut.to_local().t().contiguous().t()
        module.weight = nn.Parameter(
            DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=cut.shape, stride=(1, 5))
        )
        return module, torch.optim.AdamW(module.parameters(), lr=0.05, fused=True)

    def step(module: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        module.weight.grad = distribute_tensor(torch.randn(5, 7), mesh, [Shard(1)])
        optim.step()

    for way in WAYS:
        (model, optim), (new, new_optim) = wrap(), wrap()
        step(model, optim, 1)
        with torch.no_grad():
            new.weight._local_tensor.copy_(model.weight._local_tensor)
        way(model, optim, new, new_optim, folder / f"transposed {way.__name__}")
        assert not strides(new_optim), f"{way.__name__}: {strides(new_optim)}"
        step(model, optim, 2)
        step(new, new_optim, 2)
        check_same(f"transposed {way.__name__}", new.weight.to_local(), model.weight.to_local())


def test_wrapped_models_train_on(tmp_path):
    run_on_ranks(_wrapped, 2, str(tmp_path))


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(3, 4, 2, 5).to(memory_format=torch.channels_last),
        torch.empty(4, 3).t(),
        torch.empty(2, 3, 4).permute(2, 0, 1),
        torch.empty(4, 6)[:, ::2],  # with gaps: torch's own optimizers make dense state
        torch.empty(3, 1).expand(3, 4),  # overlapping
        torch.empty(0, 3).t(),
        torch.empty(1, 1),
        torch.empty(()),
    ],
    ids=lambda like: f"{list(like.shape)} {like.stride()}",
)
def test_elements_keep_their_places_and_memory(like):
    flat = torch.arange(like.numel(), dtype=torch.float64)
    wanted = copy.deepcopy(flat).view(like.shape)
    got = laid_out_like(flat, like)
    assert got.stride() == torch.zeros_like(like).stride()
    assert got.data_ptr() == flat.data_ptr()
    check_same("elements", got.contiguous(), wanted)
