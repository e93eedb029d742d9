"""kill -9 in the middle of a save: what `latest` gives is always a complete checkpoint, and the next save tidies up.

The processes that are killed are forked from one process that has imported torch already and runs nothing else: this
file, as a script. All values of a save are one number, so that a mixture of two saves would be seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from checkpoint_format import MARKER, check_folder
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from wrapping import Differs, Trained, adam, check_same, local_of

import fsdp_optim

WORLD = 2
MOMENTS = 20
ONE_DIES = (1, 6, 12, 17)  # of the moments; otherwise all die
PATIENCE = 3.0  # seconds that a rank waits for one that is dead
SHORT_PATIENCE = 3.0  # the same, where ranks begin to save together
AT_ONCE = 14  # pairs of ranks
LIMIT = 60.0  # seconds; what takes them has hung
PAIR = {"mode": "overwrite", "count": 1, "wrapper": "FSDP1 flat"}  # which steps much faster than FSDP2 does
LEFTOVER = (".saving-", ".old-", ".new-", ".gone-")


class Layers(nn.Module):
    """Some 100 KB, uneven."""

    units = ("first", "second", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(127, 67)
        self.second = nn.Linear(67, 33)
        self.last = nn.Linear(33, 1)


def fill(one: Trained, number: int) -> None:
    """All values become those of one save."""
    with torch.no_grad():
        for param in one.params:
            local_of(param).fill_(number)
            state = one.optim.state[param]
            for name, more in (("exp_avg", 0.5), ("exp_avg_sq", 0.25), ("step", 0.0)):
                local_of(state[name]).fill_(number + more)


def values(one: Trained) -> dict[str, list[float]]:
    """All the different values that there are, by what they are."""
    found = {"param": {float(v) for param in one.params for v in local_of(param).detach().unique()}}
    for name in ("exp_avg", "exp_avg_sq", "step"):
        found[name] = {float(v) for param in one.params for v in local_of(one.optim.state[param][name]).unique()}
    return {name: sorted(some) for name, some in found.items()}


# ------------------------------------------------------------------------------------------- the processes that die

STEPS: dict[str, dict[str, Any]] = {
    "steps": {"keep_last": 2},
    "async steps": {"keep_last": 2},
    "overwrite": {"overwrite": True},
}
SYSTEM_CALLS = ("open", "mkdir", "write", "writev", "pwrite", "pwritev", "truncate", "ftruncate", "posix_fallocate")
SYSTEM_CALLS += ("fsync", "fdatasync", "rename", "replace", "link", "symlink", "unlink", "remove", "rmdir")


def note(order: dict[str, Any], rank: int, what: str, number: int) -> None:
    """One line for the process that watches."""
    line = json.dumps([rank, what, number, time.monotonic()]) + "\n"
    handle = os.open(order["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, line.encode())
    os.close(handle)


def save_again_and_again(order: dict[str, Any], rank: int) -> None:
    """The life of one rank."""
    root, mode = Path(order["root"]), order["mode"]
    wrapper = "plain"
    if order["ranks"] > 1:
        store = PrefixStore(
            order["notes"], TCPStore("127.0.0.1", order["port"], is_master=False, wait_for_workers=False)
        )
        limit = timedelta(seconds=LIMIT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=order["ranks"], timeout=limit)
        wrapper = order.get("wrapper", "FSDP2")
    one = Trained(wrapper, adam, 1, Layers)
    one.forget_gradients()
    for number in range(order["first"], order["first"] + order["count"]):
        fill(one, number)
        note(order, rank, "begin", number)
        path = root / ("current" if mode == "overwrite" else f"step-{number:06}")
        save: Any = fsdp_optim.async_save if mode == "async steps" else fsdp_optim.save
        options = {"timeout": order["patience"], **STEPS[mode], **order.get("options", {})}
        calls = order.get("calls")
        if calls is not None and order["ranks"] > 1:
            dist.barrier()  # a rank that starts late is not taken for a dead one
        kill_at = order.get("kill_at") if rank == order.get("victim", rank) else None
        with killed_at(kill_at, f"{calls}-{rank}" if calls is not None else None):
            done = save(path, one.model, one.optim, extra={"number": number}, **options)
        if mode == "async steps":
            done.wait(LIMIT)
        note(order, rank, "end", number)


@contextlib.contextmanager
def killed_at(nth: int | None, calls: str | None) -> Iterator[None]:
    """This process dies before the nth of the calls that change files. `calls`: a file for their names."""
    if calls is None:
        yield
        return
    names: list[str] = []

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(names) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            names.append(name)
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in [*((os, name) for name in SYSTEM_CALLS if hasattr(os, name)), (fcntl, "flock")]:
            stack.enter_context(mock.patch.object(owner, name, around(name, getattr(owner, name))))
        yield
    Path(calls).write_text(json.dumps(names))


def serve() -> None:
    """Fork ranks and collect them, as the lines of the input say."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    plain()  # an optimizer's first step imports much; the children have it then
    if len(os.listdir("/proc/self/task")) != 1:
        raise AssertionError("a process with several threads does not fork well")
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = _forked(order) if "root" in order else _collected(order["pids"], order["limit"])
        print(json.dumps(answer), flush=True)


