"""A load that fails when everything was read: the optimizer, objects and modules have their previous state, on all ranks."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_same, refused
from kit.managed import Run

from fsdp_optim import StateError
from fsdp_optim.checkpoint.common import random_states as states
from fsdp_optim.checkpoint.common import run_state
from fsdp_optim.checkpoint.load.targets import Weights
from fsdp_optim.testing import run_on_ranks

WORLD = 2
MIXTURE = "the model is a mixture now"


def _without_random(run: Run) -> dict[str, Any]:
    state = run.everything()
    del state["random"]
    return state


def _saved(root: Path) -> Run:
    run = Run(root, "FSDP2")
    run.steps([1, 2])
    run.manager.wait()
    for step in (3, 5, 7):  # none is saved
        run.train(step)
    return run


def refusing_optimizer(folder: Path) -> None:
    """Each rank's optimizer in turn: schedulers, scalers, averages and loaders are those of step 7 on every rank."""
    for bad in range(WORLD):
        run = _saved(folder / f"optimizer-{bad}")
        before = _without_random(run)

        def refuse(state: object) -> None:
            raise ValueError("not my state")

        if dist.get_rank() == bad:
            run.optim.load_state_dict = refuse  # type: ignore[method-assign, assignment]
        refused(run.manager.resume, StateError, "not my state", "nothing was loaded")
        check_same(f"rank {bad} refused", _without_random(run), before)
        run.optim.__dict__.pop("load_state_dict", None)
        check_same("loaded", run.manager.resume(), 2)
        check_same("objects", run.scheduler.last_epoch, 2)
        run.manager.close()


def refusing_object(folder: Path) -> None:
    """The last object in turn on each rank: those before it get their state back."""
    for bad in range(WORLD):
        run = _saved(folder / f"object-{bad}")
        before = _without_random(run)

        def refuse(state: object) -> None:
            raise ValueError("not my state")

        if dist.get_rank() == bad:
            run.loader.load_state_dict = refuse  # type: ignore[method-assign]
        refused(run.manager.resume, StateError, "not my state", f"rank {bad}")
        check_same(f"rank {bad} refused", _without_random(run), before)
        run.loader.__dict__.pop("load_state_dict", None)
        check_same("loaded", run.manager.resume(), 2)
        run.manager.close()


def unfit_random_states(folder: Path) -> None:
    """The random states of one rank cannot be set: nothing has changed by then, also not the random numbers."""
    for bad in range(WORLD):
        for name, state in (("python", (3, (1,), None)), ("torch", torch.zeros(3, dtype=torch.uint8))):
            real_states = states.random_states()
            given = {**real_states, name: state} if dist.get_rank() == bad else real_states
            with mock.patch.object(run_state, "random_states", return_value=given):
                run = _saved(folder / f"random-{bad}-{name}")
            before, numbers = _without_random(run), states.random_states()
            refused(run.manager.resume, StateError, f"the random states of rank {bad}", "cannot be set", "rng=False")
            after = states.random_states()
            check_same(f"{name} of rank {bad}", _without_random(run), before)
            check_same("random numbers", [after["python"], after["torch"]], [numbers["python"], numbers["torch"]])
            run.manager.close()


def failing_weights(folder: Path) -> None:
    """The weights of one rank cannot be written: the message says what is there, and all but the weights are as before."""
    for bad in range(WORLD):
        for error in (torch.OutOfMemoryError("no memory left"), KeyboardInterrupt("by hand")):
            run = _saved(folder / f"weights-{bad}-{type(error).__name__}")
            before = _without_random(run)
            del before["params"]
            install = Weights.install

            def fails(weights: Weights) -> None:
                if dist.get_rank() == bad:  # noqa: B023
                    raise error  # noqa: B023
                install(weights)  # noqa: B023

            with mock.patch.object(Weights, "install", fails):
                if dist.get_rank() == bad and isinstance(error, KeyboardInterrupt):
                    _interrupted(run.manager.resume)
                else:
                    refused(run.manager.resume, StateError, f"rank {bad}", type(error).__name__, MIXTURE)
            after = _without_random(run)
            del after["params"]
            check_same(f"rank {bad} failed", after, before)
            check_same("loaded", run.manager.resume(), 2)
            run.manager.close()


def _interrupted(call: Callable[[], Any]) -> None:
    try:
        call()
    except KeyboardInterrupt:
        return
    raise AssertionError("no KeyboardInterrupt")


class HalfALoadTest(unittest.TestCase):
    def setUp(self) -> None:
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.folder = Path(held.name)

    def test_an_optimizer_refuses(self) -> None:
        run_on_ranks(refusing_optimizer, WORLD, self.folder)

    def test_an_object_refuses(self) -> None:
        run_on_ranks(refusing_object, WORLD, self.folder)

    def test_random_states_cannot_be_set(self) -> None:
        run_on_ranks(unfit_random_states, WORLD, self.folder)

    def test_weights_cannot_be_written(self) -> None:
        run_on_ranks(failing_weights, WORLD, self.folder)


if __name__ == "__main__":
    unittest.main()
