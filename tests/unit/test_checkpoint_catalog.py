"""The checkpoints of a folder: which is the newest, whatever the clock says, and which of them a manager counts and removes."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.catalogs import LOG, CatalogTest, clock, save, sequence_of, unreadable
from kit.checkpoint_damage import seal, seal_as_it_is, sealed_brief
from kit.checkpoint_format import GOLDEN, MANIFEST, check_folder, read_manifest
from kit.compare import Differs, check_same, error_text
from kit.retention import path_of_step, save_managed
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.checkpoint.catalog.retention import name_of_step
from fsdp_optim.formats.base import summary as briefs
from fsdp_optim.formats.base.json_text import check_density
from fsdp_optim.formats.own import manifest as own_manifest
from fsdp_optim.formats.own.probe import read_summary
from fsdp_optim.storage.posix import OpenFolder


def as_before_sequences(folder: Path) -> None:
    """The manifest of a version that recorded no sequence number."""
    seal(folder, {key: value for key, value in read_manifest(folder).items() if key != "brief"})


class OrderTest(CatalogTest):
    @parameterized.expand(("save", "async_save"))
    def test_a_clock_that_goes_back(self, kind: str) -> None:
        """After a restart on a machine whose clock is behind, what is saved then is the newest."""
        model = nn.Linear(3, 2)
        optim = torch.optim.SGD(model.parameters())
        for number, step in enumerate((10, 20, 30, 40)):
            with clock(-1.0 if number >= 2 else 0.0):
                if kind == "save":
                    fsdp_optim.save(
                        self.root / f"step-{step}", model, optim, options=fsdp_optim.SaveOptions(durable=False)
                    )
                else:
                    fsdp_optim.async_save(
                        self.root / f"step-{step}", model, optim, options=fsdp_optim.SaveOptions(durable=False)
                    ).wait(60)
            self.check_latest(f"step-{step}")

    def test_what_is_kept_when_the_clock_goes_back(self) -> None:
        for number, step in enumerate((10, 20, 30, 40)):
            with clock(-1.0 if number >= 2 else 0.0):
                self.keep(step, 2)
            self.check_latest(name_of_step(step))
        self.check_steps(30, 40)

    def test_a_run_that_continues_from_an_earlier_step(self) -> None:
        for step in (10, 20, 30):
            save(self.root / f"step-{step}", step=step)
        with clock(-2.0):
            save(self.root / "step-11", step=11)
        self.check_latest("step-11")
        save(self.root / "step-20", step=20, overwrite=True)
        self.check_latest("step-20")

    def test_the_sequence_is_higher_than_any_in_the_folder(self) -> None:
        """Also than that of what is incomplete, cannot be read whole, has another content, or is aside."""
        save(self.root / "a")
        check_same("the first", sequence_of(self.root / "a"), 1)
        save(self.root / "other", nn.Linear(1, 1), weights_only=True)
        check_same("another model's", sequence_of(self.root / "other"), 2)
        (self.root / "other" / "model.safetensors").unlink()
        save(self.root / "b")
        check_same("after an incomplete one", sequence_of(self.root / "b"), 3)
        manifest = self.root / "b" / MANIFEST
        manifest.write_bytes(manifest.read_bytes()[:-9])
        save(self.root / "c")
        check_same("after one whose manifest is cut", sequence_of(self.root / "c"), 4)
        (self.root / "c").rename(self.root / "c.old-0123456789abcdef")
        save(self.root / "d")
        check_same("after one that is aside", sequence_of(self.root / "d"), 5)
        save(self.root / "a", overwrite=True)
        check_same("one that is replaced", sequence_of(self.root / "a"), 6)
        self.check_latest("a")

    def test_a_brief_that_is_damaged(self) -> None:
        """Then the rest of the manifest says nothing that counts; and the other way round."""
        save(self.root / "step-1")
        save(self.root / "step-2")
        manifest = self.root / "step-2" / MANIFEST
        manifest.write_bytes(manifest.read_bytes().replace(b'"sequence":2', b'"sequence":1'))
        with self.assertLogs(LOG, logging.WARNING) as logs:
            self.check_latest("step-1")
        self.assertIn("step-2", logs.output[0])

    def test_no_other_brief_is_read_than_that_which_was_saved(self) -> None:
        """Whatever one of its characters becomes: listings read no more of a manifest."""
        save(self.root / "step-1", step=1234)
        text = (self.root / "step-1" / MANIFEST).read_bytes()
        wanted, end = briefs.summary_in("here", text), text.index(b'"xxh3_64"')
        self.assertEqual(wanted and wanted.step, 1234)
        for at in range(text.index(b'"brief":') + 8, end):
            for other in {b"7", b"9", b"a"} - {text[at : at + 1]}:
                changed = text[:at] + other + text[at + 1 :]
                try:
                    self.assertIn(briefs.summary_in("here", changed), (None, wanted), changed[at - 20 : at + 20])
                except fsdp_optim.CheckpointError:
                    continue

    def test_folders_with_any_names(self) -> None:
        """The brief has the folder's name: what is read first of a manifest may end inside one of its characters."""
        for step, name in enumerate(("étape", 'the "first" \\', "步骤-🙂")):
            save(self.root / name, step=step)
            self.check_latest(name)
            text = (self.root / name / MANIFEST).read_bytes()
            end = text.index(b'"world_size"')
            self.assertEqual({briefs.summary_in("here", text[:at]) for at in range(end)}, {None})
        self.assertEqual(
            [(info.step, info.complete) for info in fsdp_optim.checkpoints(self.root)],
            [(2, True), (1, True), (0, True)],
        )

    @parameterized.expand(("model.safetensors", "optim.safetensors"))
    def test_a_file_of_another_size(self, name: str) -> None:
        """One byte more, or one less, is not what was saved."""
        for step in (1, 2):
            model = nn.Linear(3, 2)
            optim = torch.optim.Adam(model.parameters())
            model(torch.ones(1, 3)).sum().backward()
            optim.step()
            fsdp_optim.save(self.root / f"step-{step}", model, optim, step=step)
        file = self.root / "step-2" / name
        data = file.read_bytes()
        for changed in (data[:-1], data + b" "):
            file.write_bytes(changed)
            with self.assertLogs(LOG, logging.WARNING) as logs:
                self.check_latest("step-1")
            self.assertIn(f"{name} does not have the {len(data)} bytes that were saved", logs.output[0])
        file.write_bytes(data)
        self.check_latest("step-2")

    def test_a_brief_that_disagrees_with_the_rest(self) -> None:
        save(self.root / "step-1")
        checkpoint = read_manifest(self.root / "step-1")
        files = checkpoint["brief"]["files"]
        checkpoint["brief"]["files"] = {name: size + 1 for name, size in files.items()}
        checkpoint["brief"] = sealed_brief(checkpoint["brief"])
        seal_as_it_is(self.root / "step-1", checkpoint)
        kind, text = error_text(lambda: fsdp_optim.load(self.root / "step-1", nn.Linear(3, 2)))
        check_same("kind", kind, "CheckpointError")
        self.assertIn(str(self.root / "step-1" / MANIFEST), text)
        self.assertIn("brief", text)

    @parameterized.expand(
        (
            ("sequence", -1),
            ("sequence", True),
            ("sequence", "7"),
            ("step", 1.5),
            ("keep_last", []),
            ("created_ns", None),
            ("created_ns", 1 << 63),
            ("token", 7),
            ("content", None),
            ("files", {"../model.safetensors": 1}),
            ("files", ["model.safetensors"]),
            ("files", {"model.safetensors": 10**400}),
            ("version", None),
        )
    )
    def test_a_brief_of_wrong_types(self, key: str, value: Any) -> None:
        save(self.root / "step-1")
        save(self.root / "step-2")
        checkpoint = read_manifest(self.root / "step-2")
        checkpoint["brief"] = sealed_brief(checkpoint["brief"] | {key: value})
        seal_as_it_is(self.root / "step-2", checkpoint)
        self.check_latest("step-1")
        check_same("kind", error_text(lambda: fsdp_optim.load(self.root / "step-2"))[0], "CheckpointError")

    def test_checkpoints_of_the_version_before_are_older(self) -> None:
        """By their times among themselves. The golden one is not written anew."""
        shutil.copytree(GOLDEN, self.root / "golden")
        for name, hours in (("step-2", 2.0), ("step-1", 1.0)):
            with clock(hours):
                save(self.root / name)
            as_before_sequences(self.root / name)
        self.check_latest("step-2")
        with clock(-9.0):
            save(self.root / "step-3")
        self.check_latest("step-3")
        check_same("its sequence", sequence_of(self.root / "step-3"), 1)

    def test_folders_that_were_merged(self) -> None:
        """Where two sequence numbers are equal, the higher step is newer, then the later time."""
        for name, step, hours in (("a", 20, 0.0), ("b", 10, 5.0), ("c", None, 9.0)):
            with clock(hours):
                save(self.root / name / "step", step=step)
            (self.root / name / "step").rename(self.root / f"step-{name}")
            (self.root / name).rmdir()
            check_same("sequence", sequence_of(self.root / f"step-{name}"), 1)
        self.check_latest("step-a")
        shutil.rmtree(self.root / "step-a")
        self.check_latest("step-b")

    def test_the_step_is_recorded(self) -> None:
        save(self.path, step=7)
        model = nn.Linear(3, 2)
        for restored in (fsdp_optim.load(self.path), fsdp_optim.load(self.path, model)):
            check_same("step", restored.step, 7)
        check_folder(self.path)
        save(self.path, overwrite=True)
        check_same("step", fsdp_optim.load(self.path).step, None)

    @parameterized.expand(((-1,), (1.5,), (True,), ("7",), (2**63,)))
    def test_a_step_that_is_none(self, step: Any) -> None:
        kind, text = error_text(lambda: save(self.path, step=step))
        check_same("kind", kind, "CheckpointError")
        self.assertIn("step", text)
        self.assertIn(repr(step), text)
        self.check_only()

    def test_the_brief_is_all_that_is_read_of_most(self) -> None:
        """The rest of the manifest is read of the newest one alone."""
        model = nn.ModuleList(nn.Linear(1, 1) for _ in range(200))
        for step in range(5):
            save(self.root / f"step-{step}", model)
        size = (self.root / "step-0" / MANIFEST).stat().st_size
        if size < 3 * 4096:
            raise Differs(f"a manifest of {size} bytes is too small to tell")
        read = []

        def checked(where: str, text: bytes) -> None:
            read.append(len(text))
            check_density(where, text)

        with mock.patch.object(own_manifest, "check_density", checked):
            self.check_latest("step-4")
        check_same("manifests that were read whole", read, [size])

    def test_a_brief_that_is_long(self) -> None:
        """As where thousands of ranks have extras of their own: it does not end in the first bytes that are read."""
        files = {f"extra/rank-{rank:05}.safetensors": rank for rank in range(3000)}
        summary = briefs.ManifestSummary(1, 7, None, 3, 99, "token", "content", 3000, files)
        checkpoint = {"brief": summary.to_json(), "format": "fsdp_optim"}
        (self.root / "step-1").mkdir()
        seal_as_it_is(self.root / "step-1", checkpoint)
        with OpenFolder(self.root / "step-1") as opened:
            check_same("brief", read_summary(opened), summary)


