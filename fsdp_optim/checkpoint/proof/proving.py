"""The proof of a manager's resumes: it watches the step after each checkpoint, and compares it with the one that was recorded."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from msgspec import Struct, structs

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.common.contents import weights_of
from fsdp_optim.checkpoint.common.run_state import RANDOM, PerRank, RunState, is_stateful
from fsdp_optim.checkpoint.common.stores import StorageOptions
from fsdp_optim.checkpoint.common.trees import SplitTrees
from fsdp_optim.checkpoint.proof.bounds import tolerance_of
from fsdp_optim.checkpoint.proof.file import read_proof, write_proof
from fsdp_optim.checkpoint.proof.joined import RankStep, joined
from fsdp_optim.checkpoint.proof.measured import ModelMeter
from fsdp_optim.checkpoint.proof.observed import texts_of
from fsdp_optim.checkpoint.proof.record import StepRecord
from fsdp_optim.checkpoint.proof.verdict import ResumeProof, verdict
from fsdp_optim.checkpoint.proof.watch import StepWatch
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.layout import Placement
from fsdp_optim.options import CallArguments, Model
from fsdp_optim.saying import say
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import agree_on_state

log = logging.getLogger("fsdp_optim")

Prove = bool | Literal["raise"]
"""Whether resumes are proven; "raise": a step that differs is an error."""


class _Open(Struct, frozen=True):
    """A step that is being watched. `compares`: a run has resumed from the checkpoint, and compares its step."""

    watch: StepWatch
    where: str
    saved_step: int
    compares: bool


class Proving:
    """Watches the step after each checkpoint of a run. All ranks make every call but `observe` and `write_ready`.

    `proof`: the verdict about the last resume; None before there is one.
    """

    def __init__(
        self,
        model: Model,
        optim: Optimizers | None,
        state: RunState,
        options: CallArguments,
        storage_options: StorageOptions,
        prove: Prove,
    ) -> None:
        self._model, self._optim, self._state, self._options = model, optim, state, options
        self._storage_options, self._prove = storage_options, prove
        self._open: _Open | None = None
        self._ready: tuple[str, StepRecord] | None = None
        self.proof: ResumeProof | None = None

    @property
    def is_watching(self) -> bool:
        """Whether a step is being watched; the same on all ranks."""
        return self._open is not None

    def begin(
        self,
        group: RankGroup,
        where: str,
        saved_step: int,
        *,
        compares: bool,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """Watch the next step. Called by all ranks, after a save was begun, or after a resume.

        `at_end`: called when the optimizers have made their step.
        """
        self.stop()
        if not self._prove:
            return
        is_staged = isinstance(self._model, (list, tuple))
        meter = ModelMeter(self._model, self._optim, group, self._options, self._open_places(group))
        watch = StepWatch(meter, self._plain_tensors, watches_batches=not is_staged, at_end=at_end)
        self._open = _Open(watch, where, saved_step, compares)

    def stop(self) -> None:
        """Stop watching, without a result."""
        if self._open is not None:
            self._open.watch.close()
            self._open = None

    def observe(self, values: Mapping[str, object]) -> None:
        """Take what a user shows of a step that is being watched."""
        if self._open is not None and not self._open.watch.has_failed:
            self._open.watch.observe(values)

    def finish(self, group: RankGroup, step: int) -> None:
        """Record the step that was watched, and compare it where this run has resumed. Called by all ranks.

        Raises StateError on all ranks where the step differs and the run asked for it.
        """
        opened, self._open = self._open, None
        if opened is None:
            return
        opened.watch.close()
        seen = None
        gradients, rounding = self._total_gradient(group, opened.watch)
        if not opened.watch.has_failed:
            try:
                seen = self._seen(opened.watch, gradients, rounding)
            except Exception as error:  # a proof must not stop the training
                opened.watch.fail(error)
        record = joined(group, seen, Failure(), opened.saved_step, step)
        proof = self._judged(group, opened, record)
        if proof is None:
            return
        self.proof = proof
        if self._prove == "raise" and proof.outcome == "different":
            raise StateError(
                f"{proof}: this run does not continue as the saved one would have; prove=True says so without an error"
            )

    def write_ready(self, is_saved: Callable[[str], bool]) -> None:
        """Put the last record beside its checkpoint, if the checkpoint is complete. Called by the lowest rank alone."""
        if self._ready is None or not is_saved(self._ready[0]):
            return
        (where, record), self._ready = self._ready, None
        try:
            write_proof(where, record, self._storage_options)
        except CheckpointError as error:
            log.warning("%s: what the step after it led to cannot be recorded: %s", where, error)

    # -------------------------------------------------------------------------------------------- inside

    def _open_places(self, group: RankGroup) -> dict[str, Placement]:
        """Return the placements on all ranks of weights whose adapter knows only the part of this rank."""
        reader = ModelReader(self._model, group.rank)
        local = weights_of(reader, group.ranks, self._options)
        own = [fqn for param in local.optim.params for fqn, place in param.named.placements.items() if place.is_open]
        if not all_gather_bytes(group, "parts", b"", flags=int(bool(own))).flags:
            return {}
        _, merged = agree_on_state(group, lambda: local, self._options, "the step to prove", with_state=False)
        return {fqn: merged.params[fqn].placement for fqn in own if fqn in merged.params}

    def _total_gradient(self, group: RankGroup, watch: StepWatch) -> tuple[float, float]:
        """Return the norm of all gradients of all ranks together, and the coarsest rounding of any rank."""
        own = float(watch.gradients.sums.squares.sum()) if watch.gradients is not None else 0.0
        report = all_gather_bytes(group, "gradients", pickle.dumps((own, watch.rounding)))
        figures = [pickle.loads(report.content_of(rank)) for rank in group.ranks]
        return sum(square for square, _ in figures) ** 0.5, max(rounding for _, rounding in figures)

    def _plain_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors in values of `state=` that are no objects, whose `state_dict()` might communicate."""
        named = self._state.named
        plain = {name: value for name, value in named.items() if not (isinstance(value, PerRank) or is_stateful(value))}
        return SplitTrees.of(plain).tensors

    def _seen(self, watch: StepWatch, gradients: float, rounding: float) -> RankStep:
        meter = watch.meter
        values, own = self._state.saved()
        split = SplitTrees.of(values or {})
        objects = {name: texts_of(value) for name, value in split.values.items()}
        own_objects = {name: texts_of(value) for name, value in (own or {}).items() if name != RANDOM}
        return RankStep(
            before=watch.went_in,
            trees_before=watch.trees,
            gradients=watch.gradients,
            after=(meter.weights(), meter.moments()),
            marks=meter.marks(),
            groups=watch.groups if watch.groups is not None else meter.groups(),
            has_updated=watch.has_updated,
            random=watch.random,
            batches=tuple(watch.batches),
            is_observed=watch.is_observed,
            numbers=watch.numbers,
            observed=watch.observed,
            rounding=watch.rounding,
            spread=meter.spreads(tolerance_of(rounding), gradients),
            trees=meter.trees(split.tensors),
            objects=objects,
            own_objects=own_objects,
        )

    def _judged(self, group: RankGroup, opened: _Open, record: StepRecord | None) -> ResumeProof | None:
        """Return the verdict of the lowest rank, on all ranks; None where there is nothing to compare."""
        content, failure = b"", Failure()
        if group.rank == group.ranks[0]:
            with failure:
                proof = self._compared(opened, record)
                content = pickle.dumps(proof)
                if proof is not None:
                    self._say(proof)
        report = all_gather_bytes(group, "verdict", content, error=failure.error, fatal=failure.fatal)
        proof = pickle.loads(report.content_of(group.ranks[0]))
        return proof if isinstance(proof, ResumeProof) else None

    def _compared(self, opened: _Open, record: StepRecord | None) -> ResumeProof | None:
        """Compare on the lowest rank. What is to be written beside the checkpoint: a first record, or that it was proven."""
        then, proof, reason = None, None, ""
        try:
            then = read_proof(opened.where, self._storage_options) if opened.compares else None
            proof = verdict(then, record) if then is not None and record is not None else None
        except CheckpointError as error:
            reason = f"the record of the saving run cannot be read: {error}"
        except Exception as error:  # a proof must not stop the training
            reason = f"it cannot be compared with the record of the saving run: {type(error).__name__}: {error}"
        if record is not None and then is None and not reason:
            self._ready = opened.where, record
        if not opened.compares:
            return None
        if proof is not None and then is not None:
            if proof.outcome in ("identical", "rounding") and then.proven != proof.outcome:
                self._ready = opened.where, structs.replace(then, proven=proof.outcome)
            return proof
        if record is None:
            reason = "this run could not watch it"
        elif not reason:
            reason = "the saving run has recorded no step after this checkpoint; this run has now"
        return ResumeProof(opened.saved_step + 1, opened.saved_step, "unknown", reason=reason)

    @staticmethod
    def _say(proof: ResumeProof) -> None:
        if proof.outcome == "different":
            log.warning("%s", proof)
        else:
            say(str(proof))
