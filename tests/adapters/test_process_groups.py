"""Units on other process groups than the root's: BatchNorm, halves, replicas, other roots and mixtures."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from fairscale.internal.parallel import get_process_group_cached
from fairscale.nn.data_parallel import FullyShardedDataParallel as FairscaleFSDP
from fairscale.nn.data_parallel import auto_wrap_bn
from kit.compare import check_same
from kit.groups import (
    STEPS,
    Experts,
    Net,
    Sharded,
    adam,
    check_alike,
    check_full,
    check_gathered,
    error_of,
    frozen_copy,
    new_groups,
    numbers,
    plain_experts,
    plain_net,
    step_plain,
    told_by,
)
from kit.trained import state_by_name
from kit.wrapping import by_name
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

# ------------------------------------------------------------------------------------------- BatchNorm


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2)
        self.bn = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)


def bn_alone(fqn: str, rank: int) -> str:
    return f"rank{rank}.{fqn}" if fqn.startswith("bn.") else fqn


def with_batch_norm(drifted: bool) -> tuple[Any, torch.optim.Optimizer]:
    """BatchNorm in a group of this rank alone, whose gradients are not averaged."""
    rank = dist.get_rank()
    net = Normed()
    sharded = Sharded(net, (lambda name: bn_alone(name, rank)) if drifted else str)
    get_process_group_cached()
    for r in range(dist.get_world_size()):  # all ranks make all groups, and auto_wrap_bn finds this one's
        get_process_group_cached(ranks=[r])
    wrapped = auto_wrap_bn(net, single_rank_pg=True)
    if not isinstance(wrapped.bn, FairscaleFSDP) or wrapped.bn.world_size != 1:
        raise AssertionError(f"this is not the model that is to be tested: {wrapped}")
    sharded.adopt(wrapped.bn, ["bn.weight", "bn.bias"])
    model = sharded.wrap(wrapped)
    optim = adam(model.parameters())
    sharded.step(optim, range(STEPS))
    return model, optim


def train_normed(rank: int) -> dict[str, Any]:
    """State by name of a plain model whose BatchNorm has the numbers of one rank."""
    net = Normed()
    for name, param in net.named_parameters():
        param.data.copy_(numbers(f"{bn_alone(name, rank)} values", param.shape))
    optim = adam(net.parameters())
    for step in range(STEPS):
        for name, param in net.named_parameters():
            param.grad = numbers(f"{bn_alone(name, rank)} gradient {step}", param.shape)
        optim.step()
    return {bn_alone(name, rank): dict(optim.state[param]) for name, param in net.named_parameters()}


@fairscale_on_cpu()
def gather_batch_norm() -> tuple[str, str, float]:
    model, optim = with_batch_norm(drifted=False)
    full = fsdp_optim.gather_full_optim_state_dict(model, optim)
    check_gathered(full, 0, *plain_net(model=Normed()))
    check_same(
        "shard", model.get_shard_from_optim_state_dict(told_by(0, full), optim), frozen_copy(optim), in_order=False
    )
    check_same(
        "scatter", fsdp_optim.scatter_full_optim_state_dict(model, optim, full), frozen_copy(optim), in_order=False
    )

    model, optim = with_batch_norm(drifted=True)
    error = error_of(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim))
    full = fsdp_optim.gather_full_optim_state_dict(
        model, optim, None, "name", options=fsdp_optim.CallOptions(name_of=bn_alone)
    )
    check_same("drifted apart", full["state"], {**train_normed(0), **train_normed(1)}, in_order=False)
    return error


class TestBatchNorm(unittest.TestCase):
    def test_equal_ones_are_replicas_and_others_an_error_or_have_names(self) -> None:
        check_alike(run_on_ranks(gather_batch_norm, 2), "StateError", "bn.weight", "name_of")


# ------------------------------------------------------------------------------------------- halves, replicas


def on_half(halves: Sequence[Sequence[int]], steps: int = STEPS, **kwargs: Any) -> tuple[Any, torch.optim.Optimizer]:
    """The middle's first layer lives on half of the ranks at a time, the rest on all."""
    net = Net()
    sharded = Sharded(net)
    net.middle[0] = sharded.wrap(net.middle[0], process_group=new_groups(*halves), **kwargs)
    model = sharded.wrap(net)
    optim = adam(model.parameters())
    sharded.step(optim, range(steps))
    return model, optim


