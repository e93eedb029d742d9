"""Every way to wrap: saved, resumed, and trained for real, with forward and backward and fairscale's own options."""

from __future__ import annotations

import copy
import functools
import traceback
import unittest
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit.cases import case_name, expand, some, those
from kit.compare import Differs, check_close, check_value, tensors_in
from kit.full_dicts import check_full
from kit.setups import Full, Plain, Setup, Wrapped
from kit.trained import STEPS
from kit.training import Pairs, raise_problems
from kit.units import WRAPPINGS, units
from kit.wrapping import by_name
from parameterized import parameterized
from torch import Tensor, nn

from fsdp_optim.fairscale import FullyShardedDataParallel
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

BY_US = {name: Setup(model, wrapping) for name, (model, wrapping) in WRAPPINGS.items()}
BY_FAIRSCALE = {
    f"{name}, fairscale's own class": Setup(*WRAPPINGS[name], "adamw_amsgrad", fairscale=True)
    for name in ("middle", "deep, both", "odd, unflattened", "siblings")
}
BY_FAIRSCALE |= {
    "the root is not wrapped": Setup("deep", units("1.0", "1.3.2", "1.3"), "nadam", fairscale=True),
    "only one layer is wrapped": Setup("mlp", units("2", flatten=False), fairscale=True),
}
RESUMES = Pairs({**BY_US, **BY_FAIRSCALE})
OTHERS = RESUMES.others()


class WrappingsTest(unittest.TestCase):
    @parameterized.expand(RESUMES.cases(), name_func=case_name)
    def test_resume(self, name: str, saved: int, now: int) -> None:
        RESUMES.check(name, saved, now)

    def test_as_wrapper_cls(self) -> None:
        texts = run_on_ranks(wrapped_by_fairscales_helpers, 2)
        raise_problems([[text] for text in texts], [""])


def with_fairscales_helpers(model: Any) -> nn.Module:
    """The calls of an existing user of fairscale, with this library's class."""
    from fairscale.nn import auto_wrap, default_auto_wrap_policy, enable_wrap, wrap

    with enable_wrap(wrapper_cls=FullyShardedDataParallel):
        model[1] = auto_wrap(model[1], functools.partial(default_auto_wrap_policy, min_num_params=40))
        model[3] = wrap(model[3])
        return wrap(model)


def wrapped_by_fairscales_helpers() -> str:
    setup = Setup("deep", units("1.2", "1.3", "1", "3", ""))  # of 60 elements, 60, the 15 between, and 12
    with fairscale_on_cpu():
        wrapped = Wrapped(setup, STEPS, wrap=with_fairscales_helpers)
        full = wrapped.gather(None)
        try:
            check_full(full, wrapped, Plain(setup, STEPS))
        except Differs as error:
            return str(error)
    return ""


@pytest.mark.slow
class OtherPairsTest(unittest.TestCase):
    @parameterized.expand(OTHERS.cases(), name_func=case_name)
    def test_resume(self, name: str, saved: int, now: int) -> None:
        OTHERS.check(name, saved, now)


# ---------------------------------------------------------------------------------------------------- real training

SAVED, END = 2, 4  # steps

REAL = {
    "one unit": Setup(*WRAPPINGS["one unit"], "sgd_momentum"),
    "nested": Setup(*WRAPPINGS["middle"], "adamw_amsgrad"),
    "wrapper in a wrapper": Setup(*WRAPPINGS["twice"]),
    "deep": Setup(*WRAPPINGS["deep"], "nadam"),
    "no parameters of their own": Setup(*WRAPPINGS["deep, no own"]),
    "unflattened": Setup(*WRAPPINGS["unflattened layers"]),
    "both": Setup(*WRAPPINGS["deep, both"], "adagrad"),
    "tied": Setup(*WRAPPINGS["tied"]),
    "siblings": Setup(*WRAPPINGS["siblings"], "rmsprop"),
    "parameter without dimensions": Setup(*WRAPPINGS["odd"]),
    "first unit frozen": Setup("mlp", units("0", "2", "4", ""), frozen=("0",)),
    "middle unit frozen": Setup("mlp", units("2", ""), frozen=("2",)),
    "layer not used": Setup("detour", units("last") + units("", flatten=False)),
    "parameters kept after forward": Setup("mlp", units("2", "", reshard_after_forward=False)),
    "on the CPU": Setup("mlp", units("2", "", move_params_to_cpu=True)),
    "on the CPU, unflattened": Setup("deep", units("1.3", "", flatten=False, move_params_to_cpu=True)),
}
HALF = {
    "mixed precision": units("2", "", mixed_precision=True),
    "mixed precision, unflattened": units("2", "", flatten=False, mixed_precision=True),
    "mixed precision, reduced in float32": units("2", "", mixed_precision=True, fp32_reduce_scatter=True),
    "mixed precision on the CPU": units("2", "", mixed_precision=True, move_params_to_cpu=True),
    "all of them": units("2", "", mixed_precision=True, fp32_reduce_scatter=True, move_params_to_cpu=True),
}
REAL |= {name: Setup("mlp", wrapping) for name, wrapping in HALF.items()}


Saved = tuple[Full, dict[str, Tensor]]  # and the parameters


def train_for_real(
    names: list[str], start: int, stops: tuple[int, ...], given: dict[str, Saved]
) -> dict[str, tuple[list[Saved], str]]:
    """On one rank: the full dicts at each stop (and before the first stop, after a load), and the errors."""
    with fairscale_on_cpu():
        return {name: _train_one(REAL[name], start, stops, given.get(name)) for name in names}


