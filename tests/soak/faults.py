"""Calls of the file system that fail while a checkpoint is saved or loaded, on any rank.

A save raises an error of the library on all ranks, or on none, and does not lose the older checkpoint; the next save works and
leaves no other files. A load raises such an error and changes nothing, or gives the saved values. No descriptor or thread stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import Differs
from kit.groups import Meeting
from kit.optimizers import adam
from kit.trained import Trained

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from soak.failing import OUTCOMES, SHORT, Calls, Fault
from soak.power_cuts import Small
from soak.ranks import LEFTOVER, check_values, fill, path_of, save_by, values
from soak.torture import PATIENCE, Torture, temporary

WAITS = 60.0 * PATIENCE  # seconds that a rank waits for another
WORLD = 2
CASES_OF_RANKS = 12  # in one call of run_on_ranks
RANKS_EVERY = 4  # the number of cases on one process between two calls of run_on_ranks
STARTS = ("there", "there", "aside", "leftover", "nothing")


@dataclasses.dataclass(frozen=True)
class Case:
    """One case: the action, the state of the folder before it, and the fault with its rank."""

    number: int
    action: str
    mode: str
    start: str
    options: tuple[tuple[str, Any], ...]
    fault: Fault
    share: float  # the share of the action's calls before the fault
    victim: int

    @classmethod
    def of(cls, number: int, rng: random.Random, world: int) -> Case:
        action = rng.choice(("save", "save", "save", "async_save", "load", "latest"))
        kind = rng.choice(list(OUTCOMES))
        functions = OUTCOMES[kind]
        functions = functions if rng.random() < 0.4 else (rng.choice(functions),)
        options = rng.choice(({}, {}, {"max_file_size": 1500}, {"strategy": "per_rank_files"}, {"durable": False}))
        mode = rng.choice(("steps", "overwrite", "managed steps"))
        start = rng.choice(STARTS) if action.endswith("save") else rng.choice(STARTS[:3])
        fault = Fault(kind, functions, 0, rng.random() < 0.4)
        return cls(number, action, mode, start, tuple(options.items()), fault, rng.random(), rng.randrange(world))

    def __str__(self) -> str:
        return (
            f"{self.action}, {self.mode}, start: {self.start}, {dict(self.options)}, {self.fault} on rank {self.victim}"
        )


class Subject:
    """A model to save and load, on a single process or on one of several ranks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._meeting = Meeting() if self.ranks > 1 else None
        self.one, self.target = (Trained("plain", adam, 1, Small) for _ in range(2))
        self.totals: dict[Any, int] = {}
        self.first: tuple[int, int] | None = None  # descriptors and threads before the first case that is judged

    def tell(self, what: Any) -> list[Any]:
        """The values of all ranks."""
        return self._meeting.tell(what) if self._meeting is not None else [what]

    def save(self, case: Case, root: Path, number: int, later: bool = False) -> None:
        fill(self.one, number)
        mode = f"async {case.mode}" if later and not case.mode.startswith("managed") else case.mode
        save_by(mode, root, number, self.one, timeout=WAITS, **dict(case.options))

    def load(self, path: Path) -> int:
        """The number of the save in the folder. Raises Differs if its values are of several saves."""
        fill(self.target, 12345)
        number = fsdp_optim.load(
            path, self.target.model, self.target.optim, options=fsdp_optim.LoadOptions(timeout=WAITS)
        ).state["number"]
        check_values(path.name, self.target, number)
        return number

    def begin(self, case: Case, root: Path) -> int:
        """Make the folder of the case. Returns the number of the save in it, 0 without one."""
        if self.rank == 0:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
        self.tell(0)
        if case.start == "nothing":
            return 0
        self.save(case, root, 1)
        if case.start == "aside" and self.rank == 0:  # the state after a kill between two renames
            path = path_of(root, case.mode, 1)
            path.rename(path.with_name(f"{path.name}.old-{'0123456789abcdef'}"))
        if case.start == "leftover" and self.rank == 0:
            folder = root / f"{path_of(root, case.mode, 1).name}.saving-{'fedcba9876543210'}"
            (folder / "extra").mkdir(parents=True)
            (folder / "owner.lock").touch()
            (folder / "model.safetensors").write_bytes(b"half")
        self.tell(0)
        return 1

    def run(self, case: Case) -> tuple[list[str], Counter[str]]:
        """The failures of a case, and its figures."""
        root = self.root / "run"
        figures: Counter[str] = Counter()
        try:
            there = self.begin(case, root)
            nth = int(case.share * self.total(case, root, there))
            fault = dataclasses.replace(case.fault, nth=nth)
            case = dataclasses.replace(case, fault=fault)
            there = self.begin(case, root)
            before = self.resources()
            error, calls = self.act(case, root, there, fault)
            figures["faults"] += 1
            figures["came up"] += any(self.tell(calls.hit))
            figures["raised"] += error is not None
            self.together(lambda: self.judge_error(case, error))
            if case.action.endswith("save"):
                self.judge_saved(root, there, error)
                self.together(lambda: self.save(case, root, there + 2))
                self.judge_next(case, root, there, error)
            self.together(lambda: self.judge_resources(before))
        except AssertionError as error:
            return [f"{case}: {error}"], figures
        return [], figures

    def together(self, call: Callable[[], Any]) -> None:
        """Run a step on all ranks. Raises Differs on all of them if the step fails on one."""
        text = None
        try:
            call()
        except Exception as error:
            expected = isinstance(error, AssertionError)
            text = str(error) if expected else f"{type(error).__name__}: {error}\n{_where(error)}"
        wrong = {rank: said for rank, said in enumerate(self.tell(text)) if said is not None}
        if wrong:
            raise Differs("; ".join(f"rank {rank}: {said}" for rank, said in wrong.items()))

    def judge_resources(self, before: tuple[int, int]) -> None:
        """Raise if anything is left open. The driver of the torture may have closed files of its own meanwhile.

        A connection on which a call still waits, in a thread of its own, comes and goes with the waits of the ranks; there is
        one at most, over all cases.
        """
        descriptors, threads = self.resources()
        self.first = self.first or before
        most = self.first[1] + 1 if self.ranks > 1 else before[1]
        if descriptors > before[0] or threads > most:
            raise Differs(f"(descriptors, threads): {descriptors, threads}, not {before}, {most} threads at most")

    def resources(self) -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def total(self, case: Case, root: Path, there: int) -> int:
        """The number of calls of the action that can fail, on the rank of the fault."""
        key = (case.action, case.mode, case.start, case.options, case.fault.functions, case.victim)
        if key not in self.totals:
            error, calls = self.act(case, root, there, dataclasses.replace(case.fault, nth=1 << 60))
            self.together(lambda: _check("without a fault", error, [None]))
            self.totals[key] = max(self.tell(calls.count))
        return self.totals[key]

    def act(self, case: Case, root: Path, there: int, fault: Fault) -> tuple[Exception | None, Calls]:
        calls = Calls(root, fault)
        actions: dict[str, Callable[[], Any]] = {
            "save": lambda: self.save(case, root, there + 1),
            "async_save": lambda: self.save(case, root, there + 1, later=True),
            "load": lambda: self.load(path_of(root, case.mode, 1)),
            "latest": lambda: fsdp_optim.latest(root),
        }
        fill(self.target, 12345)
        try:
            with calls.entered() if self.rank == case.victim else contextlib.nullcontext():
                actions[case.action]()
        except Exception as error:
            return error, calls
        return None, calls

    def judge_error(self, case: Case, error: Exception | None) -> None:
        errors = self.tell(None if error is None else (type(error).__name__, str(error)))
        if error is not None and not isinstance(error, fsdp_optim.FsdpOptimError):
            raise Differs(f"a raw {type(error).__name__}: {error}\n{_where(error)}") from error
        cut_off = (
            case.action == "async_save" and case.fault.lasts
        )  # a rank that cannot write its note any more raises its own error
        if case.action != "latest" and not cut_off:
            _check("what ranks raise", len(set(errors)), [1])
        if case.fault.number == SHORT and error is not None:
            raise Differs(f"a call that does a part of its work is no error: {error}")
        if error is not None and not case.action.endswith("save"):
            untouched = {"param": [12345.0], "exp_avg": [12345.5], "exp_avg_sq": [12345.25], "step": [12345.0]}
            _check(f"refused ({error}), but what there was before", values(self.target), [untouched])

    def judge_saved(self, root: Path, there: int, error: Exception | None) -> None:
        """Check that the folder has the older checkpoint or the new one."""
        newest = self.tell(fsdp_optim.latest(root))
        if None in newest:
            names = sorted(os.listdir(root))
            if there or error is None:
                raise Differs(f"no checkpoint is left of {names}, after {error!r}")
            return
        numbers: list[int] = []
        self.together(lambda: numbers.append(self.load(newest[0])))
        _check(
            f"the save that is there after {error!r}", numbers[0], [there + 1] if error is None else [there, there + 1]
        )

    def judge_next(self, case: Case, root: Path, there: int, error: Exception | None) -> None:
        newest = self.tell(fsdp_optim.latest(root))
        numbers: list[int] = []
        self.together(lambda: numbers.append(self.load(newest[0])))
        _check(f"the next save after {error!r}", numbers[0], [there + 2])
        marks = [
            mark for mark in LEFTOVER if mark != ".old-" or case.mode == "overwrite"
        ]  # otherwise this is the only copy of the checkpoint
        left = [name for name in os.listdir(root) if any(mark in name for mark in marks)]
        self.together(lambda: _check(f"left by the next save after {error!r}", left, [[]]))


