"""Fused weights under tensor parallel: DTensors whose ranks have a part of each of several groups of rows (`_StridedShard`)."""

from __future__ import annotations

import contextlib
import traceback
import unittest
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text
from kit.folders import InFolder
from kit.local_parts import local_of
from kit.tables import Table
from kit.trained import Oracle, Trained
from kit.wrapping import check_trip
from kit.wraps import mesh_2d
from parameterized import parameterized
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_optim
from fsdp_optim.adapters import ModelReader
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.testing.worker import _leave_world as leave_world


def strided(dim: int, factor: int) -> Placement:
    return _StridedShard(dim, split_factor=factor)


# ------------------------------------------------------------------------------------------ elements, rank by rank

PLACED: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((1,), (strided(0, 2),)),
    ((2,), (strided(0, 2),)),
    ((2,), (strided(0, 3),)),
    ((3,), (strided(1, 2),)),
    ((4,), (strided(-1, 3),)),
    ((5,), (strided(0, 2),)),
    ((2, 2), (Shard(0), strided(0, 2))),  # in order: fully_shard makes no such placements
    ((2, 2), (Replicate(), strided(0, 2))),
    ((2, 3), (Shard(1), strided(0, 2))),
    ((3, 2), (strided(0, 2), Shard(1))),
    ((2, 2), (strided(0, 3), strided(1, 2))),
    ((2, 2), (strided(0, 3), strided(0, 2))),
    ((2, 1, 2), (Shard(1), Replicate(), strided(0, 2))),
]
SHAPES = ((12, 6), (7, 5), (3, 4), (2, 2, 8), (1, 7))
OVER_TP = [((2, 2), factor, dim, size) for factor in (2, 3) for dim in (0, 1) for size in (12, 13)]


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        leave_world()


def check_model(what: str, model: nn.Module) -> None:
    """Raise where the placement of `weight`, whose values number its elements, says others than the local tensor has."""
    (named,) = ModelReader(model).read().handles
    handle = named.handle
    (placement,) = named.placements.values()
    local = handle.weights() if isinstance(handle.weights(), DTensor) else handle.param
    held = local_of(local).detach().reshape(-1)
    said = torch.full_like(held, -1)
    whole = torch.arange(float(placement.numel)).reshape(placement.shape)
    shard = placement.shard_of(dist.get_rank())
    for block in placement.blocks(shard) if shard is not None else ():
        index = tuple(slice(o, o + n) for o, n in zip(block.box.offsets, block.box.sizes, strict=True))
        said.as_strided(block.box.sizes, block.local_strides, block.offset).copy_(whole[index])
    check_same(what, said, held)


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(*shape)


class OneWeight(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def distributed(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> list[str]:
    """In one process: a weight that torch distributes, on every rank."""
    problems = []
    world_size = torch.Size(mesh_shape).numel()
    for rank in range(world_size):
        with as_rank(rank, world_size):
            mesh = init_device_mesh("cpu", mesh_shape)
            for shape in SHAPES:
                where = f"rank {rank}, {shape}"
                weight = distribute_tensor(numbered(shape), mesh, placements, src_data_rank=None)
                try:
                    check_model(where, OneWeight(weight))
                except Exception:
                    problems.append(f"{where}: {traceback.format_exc()}")
    return problems


def fully_sharded(mesh_shape: tuple[int, int], factor: int, dim: int, size: int) -> list[str]:
    """In one process: fully_shard over fused rows under tensor parallel, on the same and on another dimension."""
    problems = []
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = mesh_2d(mesh_shape, ("dp", "tp"))
            shape = (size, 3) if dim == 0 else (5, size)
            weight = distribute_tensor(numbered(shape), mesh["tp"], [strided(dim, factor)], src_data_rank=None)
            model = OneWeight(weight)
            fully_shard(model, mesh=mesh["dp"])
            try:
                check_model(f"rank {rank}", model)
            except Exception:
                problems.append(f"rank {rank}: {traceback.format_exc()}")
    return problems


def beside_each_other(factor: int) -> list[str]:
    """In one process, by rank: the error of a model with two weights that have one mesh, one shape and the same placements.

    fully_shard has cut the first one, and torch the second one, whose elements are elsewhere.
    """
    errors = []
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = mesh_2d((2, 2), ("dp", "tp"))
            whole = numbered((12, 3))
            model = OneWeight(distribute_tensor(whole, mesh["tp"], [strided(0, factor)], src_data_rank=None))
            fully_shard(model, mesh=mesh["dp"])
            cut = model.weight
            other = distribute_tensor(whole, cut.device_mesh, cut.placements, src_data_rank=None)
            both = nn.ModuleList([model, OneWeight(other)])
            errors.append(" ".join(error_text(lambda: ModelReader(both).read())))  # noqa: B023
    return errors


def all_placed() -> dict[str, list[str]]:
    leave_world()  # the real one, which is this process alone
    by_case = {f"{mesh}, {placements}": distributed(mesh, placements) for mesh, placements in PLACED}
    return by_case | {str(case): fully_sharded(*case) for case in OVER_TP}


def in_no_group(fn: Callable[..., list[str]], *args: Any) -> list[str]:
    """Call a function that makes groups of its own."""
    leave_world()
    return fn(*args)


class ElementsTest(unittest.TestCase):
    def test_every_element_on_every_rank(self) -> None:
        (by_case,) = run_on_ranks(all_placed, 1)
        self.assertEqual(len(by_case), len(PLACED) + len(OVER_TP))
        for case, problems in by_case.items():
            self.assertEqual(problems, [], case)

    def test_one_that_torch_has_cut_is_not_read_like_one_that_fully_shard_has_cut(self) -> None:
        for factor in (2, 3):
            (errors,) = run_on_ranks(in_no_group, 1, beside_each_other, factor)
            for error in errors:
                self.assertIn("WrapperError 1.weight: ", error)
                self.assertIn("with the elements in different places", error)


# ------------------------------------------------------------------------------------------ all verbs, and checkpoints


class Fused(nn.Module):
    """Fused projections as in a decoder: rows of three groups, of two groups, and groups inside experts."""

    placements = {"qkv": strided(0, 3), "gate_up": strided(0, 2), "experts": strided(1, 2), "down": Shard(1)}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(5))
        self.qkv = nn.Parameter(torch.empty(18, 4))
        self.gate_up = nn.Parameter(torch.empty(12, 5))
        self.experts = nn.Parameter(torch.empty(3, 8, 2))
        self.down = nn.Parameter(torch.empty(4, 7))


def in_tp(dp: int, tp: int, model: Any) -> Any:
    """Tensor parallel, and fully_shard over it where there are ranks for it."""
    mesh = mesh_2d((dp, tp), ("dp", "tp"))
    for name, placement in Fused.placements.items():
        whole = getattr(model, name).detach()
        setattr(model, name, nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement], src_data_rank=None)))
    if dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    else:
        model.norm = nn.Parameter(distribute_tensor(model.norm.detach(), mesh["tp"], [Replicate()], src_data_rank=None))
    return model


