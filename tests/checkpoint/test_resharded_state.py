"""Objects of `per_rank` at another number of ranks: their own `reshard`, and what happens to those that cannot.

Ranks are threads, but in the last class, where they are processes with wrappers and a manager.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text
from kit.described import training_here
from kit.folders import InFolder
from kit.optimizers import adam
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import per_rank
from fsdp_optim.checkpoint.common.run_state import RunState
from fsdp_optim.checkpoint.load.resharded_state import RanksHere, resharded
from fsdp_optim.checkpoint.load.saved_state import SavedState
from fsdp_optim.testing import run_on_ranks, run_on_threads, thread_rank
from fsdp_optim.transport import world_here

QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)


class Plain:
    """An object without `reshard`."""

    def __init__(self, items: Sequence[Any] = ()) -> None:
        self.items = list(items)

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = list(state["items"])


class Hand(Plain):
    """Items that are dealt out anew; `calls`: what `reshard` got."""

    def __init__(self, items: Sequence[Any] = ()) -> None:
        super().__init__(items)
        self.calls: list[tuple[list[Any], int]] = []

    def reshard(self, states: list[Any], world_size: int) -> Any:
        self.calls.append((copy.deepcopy(states), world_size))
        everything = [item for state in states for item in state["items"]]
        return [{"items": everything[rank::world_size]} for rank in range(world_size)]


class FirstOnly(Hand):
    def reshard(self, states: list[Any], world_size: int) -> Any:
        return [states[0], *[None] * (world_size - 1)]


class Choosy(Hand):
    """Takes the state of its rank only where that has three items."""

    def fits(self, state: dict[str, Any]) -> bool:
        return len(state["items"]) == 3


class Unsure(Hand):
    def fits(self, state: dict[str, Any]) -> bool:
        raise KeyError("items")


class Refusing(Hand):
    def reshard(self, states: list[Any], world_size: int) -> Any:
        raise fsdp_optim.StateError("the items belong together")


class Failing(Hand):
    """Fails on rank 1."""

    def reshard(self, states: list[Any], world_size: int) -> Any:
        return super().reshard(states, world_size) if thread_rank() != 1 else states[99]


class Short(Hand):
    def reshard(self, states: list[Any], world_size: int) -> Any:
        return super().reshard(states, world_size)[1:]


class NoList(Hand):
    def reshard(self, states: list[Any], world_size: int) -> Any:
        return dict(enumerate(super().reshard(states, world_size)))


def items_of(rank: int) -> list[str]:
    return [f"{rank}{letter}" for letter in "abcd"[: 2 + rank % 2]]


def dealt(num_saved: int, num_ranks: int, rank: int) -> list[str]:
    """What a rank gets of the items of all ranks that saved, one item at a time."""
    got, turn = [], 0
    for saved in range(num_saved):
        for item in items_of(saved):
            if turn == rank:
                got.append(item)
            turn = (turn + 1) % num_ranks
    return got


def state_with(target: Any) -> dict[str, Any]:
    return {"common": Plain(["c"]), "hand": per_rank(target), "value": per_rank({"rank": world_here().rank})}


def save_here(path: Path, **options: Any) -> None:
    with training_here() as run:
        state = state_with(Hand(items_of(thread_rank())))
        fsdp_optim.save(path, run.model, run.optim, state=state, options=QUIET, **options)


def in_memory(run: Any) -> Any:
    return copy.deepcopy([run.model.state_dict(), run.optim.state_dict()])


def load_here(path: Path, make: Callable[..., Any], strict: bool = True, **options: Any) -> Any:
    """The result, the object, and the error where there was one, with which nothing may have changed."""
    with training_here(cut="columns", steps=2) as run:
        target, common, before = make(["own"]), Plain(["own"]), in_memory(run)
        state: dict[str, Any] = {"common": common, "hand": per_rank(target), "value": None}
        result = None

        def load() -> None:
            nonlocal result
            result = fsdp_optim.load(path, run.model, run.optim, state=state, strict=strict, **options)

        error = error_text(load)
        if error[0]:
            check_same("after an error", [in_memory(run), common.items, target.items], [before, ["own"], ["own"]])
        else:
            check_same("common", common.items, ["c"])
        return result, target, error


class Lines(logging.Handler):
    """The warnings of this library inside the context."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.emit = lambda record: self.texts.append(record.getMessage())  # type: ignore[method-assign]

    def __enter__(self) -> list[str]:
        logging.getLogger("fsdp_optim").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fsdp_optim").removeHandler(self)


