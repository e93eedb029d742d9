"""CheckpointManager: what fails on one rank is raised on all, and wrong arguments are refused."""

from __future__ import annotations

import contextlib
import signal
import unittest
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kit import forked
from kit.catalogs import CatalogTest
from kit.checkpoint_format import read_manifest
from kit.compare import Differs, check_same, error_text, refused
from kit.managed import Loader, Run, full_disk, steps_in

import fsdp_optim
from fsdp_optim import CheckpointError, RankError, StateError
from fsdp_optim.testing import run_on_ranks


class Faulty(Loader):
    """A loader that fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(3)
        self.fails_in = ""

    def state_dict(self) -> dict[str, Any]:
        if self.fails_in == "state_dict":
            raise KeyError("no state")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails_in == "load_state_dict":
            raise ValueError("not my state")
        super().load_state_dict(state)


def fail_to_save(run: Run) -> None:
    """Take the steps 3 and 4, and wait until the background save of step 4 has failed, without hearing of it."""
    run.steps(range(3, 5))
    with contextlib.suppress(Exception):
        run.manager._run._saving.handle.join()  # type: ignore[union-attr]


def fail(root: Path, bad: int) -> None:
    """One rank fails, in each place: all ranks raise its error, and continue."""
    folder = root / f"bad-{bad}"
    faulty = Faulty()
    run = Run(folder, "FSDP2", agree_every=1, state={"faulty": faulty}, keep_last=2)
    is_bad = run.rank == bad
    with run.manager:
        run.steps(range(1, 3))
        run.manager.wait()
        with full_disk(is_bad):
            fail_to_save(run)
            dist.barrier()
            run.train(5)
            refused(lambda: run.manager.step(5), CheckpointError, "step-00000004", "No space left on device")
        check_same("after a failed save", steps_in(folder), [2])
        run.steps(range(6, 7))
        run.manager.wait()
        check_same("the next one", steps_in(folder), [6, 2])
        check_same("continues from the last that is there", record_of(folder, 6)["after"], 2)

        with full_disk(is_bad):
            run.steps(range(7, 9))
            refused(run.manager.wait, CheckpointError, "step-00000008", "No space left on device")
        faulty.fails_in = "state_dict" if is_bad else ""
        refused(lambda: run.manager.save(9), StateError, "state['faulty']: its state_dict() failed: KeyError")
        faulty.fails_in = "load_state_dict" if is_bad else ""
        run.train(9)
        before = run.everything()
        words = ("state['faulty']: its load_state_dict() refused", "ValueError: not my state", f"rank {bad}")
        refused(run.manager.resume, StateError, *words)
        after = run.everything()
        for key in ("optim", "params", "lr"):
            check_same(f"unchanged: {key}", after[key], before[key])
        faulty.fails_in = ""
        wrong: Any = "soon" if is_bad else 10
        refused(lambda: run.manager.save(wrong), StateError, "step must be at least 0", f"rank {bad}")
        refused(lambda: run.manager.save(10, metric="high" if is_bad else 1.0), StateError, "metric must be")  # type: ignore[arg-type]
        run.manager.save(10, metric=float(run.rank))
    check_same("closed", (steps_in(folder), record_of(folder, 10)), ([10, 6], {"after": 6, "metric": 0.0}))
    refused(lambda: run.manager.step(11), StateError, "CheckpointManager.step was called after close()")


class HalfStateful:
    """Has a state that nobody could load."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def wrong_arguments(root: Path, bad: int) -> None:
    """One rank gives a wrong argument, or another one than the others."""
    rank, faulty = dist.get_rank(), Faulty()
    for options in (
        {"every": 0},
        {"keep_last": 0},
        {"keep_best": 1.5},
        {"best": "most"},
        {"signals": ["TERM"]},
        {"signals": 15},
        {"state": {"scheduler": HalfStateful()}},
        {"state": [1]},
        {"state": {"fsdp_optim.rng": faulty}},
        {"durable": 1 > 2, "strategy": "fast"},
    ):
        given: dict[str, Any] = options if rank == bad else {}
        name = [*options][-1]
        kinds = {"StateError", "CheckpointError"}
        kind, text = error_text(lambda: Run(root / "wrong", "FSDP2", **{"state": {}, **given}))  # noqa: B023
        if kind not in kinds or f"rank {bad}" not in text or name.split("_")[0] not in text:
            raise Differs(f"{options}: {kind}: {text}")
    refused(
        lambda: Run(root / "wrong", "FSDP2", every=2 + rank),
        RankError,
        "every=2",
        "every=3",
    )
    refused(
        lambda: Run(root / "wrong", "FSDP2", state={f"loader-{rank}": faulty}),
        RankError,
        "loader-0",
    )


