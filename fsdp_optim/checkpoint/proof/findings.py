"""What a comparison of two steps finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fsdp_optim.checkpoint.proof.bounds import tolerance_of
from fsdp_optim.checkpoint.proof.record import StepRecord

RESULTS = "the results of the step"
"""The beginning of the note that what the step led to could not be compared."""


class Finding(NamedTuple):
    """One difference, in words with both numbers. `is_fault`: rounding does not explain it."""

    text: str
    is_fault: bool = True


@dataclass(frozen=True)
class Compared:
    """The differences of one kind, the number of values that were compared, and what could not be compared, with the reason."""

    findings: tuple[Finding, ...] = ()
    num_values: int = 0
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(cls, findings: Iterable[Finding], num_values: int = 0) -> Compared:
        return cls(tuple(findings), num_values)

    @classmethod
    def without(cls, reason: str) -> Compared:
        return cls(skipped=(reason,))


@dataclass(frozen=True)
class Pair:
    """The step of the saving run, and the step of a run that resumed."""

    then: StepRecord
    now: StepRecord

    @property
    def is_alike(self) -> bool:
        """Whether both runs are cut alike, so that the arithmetic is the same."""
        return self.then.structure == self.now.structure and self.has_same_ranks

    @property
    def has_same_ranks(self) -> bool:
        return self.then.world_size == self.now.world_size

    @cached_property
    def has_same_batches(self) -> bool:
        """Whether each rank was given what it was given then."""
        return self.has_same_ranks and self.then.batches == self.now.batches

    @cached_property
    def rounding(self) -> float:
        return max(self.then.rounding, self.now.rounding)

    @cached_property
    def tolerance(self) -> float:
        return tolerance_of(self.rounding)

    @cached_property
    def has_same_gradients(self) -> bool:
        """Whether the optimizer got the same gradients, bit for bit, in the same shards, and so makes the same of them."""
        then, now = self.then.gradients, self.now.gradients
        is_seen = self.is_alike and then and now and self.then.has_updated and self.now.has_updated
        return bool(is_seen) and {name: value.bits for name, value in then.items()} == {
            name: value.bits for name, value in now.items()
        }

    @cached_property
    def why_not_outcome(self) -> str:
        """Why the results of the two steps cannot be compared; empty where they can."""
        if self.is_alike:
            return ""
        reason = self.then.depends_on_ranks or self.now.depends_on_ranks
        if reason and not self.has_same_batches:
            return f"{RESULTS}, because {reason}"
        if not self.has_same_batches and any(
            random.drawn_inside for record in (self.then, self.now) for random in record.random
        ):
            return f"{RESULTS}, because it draws random numbers (dropout, say), and each rank has its own"
        return ""
