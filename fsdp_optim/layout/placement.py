"""Where one parameter lives: the parent of all Placements, the Placement of a parameter that is not cut, and who holds it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import numpy

from fsdp_optim.layout.boxes import Block, Box, Run, Shape, bounds_of_box
from fsdp_optim.layout.ranks import Ranks, check_distinct, number_array, ranks_in_order
from fsdp_optim.layout.tables import BoxTable, Columns, Numbers

C = TypeVar("C")


def hash_once(cls: type[C]) -> type[C]:
    """Let each value of a frozen dataclass compute its hash once: it may list thousands of ranks.

    This is no `cached_property`, which takes a lock before Python 3.12: flat parameters have as many cuts as parameters.
    """
    of_fields = cls.__hash__

    def __hash__(self: Any) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = of_fields(self)
        return known

    cls.__hash__ = __hash__  # type: ignore[method-assign]
    return cls


class PickledByFields:
    """A dataclass whose pickle has its fields alone: equal values are equal bytes, and a hash counts in one process only.

    `hash(None)` is an address before Python 3.12, and the hash of a range of one element has it inside.
    """

    def __getstate__(self) -> dict[str, Any]:
        fields = getattr(type(self), "__dataclass_fields__", self.__dict__)
        return {name: value for name, value in self.__dict__.items() if name in fields}


class Placement(PickledByFields):
    """Where one parameter lives. Shards are numbered; every rank that holds a shard holds all of its Blocks.

    Placements are frozen values that compute the shard of any rank, so every rank can plan for every other rank. A class without
    one of the abstract methods cannot be instantiated, but this is no `abc.ABC`: `isinstance` takes ten times as long with one,
    and is asked for each value.
    """

    full_shape: Shape

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        members = {name: getattr(cls, name) for name in dir(cls) if name != "__abstractmethods__"}
        cls.__abstractmethods__ = frozenset(  # type: ignore[attr-defined]
            name for name, member in members.items() if getattr(member, "__isabstractmethod__", False)
        )

    @property
    def shape(self) -> Shape:
        return self.full_shape

    @property
    def numel(self) -> int:
        return prod(self.full_shape)

    @property
    @abstractmethod
    def num_shards(self) -> int: ...

    @abstractmethod
    def holders(self, shard: int) -> tuple[int, ...]:
        """Return the global ranks that hold this shard, with equal bits."""

    @abstractmethod
    def shard_of(self, rank: int) -> int | None:
        """Return the shard that a rank holds; None when it holds none."""

    @abstractmethod
    def blocks(self, shard: int) -> tuple[Block, ...]:
        """Return the Blocks of a shard; none when the cut left no elements for the shard."""

    def run(self, shard: int) -> Run | None:
        """Return the shard as one Run, a shortcut for plans; None for a shard that consists of several runs."""
        return None

    def bounds(self, shard: int) -> tuple[int, int] | None:
        """Return the smallest row-major range of elements that covers a shard; None for a shard without elements."""
        run = self.run(shard)
        if run is not None:
            return (run.start, run.stop) if run.start < run.stop else None
        bounds = [bounds_of_box(self.shape, block.box) for block in self.blocks(shard) if block.box.numel]
        return (min(b[0] for b in bounds), max(b[1] for b in bounds)) if bounds else None

    @property
    def kind(self) -> tuple[object, ...]:
        """What is equal for placements whose shards are on the same ranks, and which differ in `numbers` only.

        One placement makes the tables of all placements of its kind. By default a placement is the only one of its kind.
        """
        return (self,)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in which placements of one kind differ."""
        return ()

    def run_table(self, shards: Numbers, numbers: Columns | None = None) -> BoxTable | None:
        """Return the runs of some shards, in the order of `shards`; None where not every shard is one run.

        `numbers`: for each of the shards, the numbers of the placement of this kind that has the shard; None for this
        placement's own.
        """
        return None

    def box_table(self, shards: Numbers, numbers: Columns | None = None) -> BoxTable | None:
        """Return the Boxes of some shards, in the order of `shards`; None where shards are runs across the borders of rows.

        `numbers`: as for `run_table`.
        """
        return BoxTable.of_blocks([self.blocks(shard) for shard in shards.tolist()], len(self.shape))

    def holders_of(self, shards: Numbers) -> Numbers:
        """Return the ranks that hold some shards, as an array by replica and shard. All shards need equally many holders."""
        by_shard: Numbers = numpy.array([self.holders(shard) for shard in shards.tolist()], numpy.int64)
        by_replica: Numbers = by_shard.reshape(len(shards), -1).T
        return by_replica

    def shards_over(self, start: int, stop: int) -> Sequence[int]:
        """Return all shards that hold some of the row-major elements [start, stop), possibly with shards that do not."""
        return range(self.num_shards)

    @property
    def in_runs(self) -> bool:
        """Whether every shard is one run."""
        return False

    @property
    def most_runs(self) -> int:
        """The largest number of runs in any shard. A run is contiguous in the parameter, and runs are adjacent in memory.

        0: unknown.
        """
        return 1 if self.in_runs else 0

    @property
    def has_tables(self) -> bool:
        """Whether plans may ask for the tables of shards. All shards then have equally many holders."""
        return True

    @property
    def is_open(self) -> bool:
        """Whether shards may be missing, because other ranks list their own shards."""
        return False

    @property
    def overlapping(self) -> bool:
        """Whether different shards may hold the same element."""
        return False

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks hold the same shard. The shards of a Placement, except Boxes, have equally many holders."""
        return self.num_shards > 0 and len(self.holders(0)) > 1

    def join(self, other: Placement) -> Placement | None:
        """Return one Placement for two groups of ranks that hold equally cut replicas; None where the cuts differ."""
        return self if self == other else None

    @abstractmethod
    def on_lowest_ranks(self) -> Placement:
        """Return the same shards with the same numbers, each of them held by its lowest rank only."""

    def without_ranks(self) -> Placement:
        """Return the same cut on ranks 0, 1, 2, ...: equal for parameters that are cut equally. Listed Boxes stay as they are."""
        return self

    def gap(self) -> tuple[int, int] | None:
        """Return the first row-major range of elements that no rank holds; None when every element is held."""
        return None

    @property
    def num_replicas(self) -> int:
        """How many ranks hold each shard; the maximum, where the shards of Boxes have different numbers of holders."""
        return len(self.holders(0)) if self.num_shards else 1

    @property
    def most_numel(self) -> int:
        """A number of elements that no rank's shard exceeds, equal on all ranks."""
        return max((sum(b.box.numel for b in self.blocks(shard)) for shard in range(self.num_shards)), default=0)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for shard in range(self.num_shards) for rank in self.holders(shard)}))

    @property
    def first_holders(self) -> Ranks:
        """The first holder of each shard, as sorted ranks without duplicates."""
        return ranks_in_order(sorted({self.holders(shard)[0] for shard in range(self.num_shards)}))

    @property
    def rank_groups(self) -> tuple[Ranks, ...]:
        """The ranks that hold the parameter, in groups: quick to compare, even for thousands of ranks."""
        return (self.ranks,)

    @property
    def num_listed(self) -> int:
        """The number of boxes or runs that the placement lists one by one, for an estimate of its memory."""
        return 0

    def numel_on(self, rank: int) -> int:
        """Return how many elements a rank holds."""
        shard = self.shard_of(rank)
        if shard is None:
            return 0
        run = self.run(shard)
        return run.stop - run.start if run is not None else sum(b.box.numel for b in self.blocks(shard))

    def local_range(self, rank: int) -> tuple[int, int]:
        """Return the range [start, stop) of a rank's local tensor that covers this parameter; (0, 0) if it holds none."""
        shard = self.shard_of(rank)
        run = self.run(shard) if shard is not None else None
        if run is not None:
            return run.offset, run.offset + run.stop - run.start
        blocks = [block for block in self.blocks(shard) if block.box.numel] if shard is not None else []
        if not blocks:
            return 0, 0
        return min(b.offset for b in blocks), max(b.end for b in blocks)