class KeepTest(CatalogTest):
    @parameterized.expand(
        (
            ("weights only", {"weights_only": True}),
            ("of other names", {"model": nn.ModuleList([nn.Linear(3, 2)])}),
            ("of one name more", {"model": nn.BatchNorm1d(3)}),
            ("other weights", {"weights": "none"}),
            ("another dtype", {"weights_dtype": torch.bfloat16}),
        )
    )
    def test_other_content_is_not_counted(self, _: str, other: dict[str, Any]) -> None:
        """Neither is it removed, nor does it remove."""
        for step in (1, 2):
            self.keep(step, 2)
        for step in (3, 4, 5):
            self.keep(step, 2, **other)
        self.check_steps(1, 2, 4, 5)
        self.keep(6, 2)
        self.check_steps(2, 4, 5, 6)

    def test_other_values_and_another_optimizer_are_the_same_content(self) -> None:
        model = nn.Linear(3, 2)
        save_managed(self.root, 1, model, torch.optim.SGD(model.parameters()), keep_last=1)
        save_managed(self.root, 2, model, torch.optim.Adam(model.parameters()), keep_last=1)
        self.check_steps(2)

    def test_best_and_final_stay(self) -> None:
        self.keep(1, 2)
        save(self.root / "best", step=1)
        for step in (2, 3):
            self.keep(step, 2)
        save(self.root / "final", step=3)
        self.keep(4, 1)
        self.check_only("best", "final", name_of_step(4))

    def test_each_removal_is_logged(self) -> None:
        for step in (1, 2, 3):
            self.keep(step, 3)
        with self.assertLogs(LOG, logging.INFO) as logs:
            self.keep(4, 2)
        removals = [line for line in logs.output if "removed" in line]
        check_same("lines", len(removals), 2)
        for line, step in zip(removals, (1, 2), strict=True):
            self.assertIn(str(path_of_step(self.root, step)), line)

    def test_what_cannot_be_removed_is_warned_about(self) -> None:
        self.keep(1, 1)
        real = Path.rename

        def rename(path: Path, target: Path) -> Path:
            if path.name == name_of_step(1):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            return real(path, target)

        with mock.patch.object(Path, "rename", rename), self.assertLogs(LOG, logging.WARNING) as logs:
            self.keep(2, 1)
        self.assertIn(str(path_of_step(self.root, 1)), logs.output[0])
        self.assertIn(os.strerror(errno.EACCES), logs.output[0])
        self.check_steps(1, 2)
        self.check_latest(name_of_step(2))

    def test_one_that_is_damaged_is_not_counted(self) -> None:
        """Also where the brief of its manifest is whole."""
        for step in (1, 2, 3):
            self.keep(step, 3)
        manifest = path_of_step(self.root, 3) / MANIFEST
        manifest.write_bytes(manifest.read_bytes()[:-9])
        self.keep(4, 2)
        self.check_steps(2, 3, 4)


