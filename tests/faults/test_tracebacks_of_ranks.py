"""Wrong arguments on ranks: on each of them a traceback of at most a dozen lines that ends at the user's call.

What was wrong may be so on all ranks, or on one of them alone: then every rank raises, and each traceback is as short.
"""

from __future__ import annotations

import tempfile
import traceback
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.optimizers import adam
from kit.trained import Trained
from torch import nn

import fsdp_optim as F
from fsdp_optim.testing import run_on_ranks

WORLD = 2
MOST_LINES = 12
PACKAGE = str(Path(F.__file__).parent)
FAST = F.SaveOptions(durable=False)

Call = Callable[[], Any]


def calls(folder: Path, bad: bool) -> Mapping[str, tuple[Call, str]]:
    """The calls, and a word of the error of each. `bad`: on this rank alone the cases of one rank are wrong."""
    trained = Trained("FSDP2", adam, 1)
    model, optim = trained.model, trained.optim
    saved, new, run = folder / "run" / "step-1", folder / "new", folder / "managed"
    F.save(saved, model, optim, options=FAST)
    full = F.gather_full_optim_state_dict(model, optim, None)
    manager = F.CheckpointManager(run, model, optim, every=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
    stranger = torch.optim.Adam(nn.Linear(3, 2).parameters())
    lacking = {**full, "state": dict([*full["state"].items()][1:])}
    managed = F.CheckpointManager
    return {
        "save: model and path swapped": (lambda: F.save(model, new, optim), "the path comes first"),
        "save: optimizer as model": (lambda: F.save(new, optim, model), "the model comes before the optimizer"),
        "save: the path is taken": (lambda: F.save(saved, model, optim), "already exists"),
        "save: a path as state": (lambda: F.save(new, model, state={"x": Path("a")}), "state['x']"),
        "save: a scheduler as state": (lambda: F.save(new, model, state=scheduler), "must be a dict"),
        "save: unknown format": (lambda: F.save(new, model, format="safetensor"), "'safetensor'"),
        "save: another step on a rank": (lambda: F.save(new, model, step=10 + bad), "step=11"),
        "save: another path on a rank": (lambda: F.save(f"{new}-{bad}", model), "-True"),
        "save: swapped on a rank": (lambda: F.save(new, optim if bad else model), "rank 1: model must be"),
        "load: a root": (lambda: F.load(folder / "run", model, optim), "Did you mean"),
        "load: nothing there": (lambda: F.load(new, model, optim), "no such folder"),
        "load: None": (lambda: F.load(None, model, optim), "latest()"),  # type: ignore[arg-type]
        "load: another path on a rank": (lambda: F.load(new if bad else saved, model, optim), "the same call"),
        "load: a state dict on a rank": (lambda: F.load(saved, model.state_dict() if bad else model), "state_dict()"),
        "load: a scheduler": (lambda: F.load(saved, model, scheduler), "StepLR"),
        "load: unknown weights": (lambda: F.load(saved, model, weights="some"), "'trainable'"),  # type: ignore[arg-type]
        "resume: a checkpoint": (lambda: F.resume(saved, model, optim), "not a folder of checkpoints"),
        "resume: another root on a rank": (lambda: F.resume(folder / f"run{bad}", model, optim), "rank 1"),
        "manager: every": (lambda: managed(new, model, optim, every=0), "every must be"),
        "manager: every on a rank": (lambda: managed(new, model, optim, every=5 + bad), "every=6"),
        "manager: keep_last on a rank": (lambda: managed(new, model, every=1, keep_last=1 - 2 * bad), "rank 1: keep"),
        "manager: a step that is a str": (lambda: manager.step("1"), "step must be"),  # type: ignore[arg-type]
        "manager: a step on a rank": (lambda: manager.step(-1 if bad else 1), "rank 1: step must be"),
        "manager: back to nothing": (lambda: manager.rollback(77), "no checkpoint of step 77"),
        "gather: swapped": (lambda: F.gather_full_optim_state_dict(optim, model), "before the optimizer"),
        "gather: on a rank": (lambda: F.gather_full_optim_state_dict(model, model if bad else optim), "rank 1: optim"),
        "gather: recipient": (lambda: F.gather_full_optim_state_dict(model, optim, 9), "recipient_rank 9"),
        "gather: a stranger": (lambda: F.gather_full_optim_state_dict(model, stranger), "not in the model"),
        "get_shard: None": (lambda: F.get_shard_from_optim_state_dict(model, optim, None), "a recipient?"),
        "get_shard: too little": (lambda: F.get_shard_from_optim_state_dict(model, optim, lacking), "strict=False"),
        "convert: nothing there": (lambda: F.convert(new, folder / "c"), "no such folder"),
        "convert: unknown format": (lambda: F.convert(saved, new, format="tarch"), "'tarch'"),
        "convert: format on a rank": (lambda: F.convert(saved, new, format="tarch" if bad else "torch"), "rank 1: f"),
        "convert: the path is taken": (lambda: F.convert(saved, saved), "already exists"),
    }


def trace_of(call: Call) -> str:
    try:
        call()
    except F.FsdpOptimError:
        return traceback.format_exc()
    return ""


def traces(folder: str) -> dict[str, tuple[str, str]]:
    """The traceback of each case on this rank, and the word that is expected in it."""
    seen = {}
    for label, (call, word) in calls(Path(folder), bad=dist.get_rank() == 1).items():
        seen[label] = trace_of(call), word
        dist.barrier()
    return seen


class TracebackTest(unittest.TestCase):
    def test_a_dozen_lines_on_each_rank(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(traces, WORLD, folder)
        self.assertGreater(len(by_rank[0]), 30)
        for rank, seen in enumerate(by_rank):
            for label, (text, word) in seen.items():
                with self.subTest(label, rank=rank):
                    lines = [line for line in text.splitlines() if line.strip(" ^")]
                    self.assertIn(word, text)
                    self.assertLessEqual(len(lines), MOST_LINES, text)
                    self.assertEqual(text.count("Traceback"), 1, text)
                    own = [line for line in lines if f'File "{PACKAGE}' in line]
                    self.assertEqual([line for line in own if "/boundary/tracebacks.py" not in line], [], text)


if __name__ == "__main__":
    unittest.main()
