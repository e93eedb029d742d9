"""What this library adds to the files of a universal checkpoint that it writes, beside what DeepSpeed has there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_optim.foreign.archive.safe_values import restored
from fsdp_optim.foreign.archive.torch_archive import TorchArchive
from fsdp_optim.foreign.deepspeed.manifest import OURS
from fsdp_optim.foreign.deepspeed.trees import listed, mapping, readable
from fsdp_optim.foreign.reader import ForeignValues
from fsdp_optim.foreign.torch.folder import PER_RANK
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error

_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class AddedByUs:
    """What is under the key `OURS` of a file with the model, and what it says about other values.

    Attributes:
        names: the values that the source did not have, and `OURS` and `PER_RANK`.
        kinds: what values were, as `foreign.archive.safe_values` writes it.
        of_ranks: the values of each rank, by rank.
        is_ours: whether this library has written the file.
        step: the step of the source, which may have none where DeepSpeed needs one.
    """

    archive: TorchArchive
    names: frozenset[str] = frozenset()
    kinds: Sequence[Any] = ()
    of_ranks: dict[int, Any] = field(default_factory=dict)
    is_ours: bool = False
    step: Any = None

    @classmethod
    def of(cls, archive: TorchArchive) -> AddedByUs:
        with as_checkpoint_error(archive.where):
            saved = mapping(archive.value, "the file")
            if OURS not in saved:
                return cls(archive)
            about = mapping(saved[OURS], OURS)
            names = frozenset(map(str, listed(about["added"], "added")))
            of_ranks = mapping(saved.get(PER_RANK, {}), PER_RANK)
            if not all(type(rank) is int and 0 <= rank < _MOST_RANKS for rank in of_ranks):
                raise TypeError(f"{PER_RANK} has keys that are no ranks")
            kinds = list(listed(about["kinds"], "kinds"))
            return cls(archive, names | {OURS, PER_RANK}, kinds, dict(of_ranks), True, about["step"])

    def restored(self, value: Any, at: tuple[Any, ...]) -> Any:
        """Return the original of a value that is at this place of the file."""
        if isinstance(value, Withheld) or not self.kinds:
            return value
        return restored(self.archive.where, value, self.kinds, at)

    def rank_extras(self) -> Sequence[Any]:
        """Return the values of each rank, None for a rank without; empty if no rank has any."""
        return [
            self._of_rank(rank) if rank in self.of_ranks else None for rank in range(max(self.of_ranks, default=-1) + 1)
        ]

    def _of_rank(self, rank: int) -> Any:
        at = (PER_RANK, rank)
        value = readable(self.archive, f"{PER_RANK}[{rank}]", self.of_ranks[rank])
        if not isinstance(value, Withheld):
            return self.restored(value, at)

        def pickled() -> Any:
            real = self.archive.materialised(self.archive.unpickled()[PER_RANK][rank])
            return restored(self.archive.where, real, self.kinds, at)

        made: Callable[[], Any] = pickled
        return ForeignValues(value, made)
