"""Paths of checkpoints: relative ones on ranks with different working directories, and those that no file system takes."""

from __future__ import annotations

import os
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same, error_text
from kit.groups import Meeting
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

QUIET: dict[str, Any] = {"durable": False, "progress": False, "timeout": 30.0}


def in_own_folders(root: Path) -> dict[str, Any]:
    """Save and load by a relative path; every rank is somewhere else."""
    meeting, was = Meeting(), os.getcwd()
    own_folder = root / f"rank-{dist.get_rank()}"
    own_folder.mkdir()
    meeting.tell(0)
    outcomes: dict[str, Any] = {}
    os.chdir(own_folder)
    try:
        with cpu():
            trained = Trained("FSDP2", adam, steps=1)
            outcomes["saved"] = str(
                fsdp_optim.save(
                    "run/now", trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **QUIET)
                ).path
            )
            handle = fsdp_optim.async_save(
                "run/later", trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **QUIET)
            )
            outcomes["saved later"] = str(handle.wait(timeout=60).path)
            for name in ("now", "later"):
                fsdp_optim.load(
                    f"run/{name}",
                    trained.model,
                    trained.optim,
                    options=fsdp_optim.LoadOptions(progress=False, timeout=30.0),
                )
            outcomes["other"] = error_text(
                lambda: fsdp_optim.load("run/never", trained.model, options=fsdp_optim.LoadOptions(timeout=30.0))
            )
    finally:
        os.chdir(was)
    meeting.tell(0)
    outcomes["here"] = sorted(str(path.relative_to(own_folder)) for path in own_folder.glob("*/*"))
    return outcomes


def extras_of_group(path: Path) -> list[Any]:
    """The extras that a rank gets without a model: by its place in the group, or in the job."""
    last = dist.new_group([1, 2])
    position = dist.get_rank() - 1
    own: Any = error_text(lambda: fsdp_optim.load(path, options=fsdp_optim.LoadOptions(process_group=last)))
    if position >= 0:
        own = fsdp_optim.load(path, options=fsdp_optim.LoadOptions(process_group=last)).state.get("position")
    return [own, fsdp_optim.load(path).state.get("position")]


def save_on_last(path: Path) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        fsdp_optim.save(
            path,
            nn.Linear(2, 2),
            state={"position": fsdp_optim.per_rank(dist.get_rank() - 1)},
            **as_options(fsdp_optim.SaveOptions, **QUIET, process_group=group),
        )


class PathTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(os.path.realpath(folder.name))

    def test_relative_on_ranks_with_different_working_directories(self) -> None:
        by_rank = run_on_ranks(in_own_folders, 2, self.root)
        there = self.root / "rank-0" / "run"
        for outcomes in by_rank:
            self.assertEqual([outcomes["saved"], outcomes["saved later"]], [str(there / "now"), str(there / "later")])
            self.assertEqual(outcomes["other"][0], "CheckpointError")
            self.assertIn(str(there / "never"), outcomes["other"][1])
        self.assertEqual([outcomes["here"] for outcomes in by_rank], [["run/later", "run/now"], []])

    def test_extras_by_the_place_in_a_group(self) -> None:
        path = self.root / "step"
        run_on_ranks(save_on_last, 3, path)
        by_rank = run_on_ranks(extras_of_group, 3, path)
        (kind, text), of_the_job = by_rank[0]
        self.assertEqual(kind, "WrapperError")
        self.assertIn("process_group", text)
        check_same("of the job", of_the_job, 0)
        check_same("rank 1", by_rank[1], [0, 1])
        check_same("rank 2", by_rank[2], [1, None])  # no third rank saved

    def calls_at(self, where: Any, model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Callable[[], Any]]:
        """Calls that take a path which nothing can be at."""
        return {
            "save": lambda: fsdp_optim.save(where, model, optim),
            "load": lambda: fsdp_optim.load(where, model, optim),
            "latest": lambda: fsdp_optim.latest(where),
            "prune": lambda: fsdp_optim.prune(where, keep_last=1),
            "verify": lambda: fsdp_optim.verify(where),
            "inspect": lambda: fsdp_optim.inspect(where),
            "convert": lambda: fsdp_optim.convert(where, self.root / "new"),
            "proof_of": lambda: fsdp_optim.proof_of(where),
        }

    @parameterized.expand((("nul", "a\0b"), ("surrogate", "a\ud800b"), ("bytes", b"a"), ("number", 7), ("none", None)))
    def test_what_no_file_system_takes(self, _: str, path: Any) -> None:
        model = nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        where = os.path.join(self.root, path) if isinstance(path, str) else path
        calls: dict[str, Callable[[], Any]] = {
            **self.calls_at(where, model, optim),
            "async_save": lambda: fsdp_optim.async_save(where, model, optim),
            "load the extras": lambda: fsdp_optim.load(where),
            **({} if isinstance(path, str) else {"diagnose": lambda: fsdp_optim.diagnose(where)}),
        }
        for what, call in calls.items():
            kind, text = error_text(call)
            self.assertEqual(kind, "CheckpointError", f"{what}: {kind}: {text}")
            self.assertIn("path", text)
        self.assertEqual(list(self.root.iterdir()), [])

    @parameterized.expand([("loop",), ("loop/step-1",), ("loop/runs/step-1",), ("other",)])
    def test_a_symbolic_link_that_leads_to_itself(self, name: str) -> None:
        (self.root / "loop").symlink_to(self.root / "loop")
        (self.root / "other").symlink_to(self.root / "loop" / "run")
        where, model = self.root / name, nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        calls: dict[str, Callable[[], Any]] = {
            **self.calls_at(where, model, optim),
            "resume": lambda: fsdp_optim.resume(where, model, optim),
            "manager": lambda: fsdp_optim.CheckpointManager(where, model, optim).resume(),
            "checkpoints": lambda: fsdp_optim.checkpoints(where),
            "unfinished_saves": lambda: fsdp_optim.unfinished_saves(where),
        }
        for what, call in calls.items():
            kind, text = error_text(call)
            self.assertEqual(kind, "CheckpointError", f"{what}: {kind}: {text}")
            self.assertIn("loop" if name != "other" else "other", text)
        diagnosis = fsdp_optim.diagnose(where)
        self.assertFalse(diagnosis.complete)
        self.assertIn("symbolic links", " ".join(diagnosis.problems))
        self.assertEqual(sorted(path.name for path in self.root.iterdir()), ["loop", "other"])


if __name__ == "__main__":
    unittest.main()
