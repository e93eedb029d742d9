"""Power cuts during saves: `latest` is a complete checkpoint, whatever the disk has forgotten.

Each way of saving is recorded once. Then each prefix of its events is played back, where changes that were not flushed are kept,
dropped or torn. The folder then has the old checkpoint or the new one, bit for bit; after `save` has returned, the new one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.compare import Differs
from kit.optimizers import adam
from kit.trained import Trained
from torch import nn

import fsdp_optim
from soak.ranks import LEFTOVER, check_values, fill, leftovers, path_of, save_by
from soak.recording import Disk, Event, Recorder, Tree, at_random_choice, choices, put
from soak.torture import Torture, temporary

NEXT_EVERY = 10  # one of this number of different states also gets a further save


class Small(nn.Module):
    """Data of several sectors, the last of them not full."""

    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(31, 9)
        self.last = nn.Linear(9, 1)


@functools.cache
def model() -> Trained:
    return Trained("plain", adam, 1, Small)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of saving. `before`: the saves on the disk when the recording begins; `inside`: the parent of the checkpoints."""

    mode: str
    before: int
    saves: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    inside: str = ""

    def path(self, root: Path, number: int) -> Path:
        return Path(path_of(root / self.inside, self.mode, number))

    def save(self, root: Path, number: int) -> None:
        trained = model()
        fill(trained, number)
        save_by(self.mode, root / self.inside, number, trained, **dict(self.options))


