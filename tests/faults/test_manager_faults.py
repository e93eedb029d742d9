"""CheckpointManager: two runs in one folder, a process that is killed, a root that cannot be written, a signal during a save."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit import forked
from kit.catalogs import LOG, CatalogTest
from kit.checkpoints import before_writes
from kit.compare import check_same, refused
from kit.managed import Run, closing_all, names_in, steps_in
from kit.wrapping import cpu

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_ranks

ANOTHER = (
    "another run saves into this folder",
    "since this manager resumed",
    "a folder of its own",
    "manager.resume()",
)


@contextmanager
def held() -> Iterator[threading.Event]:
    """Files with tensors are not written in the background until the event is set."""
    gate = threading.Event()

    def hold(file: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        is_held = path.endswith(".safetensors") and threading.current_thread() is not threading.main_thread()
        if is_held and not gate.wait(60):
            raise RuntimeError("nobody opened the gate")

    with before_writes(hold):
        try:
            yield gate
        finally:
            gate.set()


class TwoRunsTest(CatalogTest):
    def test_the_second_run_is_refused_and_removes_nothing(self) -> None:
        """Both have found nothing. Without the refusal the second would remove the checkpoints of the first as taken back."""
        first, second = Run(self.root, "plain", every=2), Run(self.root, "plain", every=3, keep_last=1)
        with closing_all(first, second):
            check_same("nothing is there", (first.manager.resume(), second.manager.resume()), (0, 0))
            first.steps(range(1, 7))
            first.manager.wait()
            second.steps(range(1, 3))
            refused(lambda: second.steps([3]), CheckpointError, "step-00000003", "step-00000006", *ANOTHER)
            self.assertEqual(steps_in(self.root), [6, 4, 2])
            check_same("it continues from the other's", second.manager.resume(), 6)
            second.steps(range(7, 10))
            second.manager.wait()
            self.assertEqual(steps_in(self.root), [9])
            first.train(7)
            refused(lambda: first.steps([8]), CheckpointError, "step-00000008", "step-00000009", *ANOTHER)
        self.assertEqual(steps_in(self.root), [9])

    def test_a_run_that_was_thought_dead(self) -> None:
        """It saves once more while the run that took over is between two saves."""
        old = Run(self.root, "plain", every=1, keep_last=2)
        new = Run(self.root, "plain", every=1, keep_last=2)
        with closing_all(old, new):
            old.steps([1])
            old.manager.wait()
            check_same("taken over at", new.manager.resume(), 1)
            old.steps([2])
            old.manager.wait()
            refused(lambda: new.steps([2]), CheckpointError, "step-00000002", *ANOTHER)
            old.steps([3])
            old.manager.wait()
        self.assertEqual(steps_in(self.root), [3, 2])

    def test_what_another_run_saves_meanwhile_is_not_removed(self) -> None:
        second = Run(self.root, "plain", every=3, keep_last=1, durable=True)
        with closing_all(second):
            with held() as gate:
                second.steps(range(1, 4))  # has begun, when the folder was empty
                other = forked.run(OTHER_RUN.format(root=str(self.root)), preload=forked.TRAINING, path=PATH)
                told = [f"{self.root} has no checkpoint: training starts from scratch"]
                told += [f"saved {self.root}/step-0000000{step}: " for step in (2, 4)]
                lines = other.stderr.splitlines()
                self.assertEqual([line[: len(begin)] for line, begin in zip(lines, told, strict=True)], told)
                self.assertEqual(other.returncode, 0)
                gate.set()
            second.manager.wait()
            self.assertEqual(sorted(step or 0 for step in steps_in(self.root)), [2, 3, 4])

    def test_a_save_that_failed_after_its_manifest_is_the_runs_own(self) -> None:
        """Also the first one of a run that has not resumed: the folder was empty."""
        run = Run(self.root, "plain", every=1, keep_last=1, durable=True)
        with run.manager:
            with mock.patch(
                "fsdp_optim.checkpoint.catalog.retention.ManagedSave.remove_outdated", side_effect=failed()
            ):
                for step in (1, 2):
                    run.steps([step])
                    refused(run.manager.wait, CheckpointError, "Input/output error")
            self.assertEqual(steps_in(self.root), [2, 1])
            run.steps([3])
        self.check_only("step-00000003")


def failed() -> CheckpointError:
    return CheckpointError(os.strerror(errno.EIO))


PATH = [Path(__file__).parents[1]]
OTHER_RUN = """
from kit.managed import Run
run = Run({root!r}, 'plain', every=2)
with run.manager:
    run.manager.resume()
    run.steps(range(1, 5))
