"""The parts of local tensors that are moved at once: windows of a size, and the ranges that belong to a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsdp_optim.layout import Placement
from fsdp_optim.layout.once import once_each


@dataclass(frozen=True)
class Window:
    """Elements [start, stop) of the elements that each rank holds of a value. `is_all`: these are all of them, on every rank."""

    start: int
    stop: int
    is_all: bool = False

    def numel_in(self, numel: int) -> int:
        """Return how many elements of a local tensor with `numel` elements lie in the window."""
        return max(min(numel, self.stop) - self.start, 0)


def windows(numel: int, width: int) -> Iterator[Window]:
    """Yield windows of `width` elements each. `numel`: at least as many elements as any rank holds of a value."""
    return (Window(start, start + width, width >= numel) for start in range(0, numel, max(width, 1)))


class LocalRanges:
    """The ranges of a rank's local tensors. Values of equal layers share their cuts, which are asked once."""

    of: Callable[[Placement], tuple[int, int]]
    """Returns the range [start, stop) of the local tensor of a value with this cut."""

    def __init__(self, rank: int) -> None:
        self.of = once_each(lambda cut: cut.local_range(rank))

    def numel(self, cut: Placement) -> int:
        """Return the number of elements in that range."""
        start, stop = self.of(cut)
        return stop - start
