"""The comparison of a resumed run with the run that was never stopped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from demo.train import Run

# Another world size adds the same float32 gradients up in another order. Measured: over 200 resumed steps that moved
# no loss by more than 3e-7 of itself (two or three units in the last place), while over 30 steps a forgotten optimizer
# state moves it by 3e-2, swapped learning rates by 2e-2, and forgotten `step` counters alone by 1e-2.
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Comparison:
    """The differences of one resumed run: the largest absolute ones of any value. `name`: the ranks of the run."""

    name: str
    steps: int
    loss: float
    uninterrupted_loss: float
    largest_loss_difference: float  # relative to the uninterrupted loss, over all resumed steps
    state_difference_after_load: float
    state_difference_at_end: float
    weights_are_equal: bool
    must_be_bit_exact: bool
    seconds: float

    def failures(self) -> list[str]:
        """The failures in words; empty if there are none."""
        allowed = 0.0 if self.must_be_bit_exact else LOSS_TOLERANCE
        failed = []
        if self.state_difference_after_load != 0:
            failed.append(f"the loaded state differs from the saved one by {self.state_difference_after_load:.3g}")
        if not self.largest_loss_difference <= allowed:
            failed.append(f"a loss differs by {self.largest_loss_difference:.3g} of itself, allowed: {allowed:g}")
        if self.must_be_bit_exact and self.state_difference_at_end != 0:
            failed.append(f"the final state differs by {self.state_difference_at_end:.3g}, but must be bit-exact")
        if self.must_be_bit_exact and not self.weights_are_equal:
            failed.append("the final weights differ, but must be bit-exact")
        return failed


def compare(name: str, resumed: Run, whole: Run, saved_state: dict[str, Any], must_be_bit_exact: bool) -> Comparison:
    uninterrupted = whole.losses[resumed.first_step :]
    differences = [abs(a - b) / b for a, b in zip(resumed.losses, uninterrupted, strict=True)]
    return Comparison(
        name=name,
        steps=len(resumed.losses),
        loss=resumed.losses[-1],
        uninterrupted_loss=uninterrupted[-1],
        largest_loss_difference=largest(differences),
        state_difference_after_load=state_difference(resumed.state_at_start, saved_state),
        state_difference_at_end=state_difference(resumed.state_at_end, whole.state_at_end),
        weights_are_equal=all(
            torch.equal(value, whole.weights_at_end[key]) for key, value in resumed.weights_at_end.items()
        ),
        must_be_bit_exact=must_be_bit_exact,
        seconds=resumed.seconds,
    )


def state_difference(one: dict[str, Any] | None, other: dict[str, Any]) -> float:
    """The largest difference of any value of two full optimizer states; infinite where their keys differ."""
    if one is None or shape_of(one) != shape_of(other):
        return math.inf
    return largest(
        float((value - other["state"][index][name]).abs().max())
        for index, state in one["state"].items()
        for name, value in state.items()
    )


def shape_of(full: dict[str, Any]) -> object:
    """A full optimizer state without the values of its tensors."""
    tensors = {
        (index, name): (value.shape, value.dtype)
        for index, state in full["state"].items()
        for name, value in state.items()
    }
    return tensors, full["param_groups"]


def largest(numbers: Any) -> float:
    """The maximum, where NaN counts as the largest number."""
    return max(numbers, key=lambda number: math.inf if math.isnan(number) else number)
