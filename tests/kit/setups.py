"""Trainings under fairscale FSDP that are written down: a model by name, its units, an optimizer by name, param groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_optim
from kit import models
from kit.optimizers import ONE_PER_PARAMETER, OPTIMIZERS, OfModel
from kit.trained import Oracle, Trained
from kit.units import Live, Wrapping, lives_of, wrap

Full = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """A param group of the parameters whose FQN starts with one of `prefixes`."""

    prefixes: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, *prefixes: str, **options: Any) -> Group:
        return cls(prefixes, tuple(options.items()))


@dataclass(frozen=True)
class Setup:
    """A training. A parameter belongs to the first group with a prefix of its FQN, or is not optimized.

    Attributes:
        frozen: prefixes of parameters that need no gradient.
        idle: prefixes of parameters, and the steps in which those get no gradient.
        reverse: the optimizer gets the live parameters in the opposite order inside each group, the originals of each in place.
        fairscale: with fairscale's own wrapper class.
        schedule: every step makes each group's lr smaller, and notes it in the group.
        named: the wrapped model's optimizer is built from `named_parameters()`, and keeps the wrapped names.
    """

    model: str
    wrapping: Wrapping
    optimizer: str = "adam"
    groups: tuple[Group, ...] = (Group(("",)),)
    frozen: tuple[str, ...] = ()
    idle: tuple[tuple[str, tuple[int, ...]], ...] = ()
    reverse: bool = False
    fairscale: bool = False
    schedule: bool = False
    named: bool = False

    def group_of(self, fqn: str) -> int | None:
        hits = (i for i, group in enumerate(self.groups) if fqn.startswith(group.prefixes or ("no parameter",)))
        return next(hits, None)

    def build(self) -> nn.Module:
        return models.build(self.model)

    def wrap(self, model: nn.Module) -> Any:
        return wrap(model, self.wrapping, self.fairscale)

    def freeze(self, model: nn.Module) -> None:
        for fqn, param in model.named_parameters():
            param.requires_grad_(not fqn.startswith(self.frozen or ("no parameter",)))

    def values(self) -> dict[str, Tensor]:
        """The values that the model is made with, by FQN; a forward pass needs them."""
        return {fqn: param.detach() for fqn, param in self.build().named_parameters()}

    def idle_in(self, step: int, fqns: Iterable[str]) -> set[str]:
        """Those of the parameters that get no gradient in a step."""
        return {fqn for fqn in fqns for prefix, steps in self.idle if step in steps and fqn.startswith(prefix)}

    def in_groups(self, fqns: Iterable[str]) -> list[list[str]]:
        """The parameters of each group."""
        of = {fqn: self.group_of(fqn) for fqn in fqns}
        return [[fqn for fqn, number in of.items() if number == i] for i in range(len(self.groups))]

    def make_optimizer(self, of_groups: Sequence[Sequence[Any]]) -> torch.optim.Optimizer:
        cls, options = OPTIMIZERS[self.optimizer]
        groups = [{"params": list(p), **dict(g.options)} for p, g in zip(of_groups, self.groups, strict=True)]
        return cls(groups, **options)

    def end_step(self, optim: torch.optim.Optimizer, step: int) -> None:
        if self.schedule:
            for group in optim.param_groups:
                group["lr"] *= 0.75
                group["noted"] = [step, "lr", {"lr": group["lr"]}]


class Plain(Oracle):
    """The oracle of a set-up: the unwrapped model and its optimizer."""

    def __init__(self, setup: Setup, steps: int = 0, values: Mapping[str, Tensor] | None = None) -> None:
        self.setup = setup
        super().__init__(OfModel(self._optimizer_of), steps, setup.build, setup.freeze, values=values)
        self.ids = {fqn: i for i, fqn in enumerate(fqn for group in self.fqns for fqn in group)}

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        params = dict(model.named_parameters())
        lives = lives_of(self.setup.model, self.setup.wrapping) if self.setup.reverse else ()
        self.fqns = self.setup.in_groups([fqn for live in reversed(lives) for fqn in live.fqns] or params)
        return self.setup.make_optimizer([[params[fqn] for fqn in group] for group in self.fqns])

    def step(self, steps: Sequence[int], unused: Collection[str] = ()) -> None:
        for number in steps:
            super().step([number], {*unused, *self.setup.idle_in(number, self.names)})
            self.setup.end_step(self.optim, number)

    def train(self, steps: Iterable[int]) -> None:
        """Forward and backward."""
        for step in steps:
            train_step(self.model, self.optim, models.batch(self.setup.model, step))

    def go_on_as(self, setup: Setup) -> None:
        """Take the frozen and idle parameters from another set-up."""
        self.setup = setup
        setup.freeze(self.model)


class Wrapped(Trained):
    """The wrapped model of a set-up and its optimizer, on this rank. Needs `fairscale_on_cpu`."""

    def __init__(
        self,
        setup: Setup,
        steps: int = 0,
        values: Mapping[str, Tensor] | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.setup, self.rank, self.world_size = setup, dist.get_rank(), dist.get_world_size()
        self.lives = lives_of(setup.model, setup.wrapping)
        make = OfModel(self._optimizer_of)
        super().__init__(wrap or setup.wrap, make, steps, setup.build, setup.freeze, values=values)

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        first = {live.fqns[0]: live for live in (reversed(self.lives) if self.setup.reverse else self.lives)}
        named = dict(zip(self.lives, model.named_parameters(), strict=True))
        groups = [[first[fqn] for fqn in group] for group in self.setup.in_groups(first)]
        self.ids = {live: i for i, live in enumerate(live for group in groups for live in group)}
        self.group_ids = [[self.ids[live] for live in group] for group in groups]
        return self.setup.make_optimizer(
            [[named[live] if self.setup.named else named[live][1] for live in group] for group in groups]
        )

    def step(self, steps: Sequence[int], unused: Collection[str] = ()) -> None:
        for number in steps:
            super().step([number], {*unused, *self.setup.idle_in(number, self.numbers.start)})
            self.setup.end_step(self.optim, number)

    def _positions_of(self, names: Collection[str]) -> set[int]:
        return {i for i, live in enumerate(self.lives) if set(live.fqns) & set(names)}

    def train(self, steps: Iterable[int]) -> None:
        """Forward and backward on this rank's part of each global batch."""
        for step in steps:
            batch = models.batch(self.setup.model, step).chunk(self.world_size)[self.rank]
            train_step(self.model, self.optim, batch)

    def gather(self, recipient_rank: int | None = 0, key_by: Any = "id", **kwargs: Any) -> Any:
        """By the method of this library's class, where the set-up has that class."""
        if self.setup.fairscale:
            return super().gather(recipient_rank, key_by, **kwargs)
        return self.model.gather_full_optim_state_dict(
            self.optim, recipient_rank=recipient_rank, key_by=key_by, **kwargs
        )

    def shard_by(self, how: str, full: Full | None) -> dict[str, Any]:
        if self.setup.fairscale and how.startswith("method"):  # its class has a method of its own
            how = "function"
        if how == "method":
            return self.model.get_shard_from_optim_state_dict(full)
        if how == "method with optim":
            return self.model.get_shard_from_optim_state_dict(full, self.optim)
        if how == "function":
            return self.shard(full)
        assert how == "scatter", how
        return self.scatter(full, self.world_size - 1)

    def load_shard(self, shard: dict[str, Any], how: str = "function") -> None:
        if how == "method" and self.setup.optimizer != "peculiar":  # torch's own casts to the parameter's dtype
            self.optim.load_state_dict(shard)
        else:
            fsdp_optim.load_optim_state_dict(self.optim, shard)

    def cut_state(self, live: Live, whole: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The state of a live parameter, cut out of whole state by FQN."""
        position = self.lives.index(live)
        return {
            name: value
            if name in ONE_PER_PARAMETER
            else self.part_of(position, {fqn: whole[fqn][name] for fqn in live.fqns})
            for name, value in whole[live.fqns[0]].items()
        }

    def assemble(self) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
        """The state and the parameters by FQN, assembled from the parts of all ranks."""
        # fairscale leaves a parameter whole that a forward pass read and no backward pass reached
        shards = [getattr(param, "_fp32_shard", param).detach() for param in self.params]
        held: list[Any] = [None] * self.world_size
        dist.all_gather_object(held, (self.optim.state_dict()["state"], shards, self.index))
        states, locals_, indices = zip(*held, strict=True)
        params: dict[str, Tensor] = {}
        whole: dict[str, dict[str, Any]] = {}
        for position, live in enumerate(self.lives):
            split = functools.partial(self.numbers.split, live.fqns, [index[position] for index in indices])
            params |= split([local[position] for local in locals_])
            local_id = self.ids.get(live)
            if local_id not in states[0]:
                continue
            whole |= {fqn: {} for fqn in live.fqns}
            for name, value in states[0][local_id].items():
                is_one = name in ONE_PER_PARAMETER
                parts = dict.fromkeys(live.fqns, value) if is_one else split([s[local_id][name] for s in states])
                for fqn in live.fqns:
                    whole[fqn][name] = parts[fqn]
        return whole, params


def train_step(model: Any, optim: torch.optim.Optimizer, inputs: Tensor) -> None:
    optim.zero_grad()
    models.loss_of(model, inputs).backward()
    optim.step()
