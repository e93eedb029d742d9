"""Processes that save and load until they are killed, forked from a server process that has imported torch.

The server process runs this file as a script. All values of a save are one number, so that a mixture of two saves shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.checkpoint_format import MANIFEST, check_folder
from kit.compare import Differs, check_same
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.options import as_options
from kit.retention import name_of_step, save_managed
from kit.trained import Trained
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import fsdp_optim
from fsdp_optim.checkpoint.common.retry import ATTEMPTS
from soak.torture import PATIENCE

WORLD = 2
LIMIT = 60.0 * PATIENCE  # seconds after which a process counts as hung
LEFTOVER = (".saving-", ".old-", ".new-", ".gone-")


class Layers(nn.Module):
    """A model of about 100 KB with uneven sizes."""

    units = ("first", "second", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(127, 67)
        self.second = nn.Linear(67, 33)
        self.last = nn.Linear(33, 1)


def fill(trained: Trained, number: int) -> None:
    """Set all values to the number of one save."""
    with torch.no_grad():
        for param in trained.params:
            local_of(param).fill_(number)
            state = trained.optim.state[param]
            for name, more in (("exp_avg", 0.5), ("exp_avg_sq", 0.25), ("step", 0.0)):
                local_of(state[name]).fill_(number + more)


def values(trained: Trained) -> dict[str, list[float]]:
    """The distinct numbers among the values, by the kind of value."""
    numbers = {"param": {float(v) for param in trained.params for v in local_of(param).detach().unique()}}
    for name in ("exp_avg", "exp_avg_sq", "step"):
        numbers[name] = {
            float(v) for param in trained.params for v in local_of(trained.optim.state[param][name]).unique()
        }
    return {name: sorted(some) for name, some in numbers.items()}


def check_values(what: str, trained: Trained, number: int) -> None:
    """Raise unless all values are the number of this save."""
    wanted = {"param": 0.0, "exp_avg": 0.5, "exp_avg_sq": 0.25, "step": 0.0}
    check_same(f"{what}, save {number}", values(trained), {name: [number + more] for name, more in wanted.items()})


@functools.cache
def plain() -> Trained:
    return Trained("plain", adam, 1, Layers)


# ------------------------------------------------------------------------------------------- the processes that die

MODES = ("steps", "managed steps", "overwrite", "async overwrite")
"""Each save at a place of its own; the same, and older ones go as a manager lets them; one place that is overwritten."""

KEPT = 2
"""How many checkpoints stay in the mode of a manager."""

SYSTEM_CALLS = ("open", "mkdir", "write", "writev", "pwrite", "pwritev", "truncate", "ftruncate", "posix_fallocate")
SYSTEM_CALLS += ("fsync", "fdatasync", "rename", "replace", "link", "symlink", "unlink", "remove", "rmdir")


def path_of(root: Any, mode: str, number: int) -> Any:
    """The path or URL of a save."""
    name = "current" if mode.endswith("overwrite") else name_of_step(number)
    return f"{root}/{name}" if isinstance(root, str) else root / name


def save_by(
    mode: str, root: Any, number: int, trained: Trained, *, timeout: float | None = None, **options: Any
) -> None:
    """Save in a mode, and wait for the end. Called by all ranks. `root`: a folder, or a URL as a str."""
    options |= {"extra": {"number": number}}
    if mode.startswith("managed"):
        options = {"durable": True, "overwrite": True, "timeout": timeout, **options}
        save_managed(root, number, trained.model, trained.optim, keep_last=KEPT, **options)
        return
    options |= {"timeout": timeout, "overwrite": mode.endswith("overwrite")}
    place = path_of(root, mode, number)
    if mode.startswith("async"):
        fsdp_optim.async_save(
            place, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **options)
        ).wait(LIMIT)
    else:
        fsdp_optim.save(place, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **options))


def note(order: dict[str, Any], rank: int, what: str, number: int) -> None:
    """Write a line for the watching process, without the functions of `os`, because `killed_at` counts their calls."""
    line = json.dumps([rank, what, number, time.monotonic()]) + "\n"
    with Path(order["notes"]).open("ab", buffering=0) as file:
        file.write(line.encode())


def join(order: dict[str, Any], rank: int) -> None:
    """Join the process group as one of several ranks."""
    store = PrefixStore(order["notes"], TCPStore("127.0.0.1", order["port"], is_master=False, wait_for_workers=False))
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=order["ranks"], timeout=limit)


def save_again_and_again(order: dict[str, Any], rank: int) -> None:
    """Save again and again. With `calls`, a victim dies before the nth call that changes files."""
    mode, wrapper = order["mode"], "plain"
    if order["ranks"] > 1:
        join(order, rank)
        wrapper = order.get("wrapper", "FSDP2")
    trained = plain() if wrapper == "plain" else Trained(wrapper, adam, 1, Layers)
    trained.forget_gradients()
    options = {"timeout": order["patience"], **order.get("options", {})}
    if "storage_options" in order:
        options["storage_options"] = order["storage_options"]
    root = order["root"] if "storage_options" in order else Path(order["root"])
    calls = order.get("calls")
    if order["ranks"] > 1:
        dist.barrier()  # so that a rank that starts late is not taken for a dead one
    kill_at = order.get("kill_at") if rank == order.get("victim", rank) else None
    with killed_at(kill_at, f"{calls}-{rank}" if calls is not None else None):
        for number in range(order["first"], order["first"] + order["count"]):
            fill(trained, number)
            note(order, rank, "begin", number)
            save_by(mode, root, number, trained, **options)
            note(order, rank, "end", number)


def load_again_and_again(order: dict[str, Any], rank: int) -> None:
    """Load again and again beside writers: each load must be all of one save, and never of an older one than before."""
    root, end = Path(order["root"]), time.monotonic() + order["seconds"]
    trained, newest, count = plain(), 0, 0
    while time.monotonic() < end:
        before = saves_ended(order["saver"])
        path = root / "current" if order["mode"].endswith("overwrite") else fsdp_optim.latest(root)
        fill(trained, 12345)
        try:
            if path is None:
                raise Differs(f"latest finds nothing in {sorted(os.listdir(root))}")
            number = fsdp_optim.load(
                path, trained.model, trained.optim, options=fsdp_optim.LoadOptions(verify=order["verify"])
            ).state["number"]
        except fsdp_optim.CheckpointError as error:
            if saves_ended(order["saver"]) - before < least_replaced(order["mode"]):
                raise Differs(
                    f"load {count}, while {saves_ended(order['saver']) - before} saves ended: {error}"
                ) from error
            note(order, rank, "replaced", count)
            continue
        check_values(f"load {count} of {path}", trained, number)
        if number < max(newest, before):
            raise Differs(f"load {count} gives save {number}, but {max(newest, before)} had been there")
        newest, count = number, count + 1
    note(order, rank, "loads", count)


def least_replaced(mode: str) -> int:
    """The least number of saves that have noted their end during a load that gives up.

    An overwritten path was replaced once during each attempt of the load; a path that a manager removed was followed by as many
    saves as it keeps. The last of these saves may not have noted its end yet.
    """
    return (ATTEMPTS if mode.endswith("overwrite") else KEPT) - 1


def saves_ended(notes: str) -> int:
    """The last save whose end a process has noted."""
    return max((number for _, what, number, _ in read_notes(Path(notes)) if what == "end"), default=1)


@contextlib.contextmanager
def killed_at(nth: int | None, calls: str | None) -> Iterator[None]:
    """Kill this process before the nth call that changes files. `calls`: a file for the names of the calls."""
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
    """Fork ranks and collect them, by the commands on the lines of the input."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for module in sys.argv[1:]:
        importlib.import_module(module)
    plain()  # the first step of an optimizer imports many modules, which the children then have
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
    """Run a rank in the forked process; does not return."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # the process dies with its parent
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        LIVES[order["life"]](order, rank)
        os._exit(0)
    except fsdp_optim.FsdpOptimError as error:
        note(order, rank, f"{type(error).__name__}: {error}", -1)
        os._exit(3)
    except BaseException:
        note(order, rank, traceback.format_exc(), -1)
        os._exit(4)


def _collected(pids: Sequence[int], limit: float) -> list[int | None]:
    """The exit code of each rank, as in subprocess; None for one that had to be killed."""
    end, codes = time.monotonic() + limit, []
    for pid in pids:
        status = os.waitpid(pid, os.WNOHANG)
        while status[0] == 0 and time.monotonic() < end:
            time.sleep(0.002)
            status = os.waitpid(pid, os.WNOHANG)
        if status[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        codes.append(os.waitstatus_to_exitcode(status[1]) if status[0] else None)
    return codes


LIVES: dict[str, Callable[[dict[str, Any], int], None]] = {"save": save_again_and_again, "load": load_again_and_again}

# ------------------------------------------------------------------------------------------- the process that watches


class Ranks:
    """The server process that forks ranks, and the notes of the ranks."""

    def __init__(self, folder: Path, *modules: str) -> None:
        """`modules`: the modules to import before ranks are forked."""
        self._folder = folder
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._trials = 0
        self._log = open(folder / "log", "wb")  # noqa: SIM115
        command = [sys.executable, "-m", "soak.ranks", *modules]
        tests = str(Path(__file__).parents[1])
        where = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
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
        """Start ranks. Returns their process ids by rank, and the file of their notes."""
        self._trials += 1
        notes = self._folder / f"notes-{self._trials}"
        notes.touch()
        defaults = {"life": "save", "ranks": WORLD, "count": 10_000, "patience": LIMIT}
        pids = self._ask({**defaults, "port": self._store.port, "notes": str(notes), **order})
        return pids, notes

    def collect(self, pids: Sequence[int], limit: float = LIMIT) -> list[int | None]:
        return self._ask({"pids": list(pids), "limit": limit})

    def run(self, limit: float = LIMIT, **order: Any) -> list[list[Any]]:
        """Run ranks until they have ended without an error. Returns their notes."""
        pids, notes = self.start(**order)
        codes = self.collect(pids, limit)
        noted = read_notes(notes)
        check_same(f"exit codes, {noted[-3:]}", codes, [0] * len(pids))
        return noted


def read_notes(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for(path: Path, rank: int, what: str, number: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until a rank has written a certain note."""
    end = time.monotonic() + LIMIT
    while True:
        meanwhile()
        notes = read_notes(path)
        if any(line[:3] == [rank, what, number] for line in notes):
            return
        if time.monotonic() > end or any(number == -1 for _, _, number, _ in notes):
            raise AssertionError(f"rank {rank} did not {what} {number}: {notes[-4:]}")
        time.sleep(0.002)


def check_loads(folder: Path) -> int:
    """Raise unless this is a complete checkpoint of one save. Returns the number of the save."""
    check_folder(folder)
    target = plain()
    fill(target, 12345)
    number = fsdp_optim.load(folder, target.model, target.optim).state["number"]
    check_values(folder.name, target, number)
    return number


def check_root(root: Path, at_least: int, at_most: int) -> int:
    """Raise unless all checkpoints in the folder are complete. Returns the number of the latest one."""
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
    """The entries of a folder that are no checkpoints: by their name, or because they have no manifest."""
    names = {path.name for path in root.iterdir() if any(word in path.name for word in LEFTOVER)}
    return names | {path.name for path in root.iterdir() if not (path / MANIFEST).exists()}


@contextlib.contextmanager
def told(what: str, root: Path) -> Iterator[None]:
    """Put the case into the text of an error."""
    try:
        yield
    except Exception as error:
        raise Differs(f"{what}, then there were {sorted(path.name for path in root.iterdir())}: {error}") from error


if __name__ == "__main__":
    serve()
