"""A path that is no checkpoint: the error names the checkpoints in it, or beside it; and what objects show in a notebook."""

from __future__ import annotations

import os
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from kit.catalogs import LOG, CatalogTest, save
from kit.compare import check_refused, error_text, refused
from kit.managed import Run
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.checkpoint.save import background
from fsdp_optim.testing import run_on_ranks

CALLS: list[tuple[str, Any]] = [
    ("load", lambda at: fsdp_optim.load(at, nn.Linear(3, 2))),
    ("inspect", fsdp_optim.inspect),
    ("verify", fsdp_optim.verify),
    ("convert", lambda at: fsdp_optim.convert(at, f"{at}-new")),
]


def load_on_ranks(path: Any) -> tuple[str, str]:
    return error_text(lambda: fsdp_optim.load(path, nn.Linear(3, 2)))


class MistakenPathTest(CatalogTest):
    def setUp(self) -> None:
        super().setUp()
        self.run_of = self.root / "run"
        for step in (20, 10):  # saved in this order: step-10 is the newest
            save(self.run_of / f"step-{step}", step=step)

    @parameterized.expand(CALLS)
    def test_a_folder_of_checkpoints(self, _: str, call: Any) -> None:
        for at in (str(self.run_of), f"{self.run_of}/", self.run_of, f"file://{self.run_of}"):
            told = "is a folder of checkpoints, not a checkpoint: it has step-10, step-20. Did you mean "
            refused(lambda at=at: call(at), CheckpointError, f"{at}: {told}", f"{str(at).rstrip('/')}/step-10?")

    @parameterized.expand(CALLS)
    def test_the_newest_one_is_damaged(self, _: str, call: Any) -> None:
        os.remove(self.run_of / "step-10" / "model.safetensors")
        refused(lambda: call(self.run_of), CheckpointError, "it has step-10, step-20", "Did you mean", "step-20?")

    @parameterized.expand(CALLS)
    def test_a_name_that_is_not_there(self, _: str, call: Any) -> None:
        path = self.run_of / "step-30"
        told = f"{path}: there is no such folder", "; beside it are step-10, step-20. Did you mean ", "run/step-10?"
        refused(lambda: call(path), CheckpointError, *told)

    @parameterized.expand(CALLS)
    def test_others_errors_stay(self, _: str, call: Any) -> None:
        """Nothing is there; a checkpoint is damaged; a file is no checkpoint. None of them has anything to do with others."""
        os.remove(self.run_of / "step-10" / "model.safetensors")
        (self.run_of / "train.py").write_text("print()")
        for path, words in (
            (self.root / "other" / "step-1", "there is no such folder"),
            (self.run_of / "step-10", "is missing"),
            (self.run_of / "train.py", "is a file of an unknown format"),
        ):
            kind, text = error_text(lambda path=path: call(path))
            self.assertEqual((kind, words in text, "Did you mean" in text), ("CheckpointError", True, False), text)

    def test_many(self) -> None:
        for step in range(100, 112):
            save(self.run_of / f"step-{step}", step=step)
        refused(
            lambda: fsdp_optim.inspect(self.run_of), CheckpointError, "step-111, step-110, ", " and 6 more. Did you"
        )

    def test_on_ranks(self) -> None:
        errors = run_on_ranks(load_on_ranks, 2, self.run_of)
        check_refused("on ranks", errors, "CheckpointError", "it has step-10, step-20", "step-10?")

    def test_what_latest_has_not_found(self) -> None:
        nothing: Any = fsdp_optim.latest(self.root / "rnu")
        refused(lambda: fsdp_optim.load(nothing, nn.Linear(3, 2)), CheckpointError, "latest() returns None where")


class ShownTest(CatalogTest):
    def test_a_handle(self) -> None:
        path = self.root / "a"
        gate, finish = threading.Event(), background.finish

        def late(*args: Any) -> Any:
            gate.wait(60)
            return finish(*args)

        with mock.patch.object(background, "finish", late):
            handle = fsdp_optim.async_save(path, nn.Linear(3, 2), options=fsdp_optim.SaveOptions(durable=False))
            self.assertEqual(repr(handle), f"SaveHandle(path={str(path)!r}, state='saving')")
            gate.set()
            handle.join()
        handle.wait()
        self.assertEqual(repr(handle), f"SaveHandle(path={str(path)!r}, state='saved')")

    def test_a_handle_of_a_save_that_failed(self) -> None:
        with mock.patch.object(background, "finish", side_effect=CheckpointError("full")):
            handle = fsdp_optim.async_save(self.root / "a", nn.Linear(3, 2))
            refused(handle.wait, CheckpointError, "full")
        self.assertEqual(repr(handle), f"SaveHandle(path={str(self.root / 'a')!r}, state='failed')")

    def test_a_manager(self) -> None:
        run = Run(self.root / "run", "plain", every=2)
        root = str(Path(self.root, "run"))
        with run.manager:
            self.assertEqual(repr(run.manager), f"CheckpointManager(root={root!r}, step=None, every=2)")
            run.steps(range(1, 4))
            self.assertEqual(repr(run.manager), f"CheckpointManager(root={root!r}, step=3, every=2)")

    @parameterized.expand([(None, 0, True), (None, 2, False), (5, 0, False)])
    def test_a_manager_that_has_saved_nothing_says_so(self, every: int | None, saved: int, is_said: bool) -> None:
        run = Run(self.root / "run", "plain", every=every)
        with self.assertLogs(LOG, "WARNING") as logs:
            run.manager.resume()  # begins anew, which is a line
            run.steps([1, 2])
            if saved:
                run.manager.save(saved)
            run.manager.close()
            run.manager.close()
        self.assertEqual(
            ["nothing was saved: give the manager every=" in line for line in logs.output].count(True), is_said
        )


if __name__ == "__main__":
    unittest.main()
