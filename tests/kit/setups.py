"""The same training with fairscale FSDP and without.

The oracle needs no forward: every original parameter gets a random gradient, the wrapped model's ranks get theirs cut
out of it by `models.cut`, and the optimizers step. Elementwise optimizers then have the same state, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_optim
from kit import models
from kit.models import Live, Wrapping
from kit.optimizers import ONE_PER_PARAMETER, OPTIMIZERS
from kit.values import Full, check_value


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

    def gradient(self, fqn: str, param: Tensor, index: int, step: int) -> Tensor | None:
        """A random gradient that is a function of the arguments."""
        if fqn.startswith(self.frozen or ("no parameter",)):
            return None
        if any(fqn.startswith(prefix) and step in steps for prefix, steps in self.idle):
            return None
        return torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + index))

    def end_step(self, optim: torch.optim.Optimizer, step: int) -> None:
        if self.schedule:
            for group in optim.param_groups:
                group["lr"] *= 0.75
                group["noted"] = [step, "lr", {"lr": group["lr"]}]


class Plain:
    """The unwrapped model and its optimizer."""

    def __init__(self, setup: Setup, steps: Iterable[int] = ()) -> None:
        self.setup = setup
        self.model = plain_model(setup)
        self.shapes = {fqn: param.shape for fqn, param in self.model.named_parameters()}
        in_groups: list[list[Tensor]] = [[] for _ in setup.groups]
        self.fqns: list[list[str]] = [[] for _ in setup.groups]
        params = dict(self.model.named_parameters())
        lives = models.live_parameters(self.model, setup.wrapping) if setup.reverse else ()
        for fqn in [fqn for live in reversed(lives) for fqn in live.fqns] or params:
            index = setup.group_of(fqn)
            if index is not None:
                in_groups[index].append(params[fqn])
                self.fqns[index].append(fqn)
        self.optim = make_optimizer(setup, in_groups)
        self.ids = {fqn: i for i, fqn in enumerate(fqn for group in self.fqns for fqn in group)}
        self.feed(steps)

    def feed(self, steps: Iterable[int]) -> None:
        for step in steps:
            for index, (fqn, param) in enumerate(self.model.named_parameters()):
                param.grad = self.setup.gradient(fqn, param, index, step)
            self.optim.step()
            self.setup.end_step(self.optim, step)

    def train(self, steps: Iterable[int]) -> None:
        """Forward and backward."""
        for step in steps:
            self.optim.zero_grad()
            loss_of(self.model, models.batch(self.setup.model, step)).backward()
            self.optim.step()

    def params(self) -> dict[str, Tensor]:
        return {fqn: param.detach().clone() for fqn, param in self.model.named_parameters()}

    def state(self) -> dict[str, dict[str, Any]]:
        """By FQN."""
        state = self.optim.state_dict()["state"]
        return {fqn: state[i] for fqn, i in self.ids.items() if i in state}


class Wrapped:
    """The wrapped model and its optimizer, on this rank. Needs `fairscale_on_cpu`."""

    def __init__(
        self,
        setup: Setup,
        steps: Iterable[int] = (),
        params: Mapping[str, Tensor] | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.setup, self.rank, self.world_size = setup, dist.get_rank(), dist.get_world_size()
        plain = plain_model(setup, params)
        self.originals = {
            fqn: param.detach().clone() for fqn, param in plain.named_parameters()
        }  # fairscale frees them
        self.index = {fqn: i for i, fqn in enumerate(self.originals)}
        self.lives = models.live_parameters(plain, setup.wrapping)
        self.model = wrap(plain) if wrap else models.wrap(plain, setup.wrapping, setup.fairscale)
        self.params = dict(zip(self.lives, self.model.parameters(), strict=True))
        names = dict(zip(self.lives, (name for name, _ in self.model.named_parameters()), strict=True))
        for live, param in self.params.items():
            check_value(f"the oracle's {live.fqns}", param.detach(), self.cut(live, self.originals))
        in_groups: list[list[Any]] = [[] for _ in setup.groups]
        by_group: list[list[Live]] = [[] for _ in setup.groups]
        for live in reversed(self.lives) if setup.reverse else self.lives:
            index = setup.group_of(live.fqns[0])
            if index is not None:
                param = self.params[live]
                in_groups[index].append((names[live], param) if setup.named else param)
                by_group[index].append(live)
        self.ids = {live: i for i, live in enumerate(live for group in by_group for live in group)}
        self.group_ids = [[self.ids[live] for live in group] for group in by_group]
        self.optim = make_optimizer(setup, in_groups)
        self.feed(steps)

    def cut(self, live: Live, values: Mapping[str, Tensor]) -> Tensor:
        return models.cut(live, [values[fqn] for fqn in live.fqns], self.rank, self.world_size)

    def feed(self, steps: Iterable[int]) -> None:
        for step in steps:
            for live, param in self.params.items():
                grads = {f: self.setup.gradient(f, self.originals[f], self.index[f], step) for f in live.fqns}
                given = {f: grad for f, grad in grads.items() if grad is not None}
                if given and len(given) < len(grads):
                    raise ValueError(f"a mistake of the test: {live} has gradients for {sorted(given)} only")
                param.grad = self.cut(live, given) if given else None
            self.optim.step()
            self.setup.end_step(self.optim, step)

    def train(self, steps: Iterable[int]) -> None:
        """Forward and backward on this rank's part of each global batch."""
        for step in steps:
            self.optim.zero_grad()
            mine = models.batch(self.setup.model, step).chunk(self.world_size)[self.rank]
            loss_of(self.model, mine).backward()
            self.optim.step()

    def gather(self, recipient_rank: int | None = 0, **kwargs: Any) -> Full | None:
        if self.setup.fairscale:
            return fsdp_optim.gather_full_optim_state_dict(self.model, self.optim, recipient_rank, **kwargs)
        return self.model.gather_full_optim_state_dict(self.optim, recipient_rank=recipient_rank, **kwargs)

    def shard(self, full: Full | None, how: str) -> dict[str, Any]:
        if self.setup.fairscale and how.startswith("method"):  # its class has a method of its own
            how = "function"
        if how == "method":
            return self.model.get_shard_from_optim_state_dict(full)
        if how == "method with optim":
            return self.model.get_shard_from_optim_state_dict(full, self.optim)
        if how == "function":
            return fsdp_optim.get_shard_from_optim_state_dict(self.model, self.optim, full)
        assert how == "scatter", how
        source = self.world_size - 1
        given = full if self.rank == source else None
        return fsdp_optim.scatter_full_optim_state_dict(self.model, self.optim, given, source_rank=source)

    def load(self, shard: dict[str, Any], how: str = "function") -> None:
        if how == "method" and self.setup.optimizer != "peculiar":  # torch's own casts to the parameter's dtype
            self.optim.load_state_dict(shard)
        else:
            fsdp_optim.load_optim_state_dict(self.optim, shard)

    def assemble(self) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
        """The state and the parameters by FQN, assembled from the parts of all ranks."""
        mine = (self.optim.state_dict()["state"], [param.detach() for param in self.params.values()])
        held: list[Any] = [None] * self.world_size
        dist.all_gather_object(held, mine)
        states, params = [state for state, _ in held], [params for _, params in held]
        whole_params: dict[str, Tensor] = {}
        for i, live in enumerate(self.lives):
            whole_params |= self._whole(live, [local[i] for local in params])
        whole_states: dict[str, dict[str, Any]] = {}
        for live, local_id in self.ids.items():
            if local_id not in states[0]:
                continue
            whole_states |= {fqn: {} for fqn in live.fqns}
            for name, value in states[0][local_id].items():
                if name in ONE_PER_PARAMETER:
                    values = dict.fromkeys(live.fqns, value)
                else:
                    values = self._whole(live, [state[local_id][name] for state in states])
                for fqn in live.fqns:
                    whole_states[fqn][name] = values[fqn]
        return whole_states, whole_params

    def _whole(self, live: Live, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        flat, start, found = torch.cat([shard.reshape(-1) for shard in (shards if live.is_cut else shards[:1])]), 0, {}
        for fqn in live.fqns:
            shape = self.originals[fqn].shape
            found[fqn] = flat[start : start + shape.numel()].reshape(shape)
            start += shape.numel()
        return found


def plain_model(setup: Setup, params: Mapping[str, Tensor] | None = None) -> nn.Module:
    model = models.build(setup.model)
    for fqn, param in model.named_parameters():
        if params is not None:
            param.data.copy_(params[fqn])
        param.requires_grad_(not fqn.startswith(setup.frozen or ("no parameter",)))
    return model


def make_optimizer(setup: Setup, in_groups: Sequence[Sequence[Any]]) -> torch.optim.Optimizer:
    cls, options = OPTIMIZERS[setup.optimizer]
    groups = [{"params": list(p), **dict(g.options)} for p, g in zip(in_groups, setup.groups, strict=True)]
    return cls(groups, **options)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    out = model(inputs).float()
    weights = torch.linspace(-1.0, 1.0, out[0].numel()).reshape(out[0].shape)
    return (out * weights).mean() + out.pow(2).mean()
