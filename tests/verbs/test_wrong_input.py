"""A full dict that is not one of this model and optimizer is an error that says what is wrong, before anything is loaded."""

from __future__ import annotations

import copy
import re
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.groups import (
    Error,
    Net,
    adam,
    check_alike,
    error_of,
    fill,
    frozen_copy,
    names_in,
    nested_net,
    plain_net,
    snapshot,
    step_plain,
)
from kit.wrapping import by_name
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

Full = dict[str, Any]
ADVICE = re.compile(r"\b(build|wrap|give|use|load|gather|rekey|Is |is it|is this|must go|check)\b")


# ---------------------------------------------------------------------------------------------- what is wrong


def full_dict(model: nn.Module | None = None) -> Full:
    """The result of a gather for a model, made without any rank."""
    plain, optim = plain_net(model=model)
    full = copy.deepcopy(optim.state_dict())
    names = names_in(plain)
    full["param_groups"][0]["param_names"] = names
    return {**full, "param_id_map": dict.fromkeys(range(len(names)), 0), "num_padded": [], "uncollected_local_ids": []}


def named(full: Full) -> Full:
    names = full["param_groups"][0]["param_names"]
    groups = [{**full["param_groups"][0], "params": list(names)}]
    return {**full, "state": by_name(full), "param_groups": groups, "param_id_map": dict.fromkeys(names, 0)}


def of_a_plain_optimizer(full: Full) -> Full:
    groups = [{key: value for key, value in full["param_groups"][0].items() if key != "param_names"}]
    return {"state": full["state"], "param_groups": groups}


@dataclass(frozen=True)
class Case:
    """`edit` makes a good full dict a bad one; `words` are in the message."""

    label: str
    edit: Callable[[Full], Any]
    words: tuple[str, ...]
    without_optimizer: bool = True  # whether it is also wrong without one
    for_rekey: bool = True
    words_if_fresh: tuple[str, ...] = ()  # in the message where the optimizer has no state yet


def edited(edit: Callable[[Full], Any]) -> Callable[[Full], Full]:
    def apply(full: Full) -> Full:
        edit(full)
        return full

    return apply


def without_param(full: Full) -> None:
    del full["state"][4]
    full["param_groups"][0]["params"].remove(4)
    full["param_groups"][0]["param_names"].remove("middle.2.weight")
    del full["param_id_map"][4]


def with_a_param_more(full: Full) -> None:
    full["state"][7] = copy.deepcopy(full["state"][6])
    full["param_groups"][0]["params"].append(7)
    full["param_groups"][0]["param_names"].append("last.extra")
    full["param_id_map"][7] = 0


def swapped_states(full: Full) -> None:
    state = full["state"]
    state[0], state[2] = state[2], state[0]


def shifted_states(full: Full) -> None:
    """As of an optimizer whose parameters() had another order: every id has the state of the next one."""
    values = list(full["state"].values())
    full["state"] = dict(enumerate([*values[1:], values[0]]))


def swapped_names(full: Full) -> None:
    names = full["param_groups"][0]["param_names"]
    names[1], names[3] = names[3], names[1]


def one_name_twice(full: Full) -> None:
    full["param_groups"][0]["param_names"][6] = "first.bias"


def two_groups(full: Full) -> None:
    (group,) = full["param_groups"]
    full["param_groups"] = [
        {**group, "params": [0, 1, 5, 6], "param_names": ["first.weight", "first.bias", "last.weight", "last.bias"]},
        {**group, "params": [2, 3, 4], "param_names": ["middle.0.weight", "middle.0.bias", "middle.2.weight"]},
    ]


def no_state_of(*ids: int) -> Callable[[Full], Full]:
    return edited(lambda full: [full["state"].pop(i) for i in ids])


def value(i: int, name: str, change: Callable[[Any], Any]) -> Callable[[Full], Full]:
    return edited(lambda full: full["state"][i].update({name: change(full["state"][i][name])}))


def without_value(i: int, name: str) -> Callable[[Full], Full]:
    return edited(lambda full: full["state"][i].pop(name))


