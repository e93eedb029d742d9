"""resume, checkpoints and wait: the newest checkpoint on all ranks, and no damaged one is passed by in silence."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kit.catalogs import CatalogTest, clock, save
from kit.checkpoint_damage import flip_a_weight, garble, shorten
from kit.checkpoints import before_writes
from kit.compare import check_same, refused
from kit.models import filled
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Trained
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, RankTimeoutError
from fsdp_optim.testing import run_on_ranks

LOG = "fsdp_optim"


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [("short", shorten), ("bit", flip_a_weight), ("garbled", garble)]


class ResumeTest(CatalogTest):
    def setUp(self) -> None:
        super().setUp()
        for step in (5, 10):
            save(self.root / f"step-{step}", filled(step), weights_only=True, step=step)

    def resumed(self, **options: Any) -> tuple[Any, float]:
        model = filled(-1)
        restored = fsdp_optim.resume(self.root, model, **as_options(fsdp_optim.LoadOptions, **options))
        return restored, float(model.weight.detach()[0, 0])

    def test_the_newest_is_loaded(self) -> None:
        restored, value = self.resumed()
        self.assertEqual((restored.step, value), (10, 10.0))

    def test_nothing_there_is_none(self) -> None:
        shutil.rmtree(self.root)
        self.assertEqual(self.resumed(), (None, -1.0))
        self.root.mkdir()
        (self.root / "notes").mkdir()
        self.assertEqual(self.resumed(), (None, -1.0))

    def test_the_order_is_not_the_clocks_nor_the_steps(self) -> None:
        with clock(-9):
            save(self.root / "again-7", filled(7), weights_only=True, step=7)
        self.assertEqual(self.resumed()[1], 7.0)
        self.assertEqual([checkpoint.step for checkpoint in fsdp_optim.checkpoints(self.root)], [7, 10, 5])

    @parameterized.expand(DAMAGES)
    def test_a_damaged_newest_one_is_named(self, _: str, damage: Callable[[Path], None]) -> None:
        damage(self.root / "step-10")
        model = filled(-1)
        words = ("step-10", "the newest checkpoint, cannot be loaded", 'on_damage="previous"', "step-5")
        refused(lambda: fsdp_optim.resume(self.root, model), CheckpointError, *words)
        self.assertEqual(float(model.weight.detach()[0, 0]), -1.0)
        with self.assertLogs(LOG, "WARNING") as logs:
            restored, value = self.resumed(on_damage="previous")
        self.assertEqual((restored.step, value), (5, 5.0))
        self.assertIn("step-10 cannot be loaded, so the one before it is loaded", "\n".join(logs.output))

    @parameterized.expand(DAMAGES)
    def test_without_another_one_the_damage_is_an_error_either_way(
        self, _: str, damage: Callable[[Path], None]
    ) -> None:
        shutil.rmtree(self.root / "step-5")
        damage(self.root / "step-10")
        for on_damage in ("error", "previous"):
            refused(
                lambda on_damage=on_damage: self.resumed(on_damage=on_damage),
                CheckpointError,
                "step-10",
                "no other checkpoint that is complete",
            )

    @parameterized.expand(DAMAGES)
    def test_a_damaged_older_one_is_nobodys_business(self, _: str, damage: Callable[[Path], None]) -> None:
        damage(self.root / "step-5")
        self.assertEqual(self.resumed()[1], 10.0)

    def test_another_model_is_no_damage(self) -> None:
        refused(
            lambda: fsdp_optim.resume(self.root, nn.Linear(4, 2), on_damage="previous"), fsdp_optim.StateError, "weight"
        )

    def test_a_wrong_on_damage(self) -> None:
        refused(lambda: self.resumed(on_damage="ignore"), CheckpointError, "on_damage must be", "'ignore'")


class CheckpointsTest(CatalogTest):
    def test_what_is_listed(self) -> None:
        save(self.root / "step-5", step=5)
        save(self.root / "other")
        (self.root / "notes").mkdir()
        (self.root / "step-7.saving-0123456789abcdef").mkdir()
        shorten(self.root / "step-5")
        other, first = fsdp_optim.checkpoints(self.root)
        nbytes = sum(
            file.stat().st_size for file in (self.root / "other").rglob("*.*") if file.name != "fsdp_optim.json"
        )
        nbytes -= sum(file.stat().st_size for file in (self.root / "other").glob("*.sums"))
        manifest = json.loads((self.root / "other" / "fsdp_optim.json").read_text())
        saved_at = manifest["checkpoint"]["created_ns"] / 1e9
        wanted = fsdp_optim.CheckpointInfo(self.root / "other", None, 1, nbytes, True, "", None, saved_at)
        self.assertEqual(other, wanted, "a complete one")
        self.assertEqual((first.path, first.step, first.complete), (self.root / "step-5", 5, False))
        self.assertIn("model.safetensors does not have the", first.reason)

    def test_a_garbled_one_stands_where_its_name_says(self) -> None:
        for name in ("step-5", "step-10", "step-15", "step-20"):
            save(self.root / name, step=int(name[5:]))
        garble(self.root / "step-15")
        save(self.root / "best", step=5)
        names = [Path(checkpoint.path).name for checkpoint in fsdp_optim.checkpoints(self.root)]
        self.assertEqual(
            names, ["step-15", "best", "step-20", "step-10", "step-5"], "15 is above 5, the step of `best`"
        )
        shutil.rmtree(self.root / "best")
        names = [Path(checkpoint.path).name for checkpoint in fsdp_optim.checkpoints(self.root)]
        self.assertEqual(names, ["step-20", "step-15", "step-10", "step-5"])
        (self.root / "step-15").rename(self.root / "final")
        names = [Path(checkpoint.path).name for checkpoint in fsdp_optim.checkpoints(self.root)]
        self.assertEqual(names, ["final", "step-20", "step-10", "step-5"])
        self.assertEqual(fsdp_optim.checkpoints(self.root / "nowhere"), [])

    def test_in_a_bucket(self) -> None:
        root = f"memory://{self.id()}/run"
        for step in (5, 10):
            save(f"{root}/step-{step}", step=step)  # type: ignore[arg-type]
        listed = fsdp_optim.checkpoints(root)
        self.assertEqual(
            [(checkpoint.path, checkpoint.step, checkpoint.complete) for checkpoint in listed],
            [(f"{root}/step-10", 10, True), (f"{root}/step-5", 5, True)],
        )
        import fsspec

        memory = fsspec.filesystem("memory")
        (file,) = (name for name in memory.find(f"/{self.id()}/run/step-10") if name.endswith("/model.safetensors"))
        memory.pipe_file(file, memory.cat_file(file)[:-1])
        self.assertEqual([checkpoint.complete for checkpoint in fsdp_optim.checkpoints(root)], [False, True])
        model = nn.Linear(3, 2)
        refused(lambda: fsdp_optim.resume(root, model), CheckpointError, "step-10", "step-5")
        restored = fsdp_optim.resume(root, model, on_damage="previous")
        self.assertEqual(restored.step if restored is not None else None, 5)


class WaitTest(CatalogTest):
    def test_it_waits_and_raises_once(self) -> None:
        fsdp_optim.wait_for_saves()
        gate = threading.Event()

        def hold(file: Any) -> None:
            if threading.current_thread() is not threading.main_thread() and not gate.wait(60):
                raise RuntimeError("nobody opened the gate")

        model = nn.Linear(3, 2)
        with before_writes(hold):
            fsdp_optim.async_save(self.root / "one", model)
            refused(lambda: fsdp_optim.wait_for_saves(0.05), RankTimeoutError, "one", "did not end within 0.05 s")
            self.assertIsNone(fsdp_optim.latest(self.root))
            gate.set()
            fsdp_optim.wait_for_saves()
        self.assertIsNotNone(fsdp_optim.latest(self.root))

    def test_a_failure(self) -> None:
        def fail(file: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise OSError(28, "No space left on device")

        with before_writes(fail):
            fsdp_optim.async_save(self.root / "one", nn.Linear(3, 2))
            refused(fsdp_optim.wait_for_saves, CheckpointError, "No space left on device")
        fsdp_optim.wait_for_saves()


# ------------------------------------------------------------------------------------------ ranks


def resume_on_ranks(root: Path) -> None:
    """The lowest rank alone looks: what the others would see, or their working directory, makes no difference."""
    rank = dist.get_rank()
    for step in (5, 10):
        trained = Trained("FSDP2", adam, step // 5)
        fsdp_optim.save(
            root / f"step-{step}",
            trained.model,
            trained.optim,
            step=step,
            options=fsdp_optim.SaveOptions(durable=False),
        )
    wanted = trained.gather(None)
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(root.parent if rank == 0 else folder)
        try:
            target = Trained("FSDP2", adam, 0)
            restored = fsdp_optim.resume(root.name, target.model, target.optim)
        finally:
            os.chdir(before)
    check_same("step", restored.step if restored is not None else None, 10)
    check_same("state", target.gather(None)["state"], wanted["state"])
    dist.barrier()
    if rank == 1:
        flip_a_weight(root / "step-10")
    dist.barrier()
    refused(
        lambda: fsdp_optim.resume(root, target.model, target.optim), CheckpointError, "step-10, the newest checkpoint"
    )
    restored = fsdp_optim.resume(root, target.model, target.optim, on_damage="previous")
    check_same("step", restored.step if restored is not None else None, 5)
    on_damage: Any = "error" if rank else "previous"
    refused(
        lambda: fsdp_optim.resume(root, target.model, target.optim, on_damage=on_damage), fsdp_optim.RankError, "resume"
    )


class RanksTest(CatalogTest):
    def test_all_ranks_load_the_same_one(self) -> None:
        run_on_ranks(resume_on_ranks, 2, self.root / "run")


if __name__ == "__main__":
    unittest.main()
