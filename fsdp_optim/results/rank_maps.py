"""The result of `placement`: for each tensor of a checkpoint, the bytes that each rank would hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_optim.errors import StateError, counted_noun


@dataclass(frozen=True)
class RankRun:
    """Neighbouring ranks that hold equally many bytes.

    Attributes:
        first, last: the first and the last of these ranks.
        nbytes: the bytes that each of them holds.
    """

    first: int
    last: int
    nbytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last or self.nbytes < 0:
            raise StateError(f"a run of ranks cannot be {self.first} to {self.last} with {self.nbytes} bytes each")

    @property
    def ranks(self) -> str:
        """The ranks as text: `3`, `0..7`."""
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last}"


@dataclass(frozen=True)
class TensorPlacement:
    """Where the elements of one tensor of a checkpoint would lie.

    Attributes:
        name: the FQN of a weight or a buffer, or `FQN:exp_avg` of a value of the optimizer's state.
        kind: "weights", or the name of the value, such as "exp_avg".
        nbytes: the bytes of the complete tensor.
        runs: all ranks in order, each with its bytes of this tensor, without padding.
    """

    name: str
    kind: str
    nbytes: int
    runs: tuple[RankRun, ...]

    def nbytes_on(self, rank: int) -> int:
        """Return the bytes that a rank holds; 0 for a rank that there is not.

        Args:
            rank: the rank.
        """
        return next((run.nbytes for run in self.runs if run.first <= rank <= run.last), 0)


@dataclass(frozen=True)
class EmptyRanks:
    """Ranks that would hold no element of a parameter, or of a flat parameter.

    Attributes:
        name: the FQN of the parameter; of a flat parameter, the path of its module ("" for the root).
        size: the number of its rows; of a flat parameter, of its elements.
        runs: the ranks, with 0 bytes each.
    """

    name: str
    size: int
    runs: tuple[RankRun, ...]

    @property
    def ranks(self) -> str:
        """The ranks as text: `3..7, 11..15`."""
        return ", ".join(run.ranks for run in self.runs)


@dataclass(frozen=True)
class PlacementResult:
    """The bytes that each rank would hold after a load of a checkpoint. Lists by rank have an entry for each rank.

    Attributes:
        path: the checkpoint.
        wrapper: the wrapper, as it was given.
        num_ranks: the number of ranks.
        weights: the bytes of weights and buffers, by rank, without padding.
        state: the bytes of the optimizer's state, by rank, without padding.
        padding: the bytes of padding, by rank: elements that belong to no parameter.
        tensors: the tensors, each with the ranks that hold it.
        empty: the parameters of which some ranks hold no element.
        is_flat: whether the parameters of a unit are one flat parameter.
        rules: what was assumed, because a checkpoint does not say it, a sentence for each.
    """

    path: str
    wrapper: str
    num_ranks: int
    weights: tuple[int, ...]
    state: tuple[int, ...]
    padding: tuple[int, ...]
    tensors: tuple[TensorPlacement, ...]
    empty: tuple[EmptyRanks, ...] = ()
    is_flat: bool = False
    rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("weights", "state", "padding"):
            if len(getattr(self, name)) != self.num_ranks:
                raise StateError(f"{name} has {len(getattr(self, name))} entries, and there are {self.num_ranks} ranks")

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """The bytes of weights, state and padding, by rank."""
        return tuple(map(sum, zip(self.weights, self.state, self.padding, strict=True)))

    @property
    def mean(self) -> float:
        """The mean of the bytes of the ranks."""
        return sum(self.nbytes) / self.num_ranks

    @property
    def largest(self) -> int:
        """The first rank with the most bytes."""
        return self.nbytes.index(max(self.nbytes))

    @property
    def smallest(self) -> int:
        """The first rank with the fewest bytes."""
        return self.nbytes.index(min(self.nbytes))

    @property
    def imbalance(self) -> float:
        """The most bytes of a rank divided by the mean; 1 where all ranks hold equally many."""
        return max(self.nbytes) / self.mean if any(self.nbytes) else 1.0

    def describe_empty(self) -> list[str]:
        """Return one line for parameters that have the same number of rows and leave the same ranks empty."""
        what = "element" if self.is_flat else "row"
        names: dict[tuple[str, int], list[str]] = {}
        for each in self.empty:
            names.setdefault((each.ranks, each.size), []).append(each.name or "the root")
        return [
            f"{ranks}: no element of {alike[0]}"
            + (f" and {counted_noun(len(alike) - 1, 'other')} of" if len(alike) > 1 else ", which has")
            + f" {size:,} {what}{'' if size == 1 else 's'}"
            for (ranks, size), alike in names.items()
        ]

    def __repr__(self) -> str:
        return (
            f"PlacementResult(path={self.path!r}, wrapper={self.wrapper!r}, num_ranks={self.num_ranks}, "
            f"nbytes=<{min(self.nbytes)} to {max(self.nbytes)}>, imbalance={self.imbalance:.4g}, "
            f"tensors=<{counted_noun(len(self.tensors), 'tensor')}>, empty=<{counted_noun(len(self.empty), 'parameter')}>)"
        )


def runs_of(nbytes: Sequence[int]) -> tuple[RankRun, ...]:
    """Return all ranks in order, as few runs of equal bytes."""
    runs, first = list[RankRun](), 0
    for rank in range(1, len(nbytes) + 1):
        if rank == len(nbytes) or nbytes[rank] != nbytes[first]:
            runs.append(RankRun(first, rank - 1, nbytes[first]))
            first = rank
    return tuple(runs)
