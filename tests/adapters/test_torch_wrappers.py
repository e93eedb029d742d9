"""All verbs, with every sharding strategy and mesh of torch, give the unwrapped optimizer's state."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.models import Net
from kit.tables import Table
from kit.torch_limits import NO_IGNORED, NO_UNEVEN_TP, cannot_run, skip_if
from kit.trained import Trained
from kit.wrapping import check_trip, cpu
from kit.wraps import WRAPPERS, fsdp1_hybrid, fsdp1_hybrid_groups, in_fsdp1, in_fsdp2, in_fsdp2_over_tp, in_hsdp
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

S = ShardingStrategy


class Even(nn.Module):
    """Dimensions that 2 and 4 divide, for models that torch refuses to cut unevenly."""

    units = ("first", "")
    tensor_parallel = {"first": ColwiseParallel(), "last": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4, bias=False)


def fsdp1(**kwargs: Any) -> Callable[[nn.Module], Any]:
    return lambda model: in_fsdp1(model, **kwargs)


def fsdp1_ignoring(orig: bool) -> Callable[[nn.Module], Any]:
    def wrap(model: Any) -> Any:
        return in_fsdp1(model, ignored_modules=[model.block[1], model.head], use_orig_params=orig)

    return wrap


def fsdp1_ignoring_parameters(model: Any) -> Any:
    return in_fsdp1(model, ignored_states=[model.mix, model.stem.bias])


def fsdp1_unit_on_halves(orig: bool) -> Callable[[nn.Module], Any]:
    """A unit that ranks 0, 1 shard, and ranks 2, 3 again, in a model that all four shard."""

    def wrap(model: Any) -> Any:
        options = {"use_orig_params": orig, "device_id": torch.device("cpu")}
        half = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
        model.block = TorchFSDP(model.block, process_group=half, **options)
        return TorchFSDP(model, **options)

    return wrap


def fsdp1_hybrid_on(ranks: list[list[int]], orig: bool) -> Callable[[nn.Module], Any]:
    """Shards over ranks that the mesh lists in any order: process groups have their ranks in ascending order."""

    def wrap(model: Any) -> Any:
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
        return in_fsdp1(model, device_mesh=mesh, sharding_strategy=S.HYBRID_SHARD, use_orig_params=orig)

    return wrap


def fsdp1_kinds_mixed(model: Any) -> Any:
    """One unit of each wrapper in one model."""
    options = {"device_id": torch.device("cpu")}
    model.stem = TorchFSDP(model.stem, use_orig_params=True, **options)
    model.block = TorchFSDP(model.block, sharding_strategy=S.SHARD_GRAD_OP, use_orig_params=True, **options)
    model.head = TorchFSDP(model.head, sharding_strategy=S.NO_SHARD, use_orig_params=True, **options)
    return TorchFSDP(model, use_orig_params=True, **options)


FSDP1: dict[str, tuple[int, Callable[[nn.Module], Any]]] = {
    **{
        f"{strategy.name}, {'orig' if orig else 'flat'}": (3, fsdp1(sharding_strategy=strategy, use_orig_params=orig))
        for strategy in (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD)
        for orig in (False, True)
    },
    **{
        f"{strategy.name} {shape}, {'orig' if orig else 'flat'}": (4, fsdp1_hybrid(shape, strategy, orig))
        for strategy in (S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2)
        for shape in ((2, 2), (1, 4), (4, 1))
        for orig in (False, True)
    },
    "HYBRID_SHARD on process groups": (4, fsdp1_hybrid_groups),
    "HYBRID_SHARD of ranks in any order": (4, fsdp1_hybrid_on([[3, 0], [2, 1]], False)),
    "HYBRID_SHARD of ranks in any order, orig": (4, fsdp1_hybrid_on([[1, 0], [3, 2]], True)),
    "one unit": (3, lambda model: TorchFSDP(model, device_id=torch.device("cpu"))),
    "one unit, orig": (3, lambda model: TorchFSDP(model, device_id=torch.device("cpu"), use_orig_params=True)),
    "mixed precision": (2, fsdp1(mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16))),
    "mixed precision, orig": (2, fsdp1(mixed_precision=MixedPrecision(torch.float16), use_orig_params=True)),
    "CPU offload": (2, fsdp1(cpu_offload=CPUOffload(True))),
    "CPU offload, orig": (3, fsdp1(cpu_offload=CPUOffload(True), use_orig_params=True)),
    "ignored modules": (3, fsdp1_ignoring(False)),
    "ignored modules, orig": (3, fsdp1_ignoring(True)),
    "ignored parameters": (2, fsdp1_ignoring_parameters),
    "unit on two halves": (4, fsdp1_unit_on_halves(False)),
    "unit on two halves, orig": (4, fsdp1_unit_on_halves(True)),
    "kinds mixed": (3, fsdp1_kinds_mixed),
}


def fsdp2(**kwargs: Any) -> Callable[[nn.Module], Any]:
    return lambda model: in_fsdp2(model, **kwargs)


def fsdp2_on(ranks: Any, **kwargs: Any) -> Callable[[nn.Module], Any]:
    return lambda model: in_fsdp2(model, DeviceMesh("cpu", ranks), **kwargs)


def hsdp_on(ranks: Any) -> Callable[[nn.Module], Any]:
    return lambda model: in_fsdp2(model, DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")))


def shard_last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


def hsdp_over_tp(model: Any) -> Any:
    """Three mesh dimensions: replicas, shards, tensor parallel."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    parallelize_module(model, mesh["tp"], dict(model.tensor_parallel))
    return in_fsdp2(model, mesh["replicate", "shard"])


