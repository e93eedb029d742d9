"""What moves, and the two sides of a move: a state value, elements of it on one rank, and an end.

A live end has all its elements in memory, so its `fill` and `drain` do nothing. A stored end reads and writes windows of bounded
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec import Struct

from fsdp_optim.layout import Placement
from fsdp_optim.plan import replica_of
from fsdp_optim.tensors.allocation import empty
from fsdp_optim.tensors.memory import flat_slice

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]

_CPU = torch.device("cpu")

Key = tuple[bool, str, str]
"""The key of a value in storage: (whether the value is state, FQN, name)."""


class StateValue(Struct, frozen=True, eq=False, gc=False):
    """One named value of one parameter. A weight is a value too, with `is_state` False.

    `placement`: where the live model has the elements.
    """

    fqn: str
    name: str
    dtype: torch.dtype
    placement: Placement
    is_state: bool = True

    @property
    def key(self) -> Key:
        return self.is_state, self.fqn, self.name

    @property
    def nbytes(self) -> int:
        return self.placement.numel * self.dtype.itemsize

    def replica_among(self, source: Placement) -> int:
        """Return the number of the replica of `source` that sends this value: a function of the value's name alone."""
        return replica_of(f"{self.fqn}: {self.name}") % source.num_replicas if source.num_replicas > 1 else 0


class Slice(NamedTuple):
    """A range of this rank's local tensor for a value that is cut as `cut`: the 1-D tensor `flat`, from element `start` on.

    `flat` None: this rank has no elements of the value. `is_own`: the memory of `flat` was allocated for this slice, so an end
    that takes the slice may keep the memory. In `End.fill`, contiguous memory for a complete local tensor may have any shape.
    """

    value: StateValue
    cut: Placement
    flat: torch.Tensor | None
    start: int = 0
    is_own: bool = False


class Parts(NamedTuple):
    """Live elements of several values: of `values[i]`, cut as `cuts[i]`, the elements from `starts[i]` on of the local tensor.

    `held[i]` has all elements of the value that this rank has, in any shape and strides; None: it has none.
    """

    values: Sequence[StateValue]
    cuts: Sequence[Placement]
    starts: Sequence[int]
    held: Sequence[torch.Tensor | None]

    def slices(self, index: Iterable[int]) -> list[Slice]:
        """Return some of the parts as slices: views of contiguous memory, else copies."""
        slices = []
        for i in index:
            held = self.held[i]
            flat = flat_slice(held, 0, held.numel()) if held is not None else None
            slices.append(Slice(self.values[i], self.cuts[i], flat, self.starts[i], is_own=flat is None))
        return slices


class CompleteValues(NamedTuple):
    """Complete values on one rank: the elements of each are row-major, and the values are adjacent, in new host memory.

    Attributes:
        cuts: by value, the cut in which they reach this rank: all elements on this rank.
        places, nbytes: by value, the byte of `memory` at which its elements begin, and their length in bytes. An element may lie
            at any byte.
        memory: 1-D, uint8.
    """

    values: Sequence[StateValue]
    cuts: Sequence[Placement]
    places: Numbers
    nbytes: Numbers
    memory: torch.Tensor

    def slices(self) -> Iterator[Slice]:
        """Yield each value as a slice with memory of its own."""
        ranges = zip(self.places.tolist(), self.nbytes.tolist(), strict=True)
        for value, cut, (start, nbytes) in zip(self.values, self.cuts, ranges, strict=True):
            flat = empty((nbytes // value.dtype.itemsize,), value.dtype, _CPU)
            flat.view(torch.uint8).copy_(self.memory[start : start + nbytes])
            yield Slice(value, cut, flat, is_own=True)


Taken = Sequence[Slice] | Parts | CompleteValues
"""What a stored target gets of several values."""


class End:
    """One side of a move, seen from this rank. This base class is live memory; a stored end overrides `fill` or `drain`.

    Every rank calls the placement methods for all values in the same order, and must get the same placements.
    """

    is_stored = False

    @property
    def keeps_memory(self) -> bool:
        """Whether `drain`, of a stored target, may keep the memory of slices that are their own."""
        return True

    @property
    def in_any_order(self) -> bool:
        """Whether a stored end reads or writes values in any order, so that short ones may move before longer ones."""
        return False

    def placement(self, value: StateValue) -> Placement:
        """Return where this end holds a value, as a source, or needs it, as a target."""
        return value.placement

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        """Return the cut in which the ranks read or write a value of a stored end. `other`: the cut of the other end."""
        return other

    def memory(self, value: StateValue) -> torch.Tensor | None:
        """Return this rank's elements of a value, in any shape and strides, or contiguous memory to fill; None without any."""
        return None

    def io_placements(self, values: Sequence[StateValue], others: Sequence[Placement]) -> Sequence[Placement]:
        """Return `io_placement` of several values."""
        return [self.io_placement(value, other) for value, other in zip(values, others, strict=True)]

    def memories(self, values: Sequence[StateValue]) -> Sequence[torch.Tensor | None]:
        """Return `memory` of several values."""
        return list(map(self.memory, values))

    def fill(self, slices: Sequence[Slice], /) -> None:
        """Read some slices, as a stored source: fill their memory."""

    def drain(self, slices: Sequence[Slice], /) -> None:
        """Write some slices, as a stored target."""

    def drain_parts(self, parts: Parts, /) -> None:
        """Write live elements, as a stored target."""
        self.drain(parts.slices(range(len(parts.values))))

    def drain_complete(self, complete: CompleteValues, /) -> None:
        """Write complete values, as a stored target."""
        self.drain([*complete.slices()])


def local_parts(
    values: Sequence[StateValue], bounds: Sequence[tuple[int, int]], live: End
) -> Sequence[torch.Tensor | None]:
    """Return elements [start, stop) of the local tensor of each value, as `End.memory` has them; None without elements."""
    here = [value for value, (start, stop) in zip(values, bounds, strict=True) if start < stop]
    memories = iter(live.memories(here))
    parts = []
    for start, stop in bounds:
        memory = next(memories) if start < stop else None
        if memory is not None and memory.numel() != stop - start:  # a flat parameter has the elements of several values
            memory = flat_slice(memory, start, stop)
        parts.append(memory)
    return parts
