"""Layouts of every wrapper at 1 to 16 ranks, in one process: torch's fake process group builds models of any world.

Every element of the unwrapped model has a number of its own as its value. What a rank really has in its live parameters is
compared with what the adapter says of that rank, and what it says is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, those
from kit.compare import Differs, check_same
from kit.elements import Numbers
from kit.local_parts import local_of
from kit.models import Net
from kit.shapes import REFUSES_SCALARS, SHAPES
from kit.wrapping import cpu
from kit.wraps import WRAPPERS, fsdp1_hybrid, in_fsdp2, in_hsdp, mesh_2d
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_optim.adapters import ModelReader
from fsdp_optim.layout import Placement
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.testing.worker import _leave_world as leave_world

SIZES = (1, 2, 3, 5, 8, 16)
GRIDS = ((1, 4), (2, 2), (4, 1), (2, 3), (3, 2), (4, 4))

Wrap = Callable[[nn.Module], Any]
Case = tuple[str, str, tuple[int, ...]]
"""(name in LINES or IN_GRIDS, name in MODELS, shape of the mesh)"""

MODELS: dict[str, type[nn.Module]] = {"nested": Net, **SHAPES}

LINES: dict[str, Wrap] = {name: WRAPPERS[name] for name in WRAPPERS if name not in ("HSDP", "FSDP2 x TP", "plain")}
IN_GRIDS: dict[str, Callable[[tuple[int, int]], Wrap]] = {
    "HSDP": lambda shape: lambda model: in_hsdp(model, shape),
    "HSDP of ranks in reverse": lambda shape: lambda model: in_fsdp2(model, in_reverse(shape)),
    **{
        f"FSDP1 {strategy.name}, {'orig' if orig else 'flat'}": (
            lambda shape, strategy=strategy, orig=orig: fsdp1_hybrid(shape, strategy, orig)
        )
        for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
        for orig in (False, True)
    },
}


def in_reverse(shape: tuple[int, int]) -> dist.DeviceMesh:
    backwards = torch.arange(shape[0] * shape[1]).flip(0).reshape(shape)
    return dist.DeviceMesh("cpu", backwards, mesh_dim_names=mesh_2d(shape).mesh_dim_names)


def wrap_of(case: str, shape: tuple[int, ...]) -> Wrap:
    return LINES[case] if len(shape) == 1 else IN_GRIDS[case](shape)


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with cpu():
            yield
    finally:
        leave_world()


def check_all(cases: Sequence[Case]) -> dict[Case, str]:
    """In one process of the pool: the differences of each case."""
    leave_world()  # the real one, which is this process alone
    return {case: problem_of(*case) for case in cases}


def problem_of(case: str, model: str, shape: tuple[int, ...]) -> str:
    try:
        check_layout(case, MODELS[model], shape)
    except Exception:
        return traceback.format_exc()
    return ""


def check_layout(case: str, model: type[nn.Module], shape: tuple[int, ...]) -> None:
    """Play every rank in turn, and compare its elements with the adapter's description."""
    world_size = torch.Size(shape).numel()
    first: dict[str, Placement] = {}
    for rank in range(world_size):
        with as_rank(rank, world_size):
            placements = placements_of(model, wrap_of(case, shape), rank)
        first = first or placements
        check_same(f"what rank {rank} says", placements, first)
    for fqn, placement in first.items():
        check_whole(fqn, placement, world_size)


def placements_of(model_class: type[nn.Module], wrap: Wrap, rank: int) -> dict[str, Placement]:
    """The adapter's placements; raises where this rank's live parameters have other elements."""
    unwrapped = model_class()
    numbers = Numbers(unwrapped)
    numbers.give(unwrapped)
    model = wrap(unwrapped)
    view = ModelReader(model).read()
    placements = {}
    for named in view.handles:
        held = numbers.read(local_of(named.handle.weights()))
        wanted = held.clamp(max=numbers.least - 1)  # elements that the adapter does not describe must be padding
        for fqn, placement in named.placements.items():
            placements[fqn] = placement
            for offset, block in elements(placement, rank):
                wanted[offset : offset + len(block)] = numbers.start[fqn] + block
        check_same(f"rank {rank}, {named.fqns}", held, wanted)
    check_same("names", sorted(placements), sorted(numbers.start))
    return placements


def elements(placement: Placement, rank: int) -> Iterator[tuple[int, Tensor]]:
    """(first position in the rank's local tensor, row-major numbers in the parameter) of each block that the rank holds."""
    shard = placement.shard_of(rank)
    whole = torch.arange(placement.numel).reshape(placement.shape)
    for block in placement.blocks(shard) if shard is not None else ():
        box = tuple(slice(o, o + s) for o, s in zip(block.box.offsets, block.box.sizes, strict=True))
        yield block.offset, whole[box].reshape(-1)


def check_whole(fqn: str, placement: Placement, world_size: int) -> None:
    """Every element is on as many ranks as there are replicas, and no rank is of another world."""
    if not set(placement.ranks) <= set(range(world_size)):
        raise Differs(f"{fqn}: ranks {placement.ranks} of {world_size}")
    count = torch.zeros(placement.numel, dtype=torch.int64)
    for rank in range(world_size):
        for _, block in elements(placement, rank):
            count[block] += 1
    check_same(f"{fqn}: ranks of each element", count, torch.full_like(count, placement.num_replicas))


CASES: list[Case] = [(case, "nested", (size,)) for case in LINES for size in SIZES]
CASES += [(case, "nested", shape) for case in IN_GRIDS for shape in GRIDS]
CASES += [(case, model, (size,)) for case in LINES if case != "DDP" for model in SHAPES for size in (1, 3, 8)]
CASES += [("HSDP", model, (2, 3)) for model in SHAPES]
CASES = [case for case in CASES if case[1] != "no dimensions" or case[0] not in REFUSES_SCALARS]


SOON, LATER = those(CASES, lambda case, model, shape: math.prod(shape) < 5 or (case, model) == ("FSDP2", "nested"))
"""Larger worlds, in `make test-long`, take longer, and are cut by the same rules."""


@functools.cache
def problems(later: bool) -> dict[Case, str]:
    return run_on_ranks(check_all, 1, LATER if later else SOON, timeout=600.0)[0]


class LayoutsTest(unittest.TestCase):
    @expand(SOON, LATER)
    def test_each_rank_has_what_the_adapter_says(self, *case: Any) -> None:
        if text := problems(case in LATER)[case]:
            raise Differs(f"{case}:\n{text}")
