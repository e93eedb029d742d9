"""Where the elements of a unit come from: the byte ranges of an open checkpoint, read by each worker thread for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from fsdp_optim.checkpoint.common.contents import SavedValue
from fsdp_optim.checkpoint.load.reading import CheckpointEnd, FlatsEnd, StoredValue
from fsdp_optim.formats.base.protocols import Reader, StoredTensor
from fsdp_optim.layout import FlatRuns, whole_on
from fsdp_optim.move import Key, move
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import alone

MARGIN = 16
"""Bytes: the largest element, which may begin before its unit, and end behind it."""


@dataclass(frozen=True)
class UnitPart:
    """The elements of one value in a unit: those from `first` on, for which `flat`, a 1-D tensor, has the memory."""

    value: SavedValue
    first: int
    flat: torch.Tensor


Fill: TypeAlias = Callable[[Sequence[UnitPart]], None]
"""Fills the memory of all parts of one unit."""


class UnitSource(Protocol):
    """The source of the elements of a conversion."""

    @property
    def is_remote(self) -> bool:
        """Whether reads wait for a remote store."""

    @property
    def num_extra_units(self) -> int:
        """How many units of memory `filler` needs for each worker thread."""

    def check_unchanged(self) -> None:
        """Raise ReplacedError if another checkpoint was written over a source since it was opened."""

    def filler(self, unit_nbytes: int) -> Fill:
        """Return the function that fills units, for one worker thread. `unit_nbytes`: the length of the longest unit."""


@dataclass(frozen=True)
class CheckpointSource(UnitSource):
    """An open checkpoint. `stored`: the stored tensor of each value."""

    reader: Reader
    stored: Mapping[Key, StoredTensor]

    num_extra_units = 0

    @property
    def is_remote(self) -> bool:
        return any(tensor.request_nbytes for tensor in self.stored.values())

    def check_unchanged(self) -> None:
        self.reader.check_unchanged()

    def filler(self, unit_nbytes: int) -> Fill:
        here = alone("convert")
        source = CheckpointEnd(self.reader, 0, Budget(unit_nbytes), as_needed=True, plans=here.world.plans)
        end = FlatsEnd()

        def fill(parts: Sequence[UnitPart]) -> None:
            failure = Failure()
            move([_stored_value(part, self.stored) for part in parts], source, end, here, here.budget, failure)
            if failure.error is not None:
                raise failure.error

        return fill


def _stored_value(part: UnitPart, stored_tensors: Mapping[Key, StoredTensor]) -> StoredValue:
    value, num = part.value, part.flat.numel()
    stored = stored_tensors[value.key]
    is_unsharded = num == value.placement.numel
    last = part.first + num
    cut = whole_on(stored.shape, (0,)) if is_unsharded else FlatRuns(stored.shape, (part.first,), (last,), (0,))
    return StoredValue.of(value.fqn, value.name, stored, cut, part.flat, is_state=value.is_state)
