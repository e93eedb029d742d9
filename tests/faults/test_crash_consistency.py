"""Power cuts: each prefix of what a save does, with what was not flushed dropped, kept or torn, leaves a complete checkpoint."""

from __future__ import annotations

import dataclasses
import random
import unittest
from pathlib import Path

from kit.cases import expand, some
from kit.compare import Differs
from kit.optimizers import adam
from kit.trained import Trained
from parameterized import parameterized
from soak.power_cuts import NEXT_EVERY, WAYS, Recorded, probe, states
from soak.recording import Choice, Disk, Event, Recorder, all_of, every, no, none_of
from soak.torture import temporary

import fsdp_optim

SEED = 20251121
MOST = 45  # states of a way that are looked at here; `make soak` looks at more of them


def wrong_states(recorded: Recorded, folder: Path, most: int) -> list[str]:
    """The faults of some of the states that a power cut may leave."""
    rng = random.Random(SEED)
    found = list(states(recorded, rng, at_random=1))
    wrong = []
    some = sorted(rng.sample(range(len(found)), min(most, len(found))))
    for count, index in enumerate(some):
        position, tree = found[index]
        try:
            probe(recorded.way, tree, *recorded.bounds(position), folder / "left", count % NEXT_EVERY == 0)
        except Differs as error:
            wrong.append(f"after event {position} of {len(recorded.events)}: {error}")
    print(f"{len(recorded.events)} events, {len(found)} states, {len(some)} looked at")
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
