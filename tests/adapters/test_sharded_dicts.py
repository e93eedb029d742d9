"""torch's own sharded dicts, of which every rank has its part: plain values beside sharded ones, odd shapes, several meshes."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_refused, check_same, error_text
from kit.experts import Experts, global_name, train_experts
from kit.optimizers import adam
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from kit.wraps import in_fsdp1
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_optim
from fsdp_optim.layout import Block, Box, Boxes
from fsdp_optim.testing import run_on_ranks

TARGETS = ("FSDP2", "FSDP1 flat", "fairscale flat", "plain")


class Rows(torch.optim.Optimizer):
    """An optimizer with values of other shapes than the parameter's: one per row, which DTensor cuts, and four plain numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.state[param]
            if not state:
                state.update(steps=0, momentum=torch.zeros_like(param), four=torch.zeros(4))
            state["steps"] += 1
            state["momentum"].add_(param.grad)
            state["four"].add_(0.5)
            if param.dim() == 2:
                state["peaks"] = param.grad.abs().amax(dim=1)


def _sharded_fsdp1(trained: Trained) -> Any:
    with TorchFSDP.state_dict_type(
        trained.model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        return TorchFSDP.optim_state_dict(trained.model, trained.optim)


def _full_fsdp1(trained: Trained) -> Any:
    with TorchFSDP.state_dict_type(
        trained.model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    ):
        return TorchFSDP.optim_state_dict(trained.model, trained.optim)


def _sharded(trained: Trained) -> Any:
    return get_optimizer_state_dict(trained.model, trained.optim)


def _in_another_order(trained: Trained) -> Any:
    """Rank 1 lists its parameters in reverse order."""
    given = _sharded(trained)
    group = given["param_groups"][0]
    if dist.get_rank() == 1:
        return {**given, "param_groups": [{**group, "params": group["params"][::-1]}]}
    return given


def tensor_parallel(model: Any) -> Any:
    """The rest are ordinary parameters, with ordinary state."""
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), {"stem": ColwiseParallel()})


def ignoring(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, ignored_params={model.mix, *model.head.parameters()})


def ddp_inside(orig: bool) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        model.block = nn.parallel.DistributedDataParallel(model.block)
        return TorchFSDP(model, device_id=torch.device("cpu"), use_orig_params=orig)

    return wrap


def hybrid_on_groups(orig: bool) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        rank = dist.get_rank()
        within = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        across = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        strategy = ShardingStrategy.HYBRID_SHARD
        return in_fsdp1(model, process_group=(within, across), sharding_strategy=strategy, use_orig_params=orig)

    return wrap


CASES: dict[str, tuple[int, Any, Any, Callable[[Trained], Any]]] = {
    "tensor parallel beside plain": (2, tensor_parallel, adam, _sharded),
    "ignored parameters": (2, ignoring, adam, _sharded),
    "replicas on sub-meshes": (2, "FSDP2 x TP", adam, _sharded),
    "values of another shape": (2, "FSDP2", Rows, _sharded),
    "another order on another rank": (2, "FSDP2", adam, _in_another_order),
    "DDP inside FSDP1": (2, ddp_inside(False), adam, _sharded_fsdp1),
    "DDP inside FSDP1, orig": (2, ddp_inside(True), adam, _sharded_fsdp1),
    "DDP inside FSDP1, full": (2, ddp_inside(False), adam, _full_fsdp1),
    "DDP inside FSDP1, orig, full": (2, ddp_inside(True), adam, _full_fsdp1),
    "HYBRID_SHARD on process groups": (4, hybrid_on_groups(False), adam, _sharded_fsdp1),
    "HYBRID_SHARD on process groups, orig": (4, hybrid_on_groups(True), adam, _sharded_fsdp1),
}


def into_wrappers(case: str) -> None:
    _, wrap, make, dict_of = CASES[case]
    with cpu():
        given = dict_of(Trained(wrap, make))
        wanted = _ordered(Oracle(make).by_name())
        other = TARGETS[list(CASES).index(case) % len(TARGETS)] if make is adam else "plain"
        for target_wrap in (wrap, other):
            target = Trained(target_wrap, make, 0)
            shard = target.shard(given, process_group=dist.group.WORLD)
            fsdp_optim.load_optim_state_dict(target.optim, shard)
            again = target.gather(None, "name", process_group=dist.group.WORLD)
            check_same(f"{case} -> {target_wrap}", _ordered(again["state"]), wanted)


def _ordered(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: dict(sorted(values.items())) for name, values in sorted(state.items())}


