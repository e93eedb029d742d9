"""async_save: training continues at once, the checkpoint has the values at the call, and all ranks learn how it ended."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit import forked
from kit.checkpoints import (
    Whole,
    async_save,
    before_writes,
    check_files,
    everything,
    load_trained,
    oracle_after,
    save,
    scramble,
)
from kit.compare import Differs, check_refused, check_same, error_text
from kit.folders import InFolder
from kit.optimizers import OfModel, two_groups
from kit.options import as_options, state_for
from kit.trained import STEPS, Trained
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import Completion

LIMIT = 60.0  # seconds; reached by nothing but a failure

HERE = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # where this file and the kit are found
KWARGS = {"make": OfModel(two_groups), "model": Whole}


def in_background() -> bool:
    """Whether this thread is not one that the main thread waits for; connections are made in such a one."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and thread.name != "fsdp_optim: connecting"


class Gate:
    """Holds up writes in the background until it is opened, and notes which checkpoint each write was of."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes: list[tuple[str, bool]] = []  # the checkpoint, and whether it was written in the background
        self._open = threading.Event()
        self._patches = before_writes(self._pass)
        self._delay = 0.0

    def _pass(self, file: Any) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file))
        if path == self.root or not path.is_relative_to(self.root):
            return
        if in_background():
            if not self._open.wait(LIMIT):
                raise RuntimeError("nobody opened the gate")
            time.sleep(self._delay)
            self._delay = 0.0
        self.notes.append((path.relative_to(self.root).parts[0].split(".")[0], in_background()))

    def open(self, delay: float = 0.0) -> None:
        """The next write also takes `delay` seconds."""
        self._delay = delay
        self._open.set()

    def __enter__(self) -> Gate:
        self._patches.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.open()
        self._patches.__exit__(*exc_info)


@contextlib.contextmanager
def full_disk(is_full: bool = True, *, copies_on_write: bool = False) -> Iterator[None]:
    """Writes in the background fail. Notes overwrite bytes that they have, which works unless the disk copies on write."""

    def fail(file: Any) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else "pipe")
        has_room = path.name == "outcome" or path.name.startswith("failed-")
        if in_background() and is_full and path.is_absolute() and (copies_on_write or not has_room):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with before_writes(fail):
        yield


# ------------------------------------------------------------------------------------------ training continues


def train_on(root: Path, wrapper: str, **options: Any) -> None:
    """Change everything while nothing is written yet."""
    with cpu(), Gate(root) as gate:
        trained = Trained(wrapper, **KWARGS)
        extra: Any = {"table": torch.arange(5), "list": [1, (2,)]}
        per_rank: Any = {"rank": dist.get_rank(), "rng": torch.arange(3) + dist.get_rank()}
        before = everything(trained)
        handle = async_save(
            root / wrapper,
            trained,
            state=state_for(extra, per_rank),
            **as_options(fsdp_optim.SaveOptions, **options),
        )
        check_same("after async_save", everything(trained), before)
        trained.step(range(STEPS, STEPS + 2))
        scramble(trained)
        extra["table"].zero_()
        extra["list"].append(3)
        extra["new"] = per_rank["rng"].zero_()
        while_closed = [handle.done(), (root / wrapper).exists()]
        gate.open()
        saved = handle.wait(timeout=LIMIT)
        check_same("done, and there, while nothing was written", while_closed, [False, False])
        check_same("done, and there", [handle.done(), (root / wrapper).exists()], [True, True])
        if saved is None or type(handle.wait()) is not type(saved):
            raise Differs(f"wait gave {saved!r} and {handle.wait()!r}")
        if not any(background for _, background in gate.notes):
            raise Differs("nothing was written in the background")


def train_on_in_all(root: Path) -> None:
    for wrapper in WRAPPERS:
        try:
            train_on(root, wrapper)
        except Exception as error:
            raise Differs(f"{wrapper}: {type(error).__name__}: {error}") from error


def check_extra(path: Path, size: int) -> None:
    """Raise unless the trainer's state is that of the moment of the call."""
    restored = fsdp_optim.load(path)
    own = {"rank": 0, "rng": torch.arange(3)}
    check_same("values", restored.state, {"table": torch.arange(5), "list": [1, (2,)], **own})
    check_same("per rank", run_on_ranks(per_rank_of, size, path), [(r, torch.arange(3) + r) for r in range(size)])


