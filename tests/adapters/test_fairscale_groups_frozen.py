"""Param groups, parameters without state, a separate `step` for each parameter, tied parameters."""

from __future__ import annotations

import copy
import itertools
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.cases import case_name
from kit.compare import check_value
from kit.full_dicts import check_full, check_shard
from kit.setups import Full, Group, Plain, Setup, Wrapped
from kit.trained import STEPS
from kit.training import HOWS, Pairs, Resume, gathered, raise_problems, resumed
from kit.units import WRAPPINGS, Wrapping, units
from kit.wraps import WORLD_SIZES
from parameterized import parameterized
from torch import nn

from fsdp_optim import StateError
from fsdp_optim.fairscale import FullyShardedDataParallel
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

EVERY_LAYER = units("0", "2", "4", "")
UNFLATTENED = units("", flatten=False)


# ---------------------------------------------------------------------------------------------------- what is trained

TWO = (Group.of("2", lr=0.5, betas=(0.5, 0.6), weight_decay=0.1), Group.of("", lr=0.01, eps=1e-3))
GROUPS = {
    "two with other hyperparameters": Setup("mlp", units("2", ""), groups=TWO),
    "the later units first": Setup(
        "mlp", EVERY_LAYER, "radam", groups=(Group.of("4"), Group.of("0", lr=0.3), Group.of("2"))
    ),
    "weights and biases": Setup(
        "deep", UNFLATTENED, groups=tuple(Group.of(*p, lr=lr) for p, lr in ((("1.2", "3.b"), 0.5), (("",), 0.1)))
    ),
    "an empty one first": Setup("mlp", units("2", ""), groups=(Group((), (("lr", 5.0),)), *TWO)),
    "an empty one between": Setup("mlp", EVERY_LAYER, "asgd", groups=(Group.of("0"), Group(()), Group.of(""))),
    "an empty one last": Setup("mlp", units("2", ""), "sgd_momentum", groups=(Group.of(""), Group((), (("lr", 5.0),)))),
    "custom keys": Setup(
        "mlp",
        units("2", ""),
        groups=(
            Group.of("2", name="inner", initial_lr=0.25, layers=[1, "two", None], nested={"a": (1, 2.5)}),
            Group.of("", name="outer", scale=torch.tensor([1.0, 2.0]), lr=torch.tensor(0.125)),
        ),
    ),
    "changed while training": Setup("mlp", units("2", ""), groups=TWO, schedule=True),
    "changed while training, no state": Setup(
        "mlp", EVERY_LAYER, "sgd", groups=(Group.of("2", lr=0.5), Group.of("")), schedule=True
    ),
    "some parameters are in none": Setup("mlp", EVERY_LAYER, groups=(Group.of("4", lr=0.5), Group.of("0"))),
    "built from named parameters": Setup(
        "mlp", units("0", ""), groups=(Group.of("2", "4", lr=0.5), Group.of("")), named=True
    ),
    "the other way round inside": Setup(
        "mlp", EVERY_LAYER, "nadam", groups=(Group.of("2", "4"), Group.of("")), reverse=True
    ),
    "the other way round, unflattened": Setup("deep", UNFLATTENED, reverse=True),
}


def without_state(optimizer: str, wrapping: Wrapping, position: str, why: str) -> Setup:
    if why == "frozen":
        return Setup("mlp", wrapping, optimizer, frozen=(position,))
    if why == "frozen, left out":
        others = tuple(p for p in ("0", "2", "4") if p != position)
        return Setup("mlp", wrapping, optimizer, frozen=(position,), groups=(Group(others),))
    assert why == "unused", why
    return Setup("mlp", wrapping, optimizer, idle=((position, tuple(range(STEPS))),))  # used after the resume


