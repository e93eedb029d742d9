"""Several models and their optimizers, in several wrappers, and the same training of each without any wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

SIZES = {"actor": (6, 10), "critic": (6, 5), "reference": (6, 10), "ema": (6, 10)}
TRAINED = {"actor": "AdamW", "critic": "SGD"}


class Net(nn.Module):
    """With a buffer and a value of its own; sizes that no number of ranks divides."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(7, width), nn.Linear(width, out, bias=False)
        self.register_buffer("seen", torch.zeros(3))
        self.extra = 0

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


def numbers(like: torch.Tensor, first: float) -> torch.Tensor:
    return torch.arange(like.numel(), dtype=like.dtype).reshape(like.shape) / 64 + first


def plain(name: str, filled: bool = True) -> Net:
    """The model of a name; `filled`: with distinct values, else with others."""
    model = Net(*SIZES[name])
    first = 1.0 + sorted(SIZES).index(name) if filled else -9.0
    with torch.no_grad():
        for number, tensor in enumerate((*model.parameters(), *model.buffers())):
            tensor.copy_(numbers(tensor, first * 10 + number))
    model.extra = int(first)
    return model


def wrapped(model: Net, how: str) -> Any:
    size = dist.get_world_size() if dist.is_initialized() else 1
    if how == "FSDP2":
        fully_shard(model.inner)
        return fully_shard(model)
    if how == "HSDP":
        return fully_shard(model, mesh=init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("a", "b")))
    return nn.parallel.DistributedDataParallel(model) if how == "DDP" else model


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """With two groups, and a step count or none."""
    groups = [
        {"params": [param for key, param in model.named_parameters() if "bias" not in key], "weight_decay": 0.25},
        {"params": [param for key, param in model.named_parameters() if "bias" in key], "weight_decay": 0.0},
    ]
    if TRAINED[name] == "AdamW":
        return torch.optim.AdamW(groups, lr=0.5)
    return torch.optim.SGD(groups, lr=0.25, momentum=0.5)


def train(model: nn.Module, optim: torch.optim.Optimizer, num: int) -> None:
    """Steps with given gradients, which are the same whatever is wrapped around the model."""
    for step in range(num):
        for number, param in enumerate(model.parameters()):
            grad = numbers(torch.empty(param.shape), number - step / 4)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = grad
        optim.step()
        optim.zero_grad()
    for group in optim.param_groups:
        group["lr"] /= 2


def models(ways: Mapping[str, str], *, filled: bool) -> tuple[dict[str, Any], dict[str, torch.optim.Optimizer]]:
    """The models of these names, each in a wrapper, with optimizers for those that train; trained where `filled`."""
    live = {name: wrapped(plain(name, filled), how) for name, how in ways.items()}
    optims = {name: optimizer(name, live[name]) for name in ways if name in TRAINED}
    for name in optims if filled else ():
        train(live[name], optims[name], 1 + sorted(TRAINED).index(name))
    return live, optims


def complete(value: Any) -> Any:
    return (
        value.full_tensor()
        if isinstance(value, DTensor)
        else value.detach().clone()
        if isinstance(value, torch.Tensor)
        else value
    )


def content(model: Any, optim: torch.optim.Optimizer | None) -> dict[str, Any]:
    """All that a model and an optimizer have, without their cuts."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    parts = {"weights": {name: complete(tensor) for name, tensor in inner.state_dict().items()}}
    if optim is not None:
        names = {id(param): name for name, param in inner.named_parameters()}
        state = {names[id(param)]: values for param, values in optim.state.items()}
        parts["state"] = {
            name: {key: complete(state[name][key]) for key in sorted(state[name])} for name in sorted(state)
        }
        parts["groups"] = [
            {key: value for key, value in sorted(group.items()) if key != "params"} for group in optim.param_groups
        ]
    return parts


def wanted(names: Mapping[str, Any] | tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What models of these names have after the same training, without any wrapper."""
    live, optims = models(dict.fromkeys(names, "plain"), filled=True)
    return {name: content(live[name], optims.get(name)) for name in live}