class AskedTest(InFolder):
    @parameterized.expand([(2, 3, "safetensors"), (3, 2, "dcp"), (4, 1, "safetensors"), (1, 4, "dcp")])
    def test_each_rank_gets_its_state_of_the_new_ones(self, num_saved: int, num_ranks: int, format: str) -> None:
        run_on_threads(save_here, num_saved, self.path, format=format)
        with Lines() as warnings:
            loaded = run_on_threads(load_here, num_ranks, self.path, Hand)
        states = [{"items": items_of(rank)} for rank in range(num_saved)]
        for rank, (result, target, _) in enumerate(loaded):
            self.assertEqual(target.calls, [(states, num_ranks)])
            self.assertEqual(target.items, dealt(num_saved, num_ranks, rank))
            self.assertEqual(result.state["hand"], {"items": target.items})
            is_new = rank >= num_saved
            self.assertEqual(result.missing_keys, ("state['value']",) if is_new else ())
            self.assertEqual(result.state.get("value"), None if is_new else {"rank": rank})  # the same index
            self.assertEqual([of_rank["hand"] for of_rank in result.all_ranks], states)
        self.assertEqual(len(warnings), int(num_ranks > num_saved), warnings)
        self.assertNotIn("hand", "".join(warnings))

    def test_not_at_the_same_number_of_ranks(self) -> None:
        run_on_threads(save_here, 2, self.path)
        for rank, (result, target, _) in enumerate(run_on_threads(load_here, 2, self.path, Hand)):
            self.assertEqual((target.calls, target.items, result.missing_keys), ([], items_of(rank), ()))

    def test_at_the_same_number_of_ranks_where_its_own_does_not_fit(self) -> None:
        run_on_threads(save_here, 2, self.path)
        [(_, first, _), (_, second, _)] = run_on_threads(load_here, 2, self.path, Choosy)
        self.assertEqual((len(first.calls), first.items), (1, dealt(2, 2, 0)))
        self.assertEqual((second.calls, second.items), ([], items_of(1)))
        errors = [error for _, _, error in run_on_threads(load_here, 2, self.path, Unsure)]
        self.assertEqual([kind for kind, _ in errors], ["StateError"] * 2)
        self.assertIn("state['hand']: its fits(state) failed: KeyError: 'items'", errors[0][1])

    def test_a_process_alone(self) -> None:
        run_on_threads(save_here, 3, self.path)
        hand = Hand()
        state = {"common": Plain(), "hand": per_rank(hand), "value": None}
        result = fsdp_optim.load(self.path, state=state)
        self.assertEqual(hand.items, dealt(3, 1, 0))
        self.assertEqual(result.state["hand"], {"items": hand.items})
        state["hand"] = per_rank(Plain())
        kind, text = error_text(lambda: fsdp_optim.load(self.path, state=state))
        self.assertEqual(kind, "StateError")
        self.assertIn("state['hand']: was saved by 3 ranks, and 1 rank loads it", text)

    def test_the_states_of_all_ranks_by_hand(self) -> None:
        """As `per_rank` says it: for an object that a load at the same number of ranks cannot serve."""
        run_on_threads(save_here, 3, self.path)
        hand = Hand()
        of_ranks = fsdp_optim.load(self.path).all_ranks
        hand.load_state_dict(hand.reshard([of_rank["hand"] for of_rank in of_ranks], 2)[1])
        self.assertEqual(hand.items, dealt(3, 2, 1))

    def test_a_rank_that_gets_none_keeps_its_own(self) -> None:
        run_on_threads(save_here, 2, self.path)
        for num_ranks in (1, 3):
            with Lines() as warnings:
                loaded = run_on_threads(load_here, num_ranks, self.path, FirstOnly)
            for rank, (result, target, _) in enumerate(loaded):
                self.assertEqual(target.items, items_of(0) if rank == 0 else ["own"])
                self.assertEqual("state['hand']" in result.missing_keys, rank > 0)
                self.assertEqual("hand" in result.state, rank == 0)
            if num_ranks == 3:
                self.assertIn("rank 2 is new: it keeps its own state['hand'] and state['value']", warnings[0])

    def test_a_pickle_is_not_read_unasked(self) -> None:
        def save(path: Path) -> None:
            with training_here() as run:
                state = state_with(Hand([functools.partial(int, "7")]))
                fsdp_optim.save(path, run.model, run.optim, state=state, options=options)

        options = fsdp_optim.SaveOptions(durable=False, progress=False, allow_pickle=True)
        run_on_threads(save, 2, self.path)
        errors = [error for _, _, error in run_on_threads(load_here, 3, self.path, Hand)]
        check_refused("a pickle", errors, "CheckpointError", "allow_pickle")
        trusted = {"options": fsdp_optim.LoadOptions(allow_pickle=True)}
        for rank, (_, target, _) in enumerate(run_on_threads(load_here, 3, self.path, Hand, **trusted)):
            self.assertEqual([item() for item in target.items], [7] if rank < 2 else [])