ABSENT = {
    f"{position} {why}, {optimizer}": without_state(optimizer, wrapping, position, why)
    for position, (optimizer, why, wrapping) in itertools.product(
        ("0", "2", "4"),
        (
            ("adam", "frozen", EVERY_LAYER),
            ("adamw", "frozen, left out", EVERY_LAYER),
            ("nadam", "unused", EVERY_LAYER),
            ("adagrad", "frozen", EVERY_LAYER),  # has state before its first step
            ("sgd_momentum", "unused", units("", flatten=False)),
        ),
    )
} | {
    "root frozen": Setup("mlp", units("2", ""), frozen=("0", "4")),
    "root unused": Setup("mlp", units("2", ""), idle=(("0", (0, 1, 2)), ("4", (0, 1, 2)))),
    "single ones frozen": Setup("mlp", units("2") + UNFLATTENED, frozen=("0.weight", "4.bias")),
    "all but one unused": Setup(
        "deep", units("1.3", "1", ""), idle=(("0", (0, 1, 2)), ("3", (0, 1, 2)), ("1.3", (0, 1, 2)))
    ),
    "all frozen": Setup("mlp", EVERY_LAYER, frozen=("",)),
    "none has stepped": Setup("mlp", EVERY_LAYER, idle=(("", (0, 1, 2)),)),
    "awkward sizes unused": Setup(
        *WRAPPINGS["odd, unflattened"], "radam", idle=(("scale", (0, 1, 2)), ("pair", (0, 1, 2)))
    ),
}

# Steps per parameter when saved: three, one, two.
OWN = (("2", (1, 2)), ("4", (0,)))
STEPS_APART = {
    f"own step, {optimizer}, {name}": Setup("mlp", wrapping, optimizer, idle=OWN)
    for optimizer, (name, wrapping) in itertools.product(
        ("adam", "nadam", "asgd", "adadelta", "peculiar"), (("flat", EVERY_LAYER), ("unflattened", UNFLATTENED))
    )
}

TIED = {
    "tied in one unit": Setup("tied", units("")),
    "tied in the root, around a unit": Setup("tied", units("body", ""), "nadam"),
    "tied unflattened": Setup("tied", units("body") + UNFLATTENED, "adamw_amsgrad"),
    "tied across siblings": Setup("siblings", units("first", "middle", "last", flatten=False) + units("")),
    "tied across siblings around a flat unit": Setup("siblings", *(WRAPPINGS["siblings"][1:]), "asgd"),
    "tied across siblings, two groups": Setup(
        "siblings", WRAPPINGS["siblings"][1], groups=(Group.of("last", "middle", lr=0.5), Group.of("first"))
    ),
    "tied across siblings, the rest unused": Setup(
        "siblings", WRAPPINGS["siblings"][1], idle=(("middle", (0, 1, 2)), ("last", (0, 1, 2)))
    ),
    "tied across siblings, frozen": Setup("siblings", WRAPPINGS["siblings"][1], frozen=("first.weight",)),
}

# Saved and resumed at every pair of world sizes; the others at one pair each, and `make test-long` has the rest.
AT_EVERY_PAIR = {"own step, peculiar, flat"}
SETUPS = {**GROUPS, **ABSENT, **STEPS_APART, **TIED}


RESUMES = Pairs(SETUPS, AT_EVERY_PAIR, every=2)
OTHERS = RESUMES.others()


@pytest.mark.slow
class OtherPairsTest(unittest.TestCase):
    @parameterized.expand(OTHERS.cases(), name_func=case_name)
    def test_resume(self, name: str, saved: int, now: int) -> None:
        OTHERS.check(name, saved, now)


# ---------------------------------------------------------------------------------------------------- param groups


class GroupsTest(unittest.TestCase):
    @parameterized.expand(RESUMES.cases(GROUPS), name_func=case_name)
    def test_groups_are_kept_through_resume(self, name: str, saved: int, now: int) -> None:
        RESUMES.check(name, saved, now)

    def test_each_group_has_its_own_numbers(self) -> None:
        (full,) = gathered([GROUPS["two with other hyperparameters"]], 3)
        inner, outer = full["param_groups"]
        self.assertEqual(
            (inner["lr"], inner["betas"], inner["weight_decay"], inner["eps"]), (0.5, (0.5, 0.6), 0.1, 1e-8)
        )
        self.assertEqual(
            (outer["lr"], outer["betas"], outer["weight_decay"], outer["eps"]), (0.01, (0.9, 0.999), 0.01, 1e-3)
        )
        self.assertEqual((inner["params"], inner["param_names"]), ([0, 1], ["2.weight", "2.bias"]))
        names = ["0.weight", "0.bias", "4.weight", "4.bias"]
        self.assertEqual((outer["params"], outer["param_names"]), ([2, 3, 4, 5], names))

    def test_an_empty_group_is_there(self) -> None:
        (full,) = gathered([GROUPS["an empty one first"]], 2)
        self.assertEqual([len(group["params"]) for group in full["param_groups"]], [0, 2, 4])
        self.assertEqual(full["param_groups"][0]["lr"], 5.0)
        self.assertEqual(full["param_groups"][0]["param_names"], [])

    def test_custom_keys_are_copies(self) -> None:
        same, independent = run_on_ranks(change_the_custom_keys, 1)[0]
        self.assertEqual(same, {"a": (1, 2.5), "b": [1]})
        self.assertTrue(independent)


