"""CheckpointManager: a run that stopped goes on as if it had not; signals, failures, damage, going back, what is kept."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import threading
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit import scripts
from kit.cases import expand
from kit.catalogs import LOG, CatalogTest, sequence_of
from kit.catalogs import save as save_plain
from kit.checkpoint_damage import flip_a_weight, garble, seal_as_it_is, sealed_brief, shorten
from kit.checkpoint_format import read_manifest
from kit.checkpoints import before_writes
from kit.compare import refused
from kit.managed import Loader, Run, closing_all, names_in, steps_in
from kit.wrapping import Differs, check_same, cpu, error_text
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.errors import CheckpointError, RankError, StateError
from fsdp_optim.storage.posix.directory import FolderShelf
from fsdp_optim.testing import run_on_ranks

LAST = 7


def folder_of(root: Path, name: str) -> Path:
    return root / name.replace(" ", "-")


# ------------------------------------------------------------------------------------------ as if it had not stopped


def stop_and_resume(root: Path, wrapper: str) -> None:
    with cpu():
        whole = Run(folder_of(root, f"{wrapper} whole"), wrapper)
        with closing_all(whole):
            for step in range(1, LAST + 1):
                whole.train(step)
        wanted = whole.everything()
        folder = folder_of(root, wrapper)
        first = Run(folder, wrapper)
        with closing_all(first):
            check_same("resume where nothing is", first.manager.resume(), 0)
            first.steps(range(1, 6))
            first.manager.wait()
        check_same("checkpoints", steps_in(folder), [4, 2])
        second = Run(folder, wrapper)
        with second.manager:
            step = second.manager.resume()
            check_same("resumed at", step, 4)
            second.steps(range(step + 1, LAST + 1))
        losses = {**first.losses, **second.losses}
        check_same("losses", losses, whole.losses)
        check_same("everything", second.everything(), wanted)
        check_same("checkpoints", steps_in(folder), [6, 4, 2])


def each(function: Callable[..., None], root: Path, cases: list[Any]) -> None:
    """All cases in one world; an error names its case."""
    for case in cases:
        try:
            function(root, *case)
        except Exception as error:
            raise Differs(f"{case}: {type(error).__name__}: {error}") from error


class StopTest(CatalogTest):
    def test_losses_are_those_of_a_run_that_never_stopped(self) -> None:
        run_on_ranks(each, 2, stop_and_resume, self.root, [("FSDP2",), ("fairscale flat",), ("DDP",)])

    @pytest.mark.slow
    def test_losses_of_other_wrappers(self) -> None:
        run_on_ranks(each, 2, stop_and_resume, self.root, [("FSDP1 flat",), ("FSDP1 orig",), ("HSDP",)])

    def test_one_process_without_a_wrapper(self) -> None:
        stop_and_resume(self.root, "plain")


def train_alike(root: Path, wrapper: str, last: int) -> dict[int, float]:
    with cpu():
        run = Run(root, wrapper, alike=True)
        with run.manager:
            run.steps(range(run.manager.resume() + 1, last + 1))
        return run.losses


def train_apart(root: Path, last: int) -> None:
    """As `train_alike`, but each rank has a loader of its own."""
    with cpu():
        run = Run(root, "FSDP2")
        with run.manager:
            run.steps(range(1, last + 1))


def resume_as_new_rank(root: Path) -> list[str]:
    """The warning to a rank that the checkpoint does not have, and the values of that rank."""
    logs: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(record.getMessage())  # type: ignore[method-assign]
    run = Run(root, "FSDP2")
    torch.manual_seed(1000 + run.rank)
    before = torch.get_rng_state()
    logging.getLogger(LOG).addHandler(handler)
    try:
        with run.manager:
            run.manager.resume()
    finally:
        logging.getLogger(LOG).removeHandler(handler)
    is_kept = torch.equal(before, torch.get_rng_state())
    is_new = run.rank >= 2
    check_same("a new rank keeps its own loader", run.loader.num_drawn, 0 if is_new else 4)
    missing = run.manager.restored.missing_keys if run.manager.restored is not None else None
    check_same("it is told", missing, ("state['loader']",) if is_new else ())
    check_same("random states are kept on new ranks only", is_kept, run.rank >= 2)
    return [line for line in logs if "random states at the save" in line]


class WorldSizeTest(CatalogTest):
    @expand(
        soon=[("FSDP2", "FSDP1 flat", 4), ("fairscale flat", "FSDP2", 1)],
        later=[("FSDP1 orig", "DDP", 4)],
    )
    def test_at_another_world_size_and_in_another_wrapper(self, wrapper: str, then: str, size: int) -> None:
        whole = run_on_ranks(train_alike, 2, self.root / "whole", wrapper, LAST)[0]
        first = run_on_ranks(train_alike, 2, self.root / "run", wrapper, 4)[0]
        for later in run_on_ranks(train_alike, size, self.root / "run", then, LAST):
            check_same("losses", {**first, **later}, whole)

    def test_a_rank_that_is_new(self) -> None:
        run_on_ranks(train_apart, 2, self.root / "run", 4)
        told = run_on_ranks(resume_as_new_rank, 3, self.root / "run")
        self.assertEqual([len(lines) for lines in told], [0, 0, 1])
        self.assertIn("rank 2 had no random states at the save, so it keeps its own", told[2][0])


# ------------------------------------------------------------------------------------------ signals


def preempted(root: Path, name: str, who: str, agree_every: int, expected: int) -> None:
    """A signal comes during step 3, on one rank or on all, or on rank 1 one step later than on rank 0."""
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    theirs = signal.getsignal(signal.SIGTERM)
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
        if signal.getsignal(signal.SIGTERM) is not theirs:
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
    each(preempted, root, CASES)
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


# ------------------------------------------------------------------------------------------ failures


@contextlib.contextmanager
def full_disk(is_full: bool = True) -> Iterator[None]:
    """Writes of files with tensors fail in the background."""

    def fail(file: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        if is_full and path.endswith(".safetensors") and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with before_writes(fail):
        yield


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


def fail(root: Path, bad: int) -> None:
    """One rank fails, in each place: all ranks raise its error, and go on."""
    folder = root / f"bad-{bad}"
    faulty = Faulty()
    run = Run(folder, "FSDP2", agree_every=1, state={"faulty": faulty}, keep_last=2)
    is_bad = run.rank == bad
    with run.manager:
        run.steps(range(1, 3))
        run.manager.wait()
        with full_disk(is_bad):
            run.steps(range(3, 5))
            with contextlib.suppress(Exception):
                run.manager._run._saving.handle.join()  # type: ignore[union-attr]
            dist.barrier()
            run.train(5)
            refused(lambda: run.manager.step(5), CheckpointError, "step-00000004", "No space left on device")
        check_same("after a failed save", steps_in(folder), [2])
        run.steps(range(6, 7))
        run.manager.wait()
        check_same("the next one", steps_in(folder), [6, 2])
        check_same("goes on from the last that is there", record_of(folder, 6)["after"], 2)

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
        done = scripts.run(code, preload=scripts.TRAINING, path=[Path(__file__).parents[1]])
        self.assertEqual((done.returncode, done.stderr), (0, ""))
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


# ------------------------------------------------------------------------------------------ objects


class ObjectsTest(CatalogTest):
    def saved(self, **options: Any) -> Run:
        run = Run(self.root, "plain", **options)
        with run.manager:
            run.steps(range(1, 3))
        return run

    def test_load_reads_it_too(self) -> None:
        run = self.saved()
        extra = fsdp_optim.load(self.root / "step-00000002")
        check_same("scheduler", extra.state["scheduler"], run.scheduler.state_dict())
        check_same("scaler", extra.state["scaler"], run.scaler.state_dict())
        self.assertEqual(extra.state["loader"]["num_drawn"], 2)

    def test_schedulers_of_torch(self) -> None:
        """Their states are plain values: no pickle is needed."""
        optim = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.5)
        make = torch.optim.lr_scheduler
        kinds: dict[str, Any] = {
            "lambda": lambda: make.LambdaLR(optim, lambda epoch: 0.9**epoch),
            "steps": lambda: make.MultiStepLR(optim, [2, 4]),
            "cosine": lambda: make.CosineAnnealingWarmRestarts(optim, 3),
            "plateau": lambda: make.ReduceLROnPlateau(optim),
            "sequence": lambda: make.SequentialLR(
                optim, [make.ConstantLR(optim), make.LinearLR(optim), make.ExponentialLR(optim, 0.9)], [1, 3]
            ),
        }
        first, second = ({name: kind() for name, kind in kinds.items()} for _ in range(2))
        for _ in range(3):
            optim.step()
            for name, one in first.items():
                one.step(*([0.5] if name == "plateau" else []))
        wanted = {name: str(one.state_dict()) for name, one in first.items() if name != "sequence"}
        self.saved(state=first)
        run = Run(self.root, "plain", state=second)
        with run.manager:
            run.manager.resume()
        self.assertEqual({name: str(second[name].state_dict()) for name in wanted}, wanted)
        self.assertEqual(second["sequence"].last_epoch, 3)

    def test_other_names_than_the_saved_ones(self) -> None:
        self.saved()
        loader = Loader(5)
        run = Run(self.root, "plain", state={"loader": loader, "new": loader})
        with run.manager:
            before = run.everything()["params"]
            words = (
                "state['average']: only the checkpoint has it",
                "['average', 'loader', 'scaler', 'scheduler']",
                "strict=False",
            )
            refused(run.manager.resume, StateError, *words)
            check_same("unchanged", run.everything()["params"], before)
            with self.assertLogs(LOG, "WARNING") as logs:
                self.assertEqual(run.manager.resume(strict=False), 2)
            self.assertIn("state: average, new, scaler, scheduler is not loaded", "\n".join(logs.output))
            self.assertEqual(loader.num_drawn, 2)
            wanted = {f"state[{name!r}]" for name in ("average", "scaler", "scheduler")}
            assert run.manager.restored is not None
            self.assertEqual(run.manager.restored.missing_keys, ("state['new']",))
            self.assertEqual(set(run.manager.restored.unexpected_keys), wanted)

    def test_a_value_that_cannot_be_saved(self) -> None:
        class Odd(Loader):
            def state_dict(self) -> dict[str, Any]:
                return {"lock": object()}

        run = Run(self.root, "plain", state={"odd": Odd(1)})
        with closing_all(run):
            words = ("state['odd']['lock']", "allow_pickle=True")
            refused(lambda: run.manager.save(1), CheckpointError, *words)

    def test_without_random_states(self) -> None:
        self.saved(rng=False)
        run = Run(self.root, "plain")
        torch.manual_seed(99)
        before = torch.get_rng_state()
        with run.manager, self.assertLogs(LOG, "WARNING") as logs:
            run.manager.resume()
        self.assertIn("has no random states (it was saved with rng=False)", "\n".join(logs.output))
        self.assertTrue(torch.equal(before, torch.get_rng_state()))


def sharded_objects(root: Path) -> None:
    sharded = Run(root / "other", "FSDP2")
    run = Run(root / "run", "FSDP2", state={"average": sharded.model})
    with closing_all(sharded, run):
        words = ("state['average']['0.weight']: is a DTensor", "nn.ModuleDict({'model': model, 'ema': ema})")
        refused(lambda: run.manager.save(1), StateError, *words)
    both = nn.ModuleDict({"model": run.model, "ema": sharded.model})
    with fsdp_optim.CheckpointManager(
        root / "both", both, run.optim, options=fsdp_optim.ManagerOptions(process_group=dist.group.WORLD)
    ) as manager:
        run.train(1)
        manager.save(1)
    check_same("there", steps_in(root / "both"), [1])


class ShardedObjectsTest(CatalogTest):
    def test_a_sharded_average_belongs_to_the_model(self) -> None:
        run_on_ranks(sharded_objects, 2, self.root)


# ------------------------------------------------------------------------------------------ damage, and going back


class BackTest(CatalogTest):
    def run_to(self, last: int, resumes: bool = True, **options: Any) -> Run:
        run = Run(self.root, "plain", **options)
        with run.manager:
            run.steps(range((run.manager.resume() if resumes else 0) + 1, last + 1))
        return run

    @parameterized.expand([("short", shorten), ("bit", flip_a_weight), ("garbled", garble)])
    def test_a_damaged_newest_one(self, _: str, damage: Callable[[Path], None]) -> None:
        """It is named; with on_damage="previous" the run goes on from the one before it, and saves the step again."""
        self.run_to(6)
        damage(self.root / "step-00000006")
        run = Run(self.root, "plain")
        with run.manager:
            words = (
                "step-00000006, the newest checkpoint",
                'on_damage="previous" takes the one before it',
                "step-00000004",
            )
            refused(run.manager.resume, CheckpointError, *words)
            self.assertEqual(run.manager.resume(on_damage="previous"), 4)
            run.steps(range(5, 8))
        self.assertEqual(steps_in(self.root), [6, 4, 2])
        self.assertEqual(self.run_to(8).manager.should_stop, False)
        self.assertEqual(steps_in(self.root), [8, 6, 4, 2])

    @parameterized.expand([("short", shorten), ("garbled", garble)])
    def test_a_damaged_one_of_steps_that_were_taken_back_goes(self, _: str, damage: Callable[[Path], None]) -> None:
        self.run_to(6)
        damage(self.root / "step-00000006")
        run = Run(self.root, "plain", every=5)
        with run.manager:
            self.assertEqual(run.manager.resume(on_damage="previous"), 4)
            run.steps(range(5, 6))
        self.check_only("step-00000002", "step-00000004", "step-00000005")
        self.run_to(5)  # nothing damaged is in the way

    def test_a_run_that_has_not_resumed_touches_nothing(self) -> None:
        self.run_to(4)
        run = Run(self.root, "plain")
        with closing_all(run):
            run.steps(range(1, 2))
            run.train(2)
            words = ("has checkpoints of an earlier run, 2 of them", "manager.resume()", "another folder")
            refused(lambda: run.manager.step(2), CheckpointError, *words)
        self.assertEqual(steps_in(self.root), [4, 2])

    def test_rollback(self) -> None:
        """The steps after it are taken back when the next save is complete, not before."""
        whole = Run(self.root / "whole", "plain")
        with closing_all(whole):
            for step in range(1, 10):
                whole.train(step)
        wanted = whole.everything()
        root = self.root / "run"
        run = Run(root, "plain", every=2)
        with run.manager:
            run.steps(range(1, 9))
            run.manager.wait()
            words = ("has no checkpoint of step 3", "those of the steps 2, 4, 6, 8")
            refused(lambda: run.manager.rollback(3), CheckpointError, *words)
            self.assertEqual(run.manager.rollback(to=4), 4)
            self.assertEqual(steps_in(root), [8, 6, 4, 2])
            run.steps(range(5, 6))
            self.assertEqual(steps_in(root), [8, 6, 4, 2])
            run.steps(range(6, 7))
            run.manager.wait()
            self.assertEqual(steps_in(root), [6, 4, 2], "8 was taken back, 6 was replaced")
            self.assertEqual(sequence_of(root / "step-00000006"), 5)
            run.steps(range(7, 10))
        self.assertEqual(run.losses, whole.losses)
        check_same("everything", run.everything(), wanted)

    def test_the_newest_is_by_sequence_where_a_removal_has_failed(self) -> None:
        """A run that dies between its first save after a rollback and the removals resumes from that save, and cleans up."""
        self.run_to(8)
        run = Run(self.root, "plain", every=1)
        with run.manager, mock.patch.object(FolderShelf, "remove"):
            run.manager.rollback(to=2)
            run.steps(range(3, 4))
            run.manager.wait()
        self.assertEqual([one.step for one in fsdp_optim.checkpoints(self.root)], [3, 8, 6, 4, 2])
        run = Run(self.root, "plain", every=4)
        with run.manager:
            refused(lambda: run.manager.rollback(6), CheckpointError, "those of the steps 2, 3")
            self.assertEqual(run.manager.resume(), 3)
            run.steps(range(4, 5))
        self.assertEqual(steps_in(self.root), [4, 3, 2])

    def test_a_run_that_dies_before_it_saves_again_has_lost_nothing(self) -> None:
        self.run_to(4)
        run = Run(self.root, "plain", every=2)
        with run.manager:
            run.manager.rollback(to=2)
            run.steps(range(3, 4))
        again = Run(self.root, "plain")
        with again.manager:
            self.assertEqual(again.manager.resume(), 4)

    def test_a_save_that_fails_after_a_rollback_removes_nothing(self) -> None:
        self.run_to(6)
        run = Run(self.root, "plain")
        with run.manager:
            run.manager.rollback(to=2)
            with full_disk():
                run.steps(range(3, 5))
                refused(run.manager.wait, CheckpointError, "No space left on device")
            self.assertEqual(steps_in(self.root), [6, 4, 2])
            self.assertEqual(sequence_of(self.root / "step-00000004"), 2)

    def test_the_same_step_is_saved_once(self) -> None:
        run = Run(self.root, "plain")
        with run.manager:
            run.steps(range(1, 3))
            run.manager.save(2)
            run.manager.wait()
            number = sequence_of(self.root / "step-00000002")
            self.assertEqual(run.manager.resume(), 2)
            run.manager.save(2)
        self.assertEqual((number, sequence_of(self.root / "step-00000002")), (1, 1))


# ------------------------------------------------------------------------------------------ what is kept


class KeepTest(CatalogTest):
    def test_the_rules_together(self) -> None:
        run = Run(self.root, "plain", every=1, keep_last=2, keep_every=4, keep_best=1)
        metrics = {1: 5.0, 2: 1.0, 3: 2.0, 4: 9.0, 5: float("nan"), 6: 3.0, 7: None, 8: 4.0, 9: 6.0}
        with run.manager:
            run.steps(range(1, 10), metrics.get)
        self.assertEqual(steps_in(self.root), [9, 8, 4, 2])
        self.assertEqual([one.metric for one in fsdp_optim.checkpoints(self.root)], [6.0, 4.0, 9.0, 1.0])

    def test_the_highest_metric(self) -> None:
        run = Run(self.root, "plain", every=1, keep_best=2, best="max")
        with run.manager:
            run.steps(range(1, 6), {1: 5.0, 2: 9.0, 3: 9.0, 4: 1.0, 5: 2.0}.get)
        self.assertEqual(steps_in(self.root), [5, 3, 2])

    def test_without_a_rule_all_stay(self) -> None:
        run = Run(self.root, "plain", every=1)
        with run.manager:
            run.steps(range(1, 5))
        self.assertEqual(steps_in(self.root), [4, 3, 2, 1])

    def test_what_no_manager_made_stays(self) -> None:
        """A save by hand, a copy, another name, a folder, a file, a damaged one, a link: none counts, none goes."""
        run = Run(self.root, "plain", every=1, keep_last=2)
        with run.manager:
            run.steps(range(1, 3))
            run.manager.wait()
            save_plain(self.root / "best", run.model, step=1)
            save_plain(self.root / "step-00000000", run.model, step=0)
            save_plain(self.root / "step-9", run.model, step=9, keep_last=5)
            shutil.copytree(self.root / "step-00000001", self.root / "kept")
            shutil.copytree(self.root / "step-00000001", self.root / "step-00000007")
            (self.root / "notes").mkdir()
            (self.root / "step-00000005").mkdir()
            (self.root / "step-00000006").write_text("a file")
            (self.root / "step-00000008").symlink_to(self.root / "kept")
            others = set(names_in(self.root)) - {"step-00000001", "step-00000002"}
            run.steps(range(3, 5))
            run.manager.wait()
            self.assertEqual(set(names_in(self.root)), others | {"step-00000003", "step-00000004"})
            garble(self.root / "step-00000003")
            shutil.rmtree(self.root / "step-00000005")
            run.steps(range(5, 6))
            run.manager.wait()
            self.assertIn("step-00000003", names_in(self.root), "a damaged one is neither counted nor removed")
            refused(lambda: run.steps(range(6, 7)), CheckpointError, "step-00000006")
            words = ("step-00000007: is there already, and no CheckpointManager made it",)
            refused(lambda: run.steps(range(7, 8)), CheckpointError, *words)
        self.assertLessEqual(others - {"step-00000005"}, set(names_in(self.root)))

    def test_keep_last_of_save_does_not_count_those_of_a_manager(self) -> None:
        run = Run(self.root, "plain", every=1)
        with run.manager:
            run.steps(range(1, 4))
        save_plain(self.root / "step-9", run.model, step=9, keep_last=1)
        self.assertEqual(steps_in(self.root), [9, 3, 2, 1])

    def test_one_that_cannot_be_loaded_does_not_count(self) -> None:
        run = Run(self.root, "plain", every=1, keep_last=2)
        with run.manager:
            run.steps(range(1, 3))
            run.manager.wait()
            manifest = self.root / "step-00000002" / "fsdp_optim.json"
            text = manifest.read_bytes()
            manifest.write_bytes(text[:-40] + b"x" + text[-39:])  # behind the brief
            run.steps(range(3, 4))
        self.check_only("step-00000001", "step-00000002", "step-00000003")

    @parameterized.expand([("removed", {"keep_last": 1}, 1), ("taken back", {}, 2)])
    def test_nothing_goes_before_the_new_one_is_on_the_disk(self, _: str, rules: dict[str, Any], last: int) -> None:
        """Also with durable=False: what goes may be the only one that is on the disk."""
        run = Run(self.root, "plain", every=1, **rules)
        events: list[str] = []
        real_sync, real_remove = os.fsync, FolderShelf.remove

        def sync(file: int) -> None:
            if os.readlink(f"/proc/self/fd/{file}").endswith("model.safetensors"):
                events.append("sync")
            real_sync(file)

        def remove(directory: Any, ones: Any, reason: str) -> None:
            events.append("remove")
            real_remove(directory, ones, reason)

        patches = (mock.patch.object(os, "fsync", sync), mock.patch.object(FolderShelf, "remove", remove))
        with run.manager, patches[0], patches[1]:
            run.steps(range(1, last + 1))
            run.manager.wait()
            self.assertEqual(events, [], "nothing goes, and nothing is flushed")
            if last == 2:
                run.manager.rollback(to=1)
                run.manager.save(3)
            else:
                run.steps([2])
            run.manager.wait()
        self.assertEqual((events[0], events[-1]), ("sync", "remove"))

    def test_a_reader_passes_over_what_a_later_version_records(self) -> None:
        """As readers of earlier versions do with the record of a manager."""
        run = Run(self.root, "plain", every=1)
        with run.manager:
            run.steps([1])
        folder = self.root / "step-00000001"
        manifest = read_manifest(folder)
        self.assertEqual(manifest["brief"]["manager"], {"after": -1, "metric": None})
        more = sealed_brief({**manifest["brief"], "manager": {"after": -1, "metric": None, "more": 1}, "yet more": [2]})
        seal_as_it_is(folder, {**manifest, "brief": more})
        self.assertEqual(Path(str(fsdp_optim.latest(self.root))).name, folder.name)
        again = Run(self.root, "plain")
        with again.manager:
            self.assertEqual(again.manager.resume(), 1)


class BucketTest(unittest.TestCase):
    def test_a_bucket(self) -> None:
        """Save, keep, resume, go back, in a store without renames."""
        root = f"memory://{self.id()}/run"
        run = Run(root, "plain", every=1, keep_last=3)
        with run.manager:
            self.assertEqual(run.manager.resume(), 0)
            run.steps(range(1, 6))
        self.assertEqual(steps_in(root), [5, 4, 3])
        again = Run(root, "plain", every=2, keep_last=3)
        with again.manager:
            self.assertEqual(again.manager.resume(), 5)
            check_same("params", again.everything()["params"], run.everything()["params"])
            again.manager.rollback(to=3)
            again.steps(range(4, 5))
            again.manager.wait()
            self.assertEqual(steps_in(root), [4, 3])


if __name__ == "__main__":
    unittest.main()
