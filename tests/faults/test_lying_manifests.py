"""Links and names that lead outside, manifests that lie, and files that cannot be read: one CheckpointError, nothing changes."""

from __future__ import annotations

import errno
import json
import os
import unittest
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kit.checkpoint_damage import (
    MANIFESTS,
    OF_ANOTHER_MODEL,
    READING,
    failing,
    nth_call,
    renamed,
    seal,
    sys_digits,
)
from kit.checkpoint_format import (
    MANIFEST,
    read_manifest,
)
from kit.compare import Differs, check_same
from kit.groups import Meeting
from kit.refused_checkpoints import (
    EVERY_FILE,
    PATIENCE,
    WORLD,
    DamageTest,
    Outcome,
    check_outcomes,
    contents,
    good,
    load_both_ways,
    outcome_of,
    trained,
)

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

# ------------------------------------------------------------------------------------------- links, names, manifests


class OutsideTest(DamageTest):
    """Only files in the folder are read, whatever the folder's files say."""

    def test_a_symlink(self) -> None:
        cases: dict[bool, Any] = {True: {}, False: {}}
        for number, name in enumerate((*EVERY_FILE, "extra")):
            folder, outside = self.copy(name=f"{number}"), self.root / f"elsewhere_{number}"
            (folder / name).rename(outside)
            (folder / name).symlink_to(outside)
            cases[name.endswith(".sums")][name] = (folder, [Path(name).name])
        self.check_all_refused(cases[False])
        self.check_all_refused(cases[True], verifies=[True])

    def test_a_symlink_to_a_file_inside(self) -> None:
        folder = self.copy()
        (folder / "model.safetensors").rename(folder / "weights")
        (folder / "model.safetensors").symlink_to("weights")
        self.check_refused(folder, "model.safetensors")

    def test_a_symlink_to_nothing_and_to_itself(self) -> None:
        for target in ("nothing", "model.safetensors"):
            folder = self.copy(name=target)
            (folder / "model.safetensors").unlink()
            (folder / "model.safetensors").symlink_to(target)
            self.check_refused(folder, "model.safetensors")

    def test_a_name_in_the_manifest(self) -> None:
        was, cases = "optim.safetensors", {}
        names = {
            "above": f"../other/{was}",
            "absolute": str(self.root / "other" / was),
            "around": f"extra/../{was}",
            "inside": f"./{was}",
            "empty": "",
            "dot": "..",
            "NUL": f"{was}\0",
            "long": "a" * 100_000,
        }
        self.copy(name="other")  # what is named is there, and good
        for what, name in names.items():
            folder = self.copy(name=what)
            seal(folder, renamed(read_manifest(folder), was, name))
            cases[what] = (folder, [f"{MANIFEST}|the manifest"])
        self.check_all_refused(cases)

    def test_an_index(self) -> None:
        name, victim, cases = "model.safetensors.index.json", "stem.weight", {}
        index = json.loads((good("split") / name).read_bytes())
        files = index["weight_map"]
        self.copy("split", "other")
        others = {
            "above": f"../other/{files[victim]}",
            "absolute": str(self.root / "other" / files[victim]),
            "missing file": files[victim].replace("-of-", "-of-9"),
            "other file": next(other for other in files.values() if other != files[victim]),
        }
        texts = {what: json.dumps(index | {"weight_map": files | {victim: other}}) for what, other in others.items()}
        texts |= {"a list": "[]", "no map": '{"metadata": {}}', "deep": "[" * 200_000}
        for what, text in texts.items():
            folder = self.copy("split", what)
            (folder / name).write_text(text)
            cases[what] = (folder, [name])
        self.check_all_refused(cases, "split")


