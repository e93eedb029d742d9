"""load in the middle of training: after evaluation, between steps, and buffers that a forward pass casts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.cases import expand, some, those
from kit.checkpoints import Whole, buffers_of, check_files, load, mine, optims_of, save
from kit.compare import Differs, check_same
from kit.folders import InFolder
from kit.torch_limits import cannot_run, skip_if
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from kit.wraps import WRAPPERS, in_fairscale, in_fsdp1, in_fsdp2
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LIVE: dict[str, str | Callable[[nn.Module], Any]] = {
    **{wrapper: wrapper for wrapper in WRAPPERS if wrapper != "FSDP2 x TP"},
    "fairscale, not resharding": lambda model: in_fairscale(model, reshard_after_forward=False),
    "FSDP1 SHARD_GRAD_OP": lambda model: in_fsdp1(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "FSDP1 orig SHARD_GRAD_OP": lambda model: in_fsdp1(
        model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True
    ),
    "FSDP1 NO_SHARD": lambda model: in_fsdp1(model, sharding_strategy=ShardingStrategy.NO_SHARD),
    "FSDP2, not resharding": lambda model: in_fsdp2(model, reshard_after_forward=False),
}


def evaluated(trained: Trained, *, with_gradients: bool = False) -> Tensor:
    """Some wrappers leave whole parameters in the model after it; FSDP1 leaves views of them if gradients are enabled."""
    trained.model.eval()
    with torch.set_grad_enabled(with_gradients):
        return trained.model(torch.arange(10.0).reshape(2, 5) / 64).detach().clone()


def train_really(trained: Trained) -> None:
    trained.forget_gradients()
    trained.model.train()
    for _ in range(2):
        trained.model(torch.arange(10.0).reshape(2, 5) / 64).sum().backward()
        for optim in optims_of(trained):
            optim.step()
            optim.zero_grad()


def held(trained: Trained) -> dict[str, Any]:
    """`mine` without the state of parameters that have no elements on this rank: torch's FSDP1 does not count their steps."""
    content = mine(trained)
    state = {name: values for name, values in content["state"].items() if content["values"][name].numel()}
    return {**content, "state": state}


def load_after_evaluation(root: Path, wrapper: str, *, with_gradients: bool = False) -> None:
    evaluate = partial(evaluated, with_gradients=with_gradients)
    with cpu():
        source, alike, target = (Trained(LIVE[wrapper], steps=steps) for steps in (STEPS, STEPS, 0))
        parts, wanted = mine(alike), evaluate(alike)
        check_same("outputs", evaluate(source), wanted)
        save(root / "evaluated", source)
        check_same("outputs after saving", evaluate(source), wanted)
        if torch.equal(evaluate(target), wanted):
            raise Differs("the outputs were to depend on the parameters")
        load(root / "evaluated", target)
        check_same("restored", mine(target), parts)
        check_same("outputs after loading", evaluate(target), wanted)


def load_between_steps(root: Path, wrapper: str) -> None:
    with cpu():
        source, target = (Trained(LIVE[wrapper], steps=steps) for steps in (STEPS, 1))
        train_really(source)
        train_really(target)
        save(root / "trained", source)
        load(root / "trained", target)
        check_same("restored", held(target), held(source))
        for trained in (source, target):
            train_really(trained)
        check_same("trained on", held(target), held(source))
        check_same("outputs", evaluated(target), evaluated(source))


class Tied(nn.Module):
    """Two modules in one unit that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.embed(numbers))


def save_tied_after_evaluation(root: Path) -> None:
    """FSDP2 has complete weights in both places then, and the optimizer has the shards."""
    with cpu():
        torch.manual_seed(0)
        model = in_fsdp2(Tied(), reshard_after_forward=False)
        optim = torch.optim.Adam(model.parameters())
        model(torch.arange(7)).sum().backward()
        optim.step()
        for name in ("before", "after"):
            with torch.no_grad():
                model.reshard() if name == "before" else model(torch.arange(7))
            if isinstance(model.head.weight, DTensor) != (name == "before"):
                raise Differs("the weights in the model were to be shards before the evaluation, and not after it")
            fsdp_optim.save(root / name, model, optim, options=fsdp_optim.SaveOptions(progress=False, durable=False))


CASTING: dict[str, Callable[[nn.Module], Any]] = {
    "fairscale": in_fairscale,  # to float32
    "FSDP1": lambda model: in_fsdp1(model, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16)),
    "FSDP1 orig": lambda model: in_fsdp1(
        model, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16), use_orig_params=True
    ),
}


def load_cast_buffers(root: Path, wrapper: str, first: str) -> None:
    """`first`: which of the two has been through a forward pass, which is when wrappers cast their buffers."""
    with cpu():
        source, alike, target = (Trained(CASTING[wrapper], steps=steps, model=Whole) for steps in (STEPS, STEPS, 0))
        for trained in (source, target):
            if first in ("both", "source" if trained is source else "target"):
                evaluated(trained)
        save(root / "step-1", source)
        load(root / "step-1", target)
        check_same("outputs", evaluated(target), evaluated(alike))
        buffers, wanted = buffers_of(target), buffers_of(alike)
        check_same("names of buffers", list(buffers), list(wanted))
        for name, buffer in wanted.items():
            torch.testing.assert_close(buffers[name].double(), buffer.double(), rtol=2**-8, atol=0, msg=name)


class LiveTest(InFolder):
    @expand(*some(itertools.product(CASTING, ("source", "target", "both")), every=4))
    def test_buffers_that_the_wrapper_casts(self, wrapper: str, first: str) -> None:
        """A job that is started again has not cast its buffers yet when it loads."""
        run_on_ranks(load_cast_buffers, 2, self.root, wrapper, first)

    @expand(*some(LIVE, every=4))
    def test_after_an_evaluation(self, wrapper: str) -> None:
        """Outputs after loading are those of what was loaded."""
        skip_if(self, cannot_run(wrapper))
        run_on_ranks(load_after_evaluation, 4 if wrapper == "HSDP" else 2, self.root, wrapper)
        check_files(self.root / "evaluated", Oracle())

    @expand(*those([(wrapper,) for wrapper in LIVE], lambda wrapper: "SHARD_GRAD_OP" in wrapper))
    def test_after_a_forward_pass_with_gradients(self, wrapper: str) -> None:
        """And without a backward pass: a validation loss without `no_grad`."""
        skip_if(self, cannot_run(wrapper))
        run_on_ranks(load_after_evaluation, 4 if wrapper == "HSDP" else 2, self.root, wrapper, with_gradients=True)
        check_files(self.root / "evaluated", Oracle())

    def test_tied_weights_after_an_evaluation(self) -> None:
        """They are one parameter as before it."""
        run_on_ranks(save_tied_after_evaluation, 2, self.root)
        before, after = (fsdp_optim.inspect(self.root / name) for name in ("before", "after"))
        self.assertEqual((before.aliases, after.aliases), ({"head.weight": "embed.weight"},) * 2)
        for name in ("model.safetensors", "optim.safetensors"):
            self.assertEqual((self.root / "after" / name).read_bytes(), (self.root / "before" / name).read_bytes())

    @expand(*some(LIVE, every=4, first=2))
    def test_between_steps(self, wrapper: str) -> None:
        skip_if(self, cannot_run(wrapper))
        run_on_ranks(load_between_steps, 4 if wrapper == "HSDP" else 2, self.root, wrapper)