@dataclass(frozen=True)
class Whole(Placement):
    """The complete parameter on each of `ranks`, row-major, `offset` elements into their local tensor."""

    full_shape: Shape
    on: Ranks
    offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "on", ranks_in_order(self.on))
        check_distinct((self.on,))

    @property
    def num_shards(self) -> int:
        return 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.on))

    @property
    def num_replicas(self) -> int:
        return len(self.on)

    @property
    def rank_groups(self) -> tuple[Ranks, ...]:
        return (self.on,)

    def holders(self, shard: int) -> tuple[int, ...]:
        return tuple(self.on)

    def shard_of(self, rank: int) -> int | None:
        return 0 if rank in self.on else None

    def blocks(self, shard: int) -> tuple[Block, ...]:
        return (Block(Box((0,) * len(self.shape), self.shape), self.offset),) if self.numel else ()

    @property
    def in_runs(self) -> bool:
        return True

    def run(self, shard: int) -> Run:
        return Run(0, self.numel, self.offset)

    @property
    def kind(self) -> tuple[object, ...]:
        return type(self), self.on

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.offset, *self.full_shape)

    def run_table(self, shards: Numbers, numbers: Columns | None = None) -> BoxTable:
        offset, *shape = self.numbers if numbers is None else numbers
        zeros = numpy.zeros_like(shards)
        return BoxTable.of_runs(zeros, zeros + prod(shape), zeros + offset)

    def box_table(self, shards: Numbers, numbers: Columns | None = None) -> BoxTable:
        offset, *shape = self.numbers if numbers is None else numbers
        return BoxTable.of_boxes(len(shards), [0] * len(shape), shape, offset)

    def holders_of(self, shards: Numbers) -> Numbers:
        return number_array(self.on)[:, None] + numpy.zeros_like(shards)

    @property
    def most_numel(self) -> int:
        return self.numel

    def join(self, other: Placement) -> Placement | None:
        if isinstance(other, Whole) and replace(other, on=self.on) == self:
            return replace(self, on=tuple(sorted({*self.on, *other.on})))
        return None

    def on_lowest_ranks(self) -> Whole:
        return replace(self, on=(min(self.on),)) if self.on else self

    def without_ranks(self) -> Whole:
        return replace(self, on=(0,))

    def gap(self) -> tuple[int, int] | None:
        return None if self.on or not self.numel else (0, self.numel)

    def __str__(self) -> str:
        return f"whole, of shape {list(self.shape)},"


@lru_cache(maxsize=4096)
def whole_on(shape: Shape, ranks: Ranks) -> Whole:
    """Return a Whole, the same object for equal arguments: what depends on a placement is found again by its identity."""
    return Whole(
        (*map(int, shape),), ranks
    )  # a torch.Size and numpy's integers are equal to others, which share the object


class RankSet:
    """A set of ranks, compared with the holders of parameters. Parameters share the groups of ranks that hold them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks, self._set = ranks, frozenset(ranks)
        self._equal: dict[tuple[Ranks, ...], bool] = {}
        self._include: dict[tuple[Ranks, ...], bool] = {}

    def is_all_holders_of(self, placement: Placement) -> bool:
        """Whether exactly these ranks hold a parameter."""
        groups = placement.rank_groups
        known = self._equal.get(groups)
        if known is None:
            known = self._equal[groups] = placement.ranks == self._ranks
        return known

    def includes_holders_of(self, placement: Placement) -> bool:
        """Whether only ranks of this set hold a parameter."""
        groups = placement.rank_groups
        known = self._include.get(groups)
        if known is None:
            known = self._include[groups] = all(self._set.issuperset(group) for group in groups)
        return known
