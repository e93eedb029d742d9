"""Optimizers and models whose state values are not shaped like their parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kit.local_parts import local_of
from kit.trained import Trained


class Blockwise(torch.optim.Optimizer):
    """An optimizer like quantised optimizers: numbers per block of this rank's elements, a table, and an ordinary moment."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                local = local_of(param.grad).reshape(-1)
                blocks = max(-(-local.numel() // 4), 1)
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["moment"] = torch.zeros_like(param)
                    state["absmax"] = torch.zeros(blocks, 2)
                    state["codes"] = torch.zeros(blocks * 4 + 1, dtype=torch.uint8)
                    state["table"] = [0.5, "signed"]
                state["step"] += 1
                state["moment"].add_(param.grad)
                for i, block in enumerate(local.split(4) if local.numel() else ()):
                    state["absmax"][i] += torch.stack([block.abs().max(), block.sum()])
                codes = (local * 16).abs().clamp(0, 255).to(torch.uint8)
                state["codes"][1 : 1 + len(codes)] = codes


OPAQUE = ("absmax", "codes", "table")


def opaque_state(trained: Trained) -> list[dict[str, Any]]:
    return [{name: trained.optim.state[param].get(name) for name in OPAQUE} for param in trained.params]


class Wide(nn.Module):
    """Large enough for torchao, which quantises from 4,096 elements on, by blocks of 256."""

    units = ("first", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.last = nn.Linear(128, 64, bias=False)


def eight_bits(params: Any) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=0.01)