"""
KILLED = """
import os, signal
from fsdp_optim.storage.posix import FolderDirectory
from kit.managed import Run
run = Run({root!r}, 'plain', every=1, keep_last=1)
run.manager.resume()
run.steps([1])
run.manager.wait()
FolderDirectory.remove = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
run.steps([2])
run.manager.wait()
"""


class KilledTest(CatalogTest):
    def test_between_the_manifest_and_the_removal(self) -> None:
        """Both are complete, the newer one is loaded, and the next save removes what the dead process did not."""
        done = forked.run(KILLED.format(root=str(self.root)), preload=forked.TRAINING, path=PATH)
        self.assertEqual(done.returncode, -signal.SIGKILL)
        self.assertEqual(steps_in(self.root), [2, 1])
        run = Run(self.root, "plain", every=1, keep_last=1)
        with run.manager:
            check_same("resumed at", run.manager.resume(), 2)
            run.manager.save(2)  # which is there
            run.manager.wait()
            with self.assertLogs(LOG, logging.INFO) as logs:
                run.steps([3])
                run.manager.wait()
        self.check_only("step-00000003")
        removed = [line for line in logs.output if "removed" in line]
        self.assertEqual(len(removed), 2, removed)
        self.assertIn("no rule of the CheckpointManager keeps it, and", removed[0])

    def test_one_is_complete_at_all_times(self) -> None:
        """keep_last=1 with saves in the background: whenever a byte is written, the checkpoint before is there."""
        run = Run(self.root, "plain", every=1, keep_last=1)
        seen: list[int] = []

        def look(file: Any) -> None:
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
            if ".safetensors" in path:
                seen.append(len(steps_in(self.root)))

        with run.manager:
            run.steps([1])
            run.manager.wait()
            with before_writes(look):
                run.steps(range(2, 7))
                run.manager.wait()
            self.assertGreater(len(seen), 5)
            self.assertGreaterEqual(min(seen), 1)
        self.check_only("step-00000006")


def cannot_write(root: Path) -> None:
    """Rank 0 makes folders, on a file system that has become read-only; all ranks raise its error, and training can continue."""
    (root / "runs").mkdir(exist_ok=True)
    run = Run(root / "runs" / "first", "FSDP2", agree_every=1)
    real = os.mkdir

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).startswith(str(root)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        real(path, *args, **kwargs)

    with run.manager, cpu():
        check_same("a root that is not there yet", run.manager.resume(), 0)
        check_same("is not made by a resume", names_in(root / "runs"), [])
        run.steps([1])
        run.train(2)
        with mock.patch.object(os, "mkdir", mkdir):
            refused(lambda: run.manager.step(2), CheckpointError, str(root), "Read-only file system")
        run.steps(range(3, 5))
        run.manager.wait()
        check_same("it was writable again", steps_in(root / "runs" / "first"), [4])


def cannot_list(root: Path) -> None:
    """A root that cannot be listed is an error, and not an empty one, from which a run would begin anew."""
    run = Run(root, "FSDP2")
    real = os.scandir, os.listdir

    def refuses(which: int) -> Any:
        def call(path: Any = ".", *args: Any) -> Any:
            if str(path).startswith(str(root)):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real[which](path, *args)

        return call

    with run.manager, cpu():
        run.steps(range(1, 3))
        run.manager.wait()
        dist.barrier()
        with mock.patch.object(os, "scandir", refuses(0)), mock.patch.object(os, "listdir", refuses(1)):
            refused(run.manager.resume, CheckpointError, str(root), "Permission denied")
        check_same("resumed", run.manager.resume(), 2)


def both_roots(root: Path) -> None:
    cannot_write(root)
    cannot_list(root / "runs" / "second")


class RootTest(CatalogTest):
    def test_a_root_that_cannot_be_written_or_listed(self) -> None:
        run_on_ranks(both_roots, 2, self.root)


def signal_during_a_save(root: Path) -> None:
    """The save of step 2 is still written when a signal comes to rank 1: it ends, step 3 is saved, and all ranks stop."""
    run = Run(root, "FSDP2", every=2, agree_every=1)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(LOG)
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        with run.manager, cpu(), held() as gate:
            run.manager.resume()
            run.steps(range(1, 3))
            check_same("it is under way", steps_in(root), [])
            threading.Timer(0.2, gate.set).start()
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            run.steps(range(3, 10))
            check_same("stopped", (run.manager.should_stop, max(run.losses), steps_in(root)), (True, 3, [3, 2]))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    told = [line for line in lines if "a rank has received a signal: saving step 3" in line]
    check_same("told by one rank", len(told), 1 if run.rank == 0 else 0)
    again = Run(root, "FSDP2")
    with again.manager:
        check_same("resumed at", again.manager.resume(), 3)
        again.manager.rollback(to=2)
        if run.rank == 0:
            log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            again.manager.save(4)
            again.manager.wait()
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
    if run.rank == 0:
        gone = [line for line in lines if "removed" in line]
        check_same("told", [line.split(": ")[1].split(",")[0] for line in gone], ["the run went back to step 2"])
    fsdp_optim.verify(root / "step-00000004")


class SignalTest(CatalogTest):
    def test_a_signal_during_a_save_in_the_background(self) -> None:
        run_on_ranks(signal_during_a_save, 2, self.root)
