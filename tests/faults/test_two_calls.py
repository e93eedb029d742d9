"""Two calls at once on the same ranks: refused at once, on all ranks; and a step between two items of the iterator."""

from __future__ import annotations

import gc
import tempfile
import threading
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_refused, check_same, error_text
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Trained

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import agree as agreeing
from fsdp_optim.transport import meeting

WORLD = 2
Errors = list[tuple[str, str]]


def iterator_of(trained: Trained, **kwargs: Any) -> Any:
    return fsdp_optim.iter_full_optim_state(
        trained.model, trained.optim, 0, **as_options(fsdp_optim.CallOptions, **kwargs, bucket_nbytes=64, timeout=60.0)
    )


CALLS: dict[str, Callable[[Trained, Path], Any]] = {
    "gather": lambda trained, path: trained.gather(0),
    "scatter": lambda trained, path: trained.scatter(None, 1),
    "iterate": lambda trained, path: next(iterator_of(trained)),
    "transfer": lambda trained, path: fsdp_optim.transfer_optim_state(
        trained.model, trained.optim, trained.model, trained.optim
    ),
    "save": lambda trained, path: fsdp_optim.save(path / "new", trained.model, trained.optim),
    "async_save": lambda trained, path: fsdp_optim.async_save(path / "new", trained.model, trained.optim),
    "load": lambda trained, path: fsdp_optim.load(path / "old", trained.model, trained.optim),
}


def while_suspended(folder: str) -> dict[str, list[tuple[str, str]]]:
    """Every call while an iterator is suspended: on all ranks; on one rank, whose iterator ends on all."""
    trained, path, errors = Trained("FSDP2", adam, 1), Path(folder), {}
    wanted = trained.gather(0)
    fsdp_optim.save(path / "old", trained.model, trained.optim)
    for verb, call in CALLS.items():
        iterator = iterator_of(trained)
        next(iterator)
        errors[f"{verb} on all ranks"] = [
            error_text(lambda: call(trained, path)),  # noqa: B023
            error_text(lambda: list(iterator)),  # noqa: B023
        ]
        check_same(f"after {verb}", trained.gather(0), wanted)
    for odd in range(WORLD):
        iterator = iterator_of(trained)
        next(iterator)
        if dist.get_rank() == odd:
            errors[f"on rank {odd} only"] = [error_text(lambda: trained.gather(0)), error_text(lambda: list(iterator))]  # noqa: B023
        else:
            error = error_text(lambda: list(iterator))  # noqa: B023
            errors[f"on rank {odd} only"] = [error, error]
        check_same(f"after a call on rank {odd}", trained.gather(0), wanted)
    return errors


def iterators_that_are_over() -> None:
    """Exhausted, closed, forgotten, garbage: none of them is in the way; nor is a call inside a loop over models."""
    models = [Trained("FSDP2", adam, steps) for steps in (1, 2)]
    fulls = []
    for trained in models:  # one call after the other
        fulls.append(trained.gather(None))
        trained.load(fulls[-1])
        list(iterator_of(trained))
    trained = models[0]
    iterator = iterator_of(trained)
    next(iterator)
    iterator.close()
    check_same("after closing", trained.gather(None), fulls[0])
    iterator = iterator_of(trained)
    next(iterator)
    del iterator
    check_same("after forgetting", trained.gather(None), fulls[0])
    gc.disable()
    try:
        circle: list[Any] = [iterator_of(trained)]
        circle.append(circle)
        next(circle[0])
        del circle
        check_same("after losing", trained.gather(None), fulls[0])
    finally:
        gc.enable()
    never_begun = iterator_of(trained)
    check_same("one that was never begun", trained.gather(None), fulls[0])
    check_same("and then it is", len(list(never_begun)), len(fulls[0]["state"]))
    groups = [dist.new_group([rank]) for rank in range(WORLD)]
    alone = Trained("plain", adam, 1)
    iterator = iterator_of(trained)
    next(iterator)
    alone.gather(dist.get_rank(), process_group=groups[dist.get_rank()])  # of this rank alone: nothing mixes
    list(iterator)


def two_threads() -> list[list[tuple[str, str]]]:
    """Two threads gather two models: while the one is held in a meeting on this rank, the other begins."""
    models = [Trained("FSDP2", adam, steps) for steps in (1, 2)]
    wanted = [trained.gather(None) for trained in models]
    heard: list[list[tuple[str, str]]] = []
    conclude = meeting.Meeting.conclude
    for odd in (0, 1, None):  # the rank whose threads collide; None: all
        inside, refused = threading.Event(), threading.Event()
        errors: list[tuple[str, str]] = [("", ""), ("", "")]
        collides = odd in (dist.get_rank(), None)

        def held(self: Any, statement: Any) -> Any:
            inside.set()  # noqa: B023
            if not refused.wait(60):  # noqa: B023
                raise AssertionError("the other thread did not come back")
            return conclude(self, statement)

        def first(order: int) -> None:
            errors[0] = error_text(lambda: models[order].gather(None, timeout=60.0))  # noqa: B023

        order = dist.get_rank() if odd is None else 0  # the first is model A on one rank, model B on the other
        with mock.patch.object(meeting.Meeting, "conclude", held):
            thread = threading.Thread(target=first, args=(order,))
            thread.start()
            inside.wait(60)
            if collides:
                errors[1] = error_text(lambda: models[1 - order].gather(None, timeout=60.0))  # noqa: B023
            refused.set()
            thread.join(60)
        heard.append(errors if collides else [errors[0], errors[0]])
        for trained, full in zip(models, wanted, strict=True):
            check_same("afterwards", trained.gather(None), full)
    return heard