class NeighboursTest(CatalogTest):
    @parameterized.expand([(0,), (1,), (2,)])
    def test_a_listing_that_misses_a_folder_is_made_again(self, nth: int) -> None:
        """As one may that is made while the folder gets another name."""
        for step in (1, 2):
            save(self.root / f"step-{step}", step=step)
        real, count = os.listdir, itertools.count()

        def listdir(path: Any = ".") -> list[str]:
            is_root = not isinstance(path, int) and os.fspath(path) == str(self.root)
            misses = is_root and next(count) == nth
            return [name for name in real(path) if not misses or name != "step-2"]

        with mock.patch.object(os, "listdir", listdir):
            self.check_latest("step-2")
        self.assertGreater(next(count), 2)

    def test_a_folder_that_may_not_be_entered(self) -> None:
        (self.root / "lost+found").mkdir()
        with unreadable("lost+found"):
            check_same("latest", fsdp_optim.latest(self.root), None)
            for step in (1, 2, 3):
                self.keep(step, 2)
            with self.assertNoLogs(LOG, logging.WARNING):
                self.check_latest(name_of_step(3))
        self.check_only("lost+found", name_of_step(2), name_of_step(3))

    @unittest.skipIf(os.geteuid() == 0, "root may enter every folder")
    def test_a_folder_that_really_may_not_be_entered(self) -> None:
        (self.root / "lost+found").mkdir(mode=0)
        self.keep(1, 1)
        self.check_latest(name_of_step(1))

    def test_the_folder_itself_cannot_be_listed(self) -> None:
        save(self.path)
        with unreadable(self.root.name, number=errno.EIO):
            kind, text = error_text(lambda: fsdp_optim.latest(self.root))
        check_same("kind", kind, "CheckpointError")
        self.assertIn(str(self.root), text)
        self.assertIn(os.strerror(errno.EIO), text)

    @parameterized.expand(((errno.EIO,), (errno.ESTALE,), (errno.EMFILE,)))
    def test_what_cannot_be_read_is_not_nothing(self, number: int) -> None:
        """A run that asks for the latest one does not begin anew because of it."""
        save(self.root / "step-1")
        with unreadable("step-1", number=number):
            kind, text = error_text(lambda: fsdp_optim.latest(self.root))
        check_same("kind", kind, "CheckpointError")
        self.assertIn("step-1", text)
        self.assertIn(os.strerror(number), text)
        self.check_latest("step-1")

    def test_a_newer_version_is_not_nothing(self) -> None:
        save(self.root / "step-1")
        seal(self.root / "step-1", read_manifest(self.root / "step-1") | {"version": 99})
        text = error_text(lambda: fsdp_optim.latest(self.root))[1]
        self.assertIn("step-1/fsdp_optim.json has the schema version 99", text)

    @parameterized.expand(((errno.EIO,), (errno.ESTALE,), (errno.EACCES,)))
    def test_what_cannot_be_read_is_neither_counted_nor_removed(self, number: int) -> None:
        for step in (1, 2, 3):
            self.keep(step, 3)
        with unreadable(name_of_step(2), number=number):
            self.keep(4, 2)
        self.check_steps(2, 3, 4)

    def test_files_and_links_beside_checkpoints(self) -> None:
        (self.root / "notes.txt").write_text("mine")
        os.mkfifo(self.root / "pipe")
        (self.root / "nowhere").symlink_to(self.root / "nothing")
        (self.root / "folder").mkdir()
        os.mkfifo(self.root / "folder" / MANIFEST)
        self.keep(1, 1)
        (self.root / "link-9").symlink_to(path_of_step(self.root, 1))
        self.keep(2, 1)
        self.check_latest(name_of_step(2))
        self.check_only("notes.txt", "pipe", "nowhere", "folder", "link-9", name_of_step(2))


if __name__ == "__main__":
    unittest.main()
