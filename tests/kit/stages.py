"""A small language model cut into pipeline stages, each a pruned copy of the model with the FQNs of the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kit.elements import Numbers
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.trained import Oracle, Trained

NUM_LAYERS = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))  # one path: a sum of gradients would depend on the cut


class Language(nn.Module):
    """Embeddings, layers by number, a norm and a head; modules of other stages are None, as torchtitan prunes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Embedding | None = nn.Embedding(11, 6)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(NUM_LAYERS)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(6)
        self.head: nn.Linear | None = nn.Linear(6, 11, bias=False)
        self.register_buffer("angles", torch.arange(3.0))  # every stage has it

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.head(x) if self.head is not None else x


def stage_of(whole: Language, index: int, num_stages: int) -> Language:
    """A pruned copy of the model: the layers are dealt in order, the last stages get fewer."""
    stage = copy.deepcopy(whole)
    per_stage = -(-NUM_LAYERS // num_stages)
    for number in range(NUM_LAYERS):
        if number // per_stage != index:
            del stage.layers[str(number)]
    if index > 0:
        stage.embed = None
    if index < num_stages - 1:
        stage.norm = stage.head = None
    return stage


class TrainedStages(Trained):
    """The pipeline stages `indices` of this rank, with one optimizer for all of them or, with `each`, one for each."""

    def __init__(
        self,
        indices: Sequence[int],
        num_stages: int,
        steps: int,
        wrap: Callable[[Any], Any] = lambda stage: stage,
        each: bool = False,
        make: Any = adam,
    ) -> None:
        whole = Language()
        self.numbers = Numbers(whole)
        self.numbers.give(whole)
        self.model: Any = [wrap(stage_of(whole, index, num_stages)) for index in indices]
        self.params = [param for stage in self.model for param in stage.parameters()]
        self.index = [self.numbers.read(local_of(param)) for param in self.params]
        self.gets_gradient = [True] * len(self.params)
        self.optim = [make(stage.parameters()) for stage in self.model] if each else make(self.params)
        self.process_group = None
        self.step(range(steps))

    def state_dict(self) -> dict[str, Tensor]:
        """The weights and buffers of this rank's stages."""
        return {name: value for stage in self.model for name, value in stage.state_dict().items()}


def whole_oracle(steps: int) -> Oracle:
    return Oracle(steps=steps, model=Language)