ALL_HALVES = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1], [0, 2]]


@fairscale_on_cpu()
def gather_replicas(flatten: bool) -> None:
    plain, plain_optim = plain_net()
    rank = dist.get_rank()
    for halves in ALL_HALVES:
        model, optim = on_half(halves, flatten_parameters=flatten)
        wanted = frozen_copy(optim)
        for recipient in (0, 3, None):
            full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient)
            check_gathered(full, recipient, plain, plain_optim)
        model, optim = on_half(halves, steps=0, flatten_parameters=flatten)
        check_same(
            f"shard, {halves}", fsdp_optim.get_shard_from_optim_state_dict(model, optim, full), wanted, in_order=False
        )
        given = full if rank == 2 else None
        check_same(
            f"scatter, {halves}",
            fsdp_optim.scatter_full_optim_state_dict(model, optim, given, 2),
            wanted,
            in_order=False,
        )


@fairscale_on_cpu()
def gather_no_replicas() -> list[tuple[str, str, float]]:
    """One element of one moment differs between what should be replicas; then one `step`; then one has no state."""
    errors = []
    for halves in ALL_HALVES:
        for wrong in ("exp_avg", "step", None):
            model, optim = on_half(halves)
            state = optim.state[model.module.middle[0].params[0]]
            if dist.get_rank() in halves[1]:
                if wrong is None:
                    state.clear()
                else:
                    state[wrong].view(-1)[0] += 1
            errors.append(error_of(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim)))  # noqa: B023
    return errors


@fairscale_on_cpu()
def gather_different_halves() -> None:
    """Each half of the ranks has a layer with its own name, which the other half does not have at all."""
    rank = dist.get_rank()
    plain, plain_optim = plain_experts(2)
    for halves in ALL_HALVES:
        half = next(index for index, ranks in enumerate(halves) if rank in ranks)
        net = Experts([half])
        sharded = Sharded(net)
        group = new_groups(*halves)
        net.experts[str(half)] = sharded.wrap(net.experts[str(half)], process_group=group)
        model = sharded.wrap(net)
        optim = adam(model.parameters())
        sharded.step(optim, range(STEPS))
        for recipient in (0, 2, 3):
            full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient)
            if full is not None:
                check_same(f"state by name, {halves}", by_name(full), state_by_name(plain, plain_optim), in_order=False)
                # 4 * 5 + 5 + 3 * 2 + 2 = 33 elements on 4 ranks: chunks of 9; 5 * 3 + 3 = 18 on 2 ranks: no padding
                check_same(
                    f"num_padded, {halves}", sorted(full["num_padded"]), [[0, 0], [0, 0], [0, 0, 0, 3]], in_order=False
                )
            check_gathered(full, recipient, plain, plain_optim)
            scattered = fsdp_optim.scatter_full_optim_state_dict(model, optim, full, recipient)
            check_same(f"scattered from rank {recipient}, {halves}", scattered, frozen_copy(optim), in_order=False)


class TestHalves(unittest.TestCase):
    """A unit on half of the ranks at a time."""

    @parameterized.expand([(True,), (False,)])
    def test_replicas_are_gathered_and_given_back(self, flatten: bool) -> None:
        run_on_ranks(gather_replicas, 4, flatten)

    def test_different_state_under_one_name_is_an_error_that_names_name_of(self) -> None:
        for index, errors in enumerate(zip(*run_on_ranks(gather_no_replicas, 4), strict=True)):
            words = (["name_of"], ["step"], ["no state"])[index % 3]
            check_alike(errors, "StateError", "middle.0.weight", "rank", *words)

    def test_groups_without_the_recipient_are_gathered(self) -> None:
        run_on_ranks(gather_different_halves, 4)


