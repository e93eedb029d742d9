"""A small language model that trains, with the losses of each step: the same on every rank and at every world size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, NUM_BLOCKS = 23, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Embedding, blocks, head; `units`: the modules that get a wrapper of their own."""

    units = (*(f"blocks.{number}" for number in range(NUM_BLOCKS)), "")

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.rand(param.shape, generator=generator) - 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Biases and norms without weight decay, as is usual. Only for wrappers that keep the original parameters."""
    named = list(model.named_parameters())  # by name, because a shard can have another number of dimensions
    plain = [param for name, param in named if "norm" in name or name.endswith("bias")]
    decayed = [param for name, param in named if not ("norm" in name or name.endswith("bias"))]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.01
    )


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train with the same batch on every rank, so that the mean over the ranks is the loss of one process."""
    losses = []
    for step in steps:
        tokens = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(float(loss.detach()))
    return losses


@functools.cache
def unbroken(steps: int, make: Callable[[Any], torch.optim.Optimizer] = adamw) -> list[float]:
    """The losses of the run that never stopped, in one process without a wrapper."""
    model = LanguageModel()
    return train(model, make(model.parameters() if make is adamw else model), range(steps))


def check_close(what: str, got: list[float], wanted: list[float]) -> None:
    """Raise unless losses are equal but for the order of sums in the collectives of another world size."""
    if len(got) != len(wanted) or any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(got, wanted, strict=True)):
        raise AssertionError(f"{what}: losses {got}, but the run that never stopped has {wanted}")