def per_rank_of(path: Path) -> tuple[int, torch.Tensor]:
    per_rank = fsdp_optim.load(path, options=fsdp_optim.LoadOptions(process_group=dist.group.WORLD)).state
    return per_rank["rank"], per_rank["rng"]


class TrainingGoesOnTest(InFolder):
    def test_every_wrapper(self) -> None:
        run_on_ranks(train_on_in_all, 3, self.root)
        for wrapper in WRAPPERS:
            check_files(self.root / wrapper, oracle_after(STEPS))
        self.check_only(*WRAPPERS)
        check_extra(self.root / "FSDP2", 3)
        run_on_ranks(load_trained, 2, self.root / "FSDP1 flat", "FSDP2", KWARGS, compare=True)

    @parameterized.expand((({"strategy": "per_rank_files"},), ({"max_file_size": 400},), ({"durable": True},)))
    def test_with_option(self, options: dict[str, Any]) -> None:
        run_on_ranks(train_on, 3, self.root, "FSDP1 orig", **options)
        check_files(self.root / "FSDP1 orig", oracle_after(STEPS))
        check_extra(self.root / "FSDP1 orig", 3)

    def test_wait_that_is_too_short(self) -> None:
        run_on_ranks(wait_in_vain, 2, self.root)
        check_files(self.path, oracle_after(STEPS))

    def test_no_collective_call_in_the_background(self) -> None:
        run_on_ranks(watch_collectives, 3, self.root)
        check_files(self.path, oracle_after(STEPS))

    def test_without_ranks(self) -> None:
        with Gate(self.root) as gate:
            trained = Trained("plain", **KWARGS)
            handle = async_save(self.path, trained)
            scramble(trained)
            done = handle.done()
            gate.open()
            handle.wait()
        self.assertFalse(done)
        check_files(self.path, oracle_after(STEPS))

    def test_long_tensors_are_those_of_the_call_too(self) -> None:
        """Tensors that are too long to be copied side by side with others."""
        model = nn.Linear(301, 300)
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 301)).sum().backward()
        optim.step()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        moments = copy.deepcopy(optim.state_dict()["state"])
        with Gate(self.root) as gate:
            handle = fsdp_optim.async_save(self.path, model, optim, options=fsdp_optim.SaveOptions(progress=False))
            with torch.no_grad():
                for tensor in (*model.parameters(), *(v for s in optim.state.values() for v in s.values())):
                    tensor.fill_(-1)
            gate.open()
            handle.wait()
        new = nn.Linear(301, 300)
        other = torch.optim.Adam(new.parameters())
        fsdp_optim.load(self.path, new, other)
        check_same("weights", new.state_dict(), weights)
        check_same("moments", other.state_dict()["state"], moments)

    def test_what_is_refused_is_refused_by_the_call(self) -> None:
        model = nn.Linear(2, 2)
        for extra in ({"outer": [{"inner name": print}]}, {"inner name": object()}):
            kind, text = error_text(lambda extra=extra: fsdp_optim.async_save(self.path, model, state=state_for(extra)))
            self.assertEqual(kind, "CheckpointError", text)
            self.assertIn("inner name", text)
        fsdp_optim.async_save(self.path, model).wait()  # and it is not raised again
        self.check_only("step-1")

    def test_a_save_that_is_given_up_at_the_last_moment_is_no_checkpoint(self) -> None:
        """All its files are written, and the other ranks have decided without this one."""
        with mock.patch.object(Completion, "commit", side_effect=CheckpointError("the others gave it up")):
            handle = fsdp_optim.async_save(self.path, nn.Linear(2, 2))
            kind, text = error_text(handle.wait)
        self.assertEqual(kind, "CheckpointError", text)
        self.assertIn("the others gave it up", text)
        self.check_only()