SPLIT = (("max_file_size", 1500),)
WAYS = {
    "first save": Way("steps", 0),
    "first save, in new folders": Way("steps", 0, inside="run/deep"),
    "overwrite": Way("overwrite", 1),
    "overwrite twice": Way("overwrite", 1, saves=2),
    "overwrite, split": Way("overwrite", 1, options=SPLIT),
    "overwrite, files of a rank": Way("overwrite", 1, options=(("strategy", "per_rank_files"),)),
    "a manager's": Way("managed steps", 2),
    "a manager's, twice": Way("managed steps", 1, saves=3),
    "async first save": Way("async steps", 0),
    "async overwrite": Way("async overwrite", 1),
    "async save beside others": Way("async steps", 2),
}


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A way of saving with its events. `disk`: makes the files that were there before."""

    way: Way
    events: list[Event]
    disk: Callable[[], Disk]

    @classmethod
    def of(cls, way: Way, folder: Path) -> Recorded:
        root, before = folder / "recorded", folder / "before"
        root.mkdir(parents=True)
        for number in range(1, way.before + 1):
            way.save(root, number)
        shutil.copytree(root, before)
        first = Disk(root)
        recorder = Recorder(root)
        with recorder.recording():
            for number in range(way.before + 1, way.before + way.saves + 1):
                recorder.mark("begin", number)
                way.save(root, number)
                recorder.mark("end", number)
        events = recorder.events

        def again() -> Disk:
            return first.copy()

        _check_end(first.copy(), events, root)
        return cls(way, events, again)

    def bounds(self, number_of_events: int) -> tuple[int, int]:
        """The last save that had ended after some events, and the last save that had begun."""
        marks = [event[1:] for event in self.events[:number_of_events] if event[0] == "mark"]
        ended = max((n for what, n in marks if what == "end"), default=self.way.before)
        return ended, max((n for what, n in marks if what == "begin"), default=self.way.before)


def _check_end(disk: Disk, events: list[Event], root: Path) -> None:
    """Raise unless playing back all events gives the files of the folder; otherwise the recorder misses some calls."""
    for event in events:
        disk.apply(event)
    played = next(disk.left(choice) for n, choice in enumerate(choices(disk, random.Random(0), 0)) if n == 1)
    there = {str(p.relative_to(root)): None if p.is_dir() else p.read_bytes() for p in sorted(root.rglob("*"))}
    if played != there:
        wrong = sorted(name for name in {*played, *there} if played.get(name, b"-") != there.get(name, b"-"))
        raise Differs(f"the recorder does not see all that is done: {wrong}")


def fingerprint(tree: Tree, ended: int, begun: int) -> bytes:
    digest = hashlib.sha256(f"{ended} {begun}".encode())
    for path, data in sorted(tree.items()):
        digest.update(f"\0{path}\0{'folder' if data is None else len(data)}\0".encode() + (data or b""))
    return digest.digest()


def _latest(root: Path) -> Path | str | None:
    """The newest checkpoint. Where the folders above the root are gone too, nobody can tell the path from a mistake."""
    if root.parent.exists():
        return fsdp_optim.latest(root)
    try:
        fsdp_optim.latest(root)
    except fsdp_optim.CheckpointError as error:
        if "is not there either" in str(error):
            return None
        raise
    raise Differs("no error, although the folder above the root is missing")


def probe(way: Way, tree: Tree, ended: int, begun: int, root: Path, save_next: bool) -> None:
    """Raise unless a program that starts on this disk finds the right checkpoint."""
    root.mkdir()
    try:
        put(tree, root)
        inside = root / way.inside
        with mock.patch("time.sleep", return_value=None):  # no other process works on this folder
            newest = _latest(inside)
            if newest is None and ended:
                raise Differs(f"no checkpoint, but save {ended} had ended")
            if newest is not None:
                _check_number(newest, ended, begun)
            if way.mode.endswith("overwrite") and ended:
                _check_number(way.path(root, begun), ended, begun)
            if save_next:
                way.save(root, begun + 1)
                _check_number(way.path(root, begun + 1), begun + 1, begun + 1)
                left = [name for name in leftovers(inside) if any(mark in name for mark in LEFTOVER)]
                if left:
                    raise Differs(f"the next save leaves {sorted(left)}")
    except Exception as error:
        there = {path: "folder" if data is None else len(data) for path, data in tree.items()}
        raise Differs(f"saves {ended} to {begun}: {there}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(root)


def _check_number(path: Path, at_least: int, at_most: int) -> None:
    trained = model()
    fill(trained, 12345)
    number = fsdp_optim.load(path, trained.model, trained.optim).state["number"]
    check_values(path.name, trained, number)
    if not at_least <= number <= at_most:
        raise Differs(f"{path.name} is save {number}, not {at_least} to {at_most}")


def states(recorded: Recorded, rng: random.Random, at_random: int) -> Iterator[tuple[int, Tree]]:
    """The different states as (number of events before the cut, files)."""
    disk, seen = recorded.disk(), set()
    for position in range(len(recorded.events) + 1):
        if position:
            disk.apply(recorded.events[position - 1])
        for choice in choices(disk, rng, at_random):
            tree = disk.left(choice)
            mark = fingerprint(tree, *recorded.bounds(position))
            if mark not in seen:
                seen.add(mark)
                yield position, tree


def run(torture: Torture) -> None:
    """Play back random ways of saving with cuts at random moments, again and again."""
    torch.set_num_threads(1)
    with temporary() as folder:
        recorded: dict[str, Recorded] = {}
        for number in torture.numbers():
            rng = torture.rng(number)
            name = rng.choice(list(WAYS))
            with torture.case(number, name):
                if name not in recorded:
                    recorded[name] = Recorded.of(WAYS[name], folder / name)
                record = recorded[name]
                position = rng.randint(0, len(record.events))
                disk = record.disk()
                for event in record.events[:position]:
                    disk.apply(event)
                tree = disk.left(at_random_choice(rng))
                torture.figures["power cuts"] += 1
                after = str(record.events[position - 1])[:100] if position else "nothing"
                with torture.case(number, f"{name}, after event {position} of {len(record.events)}, {after}"):
                    probe(record.way, tree, *record.bounds(position), folder / "left", rng.random() < 1 / NEXT_EVERY)
