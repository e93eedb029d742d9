"""Paths and names that are not UTF-8: Linux takes any bytes, and Python shows them as surrogate escapes."""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.catalogs import CatalogTest, save
from kit.compare import check_same, refused
from kit.models import filled
from kit.retention import name_of_step, path_of_step

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_ranks

BAD = os.fsdecode(b"run-\xff\xfe")


def value_of(model: Any) -> float:
    return float(model.weight.detach()[0, 0])


def on_ranks(folder: str) -> None:
    root = Path(folder) / BAD
    group = dist.group.WORLD
    for step, name in ((1, "step-1"), (2, f"step-{BAD}-2")):
        fsdp_optim.save(
            root / name, filled(step), step=step, options=fsdp_optim.SaveOptions(process_group=group, durable=False)
        )
    fsdp_optim.async_save(
        root / f"{BAD}-3", filled(3), step=3, options=fsdp_optim.SaveOptions(process_group=group, durable=False)
    ).wait(60)
    model = filled(0)
    restored = fsdp_optim.resume(root, model, options=fsdp_optim.LoadOptions(process_group=group))
    check_same("resumed", (restored.step if restored is not None else None, value_of(model)), (3, 3.0))
    fsdp_optim.load(root / f"step-{BAD}-2", model, options=fsdp_optim.LoadOptions(process_group=group))
    check_same("loaded", value_of(model), 2.0)
    text = f"{root / 'none'}: there is no such folder"
    refused(
        lambda: fsdp_optim.load(root / "none", model, options=fsdp_optim.LoadOptions(process_group=group)),
        CheckpointError,
        text,
    )
    manager = fsdp_optim.CheckpointManager(
        root / "managed",
        model,
        torch.optim.SGD(model.parameters()),
        options=fsdp_optim.ManagerOptions(process_group=group, signals=()),
    )
    with manager:
        manager.resume()
        manager.save(5)
    check_same("managed", [checkpoint.step for checkpoint in fsdp_optim.checkpoints(root / "managed")], [5])


class BytesTest(CatalogTest):
    def test_on_ranks(self) -> None:
        (self.root / BAD).mkdir()
        run_on_ranks(on_ranks, 2, str(self.root))
        listed = [
            (Path(checkpoint.path).name, checkpoint.step) for checkpoint in fsdp_optim.checkpoints(self.root / BAD)
        ]
        self.assertEqual(listed, [(f"{BAD}-3", 3), (f"step-{BAD}-2", 2), ("step-1", 1)])

    def test_strays_of_such_names(self) -> None:
        """Beside checkpoints, and in one that is replaced."""
        (self.root / BAD).write_text("mine")
        (self.root / f"{BAD}.d" / "extra").mkdir(parents=True)
        self.keep(1, 1)
        first = path_of_step(self.root, 1)
        (first / BAD).write_text("mine")
        self.keep(1, 1, overwrite=True)
        self.assertEqual((first / BAD).read_text(), "mine")
        self.keep(2, 1)
        self.check_only(BAD, f"{BAD}.d", name_of_step(2))
        self.check_latest(name_of_step(2))

    def test_one_is_replaced_and_converted(self) -> None:
        folder = self.root / f"{BAD}-1"
        for value in (1, 2):
            save(folder, filled(value), weights_only=True, overwrite=True)
        fsdp_optim.convert(folder, self.root / f"{BAD}-2")
        model = filled(0)
        fsdp_optim.load(self.root / f"{BAD}-2", model)
        self.assertEqual(value_of(model), 2.0)


if __name__ == "__main__":
    unittest.main()