def save_after_a_failure(root: Path, bad: int, name: str) -> None:
    """What is due in the step that hears of a failed save, or is asked for by a signal or by `save`, is saved all the same."""
    folder = root / f"{name}-{bad}"
    run = Run(folder, "FSDP2", agree_every=1)
    is_bad = run.rank == bad
    with run.manager:
        run.steps(range(1, 3))
        run.manager.wait()
        with full_disk(is_bad):
            fail_to_save(run)
        dist.barrier()
        step = {"due": 6, "signal": 5, "asked": 5}[name]
        run.train(step)
        if name == "signal" and is_bad:
            signal.raise_signal(signal.SIGTERM)
        call = run.manager.save if name == "asked" else run.manager.step
        refused(lambda: call(step), CheckpointError, "step-00000004", "No space left on device")
        check_same("stops", run.manager.should_stop, name == "signal")
        if name == "signal":
            check_same("complete when the step has raised", steps_in(folder), [5, 2])
    check_same(name, (steps_in(folder), record_of(folder, step)["after"]), ([step, 2], 2))


def record_of(root: Path, step: int) -> Any:
    return read_manifest(root / f"step-{step:08}")["brief"].get("manager")


def leave_after_error(root: Path, bad: int) -> str:
    """One rank fails in its own code, and leaves the `with`; nobody waits for anybody there."""
    run = Run(root / f"left-{bad}", "FSDP2", every=2)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with run.manager:
            run.steps(range(1, 3))
            raise ZeroDivisionError("of the user")
    except ZeroDivisionError as error:
        if signal.getsignal(signal.SIGTERM) == handler:
            raise Differs("the handler is still there") from error
    return str(steps_in(root / f"left-{bad}"))


def fail_everywhere(root: Path) -> None:
    for bad in range(dist.get_world_size()):
        fail(root, bad)
        wrong_arguments(root, bad)
        for name in ("due", "signal", "asked"):
            save_after_a_failure(root, bad, name)
    check_same("saved before the error", leave_after_error(root, 0), "[2]")


class FailureTest(CatalogTest):
    def test_each_rank_in_turn(self) -> None:
        run_on_ranks(fail_everywhere, 2, self.root)

    def test_a_failed_save_is_raised_by_close(self) -> None:
        run = Run(self.root, "plain")
        before = signal.getsignal(signal.SIGTERM)
        with full_disk():
            run.steps(range(1, 3))
            refused(run.manager.close, CheckpointError, "No space left on device")
        self.assertNotEqual(signal.getsignal(signal.SIGTERM), before)
        run.manager.close()

    def test_a_failure_that_another_call_has_raised(self) -> None:
        """It is raised once, and the manager knows that this checkpoint is not there."""
        run = Run(self.root, "plain")
        with run.manager:
            run.steps(range(1, 3))
            run.manager.wait()
            with full_disk():
                run.steps(range(3, 5))
                refused(fsdp_optim.wait_for_saves, CheckpointError, "step-00000004", "No space left on device")
            run.steps(range(5, 7))
        self.assertEqual((steps_in(self.root), record_of(self.root, 6)["after"]), ([6, 2], 2))

    def test_a_process_that_ends_without_close(self) -> None:
        """Its exit waits for the save."""
        code = (
            "import sys\nfrom kit.managed import Run\nrun = Run(sys.argv[1], 'plain')\nrun.steps(range(1, 3))\n"
        ).replace("sys.argv[1]", repr(str(self.root)))
        done = forked.run(code, preload=forked.TRAINING, path=[Path(__file__).parents[1]])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"\Asaved \S+/step-00000002: .*\n\Z")
        self.assertEqual(steps_in(self.root), [2])

    def test_steps_that_go_back(self) -> None:
        run = Run(self.root, "plain")
        with run.manager:
            run.steps(range(1, 6))
            refused(lambda: run.manager.step(4), StateError, "step went back from 5 to 4", "manager.rollback(to=...)")
            run.steps(range(6, 7))
        self.assertEqual(steps_in(self.root), [6, 4, 2])

    def test_steps_that_are_passed_by(self) -> None:
        """A program that calls step() seldom saves when a multiple was reached meanwhile."""
        run = Run(self.root, "plain", every=4)
        with run.manager:
            for step in (3, 5, 6, 7, 9, 11, 13):
                run.manager.step(step)
        self.assertEqual(steps_in(self.root), [13, 9, 5])


if __name__ == "__main__":
    unittest.main()