def experts_on_sub_meshes() -> list[tuple[str, str]]:
    """Each rank has a separate expert on a separate mesh, under the name `experts.0`."""
    rank = dist.get_rank()
    oracle = Oracle(adam, STEPS, lambda: Experts(2))

    def name_of(fqn: str, rank: int) -> str:
        return global_name((rank,), fqn)

    trained, target = (train_experts("FSDP2", (rank,), (0,), oracle, steps) for steps in (STEPS, 0))
    given = _sharded(trained)
    fsdp_optim.load_optim_state_dict(target.optim, target.shard(given, name_of=name_of))
    again = target.gather(None, "name", collect="all", name_of=name_of)
    check_same("experts", _ordered(again["state"]), _ordered(oracle.by_name()))
    whole = Trained("FSDP2", adam, 0, lambda: Experts(2))
    return [error_text(lambda: target.shard(given)), error_text(lambda: whole.shard(given))]


def parts_that_differ() -> list[tuple[str, str]]:
    """A plain value, a plain number, a hyperparameter, a group and a value more on rank 1 than on rank 0."""
    trained = Trained(tensor_parallel)
    given = _sharded(trained)
    group, state = given["param_groups"][0], given["state"]
    bias = state["head.bias"]
    changes = [
        {"state": {**state, "head.bias": {**bias, "exp_avg": bias["exp_avg"] + 1}}},
        {"state": {**state, "head.bias": {**bias, "step": bias["step"] + 1}}},
        {"param_groups": [{**group, "lr": 0.75}]},
        {"param_groups": [group, {**group, "params": []}]},
        {"state": {**state, "head.bias": {**bias, "further": torch.zeros(3)}}},
    ]
    other = [{**given, **change} if dist.get_rank() == 1 else given for change in changes]
    return [error_text(lambda changed=changed: trained.shard(changed)) for changed in other]  # type: ignore[misc]


class Scaled(nn.Module):
    """A temperature, which has no dimensions, beside weights that are cut. `kind`: how the temperature is there."""

    def __init__(self, kind: str, number: float) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.weight = nn.Parameter(distribute_tensor(torch.full((5, 3), number), mesh, [Shard(0)]))
        scale = torch.tensor(number)
        self.scale = nn.Parameter(scale if kind == "plain" else distribute_tensor(scale, mesh, [Replicate()]))


def without_dimensions() -> None:
    for kind in ("plain", "DTensor"):
        model, target = Scaled(kind, 2.0), Scaled(kind, 0.0)
        optims = [adam(each.parameters()) for each in (model, target)]
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, number + 0.5)
        optims[0].step()
        given = optims[0].state_dict()
        fsdp_optim.load_optim_state_dict(optims[1], fsdp_optim.reshard_optim_state_dict(target, optims[1], given))
        for name in ("exp_avg", "exp_avg_sq", "step"):
            of_scale, wanted = (
                optim.state[each.scale][name] for optim, each in zip(optims[::-1], (target, model), strict=True)
            )
            check_same(f"{kind}: {name}", type(of_scale), type(wanted))
            check_same(
                f"{kind}: {name}", *(getattr(value, "full_tensor", value.clone)() for value in (of_scale, wanted))
            )


class ShardedDictsTest(unittest.TestCase):
    """The result equals the unwrapped optimizer's state, bit for bit, in every wrapper."""

    @expand(*some(CASES, every=2))
    def test_is_accepted(self, case: str) -> None:
        run_on_ranks(into_wrappers, CASES[case][0], case)

    def test_parameters_without_dimensions(self) -> None:
        run_on_ranks(without_dimensions, 2)

    def test_experts_on_sub_meshes(self) -> None:
        by_rank = run_on_ranks(experts_on_sub_meshes, 2)
        for what, errors in zip(
            ("no names of their own", "a model with all experts"), zip(*by_rank, strict=True), strict=True
        ):
            check_refused(what, errors, "StateError", "experts.0.", "name_of")

    def test_parts_of_different_dicts_are_refused_by_name(self) -> None:
        by_rank = run_on_ranks(parts_that_differ, 2)
        words = (
            ("head.bias: exp_avg", "rank 0", "rank 1"),
            ("head.bias: step", "rank 0", "rank 1", "tensor(3.)", "tensor(4.)"),
            ("lr", "0.01", "0.75", "rank 1"),
            ("1 param group on rank 0", "2 on rank 1"),
            ("head.bias: further", "rank 0"),
        )
        for expected, errors in zip(words, zip(*by_rank, strict=True), strict=True):
            check_refused(str(expected), errors, "StateError", *expected)


class BoxesTest(unittest.TestCase):
    def test_replicas_join_where_they_are_cut_alike(self) -> None:
        upper, lower = ((Block(Box((start, 0), (2, 3)), 0),) for start in (0, 2))
        boxes, other = Boxes((4, 3), ((0, upper), (2, lower))), Boxes((4, 3), ((1, upper), (3, lower)))
        self.assertEqual(boxes.join(other), Boxes((4, 3), ((0, upper), (1, upper), (2, lower), (3, lower))))
        self.assertIsNone(boxes.join(Boxes((4, 3), ((1, lower),))))
        self.assertIsNone(boxes.join(Boxes((4, 3), ((0, lower), (2, upper)))))
        self.assertIsNone(boxes.join(Boxes((5, 3), boxes.by_rank)))


if __name__ == "__main__":
    unittest.main()