def step_between(when: str) -> list[Errors]:
    """The errors when the state changes after the second item, on all ranks or on one of them."""
    errors = []
    for bucket_nbytes in (64, 1 << 20):
        for ranks in ((0, 1), (0,), (1,)):
            trained = Trained("FSDP2", adam, 1)

            def loop() -> None:
                iterator = fsdp_optim.iter_full_optim_state(
                    trained.model,  # noqa: B023
                    trained.optim,  # noqa: B023
                    None,
                    options=fsdp_optim.CallOptions(bucket_nbytes=bucket_nbytes, timeout=60.0),  # noqa: B023
                )
                for index, _ in enumerate(iterator):
                    if index == 1 and dist.get_rank() in ranks:  # noqa: B023
                        CHANGES[when](trained)  # noqa: B023

            errors.append([error_text(loop)])
            check_same("afterwards", set(dict(iterator_of(Trained("FSDP2", adam, 1)))), set(trained.numbers.start))
    return errors


@torch.no_grad()
def in_place(trained: Trained) -> None:
    for values in trained.optim.state.values():
        values["exp_avg"].add_(1.0)


def other_tensors(trained: Trained) -> None:
    for values in trained.optim.state.values():
        values["exp_avg_sq"] = values["exp_avg_sq"].clone()


def without_some(trained: Trained) -> None:
    for values in trained.optim.state.values():
        values.pop("step")


CHANGES: dict[str, Callable[[Trained], Any]] = {
    "a step": lambda trained: trained.step([7]),
    "in place": in_place,
    "other tensors": other_tensors,
    "a value goes": without_some,
}


def no_step_between() -> None:
    """Reading, weights that change, and a step after the last item, are no changes of the state."""
    trained = Trained("FSDP2", adam, 1)
    with torch.no_grad():
        for index, _ in enumerate(iterator_of(trained)):
            if index == 1:
                trained.optim.state_dict()
                for param in trained.params:
                    param.add_(1.0)
    trained.step([8])
    list(iterator_of(trained))


class TwoCallsTest(unittest.TestCase):
    def test_a_call_while_an_iterator_is_suspended(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(while_suspended, WORLD, folder)
        for label in by_rank[0]:
            with self.subTest(label):
                calls = [rank_errors[label][0] for rank_errors in by_rank]
                self.assertEqual({kind for kind, _ in calls}, {"RankError"}, calls)
                self.assertTrue(all("iter_full_optim_state" in text and "close it" in text for _, text in calls), calls)
                later = [rank_errors[label][1] for rank_errors in by_rank]
                self.assertEqual({kind for kind, _ in later}, {"RankError"}, later)
                self.assertTrue(all("iter_full_optim_state" in text for _, text in later), later)

    def test_iterators_that_are_over_are_in_nobodys_way(self) -> None:
        run_on_ranks(iterators_that_are_over, WORLD)

    def test_two_threads(self) -> None:
        by_rank = run_on_ranks(two_threads, WORLD)
        for number in range(3):
            for errors in (rank_errors[number] for rank_errors in by_rank):
                for kind, text in errors:
                    self.assertEqual(kind, "RankError", by_rank)
                    self.assertIn("is in flight", text)

    @expand(*some(tuple(CHANGES), every=2))
    def test_a_change_between_two_items(self, when: str) -> None:
        by_rank = run_on_ranks(step_between, WORLD, when)
        for number in range(len(by_rank[0])):
            errors = [rank_errors[number][0] for rank_errors in by_rank]
            check_refused(f"{when}, case {number}", errors, "StateError", "changed", "iter_full_optim_state", "rank")

    def test_what_is_no_change(self) -> None:
        run_on_ranks(no_step_between, WORLD)


class AnswersTest(unittest.TestCase):
    def test_no_answer_of_a_meeting_can_be_ignored(self) -> None:
        """Ranks that are at different steps all raise, whoever comes first: agree() has no answer that one could drop."""
        for by_rank in (run_on_ranks(at_different_steps, WORLD),):
            for number in range(len(by_rank[0])):
                errors = [rank_errors[number] for rank_errors in by_rank]
                check_refused(f"case {number}", errors, "RankError", "'a call: one'", "'a call: other'")


def at_different_steps() -> list[tuple[str, str]]:
    from fsdp_optim.transport import world_here

    group = world_here().group("a call", range(WORLD), timeout=60.0)
    steps = ("one", "other") if dist.get_rank() else ("other", "one")
    errors = [error_text(lambda: agreeing.agree(group, step)) for step in steps]  # noqa: B023
    agreeing.agree(group, "the same")
    return errors
