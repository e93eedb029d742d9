"""The Layout that a wrapper would give the parameters of a checkpoint, from their names and shapes alone.

fsdp2                each parameter is cut along its first dimension, as torch.chunk cuts it
hsdp:4x2             the same over 4 ranks, on 2 groups of ranks
fsdp1, fairscale     the parameters of a unit are one flat parameter, padded and cut into equal chunks
ddp                  every rank has everything
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fsdp_optim.arguments import check_at_least
from fsdp_optim.errors import StateError
from fsdp_optim.layout import MeshBoxes, Placement, Shape, Whole, flat_chunks

_NAMES = ("fsdp2", "fsdp1", "hsdp:SHARDxREPLICAS", "fairscale", "ddp")
_HSDP = re.compile(r"hsdp:(\d+)x(\d+)")
_FLAT = ("fsdp1", "fairscale")


@dataclass(frozen=True)
class Wrapping:
    """A wrapper on a number of ranks, in `num_replicas` groups of `num_shards` ranks each."""

    name: str
    num_shards: int
    num_replicas: int = 1

    @classmethod
    def of(cls, wrapper: str, num_ranks: int) -> Wrapping:
        """Return the Wrapping of a text such as `fsdp2` or `hsdp:4x2`. Raises StateError for any other text."""
        check_at_least("ranks", num_ranks, 1, error=StateError)
        match = _HSDP.fullmatch(str(wrapper))
        if match is not None:
            shards, replicas = map(int, match.groups())
            if shards * replicas != num_ranks:
                raise StateError(
                    f"wrapper={wrapper!r} needs {shards} x {replicas} = {shards * replicas} ranks, and ranks is {num_ranks}: "
                    "give two numbers whose product is the number of ranks"
                )
            return cls("hsdp", shards, replicas)
        if wrapper not in _NAMES or ":" in wrapper:
            raise StateError(f"wrapper={wrapper!r} is unknown: give one of {', '.join(_NAMES)}")
        return cls(wrapper, 1, num_ranks) if wrapper == "ddp" else cls(wrapper, num_ranks)

    @property
    def num_ranks(self) -> int:
        return self.num_shards * self.num_replicas

    @property
    def is_flat(self) -> bool:
        """Whether the parameters of a unit are one flat parameter."""
        return self.name in _FLAT

    def complete(self, shape: Shape) -> Placement:
        """Return the Placement of a tensor that every rank holds."""
        return Whole(shape, range(self.num_ranks))

    def of_parameter(self, shape: Shape) -> Placement:
        """Return the Placement of a parameter that is in no flat parameter."""
        if self.name == "ddp" or not shape:
            return self.complete(shape)
        return MeshBoxes(shape, (self.num_replicas, self.num_shards), ((1, 0),), (range(self.num_ranks),))

    def of_unit(self, shapes: Mapping[str, Shape]) -> dict[str, Placement]:
        """Return the Placements of the parameters of one flat parameter, in their order, by FQN."""
        chunk = self.chunk_numel(shapes)
        placements: dict[str, Placement] = {}
        start = 0
        for fqn, shape in shapes.items():
            placements[fqn] = flat_chunks(shape, start, chunk, (range(self.num_ranks),))
            start += prod(shape)
        return placements

    def chunk_numel(self, shapes: Mapping[str, Shape]) -> int:
        """Return the number of elements of each rank's chunk of a flat parameter, with padding."""
        return -(-sum(map(prod, shapes.values())) // self.num_shards)


def unit_of(fqn: str, patterns: Sequence[str] | None) -> str:
    """Return the path of the module whose flat parameter has a parameter; "" is the root.

    `patterns`: of paths of the modules that are wrapped, part by part, as `layers.*`; the innermost that fits counts. None:
    the path up to its first number, as `layers.0`.
    """
    parts = fqn.split(".")[:-1]
    if patterns is None:
        numbers = (index for index, part in enumerate(parts) if part.isdecimal())
        return ".".join(parts[: next(numbers, -1) + 1])
    for length in range(len(parts), 0, -1):
        if any(_fits(parts[:length], pattern.split(".")) for pattern in patterns):
            return ".".join(parts[:length])
    return ""


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern))
