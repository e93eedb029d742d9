"""The small models of the tests, and batches and a loss for those that are trained with forward and backward.

`units` of a model: paths of the modules that a wrapper gets one by one, inner ones first; "" is the model itself. A model without
`units` is one unit. `tensor_parallel`: how torch cuts the modules. Models whose shapes break other tools are in `kit.shapes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


class Net(nn.Module):
    """A nested model with root parameters before and beside its units, and few dimensions that ranks divide."""

    units = ("stem", "block.0", "block", "")
    tensor_parallel = {"stem": ColwiseParallel(), "block.0": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.mix = nn.Parameter(torch.empty(3, 2, 5))
        self.stem = nn.Linear(5, 7)
        self.block = nn.Sequential(nn.Linear(7, 3), nn.LayerNorm(3), nn.Linear(3, 5, bias=False))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x))) * self.scale + self.mix.sum()


def freeze_stem(model: Any) -> None:
    for param in model.stem.parameters():
        param.requires_grad_(False)


class Odd(nn.Module):
    """Parameters of awkward sizes: one without dimensions, one without elements, some smaller than a world of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.pair = nn.Parameter(torch.randn(2))
        self.tail = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.scale + self.pair.sum() + self.nothing.sum() + self.tail.sum()


class Scalars(nn.Module):
    """A model with 0-dimensional parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.5))
        self.b = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + self.b


class Tied(nn.Module):
    """Embedding and output share a weight that is known by the embedding's name; its module comes last in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.out = nn.Linear(4, 6)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.embed(tokens)))


class Siblings(nn.Module):
    """Three layers, of which the last uses the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Detour(nn.Module):
    """A model whose forward does not use the middle layer. (fairscale cannot train such a layer in a separate unit.)"""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.unused = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Own(nn.Module):
    """Parameters of its own, registered after its children, and names that look like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 3)))
        self.weight = nn.Parameter(torch.randn(3))
        self.listed = nn.ParameterList([torch.randn(2, 3), torch.randn(1)])
        self.flat_param = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.flat_param(self.module(x) * self.weight + self.listed[0].sum(0) * self.listed[1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def used_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4), layer)


def deep() -> nn.Module:
    """Sequentials in Sequentials, 3-d convolution weights, a layer without bias."""
    inner = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 5))
    middle = nn.Sequential(nn.Conv1d(2, 3, kernel_size=2), nn.Flatten(), nn.Linear(9, 6), inner)
    return nn.Sequential(nn.Unflatten(1, (2, 4)), middle, nn.Sequential(nn.Tanh()), nn.Linear(5, 2))


def tiny() -> nn.Module:
    """A model with fewer elements than ranks."""
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2, bias=False))


MODELS = {
    "mlp": (mlp, (5,)),
    "deep": (deep, (8,)),
    "tiny": (tiny, (1,)),
    "odd": (Odd, (3,)),
    "scalars": (Scalars, (2,)),
    "tied": (Tied, None),
    "siblings": (Siblings, (4,)),
    "detour": (Detour, (4,)),
    "own": (Own, (3,)),
    "used twice": (used_twice, (4,)),
}


def build(name: str) -> nn.Module:
    """The same parameters at every call."""
    torch.default_generator.manual_seed(7)  # torch.manual_seed seeds all kinds of devices, which takes longer
    return MODELS[name][0]()


def batch(name: str, step: int, size: int = 12) -> Tensor:
    """One global batch, divisible among 1, 2, 3 and 4 ranks."""
    shape, generator = MODELS[name][1], torch.Generator().manual_seed(1000 + step)
    if shape is None:
        return torch.randint(0, 6, (size, 3), generator=generator)
    return torch.randn(size, *shape, generator=generator)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    out = model(inputs).float()
    weights = torch.linspace(-1.0, 1.0, out[0].numel()).reshape(out[0].shape)
    return (out * weights).mean() + out.pow(2).mean()


def filled(value: float) -> nn.Module:
    """A layer whose weights are all one number."""
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return model


class TiedHead(nn.Module):
    """An embedding whose weight is that of the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
