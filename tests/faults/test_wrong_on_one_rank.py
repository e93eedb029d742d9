"""A state that is wrong on one rank: every rank raises, in words that name the rank."""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from kit.failing_ranks import SOON, WORLD, Calls, Error
from kit.groups import (
    Net,
    Sharded,
    adam,
    check_alike,
    error_of,
    nested_net,
)
from parameterized import parameterized
from torch import nn

from fsdp_optim.fairscale import FullyShardedDataParallel as FSDP
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

# ---------------------------------------------------------------------------------------------- the calls


class OtherDict:
    """An optimizer whose state_dict() is another one."""

    def __init__(self, optim: Any, edit: Callable[[Any], Any]) -> None:
        self._optim, self._edit = optim, edit

    @property
    def param_groups(self) -> Any:
        return self._optim.param_groups

    def state_dict(self) -> Any:
        saved = copy.deepcopy(self._optim.state_dict())
        self._edit(saved)
        return saved


# ---------------------------------------------------------------------------------------------- what can be wrong


def no_state(saved: Any) -> None:
    saved["state"].clear()


def one_without_state(saved: Any) -> None:
    del saved["state"][1]


def other_dtype(saved: Any) -> None:
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].double()


def other_step(saved: Any) -> None:
    saved["state"][1]["step"] += 1


def step_is_a_number(saved: Any) -> None:
    saved["state"][1]["step"] = 3


def cut_short(saved: Any) -> None:
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"][:-1].clone()


def half_of_the_values(saved: Any) -> None:
    del saved["state"][2]["exp_avg_sq"]


def other_lr(saved: Any) -> None:
    saved["param_groups"][0]["lr"] = 0.5


def unreadable(saved: Any) -> None:
    raise OSError("the disk of this rank is on fire")


def not_a_state_dict(saved: Any) -> None:
    del saved["param_groups"]


def key_of_a_full_dict(saved: Any) -> None:
    saved["num_padded"] = {"first": 1}


WRONG_STATES: list[tuple[Callable[[Any], None], str, list[str]]] = [
    (no_state, "StateError", ["first.weight", "no state"]),
    (one_without_state, "StateError", ["middle.0.weight", "no state"]),
    (other_dtype, "StateError", ["first.weight", "exp_avg", "float32", "float64"]),
    (other_step, "StateError", ["middle.0.weight", "step", "3", "4"]),
    (step_is_a_number, "StateError", ["middle.0.weight", "step"]),
    (cut_short, "StateError", ["exp_avg"]),
    (half_of_the_values, "StateError", ["middle.2.weight", "exp_avg_sq"]),
    (other_lr, "StateError", ["lr", "0.01", "0.5"]),
    (unreadable, "RankError", ["the disk of this rank is on fire"]),
    (not_a_state_dict, "WrapperError", ["param_groups"]),
    (key_of_a_full_dict, "WrapperError", ["'num_padded'", "would be lost"]),
]
WRONG_FOR_SCATTER = [case for case in WRONG_STATES if case[0] in (unreadable, not_a_state_dict, key_of_a_full_dict)]


def flat_net() -> tuple[Any, Any]:
    """`Net` in one unit: another nesting."""
    net = Net()
    model = Sharded(net).wrap(net)
    return model, adam(model.parameters())


def other_model() -> tuple[Any, Any]:
    model = FSDP(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    return model, adam(model.parameters())


@fairscale_on_cpu()
def wrong_on_each_rank_in_turn(verb: str) -> list[tuple[str, list[str], Error]]:
    """(expected class, expected words, error) of every case and rank."""
    calls, me, results = Calls(), dist.get_rank(), []
    for edit, kind, words in WRONG_FOR_SCATTER if verb == "scatter" else WRONG_STATES:
        for rank in range(WORLD):
            optim = OtherDict(calls.optim, edit) if rank == me else None
            results.append((kind, [*words, f"rank {rank}"], error_of(lambda: calls.run(verb, optim=optim))))  # noqa: B023
        calls.check(verb)
    for build in (flat_net, other_model):
        model, optim = build()
        _, strange, _ = nested_net()
        for rank in range(WORLD):
            wrong = (model, optim) if rank == me else (None, None)
            results.append(("StateError", [f"rank {rank}"], error_of(lambda: calls.run(verb, *wrong))))  # noqa: B023
        calls.check(verb)
    for rank in range(WORLD):  # the optimizer of another model
        wrong_optim = strange if rank == me else None
        results.append(("WrapperError", [f"rank {rank}"], error_of(lambda: calls.run(verb, optim=wrong_optim))))  # noqa: B023
    calls.check(verb)
    if verb == "scatter":
        full = calls.full
        for edit, kind, words in (
            (no_group, "StateError", ["param_groups"]),
            (cut_short_full, "StateError", ["last.weight", "exp_avg"]),
            (lambda full: None, "StateError", ["None"]),
        ):
            edited = copy.deepcopy(full)
            calls.full = edited if edit(edited) else None
            results.append((kind, words, error_of(lambda: calls.run(verb))))
            calls.full = full
            calls.check(verb)
    return results


def no_group(full: Any) -> bool:
    del full["param_groups"]
    return True


def cut_short_full(full: Any) -> bool:
    full["state"][5]["exp_avg"] = full["state"][5]["exp_avg"][:1]
    return True


# ---------------------------------------------------------------------------------------------- other calls, and stops


class TestWrongOnOneRank(unittest.TestCase):
    """One rank has another value than the others: an error with both, on all ranks, and the next call succeeds."""

    @parameterized.expand([("gather",), ("iter",), ("scatter",)])
    def test_each_rank_in_turn(self, verb: str) -> None:
        for cases in zip(*run_on_ranks(wrong_on_each_rank_in_turn, WORLD, verb), strict=True):
            kind, words, _ = cases[0]
            with self.subTest(kind=kind, words=words):
                check_alike([error for _, _, error in cases], kind, *words, within=SOON)