CASES = [
    Case("of a narrower model", lambda full: full_dict(Net(6)), ("first.weight", "[6, 5]", "[7, 5]")),
    Case("of a narrower model, by name", lambda full: named(full_dict(Net(6))), ("first.weight", "[6, 5]", "[7, 5]")),
    Case(
        "of a narrower model, a plain optimizer's",
        lambda full: of_a_plain_optimizer(full_dict(Net(6))),
        ("first.weight", "[6, 5]", "[7, 5]"),
    ),
    Case(
        "of another model",
        lambda full: full_dict(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))),
        ("0.weight",),
    ),
    Case(
        "of another model, a plain optimizer's",
        lambda full: of_a_plain_optimizer(full_dict(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)))),
        ("4 parameters", "7 parameters"),
    ),
    # without an optimizer nobody knows which parameters it holds; torch then refuses a shard that lacks one of them
    Case(
        "without a parameter",
        edited(without_param),
        ("middle.2.weight",),
        for_rekey=False,
        without_optimizer=False,
    ),
    Case("with a parameter more", edited(with_a_param_more), ("last.extra",)),
    Case(
        "with a parameter more, by name",
        lambda full: named(edited(with_a_param_more)(full)),
        ("last.extra",),
    ),
    Case("transposed", value(0, "exp_avg", lambda t: t.t().clone()), ("first.weight", "exp_avg", "[5, 7]", "[7, 5]")),
    Case("flattened", value(2, "exp_avg", lambda t: t.flatten()), ("middle.0.weight", "exp_avg", "[21]", "[3, 7]")),
    Case("cut short", value(2, "exp_avg_sq", lambda t: t[:2]), ("middle.0.weight", "exp_avg_sq", "[2, 7]", "[3, 7]")),
    Case("cut to nothing", value(5, "exp_avg", lambda t: t[:0]), ("last.weight", "exp_avg", "[0, 3]", "[2, 3]")),
    Case("a number for a tensor", value(4, "exp_avg", lambda t: 0.0), ("middle.2.weight", "exp_avg", "[3, 3]")),
    Case(
        "a 0-dim tensor for one",
        value(4, "exp_avg_sq", lambda t: torch.tensor(0.5)),
        ("middle.2.weight", "exp_avg_sq", "[3, 3]"),
    ),
    Case("one cut short in a unit", value(6, "exp_avg", lambda t: t[:1]), ("last.bias", "exp_avg", "[1]", "[2]")),
    Case("two states swapped", edited(swapped_states), ("first.weight", "[3, 7]", "[7, 5]")),
    Case("ids in another order", edited(shifted_states), ("first.weight", "[7]", "[7, 5]")),
    Case(
        "ids in another order, a plain optimizer's",
        lambda full: of_a_plain_optimizer(edited(shifted_states)(full)),
        ("first.weight", "[7]", "[7, 5]"),
    ),
    Case("two names swapped", edited(swapped_names), (".bias", "[3]", "[7]")),
    Case("two names swapped, by name", lambda full: named(edited(swapped_names)(full)), (".bias", "[3]", "[7]")),
    Case("one name twice", edited(one_name_twice), (".bias",)),
    Case("an unknown id", edited(lambda full: full["state"].update({99: full["state"][0]})), ("99",)),
    Case("ids as text", edited(lambda f: f.update(state={str(k): v for k, v in f["state"].items()})), ("'0'",)),
    Case("in two groups", edited(two_groups), ("2", "1"), without_optimizer=False, for_rekey=False),
    Case("None", lambda full: None, ("None",)),
    Case("a list", lambda full: [full], ("list",)),
    Case("the state only", lambda full: {"state": full["state"]}, ("param_groups",)),
    Case("the groups only", lambda full: {"param_groups": full["param_groups"]}, ("state",)),
    Case("half of a unit's state", no_state_of(5, 6), ("last.weight",), False, False, ("first.weight",)),
    Case("all but one of a unit's state", no_state_of(3), ("middle.0.bias",), False, False, ("middle.0.weight",)),
    Case(
        "half of one state",
        without_value(3, "exp_avg_sq"),
        ("middle.0.weight", "middle.0.bias", "exp_avg_sq"),
        for_rekey=False,
    ),
    Case("a step less", without_value(1, "step"), ("first.weight", "first.bias", "step"), for_rekey=False),
    Case(
        "steps that differ in a unit",
        value(6, "step", lambda t: t + 4),
        ("first.weight", "last.bias", "step", "3.", "7."),
        for_rekey=False,
    ),
    Case(
        "dtypes that differ in a unit",
        value(6, "exp_avg", lambda t: t.double()),
        ("first.weight", "last.bias", "exp_avg", "float32", "float64"),
        for_rekey=False,
    ),
]