def change_the_custom_keys() -> tuple[Any, bool]:
    """A full dict does not change with the live optimizer's groups, nor the groups with the dict."""
    setup = Setup("mlp", units("2", ""), groups=(Group.of("", nested={"a": (1, 2.5), "b": [1]}),))
    with fairscale_on_cpu():
        wrapped = Wrapped(setup, STEPS)
        full = wrapped.gather(0)
        assert full is not None
        live = wrapped.optim.param_groups[0]["nested"]
        live["b"].append(2)
        said = copy.deepcopy(full["param_groups"][0]["nested"])
        full["param_groups"][0]["nested"]["a"] = None
        return said, live["a"] == (1, 2.5)


class TwoGroupsInOneFlatParameterTest(unittest.TestCase):
    """A full dict with weights and biases in two groups does not fit flat parameters that hold both."""

    @parameterized.expand(list(itertools.product(HOWS, (1, 2))), name_func=case_name)
    def test_error_names_them(self, how: str, num_groups: int) -> None:
        plain = Setup("mlp", (), groups=(Group.of("0.w", "2.w", "4"), Group.of("")))
        full = Plain(plain, STEPS).optim.state_dict()
        for group, fqns in zip(full["param_groups"], Plain(plain).fqns, strict=True):
            group["param_names"] = fqns
        groups = (Group.of(""), Group.of("0"))[:num_groups]
        setup = Setup("mlp", units("2", ""), groups=groups)
        for error, changed in run_on_ranks(refused, 2, setup, full, how):
            self.assertRegex(error, r"^StateError: .*(2\.weight.*2\.bias|0\.weight.*0\.bias)")
            self.assertRegex(error, "group")
            self.assertEqual(changed, "")


def refused(setup: Setup, full: Full, how: str) -> tuple[str, str]:
    """The class and message of an error, and the changes that the call made."""
    with fairscale_on_cpu():
        wrapped = Wrapped(setup, 2)
        before = copy.deepcopy((wrapped.optim.state_dict(), full))
        try:
            wrapped.shard_by(how, full)
        except StateError as error:
            said = f"{type(error).__name__}: {error}"
        else:
            return "nothing was raised", ""
        try:
            check_value("state and input", (wrapped.optim.state_dict(), full), before)
        except AssertionError as error:
            return said, str(error)
        return said, ""


# ---------------------------------------------------------------------------------------------------- no state


