"""State of one optimizer's class for another: refused with what differs, or, with strict=False, as much as both have."""

from __future__ import annotations

import copy
import itertools
import logging
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_refused, check_same, error_text
from kit.optimizers import OfModel
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu, snapshot
from parameterized import parameterized
from torch import nn, optim

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: optim.Adam(params, lr=0.1),
    "AdamW": lambda params: optim.AdamW(params, lr=0.1),
    "NAdam": lambda params: optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: optim.RAdam(params, lr=0.1),
    "Adamax": lambda params: optim.Adamax(params, lr=0.1),
    "Adadelta": lambda params: optim.Adadelta(params, lr=0.1),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.1),
    "ASGD": lambda params: optim.ASGD(params, lr=0.1),
    "Rprop": lambda params: optim.Rprop(params, lr=0.1),
}


STAY = (
    "decoupled_weight_decay",
    "momentum",
    "amsgrad",
    "centered",
)  # with another class: what decides what state there is


def trained(name: str, steps: int = 2, lr: float | None = None) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    made = MAKERS[name](model.parameters())
    for number in range(steps):
        step(model, made, number)
    if lr is not None:
        made.param_groups[0]["lr"] = lr
    return model, made


def step(model: nn.Module, made: optim.Optimizer, number: int) -> None:
    made.zero_grad()
    model(torch.full((4, 3), number + 1.0)).square().sum().backward()
    made.step()


def full_of(model: nn.Module, made: optim.Optimizer, recorded: bool = True) -> dict[str, Any]:
    """`recorded`: with the record of its class, as this library's dicts have it."""
    return fsdp_optim.gather_full_optim_state_dict(model, made) if recorded else made.state_dict()


