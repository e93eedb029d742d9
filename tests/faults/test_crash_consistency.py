"""Power cuts: each prefix of what a save does, with what was not flushed dropped, kept or torn, leaves a complete checkpoint."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import unittest
from collections.abc import Iterator
from pathlib import Path

import torch
from kit.cases import expand, some
from kit.compare import Differs, check_same
from kit.optimizers import adam
from kit.trained import Trained
from parameterized import parameterized
from soak.power_cuts import NEXT_EVERY, WAYS, Recorded, probe, states
from soak.recording import Choice, Disk, Event, Recorder, Tree, all_of, choices, every, no, none_of, put
from soak.torture import temporary
from torch import nn

import fsdp_optim
from fsdp_optim.plugins import TrainerFolder
from fsdp_optim.storage.posix import FolderWriter
from fsdp_optim.storage.posix.files import make_file
from fsdp_optim.storage.posix.new_file import new_file

SEED = 20251121
MOST = 45  # states of a way that are looked at here; `make soak` looks at more of them


def wrong_states(recorded: Recorded, folder: Path, most: int) -> list[str]:
    """The faults of some of the states that a power cut may leave."""
    rng = random.Random(SEED)
    candidates = list(states(recorded, rng, at_random=1))
    wrong = []
    some = sorted(rng.sample(range(len(candidates)), min(most, len(candidates))))
    for count, index in enumerate(some):
        position, tree = candidates[index]
        try:
            probe(recorded.way, tree, *recorded.bounds(position), folder / "left", count % NEXT_EVERY == 0)
        except Differs as error:
            wrong.append(f"after event {position} of {len(recorded.events)}: {error}")
    print(f"{len(recorded.events)} events, {len(candidates)} states, {len(some)} looked at")
    return wrong


class PowerCutTest(unittest.TestCase):
    @expand(*some(WAYS, every=2))
    def test_whatever_is_left(self, name: str) -> None:
        with temporary() as folder:
            wrong = wrong_states(Recorded.of(WAYS[name], folder / "way"), folder, MOST)
        if wrong:
            raise Differs(f"{len(wrong)} states:\n" + "\n".join(wrong[:5]))

    def test_a_file_without_tensors(self) -> None:
        """An optimizer without state has a file into which no rank writes: it is flushed too."""
        with temporary() as folder:
            disk, recorder, run = Disk(folder), Recorder(folder), Trained("plain", adam, 0)
            with recorder.recording():
                fsdp_optim.save(folder / "step", run.model, run.optim)
            for event in recorder.events:
                disk.apply(event)
            flushed = disk.left(Choice(none_of, no))
            for path in (folder / "step").iterdir():
                self.assertEqual(flushed.get(f"step/{path.name}"), path.read_bytes() if path.is_file() else None, path)

    @parameterized.expand([("files",), ("folders",)])
    def test_without_a_kind_of_flush_it_is_seen(self, kind: str) -> None:
        """The same saves with the flushes of all files, or of all folders, left out: then states are wrong."""
        with temporary() as folder:
            recorded = Recorded.of(WAYS["overwrite"], folder / "way")
            disk, kept = recorded.disk(), []
            for event in recorded.events:
                flushed = "folders" if event[0] == "flush" and disk.is_folder(event[1]) else "files"
                disk.apply(event)
                if event[0] != "flush" or flushed != kind:
                    kept.append(event)
            self.assertLess(len(kept), len(recorded.events))
            self.assertGreater(len(wrong_states(dataclasses.replace(recorded, events=kept), folder, MOST)), 0)


def cuts(disk: Disk, events: list[Event]) -> Iterator[tuple[int, Tree]]:
    """The files that power cuts leave after each of some events, with the number of these events."""
    rng = random.Random(SEED)
    for position in range(len(events) + 1):
        if position:
            disk.apply(events[position - 1])
        for choice in choices(disk, rng, 1):
            yield position, disk.left(choice)


class OtherWritesTest(unittest.TestCase):
    """What does not write a complete checkpoint: a rank's part of a save, one file, and a thin checkpoint."""

    def test_what_a_rank_has_written_is_on_the_disk_at_its_end(self) -> None:
        """In more files than are open at once, which another process has made, and in a file of its own."""
        with temporary() as folder:
            names = [f"{number}.bin" for number in range(70)]
            for name in names:
                make_file(folder, name, 12, b"head")
            disk, recorder, num_open = Disk(folder), Recorder(folder), len(os.listdir("/proc/self/fd"))
            with recorder.recording():
                writer = FolderWriter(folder, durable=True, who="a rank")
                writer.create("own.bin", 12, b"head")
                for offset in (4, 8):
                    for name in names:
                        writer.write(name, [memoryview(name[:4].encode())], offset)
                writer.finish()
            for event in recorder.events:
                disk.apply(event)
            flushed = disk.left(Choice(all_of, no))
            self.assertEqual(flushed["own.bin"], b"head" + bytes(8))
            for name in names:
                self.assertEqual(flushed[name], b"head" + 2 * name[:4].encode())
            self.assertEqual(len(os.listdir("/proc/self/fd")), num_open)

    @parameterized.expand([(None,), (b"the old one",)])
    def test_a_new_file_is_there_or_not(self, old: bytes | None) -> None:
        new = bytes(range(256)) * 5
        with temporary() as folder:
            if old is not None:
                (folder / "page.html").write_bytes(old)
            disk, recorder = Disk(folder), Recorder(folder)
            with recorder.recording(), new_file(folder / "page.html", overwrite=True) as file:
                file.write(new[:300])
                file.write(new[300:])
            events = recorder.events
        seen = {(position == len(events), tree.get("page.html")) for position, tree in cuts(disk, events)}
        self.assertEqual(seen, {(False, old), (False, new), (True, new)})

    def test_the_files_of_a_trainer_come_with_the_checkpoint(self) -> None:
        """All that they hold is there as soon as the checkpoint is."""
        wanted = {"config.json": b"{}", "tokens/a.txt": b"a" * 1000}
        with temporary() as folder:
            disk, recorder = Disk(folder), Recorder(folder)
            with recorder.recording():
                save = TrainerFolder.begin(f"{folder}/step", fsdp_optim.SaveOptions(progress=False))
                with save.writing():
                    for name, data in wanted.items():
                        path = Path(save.files, name)
                        path.parent.mkdir(exist_ok=True)
                        path.write_bytes(data)
                save.commit(nn.Linear(2, 2), None, step=2)
            there = []
            for position, tree in cuts(disk, recorder.events):
                there.append("step" in tree)
                if there[-1]:
                    held = {name: tree.get(f"step/{name}") for name in wanted}
                    self.assertEqual(held, wanted, f"after event {position} of {len(recorder.events)}")
        self.assertEqual({False, True}, set(there))
        self.assertTrue(there[-1])

    def test_a_checkpoint_that_is_removed_is_complete_or_has_no_name(self) -> None:
        with temporary() as folder:
            for step in (1, 2):
                fsdp_optim.save(folder / f"step-{step}", nn.Linear(2, 2), None, step=step)
            disk, recorder = Disk(folder), Recorder(folder)
            before = disk.left(Choice(none_of, no))
            with recorder.recording():
                fsdp_optim.prune(folder, keep_last=1)
            ends = set()
            for position, tree in cuts(disk, recorder.events):
                there = {path: data for path, data in tree.items() if path.split("/")[0] in ("step-1", "step-2")}
                kept = {path: data for path, data in before.items() if path.startswith("step-2") or "step-1" in tree}
                self.assertEqual(there, kept, f"after event {position} of {len(recorder.events)}")
                ends.add("step-1" in tree)
        self.assertEqual(ends, {False, True})

    def test_a_thin_checkpoint_is_thin_or_as_it_was(self) -> None:
        with temporary() as folder:
            model = nn.Linear(31, 9)
            # A tensor among its hyperparameters: a file of the optimizer is in the folder `extra` then.
            optim = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
            model(torch.ones(1, 31)).sum().backward()
            optim.step()
            root, left = folder / "root", folder / "left"
            fsdp_optim.save(root / "step-1", model, optim)
            disk, recorder = Disk(root), Recorder(root)
            with recorder.recording():
                fsdp_optim.thin(root / "step-1")
            states = {
                (position == len(recorder.events), *tree.items()) for position, tree in cuts(disk, recorder.events)
            }
            outcomes = set()
            for has_ended, *files in states:
                left.mkdir()
                put(dict(files), left)  # type: ignore[arg-type]
                (info,) = fsdp_optim.checkpoints(left)
                new = nn.Linear(31, 9)
                other = torch.optim.Adam(new.parameters(), lr=torch.tensor(1.0)) if not info.thinned else None
                fsdp_optim.load(info.path, new, other)
                check_same("weights", new.state_dict(), model.state_dict())
                if other is not None:
                    check_same("optimizer", other.state_dict()["state"], optim.state_dict()["state"])
                outcomes.add((has_ended, info.complete, info.thinned))
                shutil.rmtree(left)
        self.assertEqual(outcomes, {(False, True, False), (False, True, True), (True, True, True)})