def fsdp2_beside_plain(model: Any) -> Any:
    """A model with one sharded module. The other parameters are ordinary, and equal on all ranks."""
    fully_shard(model.block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def fsdp2_unit_on_halves(model: Any) -> Any:
    half = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])][dist.get_rank() // 2]
    fully_shard(model.block, mesh=half)
    return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


def fsdp2_ignoring(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, ignored_params={model.mix, *model.head.parameters()})


FSDP2: dict[str, tuple[int, Callable[[nn.Module], Any], type[nn.Module]]] = {
    "1-D mesh": (3, fsdp2(), Net),
    "reshard_after_forward=True": (2, fsdp2(reshard_after_forward=True), Net),
    "reshard_after_forward=False": (2, fsdp2(reshard_after_forward=False), Net),
    "reshard_after_forward=2": (4, fsdp2(reshard_after_forward=2), Net),
    "HSDP 2 x 2": (4, lambda model: in_hsdp(model, (2, 2)), Net),
    "HSDP 1 x 3": (3, lambda model: in_hsdp(model, (1, 3)), Net),
    "HSDP 3 x 1": (3, lambda model: in_hsdp(model, (3, 1)), Net),
    "HSDP of ranks that are no neighbours": (4, hsdp_on([[0, 2], [1, 3]]), Net),
    "HSDP of ranks in any order": (4, hsdp_on([[3, 0], [1, 2]]), Net),
    "mesh of ranks in any order": (4, fsdp2_on([2, 0, 3, 1]), Net),
    "mesh of reversed ranks": (3, fsdp2_on([2, 1, 0]), Net),
    "CPU offload policy": (2, fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)), Net),
    "mixed precision policy": (2, fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), Net),
    "Shard of the last dimension": (2, fsdp2(shard_placement_fn=shard_last_dim), Even),
    "Shard of the last dimension on 4": (4, fsdp2(shard_placement_fn=shard_last_dim), Even),
    "HSDP, Shard of the last dimension": (
        4,
        lambda model: in_hsdp(model, (2, 2), shard_placement_fn=shard_last_dim),
        Even,
    ),
    "ignored parameters": (3, fsdp2_ignoring, Net),
    "beside plain modules": (3, fsdp2_beside_plain, Net),
    "unit on two halves": (4, fsdp2_unit_on_halves, Net),
    "x TP 2 x 2": (4, lambda model: in_fsdp2_over_tp(model, (2, 2)), Net),
    "x TP 2 x 1": (2, lambda model: in_fsdp2_over_tp(model, (2, 1)), Net),
    "x TP 1 x 4": (4, lambda model: in_fsdp2_over_tp(model, (1, 4)), Net),
    "x TP 3 x 1": (3, lambda model: in_fsdp2_over_tp(model, (3, 1)), Net),
    "x TP, even": (4, lambda model: in_fsdp2_over_tp(model, (2, 2)), Even),
    "HSDP x TP": (4, hsdp_over_tp, Net),
}


def only_tp(model: Any) -> Any:
    """The modules that are not in the plan stay ordinary parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, dict(model.tensor_parallel))


def tp_with_replicas(model: Any) -> Any:
    """LayerNorm's parameters become Replicate."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {**model.tensor_parallel, "norm": SequenceParallel()})


