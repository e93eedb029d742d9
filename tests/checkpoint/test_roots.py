"""A wrong path is no fresh start: a missing parent, a checkpoint in place of a folder of them, checkpoints that are passed by."""

from __future__ import annotations

import os
import shutil
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.catalogs import LOG, CatalogTest, save
from kit.compare import check_same, refused
from kit.managed import Run, steps_in
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_ranks


def resumed(root: Any) -> Any:
    return fsdp_optim.resume(root, nn.Linear(3, 2))


CALLS = [("resume", resumed), ("latest", fsdp_optim.latest), ("checkpoints", fsdp_optim.checkpoints)]


def managed(root: Any) -> int:
    run = Run(root, "plain")
    with run.manager:
        return run.manager.resume()


ALL = [*CALLS, ("manager", managed)]


class WrongPathTest(CatalogTest):
    @parameterized.expand(ALL)
    def test_a_missing_parent(self, _: str, call: Any) -> None:
        words = (str(self.root / "rnus" / "one"), "is not there", str(self.root / "rnus"), "correct the path")
        refused(lambda: call(self.root / "rnus" / "one"), CheckpointError, *words)
        self.check_only()

    @parameterized.expand(ALL)
    def test_a_checkpoint(self, _: str, call: Any) -> None:
        for format in ("safetensors", "dcp"):
            folder = self.root / format / "step-1"
            save(folder, format=format)
            words = (str(folder), "is a checkpoint (", f"fsdp_optim.load({str(folder)!r}", "that it is in")
            refused(lambda folder=folder: call(folder), CheckpointError, *words)

    @parameterized.expand(ALL)
    def test_a_checkpoint_of_another_library(self, _: str, call: Any) -> None:
        save(self.root / "ours" / "step-1", weights_only=True)
        foreign = self.root / "gpt"
        foreign.mkdir()
        shutil.copy(self.root / "ours" / "step-1" / "model.safetensors", foreign)
        (foreign / "config.json").write_text("{}")
        refused(lambda: call(foreign), CheckpointError, str(foreign), "is a checkpoint (", "fsdp_optim.load")

    @parameterized.expand(ALL)
    def test_a_file(self, _: str, call: Any) -> None:
        torch.save({}, self.root / "model.pt")
        refused(lambda: call(self.root / "model.pt"), CheckpointError, "model.pt: is not a folder", "fsdp_optim.load")

    @parameterized.expand(ALL)
    def test_checkpoints_of_other_programs(self, _: str, call: Any) -> None:
        root = self.root / "torch"
        dcp.save({"weight": torch.ones(3)}, checkpoint_id=root / "10")
        refused(lambda: call(root), CheckpointError, "those of other programs", str(root / "10"), "for a new run")
        root = self.root / "files"
        for step in (9, 10):
            (root / f"checkpoint-{step}").mkdir(parents=True)
            torch.save({"weight": torch.ones(3)}, root / f"checkpoint-{step}" / "pytorch_model.bin")
        paths = f"{root / 'checkpoint-10'}, {root / 'checkpoint-9'}"
        refused(lambda: call(root), CheckpointError, "those of other programs", paths)

    def test_a_manager_where_others_have_saved(self) -> None:
        for step in (5, 10):
            save(self.root / f"step-{step}", step=step)
        words = ("2 checkpoints that no CheckpointManager made", "step-10", f"fsdp_optim.resume('{self.root}'")
        refused(lambda: managed(self.root), CheckpointError, *words, "a folder of its own")
        run = Run(self.root / "run", "plain")
        with run.manager:
            run.steps([2])
        save(self.root / "run" / "best")
        self.assertEqual(managed(self.root / "run"), 2)

    def test_a_manager_where_damaged_ones_of_others_are(self) -> None:
        save(self.root / "step-5", step=5)
        (self.root / "step-5" / "model.safetensors").unlink()
        self.assertEqual(managed(self.root), 0)


class FreshStartTest(CatalogTest):
    @parameterized.expand([("missing",), ("empty",), ("of notes",)])
    def test_it_is_told_on_one_line(self, name: str) -> None:
        root = self.root / name
        if name != "missing":
            root.mkdir()
        if name == "of notes":
            (root / "notes").mkdir()
            (root / "notes" / "data.pt").write_bytes(b"mine")
            torch.save({}, root / "dataset.pt")
        for call, nothing in ((resumed, None), (managed, 0)):
            with self.assertLogs(LOG, "WARNING") as logs:
                self.assertEqual(call(root), nothing)
            self.assertEqual(logs.output, [f"WARNING:{LOG}:{root} has no checkpoint: training starts from scratch"])
        with self.assertNoLogs(LOG, "WARNING"):
            self.assertIsNone(fsdp_optim.latest(root))
            self.assertEqual(fsdp_optim.checkpoints(root), [])

    def test_a_relative_path(self) -> None:
        before = os.getcwd()
        os.chdir(self.root)
        try:
            self.assertIsNone(resumed("run"))
            refused(lambda: resumed("rnus/one"), CheckpointError, "is not there")
        finally:
            os.chdir(before)


class BucketTest(CatalogTest):
    @parameterized.expand(ALL)
    def test_a_checkpoint(self, name: str, call: Any) -> None:
        url = f"memory://{self.id()}/step-1"
        save(url)  # type: ignore[arg-type]
        refused(lambda: call(url), CheckpointError, url, "is a checkpoint (")

    def test_an_empty_prefix(self) -> None:
        url = f"memory://{self.id()}/far/away"
        for call, nothing in ((resumed, None), (managed, 0)):
            with self.assertLogs(LOG, "WARNING") as logs:
                self.assertEqual(call(url), nothing)
            self.assertEqual(logs.output, [f"WARNING:{LOG}:{url} has no checkpoint: training starts from scratch"])
        self.assertIsNone(fsdp_optim.latest(url))

    def test_a_manager_where_others_have_saved(self) -> None:
        url = f"memory://{self.id()}/run"
        save(f"{url}/step-5")  # type: ignore[arg-type]
        refused(lambda: managed(url), CheckpointError, "1 checkpoint that no CheckpointManager made", f"{url}/step-5")


def on_ranks(root: Path) -> None:
    model = nn.Linear(3, 2)
    folder = root if dist.get_rank() == 0 else root / "elsewhere"
    refused(lambda: fsdp_optim.resume(root / "rnus" / "one", model), CheckpointError, "is not there")
    refused(lambda: fsdp_optim.resume(root / "step-1", model), CheckpointError, "is a checkpoint (")
    check_same("new", fsdp_optim.resume(root / "new", model), None)
    run = Run(root, "DDP")
    with run.manager:
        refused(run.manager.resume, CheckpointError, "that no CheckpointManager made")
    check_same("managed", steps_in(root / "new") if folder.exists() and (root / "new").exists() else [], [])


class RanksTest(CatalogTest):
    def test_the_error_is_every_ranks(self) -> None:
        save(self.root / "step-1")
        run_on_ranks(on_ranks, 2, self.root)


if __name__ == "__main__":
    unittest.main()
