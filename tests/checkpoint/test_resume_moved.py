"""A resume whose listed checkpoint goes before it is opened, because another process saves a newer one and removes it."""

from __future__ import annotations

import shutil
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.catalogs import CatalogTest
from kit.compare import check_same, refused
from kit.managed import Run, steps_in
from kit.models import filled
from kit.retention import name_of_step, save_managed
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.checkpoint.load.restore import restore
from fsdp_optim.checkpoint.run import managed_run, resuming
from fsdp_optim.options import OnDamage
from fsdp_optim.testing import run_on_ranks

Change = Callable[[], object]


@contextmanager
def before_loads(*changes: Change) -> Iterator[None]:
    """A context in which each change is made before one attempt to load, between the listing and the opening."""
    left = list(changes)

    def load(*args: Any, **options: Any) -> Any:
        if left:
            left.pop(0)()
        return restore(*args, **options)

    with mock.patch.object(resuming, "restore", load), mock.patch.object(managed_run, "restore", load):
        yield


class MovedTest(CatalogTest):
    def setUp(self) -> None:
        super().setUp()
        self.writer = Run(self.root, "plain", every=1, keep_last=1, keep_every=4)
        self.addCleanup(self.writer.manager.close)
        self.save(4, 5)

    def save(self, *steps: int) -> None:
        for step in steps:
            self.writer.manager.save(step)
            self.writer.manager.wait()

    def resumed(self, by: str, on_damage: OnDamage, *changes: Change) -> int | None:
        run = Run(self.root, "plain")
        with run.manager, before_loads(*changes):
            if by == "manager":
                return run.manager.resume(on_damage=on_damage)
            restored = fsdp_optim.resume(self.root, run.model, run.optim, on_damage=on_damage)
            return restored.step if restored is not None else None

    @parameterized.expand(
        [(f"{by}_{on_damage}", by, on_damage) for by in ("resume", "manager") for on_damage in ("error", "previous")]
    )
    def test_the_newer_one_is_loaded(self, _: str, by: str, on_damage: OnDamage) -> None:
        self.assertEqual(self.resumed(by, on_damage, lambda: self.save(6)), 6)
        self.assertEqual(steps_in(self.root), [6, 4])

    @parameterized.expand([("resume",), ("manager",)])
    def test_again_and_again(self, by: str) -> None:
        """Four lists may be out of date; after the fifth the error is raised, or the one before it is loaded."""
        changes = [lambda step=step: self.save(step) for step in (9, 10, 11, 13)]
        self.assertEqual(self.resumed(by, "error", *changes), 13)
        changes = [lambda step=step: self.save(step) for step in (14, 15, 17, 18, 19)]
        words = (f"{name_of_step(18)}, the newest checkpoint, cannot be loaded",)
        refused(lambda: self.resumed(by, "error", *changes), CheckpointError, *words)

    @parameterized.expand([("resume",), ("manager",)])
    def test_nothing_is_left(self, by: str) -> None:
        """That is no run that begins: the error of the checkpoint that was listed stays."""
        empty = lambda: [shutil.rmtree(path) for path in self.root.iterdir()]  # noqa: E731
        for on_damage in ("error", "previous"):
            self.save(*((6,) if on_damage == "previous" else ()))
            words = ("the newest checkpoint, cannot be loaded",)
            refused(lambda on_damage=on_damage: self.resumed(by, on_damage, empty), CheckpointError, *words)

    def test_a_damaged_one_before_it(self) -> None:
        """The list is tried from its beginning: what is damaged is passed over again."""
        damaged = self.root / name_of_step(5)
        shutil.copytree(damaged, self.root / name_of_step(8))
        shutil.rmtree(self.root / name_of_step(8) / "extra")
        change = lambda: shutil.rmtree(damaged)  # noqa: E731
        self.assertEqual(self.resumed("resume", "previous", change), 4)

    def test_on_several_ranks(self) -> None:
        root = self.root / "run"
        save_managed(root, 5, filled(5), keep_last=1)
        run_on_ranks(resume_while_saved, 2, root)


def resume_while_saved(root: Path) -> None:
    """All ranks take the list that the lowest makes again."""

    def change() -> None:
        if dist.get_rank() == 0:
            shutil.copytree(root / name_of_step(5), root / name_of_step(6))
            shutil.rmtree(root / name_of_step(5))
        dist.barrier()

    model = nn.parallel.DistributedDataParallel(filled(-1))
    with before_loads(change):
        restored = fsdp_optim.resume(root, model)
    check_same("step", restored.step if restored is not None else None, 5)
    check_same("value", float(model.module.weight.detach()[0, 0]), 5.0)


if __name__ == "__main__":
    unittest.main()
