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
    mine = root / f"rank-{dist.get_rank()}"
    mine.mkdir()
    meeting.tell(0)
    found: dict[str, Any] = {}
    os.chdir(mine)
    try:
        with cpu():
            one = Trained("FSDP2", adam, steps=1)
            found["saved"] = str(
                fsdp_optim.save("run/now", one.model, one.optim, **as_options(fsdp_optim.SaveOptions, **QUIET)).path
            )
            handle = fsdp_optim.async_save(
                "run/later", one.model, one.optim, **as_options(fsdp_optim.SaveOptions, **QUIET)
            )
            found["saved later"] = str(handle.wait(timeout=60).path)
            for name in ("now", "later"):
                fsdp_optim.load(
                    f"run/{name}", one.model, one.optim, options=fsdp_optim.LoadOptions(progress=False, timeout=30.0)
                )
            found["other"] = error_text(
                lambda: fsdp_optim.load("run/never", one.model, options=fsdp_optim.LoadOptions(timeout=30.0))
            )
    finally:
        os.chdir(was)
    meeting.tell(0)
    found["here"] = sorted(str(path.relative_to(mine)) for path in mine.glob("*/*"))
    return found


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
        found = run_on_ranks(in_own_folders, 2, self.root)
        there = self.root / "rank-0" / "run"
        for one in found:
            self.assertEqual([one["saved"], one["saved later"]], [str(there / "now"), str(there / "later")])
            self.assertEqual(one["other"][0], "CheckpointError")
            self.assertIn(str(there / "never"), one["other"][1])
        self.assertEqual([one["here"] for one in found], [["run/later", "run/now"], []])

    def test_extras_by_the_place_in_a_group(self) -> None:
        path = self.root / "step"
        run_on_ranks(save_on_last, 3, path)
        found = run_on_ranks(extras_of_group, 3, path)
        (kind, text), of_the_job = found[0]
        self.assertEqual(kind, "WrapperError")
        self.assertIn("process_group", text)
        check_same("of the job", of_the_job, 0)
        check_same("rank 1", found[1], [0, 1])
        check_same("rank 2", found[2], [1, None])  # no third rank saved

    @parameterized.expand((("nul", "a\0b"), ("surrogate", "a\ud800b"), ("bytes", b"a"), ("number", 7), ("none", None)))
    def test_what_no_file_system_takes(self, _: str, path: Any) -> None:
        model = nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        where = os.path.join(self.root, path) if isinstance(path, str) else path
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: fsdp_optim.save(where, model, optim),
            "async_save": lambda: fsdp_optim.async_save(where, model, optim),
            "load": lambda: fsdp_optim.load(where, model, optim),
            "load the extras": lambda: fsdp_optim.load(where),
            "latest": lambda: fsdp_optim.latest(where),
        }
        for what, call in calls.items():
            kind, text = error_text(call)
            self.assertEqual(kind, "CheckpointError", f"{what}: {kind}: {text}")
            self.assertIn("path", text)
        self.assertEqual(list(self.root.iterdir()), [])


if __name__ == "__main__":
    unittest.main()