class RefusedTest(InFolder):
    def setUp(self) -> None:
        super().setUp()
        run_on_threads(save_here, 4, self.path)

    @parameterized.expand(
        [
            (Plain, ("a Plain does not have reshard(states, world_size)", "load on 4 ranks", "or give strict=False")),
            (Refusing, ("a Refusing refused reshard(states, world_size=2): the items belong together", "strict=False")),
        ]
    )
    def test_an_object_that_cannot(self, kind: Callable[..., Any], words: tuple[str, ...]) -> None:
        errors = [error for _, _, error in run_on_threads(load_here, 2, self.path, kind)]
        check_refused(
            "strict", errors, "StateError", "state['hand']: was saved by 4 ranks, and 2 ranks load it", *words
        )
        with Lines() as warnings:
            loaded = run_on_threads(load_here, 2, self.path, kind, strict=False)
        for rank, (result, target, _) in enumerate(loaded):
            self.assertEqual(target.items, ["own"])
            self.assertEqual(result.missing_keys, ("state['hand']",))
            self.assertEqual({*result.state}, {"common", "value"})
            self.assertEqual(result.state["value"], {"rank": rank})
            self.assertEqual(result.all_ranks[3]["hand"], {"items": items_of(3)})
        self.assertEqual(len(warnings), 1, warnings)  # of the lowest rank
        self.assertTrue(warnings[0].startswith("state['hand']: was saved by 4 ranks"), warnings)
        self.assertIn("it stays as it is", warnings[0])

    def test_more_ranks_have_one_warning_for_it(self) -> None:
        with Lines() as warnings:
            loaded = run_on_threads(load_here, 5, self.path, Plain, strict=False)
        self.assertEqual([target.items for _, target, _ in loaded], [["own"]] * 5)
        self.assertEqual({result.missing_keys for result, _, _ in loaded[:4]}, {("state['hand']",)})
        self.assertEqual({*loaded[4][0].missing_keys}, {"state['hand']", "state['value']"})
        self.assertEqual([text.count("state['hand']") for text in warnings], [1, 0], warnings)

    @parameterized.expand(
        [
            (Failing, "its reshard(states, world_size=2) failed: IndexError"),
            (Short, "its reshard(states, world_size=2) returned 1 values, not a list of 2 states"),
            (NoList, "its reshard(states, world_size=2) returned a dict, not a list of 2 states"),
        ]
    )
    def test_a_wrong_answer_is_an_error_of_all_ranks(self, kind: Callable[..., Any], words: str) -> None:
        for strict in (True, False):
            errors = [error for _, _, error in run_on_threads(load_here, 2, self.path, kind, strict=strict)]
            self.assertEqual([name for name, _ in errors], ["StateError"] * 2)
            for _, text in errors:
                self.assertIn(words, text)

    def test_without_names_nothing_is_asked(self) -> None:
        self.assertEqual(fsdp_optim.load(self.path).state["hand"], {"items": items_of(0)})

    def test_a_rank_that_has_saved_none(self) -> None:
        """Which other tools may write."""
        of_ranks = ({"a": 1}, {"b": 2})
        saved = SavedState(own={"a": 1}, num_ranks=2, read_each=lambda: of_ranks)
        state = RunState({"a": per_rank(Hand())})
        kind, text = error_text(lambda: resharded(saved, state, RanksHere(0, 1), strict=True))
        self.assertEqual(kind, "StateError")
        self.assertIn("but rank 1 has saved none: load on 2 ranks", text)