def ddp_of_tp(model: Any) -> Any:
    """Replicas of a tensor parallel model: DTensors on a mesh of some ranks each."""
    half = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])][dist.get_rank() // 2]
    return parallelize_module(model, half, dict(model.tensor_parallel))


def distributed(*placements: Any, shape: tuple[int, ...] = (2, 2)) -> Callable[[nn.Module], Any]:
    """Every parameter as a DTensor with these placements (dimensions that it lacks: its last one)."""

    def wrap(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
        for module in list(model.modules()):
            for name, param in list(module.named_parameters(recurse=False)):
                fitting = [Shard(min(p.dim, param.dim() - 1)) if isinstance(p, Shard) else p for p in placements]
                made = distribute_tensor(param.data, mesh, fitting)
                setattr(module, name, nn.Parameter(made))
        return model

    return wrap


DTENSORS: dict[str, tuple[int, Callable[[nn.Module], Any], type[nn.Module]]] = {
    "tensor parallel": (2, only_tp, Net),
    "tensor parallel on 3": (3, only_tp, Net),
    "tensor parallel with replicas": (2, tp_with_replicas, Even),
    "two copies of tensor parallel": (4, ddp_of_tp, Net),
    "Replicate": (2, distributed(Replicate(), shape=(2,)), Net),
    "Shard(1)": (3, distributed(Shard(1), shape=(3,)), Net),
    "Shard(-1)": (2, distributed(Shard(2), shape=(2,)), Net),
    "Shard(0), Shard(0)": (4, distributed(Shard(0), Shard(0)), Net),
    "Shard(0), Shard(1)": (4, distributed(Shard(0), Shard(1)), Net),
    "Shard(1), Shard(0)": (4, distributed(Shard(1), Shard(0)), Net),
    "Replicate, Shard(0)": (4, distributed(Replicate(), Shard(0)), Net),
    "Shard(0), Replicate": (4, distributed(Shard(0), Replicate()), Net),
    "three dimensions": (4, distributed(Shard(0), Replicate(), Shard(1), shape=(2, 1, 2)), Net),
}


def through_forward(trained: Trained) -> None:
    """A forward and a backward pass, as training has them before a save."""
    trained.forget_gradients()
    trained.model(torch.ones(2, 5)).sum().backward()
    trained.forget_gradients()


def through_evaluation(trained: Trained) -> None:
    """A forward pass without gradients, as an evaluation has it before a save. Wrappers may leave parameters whole."""
    with torch.no_grad():
        trained.model(torch.ones(2, 5))


def trip(table: str, case: str) -> None:
    with cpu():
        if table == "FSDP1":
            lost = case == "ignored parameters"  # torch takes some parameters of a module and leaves others
            check_trip(FSDP1[case][1], key_by="name" if lost else "id")
        else:
            _, wrap, model = {"FSDP2": FSDP2, "DTENSORS": DTENSORS}[table][case]
            check_trip(wrap, model=model, process_group=dist.group.WORLD)


def used_trip(table: str, case: str, use: str) -> None:
    with cpu():
        wrap = {"FSDP1": FSDP1, "FSDP2": FSDP2, "WRAPPERS": {w: (0, w) for w in WRAPPERS}}[table][case][1]
        check_trip(wrap, before_calls={"forward": through_forward, "evaluation": through_evaluation}[use])


LATER = {
    *(
        "HYBRID_SHARD (1, 4), flat",
        "HYBRID_SHARD (1, 4), orig",
        "HYBRID_SHARD (4, 1), flat",
        "HYBRID_SHARD (4, 1), orig",
    ),
    *("_HYBRID_SHARD_ZERO2 (2, 2), flat", "_HYBRID_SHARD_ZERO2 (2, 2), orig"),
    *("_HYBRID_SHARD_ZERO2 (1, 4), orig", "_HYBRID_SHARD_ZERO2 (4, 1), flat", "one unit", "SHARD_GRAD_OP, flat"),
    *(
        "HSDP 1 x 3",
        "HSDP of ranks in any order",
        "x TP 2 x 1",
        "x TP 3 x 1",
        "x TP 1 x 4",
    ),
    *("Shard(1)", "Shard(1), Shard(0)", "Replicate, Shard(0)", "Shard of the last dimension on 4"),
    *("SHARD_GRAD_OP, orig", "HYBRID_SHARD (2, 2), flat", "_HYBRID_SHARD_ZERO2 (1, 4), flat"),
    *("unit on two halves, orig", "Shard(0), Replicate"),
    *("_HYBRID_SHARD_ZERO2 (4, 1), orig", "mixed precision, orig", "CPU offload", "ignored modules", "one unit, orig"),
    *("reshard_after_forward=True", "HSDP 2 x 2", "HSDP 3 x 1", "x TP, even"),
    *("tensor parallel on 3", "Shard(0), Shard(1)", "HSDP, Shard of the last dimension", "Replicate"),
    # These are in other tests of `make test-all`: of WRAPPERS, or after the model was used.
    *("FULL_SHARD, flat", "NO_SHARD, flat", "1-D mesh", "x TP 2 x 2", "reshard_after_forward=False", "mixed precision"),
    "FULL_SHARD, orig",
}
"""In `make test-long` only: cuts that test_layouts.py has at many more sizes, or that are the mirror of one that stays."""
TABLES: dict[str, Mapping[str, tuple[Any, ...]]] = {"FSDP1": FSDP1, "FSDP2": FSDP2, "DTENSORS": DTENSORS}
ALL = [(row[0], name, case) for name, table in TABLES.items() for case, row in table.items()]


def cannot_trip(case: tuple[Any, ...]) -> str:
    """Why this torch cannot make a case."""
    _, table, name = case
    if table != "FSDP2" or name == "x TP, even":
        return ""
    return NO_IGNORED if name == "ignored parameters" else NO_UNEVEN_TP if "x TP" in name else ""


SOON, REST = ([one for one in ALL if (one[2] in LATER) == later] for later in (False, True))
SOON_TABLE, REST_TABLE = (Table(trip, [one for one in cases if not cannot_trip(one)]) for cases in (SOON, REST))
USED = some(
    [
        (world_size, table, case, use)
        for use in ("forward", "evaluation")
        for table, case, world_size in (
            ("FSDP1", "FULL_SHARD, flat", 2),
            ("FSDP1", "FULL_SHARD, orig", 2),
            ("FSDP1", "SHARD_GRAD_OP, flat", 2),
            ("FSDP1", "SHARD_GRAD_OP, orig", 2),
            ("FSDP1", "NO_SHARD, orig", 2),
            ("FSDP1", "mixed precision", 2),
            ("FSDP1", "mixed precision, orig", 2),  # CPU offload is missing: torch's forward waits for a GPU stream
            ("FSDP2", "1-D mesh", 3),
            ("FSDP2", "reshard_after_forward=True", 2),
            ("FSDP2", "reshard_after_forward=False", 2),
            ("FSDP2", "reshard_after_forward=2", 4),
            ("FSDP2", "mixed precision policy", 2),
            ("WRAPPERS", "DDP", 2),
            ("WRAPPERS", "HSDP", 4),
        )
        # After a forward and a backward pass nothing is left whole; an evaluation leaves what is not resharded.
        if use == "evaluation"
        or case in ("FULL_SHARD, flat", "SHARD_GRAD_OP, orig", "mixed precision", "1-D mesh", "HSDP")
    ],
    every=2,
)


def cannot_use(case: tuple[Any, ...]) -> str:
    return cannot_run(case[1] if case[1] != "WRAPPERS" else case[2])


USED_TABLE = Table(used_trip, *([case for case in cases if not cannot_use(case)] for cases in USED))


class StrategiesTest(unittest.TestCase):
    def test_what_runs_later_is_there(self) -> None:
        self.assertEqual(LATER, {case for _, _, case in REST})
        self.assertEqual(len(SOON) + len(REST), len(FSDP1) + len(FSDP2) + len(DTENSORS))

    @parameterized.expand(SOON)
    def test_trip(self, *case: Any) -> None:
        skip_if(self, cannot_trip(case))
        SOON_TABLE(*case)

    @expand(*USED)
    def test_after_the_model_was_used(self, *case: Any) -> None:
        skip_if(self, cannot_use(case))
        USED_TABLE(*case)


@pytest.mark.slow
class OtherStrategiesTest(unittest.TestCase):
    @parameterized.expand(REST)
    def test_trip(self, *case: Any) -> None:
        skip_if(self, cannot_trip(case))
        REST_TABLE(*case)
