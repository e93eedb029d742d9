"""SIGKILL of ranks that save again and again, at random moments and before random calls that change files.

Afterwards `latest` is a complete checkpoint, that of the last save that had ended or of a later one; the surviving ranks raise an
error of the library; and the next save works and leaves no other files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_same

from soak.ranks import (
    KEPT,
    LIMIT,
    MODES,
    WORLD,
    Ranks,
    check_root,
    fill,
    leftovers,
    plain,
    read_notes,
    save_by,
    told,
    wait_for,
)
from soak.torture import PATIENCE, Torture, temporary

WAITS = 2.0 * PATIENCE  # seconds that a rank waits for a dead one
HUNG = 2 * WAITS + 25.0 * PATIENCE  # seconds after which a rank that waits for a dead one counts as hung
AT_ONCE = 10  # cases in which ranks wait for dead ones
WRAPPERS = ("plain", "plain", "plain", "FSDP1 flat", "FSDP2")
MOST_CALLS = 220  # of several saves


@dataclasses.dataclass
class Death:
    """The victims, and the moment of death: before the nth call, or a number of seconds after the first save begins."""

    victims: Sequence[int]
    nth: int | None
    delay: float


@dataclasses.dataclass
class Case:
    """A folder in which ranks save and die, several times in a row."""

    number: int
    root: Path
    mode: str
    ranks: int
    order: dict[str, Any]
    deaths: list[Death]
    newest: int = 1
    seen: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, number: int, rng: random.Random, root: Path) -> Case:
        ranks = rng.choice((1, 1, WORLD))
        options: dict[str, Any] = {"strategy": rng.choice(("in_place", "per_rank_files"))}
        options |= rng.choice(({}, {}, {"max_file_size": 20_000}, {"durable": False}, {"checksums": False}))
        order = {"ranks": ranks, "options": options}
        if ranks > 1:
            order["wrapper"] = rng.choice(WRAPPERS)
        deaths = []
        for _ in range(rng.choice((1, 2, 3)) if ranks == 1 else 1):
            victims = list(range(ranks)) if ranks == 1 or rng.random() < 0.5 else [rng.randrange(ranks)]
            nth = rng.randrange(MOST_CALLS) if rng.random() < 0.5 else None
            deaths.append(Death(victims, nth, rng.uniform(0.0, 0.12)))
        return cls(number, root / f"{number}", rng.choice(MODES), ranks, order, deaths)

    @property
    def what(self) -> str:
        return f"{self.mode}, {self.order}, {self.deaths}"


class Kills:
    """Starts cases and ends them. Cases in which a rank waits for a dead one are ended together, some time later."""

    def __init__(self, torture: Torture, folder: Path) -> None:
        self._torture, self._folder = torture, folder
        self.ranks = Ranks(folder)
        self._waiting: list[tuple[Case, Death, list[int], Path, float]] = []
        self._pristine: dict[str, Path] = {}

    def try_one(self, case: Case) -> None:
        shutil.copytree(self._begun(case.mode), case.root)
        with self._judged(case):
            for death in case.deaths:
                pids, notes = self._kill(case, death)
                if len(death.victims) < case.ranks:
                    self._waiting.append((case, death, pids, notes, time.monotonic() + HUNG))
                    break
                self._end(case, death, self.ranks.collect(pids), notes)
            else:
                self._save_after(case)
        if len(self._waiting) >= AT_ONCE:
            self.end_waiting()

    def end_waiting(self) -> None:
        """Collect the ranks that waited for dead ranks."""
        for case, death, pids, notes, end in self._waiting:
            with self._judged(case):
                codes = self.ranks.collect(pids, max(end - time.monotonic(), 0.1))
                self._end(case, death, codes, notes)
                self._save_after(case)
        self._waiting.clear()

    @contextlib.contextmanager
    def _judged(self, case: Case) -> Any:
        before = len(self._torture.failures)
        with self._torture.case(case.number), told(case.what, case.root):
            yield
        if len(self._torture.failures) > before or not any(case is waiting for waiting, *_ in self._waiting):
            shutil.rmtree(case.root, ignore_errors=True)

    def _begun(self, mode: str) -> Path:
        """A folder with one checkpoint, save 1. Cases begin with a copy of this folder."""
        kind = mode.removeprefix("async ")
        if kind not in self._pristine:
            self._pristine[kind] = self._folder / f"pristine {kind}"
            self._save(self._pristine[kind], kind, 1)
        return self._pristine[kind]

    def _save(self, root: Path, mode: str, number: int) -> None:
        fill(plain(), number)
        save_by(mode, root, number, plain())

    def _kill(self, case: Case, death: Death) -> tuple[list[int], Path]:
        """Let the ranks save until the victims are dead."""
        alone = len(death.victims) < case.ranks
        calls = {"calls": str(self._folder / "calls"), "kill_at": death.nth} if death.nth is not None else {}
        if death.nth is not None and alone:
            calls["victim"] = death.victims[0]
        pids, notes = self.ranks.start(
            root=str(case.root),
            mode=case.mode,
            first=case.newest + 1,
            patience=WAITS if alone else LIMIT,
            **case.order,
            **calls,
        )
        if death.nth is None:
            try:
                wait_for(notes, death.victims[0], "begin", case.newest + 1)
                time.sleep(death.delay)
            finally:
                for rank in death.victims:
                    os.kill(pids[rank], signal.SIGKILL)
        elif alone:  # a rank to which no elements fall makes few such calls, or none
            self._wait_for_a_death(pids, WAITS)
            for rank in death.victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[rank], signal.SIGKILL)
        elif case.ranks > 1:  # the first rank to reach its nth call kills the others too
            self._wait_for_a_death(pids)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return pids, notes

    def _wait_for_a_death(self, pids: Sequence[int], seconds: float = HUNG) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not any(_is_dead(pid) for pid in pids):
            time.sleep(0.002)

    def _end(self, case: Case, death: Death, codes: Sequence[int | None], notes: Path) -> None:
        self._torture.figures["kills"] += len(death.victims)
        self._torture.figures["before a call" if death.nth is not None else "at a moment"] += len(death.victims)
        noted = read_notes(notes)
        notes.unlink()
        wanted = [-signal.SIGKILL if rank in death.victims else 3 for rank in range(case.ranks)]
        check_same(f"exit codes, {[line for line in noted if line[2] == -1]}", list(codes), wanted)
        ended = max((number for _, what, number, _ in noted if what == "end"), default=case.newest)
        begun = max((number for _, what, number, _ in noted if what == "begin"), default=case.newest)
        self._torture.figures["in the middle of a save"] += len(death.victims) if begun > ended else 0
        case.newest = check_root(case.root, ended, begun)

    def _save_after(self, case: Case) -> None:
        """Check the folder, and let the ranks save again."""
        self._save(case.root, case.mode, case.newest + 1)
        check_same("the next save", check_root(case.root, case.newest + 1, case.newest + 1), case.newest + 1)
        check_same("left", sorted(leftovers(case.root)), [])
        expected = {"overwrite": 1, "async overwrite": 1, "managed steps": KEPT}.get(case.mode, case.newest + 1)
        check_same("checkpoints", len(list(case.root.iterdir())), expected)


def _is_dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def run(torture: Torture) -> None:
    """Start ranks, kill them, and check the folder."""
    torch.set_num_threads(1)
    with temporary() as folder:
        kills = Kills(torture, folder)
        try:
            for number in torture.numbers():
                kills.try_one(Case.of(number, torture.rng(number), folder))
            kills.end_waiting()
        finally:
            kills.ranks.close()