def _forked(order: dict[str, Any]) -> list[int]:
    pids = []
    for rank in range(order["ranks"]):
        pids.append(os.fork())
        if pids[-1] == 0:
            _live(order, rank)
    return pids


def _live(order: dict[str, Any], rank: int) -> None:
    """In the child; does not return."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        save_again_and_again(order, rank)
        os._exit(0)
    except fsdp_optim.FsdpOptimError as error:
        note(order, rank, f"{type(error).__name__}: {error}", -1)
        os._exit(3)
    except BaseException:
        note(order, rank, traceback.format_exc(), -1)
        os._exit(4)


def _collected(pids: Sequence[int], limit: float) -> list[int | None]:
    """How each ended, as in subprocess; None where it had to be killed."""
    end, found = time.monotonic() + limit, []
    for pid in pids:
        status = os.waitpid(pid, os.WNOHANG)
        while status[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
            status = os.waitpid(pid, os.WNOHANG)
        if status[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        found.append(os.waitstatus_to_exitcode(status[1]) if status[0] else None)
    return found


# ------------------------------------------------------------------------------------------- the process that watches


class Ranks:
    """The forking process, and what its children have noted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._trials = 0
        self._log = open(folder / "log", "wb")  # noqa: SIM115
        command = [sys.executable, __file__]
        where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
        where |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, env=where)
        self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            stream.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the forking process has ended:\n{(self._folder / 'log').read_text()[-3000:]}")
        return line

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def start(self, **order: Any) -> tuple[list[int], Path]:
        """The process ids by rank, and the file of their notes."""
        self._trials += 1
        notes = self._folder / f"notes-{self._trials}"
        notes.touch()
        defaults = {"ranks": WORLD, "count": 10_000, "patience": LIMIT}
        pids = self._ask({**defaults, "port": self._store.port, "notes": str(notes), **order})
        return pids, notes

    def collect(self, pids: Sequence[int], limit: float = LIMIT) -> list[int | None]:
        return self._ask({"pids": list(pids), "limit": limit})

    def run(self, **order: Any) -> list[list[Any]]:
        """To the end, which has to be a good one. The notes."""
        pids, notes = self.start(**order)
        codes = self.collect(pids)
        found = read_notes(notes)
        check_same(f"exit codes, {found[-3:]}", codes, [0] * len(pids))
        return found