# ---------------------------------------------------------------------------------------------- trying it


@fairscale_on_cpu()
def try_all(verb: str) -> list[tuple[str, Error]]:
    """(label, error) for every case; afterwards the optimizer and the bad dict are as they were."""
    model, optim, _ = nested_net(0 if verb == "method" else 2)
    before, errors, rank = snapshot(model, optim), [], dist.get_rank()
    good = full_dict()
    calls: dict[str, Callable[[Any], Any]] = {
        "shard": lambda full: fsdp_optim.get_shard_from_optim_state_dict(model, optim, full),
        "method": lambda full: model.get_shard_from_optim_state_dict(full, optim),
        "no optimizer": lambda full: model.get_shard_from_optim_state_dict(full),
        "scatter": lambda full: fsdp_optim.scatter_full_optim_state_dict(
            model, optim, full if rank == 1 else None, 1, options=fsdp_optim.CallOptions(timeout=15)
        ),
        "rekey": lambda full: fsdp_optim.rekey_optim_state_dict(full, model, "name"),
    }
    for case in CASES:
        bad = case.edit(copy.deepcopy(good))
        as_given = copy.deepcopy(bad)
        errors.append((case.label, error_of(lambda: calls[verb](bad))))  # noqa: B023
        check_same(f"{case.label}: the dict itself", bad, as_given, in_order=False)
        check_same(f"{case.label}: the optimizer and the model", snapshot(model, optim), before, in_order=False)
    if verb not in ("rekey", "no optimizer"):
        check_same(
            "the good dict, after all the bad ones",
            calls[verb](good)["state"],
            frozen_copy(nested_net(3)[1])["state"],
            in_order=False,
        )
    return errors


@fairscale_on_cpu()
def own_shard_for_a_full_dict() -> list[list[Error]]:
    """The state_dict() of an optimizer on this rank is no full dict."""
    model, optim, _ = nested_net()
    before, own = snapshot(model, optim), frozen_copy(optim)
    errors = [
        error_of(lambda: fsdp_optim.get_shard_from_optim_state_dict(model, optim, own)),
        error_of(
            lambda: fsdp_optim.scatter_full_optim_state_dict(
                model, optim, own, options=fsdp_optim.CallOptions(timeout=15)
            )
        ),
        error_of(lambda: model.get_shard_from_optim_state_dict(own)),
    ]
    check_same("the optimizer and the model", snapshot(model, optim), before, in_order=False)
    return errors


def in_groups(model: Any, first_lr: float, swap: bool = False) -> torch.optim.Optimizer:
    """Two groups of a model of three units: the root, and the two of the middle."""
    root, *middle = model.parameters()
    groups = [{"params": [root], "lr": first_lr}, {"params": middle, "lr": 0.01}]
    return torch.optim.AdamW(groups[::-1] if swap else groups)


def plain_in_groups(model: nn.Module, middle_first: bool) -> torch.optim.Optimizer:
    inner = [p for name, p in model.named_parameters() if name.startswith("middle")]
    outer = [p for name, p in model.named_parameters() if not name.startswith("middle")]
    groups = [{"params": inner, "lr": 0.01}, {"params": outer, "lr": 0.5}]
    return torch.optim.AdamW(groups if middle_first else groups[::-1])


@fairscale_on_cpu()
def other_groups(fulls: list[Any]) -> list[list[Error]]:
    model, optim, _ = nested_net(2, lambda params: adam(params))
    optim = in_groups(model, 0.5)
    before, errors = snapshot(model, optim), []
    for full in fulls:
        given = full if dist.get_rank() == 0 else None
        errors.append(
            [
                error_of(lambda: fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)),  # noqa: B023
                error_of(
                    lambda: fsdp_optim.scatter_full_optim_state_dict(
                        model,
                        optim,
                        given,  # noqa: B023
                        options=fsdp_optim.CallOptions(timeout=15),
                    )
                ),
            ]
        )
    check_same("the optimizer and the model", snapshot(model, optim), before, in_order=False)
    return errors


