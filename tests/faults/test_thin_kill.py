"""A thin that is killed before each of its file operations leaves a complete checkpoint, with the optimizer or without it."""

from __future__ import annotations

import shutil
import unittest
from pathlib import Path

import torch
from kit.checkpoint_format import all_bytes, check_folder
from kit.compare import check_same, refused
from kit.counted_kill import killed_before
from kit.folders import SharedFolder
from kit.forked import LIBRARY, run
from kit.managed import Run, steps_in
from torch import nn

import fsdp_optim
from fsdp_optim import SaveOptions, StateError

OPERATIONS = ("pwritev", "fsync", "rename", "unlink", "open")
SCRIPT = """
import fsdp_optim
fsdp_optim.thin({path!r})
"""
MOST = 40  # operations


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optim = torch.optim.Adam(model.parameters())
    optim.param_groups[0]["lr"] = torch.tensor(0.1)  # makes the description a file of its own
    model(torch.randn(4, 5)).square().mean().backward()
    optim.step()
    return model, optim


def killed(path: Path, number: int) -> bool:
    """Thin in a process that is killed before its operation `number`, from 0; return whether it came so far."""
    code = killed_before(number, OPERATIONS, SCRIPT.format(path=str(path)))
    done = run(code, preload=LIBRARY)
    if done.returncode not in (0, -9):
        raise AssertionError(done.stderr)
    return done.returncode == -9


class ThinKillTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        fsdp_optim.save(cls.root / "saved", *made(0), step=3, options=SaveOptions(durable=False, progress=False))
        shutil.copytree(cls.root / "saved", cls.root / "thin")
        fsdp_optim.thin(cls.root / "thin")
        cls.thin = sorted(all_bytes(cls.root / "thin"))

    def check_complete(self, path: Path) -> bool:
        """It loads, verified, as it was saved: the weights always. Returns whether it has its optimizer."""
        fsdp_optim.verify(path, progress=False)
        wanted_model, wanted_optim = made(0)
        model, optim = made(1)
        has_optim = fsdp_optim.inspect(path).has_optim
        if has_optim:
            fsdp_optim.load(path, model, optim)
            check_same("state", optim.state_dict()["state"], wanted_optim.state_dict()["state"])
        else:
            refused(lambda: fsdp_optim.load(path, *made(1)), StateError, "was thinned")
            fsdp_optim.load(path, model)
        check_same("weights", dict(model.state_dict()), dict(wanted_model.state_dict()))
        (info,) = fsdp_optim.checkpoints(path.parent)
        self.assertEqual((info.complete, info.thinned, info.step), (True, not has_optim, 3))
        return has_optim

    def test_a_kill_before_each_operation(self) -> None:
        outcomes = []
        for number in range(MOST):
            path = self.own_folder() / "step"
            shutil.copytree(self.root / "saved", path)
            if not killed(path, number):
                break
            with self.subTest(number=number):
                outcomes.append(self.check_complete(path))
                if number % 2:
                    killed(path, 3)  # the second one may die too
                    self.check_complete(path)
                fsdp_optim.thin(path)
                self.assertEqual(sorted(all_bytes(path)), self.thin)
                check_folder(path)
        else:
            self.fail("thin does not end")
        self.assertGreater(len(outcomes), 8)
        self.assertEqual(outcomes, sorted(outcomes, reverse=True), "once it is thin, it stays so")
        self.assertGreater(outcomes.count(True), 2)
        self.assertGreater(outcomes.count(False), 4)

    def test_a_save_over_what_is_left(self) -> None:
        """A save over it carries none of the leftovers over."""
        for number in range(MOST):
            path = self.own_folder() / "step"
            shutil.copytree(self.root / "saved", path)
            if not killed(path, number):
                break
            model, _ = made(5)
            fsdp_optim.save(path, model, overwrite=True, options=SaveOptions(durable=False, progress=False))
            names = {name for name in all_bytes(path) if "optim.s" in name or "new-" in name}
            self.assertEqual(names, set(), number)

    def test_a_manager_after_it(self) -> None:
        """The next run of the manager removes what a killed thin has left."""
        for number in (2, 4, 6):
            root = self.own_folder()
            options = {"every": 1, "keep_last": 4, "keep_optim_last": 2}
            run = Run(root, "plain", **{**options, "keep_optim_last": None})
            with run.manager:
                run.steps(range(1, 4))
            self.assertTrue(killed(root / "step-00000001", number))
            run = Run(root, "plain", **options)
            with run.manager:
                self.assertEqual(run.manager.resume(), 3)
                run.steps(range(4, 5))
            self.assertEqual(steps_in(root), [4, 3, 2, 1])
            for step in (1, 2):
                names = [
                    name for name in all_bytes(root / f"step-0000000{step}") if "optim.s" in name or "new-" in name
                ]
                self.assertEqual(names, [], (number, step))
            self.assertEqual([info.thinned for info in fsdp_optim.checkpoints(root)], [False, False, True, True])


if __name__ == "__main__":
    unittest.main()