def wait_in_vain(root: Path) -> None:
    with Gate(root) as gate:
        trained = Trained("FSDP2", **KWARGS)
        handle = async_save(root / "step-1", trained)
        for _ in range(2):
            try:
                handle.wait(timeout=0.05)
            except TimeoutError:
                continue
            raise Differs("waiting was to time out")
        done = handle.done()
        gate.open()
        handle.wait(timeout=LIMIT)
        check_same("done", [done, handle.done()], [False, True])


COLLECTIVE = (
    "all",
    "broadcast",
    "barrier",
    "gather",
    "scatter",
    "reduce",
    "send",
    "recv",
    "monitored",
    "split",
    "merge",
)
STORE = ("set", "get", "add", "wait", "check", "compare_set", "multi_", "append", "delete_key", "queue")


def watch_collectives(root: Path) -> None:
    """Calls of a group, which ranks must make in one order, and calls of the job's store, which one thread at a time may make.

    In the background only a connection of its own is used.
    """
    calls: list[tuple[str, bool]] = []
    own: list[str] = []
    job = dist.distributed_c10d._get_default_store()

    def watched(kind: Any, name: str) -> Any:
        real = getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, dist.Store) and self is not job and in_background():
                own.append(name)
            else:
                calls.append((f"{kind.__name__}.{name}", in_background()))
            return real(self, *args, **kwargs)

        return mock.patch.object(kind, name, call)

    trained = Trained("FSDP1 flat", **KWARGS)
    with contextlib.ExitStack() as stack:
        kinds = (
            (dist.ProcessGroup, COLLECTIVE),
            (dist.Store, STORE),
            (dist.PrefixStore, STORE),
            (dist.TCPStore, STORE),
        )
        for kind, words in kinds:
            for name in [name for name in vars(kind) if name.startswith(words)]:
                stack.enter_context(watched(kind, name))
        handle = async_save(root / "step-1", trained)
        handle.wait(timeout=LIMIT)
        dist.barrier()
    check_same("calls in the background", [name for name, background in calls if background], [])
    check_same("its own connection is seen", "compare_set" in own or "get" in own, True)
    seen = {name for name, _ in calls}
    check_same("the barrier is seen", "ProcessGroup.barrier" in seen, True)
    check_same("the store is seen", any(name.startswith(("Store", "PrefixStore", "TCPStore")) for name in seen), True)


# ------------------------------------------------------------------------------------------ one after the other


def two_saves(root: Path, second: str) -> None:
    with Gate(root) as gate:
        trained = Trained("FSDP2", **KWARGS)
        handle: Any = async_save(root / "first", trained)
        if second != "save":
            del handle  # nobody waits for it
            gc.collect()
        trained.step(range(STEPS, STEPS + 2))
        timer = threading.Timer(0.5, gate.open)
        timer.start()
        again = (save if second == "save" else async_save)(root / "second", trained)
        is_there = (root / "first" / "fsdp_optim.json").exists()
        timer.join()
        if second == "save":
            check_same("done", handle.done(), True)
            handle.wait()
        else:
            again.wait(timeout=LIMIT)
        check_same("the first, when the second call returns", is_there, True)
        names = [name for name, _ in gate.notes]
        check_same("writes", names, sorted(names))
        check_same("writes of", sorted(set(names)), ["first", "second"])


def fail_in_background(root: Path, bad: int, told_by: str, copies_on_write: bool = False) -> tuple[str, str]:
    trained = Trained("FSDP2", **KWARGS)
    before = everything(trained)
    with full_disk(dist.get_rank() == bad, copies_on_write=copies_on_write):
        handle = async_save(root / "first", trained)
        calls: dict[str, Callable[[], Any]] = {
            "wait": lambda: handle.wait(timeout=LIMIT),
            "save": lambda: save(root / "second", trained),
            "async_save": lambda: async_save(root / "second", trained),
        }
        error = error_text(calls[told_by])
    check_same("after the failure", everything(trained), before)
    check_same("checkpoints", [(root / "first").exists(), (root / "second").exists()], [False, False])
    check_same("done", handle.done(), True)
    check_same("newest", fsdp_optim.latest(root), None)
    dist.barrier()  # before others continue to save
    save(root / "first", trained)  # told once, it is over
    return error


