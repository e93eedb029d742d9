"""A model whose experts are stacked in one parameter, of which every rank has a slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_optim
from kit.elements import Numbers
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.trained import Oracle, Trained

NUM_EXPERTS = 8


class Experts(nn.Module):
    def __init__(self, num: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(num, 3, 5))
        self.bias = nn.Parameter(torch.empty(num, 2))


class Moe(nn.Module):
    def __init__(self, num: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.experts = Experts(num)
        self.head = nn.Linear(5, 2, bias=False)


def part_of(whole: Moe, first: int, stop: int, declared: int | None = None) -> Moe:
    """The model of a rank with some of the experts. `declared`: the offset that it declares."""
    part = Moe(stop - first)
    part.load_state_dict(
        {name: value[first:stop] if "experts" in name else value for name, value in whole.state_dict().items()}
    )
    for name, param in part.experts.named_parameters():
        shape = whole.get_parameter(f"experts.{name}").shape
        offset = (first if declared is None else declared, *(0 for _ in shape[1:]))
        fsdp_optim.declare_slice(part.experts, name, global_shape=shape, offset=offset)
        if param.dim() != len(shape):
            raise AssertionError
    return part


class TrainedSlices(Trained):
    """A rank's part of the model, trained with its part of the gradients."""

    def __init__(
        self,
        first: int,
        stop: int,
        steps: int,
        wrap: Callable[[Any], Any] = lambda model: model,
        make: Any = adam,
        declared: int | None = None,
    ) -> None:
        whole = Moe()
        self.numbers = Numbers(whole)
        self.numbers.give(whole)
        self.adopt(wrap(part_of(whole, first, stop, declared)), make)
        self.gets_gradient = [bool(index.numel()) for index in self.index]
        self.step(range(steps))

    def weights(self) -> list[Tensor]:
        return [local_of(param).detach().clone() for param in self.params]


def whole_moe(steps: int) -> Oracle:
    return Oracle(steps=steps, model=Moe)