def _check(what: str, got: Any, allowed: list[Any]) -> None:
    if got not in allowed:
        where = _where(got) if isinstance(got, Exception) else ""
        raise Differs(f"{what}: {got!r}, not {' or '.join(map(repr, allowed))} {where}")


def _where(error: BaseException) -> str:
    """The last lines of the traceback of an error."""
    frames = traceback.extract_tb(error.__traceback__)[-7:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))


def on_ranks(root: Path, cases: list[Case]) -> list[tuple[int, list[str], Counter[str]]]:
    """Run some cases. Called on each rank."""
    torch.set_num_threads(1)
    subject = Subject(root)
    return [(case.number, *subject.run(case)) for case in cases]


def run(torture: Torture) -> None:
    """Run cases on one process, and cases on ranks."""
    torch.set_num_threads(1)
    with temporary() as folder:
        alone = Subject(folder / "alone")
        together: list[Case] = []
        for number in torture.numbers():
            rng = torture.rng(number)
            if rng.random() < 1 / RANKS_EVERY:
                together.append(Case.of(number, rng, WORLD))
            else:
                with torture.case(number):
                    _note(torture, number, *alone.run(Case.of(number, rng, 1)))
            if len(together) >= CASES_OF_RANKS:
                _together(torture, folder, together)
        _together(torture, folder, together)


def _together(torture: Torture, folder: Path, cases: list[Case]) -> None:
    if not cases:
        return
    with torture.case(cases[0].number, f"{len(cases)} cases on ranks"):
        by_rank = run_on_ranks(on_ranks, WORLD, folder / "ranks", cases, timeout=(120.0 + 30.0 * len(cases)) * PATIENCE)
        for (number, wrong, figures), *others in zip(*by_rank, strict=True):
            text = [line for _, lines, _ in others for line in lines]
            _note(torture, number, list(dict.fromkeys([*wrong, *text])), figures)
    cases.clear()


def _note(torture: Torture, number: int, wrong: list[str], figures: Counter[str]) -> None:
    torture.figures.update(figures)
    for text in wrong:
        torture.fail(number, text)
