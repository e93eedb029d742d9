"""The model that tests/data/deepspeed/make.py trains with DeepSpeed, and the same training without DeepSpeed.

Every gradient is a small multiple of a power of two and every initial weight is exact in 16 bits, so that a run of DeepSpeed has
the same fp32 weights and moments, whatever its stage, its dtype and its number of ranks.
"""

from __future__ import annotations

import torch
from torch import nn

STEPS = 3
FROZEN, TIED = "frozen.weight", {"head.weight": "emb.weight"}


class Leaf(nn.Module):
    """Parameters of given shapes, whose gradients are constants."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(exact(shape, len(name) + sum(shape))))

    def forward(self, scale: float) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32)
        for param in self.parameters(recurse=False):
            total = total + (param * (exact(param.shape, param.dim()) * scale).to(param.dtype)).float().sum()
        return total


class Normed(Leaf):
    """A leaf with buffers, one of which is not saved."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__(**shapes)
        self.register_buffer("running", torch.arange(3.0) / 4)
        self.register_buffer("count", torch.tensor(2**40 + 3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = Leaf(weight=(7, 5))
        leaves = [Leaf(weight=(2, 3, 2), bias=(2,)), Leaf(weight=(6,), bias=(1, 1))]
        self.body = nn.ModuleList(
            [Leaf(weight=(5, 5), bias=(5,)), Normed(weight=(3, 5), bias=(3,), gain=(1,)), *leaves]
        )
        self.frozen = Leaf(weight=(4, 3))
        self.head = Leaf(weight=(7, 5))
        self.units = ("body.0", "body.1", "body.2", "body.3", "frozen", "")
        self.head.weight = self.emb.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, scale: float) -> torch.Tensor:
        leaves = [self.emb, *self.body, self.frozen, self.head]
        return torch.stack([leaf(scale) for leaf in leaves]).sum()


def exact(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Numbers that every floating dtype has exactly: multiples of 1/8 between -1 and 1."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * 37 + seed) % 17 - 8).reshape(shape).float() / 8


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in named if name.endswith("weight")], "weight_decay": 0.125},
        {"params": [param for name, param in named if not name.endswith("weight")], "weight_decay": 0.0, "lr": 0.25},
    ]
    return torch.optim.AdamW(groups, lr=0.0625, betas=(0.5, 0.75))


def oracle() -> dict[str, torch.Tensor]:
    """Training without DeepSpeed, in fp32: weights under the parameters' names, moments under `state.<FQN>.<name>`."""
    model = Model()
    optim = optimizer(model)
    for step in range(STEPS):
        optim.zero_grad()
        model(2.0**-step).backward()
        optim.step()
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        values.update({f"state.{name}.{key}": value for key, value in optim.state.get(param, {}).items()})
    return values
