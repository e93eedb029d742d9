"""CheckpointManager: a run that stopped continues as if it had not, also on another number of ranks."""

from __future__ import annotations

import logging
import unittest
from functools import partial
from pathlib import Path

import pytest
import torch
from kit.cases import expand
from kit.catalogs import LOG, CatalogTest
from kit.compare import check_same
from kit.managed import Run, closing_all, steps_in
from kit.tables import each
from kit.wrapping import cpu

from fsdp_optim.testing import run_on_ranks

LAST = 7


def folder_of(root: Path, name: str) -> Path:
    return root / name.replace(" ", "-")


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


class StopTest(CatalogTest):
    def test_losses_are_those_of_a_run_that_never_stopped(self) -> None:
        run_on_ranks(each, 2, partial(stop_and_resume, self.root), [("FSDP2",), ("fairscale flat",), ("DDP",)])

    @pytest.mark.slow
    def test_losses_of_other_wrappers(self) -> None:
        run_on_ranks(each, 2, partial(stop_and_resume, self.root), [("FSDP1 flat",), ("FSDP1 orig",), ("HSDP",)])

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
    """The warning about ranks that the checkpoint does not have, and the values of such a rank."""
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
    return [line for line in logs if "random states" in line and "was saved by" in line]


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
        self.assertEqual([len(lines) for lines in told], [1, 0, 0])
        self.assertIn(
            "was saved by 2 ranks, so rank 2 is new: it keeps its own state['loader'] and random states; seed it",
            told[0][0],
        )


if __name__ == "__main__":
    unittest.main()
