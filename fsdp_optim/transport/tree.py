"""The tree in which ranks meet: who tells whom what the ranks below it have stated.

Positions count the ranks of a meeting in ascending order. Position 0 is the root; the positions below `p` are `p * fanout + 1` to
`p * fanout + fanout`, as far as there are ranks. So a rank finds its place without asking anyone, and has at most `fanout`
others below it, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tree:
    """A tree of `size` positions."""

    size: int
    fanout: int

    def above(self, position: int) -> int:
        """Return the position to which another one than the root tells."""
        return (position - 1) // self.fanout

    def below(self, position: int) -> range:
        """Return the positions that tell this one; empty for a leaf."""
        first = position * self.fanout + 1
        return range(min(first, self.size), min(first + self.fanout, self.size))

    @property
    def inner(self) -> range:
        """The positions that others tell, the root among them."""
        return range(self.above(self.size - 1) + 1 if self.size > 1 else 0)