class ManifestTest(DamageTest):
    def test_sealing_alone_does_no_harm(self) -> None:
        folder = self.copy()
        seal(folder, read_manifest(folder))
        run_on_ranks(load_both_ways, WORLD, [], folder, "whole", [True])

    def test_a_newer_version_is_refused_by_name(self) -> None:
        cases = {}
        for version in (6, 7, 2**63, 10**30):
            folder = self.copy(name=f"{version}")
            seal(folder, read_manifest(folder) | {"version": version, "files": {}})
            cases[str(version)] = (folder, [MANIFEST, "version", str(version), "fsdp_optim"])
        self.check_all_refused(cases)

    def test_a_newer_version_whose_checksum_this_one_does_not_know(self) -> None:
        folder = self.copy()
        (folder / MANIFEST).write_text(
            json.dumps({"checksum": "other", "checkpoint": {"format": "fsdp_optim", "version": 6}})
        )
        self.check_refused(folder, MANIFEST, verifies=[True])

    def test_a_sealed_manifest(self) -> None:
        cases: dict[bool, Any] = {True: {}, False: {}}
        for number, (what, edit) in enumerate(MANIFESTS.items()):
            folder = self.copy(name=f"{number}")
            limit = sys_digits(0)
            try:
                seal(folder, edit(read_manifest(folder)))
            finally:
                sys_digits(limit)
            cases["hash" in what][what] = (folder, [str(folder)])
        self.check_all_refused(cases[False], or_state_error=OF_ANOTHER_MODEL)
        self.check_all_refused(cases[True], verifies=[True])

    def test_other_bytes(self) -> None:
        texts = {
            "deep lists": b"[" * 200_000,
            "deep, closed": b'{"checksum": "", "checkpoint": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "deep dicts": b'{"checkpoint": ' * 100_000 + b"1" + b"}" * 100_000,
            "digits": b'{"checksum": "", "checkpoint": {"version": ' + b"9" * 100_000 + b"}}",
            "not UTF-8": b'{"checksum": "\xff", "checkpoint": {}}',
            "UTF-16": '{"checksum": "", "checkpoint": {}}'.encode("utf-16"),
            "nothing": b"",
            "a number": b"7",
            "no checksum": b'{"checkpoint": {"format": "fsdp_optim", "version": 1}}',
            "checksum of numbers": b'{"checksum": 7, "checkpoint": {"format": "fsdp_optim", "version": 1}}',
        }
        cases = {}
        for what, text in texts.items():
            folder = self.copy(name=what)
            (folder / MANIFEST).write_bytes(text)
            cases[what] = (folder, [MANIFEST])
        self.check_all_refused(cases)

    def test_a_manifest_of_half_a_gigabyte(self) -> None:
        folder = self.copy()
        os.truncate(folder / MANIFEST, 1 << 29)
        self.check_refused(folder, MANIFEST)

    def test_a_key_twice(self) -> None:
        """Readers that take the first one and readers that take the last one would see two checkpoints."""
        folder = self.copy()
        text = (folder / MANIFEST).read_text()
        (folder / MANIFEST).write_text(text.replace("{", '{"checkpoint": {"format": "fsdp_optim", "version": 1}, ', 1))
        self.check_refused(folder, MANIFEST)


# ------------------------------------------------------------------------------------------- reading that fails


def reading_fails(folder: Path) -> list[tuple[str, Outcome]]:
    """Every call that reads fails once, on each rank in turn."""
    target, meeting, outcomes = trained(1), Meeting(), []
    for rank in range(WORLD):
        for nth in (*range(6), *range(6, 200, 9)):
            functions = READING if rank == dist.get_rank() else []
            with nth_call(functions, nth, failing(errno.EIO)) as calls:
                outcome = outcome_of(
                    lambda: fsdp_optim.load(
                        folder, target.model, target.optim, options=fsdp_optim.LoadOptions(timeout=PATIENCE)
                    ),
                    target,
                )
            if not meeting.tell(calls.reached)[rank]:
                break
            outcomes.append((f"call {nth} on rank {rank}", outcome))
    fsdp_optim.load(folder, target.model, target.optim, options=fsdp_optim.LoadOptions(timeout=PATIENCE))
    check_same("loaded afterwards", contents(target), contents(trained(3)))
    return outcomes


class ReadingFailsTest(unittest.TestCase):
    def test_on_each_rank_in_turn(self) -> None:
        by_rank = run_on_ranks(reading_fails, WORLD, good("whole"))
        if len({what.split()[-1] for what, _ in by_rank[0]}) != WORLD or len(by_rank[0]) < 4 * WORLD:
            raise Differs(f"hardly anything failed: {[what for what, _ in by_rank[0]]}")
        for cases in zip(*by_rank, strict=True):
            check_outcomes(cases[0][0], [outcome for _, outcome in cases], os.strerror(errno.EIO))