def read_notes(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for(path: Path, rank: int, what: str, number: int, meanwhile: Callable[[], None]) -> None:
    """Until a rank has noted that."""
    end = time.monotonic() + LIMIT
    while True:
        meanwhile()
        notes = read_notes(path)
        if any(line[:3] == [rank, what, number] for line in notes):
            return
        if time.monotonic() > end or any(number == -1 for _, _, number, _ in notes):
            raise AssertionError(f"rank {rank} did not {what} {number}: {notes[-4:]}")
        time.sleep(0.002)


@functools.cache
def plain() -> Trained:
    return Trained("plain", adam, 1, Layers)


def check_loads(folder: Path) -> int:
    """Raise unless this is a complete checkpoint of one save. Its number."""
    check_folder(folder)
    target = plain()
    fill(target, 12345)
    number = fsdp_optim.load(folder, target.model, target.optim)["number"]
    wanted = {"param": 0.0, "exp_avg": 0.5, "exp_avg_sq": 0.25, "step": 0.0}
    check_same(
        f"{folder.name}, save {number}", values(target), {name: [number + more] for name, more in wanted.items()}
    )
    return number


def check_root(root: Path, at_least: int, at_most: int) -> int:
    """Raise unless the latest checkpoint is complete, and all others too. The number of the latest one."""
    names = sorted(path.name for path in root.iterdir())
    newest = fsdp_optim.latest(root)
    if newest is None:
        raise Differs(f"no checkpoint in {names}, but save {at_least} had ended")
    number = check_loads(newest)
    if not at_least <= number <= at_most:
        raise Differs(f"{newest.name} of {names} is save {number}: {at_least} had ended, {at_most} was not over")
    for name in set(names) - leftovers(root):
        check_loads(root / name)
    return number


def leftovers(root: Path) -> set[str]:
    """What is no checkpoint: by its name, or because it has no marker."""
    names = {path.name for path in root.iterdir() if any(word in path.name for word in LEFTOVER)}
    return names | {path.name for path in root.iterdir() if not (path / MARKER).exists()}


@contextlib.contextmanager
def told(what: str, root: Path) -> Iterator[None]:
    """An error says where it came up. Later deaths in the same folder would tell nothing new."""
    try:
        yield
    except Exception as error:
        raise Differs(f"{what}, then there were {sorted(path.name for path in root.iterdir())}: {error}") from error


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

    def test_at_random_moments(self) -> None:
        """Three ways of saving in turn, each in a folder of its own, in which life goes on after each death."""
        seed = random.SystemRandom().getrandbits(32)
        print(f"seed {seed}")
        rng = random.Random(seed)
        newest, lasts = {}, {}
        for mode in STEPS:
            (self.root / mode).mkdir(parents=True)
            notes = self.ranks.run(root=str(self.root / mode), mode=mode, first=1, count=4)
            times = {(what, number): at for rank, what, number, at in notes if rank == 0}
            lasts[mode] = statistics.median(times["end", n] - times["begin", n] for n in range(1, 5))
            newest[mode] = check_root(self.root / mode, 4, 4)
        were_left: dict[str, set[str]] = {mode: set() for mode in STEPS}
        in_the_middle = 0
        for moment in range(MOMENTS):
            mode = list(STEPS)[moment % len(STEPS)]
            root = self.root / mode
            victims = [rng.randrange(WORLD)] if moment in ONE_DIES else list(range(WORLD))
            with told(f"seed {seed}, moment {moment}, {mode}, ranks {victims} died", root):
                ended, begun = self.die(root, mode, newest[mode] + 1, victims, rng.uniform(0.0, 1.0) * lasts[mode], rng)
                in_the_middle += begun > ended
                newest[mode] = check_root(root, ended, begun)
                check_same("what had been left before", sorted(leftovers(root) & were_left[mode]), [])
                were_left[mode] = leftovers(root)
        print(f"{in_the_middle} of {MOMENTS} in the middle of a save; left were {were_left}")
        for mode, first in newest.items():
            root = self.root / mode
            with told(f"seed {seed}, {mode}, at the end", root):
                self.ranks.run(root=str(root), mode=mode, first=first + 1, count=1)
                check_same("save", check_root(root, first + 1, first + 1), first + 1)
                check_same("left", sorted(leftovers(root)), [])
                count = len([path for path in root.iterdir() if path.is_dir()])
                check_same("checkpoints", count, 1 if mode == "overwrite" else 2)
        if in_the_middle < MOMENTS // 2:
            raise Differs(f"only {in_the_middle} of {MOMENTS} ranks died in the middle of a save")

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
        found = read_notes(notes)
        wanted = [-signal.SIGKILL if rank in victims else 3 for rank in range(WORLD)]  # 3: with an error of the library
        check_same(f"exit codes, {[line for line in found if line[2] == -1]}", codes, wanted)
        check_same("times without a latest checkpoint", nothing[:1], [])
        ended = max((number for rank, what, number, _ in found if what == "end"), default=first - 1)
        return ended, max(number for _, what, number, _ in found if what == "begin")

    def test_before_every_kind_of_call(self) -> None:
        """One process that saves over its last checkpoint dies before the nth call that changes files."""
        pristine, calls = self.root / "pristine", self.root / "calls"
        pristine.mkdir(parents=True)
        one = {"mode": "overwrite", "ranks": 1, "count": 1}
        self.ranks.run(root=str(pristine), first=1, **one)
        dry = Path(shutil.copytree(pristine, self.root / "dry"))
        self.ranks.run(root=str(dry), first=2, calls=str(calls), **one)
        check_same("saved", check_root(dry, 2, 2), 2)
        names = json.loads(Path(f"{calls}-0").read_text())
        self.assertGreater(len(names), 5, names)
        seen = set()
        for nth in chosen(names):
            root = Path(shutil.copytree(pristine, self.root / f"{nth}"))
            with self.subTest(f"before call {nth} of {len(names)}, {names[nth]}, call before: {names[nth - 1 : nth]}"):
                pids, notes = self.ranks.start(root=str(root), first=2, calls=str(calls), kill_at=nth, **one)
                check_same(f"exit code, {read_notes(notes)}", self.ranks.collect(pids), [-signal.SIGKILL])
                seen.add(check_root(root, 1, 2))
                self.ranks.run(root=str(root), first=3, **one)
                check_same("the next save", check_root(root, 3, 3), 3)
                check_same("left", sorted(path.name for path in root.iterdir()), ["current"])
            shutil.rmtree(root)
        check_same("deaths before the new one stood and after", seen, {1, 2})

    def test_before_every_kind_of_call_of_either_rank(self) -> None:
        """One of two ranks that save over their last checkpoint dies before its nth call; the other raises and names it.

        Most of the time is waiting for the dead, so several pairs wait at once.
        """
        pristine = self.root / "pristine"
        pristine.mkdir(parents=True)
        self.ranks.run(root=str(pristine), first=1, **PAIR)
        deaths = [
            *self.deaths(pristine, "in_place", range(WORLD)),
            *self.deaths(pristine, "per_rank_files", [1]),  # the lowest rank makes the same calls
        ]
        seen: dict[int, set[int]] = {rank: set() for rank in range(WORLD)}
        for first in range(0, len(deaths), AT_ONCE):
            started = [(death, *self.start_one_that_dies(death, pristine)) for death in deaths[first : first + AT_ONCE]]
            end = time.monotonic() + SHORT_PATIENCE + 20.0
            for death, pids, notes in started:
                with self.subTest(str(death)):
                    codes = self.ranks.collect(pids, max(end - time.monotonic(), 0.1))
                    seen[death.victim].add(self.check_death(death, codes, read_notes(notes)))
        check_same("deaths before the new one stood and after", seen, {0: {1, 2}, 1: {1}})

    def deaths(self, pristine: Path, strategy: str, victims: Sequence[int]) -> list[Death]:
        """From the calls of a save in which nobody dies."""
        dry, calls = self.root / f"dry-{strategy}", self.root / f"calls-{strategy}"
        shutil.copytree(pristine, dry)
        options = {"strategy": strategy}
        self.ranks.run(root=str(dry), first=2, calls=str(calls), options=options, **PAIR)
        check_same("saved", check_root(dry, 2, 2), 2)
        found = []
        for victim in victims:
            names = json.loads(Path(f"{calls}-{victim}").read_text())
            self.assertLess({"open", "fsync"}, set(names))
            places = chosen(names, most_of_moves=1 if victim else 3)
            found += [
                Death(victim, strategy, nth, len(names), tuple(names[max(nth - 1, 0) : nth + 1])) for nth in places
            ]
        return found

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

    def check_death(self, death: Death, codes: Sequence[int | None], found: Sequence[Sequence[Any]]) -> int:
        """The number of the checkpoint that was there then: the old one, or the new one."""
        root, other = self.root / death.folder, 1 - death.victim
        check_same(f"exit codes, {found}", codes, [-signal.SIGKILL if r == death.victim else 3 for r in range(WORLD)])
        [error] = [what for rank, what, number, _ in found if (rank, number) == (other, -1)]
        if f"rank {death.victim}" not in error:
            raise Differs(f"rank {other} does not name the rank that died: {error}")
        number = check_root(root, 1, 2)
        fill(plain(), 3)
        fsdp_optim.save(root / "current", plain().model, plain().optim, extra={"number": 3}, overwrite=True)
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


def chosen(names: Sequence[str], most_of_moves: int = 3) -> list[int]:
    """The first, middle and last call of each kind; all of those that move things; the very last."""
    found = {len(names) - 1}
    for kind in set(names):
        places = [place for place, name in enumerate(names) if name == kind]
        found |= {places[0], places[len(places) // 2], places[-1]}
        if kind in ("rename", "replace", "rmdir", "flock"):
            found |= set(places[:most_of_moves] + places[-most_of_moves:])
    return sorted(found)


if __name__ == "__main__":
    serve()