# ------------------------------------------------------------------------------------------- other roots


def on_group(ranks: Sequence[int], steps: int = STEPS, width: int = 7) -> tuple[Any, Any, Sharded]:
    """A nested model on a group of some ranks; the other ranks have no model."""
    group = new_groups(ranks)
    net = Net(width)
    sharded = Sharded(net)
    if dist.get_rank() not in ranks:
        return None, None, sharded
    options = {"process_group": group, "process_group_reduce_scatter": group}
    net.middle[0] = sharded.wrap(net.middle[0], **options)
    model = sharded.wrap(net, **options)
    optim = adam(model.parameters())
    sharded.step(optim, range(steps))
    return model, optim, sharded


@fairscale_on_cpu()
def everything_on_the_last_two() -> list[tuple[str, str, float]] | None:
    model, optim, sharded = on_group([2, 3])
    fresh, fresh_optim, _ = on_group([2, 3], steps=0)
    if model is None:
        return None
    plain, plain_optim = plain_net()
    for recipient in (2, 3, None):
        full = model.gather_full_optim_state_dict(optim, recipient)
        check_gathered(full, recipient, plain, plain_optim)
    wanted = frozen_copy(optim)
    check_same("shard", fresh.get_shard_from_optim_state_dict(full, fresh_optim), wanted, in_order=False)
    for source in (2, 3):
        given = full if dist.get_rank() == source else None
        shard = fsdp_optim.scatter_full_optim_state_dict(fresh, fresh_optim, given, source)
        check_same(f"scattered from rank {source}", shard, wanted, in_order=False)
    listed = dict(fsdp_optim.iter_full_optim_state(model, optim, recipient_rank=3))
    state = state_by_name(plain, plain_optim)
    check_same("iterated", listed, state if dist.get_rank() == 3 else dict.fromkeys(state), in_order=False)
    errors = [error_of(lambda: model.gather_full_optim_state_dict(optim, r)) for r in (0, 1, 4, -1)]  # noqa: B023
    errors += [error_of(lambda: fsdp_optim.scatter_full_optim_state_dict(model, optim, full, 1))]
    sharded.step(optim, [STEPS])
    return errors


@fairscale_on_cpu()
def two_models_at_once(rounds: int) -> None:
    """Ranks 0, 1 and ranks 2, 3 have a model each; one pair makes more calls, and others, than the other."""
    rank = dist.get_rank()
    a, a_optim, _ = on_group([0, 1])
    b, b_optim, _ = on_group([2, 3], width=6)
    model, optim, first, plain = (a, a_optim, 0, plain_net()) if rank < 2 else (b, b_optim, 2, plain_net(model=Net(6)))
    for index in range(rounds if rank < 2 else 2 * rounds + 1):
        recipient = first + index % 2
        check_gathered(
            fsdp_optim.gather_full_optim_state_dict(
                model, optim, recipient, options=fsdp_optim.CallOptions(timeout=20)
            ),
            recipient,
            *plain,
        )
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, None, options=fsdp_optim.CallOptions(timeout=20))
    check_gathered(full, None, *plain)
    shard = fsdp_optim.scatter_full_optim_state_dict(model, optim, full if rank == first + 1 else None, first + 1)
    check_same(f"scattered to rank {rank}", shard, frozen_copy(optim), in_order=False)


@fairscale_on_cpu()
def one_of_two_models_fails() -> tuple[str, str, float]:
    a, a_optim, _ = on_group([0, 1])
    b, b_optim, _ = on_group([2, 3])
    if a is not None:
        check_gathered(fsdp_optim.gather_full_optim_state_dict(a, a_optim, None), None, *plain_net())
        return "", "", 0.0
    if dist.get_rank() == 3:
        b_optim.state.clear()
    return error_of(lambda: fsdp_optim.gather_full_optim_state_dict(b, b_optim, None))


