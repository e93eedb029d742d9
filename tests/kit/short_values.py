"""Small values of every dtype and cut, for moves of many of them at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_optim.layout import FlatChunks, MeshBoxes, Placement, Whole
from fsdp_optim.move import End, StateValue, move
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.transport import Failure, world_here
from fsdp_optim.transport.agree import agree

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fn)
SHAPES: tuple[tuple[int, ...], ...] = ((8, 8), (5, 4), (1,), (7,), (3, 2, 5), (64,), (2, 3), (1, 9), (13, 1), (0, 3))


def elements(value: StateValue) -> torch.Tensor:
    """The full value: bytes that differ from value to value."""
    generator = torch.Generator().manual_seed(int(value.fqn))
    size = value.placement.numel * value.dtype.itemsize
    top = 2 if value.dtype == torch.bool else 256
    return torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator).view(value.dtype)


def local(value: StateValue, rank: int, *, strided: bool) -> torch.Tensor | None:
    """A rank's local tensor, with padding around its elements where the placement says so."""
    placement = value.placement
    shard = placement.shard_of(rank)
    if shard is None:
        return None
    full = elements(value).view(placement.shape)
    blocks = placement.blocks(shard)
    made = torch.zeros(max((block.end for block in blocks), default=0), dtype=value.dtype)
    run = placement.run(shard)
    if run is not None:
        made = torch.zeros(max(run.offset + run.stop - run.start, 0), dtype=value.dtype)
        made[run.offset :] = full.reshape(-1)[run.start : run.stop]
    else:
        for block in blocks:
            index = tuple(slice(o, o + n) for o, n in zip(block.box.offsets, block.box.sizes, strict=True))
            made[block.offset : block.end] = full[index].reshape(-1)
    if strided and len(made) > 1 and value.dtype != torch.float8_e4m3fn:
        made = torch.stack([made, made], 1).t()[0]  # every second element of its memory
    return made


def cuts(world: int) -> list[Callable[[tuple[int, ...]], Placement]]:
    """Ways to cut a shape over the ranks."""
    ranks = tuple(range(world))
    ways: list[Callable[[tuple[int, ...]], Placement]] = [
        lambda shape: MeshBoxes(shape, (world,), ((0, 0),), (ranks,)),
        lambda shape: MeshBoxes(shape, (world,), ((0, len(shape) - 1),), (ranks,)),
        lambda shape: FlatChunks(shape, 3, -(-(3 + math.prod(shape)) // world), (ranks,)),
        lambda shape: Whole(shape, (world - 1,)),
        lambda shape: Whole(shape, ranks),
        lambda shape: Whole(shape, ranks[: world // 2 + 1]),  # some of the writers have all of it
    ]
    if world == 4:
        ways += [
            lambda shape: MeshBoxes(shape, (2, 2), ((1, 0),), (ranks,)),  # replicas
            lambda shape: MeshBoxes(shape, (2, 2), ((0, len(shape) - 1), (1, 0)), (ranks,)),
        ]
    return ways


def values_of(world: int, seed: int, num: int = 120) -> list[StateValue]:
    chosen, made = random.Random(seed), dict[Any, Placement]()
    values = []
    for number in range(num):
        shape, way = chosen.choice(SHAPES), chosen.randrange(len(cuts(world)))
        placement = made.setdefault((shape, way), cuts(world)[way](shape))
        if chosen.random() < 0.2:
            placement = cuts(world)[way](shape)  # equal, and not the same object
        values.append(StateValue(str(number), "exp_avg", chosen.choice(DTYPES), placement))
    return values


@dataclass
class OnOneRank(End):
    """A stored end that has each value on one rank, which the value's number gives."""

    world: int
    _whole: dict[tuple[object, int], Placement] = field(default_factory=dict)

    is_stored = True
    in_any_order = True

    def rank_of(self, value: StateValue) -> int:
        return int(value.fqn) // 5 % self.world

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        key = other.shape, self.rank_of(value)
        return self._whole.setdefault(key, Whole(*key[:1], (key[1],)))  # type: ignore[arg-type]


def moved(values: Sequence[StateValue], source: End, target: End, nbytes: int) -> None:
    world, failure = world_here(), Failure()
    group = world.group("a move", range(world.size), timeout=60)
    move(values, source, target, group, Budget(nbytes), failure)
    agree(group, "moved", failure.error)
