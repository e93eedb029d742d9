"""Models without a wrapper, whose parameters record where they live, for ranks that are threads, on any device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_optim.adapters import Adapter, ModuleTree, use_adapters
from fsdp_optim.layout import FlatChunks, MeshBoxes, Placement, Ranks, Whole
from fsdp_optim.plugins import Handle, Original
from fsdp_optim.transport import world_here
from kit.optimizers import adam

SHAPES = {"scale": (1,), "embed.weight": (7, 5), "layer.weight": (3, 8, 2), "layer.bias": (4,), "empty": (0, 3)}
STEPS = 2

Cut = Callable[[tuple[int, ...], tuple[int, ...]], Placement]
"""(shape, ranks) -> where such a parameter lives"""


def rows(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Placement:
    return MeshBoxes(shape, (len(ranks),), ((0, 0),), (ranks,))


def columns(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Placement:
    return MeshBoxes(shape, (len(ranks),), ((0, len(shape) - 1),), (ranks,))


def chunks(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Placement:
    numel = math.prod(shape)
    return FlatChunks(shape, 0, max(-(-numel // len(ranks)), 1), (ranks,), own_tensor=True)


def whole(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Placement:
    return Whole(shape, ranks)


CUTS: dict[str, Cut] = {"rows": rows, "columns": columns, "chunks": chunks, "whole": whole}


def numbers(key: str, shape: Sequence[int]) -> Tensor:
    """Random numbers that are a function of a key, equal on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(tuple(shape), generator=generator)


def part_of(value: Tensor, placement: Placement, rank: int) -> Tensor:
    """This rank's elements, in the shape of a single box, or 1-D for several boxes."""
    shard = placement.shard_of(rank)
    blocks = placement.blocks(shard) if shard is not None else ()
    parts = [
        value[tuple(slice(o, o + n) for o, n in zip(block.box.offsets, block.box.sizes, strict=True))]
        for block in blocks
    ]
    if isinstance(placement, FlatChunks):
        return torch.cat([torch.empty(0), *(part.reshape(-1) for part in parts)])
    return parts[0].clone() if parts else torch.empty((0, *value.shape[1:]))


class Described(nn.Module):
    """Parameters of several shapes, each in nested modules, cut over some ranks; seen from one of them."""

    def __init__(self, cut: str, ranks: Sequence[int], rank: int, device: Any = "cpu") -> None:
        super().__init__()
        self.ranks, self.rank, self.device = tuple(ranks), rank, device
        for fqn, shape in SHAPES.items():
            *path, name = fqn.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            place = CUTS[cut](shape, self.ranks)
            shard = part_of(numbers(f"{fqn} values", shape), place, rank)
            param = nn.Parameter(shard.to(device))
            param.placement = place
            owner.register_parameter(name, param)

    def set_gradients(self, step: int) -> None:
        for fqn, param in self.named_parameters():
            whole_gradient = numbers(f"{fqn} gradient {step}", SHAPES[fqn])
            param.grad = part_of(whole_gradient, param.placement, self.rank).view(param.shape).to(self.device)


class DescribedAdapter(Adapter):
    """The adapter of `Described` models."""

    name = "described"

    def is_present(self) -> bool:
        return True

    def rank_sets(self, tree: ModuleTree) -> Iterable[Ranks]:
        return {param.placement.ranks for param, _ in tree.params() if hasattr(param, "placement")}

    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterable[Handle]:
        for param, sites in tree.params():
            if hasattr(param, "placement"):
                is_cut = param.placement.num_shards > 1  # copies may differ, so the library must compare them
                yield Handle(param, (Original(*sites[0], param.placement),), tuple(param.shape), synchronized=is_cut)


class Training:
    """A model and its optimizer on one rank, after some steps."""

    def __init__(
        self,
        cut: str,
        ranks: Sequence[int],
        rank: int,
        make: Callable[[Any], Any],
        steps: int = STEPS,
        device: Any = "cpu",
    ) -> None:
        self.model = Described(cut, ranks, rank, device)
        self.optim = make(self.model.parameters())
        self.step(range(steps))

    def step(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.model.set_gradients(step)
            self.optim.step()


@contextmanager
def training_here(cut: str = "rows", steps: int = 1) -> Iterator[Training]:
    """A training on all ranks of the world that this thread is one of."""
    world = world_here()
    with use_adapters([DescribedAdapter()]):
        yield Training(cut, range(world.size), world.rank, adam, steps)


def oracle(make: Callable[[Any], Any], steps: int = STEPS) -> Training:
    """The same training without any cut."""
    return Training("whole", (0,), 0, make, steps)
