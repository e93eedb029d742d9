"""Several of torch's wrappers in one model, and what is refused."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_refused, check_same, error_text
from kit.experts import Experts, global_name, train_experts
from kit.local_parts import local
from kit.models import Net
from kit.optimizers import adam
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import check_trip, cpu
from kit.wraps import fsdp1_unit, fsdp2_unit, in_ddp, in_fsdp2
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    fully_shard,
)
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_optim
import fsdp_optim.fairscale
from fsdp_optim.testing import run_on_ranks

# ------------------------------------------------------------------------------------------- mixes


def experts(kind: str, num_experts: int, num_groups: int) -> None:
    """Every group of ranks has its own experts, under the names `experts.0`, ..."""
    with cpu():
        world = dist.get_world_size()
        per_group, each = world // num_groups, num_experts // num_groups
        group_of = [rank // per_group for rank in range(world)]
        experts_of = [tuple(range(g * each, (g + 1) * each)) for g in group_of]
        own_experts = experts_of[dist.get_rank()]

        def name_of(fqn: str, rank: int) -> str:
            return global_name(experts_of[rank], fqn)

        oracle = Oracle(adam, STEPS, lambda: Experts(num_experts))
        ranks = tuple(range(per_group))
        trained = train_experts(kind, own_experts, ranks, oracle, STEPS)
        target = train_experts(kind, own_experts, ranks, oracle, 0)
        full = trained.gather(None, collect="all", name_of=name_of)
        shard = target.shard(full, name_of=name_of)
        scattered = target.scatter(full, world - 1, name_of=name_of)
        fsdp_optim.load_optim_state_dict(target.optim, scattered)
        again = target.gather(None, "name", collect="all", name_of=name_of)
        check_same("state", _by_name(full), oracle.by_name())
        check_same("the shards", local(shard["state"]), local(trained.optim.state_dict()["state"]))
        check_same("the shards of scatter", local(scattered["state"]), local(shard["state"]))
        check_same("gathered again", {n: again["state"][n] for n in oracle.names}, oracle.by_name())


def _by_name(full: Any) -> dict[str, Any]:
    names = {i: n for g in full["param_groups"] for i, n in zip(g["params"], g["param_names"], strict=True)}
    by_name = {names[i]: values for i, values in full["state"].items()}
    return {name: by_name[name] for name in sorted(by_name, key=list(names.values()).index)}


def mix(kind: str) -> None:
    with cpu():
        check_trip(MIXES[kind], process_group=dist.group.WORLD)


def fsdp1_over_fairscale(model: Any) -> Any:
    """Wrappers of three kinds beside each other, and ordinary parameters."""
    model.stem = fsdp_optim.fairscale.FullyShardedDataParallel(model.stem)
    model.block = fsdp1_unit(model.block)
    model.head = fsdp2_unit(model.head)
    return model


def ddp_beside_fsdp(model: Any) -> Any:
    model.stem = in_ddp(model.stem)
    model.block = fsdp1_unit(model.block, orig=False)
    return model


def tp_beside_fsdp2(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"stem": ColwiseParallel()})
    fully_shard(model.block, mesh=mesh)
    return model


MIXES: dict[str, Callable[[Any], Any]] = {
    "fairscale, FSDP1, FSDP2 and plain": fsdp1_over_fairscale,
    "DDP, FSDP1 and plain": ddp_beside_fsdp,
    "TP, FSDP2 and plain": tp_beside_fsdp2,
}


class MixesTest(unittest.TestCase):
    @expand(*some([(kind, n) for kind in ("FSDP1", "FSDP1 orig", "FSDP2", "fairscale") for n in (2, 4)], every=3))
    def test_experts_of_sub_groups(self, kind: str, num_groups: int) -> None:
        run_on_ranks(experts, 4, kind, 4, num_groups)

    @parameterized.expand(list(zip(MIXES, itertools.cycle((2, 3)))))
    def test_wrappers_of_several_kinds_in_one_model(self, kind: str, world_size: int) -> None:
        run_on_ranks(mix, world_size, kind)


# ------------------------------------------------------------------------------------------- refused


def partial_sum() -> tuple[str, str]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(model[1].weight.data, mesh, [Partial()], run_check=False)
    model[1].weight = nn.Parameter(made)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return error_text(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim))


def unequal_replicas(wrapper: str) -> tuple[str, str]:
    """Ranks that should hold replicas have trained on different gradients."""
    with cpu():
        trained = Trained(wrapper)
        rank = dist.get_rank()
        for values in trained.optim.state.values():
            if rank == 1:
                values["exp_avg"].add_(1.0)
        return error_text(lambda: trained.gather(0))


def stranger() -> tuple[str, str]:
    """The optimizer was built before wrapping."""
    model = Net()
    optim = adam(list(model.parameters()))
    wrapped = in_fsdp2(model)
    return error_text(lambda: fsdp_optim.gather_full_optim_state_dict(wrapped, optim))


class RefusedTest(unittest.TestCase):
    def test_a_sum_that_is_not_made_yet(self) -> None:
        check_refused("Partial", run_on_ranks(partial_sum, 2), "WrapperError", "1.weight")

    def test_plain_models_of_one_name_that_differ(self) -> None:
        check_refused("plain", run_on_ranks(unequal_replicas, 2, "plain"), "StateError", "scale", "rank")

    def test_an_optimizer_of_other_parameters(self) -> None:
        errors = run_on_ranks(stranger, 2)
        self.assertEqual({name for name, _ in errors}, {"WrapperError"})
