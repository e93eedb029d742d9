"""The commands on a folder of checkpoints: ls, latest, prune, doctor, copy, and verify and inspect of a folder."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.commands import called
from kit.folders import SharedFolder
from torch import nn

import fsdp_optim
from fsdp_optim.cli.app import main

METRICS = {10: 3.0, 20: 1.0, 30: 2.0, 40: 4.0, 50: 5.0}


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def printed(*arguments: object) -> Any:
    """The JSON that a command prints."""
    code, out, err = called(*arguments, "--json")
    assert not err, err
    return code, json.loads(out)


def fill(root: Path) -> None:
    """Fill a folder as a run does: a checkpoint for each metric."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = fsdp_optim.ManagerOptions(durable=False)
    with fsdp_optim.CheckpointManager(root, model, optim, every=1, options=options) as manager:
        for step, metric in METRICS.items():
            model(torch.randn(3, 6)).sum().backward()
            optim.step()
            manager.step(step, metric=metric)


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def step(number: int) -> str:
    return f"step-{number:08}"


class FolderCommandsTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        fill(cls.root / "run")

    def setUp(self) -> None:
        self.run_folder = self.own_folder() / "run"
        shutil.copytree(self.root / "run", self.run_folder)

    def damage(self, number: int) -> Path:
        """Cut the last byte of a file of a checkpoint."""
        file = self.run_folder / step(number) / "optim.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        return file

    # --------------------------------------------------------------------------------------- ls, latest

    def test_ls(self) -> None:
        self.damage(30)
        (self.run_folder / f"{step(60)}.saving-0123456789abcdef").mkdir()
        code, out, err = called("ls", self.run_folder)
        self.assertEqual((code, err), (1, ""))
        lines = [line.split() for line in out.splitlines()]
        self.assertEqual(lines[0], ["name", "step", "age", "size", "ranks", "wrapper", "metric", "state"])
        self.assertEqual([line[0] for line in lines[1:6]], [step(number) for number in (50, 40, 30, 20, 10)])
        self.assertEqual([line[1] for line in lines[1:6]], ["50", "40", "30", "20", "10"])
        self.assertEqual([line[-1] for line in lines[1:6] if "damaged:" not in line], ["ok"] * 4)
        self.assertIn("damaged: optim.safetensors does not have the", out.splitlines()[3])
        self.assertIn("unfinished", out.splitlines()[6])

    def test_ls_on_a_terminal(self) -> None:
        terminal = Terminal()
        with contextlib.redirect_stdout(terminal), mock.patch.dict("os.environ", COLUMNS="200", TERM="dumb"):
            self.assertEqual(main(["ls", str(self.run_folder)]), 0)
        out = terminal.getvalue()
        self.assertRegex(out, rf"{step(50)}.* 50 .* 5 .*ok")

    def test_ls_for_programs(self) -> None:
        code, listed = printed("ls", self.run_folder)
        self.assertEqual((code, listed["unfinished"]), (0, []))
        for entry, info in zip(listed["checkpoints"], fsdp_optim.checkpoints(self.run_folder), strict=True):
            self.assertEqual((entry["path"], entry["step"]), (str(info.path), info.step))
            self.assertEqual((entry["metric"], entry["state"]), (METRICS[entry["step"]], "ok"))
            sizes = sum(file.stat().st_size for file in Path(entry["path"]).rglob("*.safetensors"))
            self.assertEqual(entry["nbytes"], sizes)
            self.assertLess(abs(entry["saved_at"] - time.time()), 3600)

    def test_latest(self) -> None:
        self.assertEqual(called("latest", self.run_folder), (0, f"{self.run_folder / step(50)}\n", ""))
        file = self.damage(50)
        code, out, _ = called("latest", self.run_folder)
        self.assertEqual((code, out), (0, f"{self.run_folder / step(40)}\n"))
        self.assertTrue(file.exists())

    def test_nothing_is_there(self) -> None:
        empty = self.own_folder()
        for command in ("ls", "latest", "doctor"):
            for path in (empty, empty / "nothing"):
                with self.subTest(command=command, path=path):
                    self.assertEqual(called(command, path)[0], 2)
        code, _, err = called("ls", self.run_folder / step(10))
        self.assertEqual(code, 2)
        self.assertIn("is a checkpoint", err)

    # --------------------------------------------------------------------------------------- a folder for one checkpoint

    def test_a_folder_of_checkpoints_is_no_checkpoint(self) -> None:
        to = self.own_folder() / "to"
        for arguments in (
            ["inspect", self.run_folder],
            ["convert", self.run_folder, to],
            ["copy", self.run_folder, to],
            ["thin", self.run_folder],
            ["average", self.run_folder / step(10), self.run_folder, "-o", to],
        ):
            with self.subTest(arguments[0]):
                code, out, err = called(*arguments)
                self.assertEqual((code, out), (2, ""))
                named = ", ".join(step(number) for number in (50, 40, 30, 20, 10))
                wanted = rf"is a folder of checkpoints, not a checkpoint: it has {named}\. "
                self.assertRegex(err, rf"{wanted}Did you mean \S+/{step(50)}\?\n\Z")
                self.assertFalse(to.exists())

    def test_verify_of_a_folder(self) -> None:
        code, out, _ = called("verify", self.run_folder)
        self.assertEqual(code, 0)
        self.assertEqual(out.count(": complete: "), 5)
        self.assertTrue(out.endswith("5 checkpoints, none is damaged\n"))
        file = self.run_folder / step(20) / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        code, out, _ = called("verify", self.run_folder)
        self.assertEqual(code, 1)
        self.assertEqual(out.count(": complete: "), 4)
        self.assertRegex(out, rf"{step(20)}: damaged: model\.safetensors: bytes \[\d+, \d+\)")
        code, listed = printed("verify", self.run_folder)
        self.assertEqual((code, listed["num_damaged"]), (1, 1))
        self.assertEqual([entry["step"] for entry in listed["checkpoints"] if entry["damaged"]], [20])

    # --------------------------------------------------------------------------------------- inspect --match

    def test_inspect_match(self) -> None:
        path = self.run_folder / step(10)
        code, out, _ = called("inspect", path, "--match", "0.*")
        self.assertEqual(code, 0)
        self.assertIn("model: 2 tensors, 28 elements, 112 B", out)
        _, listed = printed("inspect", path, "--match", "*.bias")
        whole = fsdp_optim.inspect(path)
        self.assertEqual(sorted(listed["model"]), ["0.bias", "1.bias"])
        self.assertEqual(sorted(listed["state"]), ["0.bias", "1.bias"])
        self.assertEqual(listed["groups"][0]["params"], ["0.bias", "1.bias"])
        self.assertEqual(listed["model"]["0.bias"]["shape"], list(whole.model["0.bias"].shape))
        code, out, err = called("inspect", path, "--match", "nothing*")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("'nothing*'", err)

    # --------------------------------------------------------------------------------------- doctor

    def test_doctor(self) -> None:
        path = self.run_folder / step(30)
        code, out, err = called("doctor", path)
        self.assertEqual((code, err), (0, ""))
        self.assertRegex(out, r"complete: +yes\n  step: +30\n  ranks: +1\n  optimizer: +yes\n")
        self.assertIn(f"fsdp_optim.load({str(path)!r}, model, optim)", out)
        code, out, _ = called("doctor", self.run_folder)
        self.assertEqual(code, 0)
        self.assertIn("a folder of checkpoints", out)
        self.assertIn(f"fsdp_optim.resume({str(self.run_folder)!r}, model, optim)", out)
        self.assertEqual(out.count(": complete\n"), 5)

    def test_doctor_names_all_that_is_missing(self) -> None:
        path = self.run_folder / step(30)
        (path / "model.safetensors").unlink()
        self.damage(30)
        code, seen = printed("doctor", path)
        self.assertEqual(
            (code, seen["kind"], seen["complete"], seen["step"], seen["load"]), (1, "checkpoint", False, 30, "")
        )
        text = "\n".join(sorted(seen["problems"]))
        self.assertRegex(
            text, r"model\.safetensors: is missing; it had \d+ bytes\n\S+optim\.safetensors: has \d+ bytes, \d+"
        )
        code, seen = printed("doctor", self.run_folder)
        self.assertEqual((code, seen["kind"], seen["step"]), (1, "root", 50))
        self.assertEqual(len(seen["problems"]), 1)
        (path / "fsdp_optim.json").unlink()
        code, seen = printed("doctor", path)
        self.assertEqual((code, seen["kind"]), (1, "checkpoint"))
        self.assertIn("fsdp_optim.json: is missing", seen["problems"][0])

    def test_doctor_of_an_unfinished_save(self) -> None:
        unfinished = self.run_folder / f"{step(60)}.saving-0123456789abcdef"
        unfinished.mkdir()
        code, seen = printed("doctor", unfinished)
        self.assertEqual((code, seen["kind"], seen["complete"]), (1, "unfinished", False))

    # --------------------------------------------------------------------------------------- prune

    def test_prune(self) -> None:
        """The oracle: which steps each rule keeps, written out."""
        for flags, kept in {
            ("--keep-last", "2"): {40, 50},
            ("--keep-every", "20"): {20, 40, 50},
            ("--keep-best", "1"): {20, 50},
            ("--keep-best", "1", "--best", "max"): {50},
            ("--keep-best", "2", "--keep-every", "40"): {20, 30, 40, 50},
            ("--keep-last", "9"): {10, 20, 30, 40, 50},
        }.items():
            with self.subTest(flags):
                self.setUp()
                before = {path: path.stat().st_mtime_ns for path in self.run_folder.rglob("*")}
                code, planned = printed("prune", self.run_folder, *flags, "--dry-run")
                self.assertEqual((code, planned["dry_run"]), (0, True))
                self.assertEqual({path: path.stat().st_mtime_ns for path in self.run_folder.rglob("*")}, before)
                code, done = printed("prune", self.run_folder, *flags, "--quiet")
                self.assertEqual(code, 0)
                self.assertEqual(names_in(self.run_folder), [step(number) for number in sorted(kept)])
                self.assertEqual({**done, "dry_run": True}, planned)
                self.assertEqual(
                    [Path(path).name for path in done["removed"]],
                    [step(n) for n in (50, 40, 30, 20, 10) if n not in kept],
                )
                self.assertEqual(called("verify", self.run_folder)[0], 0)

    def test_a_damaged_checkpoint_neither_counts_nor_goes(self) -> None:
        self.damage(50)
        manifest = self.run_folder / step(40) / "fsdp_optim.json"
        manifest.write_bytes(manifest.read_bytes()[:-20] + b"x" * 20)  # its beginning alone looks complete
        pruned = fsdp_optim.prune(self.run_folder, keep_last=1)
        self.assertEqual([Path(path).name for path in pruned.kept], [step(30)])
        self.assertEqual({Path(path).name for path in pruned.passed_over}, {step(40), step(50)})
        self.assertEqual(names_in(self.run_folder), [step(30), step(40), step(50)])

    def test_checkpoints_of_plain_saves_and_of_other_models(self) -> None:
        """All count, whoever saved them; another model is a series of its own."""
        for number in (1, 2):
            fsdp_optim.save(self.run_folder / f"other-{number}", nn.Linear(2, 2), step=number)
        fsdp_optim.prune(self.run_folder, keep_last=1)
        self.assertEqual(names_in(self.run_folder), ["other-2", step(50)])

    def test_prune_counts_thin_checkpoints_with_the_others(self) -> None:
        for number in (10, 20, 40):
            fsdp_optim.thin(self.run_folder / step(number))
        code, pruned = printed("prune", self.run_folder, "--keep-last", "2", "--quiet")
        self.assertEqual((code, len(pruned["removed"])), (0, 3))
        self.assertEqual(names_in(self.run_folder), [step(40), step(50)])
        lines = called("ls", self.run_folder)[1].splitlines()
        self.assertEqual(["thinned" in line for line in lines[1:]], [False, True])

    def test_prune_where_nothing_is(self) -> None:
        code, out, err = called("prune", self.run_folder / "nowhere", "--keep-last", "2")
        self.assertEqual((code, out, err.count("\n")), (2, "", 1))
        self.assertIn("has no checkpoints, or is not there", err)

    def test_prune_without_a_rule(self) -> None:
        code, _, err = called("prune", self.run_folder)
        self.assertEqual(code, 2)
        self.assertIn("--keep-last", err)
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "no rule says what stays: give keep_last=3"):
            fsdp_optim.prune(self.run_folder)
        with self.assertRaisesRegex(fsdp_optim.StateError, "keep_last must be at least 1"):
            fsdp_optim.prune(self.run_folder, keep_last=0)
        self.assertEqual(len(names_in(self.run_folder)), 5)
        self.assertEqual(called("prune", self.run_folder / step(10), "--keep-last", 1)[0], 2)