class PairsTest(unittest.TestCase):
    """Every class of torch.optim for every other, on a plain module."""

    @expand(*some(list(itertools.product((0, 2), (True, False))), every=3))
    def test_another_class_is_refused(self, steps: int, recorded: bool) -> None:
        fulls = {saved: full_of(*trained(saved), recorded) for saved in MAKERS}
        for saved, live in itertools.permutations(MAKERS, 2):
            with self.subTest(saved=saved, live=live):
                full = fulls[saved]
                target, other = trained(live, steps)
                before = copy.deepcopy(other.state_dict())
                kind, text = error_text(lambda: fsdp_optim.get_shard_from_optim_state_dict(target, other, full))  # noqa: B023
                self.assertEqual(kind, "StateError", text)
                self.assertIn("strict=False", text)
                self.assertIn(f"of the class {saved}, the optimizer of the class {live}" if recorded else live, text)
                check_same("the optimizer", other.state_dict(), before)

    @parameterized.expand([(0,), (2,)])
    def test_what_both_have_is_taken_and_training_goes_on(self, steps: int) -> None:
        sources = {saved: trained(saved, lr=0.0625) for saved in MAKERS}
        fulls = {saved: full_of(*source) for saved, source in sources.items()}
        for saved, live in itertools.permutations(MAKERS, 2):
            with self.subTest(saved=saved, live=live):
                (_, made), full = sources[saved], fulls[saved]
                target, other = trained(live, steps)
                groups = copy.deepcopy(other.param_groups[0])
                shard = fsdp_optim.get_shard_from_optim_state_dict(target, other, full, strict=False)
                result = fsdp_optim.load_optim_state_dict(other, shard)
                saved_keys, live_keys = set(made.param_groups[0]) - {"params"}, set(groups) - {"params"}
                check_same(
                    "hyperparameters left out", result.unmatched_hyperparameters, tuple(sorted(saved_keys ^ live_keys))
                )
                loaded = other.param_groups[0]
                for key in live_keys:
                    is_taken = key in saved_keys and key not in STAY
                    check_same(key, loaded[key], made.param_groups[0][key] if is_taken else groups[key])
                self.assertEqual(set(loaded), set(groups))
                step(target, other, 5)

    def test_values_that_both_have_are_the_saved_ones_and_the_others_stay(self) -> None:
        model, made = trained("AdamW", 3)
        full = fsdp_optim.gather_full_optim_state_dict(model, made)
        target, other = trained("Adamax", 1)
        before = copy.deepcopy(other.state_dict()["state"])
        shard = fsdp_optim.get_shard_from_optim_state_dict(target, other, full, strict=False)
        result = fsdp_optim.load_optim_state_dict(other, shard)
        self.assertEqual(result.unmatched_values, ("exp_avg_sq", "exp_inf"))
        for index, values in other.state_dict()["state"].items():
            wanted = {name: made.state_dict()["state"][index][name] for name in ("step", "exp_avg")}
            check_same("state", values, {**wanted, "exp_inf": before[index]["exp_inf"]})

    def test_a_live_value_that_stays_is_not_lacking(self) -> None:
        """The live hyperparameters need it, the saved optimizer has none, and the live one has its own."""
        model, made = trained("Adam", 3)
        full = fsdp_optim.gather_full_optim_state_dict(model, made)
        target, _ = trained("Adam", 0)
        other = optim.AdamW(target.parameters(), lr=0.03, amsgrad=True)
        step(target, other, 1)
        before = copy.deepcopy(other.state_dict())
        shard = fsdp_optim.get_shard_from_optim_state_dict(target, other, full, strict=False, param_groups="live")
        fsdp_optim.load_optim_state_dict(other, shard)
        for index, values in other.state_dict()["state"].items():
            largest = before["state"][index]["max_exp_avg_sq"]
            check_same("state", values, {**made.state_dict()["state"][index], "max_exp_avg_sq": largest})
        self.assertEqual(other.param_groups[0]["lr"], 0.03)
        step(target, other, 5)

    def test_the_error_lists_what_differs(self) -> None:
        model, made = trained("AdamW")
        full = fsdp_optim.gather_full_optim_state_dict(model, made)
        target, other = trained("SGD")
        _, text = error_text(lambda: fsdp_optim.get_shard_from_optim_state_dict(target, other, full))
        for words in (
            "of the class AdamW, the optimizer of the class SGD",
            "hyperparameters that only the state has: amsgrad, betas, capturable, decoupled_weight_decay, eps",
            "hyperparameters that only the optimizer has: dampening, momentum, nesterov",
            "state values that only the state has: exp_avg, exp_avg_sq, step",
            "state values that only the optimizer has: momentum_buffer",
        ):
            self.assertIn(words, text)

    def test_adam_keeps_its_own_weight_decay(self) -> None:
        """AdamW is Adam with another weight decay: only the class, or one hyperparameter's value, tells."""
        model, made = trained("AdamW", 3)
        target, other = trained("Adam", 0)
        full = fsdp_optim.gather_full_optim_state_dict(model, made)
        shard = fsdp_optim.get_shard_from_optim_state_dict(target, other, full, strict=False)
        fsdp_optim.load_optim_state_dict(other, shard)
        self.assertFalse(other.param_groups[0]["decoupled_weight_decay"])
        check_same("state", other.state_dict()["state"], made.state_dict()["state"])

    def test_what_an_option_needs_is_not_left_out(self) -> None:
        """Without the values that its options need, an optimizer begins anew instead of dying at the next step."""
        model, made = trained("Adam")
        full = fsdp_optim.gather_full_optim_state_dict(model, made)
        for steps, make in itertools.product(
            (0, 2),
            (
                lambda params: optim.AdamW(params, amsgrad=True),
                lambda params: optim.RMSprop(params, momentum=0.9, centered=True),
                lambda params: optim.SGD(params, momentum=0.9),
            ),
        ):
            target, _ = trained("Adam", 0)
            other = make(target.parameters())
            for number in range(steps):
                step(target, other, number)
            shard = fsdp_optim.get_shard_from_optim_state_dict(target, other, full, strict=False)
            fsdp_optim.load_optim_state_dict(other, shard)
            step(target, other, 5)


class MyAdam(optim.Adam):
    pass


