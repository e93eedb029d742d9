"""ZeRO-1 by hand: under DDP each rank gives its own optimizer some of the parameters, and has the complete state of these."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import Differs, check_same, error_text, refused_on_ranks
from kit.wraps import in_ddp
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

STEPS = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 4, bias=False)
        self.last = nn.Linear(4, 2)


def groups_of(model: nn.Module, indices: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Matrices and vectors in two groups. `indices`: those of this rank's parameters; None: all of them."""
    chosen = [param for index, param in enumerate(model.parameters()) if indices is None or index in indices]
    return [
        {"params": [param for param in chosen if param.dim() > 1], "weight_decay": 0.25},
        {"params": [param for param in chosen if param.dim() < 2], "weight_decay": 0.0},
    ]


def shared_out(world_size: int, rank: int, *, by: int = 1) -> list[int]:
    """The indices of a rank's parameters: each rank has some, in an order that is not that of the ranks."""
    return [index for index in range(5) if (index * by + 1) % world_size == rank]


def adam(model: nn.Module, indices: Sequence[int] | None = None) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups_of(model, indices), lr=0.125)


def train(model: nn.Module, optim: Any, first: int = 0, *, share: bool = False) -> None:
    """Gradients are drawn, equal on all ranks. `share`: each parameter is sent from the rank that has updated it."""
    for step in range(first, first + STEPS):
        torch.manual_seed(50 + step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape)
        optim.step()
        for index, param in enumerate(model.parameters()) if share else ():
            owner = (index + 1) % dist.get_world_size()
            dist.broadcast(param.data, owner)


def oracle(steps: int = STEPS) -> tuple[dict[str, Any], Any]:
    model = Model()
    optim = adam(model)
    train(model, optim)
    if steps > STEPS:
        train(model, optim, STEPS)
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None)
    return dict(model.state_dict()), full


def gathered(folder: str) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model = in_ddp(Model())
    optim = adam(model, shared_out(world_size, rank))
    train(model, optim, share=True)
    weights, wanted = oracle()
    check_same("weights", dict(model.module.state_dict()), weights)
    for recipient in (0, world_size - 1, None):
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=recipient)
        if full is not None:
            for key in ("state", "param_groups", "fqns"):
                got = dict(sorted(full[key].items())) if isinstance(full[key], dict) else full[key]
                check_same(f"recipient {recipient}: {key}", got, wanted[key])
        elif recipient in (None, rank):
            raise Differs(f"recipient {recipient}: None")
    iterated = list(fsdp_optim.iter_full_optim_state(model, optim))
    if rank == 0:
        check_same("iterated", dict(iterated), {fqn: wanted["state"][i] for i, fqn in wanted["fqns"].items()})
    fsdp_optim.save(folder, model, optim)


def resumed(folder: str, by: int) -> None:
    """Into optimizers that share the parameters out in another way, on as many ranks or on fewer."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    weights, wanted = oracle()
    own_indices = shared_out(world_size, rank, by=by)

    def check(what: str, model: Any, optim: Any) -> None:
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None)
        check_same(what, full["state"], wanted["state"])
        names = {name for name, param in model.module.named_parameters() if optim.state.get(param)}
        every = [name for name, _ in model.module.named_parameters()]
        check_same(f"{what}: this rank's", names, {every[index] for index in own_indices})

    model = in_ddp(Model())
    optim = adam(model, own_indices)
    fsdp_optim.load(folder, model, optim, options=fsdp_optim.LoadOptions(compare=True))
    check_same("weights", dict(model.module.state_dict()), weights)
    check("load", model, optim)
    again = adam(model, own_indices)
    shard = fsdp_optim.scatter_full_optim_state_dict(model, again, wanted if rank == 0 else None)
    fsdp_optim.load_optim_state_dict(again, shard)
    check("scatter", model, again)
    other = adam(model, shared_out(world_size, rank))
    fsdp_optim.transfer_optim_state(model, again, model, other)
    fsdp_optim.transfer_optim_state(model, other, model, again := adam(model, own_indices))
    check("transfer", model, again)
    if world_size > 1:
        kind, text = error_text(
            lambda: fsdp_optim.get_shard_from_optim_state_dict(model, adam(model, own_indices), wanted)
        )
        words = [word for word in ("scatter_full_optim_state_dict", "strict=False") if word not in text]
        check_same(f"get_shard: {text}", (kind, words), ("StateError", []))
    loose = fsdp_optim.get_shard_from_optim_state_dict(model, again := adam(model, own_indices), wanted, strict=False)
    fsdp_optim.load_optim_state_dict(again, loose)
    check("get_shard, strict=False", model, again)


def differing(folder: str) -> None:
    """A parameter that two ranks have is a replica there, and one that no rank has is not saved."""
    rank = dist.get_rank()
    model = in_ddp(Model())
    optim = adam(model, [0, 1] if rank == 0 else [1, 2])
    train(model, optim)
    for index, param in enumerate(model.parameters()):
        dist.broadcast(param.data, 0 if index < 2 else 1)
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")
    check_same("parameters", sorted(full["state"]), ["first.bias", "first.weight", "second.weight"])
    optim.state[list(model.parameters())[1]]["exp_avg"].add_(rank)
    call = lambda: fsdp_optim.save(folder, model, optim)  # noqa: E731
    refused_on_ranks("replicas", call, "StateError", "first.bias", "not the same on rank 0 and rank 1")


class SharedOutTest(unittest.TestCase):
    @parameterized.expand([(3, 1), (3, 2), (2, 1), (1, 1)])
    def test_every_rank_has_some_parameters(self, world_size: int, by: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(gathered, 3, f"{folder}/c")
            run_on_ranks(resumed, world_size, f"{folder}/c", by)

    def test_two_ranks_that_have_one_parameter(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(differing, 2, f"{folder}/c")
