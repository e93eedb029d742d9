"""Paths that no call writes to: names by which saves mark what is no checkpoint, and the folder that the process works in."""

from __future__ import annotations

import os
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit.catalogs import CatalogTest, save
from kit.compare import refused
from kit.managed import Run
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.errors import CheckpointError

TOKEN = "0123456789abcdef"
MARKS = [(mark,) for mark in ("new", "saving", "gone", "old")]


def async_saved(path: Any) -> None:
    fsdp_optim.async_save(path, nn.Linear(3, 2)).wait(60)


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class NamesTest(CatalogTest):
    @parameterized.expand(MARKS)
    def test_every_call_that_writes(self, mark: str) -> None:
        save(self.root / "source")
        name = f"x.{mark}-{TOKEN}"
        path = self.root / name
        calls: list[Any] = [
            lambda: save(path),
            lambda: save(path / "step-1"),
            lambda: save(path, overwrite=True),
            lambda: save(path, format="dcp"),
            lambda: async_saved(path),
            lambda: fsdp_optim.convert(self.root / "source", path),
            lambda: fsdp_optim.convert(self.root / "source", path, format="torch"),
            lambda: fsdp_optim.async_save(
                self.root / "b", nn.Linear(3, 2), options=fsdp_optim.SaveOptions(upload_to=f"file://{path}")
            ).wait(60),
            lambda: save(f"file://{path}"),  # type: ignore[arg-type]
            lambda: save(f"memory://{self.id()}/{name}"),  # type: ignore[arg-type]
            lambda: save(f"memory://{self.id()}/{name}/step-1"),  # type: ignore[arg-type]
            lambda: save(f"memory://{self.id()}/run/.{mark}-{TOKEN}"),  # type: ignore[arg-type]
        ]
        for call in calls:
            refused(call, CheckpointError, f".{mark}-{TOKEN} is a name that saves give")
            self.assertFalse(path.exists())
        self.check_only("source")

    def test_a_manager(self) -> None:
        run = Run(self.root / f"run.gone-{TOKEN}", "plain")
        with run.manager:
            run.train(1)
            refused(lambda: run.manager.save(1), CheckpointError, "is a name that saves give")
        self.check_only()

    def test_names_that_are_nearly_so_stay(self) -> None:
        names = [f"x.saving-{TOKEN[1:]}", f"x-saving-{TOKEN}", f"x.saved-{TOKEN}", f"x.gone-{TOKEN}.1", f"gone-{TOKEN}"]
        for name in names:
            save(self.root / name)
        save(self.path)
        self.check_only(*names, self.path.name)
        self.assertEqual(len(fsdp_optim.checkpoints(self.root)), len(names) + 1)

    @parameterized.expand([(f".fsdp_optim-{TOKEN}",), (".nfs00000000deadbeef",)])
    def test_names_that_no_listing_shows(self, name: str) -> None:
        refused(lambda: save(self.root / name), CheckpointError, "a name of files that listings leave out")
        self.check_only()


class WorkingFolderTest(CatalogTest):
    @parameterized.expand([(".",), ("",), ("../here",)])
    def test_an_empty_one(self, path: str) -> None:
        folder = self.root / "here"
        folder.mkdir()
        inode = folder.stat().st_ino
        with working_in(folder):
            refused(lambda: save(path), CheckpointError, "this process works in this folder", "step-1000")  # type: ignore[arg-type]
            save("step-1")  # type: ignore[arg-type]
        self.assertEqual((folder.stat().st_ino, os.listdir(folder)), (inode, ["step-1"]))

    def test_one_that_is_a_checkpoint(self) -> None:
        save(self.path)
        for folder in (self.path, self.path / "notes"):
            folder.mkdir(exist_ok=True)
            with working_in(folder):
                refused(lambda: save(self.path, overwrite=True), CheckpointError, "this process works in this folder")


if __name__ == "__main__":
    unittest.main()
