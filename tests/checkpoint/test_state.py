"""`state=` of save and load: objects and trees by name, those of each rank, and what older versions have saved instead."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same, error_text
from kit.folders import InFolder
from kit.optimizers import adam
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.checkpoint.load.saved_state import _named
from fsdp_optim.testing import run_on_ranks

QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)


class Counter:
    """An object with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["count"] < 0:
            raise ValueError("a count below zero")
        self.count = state["count"]


class CounterOfRank(Counter):
    """One that another number of ranks takes over by index."""

    def reshard(self, states: list[Any], world_size: int) -> list[Any]:
        return [states[rank] if rank < len(states) else None for rank in range(world_size)]


class Saving(InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.model = nn.Linear(3, 2)

    def save(self, state: Any, **more: Any) -> None:
        fsdp_optim.save(self.path, self.model, state=state, options=QUIET, **more)


class OneProcessTest(Saving):
    def test_objects_are_loaded_and_values_are_returned(self) -> None:
        self.save({"counter": Counter(3), "tree": {"a": (1, torch.ones(2))}, "own": fsdp_optim.per_rank(Counter(5))})
        counter, own = Counter(), Counter()
        for model in (nn.Linear(3, 2), None):
            counter.count = own.count = 0
            state = {"counter": counter, "tree": None, "own": fsdp_optim.per_rank(own)}
            result = fsdp_optim.load(self.path, model, state=state)
            self.assertEqual((counter.count, own.count), (3, 5))
            wanted = {"counter": {"count": 3}, "tree": {"a": (1, torch.ones(2))}, "own": {"count": 5}}
            check_same("everything that was saved", result.state, wanted)
            self.assertEqual((result.missing_keys, result.unexpected_keys), ((), ()))

    def test_without_state_no_name_is_asked_for(self) -> None:
        self.save({"counter": Counter(3)})
        self.assertEqual(fsdp_optim.load(self.path, self.model).state, {"counter": {"count": 3}})

    def test_names_that_only_one_side_has(self) -> None:
        self.save({"a": 1, "b": Counter(2)})
        counter = Counter()
        for state, words in (
            ({"a": None}, "state['b']: only the checkpoint has it"),
            ({"a": None, "b": counter, "c": None}, "state['c']: this call has it and the checkpoint does not"),
        ):
            kind, text = error_text(lambda state=state: fsdp_optim.load(self.path, self.model, state=state))
            self.assertEqual(kind, "StateError")
            self.assertIn(words, text)
            self.assertEqual(counter.count, 0)
        result = fsdp_optim.load(self.path, self.model, state={"c": counter, "b": counter}, strict=False)
        self.assertEqual((result.missing_keys, result.unexpected_keys), (("state['c']",), ("state['a']",)))
        self.assertEqual(counter.count, 2)

    def test_each_ranks_own_and_in_common_are_not_mixed_up(self) -> None:
        self.save({"a": Counter(1), "b": fsdp_optim.per_rank(Counter(2))})
        right = {"a": Counter(), "b": fsdp_optim.per_rank(Counter())}
        for name, value, words in (
            ("a", fsdp_optim.per_rank(Counter()), "once for all ranks: give it without per_rank()"),
            ("b", Counter(), "each rank has saved its own: give per_rank(...)"),
        ):
            kind, text = error_text(
                lambda name=name, value=value: fsdp_optim.load(self.path, self.model, state={**right, name: value})
            )
            self.assertEqual(kind, "StateError")
            self.assertIn(f"state[{name!r}]: ", text)
            self.assertIn(words, text)

    def test_a_refusal_leaves_everything_as_it_was(self) -> None:
        self.save({"first": Counter(1), "second": Counter(-1)})
        for model in (nn.Linear(3, 2), None):
            before = {name: value.clone() for name, value in model.state_dict().items()} if model else {}
            first, second = Counter(7), Counter(8)
            kind, text = error_text(
                lambda model=model, first=first, second=second: fsdp_optim.load(
                    self.path, model, state={"first": first, "second": second}
                )
            )
            self.assertEqual(kind, "StateError")
            self.assertIn("state['second']: its load_state_dict() refused", text)
            self.assertEqual((first.count, second.count), (7, 8))
            check_same("the model", dict(model.state_dict()) if model else {}, before)

    def test_what_is_no_state(self) -> None:
        half = type("Half", (), {"state_dict": lambda self: {}})()
        for state, words in (
            ([1], "state must be a dict"),
            ({1: 2}, "state must be a dict"),
            ({"fsdp_optim.rng": 1}, "the library's own"),
            ({"half": half}, "state['half'], a Half, does not have load_state_dict()"),
        ):
            for call in (fsdp_optim.save, fsdp_optim.load):
                kind, text = error_text(lambda call=call, state=state: call(self.path, self.model, state=state))
                self.assertEqual(kind, "StateError", text)
                self.assertIn(words, text)

    def test_a_manager_and_a_save_read_each_others(self) -> None:
        optim = torch.optim.SGD(self.model.parameters(), 0.1)
        state = {"counter": Counter(4), "own": fsdp_optim.per_rank(Counter(6)), "tree": {"x": 1}}
        options = fsdp_optim.ManagerOptions(durable=False, progress=False, signals=())
        with fsdp_optim.CheckpointManager(self.path, self.model, optim, state=state, options=options) as manager:
            manager.save(1)
        fresh = {"counter": Counter(), "own": fsdp_optim.per_rank(Counter()), "tree": None}
        result = fsdp_optim.load(self.path / "step-00000001", self.model, optim, state=fresh)
        self.assertEqual((fresh["counter"].count, fresh["own"].value.count, result.step), (4, 6, 1))  # type: ignore[union-attr]
        self.assertEqual(set(result.state), {"counter", "own", "tree", "fsdp_optim.rng"})
        state["counter"].count = state["own"].value.count = 0  # type: ignore[attr-defined, union-attr]
        with fsdp_optim.CheckpointManager(self.path, self.model, optim, state=state, options=options) as manager:
            self.assertEqual(manager.resume(), 1)
            assert manager.restored is not None
            self.assertEqual(manager.restored.state["tree"], {"x": 1})
        self.assertEqual((state["counter"].count, state["own"].value.count), (4, 6))  # type: ignore[attr-defined, union-attr]


class OlderVersionsTest(unittest.TestCase):
    """The layouts of `extra`, `per_rank_extra` and of a manager's objects."""

    random = {"python": (), "torch": torch.ones(1)}

    def test_by_name(self) -> None:
        for common, own, wanted in (
            ({"a": 1}, {"rng": 2}, ({"a": 1}, {"rng": 2})),
            ({"a": 1}, [2], ({"a": 1}, {"per_rank_extra": [2]})),
            ({"a": 1}, {3: 2}, ({"a": 1}, {"per_rank_extra": {3: 2}})),
            ({"a": 1}, None, ({"a": 1}, {})),
        ):
            self.assertEqual(_named(common, own), wanted)

    def test_a_managers(self) -> None:
        common = {"state": {"scheduler": {"n": 1}}}
        with_random = {"rank": 0, "state": {"loader": {"n": 2}}, "random": self.random}
        states = _named(common, with_random)
        self.assertEqual(states[0], {"scheduler": {"n": 1}})
        self.assertEqual(states[1]["loader"], {"n": 2})
        self.assertIs(states[1]["fsdp_optim.rng"], self.random)
        without = {"rank": 0, "state": {"loader": {"n": 2}}}
        self.assertEqual(_named(common, without), ({"scheduler": {"n": 1}}, {"loader": {"n": 2}}))

    def test_a_users_own_values_that_look_alike(self) -> None:
        self.assertEqual(_named({"a": 1}, {"rank": 3}), ({"a": 1}, {"rank": 3}))
        self.assertEqual(_named({}, {"rank": 3, "state": {"x": 1}}), ({}, {"rank": 3, "state": {"x": 1}}))


class LikeAnOldManagersTest(Saving):
    """Names of the trainer's own that older versions of a manager used too: they are kept, in every format."""

    @parameterized.expand([("safetensors",), ("dcp",), ("torch",), ("torch_file",)])
    def test_names(self, format: str) -> None:
        own = {"rank": 0, "state": {"x": 1}, "random": {"python": 1, "torch": 2}}
        names = {name: fsdp_optim.per_rank(value) for name, value in own.items()}
        model = nn.Linear(3, 2)
        fsdp_optim.save(self.path, model, state={**names, "all": 7}, options=QUIET)
        if format != "safetensors":
            options = fsdp_optim.ConvertOptions(durable=False)
            fsdp_optim.convert(self.path, self.root / "new", format=format, options=options)
        path = self.path if format == "safetensors" else self.root / "new"
        for given in (None, {**dict.fromkeys(names, fsdp_optim.per_rank(None)), "all": None}):
            result = fsdp_optim.load(path, model, state=given)
            check_same(format, dict(result.state), {"all": 7, **own}, in_order=False)
            check_same("of all ranks", [dict(values) for values in result.all_ranks], [own], in_order=False)


def save_on_ranks(path: Path) -> None:
    with cpu():
        trained, rank = Trained("FSDP2", adam, 1), dist.get_rank()
        state = {"common": Counter(10 + rank), "own": fsdp_optim.per_rank(Counter(rank)), "tree": [1]}
        fsdp_optim.save(path, trained.model, trained.optim, state=state, options=QUIET)


def load_on_ranks(path: Path) -> tuple[int, int, tuple[str, ...], list[dict[str, Any]]]:
    with cpu():
        target, common, own = Trained("DDP", adam, 0), Counter(), CounterOfRank(99)
        state = {"common": common, "own": fsdp_optim.per_rank(own), "tree": None}
        result = fsdp_optim.load(path, target.model, target.optim, state=state)
        return common.count, own.count, result.missing_keys, [dict(values) for values in result.all_ranks]


def refuse_on_one_rank(path: Path) -> tuple[str, str, int, int]:
    with cpu():
        target, common, own = Trained("FSDP2", adam, 0), Counter(50), Counter(60)
        if dist.get_rank() == 1:
            own.load_state_dict = lambda state: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        state = {"common": common, "own": fsdp_optim.per_rank(own), "tree": None}
        kind, text = error_text(lambda: fsdp_optim.load(path, target.model, target.optim, state=state))
        return kind, text, common.count, own.count


def other_names(path: Path) -> tuple[str, str]:
    with cpu():
        trained, name = Trained("FSDP2", adam, 1), f"of rank {dist.get_rank()}"
        return error_text(lambda: fsdp_optim.save(path, trained.model, trained.optim, state={name: 1}, options=QUIET))


class RanksTest(Saving):
    def test_at_another_world_size(self) -> None:
        run_on_ranks(save_on_ranks, 2, self.path)
        for rank, (common, own, missing, of_all_ranks) in enumerate(run_on_ranks(load_on_ranks, 3, self.path)):
            self.assertEqual(common, 10, "the lowest rank's")
            self.assertEqual((own, missing), (rank, ()) if rank < 2 else (99, ("state['own']",)))
            self.assertEqual(of_all_ranks, [{"own": {"count": 0}}, {"own": {"count": 1}}])
        self.assertEqual([outcome[1] for outcome in run_on_ranks(load_on_ranks, 1, self.path)], [0])

    def test_one_rank_refuses(self) -> None:
        run_on_ranks(save_on_ranks, 2, self.path)
        for kind, text, common, own in run_on_ranks(refuse_on_one_rank, 2, self.path):
            self.assertEqual((kind, common, own), ("StateError", 50, 60), text)
            self.assertIn("rank 1", text)
            self.assertIn("state['own']", text)

    def test_other_names_on_another_rank(self) -> None:
        for kind, text in run_on_ranks(other_names, 2, self.path):
            self.assertEqual(kind, "RankError", text)
            self.assertIn("of rank 1", text)
        self.assertFalse(self.path.exists())
