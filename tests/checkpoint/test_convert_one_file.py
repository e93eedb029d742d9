"""`--format torch_file out.pt` makes the file out.pt, by the command line and by the call, on one rank and on several."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from unittest import mock

import torch
from kit.commands import called
from kit.compare import check_same
from kit.folders import SharedFolder, at
from kit.options import as_options
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.storage.posix import one_file
from fsdp_optim.testing import run_on_threads


def converted_by_all(source: str, target: str) -> str:
    return str(
        fsdp_optim.convert(
            source, target, format="torch_file", options=fsdp_optim.ConvertOptions(durable=False, progress=False)
        ).path
    )


class OneFileTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        cls.model = nn.Linear(3, 2)
        cls.optim = torch.optim.AdamW(cls.model.parameters())
        cls.model(torch.ones(1, 3)).sum().backward()
        cls.optim.step()
        fsdp_optim.save(
            cls.root / "source", cls.model, cls.optim, state={"epoch": 3}, options=fsdp_optim.SaveOptions(durable=False)
        )

    def setUp(self) -> None:
        self.folder = self.own_folder()

    def check(self, path: Path, others: tuple[str, ...] = ()) -> None:
        """It is a file that torch reads, with everything, and there is nothing beside it."""
        self.assertTrue(path.is_file())
        content = torch.load(path, weights_only=True)
        check_same("weights", content["model"], dict(self.model.state_dict()))
        check_same("epoch", content["epoch"], 3)
        self.assertEqual(len(content["optimizer"]["state"]), 2)
        self.assertEqual(sorted(os.listdir(path.parent)), sorted([path.name, *others]))
        back = path.parent / "back"
        fsdp_optim.convert(path, back, options=fsdp_optim.ConvertOptions(durable=False))
        check_same("back", dict(fsdp_optim.load(back).state), {"epoch": 3})

    @parameterized.expand([(end,) for end in (".pt", ".pth", ".bin", ".ckpt")])
    def test_the_command_line(self, end: str) -> None:
        with at(self.folder):
            code, *_ = called("convert", self.root / "source", f"out{end}", "--format", "torch_file", "--quiet")
            self.assertEqual(code, 0)
        self.check(self.folder / f"out{end}")

    def test_the_call(self) -> None:
        target = self.folder / "out.pt"
        done = fsdp_optim.convert(self.root / "source", target, format="torch_file")
        check_same("path", done.path, target)
        self.check(target)

    def test_by_several_ranks(self) -> None:
        target = self.folder / "out.pt"
        paths = run_on_threads(converted_by_all, 2, str(self.root / "source"), str(target))
        check_same("paths", paths, [str(target)] * 2)
        self.check(target)

    def test_a_file_that_is_there(self) -> None:
        """It is replaced with overwrite=True only, and stays as it was if the conversion fails."""
        target = self.folder / "out.pt"
        target.write_bytes(b"theirs")
        with self.assertRaisesRegex(CheckpointError, r"out\.pt: already exists: .*overwrite=True"):
            fsdp_optim.convert(
                self.root / "source", target, format="torch_file", options=fsdp_optim.ConvertOptions(durable=False)
            )
        with self.assertRaisesRegex(CheckpointError, "nowhere"):
            fsdp_optim.convert(
                self.root / "nowhere",
                target,
                format="torch_file",
                options=fsdp_optim.ConvertOptions(durable=False),
                overwrite=True,
            )
        self.assertEqual(target.read_bytes(), b"theirs")
        self.assertEqual(os.listdir(self.folder), ["out.pt"])
        fsdp_optim.convert(
            self.root / "source",
            target,
            format="torch_file",
            options=fsdp_optim.ConvertOptions(durable=False),
            overwrite=True,
        )
        self.check(target)

    @parameterized.expand(["replace", "rmtree"])
    def test_killed_at_the_end(self, step: str) -> None:
        """Before or after the file takes its name: the same call makes the file, and leaves nothing beside it."""
        target = self.folder / "out.pt"
        where = mock.patch.object(
            one_file.os if step == "replace" else one_file.shutil, step, side_effect=KeyboardInterrupt
        )
        with where, contextlib.suppress(KeyboardInterrupt):
            fsdp_optim.convert(
                self.root / "source", target, format="torch_file", options=fsdp_optim.ConvertOptions(durable=False)
            )
        self.assertEqual(target.exists(), step == "rmtree")
        overwrite = {"overwrite": True} if step == "rmtree" else {}
        fsdp_optim.convert(
            self.root / "source",
            target,
            format="torch_file",
            **as_options(fsdp_optim.ConvertOptions, **overwrite, durable=False),
        )
        self.check(target)

    def test_what_stays_a_folder(self) -> None:
        """A path that does not end like a file, a folder that is there, and formats of several files."""
        (self.folder / "there.pt").mkdir()
        for name, format in (("out", "torch_file"), ("there.pt", "torch_file"), ("out.pt", "torch")):
            fsdp_optim.convert(
                self.root / "source",
                self.folder / name,
                format=format,
                options=fsdp_optim.ConvertOptions(durable=False),
            )
            self.assertTrue((self.folder / name / "torch_files.json").is_file())
