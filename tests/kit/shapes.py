"""Small models whose shapes break other tools."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


class Indivisible(nn.Module):
    """A model without a dimension that 2, 3 or 4 divide."""

    units = ("inner", "")
    tensor_parallel = {"inner": ColwiseParallel(), "last": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.conv = nn.Conv2d(1, 5, (1, 7), bias=False)
        self.last = nn.Linear(13, 11)


class Tiny(nn.Module):
    """A model with fewer elements than ranks, so that some ranks hold no part of a parameter or unit."""

    units = ("inner", "norm", "")
    tensor_parallel = {"inner": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.norm = nn.LayerNorm(1, bias=False)
        self.wide = nn.Parameter(torch.empty(1, 9))
        self.row = nn.Parameter(torch.empty(3, 2))


class Zeros(nn.Module):
    """A model with parameters without elements: the first, a middle one and the last."""

    units = ("inner", "")
    tensor_parallel = {"inner": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0, 5))
        self.inner = nn.Linear(4, 3)
        self.inner.nothing = nn.Parameter(torch.empty(3, 0))
        self.between = nn.Parameter(torch.empty(2, 2))
        self.last = nn.Parameter(torch.empty(0))


class Scalars(nn.Module):
    """Parameters without dimensions."""

    units = ("inner", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty(()))
        self.inner = nn.Linear(3, 2)
        self.inner.gain = nn.Parameter(torch.empty(()))


class OneHuge(nn.Module):
    """One parameter that is larger than all others, which are many."""

    units = ("many.3", "many.4", "")
    tensor_parallel = {"huge": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.empty(1))
        self.huge = nn.Linear(211, 97, bias=False)
        self.many = nn.ModuleList(
            nn.ParameterList([torch.empty(1 + i % 3), torch.empty(2, 1 + i % 2)]) for i in range(20)
        )


class Hollow(nn.Module):
    """A model with units without parameters, around and beside units with parameters."""

    units = ("nothing", "inner.nothing", "inner", "around", "")
    tensor_parallel = {"inner.linear": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Tanh()
        self.inner = nn.Module()
        self.inner.nothing = nn.Sequential(nn.ReLU(), nn.Dropout())
        self.inner.linear = nn.Linear(3, 5)
        self.around = nn.Sequential(nn.Identity())
        self.head = nn.Linear(2, 3)


class Empty(nn.Module):
    """A model whose root unit has no parameters itself."""

    units = ("first", "second", "")
    tensor_parallel = {"first": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 1)


SHAPES: dict[str, type[nn.Module]] = {
    "indivisible": Indivisible,
    "fewer elements than ranks": Tiny,
    "no elements": Zeros,
    "no dimensions": Scalars,
    "one huge and many tiny": OneHuge,
    "units without parameters": Hollow,
    "root without parameters": Empty,
}
REFUSES_SCALARS = ("FSDP1 flat", "FSDP1 orig", "FSDP2", "HSDP", "FSDP2 x TP")
"""Wrappers of torch that take no parameter without dimensions."""