class OneAfterTheOtherTest(InFolder):
    @parameterized.expand(("save", "async_save"))
    def test_the_next_save_waits_for_the_last(self, second: str) -> None:
        run_on_ranks(two_saves, 2, self.root, second)
        check_files(self.root / "first", oracle_after(STEPS))
        check_files(self.root / "second", oracle_after(STEPS + 2))
        self.check_only("first", "second")

    @parameterized.expand(
        [
            (told_by, bad)
            for told_by in ("wait", "save", "async_save")
            for bad in ((0, 1, 2) if told_by == "wait" else (1,))
        ]
    )
    def test_an_error_in_the_background_is_told(self, told_by: str, bad: int) -> None:
        errors = run_on_ranks(fail_in_background, 3, self.root, bad, told_by)
        check_refused(told_by, errors, "CheckpointError", os.strerror(errno.ENOSPC), f"rank {bad}")
        check_files(self.root / "first", oracle_after(STEPS))
        self.check_only("first")

    def test_an_error_that_cannot_be_written_down(self) -> None:
        errors = run_on_ranks(fail_in_background, 3, self.root, 1, "wait", True)
        check_refused("wait", errors, "CheckpointError", "rank 1: ", "cannot be written")


# ------------------------------------------------------------------------------------------ the end of the process

KEPT: list[Any] = []  # what would undo its patches when the frame that made it goes, before the background has written


def leave(root: Path, rank: int, world_size: int, is_full: bool, code: int) -> None:
    """A script that saves last of all, and ends."""
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{root}.store", rank=rank, world_size=world_size)
    trained = Trained("FSDP2" if world_size > 1 else "plain", **KWARGS)
    gate = Gate(root)
    disk = full_disk(is_full)
    disk.__enter__()
    gate.__enter__()
    KEPT.extend((disk, gate))
    handle = async_save(root / "step-1", trained)
    scramble(trained)
    print("done:", handle.done(), flush=True)
    if world_size > 1:
        dist.destroy_process_group()
    gate.open(delay=0.5)
    sys.exit(code)


def start(root: Path, rank: int = 0, world_size: int = 1, is_full: bool = False, code: int = 0) -> forked.Started:
    """`leave` in a process of its own."""
    root.mkdir(exist_ok=True)
    arguments = f"Path({str(root)!r}), {rank}, {world_size}, {is_full}, {code}"
    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        f"from pathlib import Path; import test_checkpoint_async as t; t.leave({arguments})"
    )
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return forked.start(script, preload=forked.TRAINING, path=HERE, environment=environment)


class EndOfProcessTest(InFolder):
    def test_it_waits_for_the_checkpoint(self) -> None:
        pair, alone = self.root / "two", self.root / "one"
        ended = [process.wait() for process in (start(pair, 0, 2), start(pair, 1, 2), start(alone, code=3))]
        self.assertEqual([process.returncode for process in ended], [0, 0, 3], ended)
        self.assertEqual([process.stdout for process in ended], ["done: False\n"] * 3)
        for root in (alone, pair):
            check_files(root / "step-1", oracle_after(STEPS))
            self.assertEqual(fsdp_optim.latest(root), root / "step-1")

    def test_an_error_is_not_lost(self) -> None:
        process = start(self.root / "full", is_full=True).wait()
        self.assertEqual(process.stdout, "done: False\n")
        self.assertIn(os.strerror(errno.ENOSPC), process.stderr)
        self.assertIn("step-1", process.stderr)
        self.assertIsNone(fsdp_optim.latest(self.root / "full"))