class AbsentTest(unittest.TestCase):
    @parameterized.expand(RESUMES.cases(ABSENT), name_func=case_name)
    def test_absent_stays_absent(self, name: str, saved: int, now: int) -> None:
        RESUMES.check(name, saved, now)

    @parameterized.expand([("0", [2, 3, 4, 5]), ("2", [0, 1, 4, 5]), ("4", [0, 1, 2, 3])], name_func=case_name)
    def test_ids_do_not_move(self, position: str, present: list[int]) -> None:
        for why in ("frozen", "unused"):
            (full,) = gathered([without_state("adam", EVERY_LAYER, position, why)], 2)
            self.assertEqual(sorted(full["state"]), present)
            self.assertEqual(full["param_groups"][0]["params"], [0, 1, 2, 3, 4, 5])
            self.assertEqual(full["param_id_map"], {i: i // 2 if i in present else None for i in range(6)})

    @parameterized.expand([("0",), ("2",), ("4",)], name_func=case_name)
    def test_later_unfrozen(self, position: str) -> None:
        flat = Setup("mlp", EVERY_LAYER, "adamw_amsgrad", frozen=(position,))
        single = Setup("mlp", UNFLATTENED, "rmsprop", frozen=(f"{position}.bias",))
        fulls = gathered([flat, single], 3)
        resumes = [
            Resume(setup, full, how, then=Setup("mlp", setup.wrapping, setup.optimizer))
            for setup, full in zip((flat, single), fulls, strict=True)
            for how in HOWS
        ]
        resumed(resumes, 2)


# ---------------------------------------------------------------------------------------------------- own scalars


class OwnScalarsTest(unittest.TestCase):
    @parameterized.expand(RESUMES.cases(STEPS_APART), name_func=case_name)
    def test_every_unit_keeps_its_own(self, name: str, saved: int, now: int) -> None:
        RESUMES.check(name, saved, now)

    def test_steps_of_their_own_type(self) -> None:
        by_name = {
            optimizer: gathered([Setup("mlp", EVERY_LAYER, optimizer, idle=OWN)], 2)[0]["state"]
            for optimizer in ("adam", "peculiar")
        }
        for key, steps in enumerate((3, 3, 1, 1, 2, 2)):
            check_value("tensor", by_name["adam"][key]["step"], torch.tensor(float(steps)))
            check_value("int", by_name["peculiar"][key]["step"], steps)
            check_value("int64 tensor", by_name["peculiar"][key]["seen"], torch.tensor(steps))

    def test_scalars_are_not_shared_between_originals(self) -> None:
        (full,) = gathered([Setup(*WRAPPINGS["one unit"])], 2)
        full["state"][0]["step"] += 1
        self.assertEqual([values["step"].item() for values in full["state"].values()], [4.0, 3.0, 3.0, 3.0, 3.0, 3.0])


def _step_differs(state: dict[str, Any]) -> None:
    state["2.bias"]["step"] = torch.tensor(9.0)


def _absent(state: dict[str, Any]) -> None:
    del state["2.bias"]


def _first_absent(state: dict[str, Any]) -> None:
    del state["2.weight"]


def _empty(state: dict[str, Any]) -> None:
    state["2.bias"] = {}


def _other_type(state: dict[str, Any]) -> None:
    state["2.bias"]["step"] = 3


def _other_scalar_dtype(state: dict[str, Any]) -> None:
    state["2.bias"]["step"] = torch.tensor(3.0, dtype=torch.float64)


def _value_missing(state: dict[str, Any]) -> None:
    del state["2.bias"]["exp_avg_sq"]


def _value_extra(state: dict[str, Any]) -> None:
    state["2.bias"]["max_exp_avg_sq"] = state["2.bias"]["exp_avg_sq"].clone()


def _other_dtype(state: dict[str, Any]) -> None:
    state["2.bias"]["exp_avg"] = state["2.bias"]["exp_avg"].double()


DISAGREEMENTS: dict[str, Callable[[dict[str, Any]], None]] = {
    function.__name__[1:]: function
    for function in (
        _step_differs,
        _absent,
        _first_absent,
        _empty,
        _other_type,
        _other_scalar_dtype,
        _value_missing,
        _value_extra,
        _other_dtype,
    )
}


VALUE_NAMED = {
    **dict.fromkeys(("step_differs", "other_type", "other_scalar_dtype"), "step"),
    "value_missing": "exp_avg_sq",
    "value_extra": "max_exp_avg_sq",
    "other_dtype": "exp_avg",
}


class DisagreementTest(unittest.TestCase):
    """Originals of one flat parameter that disagree cannot be flattened; in separate units they can be loaded."""

    @parameterized.expand(list(DISAGREEMENTS), name_func=case_name)
    def test_error_names_both(self, name: str) -> None:
        full = disagreeing(name)
        by_rank = run_on_ranks(refused_in_all_ways, 2, Setup("mlp", units("2", "")), full)
        for how, (error, changed) in itertools.chain.from_iterable(
            zip(HOWS, outcomes, strict=True) for outcomes in by_rank
        ):
            self.assertRegex(error, r"^StateError: ", how)
            self.assertIn("2.weight", error, how)
            self.assertIn("2.bias", error, how)
            self.assertIn(VALUE_NAMED.get(name, "state"), error, how)
            self.assertEqual(changed, "", how)

    def test_error_has_both_numbers(self) -> None:
        for error, _ in run_on_ranks(refused, 2, Setup("mlp", units("2", "")), disagreeing("step_differs"), "scatter"):
            self.assertRegex(error, r"step\b.*3\..*9\.|step\b.*9\..*3\.")

    # Adam itself makes a tensor of the other type, and does not step without a moment: that is refused (test_needed_values)
    @parameterized.expand(
        [name for name in DISAGREEMENTS if name not in ("other_type", "value_missing")], name_func=case_name
    )
    def test_it_fits_where_they_lie_apart(self, name: str) -> None:
        full = disagreeing(name)
        for states in run_on_ranks(loaded_and_gathered, 3, Setup("mlp", UNFLATTENED), full):
            for how, state in zip(HOWS[1:], states, strict=True):
                check_value(how, state, {key: values for key, values in full["state"].items() if values})


def disagreeing(name: str) -> Full:
    """A full dict of three steps in which 2.bias and 2.weight differ."""
    plain = Plain(Setup("mlp", ()), STEPS)
    full = copy.deepcopy(plain.optim.state_dict())
    state = {fqn: full["state"][i] for fqn, i in plain.ids.items()}
    DISAGREEMENTS[name](state)
    full["state"] = {plain.ids[fqn]: values for fqn, values in state.items()}
    return full


def refused_in_all_ways(setup: Setup, full: Full) -> list[tuple[str, str]]:
    return [refused(setup, full, how) for how in HOWS]


def loaded_and_gathered(setup: Setup, full: Full) -> list[Any]:
    states = []
    with fairscale_on_cpu():
        for how in HOWS[1:]:  # the first is torch's own load_state_dict, which casts
            wrapped = Wrapped(setup)
            wrapped.load_shard(wrapped.shard_by(how, full), how)
            gathered_again = wrapped.gather(None)
            assert gathered_again is not None
            states.append(gathered_again["state"])
    return states


# ---------------------------------------------------------------------------------------------------- tied parameters


class TiedTest(unittest.TestCase):
    @parameterized.expand(RESUMES.cases(TIED), name_func=case_name)
    def test_resume(self, name: str, saved: int, now: int) -> None:
        RESUMES.check(name, saved, now)

    @parameterized.expand([(world_size,) for world_size in WORLD_SIZES], name_func=case_name)
    def test_a_module_used_twice(self, world_size: int) -> None:
        texts = run_on_ranks(module_used_twice, world_size)
        raise_problems([[text] for text in texts], [""])

    def test_a_tied_parameter_is_there_once_under_its_first_name(self) -> None:
        one_unit, siblings = gathered([TIED["tied in one unit"], TIED["tied across siblings around a flat unit"]], 2)
        names = ["embed.weight", "body.0.weight", "body.0.bias", "out.bias"]
        self.assertEqual(one_unit["param_groups"][0]["param_names"], names)
        self.assertEqual(one_unit["num_padded"], [[0, 0]])  # 24 + 20 + 6
        names = ["first.weight", "first.bias", "middle.weight", "middle.bias", "last.bias"]
        self.assertEqual(siblings["param_groups"][0]["param_names"], names)
        self.assertEqual(siblings["param_id_map"], {0: 0, 1: 1, 2: 2, 3: 2, 4: 3})


def wrap_used_twice(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    unit = FullyShardedDataParallel(model[0])
    return FullyShardedDataParallel(nn.Sequential(unit, model[1], model[2], unit))


def module_used_twice() -> str:
    """One wrapper at two places of the model."""
    setup = Setup("used twice", units("0", ""))
    with fairscale_on_cpu():
        wrapped, plain = Wrapped(setup, STEPS, wrap=wrap_used_twice), Plain(setup, STEPS)
        full = wrapped.gather(None)
        assert full is not None
        fresh = Wrapped(setup, values=plain.values(), wrap=wrap_used_twice)
        shard = fresh.shard(full)
        try:
            check_full(full, wrapped, plain)
            check_shard("the shard", shard, fresh, plain)
        except AssertionError as error:
            return str(error)
    return ""
