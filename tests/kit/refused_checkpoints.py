"""Good checkpoints to damage, and the proof that all ranks refuse one alike and change nothing.

The files are edited with the reader of `kit.checkpoint_format`, which knows the format only from its description.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
import unittest
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from kit.checkpoint_format import (
    MANIFEST,
    Buffered,
    Large,
    extra,
    in_order,
)
from kit.compare import Differs, check_refused, check_same, differences, error_text
from kit.local_parts import local_of
from kit.optimizers import adam, sgd
from kit.options import as_options, state_for
from kit.trained import Trained
from kit.wrapping import cpu, snapshot

WORLD = 2
PATIENCE = 60.0  # seconds; a call that takes them has hung
LIMIT = 45.0  # for a run of ranks that does little
Error = tuple[str, str]

# ------------------------------------------------------------------------------------------- models


def trained(steps: int, wrapper: str = "FSDP2", model: str = "Buffered") -> Trained:
    """Parameters, optimizer and buffers are those of so many steps."""
    made = Trained(wrapper, adam, steps, Buffered) if model == "Buffered" else Trained(wrapper, sgd, steps, Large)
    for name, buffer in made.model.named_buffers():
        if name.endswith("count"):
            buffer.fill_(steps)
    return made


def contents(run: Trained) -> dict[str, Any]:
    """This rank's part of what a checkpoint restores."""
    saved = [in_order(run.optim.state[param]) for param in run.params]
    return {
        "parameters": [local_of(param).detach().clone() for param in run.params],
        "state": [{name: local_of(value).clone() for name, value in values.items()} for values in saved],
        "buffers": {name: buffer.clone() for name, buffer in run.model.named_buffers()},
    }


def everything(run: Trained) -> dict[str, Any]:
    """The values that a refused call must not change, with their identities."""
    buffers = dict(run.model.named_buffers())
    return snapshot(run) | {
        "buffers": {name: buffer.clone() for name, buffer in buffers.items()},
        "buffer identities": [id(buffer) for buffer in buffers.values()],
    }


@dataclasses.dataclass
class Outcome:
    """Of a call on one rank: its error, and what it changed."""

    error: Error
    changed: list[str]


def outcome_of(call: Callable[[], Any], *models: Trained) -> Outcome:
    return outcome_since([everything(run) for run in models], call, *models)


def outcome_since(before: Sequence[Any], call: Callable[[], Any], *models: Trained) -> Outcome:
    """The same, where the caller knows what was before."""
    error = error_text(call)
    changed = [line for run, was in zip(models, before, strict=True) for line in differences(everything(run), was)]
    return Outcome(error, changed)


# ------------------------------------------------------------------------------------------- good checkpoints


def save_good(path: Path, steps: int = 3, wrapper: str = "FSDP2", model: str = "Buffered", **options: Any) -> None:
    with cpu():
        run = trained(steps, wrapper, model)
        per_rank = {"rank": dist.get_rank(), "rng": torch.arange(5) + dist.get_rank()}
        fsdp_optim.save(
            path,
            run.model,
            run.optim,
            state=state_for(extra(), per_rank),
            **as_options(fsdp_optim.SaveOptions, **options),
        )


KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "split": {"max_file_size": 100},
    "large": {"model": "Large"},
    "unsummed": {"checksums": False},
}


@functools.cache
def good(kind: str) -> Path:
    """A checkpoint that nobody changes."""
    folder = Path(_root().name) / kind
    run_on_ranks(save_good, WORLD, folder, **KINDS[kind])
    return folder


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fsdp_optim_safety_")


@functools.cache
def good_contents(model: str, rank: int, world_size: int) -> dict[str, Any]:
    """The local tensors that a good checkpoint restores on this rank; they outlive the world that they were made in."""
    return contents(trained(3, model=model))