@fairscale_on_cpu()
def load_wrongly() -> list[Error]:
    """load_optim_state_dict takes shards: not a full dict, not None, not another optimizer's."""
    model, optim, sharded = nested_net()
    before = snapshot(model, optim)
    full = full_dict()
    wrong_group = copy.deepcopy(frozen_copy(optim))
    wrong_group["param_groups"] = wrong_group["param_groups"] * 2
    one_less = copy.deepcopy(frozen_copy(optim))
    one_less["param_groups"][0]["params"].pop()
    errors = []
    for wrong in (full, named(full), wrong_group, one_less, None):
        errors.append(error_of(lambda: fsdp_optim.load_optim_state_dict(optim, wrong)))  # noqa: B023
        check_same("the optimizer and the model", snapshot(model, optim), before, in_order=False)
    sharded.step(optim, [3])
    return errors


class TestWrongFullDict(unittest.TestCase):
    def check(self, verb: str, cases: list[Case]) -> None:
        by_rank = [dict(of_rank) for of_rank in run_on_ranks(try_all, 2, verb)]
        without_way_out = [message for _, message, _ in by_rank[0].values() if message and not ADVICE.search(message)]
        for case in cases:
            with self.subTest(case.label):
                errors = [of_rank[case.label] for of_rank in by_rank]
                words = (*case.words, *case.words_if_fresh) if verb == "method" else case.words
                check_alike(errors, "StateError", *words)
        assert not without_way_out, "no way out in:\n" + "\n".join(without_way_out)

    @parameterized.expand([("shard",), ("method",), ("scatter",)])
    def test_it_is_refused(self, verb: str) -> None:
        self.check(verb, CASES)

    def test_it_is_refused_without_an_optimizer(self) -> None:
        self.check("no optimizer", [case for case in CASES if case.without_optimizer])

    def test_it_is_refused_by_rekey(self) -> None:
        self.check("rekey", [case for case in CASES if case.for_rekey])

    def test_a_shard_is_no_full_dict(self) -> None:
        for errors in zip(*run_on_ranks(own_shard_for_a_full_dict, 2), strict=True):
            check_alike(errors, "StateError", "3 parameters", "7 parameters")

    def test_other_groups(self) -> None:
        fulls, words = [], []
        for build in (
            lambda params_of: plain_in_groups(params_of, middle_first=True),  # the same groups in another order
            lambda params_of: adam(params_of.parameters()),  # one group
        ):
            plain = Net()
            fill(plain)
            optim = build(plain)
            step_plain(plain, optim, range(2))
            full = copy.deepcopy(optim.state_dict())
            names = {id(p): name for name, p in plain.named_parameters()}
            for group, live in zip(full["param_groups"], optim.param_groups, strict=True):
                group["param_names"] = [names[id(p)] for p in live["params"]]
            fulls.append(full)
            words.append(
                ("first.weight", "group 1", "group 0") if len(optim.param_groups) == 2 else ("1", "2", "group")
            )
        for expected, errors in zip(words, zip(*run_on_ranks(other_groups, 2, fulls), strict=True), strict=True):
            for of_verb in zip(*errors, strict=True):
                check_alike(of_verb, "StateError", *expected)

    def test_load_takes_shards_only(self) -> None:
        by_call = list(zip(*run_on_ranks(load_wrongly, 2), strict=True))
        for errors, words in zip(by_call, (("7", "3"), ("7", "3"), (), ("2", "3"), ("None",)), strict=True):
            check_alike(errors, "StateError", *words)

    def test_the_good_dict_is_good(self) -> None:
        """The dict that the cases edit is that of a gather, except for the entries about the wrapping."""
        plain, optim = plain_net()
        full = full_dict()
        check_same("state", full["state"], optim.state_dict()["state"], in_order=False)
        assert full["param_groups"][0]["param_names"] == names_in(plain)
