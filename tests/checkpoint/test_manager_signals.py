"""CheckpointManager: a signal on any rank ends the loop on all of them, with one checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import unittest
from functools import partial
from pathlib import Path

from kit.catalogs import LOG, CatalogTest, sequence_of
from kit.compare import Differs, check_same, refused
from kit.managed import Run, closing_all, full_disk, steps_in
from kit.tables import each

from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_ranks


def preempted(root: Path, name: str, who: str, agree_every: int, expected: int) -> None:
    """A signal comes during step 3, on one rank or on all, or on rank 1 one step later than on rank 0."""
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        run = Run(root / name, "FSDP2", every=100, agree_every=agree_every)
        with run.manager:
            for step in range(1, 12):
                run.train(step)
                when = {"0": {0: 3}, "1": {1: 3}, "all": {0: 3, 1: 3}, "later": {0: 3, 1: 4}}[who]
                if when.get(run.rank) == step:
                    os.kill(os.getpid(), signal.SIGTERM)
                run.manager.step(step)
                if run.manager.should_stop:
                    break
            check_same("saved at", (step, run.manager.should_stop, steps_in(root / name)), (expected, True, [expected]))
            if who == "all" and calls != [signal.SIGTERM]:
                raise Differs("the handler that was there before was not called")
        if signal.getsignal(signal.SIGTERM) is not handler:
            raise Differs("close() did not put the handler back")
        again = Run(root / name, "FSDP2")
        with again.manager:
            check_same("resumed at", again.manager.resume(), expected)
    finally:
        signal.signal(signal.SIGTERM, before)


def due_and_preempted(root: Path) -> None:
    """A signal in a step that is saved anyway gives one save; an error in that save is an error on all ranks."""
    run = Run(root / "due", "FSDP2", every=2, agree_every=1)
    with run.manager:
        run.steps([1])
        if run.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        run.steps([2])
        check_same("stops", (run.manager.should_stop, steps_in(root / "due")), (True, [2]))
        check_same("one save", sequence_of(root / "due" / "step-00000002"), 1)
    run = Run(root / "failing", "FSDP2", every=100, agree_every=1)
    with closing_all(run), full_disk(run.rank == 0):
        if run.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        refused(lambda: run.steps([1]), CheckpointError, "No space left on device")
        check_same("stops", (run.manager.should_stop, steps_in(root / "failing")), (True, []))


CASES = [("one", "0", 1, 3), ("other", "1", 1, 3), ("both", "all", 1, 3), ("later", "later", 1, 3)]
CASES += [("seldom", "1", 4, 5), ("seldom later", "later", 4, 5)]  # ranks meet after steps 1, 5, 9


def all_preempted(root: Path) -> None:
    each(partial(preempted, root), CASES)
    due_and_preempted(root)


class SignalTest(CatalogTest):
    def test_all_ranks_save_the_same_step(self) -> None:
        run_on_ranks(all_preempted, 2, self.root)

    def test_without_handlers(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        run = Run(self.root, "plain", signals=())
        self.assertIs(signal.getsignal(signal.SIGTERM), before)
        with run.manager:
            run.steps(range(1, 4))
        self.assertEqual(steps_in(self.root), [2])

    def test_in_another_thread(self) -> None:
        """There is no handler, and all else works."""
        errors: list[str] = []

        def train() -> None:
            try:
                run = Run(self.root, "plain")
                with run.manager:
                    run.steps(range(1, 4))
            except BaseException as error:
                errors.append(repr(error))

        before = signal.getsignal(signal.SIGTERM)
        with self.assertLogs(LOG, "WARNING") as logs:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
        self.assertEqual((errors, steps_in(self.root)), ([], [2]))
        self.assertIn("SIGTERM will not be noticed", logs.output[0])
        self.assertIs(signal.getsignal(signal.SIGTERM), before)


if __name__ == "__main__":
    unittest.main()