# ------------------------------------------------------------------------------------------ processes, and a manager


def resumed(root: Path, wrapper: str, last: int, make: Callable[..., Any] = Hand) -> Any:
    """Resume, and save the next step with the items of this rank, and one more of it."""
    with cpu():
        run, rank = Trained(wrapper, adam, 1), dist.get_rank()
        hand = make(items_of(rank))
        options = fsdp_optim.ManagerOptions(durable=False, progress=False, signals=())
        state = {"hand": per_rank(hand)}
        with fsdp_optim.CheckpointManager(root, run.model, run.optim, state=state, options=options) as manager:
            step = manager.resume()
            got = list(hand.items)
            if step < last:
                manager.save(last)
            missing = manager.restored.missing_keys if manager.restored is not None else ()
            return step, got, missing


def kept_by_manager(root: Path) -> tuple[tuple[str, str], Any]:
    with cpu():
        run, hand = Trained("DDP", adam, 1), Plain(["own"])
        options = fsdp_optim.ManagerOptions(durable=False, progress=False, signals=())
        with fsdp_optim.CheckpointManager(
            root, run.model, run.optim, state={"hand": per_rank(hand)}, options=options
        ) as manager:
            refusal = error_text(manager.resume)
            step = manager.resume(strict=False)
            assert manager.restored is not None
            return refusal, (step, hand.items, manager.restored.missing_keys)


class ManagerTest(InFolder):
    def test_a_run_that_changes_its_ranks_twice(self) -> None:
        everything = sorted(item for rank in range(2) for item in items_of(rank))
        run_on_ranks(resumed, 2, self.path, "FSDP2", 1)
        for step, (size, wrapper) in enumerate(((3, "FSDP1 flat"), (2, "DDP"), (1, "FSDP2")), 1):
            by_rank = run_on_ranks(resumed, size, self.path, wrapper, step + 1)
            self.assertEqual([at for at, _, _ in by_rank], [step] * size)
            self.assertEqual(sorted(item for _, got, _ in by_rank for item in got), everything)
            if size == 3:
                self.assertEqual([got for _, got, _ in by_rank], [dealt(2, 3, rank) for rank in range(3)])
            self.assertEqual({missing for _, _, missing in by_rank}, {()})

    def test_one_that_cannot_is_refused_by_a_manager(self) -> None:
        run_on_ranks(resumed, 3, self.path, "FSDP2", 1, Plain)
        by_rank = run_on_ranks(kept_by_manager, 2, self.path)
        check_refused(
            "resume", [refusal for refusal, _ in by_rank], "StateError", "state['hand']", "3 ranks", "strict=False"
        )
        self.assertEqual([kept for _, kept in by_rank], [(1, ["own"], ("state['hand']",))] * 2)
