"""kill -9 in the middle of a save: what `latest` gives is always a complete checkpoint, and the next save tidies up.

The processes that are killed are those of tests/soak/ranks.py. `make soak` kills many more, at moments that are never the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.compare import Differs, check_same
from soak.ranks import KEPT, LIMIT, WORLD, Ranks, check_root, fill, leftovers, plain, read_notes, told, wait_for

import fsdp_optim

SEED = 20251121
MODES = ("managed steps", "steps", "overwrite")
MOMENTS, FEW_MOMENTS = 20, 3  # the few: one for each mode
ONE_DIES = (1, 6, 12, 17)  # of the moments; otherwise all die
PATIENCE = 15.0  # seconds that a rank waits for one that is dead
SHORT_PATIENCE = 15.0  # the same, where ranks begin to save together
AT_ONCE = 14  # pairs of ranks
PAIR = {"mode": "overwrite", "count": 1, "wrapper": "FSDP1 flat"}  # which steps much faster than FSDP2 does


class KillTest(unittest.TestCase):
    ranks: Ranks
    folder: Path

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fsdp_optim_kill_")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.ranks = Ranks(cls.folder)
        cls.addClassCleanup(cls.ranks.close)

    def setUp(self) -> None:
        self.root = self.folder / self.id().split(".")[-1]

    @pytest.mark.slow  # tests/faults/test_soak.py kills at a few random moments in `make test-all`
    def test_at_random_moments(self) -> None:
        self.die_and_live_on(FEW_MOMENTS)

    @pytest.mark.slow
    def test_at_many_random_moments(self) -> None:
        self.die_and_live_on(MOMENTS)

    def die_and_live_on(self, moments: int) -> None:
        """Three ways of saving in turn, each in a folder of its own, in which life continues after each death."""
        rng = random.Random(SEED)
        newest, lasts = {}, {}
        for mode in MODES:
            (self.root / mode).mkdir(parents=True)
            notes = self.ranks.run(root=str(self.root / mode), mode=mode, first=1, count=4)
            times = {(what, number): at for rank, what, number, at in notes if rank == 0}
            lasts[mode] = statistics.median(times["end", n] - times["begin", n] for n in range(1, 5))
            newest[mode] = check_root(self.root / mode, 4, 4)
        were_left: dict[str, set[str]] = {mode: set() for mode in MODES}
        in_the_middle = 0
        for moment in range(moments):
            mode = MODES[moment % len(MODES)]
            root = self.root / mode
            victims = [rng.randrange(WORLD)] if moment in ONE_DIES else list(range(WORLD))
            with told(f"moment {moment}, {mode}, ranks {victims} died", root):
                ended, begun = self.die(root, mode, newest[mode] + 1, victims, rng.uniform(0.0, 1.0) * lasts[mode], rng)
                in_the_middle += begun > ended
                newest[mode] = check_root(root, ended, begun)
                check_same("what had been left before", sorted(leftovers(root) & were_left[mode]), [])
                were_left[mode] = leftovers(root)
        print(f"{in_the_middle} of {moments} in the middle of a save; left were {were_left}")
        for mode, first in newest.items():
            root = self.root / mode
            with told(f"{mode}, at the end", root):
                self.ranks.run(root=str(root), mode=mode, first=first + 1, count=1)
                check_same("save", check_root(root, first + 1, first + 1), first + 1)
                check_same("left", sorted(leftovers(root)), [])
                count = len([path for path in root.iterdir() if path.is_dir()])
                if mode != "steps":
                    check_same("checkpoints", count, 1 if mode == "overwrite" else KEPT)
        if in_the_middle < moments // 2:
            raise Differs(f"only {in_the_middle} of {moments} ranks died in the middle of a save")

    def die(
        self, root: Path, mode: str, first: int, victims: Sequence[int], delay: float, rng: random.Random
    ) -> tuple[int, int]:
        """The ranks save until some are killed. The last save that had ended for all, and the last that any had begun."""
        patience = PATIENCE if len(victims) < WORLD else LIMIT
        pids, notes = self.ranks.start(root=str(root), mode=mode, first=first, patience=patience)
        nothing = []

        def look() -> None:
            if fsdp_optim.latest(root) is None:
                nothing.append(sorted(path.name for path in root.iterdir()))

        try:
            wait_for(notes, rng.randrange(WORLD), "begin", first + rng.randrange(1, 4), look)
            time.sleep(delay)
        finally:
            for rank in victims:
                os.kill(pids[rank], signal.SIGKILL)
            codes = self.ranks.collect(pids, PATIENCE + 20.0)
        noted = read_notes(notes)
        wanted = [-signal.SIGKILL if rank in victims else 3 for rank in range(WORLD)]  # 3: with an error of the library
        check_same(f"exit codes, {[line for line in noted if line[2] == -1]}", codes, wanted)
        check_same("times without a latest checkpoint", nothing[:1], [])
        ended = max((number for rank, what, number, _ in noted if what == "end"), default=first - 1)
        return ended, max(number for _, what, number, _ in noted if what == "begin")

    @pytest.mark.slow
    def test_before_kinds_of_calls(self) -> None:
        self.die_alone(few=True)

    @pytest.mark.slow
    def test_before_every_kind_of_call(self) -> None:
        self.die_alone(few=False)

    def die_alone(self, few: bool) -> None:
        """One process that saves over its last checkpoint dies before the nth call that changes files."""
        pristine, calls = self.root / "pristine", self.root / "calls"
        pristine.mkdir(parents=True)
        order = {"mode": "overwrite", "ranks": 1, "count": 1}
        self.ranks.run(root=str(pristine), first=1, **order)
        dry = Path(shutil.copytree(pristine, self.root / "dry"))
        self.ranks.run(root=str(dry), first=2, calls=str(calls), **order)
        check_same("saved", check_root(dry, 2, 2), 2)
        names = json.loads(Path(f"{calls}-0").read_text())
        self.assertGreater(len(names), 5, names)
        seen = set()
        for nth in chosen(names, few=few):
            root = Path(shutil.copytree(pristine, self.root / f"{nth}"))
            with self.subTest(f"before call {nth} of {len(names)}, {names[nth]}, call before: {names[nth - 1 : nth]}"):
                pids, notes = self.ranks.start(root=str(root), first=2, calls=str(calls), kill_at=nth, **order)
                check_same(f"exit code, {read_notes(notes)}", self.ranks.collect(pids), [-signal.SIGKILL])
                seen.add(check_root(root, 1, 2))
                self.ranks.run(root=str(root), first=3, **order)
                check_same("the next save", check_root(root, 3, 3), 3)
                check_same("left", sorted(path.name for path in root.iterdir()), ["current"])
            shutil.rmtree(root)
        check_same("deaths before the new one stood and after", seen, {1, 2})

    def test_before_kinds_of_calls_of_either_rank(self) -> None:
        self.die_beside_another(few=True)

    @pytest.mark.slow
    def test_before_every_kind_of_call_of_either_rank(self) -> None:
        self.die_beside_another(few=False)

    def die_beside_another(self, few: bool) -> None:
        """One of two ranks that save over their last checkpoint dies before its nth call; the other raises and names it.

        Most of the time is waiting for the dead, so several pairs wait at once.
        """
        pristine = self.root / "pristine"
        pristine.mkdir(parents=True)
        self.ranks.run(root=str(pristine), first=1, **PAIR)
        seen = self.seen_when(pristine, self.deaths(pristine, "in_place", range(WORLD), few))
        check_same("deaths before the new one stood and after", seen, {0: {1, 2}, 1: {1}})

    @pytest.mark.slow
    def test_before_every_kind_of_call_with_files_of_its_own(self) -> None:
        """The second of two ranks, which write a file each; the lowest rank makes the same calls as with one file."""
        pristine = self.root / "pristine"
        pristine.mkdir(parents=True)
        self.ranks.run(root=str(pristine), first=1, **PAIR)
        seen = self.seen_when(pristine, self.deaths(pristine, "per_rank_files", [1]))
        check_same("deaths before the new one stood and after", seen, {0: set(), 1: {1}})

    def seen_when(self, pristine: Path, deaths: Sequence[Death]) -> dict[int, set[int]]:
        """By victim: the numbers of the checkpoints that were there after its deaths."""
        seen: dict[int, set[int]] = {rank: set() for rank in range(WORLD)}
        for first in range(0, len(deaths), AT_ONCE):
            started = [(death, *self.start_one_that_dies(death, pristine)) for death in deaths[first : first + AT_ONCE]]
            end = time.monotonic() + SHORT_PATIENCE + 20.0
            for death, pids, notes in started:
                with self.subTest(str(death)):
                    codes = self.ranks.collect(pids, max(end - time.monotonic(), 0.1))
                    seen[death.victim].add(self.check_death(death, codes, read_notes(notes)))
        return seen

    def deaths(self, pristine: Path, strategy: str, victims: Sequence[int], few: bool = False) -> list[Death]:
        """From the calls of a save in which nobody dies."""
        dry, calls = self.root / f"dry-{strategy}", self.root / f"calls-{strategy}"
        shutil.copytree(pristine, dry)
        options = {"strategy": strategy}
        self.ranks.run(root=str(dry), first=2, calls=str(calls), options=options, **PAIR)
        check_same("saved", check_root(dry, 2, 2), 2)
        planned = []
        for victim in victims:
            names = json.loads(Path(f"{calls}-{victim}").read_text())
            self.assertLess({"open", "fsync"}, set(names))
            places = chosen(names, most_of_moves=1 if victim else 3, few=few)
            planned += [
                Death(victim, strategy, nth, len(names), tuple(names[max(nth - 1, 0) : nth + 1])) for nth in places
            ]
        return planned

    def start_one_that_dies(self, death: Death, pristine: Path) -> tuple[list[int], Path]:
        shutil.copytree(pristine, self.root / death.folder)
        return self.ranks.start(
            root=str(self.root / death.folder),
            first=2,
            calls=str(self.root / f"{death.folder}-calls"),
            kill_at=death.nth,
            victim=death.victim,
            patience=SHORT_PATIENCE,
            options={"strategy": death.strategy},
            **PAIR,
        )

    def check_death(self, death: Death, codes: Sequence[int | None], noted: Sequence[Sequence[Any]]) -> int:
        """The number of the checkpoint that was there then: the old one, or the new one."""
        root, other = self.root / death.folder, 1 - death.victim
        check_same(f"exit codes, {noted}", codes, [-signal.SIGKILL if r == death.victim else 3 for r in range(WORLD)])
        [error] = [what for rank, what, number, _ in noted if (rank, number) == (other, -1)]
        if f"rank {death.victim}" not in error:
            raise Differs(f"rank {other} does not name the rank that died: {error}")
        number = check_root(root, 1, 2)
        fill(plain(), 3)
        fsdp_optim.save(root / "current", plain().model, plain().optim, state={"number": 3}, overwrite=True)
        check_same("the next save", check_root(root, 3, 3), 3)
        check_same("left", sorted(path.name for path in root.iterdir()), ["current"])
        shutil.rmtree(root)
        return number


@dataclasses.dataclass(frozen=True)
class Death:
    """Where one rank dies: before its `nth` call of `number`; `around`: the names of the call before and of that one."""

    victim: int
    strategy: str
    nth: int
    number: int
    around: tuple[str, ...]

    @property
    def folder(self) -> str:
        return f"{self.strategy}-{self.victim}-{self.nth}"


def chosen(names: Sequence[str], most_of_moves: int = 3, few: bool = False) -> list[int]:
    """The first, middle and last call of each kind; all of those that move things; the very last. `few`: a fifth of these."""
    indices = {len(names) - 1}
    for kind in set(names):
        places = [place for place, name in enumerate(names) if name == kind]
        indices |= {places[0], places[len(places) // 2], places[-1]}
        if kind in ("rename", "replace", "rmdir", "flock"):
            indices |= set(places[:most_of_moves] + places[-most_of_moves:])
    return sorted({*sorted(indices)[::5], len(names) - 1}) if few else sorted(indices)
