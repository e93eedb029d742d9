"""The verdict about a resumed run: its first step beside the step that the saving run made, and the first cause that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fsdp_optim.checkpoint.proof.compare_inputs import batch_of_all, groups, loaded_state, random_states
from fsdp_optim.checkpoint.proof.compare_outcome import buffers, gradients, moments, numbers, objects, observed, weights
from fsdp_optim.checkpoint.proof.findings import RESULTS, Compared, Finding, Pair
from fsdp_optim.checkpoint.proof.record import StepRecord
from fsdp_optim.errors import counted_noun

Outcome = Literal["identical", "rounding", "different", "unknown"]

_CAUSES: tuple[tuple[str, Callable[[Pair], Compared]], ...] = (
    ("the loaded state", loaded_state),
    ("the param groups", groups),
    ("the random states", random_states),
    ("the batch", batch_of_all),
    ("observed values", observed),
    ("observed numbers", numbers),
    ("the gradients", gradients),
    ("the weights", weights),
    ("the moments", moments),
    ("the buffers", buffers),
    ("the objects of state=", objects),
)
"""In the order of cause: what comes first explains what comes after it."""


@dataclass(frozen=True)
class ResumeProof:
    """The verdict about a resume; as text one line.

    Attributes:
        step: the step that was compared: the first after the checkpoint.
        saved_step: the step of the checkpoint.
        outcome: "identical": all values have equal bits. "rounding": all are within the bounds of sums in another order, and some
            or all have other bits. "different": something is beyond them. "unknown": the checkpoint has no record of a step, or
            the two steps cannot be compared.
        cause: what differs first, in the order of cause; empty unless `outcome` is "different".
        reason: what differs, with both numbers; or why nothing could be compared.
        num_values: the number of tensors that were compared.
        not_compared: what could not be compared, and why.
    """

    step: int
    saved_step: int
    outcome: Outcome
    cause: str = ""
    reason: str = ""
    num_values: int = 0
    not_compared: tuple[str, ...] = ()

    def __str__(self) -> str:
        values = counted_noun(self.num_values, "value")
        notes = f"; not compared: {'; '.join(self.not_compared)}" if self.not_compared else ""
        if self.outcome == "identical":
            is_whole = not any(note.startswith(RESULTS) for note in self.not_compared)
            what = f"step {self.step} is" if is_whole else f"what goes into step {self.step} is"
            return f"resume proven: {what} bit-identical ({values}){notes}"
        if self.outcome == "rounding":
            return f"resume proven: step {self.step} is equal within rounding ({values}; {self.reason}){notes}"
        if self.outcome == "different":
            return f"resume differs: step {self.step} after the checkpoint of step {self.saved_step}: {self.cause}: {self.reason}"
        return f"resume not proven: step {self.step}: {self.reason}"


def verdict(then: StepRecord, now: StepRecord) -> ResumeProof:
    """Compare the step of the saving run with that of a run that resumed from its checkpoint."""
    about = now.step, now.saved_step
    if then.step != now.step:
        reason = f"the saving run recorded step {then.step} after this checkpoint, and this run made step {now.step}"
        return ResumeProof(*about, "unknown", reason=reason)
    pair = Pair(then, now)
    results = list(_compared(pair))
    num_values = sum(result.compared.num_values for result in results)
    skipped = tuple(dict.fromkeys(note for result in results for note in result.compared.skipped))
    for cause, compared in results:
        worst = next((finding for finding in compared.findings if finding.is_fault), None)
        if worst is not None:
            more = len([finding for finding in compared.findings if finding.is_fault]) - 1
            others = f", and {counted_noun(more, 'other difference')}" if more else ""
            reason = f"{worst.text}{others}"
            return ResumeProof(*about, "different", cause, reason, num_values, skipped)
    if not num_values:
        return ResumeProof(*about, "unknown", reason="; ".join(skipped) or "nothing was recorded", not_compared=skipped)
    first = next((finding for result in results for finding in result.compared.findings), None)
    if first is None and pair.is_alike:
        return ResumeProof(*about, "identical", num_values=num_values, not_compared=skipped)
    why = _why_rounding(pair, first)
    return ResumeProof(*about, "rounding" if first is not None else "identical", "", why, num_values, skipped)


class _Result(NamedTuple):
    cause: str
    compared: Compared


def _compared(pair: Pair) -> Iterator[_Result]:
    """Yield what each comparison found, in the order of cause. The ones after a fault are consequences, and are left out."""
    for cause, compare in _CAUSES:
        compared = compare(pair)
        yield _Result(cause, compared)
        if any(finding.is_fault for finding in compared.findings):
            return


def _why_rounding(pair: Pair, first: Finding | None) -> str:
    if first is None:
        return ""
    if pair.then.world_size != pair.now.world_size:
        return f"sums of {pair.then.world_size} ranks are made by {pair.now.world_size} now"
    if not pair.is_alike:
        return "the model is cut in another way now"
    if pair.then.rounding != pair.now.rounding:
        then, now = pair.then.rounding, pair.now.rounding
        return f"the forward pass rounded to {then:.2g}, and rounds to {now:.2g} now: {first.text}"
    return f"not bit-repeatable: {first.text}"