def trip(dp: int, tp: int) -> None:
    check_trip(partial(in_tp, dp, tp), model=Fused)


TRIPS = Table(trip, [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 2)])


def saved(folder: str, dp: int, tp: int) -> None:
    trained = Trained(partial(in_tp, dp, tp), model=Fused)
    fsdp_optim.save(folder, trained.model, trained.optim)


def loaded(folder: str, dp: int, tp: int) -> None:
    """The checkpoint of other ranks, in this cut; it trains on as the oracle does."""
    target = Trained(partial(in_tp, dp, tp), steps=0, model=Fused)
    numbers = [local_of(param).detach().clone() for param in target.params]
    trained_here = Trained(partial(in_tp, dp, tp), model=Fused)
    fsdp_optim.load(folder, target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True))
    check_same("weights", [local_of(p) for p in target.params], [local_of(p) for p in trained_here.params])
    same = [torch.equal(a, local_of(b)) for a, b in zip(numbers, target.params, strict=True) if a.numel()]
    check_same("they were others before", any(same), False)
    check_same("state", target.gather(None, "name")["state"], Oracle(model=Fused).by_name())


def foreign_dict() -> tuple[str, str]:
    """A sharded dict of interleaved rows that fully_shard has cut: its values do not say where their elements are."""
    trained = Trained(partial(in_tp, 2, 2), model=Fused)
    sharded = get_optimizer_state_dict(trained.model, trained.optim)
    return error_text(partial(trained.shard, sharded))


class TripTest(InFolder):
    @parameterized.expand(TRIPS.cases)
    def test_all_verbs(self, world_size: int, dp: int, tp: int) -> None:
        TRIPS(world_size, dp, tp)

    @parameterized.expand([((1, 2), [(1, 1), (2, 2), (1, 3)]), ((2, 2), [(1, 1), (1, 2), (1, 4)])])
    def test_saved_and_loaded_at_other_degrees(self, source: tuple[int, int], targets: list[tuple[int, int]]) -> None:
        folder = str(self.root / "step")
        run_on_ranks(saved, source[0] * source[1], folder, *source)
        whole = Oracle(model=Fused)
        plain = Oracle(model=Fused, steps=0)
        fsdp_optim.load(folder, plain.model, plain.optim, options=fsdp_optim.LoadOptions(compare=True))
        check_same("unsharded", plain.model.state_dict(), whole.model.state_dict())
        check_same("its state", plain.by_name(), whole.by_name())
        for dp, tp in targets:
            run_on_ranks(loaded, dp * tp, folder, dp, tp)

    def test_what_two_wrappers_place_differently_is_refused(self) -> None:
        words = ("interleaved rows", "redistribute")
        check_refused("sharded dict", run_on_ranks(foreign_dict, 4), "WrapperError", *words)


if __name__ == "__main__":
    unittest.main()
