"""A model in fully_shard, an optimizer that has stepped, and the trees that trainers give torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kit.cut_trees import complete


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    for _ in range(2):
        model(torch.full((2, 5), 1.0 + seed)).sum().backward()
        optim.step()
        optim.zero_grad()
    return model, optim


class AppState:
    """What the field writes around a model and an optimizer."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.model, self.optim, self.step = model, optim, 0

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]


def everything(model: nn.Module, optim: torch.optim.Optimizer) -> Any:
    return [complete(tree) for tree in get_state_dict(model, optim)]


def nested(model: nn.Module, optim: Any) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(model, optim), strict=True)) | {
        "step": 7,
        "note": {"a": [1, "b"]},
    }


def app(model: nn.Module, optim: Any) -> dict[str, Any]:
    return {"app": AppState(model, optim)}
