"""The proof of resumes for a trainer's plug-in, which saves and loads by itself and is not called after each step."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdp_optim.arguments import Arguments, check_at_least, check_one_of
from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint.common.pending import SaveHandle
from fsdp_optim.checkpoint.common.run_state import RunState
from fsdp_optim.checkpoint.proof.proving import Prove, Proving
from fsdp_optim.checkpoint.proof.verdict import ResumeProof
from fsdp_optim.options import CallArguments, CallOptions, Model
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.values.classes import innermost
from fsdp_optim.tensors.memory import ordinary_tensors
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.verbs.call import collective_call

_CALL = CallOptions()


@dataclass(frozen=True)
class _ProverArguments(Arguments):
    """The arguments of a call of a `ResumeProver`."""

    call: CallArguments
    what: str
    step: int
    prove: Prove

    def validate(self) -> None:
        super().validate()
        check_one_of("prove", self.prove, (False, True, "raise"))
        check_at_least("step", self.step, 0)


class _Place(NamedTuple):
    """A checkpoint, its step, and the save in the background that writes it."""

    path: str
    step: int
    handle: SaveHandle | None = None


class ResumeProver:
    """Records the step after each checkpoint, and compares it in a run that has resumed, as `CheckpointManager(prove=...)` does.

        prover = ResumeProver(prove=True)
        prover.saved(path, model, optim, step, handle=handle)      # after a save was begun
        prover.resumed(path, model, optim, step)                   # after a load

    The step ends where each optimizer has made its next step: there all ranks communicate once. All ranks make both calls.

    Args:
        prove: True, "raise", or False, with which no call does anything.
        options: a `CallOptions`.
        storage_options: the options of a URL, as for `SaveOptions`.

    Attributes:
        proof: the verdict about the last resume; None before there is one.
    """

    def __init__(
        self, prove: Prove = True, *, options: CallOptions = _CALL, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._prove, self._options, self._storage_options = prove, CallArguments.of(options), storage_options
        self._proving: Proving | None = None
        self.proof: ResumeProof | None = None

    @public
    @ordinary_tensors()
    def saved(
        self,
        path: str | os.PathLike[str],
        model: Model,
        optim: Optimizers | None,
        step: int,
        *,
        state: Mapping[str, Any] | None = None,
        handle: SaveHandle | None = None,
    ) -> None:
        """Record the next step beside a checkpoint, which need not be complete yet.

        Args:
            path, model, optim, state, step: as for `save`.
            handle: of the save in the background.
        """
        self._begin("saved", _Place(str(path), step, handle), model, optim, state)

    @public
    @ordinary_tensors()
    def resumed(
        self,
        path: str | os.PathLike[str],
        model: Model,
        optim: Optimizers | None,
        step: int,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Compare the next step with the one that was recorded beside a checkpoint that was loaded. Arguments: as for `saved`."""
        self._begin("resumed", _Place(str(path), step), model, optim, state)

    def observe(self, **values: Any) -> None:
        """Show what the step sees, as `CheckpointManager.observe` does."""
        if self._proving is not None:
            self._proving.observe(values)

    def close(self) -> None:
        """Stop watching. May be called again."""
        if self._proving is not None:
            self._proving.stop()

    def _begin(
        self,
        what: str,
        place: _Place,
        model: Model,
        optim: Optimizers | None,
        state: Mapping[str, Any] | None,
    ) -> None:
        self.close()
        asked = _ProverArguments(self._options, what, place.step, self._prove)
        if not self._prove or _optimizers(optim) == ():
            return
        proving = Proving(model, optim, RunState(state), self._options, self._storage_options, self._prove)

        def finish() -> None:
            with collective_call("ResumeProver", [model], asked, self._options, all_of_plain=True) as (_, group):
                self._finish(proving, group, place)

        with collective_call("ResumeProver", [model], asked, self._options, all_of_plain=True) as (_, group):
            proving.begin(group, place.path, place.step, compares=what == "resumed", at_end=finish)
        self._proving = proving

    def _finish(self, proving: Proving, group: RankGroup, place: _Place) -> None:
        try:
            proving.finish(group, place.step + 1)
        finally:
            self.proof = proving.proof if proving.proof is not None else self.proof
            if group.rank == group.ranks[0]:
                _write_when_saved(proving, place.handle)


def _optimizers(optim: Optimizers | None) -> Sequence[Any]:
    """Return the optimizers whose hooks are called after a step."""
    listed = () if optim is None else tuple(optim) if isinstance(optim, (list, tuple)) else (optim,)
    return tuple(each for each in listed if callable(getattr(innermost(each), "register_step_post_hook", None)))


def _write_when_saved(proving: Proving, handle: SaveHandle | None) -> None:
    """Put the record beside the checkpoint: now, or in a thread when the save in the background is complete."""
    if handle is None or handle.done():
        proving.write_ready(lambda _: handle is None or not handle.has_failed)
        return

    def write() -> None:
        handle.join()
        proving.write_ready(lambda _: not handle.has_failed)

    # A daemon: the exit of the process waits for the save, and not for the record, without which nothing is lost.
    threading.Thread(target=write, name="fsdp_optim proof", daemon=True).start()