def load_both_ways(paths: Sequence[Path], right: Path, kind: str, verifies: Sequence[bool]) -> list[list[Outcome]]:
    """On one rank: what comes of loading each of these, with and without checksums; then a good one must load."""
    with cpu():
        model = KINDS[kind].get("model", "Buffered")
        target, outcomes = trained(1, model=model), []
        before = [everything(target)]
        for path in paths:
            outcomes.append([])
            for verify in verifies:
                call = functools.partial(
                    fsdp_optim.load,
                    path,
                    target.model,
                    target.optim,
                    options=fsdp_optim.LoadOptions(verify=verify, timeout=PATIENCE),
                )
                outcomes[-1].append(outcome_since(before, call, target))
                if outcomes[-1][-1].changed:
                    before = [everything(target)]
        fsdp_optim.load(right, target.model, target.optim, options=fsdp_optim.LoadOptions(timeout=PATIENCE))
        wanted = good_contents(model, dist.get_rank(), dist.get_world_size())
        check_same("loaded afterwards", contents(target), wanted)
        return outcomes


class DamageTest(unittest.TestCase):
    """Has a copy of a good checkpoint to damage."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fsdp_optim_safety_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def copy(self, kind: str = "whole", name: str = "damaged") -> Path:
        return Path(shutil.copytree(good(kind), self.root / name, symlinks=True))

    def check_refused(
        self, folder: Path, *words: str, kind: str = "whole", verifies: Sequence[bool] = (True, False)
    ) -> None:
        """All ranks refuse it alike, in words that have all of these; "a|b" is one of both."""
        self.check_all_refused({folder.name: (folder, words)}, kind, verifies)

    def check_all_refused(
        self,
        cases: Mapping[str, tuple[Path, Sequence[str]]],
        kind: str = "whole",
        verifies: Sequence[bool] = (True, False),
        or_state_error: Sequence[str] = (),
    ) -> None:
        """The same of many folders in one run of ranks. `or_state_error`: what may also be another model's checkpoint."""
        folders = [folder for folder, _ in cases.values()]
        by_rank = run_on_ranks(load_both_ways, WORLD, folders, good(kind), kind, verifies, timeout=LIMIT)
        for (what, (_, words)), *outcomes in zip(cases.items(), *by_rank, strict=True):
            for verify, ranks in zip(verifies, zip(*outcomes, strict=True), strict=True):
                with self.subTest(what, verify=verify):
                    check_outcomes(what, ranks, *words, or_state_error=what in or_state_error)


def check_outcomes(what: str, ranks: Sequence[Outcome], *words: str, or_state_error: bool = False) -> None:
    """Raise unless all ranks raised the same CheckpointError with all these words, and changed nothing."""
    state_error = or_state_error and ranks[0].error[0] == "StateError"
    check_refused(what, [outcome.error for outcome in ranks], "StateError" if state_error else "CheckpointError")
    text = ranks[0].error[1]
    lacking = [word for word in words if not state_error and not any(choice in text for choice in word.split("|"))]
    if lacking:
        raise Differs(f"{what}: {lacking} not in {text!r}")
    changed = {rank: outcome.changed for rank, outcome in enumerate(ranks) if outcome.changed}
    if changed:
        raise Differs(f"{what}: refused ({text!r}), but changed: {changed}")


# ------------------------------------------------------------------------------------------- flipped bits

SAVED_FILES = (
    "model.safetensors",
    "optim.safetensors",
    "state.safetensors",
    "extra/common.safetensors",
    "extra/rank-00001.safetensors",
)

# ------------------------------------------------------------------------------------------- sizes

EVERY_FILE = [*SAVED_FILES, "model.safetensors.sums", "optim.safetensors.sums", "state.safetensors.sums", MANIFEST]

# ------------------------------------------------------------------------------------------- saving that fails


def save_errors(path: Path, overwrite: bool = False) -> tuple[Outcome, Error]:
    """Of saving there, and of loading what is there."""
    with cpu():
        run, target = trained(2), trained(1)
        saved = outcome_of(
            lambda: fsdp_optim.save(
                path, run.model, run.optim, overwrite=overwrite, options=fsdp_optim.SaveOptions(timeout=PATIENCE)
            ),
            run,
        )
        return saved, error_text(
            lambda: fsdp_optim.load(path, target.model, target.optim, options=fsdp_optim.LoadOptions(timeout=PATIENCE))
        )
