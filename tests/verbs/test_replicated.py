"""All verbs with DistributedDataParallel and plain modules."""

from __future__ import annotations

import unittest
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.groups import (
    Net,
    adam,
    check_full,
    check_gathered,
    error_of,
    fill,
    frozen_copy,
    gradient,
    names_in,
    nested_net,
    new_groups,
    numbers,
    plain_net,
    step_plain,
)
from kit.options import as_options
from kit.trained import state_by_name
from parameterized import parameterized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fsdp_optim
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

STEPS = 3

# ---------------------------------------------------------------------------------------------- replicated


def replicated(kind: str, steps: int, model: nn.Module | None = None) -> tuple[Any, Any, Any]:
    net = model or Net()
    fill(net)
    wrapped: Any = DDP(net) if kind == "ddp" else net
    optim = adam(net.parameters())
    step_plain(net, optim, range(steps))
    return wrapped, optim, net


def everything_replicated(kind: str) -> None:
    """Every function, on a model that each rank has all of. `kind`: ddp, plain (each rank alone), group (told so)."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    plain = plain_net()
    model, optim, _ = replicated(kind, STEPS)
    wanted = frozen_copy(optim)
    options: dict[str, Any] = {"process_group": dist.group.WORLD} if kind == "group" else {}
    for recipient in (0, last, None) if kind != "plain" else (rank, None):
        full = fsdp_optim.gather_full_optim_state_dict(
            model, optim, recipient, **as_options(fsdp_optim.CallOptions, **options)
        )
        check_gathered(full, recipient, *plain)
        listed = list(
            fsdp_optim.iter_full_optim_state(
                model, optim, recipient, **as_options(fsdp_optim.CallOptions, **options, bucket_nbytes=64)
            )
        )
        check_same("names", [name for name, _ in listed], names_in(plain[0]), in_order=False)
        if recipient in (rank, None):
            check_same("iterated", dict(listed), state_by_name(*plain), in_order=False)
    fresh, fresh_optim, net = replicated(kind, 0)
    check_same(
        "get_shard", fsdp_optim.get_shard_from_optim_state_dict(fresh, fresh_optim, full), wanted, in_order=False
    )
    given = full if rank == last else None  # also a plain model's state comes from one rank to all
    shard = fsdp_optim.scatter_full_optim_state_dict(
        fresh, fresh_optim, given, last, **as_options(fsdp_optim.CallOptions, **options)
    )
    check_same("scatter", shard, wanted, in_order=False)
    named = fsdp_optim.rekey_optim_state_dict(full, fresh, "name")
    check_same("by name: without `module.`", named["state"], state_by_name(*plain), in_order=False)
    check_same(
        "get_shard by name",
        fsdp_optim.get_shard_from_optim_state_dict(fresh, fresh_optim, named),
        wanted,
        in_order=False,
    )
    fsdp_optim.load_optim_state_dict(fresh_optim, shard)
    for param, saved in zip(net.parameters(), plain[0].parameters(), strict=True):
        param.data.copy_(saved)
    step_plain(net, fresh_optim, [STEPS])
    check_same(
        "trained on", frozen_copy(fresh_optim)["state"], plain_net(STEPS + 1)[1].state_dict()["state"], in_order=False
    )


def replicas_that_differ() -> list[tuple[str, str, float]]:
    """A plain module on several ranks: nobody keeps the copies equal, so that a difference must not go unnoticed."""
    model, optim, _ = replicated("plain", STEPS)
    if dist.get_rank() == 1:
        next(iter(optim.state.values()))["exp_avg"][0, 0] += 1
    group = dist.group.WORLD
    return [
        error_of(
            lambda: fsdp_optim.gather_full_optim_state_dict(
                model, optim, options=fsdp_optim.CallOptions(process_group=group)
            )
        )
    ]


@fairscale_on_cpu()
def between_wrappers() -> None:
    """The state that fairscale FSDP gathered goes into DDP, and the other way round; also with a part of the ranks in DDP."""
    sharded, sharded_optim, _ = nested_net()
    ddp, ddp_optim, _ = replicated("ddp", STEPS)
    a = fsdp_optim.gather_full_optim_state_dict(sharded, sharded_optim, None)
    b = fsdp_optim.gather_full_optim_state_dict(ddp, ddp_optim, None)
    check_same("gathered from FSDP and from DDP", a["state"], b["state"], in_order=False)
    check_same(
        "FSDP's dict into DDP",
        fsdp_optim.get_shard_from_optim_state_dict(ddp, ddp_optim, a),
        frozen_copy(ddp_optim),
        in_order=False,
    )
    check_same(
        "DDP's dict into FSDP",
        fsdp_optim.get_shard_from_optim_state_dict(sharded, sharded_optim, b),
        frozen_copy(sharded_optim),
        in_order=False,
    )


def ddp_on_two_of_three() -> None:
    group = new_groups([1, 2])
    if group is None:
        return
    net = Net()
    fill(net)
    model = DDP(net, process_group=group)
    optim = adam(net.parameters())
    step_plain(net, optim, range(STEPS))
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, 2)
    check_gathered(full, 2, *plain_net())
    check_same(
        "scatter", fsdp_optim.scatter_full_optim_state_dict(model, optim, full, 2), frozen_copy(optim), in_order=False
    )


def real_ddp_training() -> None:
    """DDP that really averages gradients: all ranks have the same state, and any may receive it."""
    torch.manual_seed(3)
    net = Net()
    model = DDP(net)
    optim = adam(model.parameters())
    for step in range(2):
        optim.zero_grad()
        model(numbers(f"input {step} of rank {dist.get_rank()}", (4, 5))).square().mean().backward()
        optim.step()
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, 1)
    if full is not None:
        check_full(full, optim, names_in(net))


class TestReplicated(unittest.TestCase):
    @parameterized.expand([("ddp", 2), ("ddp", 1), ("plain", 2), ("group", 3)])
    def test_every_function(self, kind: str, world_size: int) -> None:
        run_on_ranks(everything_replicated, world_size, kind)

    def test_without_torch_distributed(self) -> None:
        """In one process that knows of no ranks at all."""
        assert not dist.is_initialized()
        model, optim = plain_net()
        full = fsdp_optim.gather_full_optim_state_dict(model, optim)
        check_full(full, optim, names_in(model))
        check_same(
            "iterated",
            dict(fsdp_optim.iter_full_optim_state(model, optim)),
            state_by_name(model, optim),
            in_order=False,
        )
        _, fresh = plain_net(0)
        for shard in (
            fsdp_optim.get_shard_from_optim_state_dict(model, optim, full),
            fsdp_optim.scatter_full_optim_state_dict(model, optim, full),
        ):
            check_same("shard", shard, optim.state_dict(), in_order=False)
            fsdp_optim.load_optim_state_dict(fresh, shard)

    def test_copies_that_differ_are_an_error(self) -> None:
        ((first,), (second,)) = run_on_ranks(replicas_that_differ, 2)
        assert first[:2] == second[:2]
        assert first[0] == "StateError", first
        assert "first.weight" in first[1], first

    def test_between_wrappers(self) -> None:
        run_on_ranks(between_wrappers, 2)

    def test_ddp_on_a_group_without_rank_0(self) -> None:
        run_on_ranks(ddp_on_two_of_three, 3)

    def test_ddp_that_averages(self) -> None:
        run_on_ranks(real_ddp_training, 2)


# ---------------------------------------------------------------------------------------------- optimizer-like


def test_the_numbers_mean_something() -> None:
    assert torch.equal(gradient("a", 0, (2,)), gradient("a", 0, (2,)))
    assert not torch.equal(gradient("a", 0, (2,)), gradient("b", 0, (2,)))
    assert not torch.equal(gradient("a", 0, (2,)), gradient("a", 1, (2,)))