def _train_one(setup: Setup, start: int, stops: tuple[int, ...], given: Saved | None) -> tuple[list[Saved], str]:
    try:
        wrapped = Wrapped(setup, values=given[1] if given else setup.values())
        gathered = []
        if given:
            wrapped.load_shard(wrapped.shard_by("scatter", given[0]))
            gathered.append(_gather_and_assemble(wrapped))
        for begin, end in zip((start, *stops), stops, strict=False):
            wrapped.train(range(begin, end))
            gathered.append(_gather_and_assemble(wrapped))
        return gathered, ""
    except Exception:
        return [], traceback.format_exc()


def _gather_and_assemble(wrapped: Wrapped) -> Saved:
    full = wrapped.gather(None)
    state, params = wrapped.assemble()
    assert full is not None
    check_value(f"{wrapped.setup}: gathered", by_name(full), state)
    return full, params


SIZES = {name: 1 + i % 3 for i, name in enumerate(REAL)}
"""The world size that each is trained at: real training is a test of fairscale and of what lets it run without a GPU, more than
of this library, whose own part is tested at all sizes by `WrappingsTest`."""
OTHER_SIZES = {name: size % 3 + 1 for name, size in SIZES.items()}
"""The other world size at which each is resumed."""
OTHER_SIZES |= {"nested": 4, "both": 4}


SOON, LATER = some(REAL, every=4)


def names_of(names: Sequence[str], saved: int, now: int | None = None) -> list[str]:
    """The set-ups that are trained at one world size and resumed at another, or at any."""
    return [name for name in names if SIZES[name] == saved and now in (None, saved, OTHER_SIZES[name])]


@functools.cache
def all_straight(later: bool, world_size: int) -> list[dict[str, tuple[list[Saved], str]]]:
    names = names_of(LATER if later else SOON, world_size)
    return run_on_ranks(train_for_real, world_size, names, 0, (SAVED, END), {})


def straight(name: str) -> list[Saved]:
    """A training without a stop, gathered at SAVED and at END."""
    by_rank = all_straight(name in LATER, SIZES[name])
    raise_problems([[trainings[name][1]] for trainings in by_rank], [name])
    return by_rank[0][name][0]


@functools.cache
def all_resumed(later: bool, saved: int, now: int) -> list[dict[str, tuple[list[Saved], str]]]:
    trainings = all_straight(later, saved)[0]
    given = {name: trainings[name][0][0] for name in names_of(list(trainings), saved, now) if not trainings[name][1]}
    return run_on_ranks(train_for_real, now, list(given), SAVED, (END,), given)


def resumed(name: str, now: int) -> list[Saved]:
    """A resumed training, gathered right after the load and at END."""
    straight(name)
    by_rank = all_resumed(name in LATER, SIZES[name], now)
    raise_problems([[trainings[name][1]] for trainings in by_rank], [name])
    return by_rank[0][name][0]


@functools.cache
def plain_training(name: str) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """State and parameters of the unwrapped training at SAVED and at END."""
    plain, states = Plain(REAL[name], values=REAL[name].values()), []
    for steps in (range(SAVED), range(SAVED, END)):
        plain.train(steps)
        states.append((copy.deepcopy(plain.by_name()), plain.values()))
    return states


def rtol_for(name: str) -> float:
    return 0.1 if name in HALF else 1e-5


def check_training(where: str, name: str, got: Saved, want: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    """Raise unless state and parameters are equal up to rounding."""
    rtol = rtol_for(name)
    for what, a, b in (("state", by_name(got[0]), want[0]), ("parameters", got[1], want[1])):
        largest = max((float(t.abs().max()) for _, t in tensors_in(b) if t.numel()), default=1.0)
        check_close(f"{where}: {what}", a, b, rtol=rtol, atol=rtol * largest)


class RealTrainingTest(unittest.TestCase):
    @expand(SOON, LATER)
    def test_as_the_unwrapped_training(self, name: str) -> None:
        for stop, got, want in zip((SAVED, END), straight(name), plain_training(name), strict=True):
            check_training(f"after {stop} steps", name, got, want)

    @expand(SOON, LATER)
    def test_resumed_at_the_same_world_size_it_is_the_same_bit_for_bit(self, name: str) -> None:
        for what, got, want in zip(
            ("right after loading", "at the end"), resumed(name, SIZES[name]), straight(name), strict=True
        ):
            check_value(f"{what}: full dict", got[0], want[0])
            check_value(f"{what}: parameters", got[1], want[1])

    @expand(SOON, LATER)
    def test_resumed_at_another_world_size(self, name: str) -> None:
        loaded, end = resumed(name, OTHER_SIZES[name])
        full, params = straight(name)[0]
        check_value("state right after loading", by_name(loaded[0]), by_name(full))
        check_value("parameters right after loading", loaded[1], params)
        check_value("groups", loaded[0]["param_groups"], full["param_groups"])
        check_training("at the end", name, end, plain_training(name)[1])

    @expand(*those([(name,) for name in HALF], lambda name: name in SOON))
    def test_mixed_precision_keeps_float32_state(self, name: str) -> None:
        dtypes = {t.dtype for _, t in tensors_in(straight(name)[1][0])}
        self.assertEqual(dtypes, {torch.float32})