class DiskTest(unittest.TestCase):
    """The disk that forgets, by a history of which everything is known."""

    def left(self, root: Path, events: list[Event], names: bool, data: bool) -> dict[str, bytes | None]:

        disk = Disk(root)
        for event in events:
            disk.apply(event)
        return disk.left(Choice(all_of if names else none_of, every if data else no))

    def test_what_is_flushed_is_kept(self) -> None:
        with temporary() as root:
            (root / "old").write_bytes(b"old")
            top, old = root.stat().st_ino, (root / "old").stat().st_ino
            made = [("create", top, "new", 10**9, "file"), ("write", 10**9, 2, b"xy"), ("truncate", old, 1)]
            moved = [("rename", top, "new", top, "old"), ("remove", top, "old")]
            self.assertEqual(self.left(root, made, False, False), {"old": b"old"})
            self.assertEqual(self.left(root, made, True, False), {"old": b"old", "new": b""})
            self.assertEqual(self.left(root, made, True, True), {"old": b"o", "new": b"\0\0xy"})
            flushed = [*made, ("flush", 10**9), ("flush", top)]
            self.assertEqual(self.left(root, flushed, False, False), {"old": b"old", "new": b"\0\0xy"})
            self.assertEqual(self.left(root, [*flushed, *moved], False, False), {"old": b"old", "new": b"\0\0xy"})
            self.assertEqual(self.left(root, [*flushed, moved[0]], True, False), {"old": b"\0\0xy"})
            self.assertEqual(self.left(root, [*flushed, *moved, ("flush", top)], False, False), {})
