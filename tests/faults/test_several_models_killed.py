"""Several models in one checkpoint: never one new and another old, whatever dies; and manifests that lie about models."""

from __future__ import annotations

import copy
import functools
import shutil
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from kit.checkpoint_damage import seal
from kit.checkpoint_format import read_manifest
from kit.compare import check_same, refused
from kit.counted_kill import killed_before
from kit.folders import SharedFolder
from kit.forked import LIBRARY, run
from kit.several import content, models, train

import fsdp_optim

WAYS = dict.fromkeys(("actor", "critic", "ema"), "plain")
QUIET = fsdp_optim.SaveOptions(progress=False)
OPERATIONS = ("pwritev", "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "open")
KILLS = 12
ENOUGH = 1 << 30
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from test_several_models_killed import save_second
save_second({path!r})
print("left", left[0])
"""


def state_of(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    live, optims = models(WAYS, filled=True)
    for name in optims:
        train(live[name], optims[name], step)
    live["ema"].seen.fill_(step)
    return live, optims


def save_second(path: str) -> None:
    fsdp_optim.save(path, *state_of(2), step=2, overwrite=True, options=QUIET)


def killed(path: Path, number: int) -> int | None:
    """Save over a checkpoint in a process that is killed before an operation; how many it made, if it was not killed."""
    code = SCRIPT.format(tests=str(Path(__file__).parent), path=str(path))
    done = run(killed_before(number, OPERATIONS, code), preload=LIBRARY)
    if done.returncode == -9:
        return None
    if done.returncode:
        raise AssertionError(done.stderr)
    return number - int(done.stdout.split()[-1])


class SeveralModelsKilledTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        fsdp_optim.save(cls.root / "first", *state_of(1), step=1, options=QUIET)

    def check(self, path: Path) -> int:
        """All models are of one save; return its step."""
        into, their = models(WAYS, filled=False)
        result = fsdp_optim.load(path, into, their, options=fsdp_optim.LoadOptions(compare=True))
        live, optims = state_of(int(result.step or 0))
        for name in WAYS:
            check_same(name, content(into[name], their.get(name)), content(live[name], optims.get(name)))
        return int(result.step or 0)

    def test_a_kill_at_any_time(self) -> None:
        path = self.own_folder() / "c"
        shutil.copytree(self.root / "first", path)
        num = killed(path, ENOUGH)
        assert num is not None
        self.assertEqual(self.check(path), 2)
        steps = []
        for number in sorted({round(at) for at in numpy.linspace(0, num - 1, KILLS)}):
            path = self.own_folder() / "c"
            shutil.copytree(self.root / "first", path)
            with self.subTest(number=number):
                self.assertIsNone(killed(path, number))
                steps.append(self.check(path))
                save_second(str(path))
                self.assertEqual(self.check(path), 2)
                self.assertEqual([entry.name for entry in path.parent.iterdir()], ["c"])
        self.assertEqual(steps, sorted(steps))
        self.assertEqual(steps[0], 1)

    def test_manifests_that_lie(self) -> None:
        cases: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
            "a way out": (lambda manifest: models_of(manifest, ["actor", "..", "ema"]), "which no save gives"),
            "a folder of others": (
                lambda manifest: models_of(manifest, ["actor", "extra", "ema"]),
                "which no save gives",
            ),
            "twice": (lambda manifest: models_of(manifest, ["actor", "Actor", "critic", "ema"]), "which no save gives"),
            "no str": (lambda manifest: models_of(manifest, ["actor", 3, "ema"]), "models"),
            "one is missing": (lambda manifest: models_of(manifest, ["actor", "ema"]), "critic"),
            "none": (lambda manifest: models_of(manifest, []), "in the folder of no model"),
            "a file elsewhere": (
                lambda manifest: moved(manifest, "critic/model.safetensors", "other/model.safetensors"),
                "other/",
            ),
            "a file outside": (
                lambda manifest: moved(manifest, "critic/model.safetensors", "../model.safetensors"),
                "names the file",
            ),
            "a file of no half": (
                lambda manifest: moved(manifest, "critic/model.safetensors", "critic/a.safetensors"),
                "critic/a",
            ),
            "of one model": (
                lambda manifest: moved(manifest, "critic/model.safetensors", "model.safetensors"),
                "model.safetensors",
            ),
            "a parameter of none": (
                lambda manifest: manifest["model"]["params"].update({"x": {"shape": [1]}}),
                "none of the models",
            ),
        }
        for what, (lie, words) in cases.items():
            path = self.own_folder() / "c"
            shutil.copytree(self.root / "first", path)
            manifest = copy.deepcopy(read_manifest(path))
            lie(manifest)
            seal(path, manifest)
            into, their = models(WAYS, filled=False)
            before = content(into["actor"], None)
            with self.subTest(what):
                refused(functools.partial(fsdp_optim.load, path, into, their), fsdp_optim.CheckpointError, words)
                check_same("untouched", content(into["actor"], None), before)

    def test_an_older_version_refuses_it_by_name(self) -> None:
        from unittest import mock

        from fsdp_optim.formats.own import manifest, probe

        with mock.patch.object(manifest, "VERSION", 4), mock.patch.object(probe, "VERSION", 4):
            refused(
                lambda: fsdp_optim.load(self.root / "first", *models(WAYS, filled=False)),
                fsdp_optim.CheckpointError,
                "has the schema version 5",
                "install a newer one",
            )


def models_of(manifest: dict[str, Any], names: list[Any]) -> None:
    manifest["model"]["models"] = names


def moved(manifest: dict[str, Any], was: str, name: str) -> None:
    manifest["files"][name] = manifest["files"].pop(was)


if __name__ == "__main__":
    unittest.main()
