"""Files that somebody has put into the folder of a checkpoint are not deleted silently."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.catalogs import LOG, CatalogTest, load, save
from kit.checkpoint_format import MANIFEST, all_bytes, check_folder
from kit.compare import check_same, error_text
from kit.described import training_here
from kit.options import as_options
from kit.retention import path_of_step
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_threads


def put(folder: Path) -> dict[str, bytes]:
    """Files of every kind, some deep; what must be there afterwards."""
    files = {
        "config.json": b"{}",
        "extra/mine.txt": b"mine",
        "tokenizer/vocab/words.txt": b"a b",
        "model.onnx": bytes(1000),
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("config.json")
    (folder / "outside").symlink_to("/nowhere/at/all")
    return files


def save_on_ranks(path: Path, number: int, in_background: bool) -> None:
    with training_here() as trained:
        options: dict[str, Any] = {"extra": {"number": number}, "overwrite": True, "durable": False}
        if in_background:
            fsdp_optim.async_save(
                path, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **options)
            ).wait(60)
        else:
            fsdp_optim.save(
                path,
                trained.model,
                trained.optim,
                **as_options(fsdp_optim.SaveOptions, **options, per_rank_extra={"rank": 1}),
            )


class CarriedOverTest(CatalogTest):
    def check_all_there(self, files: dict[str, bytes]) -> None:
        there = all_bytes(self.path)
        check_same("files", {name: there.get(name) for name in files}, files)
        check_same("empty", list((self.path / "empty").iterdir()), [])
        check_same("link", os.readlink(self.path / "link"), "config.json")
        check_same("outside", os.readlink(self.path / "outside"), "/nowhere/at/all")

    @parameterized.expand(((False,), (True,)))
    def test_overwrite(self, in_background: bool) -> None:
        """Again and again, and nothing of the old checkpoint itself stays."""
        run_on_threads(save_on_ranks, 2, self.path, 0, False)
        own = set(all_bytes(self.path))
        files = put(self.path)
        for number in (1, 2):
            run_on_threads(save_on_ranks, 2, self.path, number, in_background)
            self.check_all_there(files)
            check_same("number", fsdp_optim.load(self.path).state["number"], number)
        new = set(all_bytes(self.path)) - set(files) - {"link"}
        lacking = {"extra/rank-00000.safetensors", "extra/rank-00001.safetensors"} if in_background else set()
        check_same("own files", sorted(new), sorted(own - lacking))
        self.check_only("step-1")

    def test_a_line_in_the_log(self) -> None:
        save(self.path)
        put(self.path)
        with self.assertLogs(LOG, logging.INFO) as logs:
            save(self.path, overwrite=True)
        [line] = [line for line in logs.output if "carried over" in line]
        for name in ("config.json", "extra/mine.txt", "tokenizer", str(self.path)):
            self.assertIn(name, line)

    def test_not_the_parts_of_a_split_checkpoint(self) -> None:
        save(self.path, nn.Linear(30, 20), max_file_size=1000)
        self.assertTrue((self.path / "model.safetensors.index.json").exists())
        save(self.path, nn.Linear(30, 20), overwrite=True)
        check_folder(self.path)
        check_same("files", [name for name in all_bytes(self.path) if "-of-" in name or "index" in name], [])

    @parameterized.expand(((b"{}",), (b"",), (b'{"checksum":"0123456789abcdef","checkpoint":{"brief":{}}}',)))
    def test_where_the_manifest_cannot_be_read(self, manifest: bytes) -> None:
        """Then names tell."""
        save(self.path, extra={"number": 1})
        files = put(self.path)
        (self.path / MANIFEST).write_bytes(manifest)
        save(self.path, overwrite=True)
        self.check_all_there(files)
        check_same("extra", (self.path / "extra" / "common.safetensors").exists(), False)
        check_same("loaded", load(self.path).state, {})

    def test_a_name_that_the_new_one_needs(self) -> None:
        """It is refused before any damage."""
        save(self.path, weights_only=True, extra={"number": 1})
        (self.path / "optim.safetensors").write_bytes(b"mine")
        kind, text = error_text(lambda: save(self.path, overwrite=True))
        check_same("kind", kind, "CheckpointError")
        self.assertIn(str(self.path / "optim.safetensors"), text)
        check_same("number", fsdp_optim.load(self.path).state["number"], 1)
        check_same("mine", (self.path / "optim.safetensors").read_bytes(), b"mine")
        self.check_only("step-1")

    def test_where_files_cannot_have_two_names(self) -> None:
        save(self.path)
        files = put(self.path)
        with mock.patch.object(os, "link", side_effect=OSError(errno.EPERM, os.strerror(errno.EPERM))):
            save(self.path, overwrite=True)
            self.check_all_there(files)
            os.mkfifo(self.path / "pipe")
            kind, text = error_text(lambda: save(self.path, overwrite=True))
        check_same("kind", kind, "CheckpointError")
        self.assertIn(str(self.path / "pipe"), text)
        self.check_all_there(files)
        self.check_only("step-1")

    def test_what_cannot_be_carried_over_stays(self) -> None:
        save(self.path, extra={"number": 1})
        files = put(self.path)
        with mock.patch.object(os, "link", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
            kind, text = error_text(lambda: save(self.path, overwrite=True))
        check_same("kind", kind, "CheckpointError")
        self.assertIn(os.strerror(errno.ENOSPC), text)
        self.check_all_there(files)
        check_same("number", fsdp_optim.load(self.path).state["number"], 1)
        self.check_only("step-1")

    def test_what_a_manager_removes_is_named(self) -> None:
        self.keep(1, 1)
        path = path_of_step(self.root, 1)
        put(path)
        with self.assertLogs(LOG, logging.INFO) as logs:
            self.keep(2, 1)
        [line] = [line for line in logs.output if "removed" in line]
        for name in ("config.json", "extra/mine.txt", "tokenizer", str(path)):
            self.assertIn(name, line)
        self.check_steps(2)

    def test_nothing_is_said_where_nothing_was_put(self) -> None:
        self.keep(1, 1)
        with self.assertLogs(LOG, logging.INFO) as logs:
            save(path_of_step(self.root, 1), overwrite=True)
            self.keep(2, 1, extra={"tensor": torch.ones(2)})
        for line in logs.output:
            self.assertNotIn("carried over", line)
            self.assertNotIn("somebody", line)