@fairscale_on_cpu()
def two_models_of_the_same_ranks() -> None:
    """A generator and a discriminator: one call after the other, each with its own optimizer."""
    models = [on_group([0, 1]), on_group([0, 1], width=6)]
    for (model, optim, _), width in zip(models, (7, 6), strict=True):
        iterated = dict(
            fsdp_optim.iter_full_optim_state(model, optim, None, options=fsdp_optim.CallOptions(bucket_nbytes=64))
        )
        check_same(f"width {width}", iterated, state_by_name(*plain_net(model=Net(width))), in_order=False)
    for model, optim, _ in models:
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
        check_same(
            "shard", fsdp_optim.get_shard_from_optim_state_dict(model, optim, full), frozen_copy(optim), in_order=False
        )


class TestOtherRoots(unittest.TestCase):
    def test_a_root_without_rank_0(self) -> None:
        by_rank = run_on_ranks(everything_on_the_last_two, 4)[2:]
        for wrong, errors in zip((0, 1, 4, -1, 1), zip(*by_rank, strict=True), strict=True):
            check_alike(errors, "RankError", f"_rank {wrong}", "[2, 3]")

    def test_two_models_on_disjoint_groups_at_the_same_time(self) -> None:
        run_on_ranks(two_models_at_once, 4, rounds=3)

    def test_one_of_two_models_fails_and_the_other_does_not_notice(self) -> None:
        by_rank = run_on_ranks(one_of_two_models_fails, 4)
        check_alike(by_rank[2:], "StateError", "no state")

    def test_two_models_of_the_same_ranks(self) -> None:
        run_on_ranks(two_models_of_the_same_ranks, 2)


# ------------------------------------------------------------------------------------------- mixtures


class Deep(nn.Module):
    """A parameter that is in no unit, a part on all ranks, one on half of them, and an expert of every rank."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__()
        self.loose = nn.Parameter(torch.zeros(3))
        self.whole = nn.Linear(3, 4)
        self.some = nn.Linear(4, 5)
        self.experts = nn.ModuleDict({str(expert): nn.Linear(5, 2) for expert in experts})


@fairscale_on_cpu()
def gather_everything() -> None:
    rank = dist.get_rank()
    half = new_groups([0, 3], [1, 2])
    alone = new_groups([0], [1], [2], [3])
    net = Deep([rank])
    sharded = Sharded(net)
    net.some = sharded.wrap(net.some, process_group=half, flatten_parameters=False)
    net.experts[str(rank)] = sharded.wrap(net.experts[str(rank)], process_group=alone)
    net.whole = sharded.wrap(net.whole)
    optim = adam(net.parameters())
    sharded.step(optim, range(STEPS))
    full = fsdp_optim.gather_full_optim_state_dict(net, optim, recipient_rank=2)
    check_gathered(full, 2, *plain_net(model=Deep(range(4))))
    shard = fsdp_optim.scatter_full_optim_state_dict(net, optim, full, source_rank=2)
    check_same(f"scattered to rank {rank}", shard, frozen_copy(optim), in_order=False)


class TestMixture(unittest.TestCase):
    def test_all_kinds_of_units_in_one_model_that_is_no_unit_itself(self) -> None:
        run_on_ranks(gather_everything, 4)

    def test_the_oracle_trains(self) -> None:
        """The comparisons above can fail: steps change the state, and different names have different numbers."""
        plain, optim = plain_experts(2)
        state = state_by_name(plain, optim)
        assert state["experts.0.bias"]["exp_avg"].abs().sum() > 0
        assert not torch.equal(state["experts.0.bias"]["exp_avg"], state["experts.1.bias"]["exp_avg"])
        before = state["trunk.bias"]["exp_avg"].clone()
        step_plain(plain, optim, [STEPS])
        assert not torch.equal(before, state_by_name(plain, optim)["trunk.bias"]["exp_avg"])
        with self.assertRaises(AssertionError):
            check_full({**optim.state_dict(), "param_groups": [{"params": [], "param_names": []}]}, optim, [])