class Own(optim.SGD):
    """Not torch's, with state of its own."""

    def __init__(self, params: Any, lr: float = 0.1, warmth: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["warmth"] = warmth


class Around:
    """As Accelerate's and DeepSpeed's wrappers of optimizers."""

    def __init__(self, inner: Any) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class Named:
    """A wrapper that keeps what it wraps under a name of its own."""

    def __init__(self, inner: Any) -> None:
        self.wrapped_one = inner

    param_groups = property(lambda self: self.wrapped_one.param_groups)
    state_dict = property(lambda self: self.wrapped_one.state_dict)
    load_state_dict = property(lambda self: self.wrapped_one.load_state_dict)


class NamesTest(unittest.TestCase):
    def test_the_class_of_the_innermost_optimizer_is_recorded(self) -> None:
        model, made = trained("AdamW")
        for optimizer in (made, Around(made), Around(Around(made)), Named(made), Around(Named(made))):
            full = fsdp_optim.gather_full_optim_state_dict(model, optimizer)
            self.assertEqual(full["optimizer_class"], "AdamW")
            for key_by in ("id", "name"):
                again = fsdp_optim.rekey_optim_state_dict(full, model, key_by)
                self.assertEqual(again["optimizer_class"], "AdamW")
            shard = fsdp_optim.get_shard_from_optim_state_dict(model, optimizer, full)
            self.assertEqual(set(shard), {"state", "param_groups"})
            fsdp_optim.load_optim_state_dict(optimizer, shard)
            other = Around(optim.SGD(model.parameters()))
            with self.assertRaisesRegex(fsdp_optim.StateError, "of the class AdamW, the optimizer of the class SGD"):
                fsdp_optim.get_shard_from_optim_state_dict(model, other, full)

    def test_several_optimizers(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))

        def make(first: str, second: str) -> list[optim.Optimizer]:
            return [MAKERS[name](part.parameters()) for name, part in zip((first, second), model, strict=True)]

        alike, mixed = make("AdamW", "AdamW"), make("AdamW", "SGD")
        for optimizers in (alike, mixed):
            model(torch.ones(4, 3)).sum().backward()
            for each in optimizers:
                each.step()
        full = fsdp_optim.gather_full_optim_state_dict(model, mixed)
        self.assertEqual(full["optimizer_class"], ["AdamW", "SGD"])
        self.assertEqual(fsdp_optim.gather_full_optim_state_dict(model, alike)["optimizer_class"], "AdamW")
        shards = fsdp_optim.get_shard_from_optim_state_dict(model, make("AdamW", "SGD"), full)
        self.assertEqual(
            [list(shard["state"][0]) for shard in shards], [["step", "exp_avg", "exp_avg_sq"], ["momentum_buffer"]]
        )
        with self.assertRaisesRegex(fsdp_optim.StateError, "of the class SGD, the optimizer of the class AdamW"):
            fsdp_optim.get_shard_from_optim_state_dict(model, alike, full)
        with self.assertRaisesRegex(fsdp_optim.StateError, "of the class AdamW, the optimizer of the class SGD"):
            fsdp_optim.get_shard_from_optim_state_dict(model, make("SGD", "AdamW"), full)

    def test_equal_hyperparameters_do_not_join_two_classes(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        both = [optim.Adam(model[0].parameters(), lr=0.5), MyAdam(model[1].parameters(), lr=0.5)]
        full = fsdp_optim.gather_full_optim_state_dict(model, both)
        self.assertEqual((full["optimizer_class"], len(full["param_groups"])), (["Adam", "MyAdam"], 2))

    @parameterized.expand(
        [
            (
                "of an older torch",
                lambda group: [group.pop(key) for key in ("maximize", "fused", "foreach", "capturable")],
            ),
            ("with a scheduler's keys", lambda group: group.update(initial_lr=0.5, max_lr=0.75, min_lr=0.25)),
            ("with the user's own keys", lambda group: group.update(name="decay", lr_scale=0.5)),
            ("with both", lambda group: [group.pop("fused"), group.update(lr_scale=0.5)]),
            ("with the older torch's AdamW", lambda group: group.pop("decoupled_weight_decay")),
        ]
    )
    def test_the_same_class_is_loaded(self, _: str, edit: Callable[[dict[str, Any]], Any]) -> None:
        model, made = trained("AdamW")
        for full in (made.state_dict(), fsdp_optim.gather_full_optim_state_dict(model, made)):
            edit(full["param_groups"][0])
            for steps in (0, 2):
                target, other = trained("AdamW", steps)
                fsdp_optim.load_optim_state_dict(other, fsdp_optim.get_shard_from_optim_state_dict(target, other, full))
                check_same("state", other.state_dict()["state"], made.state_dict()["state"])
                step(target, other, 1)

    def test_a_class_that_extends_the_saved_one(self) -> None:
        """State of a class of torch.optim is taken by a subclass, and not the other way round."""
        model, made = trained("Adam")
        full = fsdp_optim.gather_full_optim_state_dict(model, made)
        target, of_torch = trained("Adam", 0)
        other = MyAdam(target.parameters(), lr=0.1)
        fsdp_optim.load_optim_state_dict(other, fsdp_optim.get_shard_from_optim_state_dict(target, other, full))
        check_same("state", other.state_dict()["state"], made.state_dict()["state"])
        back = fsdp_optim.gather_full_optim_state_dict(target, other)
        with self.assertRaisesRegex(fsdp_optim.StateError, "of the class MyAdam, the optimizer of the class Adam"):
            fsdp_optim.get_shard_from_optim_state_dict(target, of_torch, back)
        shard = fsdp_optim.get_shard_from_optim_state_dict(target, of_torch, back, strict=False)
        fsdp_optim.load_optim_state_dict(of_torch, shard)
        check_same("state", of_torch.state_dict()["state"], made.state_dict()["state"])

    def test_an_option_of_the_same_class_comes_with_the_saved_hyperparameters(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        saved, live = optim.Adam(model.parameters(), amsgrad=True), optim.Adam(model.parameters())
        step(model, saved, 1)
        step(model, live, 1)
        for a, b in ((saved, live), (live, saved)):
            full = fsdp_optim.gather_full_optim_state_dict(model, a)
            fsdp_optim.load_optim_state_dict(b, fsdp_optim.get_shard_from_optim_state_dict(model, b, full))
            check_same("state", b.state_dict(), a.state_dict())
            step(model, b, 2)

    def test_changed_hyperparameters_are_logged_once(self) -> None:
        model, made = trained("AdamW", lr=0.0625)
        target, other = trained("AdamW", 0)
        full = fsdp_optim.gather_full_optim_state_dict(model, made)
        shard = fsdp_optim.get_shard_from_optim_state_dict(target, other, full)
        for keep, wanted in (((), ["group 0: lr 0.1 -> 0.0625"]), ((), []), (("lr",), [])):
            with self.assertLogs("fsdp_optim", logging.INFO) as told:
                logging.getLogger("fsdp_optim").info("here")
                fsdp_optim.load_optim_state_dict(other, shard, keep_hyperparameters=keep)
            lines = [line.partition("(old -> new): ")[2] for line in told.output if "old -> new" in line]
            self.assertEqual(lines, wanted, told.output)


# ------------------------------------------------------------------------------------------ on ranks


def sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9)


def verbs(wrapper: str, folder: str) -> dict[str, list[tuple[str, str]]]:
    """The error of each verb about AdamW's state for SGD; that strict=False takes it for Adam is checked here."""
    with cpu():
        source = Trained(wrapper, MAKERS["AdamW"])
        group = source.process_group
        full = source.gather(None, "name")
        fsdp_optim.save(folder, source.model, source.optim, options=fsdp_optim.SaveOptions(process_group=group))
        errors: dict[str, list[tuple[str, str]]] = {}

        def ways(target: Trained, **options: Any) -> dict[str, Callable[[], Any]]:
            def loaded(shard: Any) -> Any:
                return fsdp_optim.load_optim_state_dict(target.optim, shard)

            given = {"process_group": group, **options}
            return {
                "get_shard": lambda: loaded(target.shard(full, **options)),
                "scatter": lambda: loaded(target.scatter(full, dist.get_world_size() - 1, **options)),
                "transfer": lambda: fsdp_optim.transfer_optim_state(
                    source.model,
                    source.optim,
                    target.model,
                    target.optim,
                    **as_options(fsdp_optim.CallOptions, **given),
                ),
                "load": lambda: fsdp_optim.load(
                    folder, target.model, target.optim, **as_options(fsdp_optim.LoadOptions, **given)
                ),
            }

        for verb in ("get_shard", "scatter", "transfer", "load"):
            for steps in (0, 2):
                target = Trained(wrapper, sgd, steps)
                before = snapshot(target)
                errors.setdefault(verb, []).append(error_text(ways(target)[verb]))
                check_same(f"{verb}: nothing is changed", snapshot(target), before)
                # Adam can continue with all of it; only the way of its weight decay is its own
                target = Trained(wrapper, MAKERS["Adam"], steps)
                result = ways(target, strict=False)[verb]()
                check_same(f"{verb}: left out", result.unmatched_hyperparameters, ())
                again = target.gather(None, "name")
                check_same(f"{verb}: state", again["state"], full["state"])
                check_same(f"{verb}: class", again["optimizer_class"], "Adam")
                check_same(f"{verb}: weight decay", again["param_groups"][0]["decoupled_weight_decay"], False)
                target.step([7])
            # SGD has none of the values: what it has stays, and it continues
            target = Trained(wrapper, sgd, 2)
            momenta = target.gather(None, "name")["state"]
            result = ways(target, strict=False)[verb]()
            check_same(
                f"{verb}: values", set(result.unmatched_values), {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}
            )
            check_same(f"{verb}: momenta", target.gather(None, "name")["state"], momenta)
            target.step([7])
        return errors


class VerbsTest(unittest.TestCase):
    @expand(soon=("fairscale flat", "FSDP2"), later=("FSDP1 flat", "FSDP1 orig", "plain"))
    def test_every_verb_refuses_and_takes_what_fits(self, wrapper: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(verbs, 2, wrapper, str(Path(folder, "one")))
        for verb in by_rank[0]:
            for place in (0, 1):
                errors = [errors_of_rank[verb][place] for errors_of_rank in by_rank]
                words = ("of the class AdamW, the optimizer of the class SGD", "betas", "nesterov", "strict=False")
                check_refused(f"{wrapper}, {verb}", errors, "StateError", *words)


def different_classes() -> tuple[str, str]:
    with cpu():
        name = "Adam" if dist.get_rank() else "MyAdam"
        made = Trained("FSDP2", OfModel(lambda model: {"Adam": optim.Adam, "MyAdam": MyAdam}[name](model.parameters())))
        return error_text(lambda: made.gather(None))


class RanksTest(unittest.TestCase):
    def test_ranks_with_different_classes_are_named(self) -> None:
        errors = run_on_ranks(different_classes, 2)
        check_refused("different classes", errors, "StateError", "MyAdam on rank 0", "Adam on rank 1")
