"""Gathered state is bit for bit the unwrapped optimizer's, for every optimizer, wrapping and world size."""

from __future__ import annotations

import copy
import functools
import itertools
import unittest
from typing import Any

import torch
from kit.cases import case_name, expand
from kit.compare import check_own_memory, check_value
from kit.full_dicts import check_full, check_shard, num_padded
from kit.optimizers import OPTIMIZERS, sgd
from kit.setups import Full, Group, Plain, Setup, Wrapped
from kit.trained import STEPS, Trained
from kit.training import gather_problems, gathered, raise_problems
from kit.units import WRAPPINGS
from kit.wraps import WORLD_SIZES
from parameterized import parameterized
from torch import Tensor

import fsdp_optim
from fsdp_optim.fairscale import FullyShardedDataParallel
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

AWKWARD = ("one unit", "first", "deep", "deep, both", "tiny", "odd, unflattened", "scalars", "siblings")


EVERYWHERE = ("peculiar",)  # its state has values of every kind
Case = tuple[str, str, int]


def cases() -> tuple[list[Case], list[Case]]:
    """Optimizer, wrapping, world size; those of `make test-all`, and the others.

    What cuts state sees its values and never the optimizer's class, so that one optimizer is enough for all wrappings at all
    world sizes; each of the others meets every awkward wrapping, at one size, two of them in `make test-all`.
    """
    soon, later = list(itertools.product(EVERYWHERE, WRAPPINGS, WORLD_SIZES)), []
    for i, optimizer in enumerate(name for name in OPTIMIZERS if name not in EVERYWHERE):
        for j, wrapping in enumerate(AWKWARD):
            (later if (i + j) % 4 else soon).append((optimizer, wrapping, WORLD_SIZES[(i + i // 4 + j) % 4]))
    return soon, later


SOON, LATER = cases()


@functools.cache
def problems(world_size: int, is_later: bool) -> dict[Case, list[str]]:
    """The differences of each case, by rank. One call runs all cases, because calls cost more than gathers."""
    selected = [case for case in (LATER if is_later else SOON) if case[2] == world_size]
    setups = [Setup(*WRAPPINGS[wrapping], optimizer) for optimizer, wrapping, _ in selected]
    by_rank = run_on_ranks(gather_problems, world_size, setups, world_size - 1)
    return {case: [differences[i] for differences in by_rank] for i, case in enumerate(selected)}


class MatrixTest(unittest.TestCase):
    def test_every_optimizer_wrapping_and_world_size_is_there(self) -> None:
        others = zip(*[case for case in SOON if case[0] not in EVERYWHERE], strict=True)
        wanted = (set(OPTIMIZERS) - set(EVERYWHERE), set(AWKWARD), set(WORLD_SIZES))
        self.assertEqual(tuple(set(values) for values in others), wanted)

    @expand(SOON, LATER)
    def test_gathered_state_is_the_unwrapped_optimizers(self, *case: Any) -> None:
        raise_problems([[text] for text in problems(case[2], case in LATER)[case]], [case])


def full_of_adam(world_size: int = 2, wrapping: str = "middle") -> tuple[Setup, Full]:
    setup = Setup(*WRAPPINGS[wrapping], "adam")
    return setup, gathered([setup], world_size)[0]


class FullDictTest(unittest.TestCase):
    """The full dict of one Adam, with literal numbers."""

    def test_keys_types_and_dtypes_are_adams(self) -> None:
        _, full = full_of_adam()
        self.assertEqual(list(full["state"]), [0, 1, 2, 3, 4, 5])
        for values in full["state"].values():
            self.assertEqual({*values}, {"step", "exp_avg", "exp_avg_sq"})
            self.assertEqual((values["step"].dtype, values["step"].shape), (torch.float32, torch.Size([])))
            self.assertEqual(values["step"].item(), 3.0)
        shapes = [(7, 5), (7,), (7, 7), (7,), (3, 7), (3,)]
        self.assertEqual([tuple(values["exp_avg"].shape) for values in full["state"].values()], shapes)
        self.assertEqual({values["exp_avg"].dtype for values in full["state"].values()}, {torch.float32})
        self.assertEqual({type(values["exp_avg"]) for values in full["state"].values()}, {Tensor})

    def test_names_are_clean_and_in_the_unwrapped_order(self) -> None:
        names = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
        for wrapping in ("middle", "first", "every layer", "twice", "flat in unflattened"):
            _, full = full_of_adam(wrapping=wrapping)
            self.assertEqual([group["param_names"] for group in full["param_groups"]], [names], wrapping)
            self.assertEqual([group["params"] for group in full["param_groups"]], [[0, 1, 2, 3, 4, 5]], wrapping)

    def test_id_map_says_which_live_parameter_each_came_from(self) -> None:
        _, full = full_of_adam(wrapping="middle")  # the root's flat parameter is the first live one
        self.assertEqual(full["param_id_map"], {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 0})
        _, full = full_of_adam(wrapping="flat in unflattened")
        self.assertEqual(full["param_id_map"], {0: 0, 1: 1, 2: 2, 3: 2, 4: 3, 5: 4})

    @parameterized.expand(
        [
            ("one unit", 1, [[0]]),
            ("one unit", 3, [[0, 0, 1]]),  # 122 elements
            ("one unit", 4, [[0, 0, 0, 2]]),
            ("middle", 4, [[0, 0, 0, 2], [0, 0, 0, 0]]),  # 66 around 56
            ("tiny", 3, [[0, 0, 1], [0, 0, 1]]),  # 2 and 2
            ("tiny", 4, [[0, 0, 1, 1], [0, 0, 1, 1]]),
            ("tiny, unflattened", 4, [[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]]),
            (
                "odd, unflattened",
                4,
                [[0, 1, 1, 1], [0, 0, 0, 3], [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]],
            ),  # 1 9 0 2 1
            ("odd", 4, [[0, 0, 0, 3]]),  # 13
        ],
        name_func=case_name,
    )
    def test_num_padded(self, wrapping: str, world_size: int, padding: list[list[int]]) -> None:
        _, full = full_of_adam(world_size, wrapping)
        self.assertEqual(full["num_padded"], padding)

    def test_the_unwrapped_optimizer_loads_it_and_trains_on(self) -> None:
        optimizers = [name for name in OPTIMIZERS if name != "peculiar"]  # torch's own load_state_dict casts its state
        setups = [
            Setup(*WRAPPINGS[wrapping], optimizer)
            for optimizer, wrapping in zip(optimizers, itertools.cycle(("first", "deep, both", "odd", "tied")))
        ]
        for setup, full in zip(setups, gathered(setups, 3), strict=True):
            straight, stopped = Plain(setup, STEPS), Plain(setup, STEPS)
            cls, options = OPTIMIZERS[setup.optimizer]
            stopped.optim = cls(stopped.model.parameters(), **options)
            stopped.optim.load_state_dict(full)
            for plain in (straight, stopped):
                plain.step(range(STEPS, STEPS + 3))
            check_value(f"state of {setup}", stopped.by_name(), straight.by_name())
            check_value(f"parameters of {setup}", stopped.values(), straight.values())

    def test_by_name_it_is_the_same_under_clean_names(self) -> None:
        setup = Setup(*WRAPPINGS["deep, both"], "nadam", groups=(Group.of("1", lr=0.5), Group.of("")))
        for full, listed in run_on_ranks(gather_by_name, 3, setup):
            plain = Plain(setup, STEPS)
            check_value("state", full["state"], plain.by_name())
            self.assertEqual([group["params"] for group in full["param_groups"]], plain.fqns)
            self.assertEqual([fqn for fqn, _ in listed], [fqn for group in plain.fqns for fqn in group])
            check_value("one parameter at a time", dict(listed), plain.by_name())
            check_own_memory(full)

    def test_the_live_optimizer_is_not_touched_and_trains_on(self) -> None:
        # fairscale turns the live `step` tensors into numbers, so that the next step or gather fails
        setups = [Setup(*WRAPPINGS["middle"], optimizer) for optimizer in OPTIMIZERS]
        by_rank = run_on_ranks(gather_between_steps, 2, setups)
        raise_problems(by_rank, setups)

    def test_every_dtype_and_scalar_type_stays(self) -> None:
        for wrapping in ("middle", "odd", "deep, both", "tiny, unflattened"):
            (full,) = gathered([Setup(*WRAPPINGS[wrapping], "peculiar")], 4)
            for values in full["state"].values():
                self.assertEqual(
                    [type(values[name]) for name in ("step", "decay", "warm", "phase")], [int, float, bool, str]
                )
                self.assertIsNone(values["nothing"])
                self.assertEqual([values[name].dtype for name in ("seen", "mu")], [torch.int64, torch.float64])
                dtypes = [values[name].dtype for name in ("square_avg", "grad_avg", "prev", "step_size")]
                self.assertEqual(dtypes, [torch.float64, torch.bfloat16, torch.int8, torch.bool])

    @parameterized.expand([(1,), (16,), (100,)], name_func=case_name)
    def test_buckets_of_any_size(self, bucket_nbytes: int) -> None:
        setup = Setup(*WRAPPINGS["deep, both"], "peculiar", groups=(Group.of("1"), Group.of("")))
        raise_problems([[text] for text in run_on_ranks(with_small_buckets, 3, setup, bucket_nbytes)], [""])

    @parameterized.expand([(1,), (3,)], name_func=case_name)
    def test_bits_that_are_no_numbers(self, world_size: int) -> None:
        raise_problems([[text] for text in run_on_ranks(with_nan, world_size)], [""])

    @parameterized.expand([(1,), (3,)], name_func=case_name)
    def test_float16_parameters_with_float32_state(self, world_size: int) -> None:
        raise_problems(run_on_ranks(float16_with_float32_state, world_size), [""])


def gather_by_name(setup: Setup) -> tuple[Full, list[tuple[str, dict[str, Any]]]]:
    with fairscale_on_cpu():
        wrapped = Wrapped(setup, STEPS)
        full = wrapped.gather(None, key_by="name")
        listed = list(fsdp_optim.iter_full_optim_state(wrapped.model, wrapped.optim, None))
        assert full is not None
        return full, [(fqn, values) for fqn, values in listed if values is not None]


def gather_between_steps(setups: list[Setup]) -> list[str]:
    return [text for setup in setups for text in [gather_between_steps_of(setup)]]


def gather_between_steps_of(setup: Setup) -> str:
    with fairscale_on_cpu():
        wrapped, plain = Wrapped(setup), Plain(setup)
        for step in range(STEPS):
            wrapped.step([step])
            plain.step([step])
            full = wrapped.gather(None)
            try:
                check_full(full, wrapped, plain)
                check_shard("the live optimizer", wrapped.optim.state_dict(), wrapped, plain, with_padding=False)
            except AssertionError as error:
                return f"after step {step}: {error}"
    return ""


def with_small_buckets(setup: Setup, bucket_nbytes: int) -> str:
    with fairscale_on_cpu():
        wrapped, plain = Wrapped(setup, STEPS), Plain(setup, STEPS)
        full = fsdp_optim.gather_full_optim_state_dict(
            wrapped.model, wrapped.optim, None, options=fsdp_optim.CallOptions(bucket_nbytes=bucket_nbytes)
        )
        shard = fsdp_optim.scatter_full_optim_state_dict(
            wrapped.model,
            wrapped.optim,
            full if wrapped.rank == 1 else None,
            1,
            options=fsdp_optim.CallOptions(bucket_nbytes=bucket_nbytes),
        )
        try:
            check_full(full, wrapped, plain)
            check_shard("scattered", shard, wrapped, plain)
        except AssertionError as error:
            return str(error)
    return ""


def with_nan() -> str:
    """NaN with a payload, -0.0 and infinity, as elements and as scalars, come back as the same bits."""
    with fairscale_on_cpu():
        wrapped = Wrapped(Setup(*WRAPPINGS["middle"]), STEPS)
        odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, 0.0]).view(torch.int32)
        odd[0] += 5
        for state in wrapped.optim.state.values():
            exp_avg = state["exp_avg"]
            exp_avg.copy_(odd.view(torch.float32).repeat(exp_avg.numel())[: exp_avg.numel()])
            state["step"] = odd[0].view(torch.float32).clone()
            state["decay"] = float("nan")
            state["nothing"] = -0.0
        full = wrapped.gather(None)
        assert full is not None
        before = copy.deepcopy(wrapped.optim.state_dict()["state"])
        assembled, _ = wrapped.assemble()
        shard = wrapped.shard_by("scatter", full)
        padding = [pad[wrapped.rank] for pad in num_padded(wrapped)]
        for i, values in before.items():
            values["exp_avg"][len(values["exp_avg"]) - padding[i] :] = 0
        try:
            names = full["param_groups"][0]["param_names"]
            check_bits("gathered", {names[i]: values for i, values in full["state"].items()}, assembled)
            check_bits("scattered", shard["state"], before)
        except AssertionError as error:
            return str(error)
    return ""


def check_bits(where: str, got: Any, want: Any) -> None:
    """The same as `check_value`, but NaN equals NaN also outside tensors."""
    as_text = [
        {key: {n: v.hex() if isinstance(v, float) else v for n, v in values.items()} for key, values in state.items()}
        for state in (got, want)
    ]
    check_value(where, *as_text)


def in_half_precision(model: torch.nn.Module) -> Any:
    return FullyShardedDataParallel(model, compute_dtype=torch.float16)


def float16_with_float32_state() -> list[str]:
    """Pure float16 with float32 moments is gathered, cut and loaded without a cast."""
    with fairscale_on_cpu():
        trained = Trained(in_half_precision, sgd, 0, lambda: torch.nn.Linear(5, 7), torch.nn.Module.half)
        model, (param,) = trained.model, trained.params
        want = {name: torch.randn(shape) for name, shape in trained.numbers.shape.items()}
        local = trained.part_of(0, want)
        optim = torch.optim.SGD([param], lr=0.1, momentum=0.9)
        optim.state[param] = {"momentum_buffer": local.clone(), "step": torch.tensor(7.0)}
        full = model.gather_full_optim_state_dict(optim, None)
        try:
            for i, (name, value) in enumerate(want.items()):
                check_value(name, full["state"][i], {"momentum_buffer": value, "step": torch.tensor(7.0)})
            shard = model.get_shard_from_optim_state_dict(full, optim)
            fresh = torch.optim.SGD([param], lr=0.1, momentum=0.9)
            fsdp_optim.load_optim_state_dict(fresh, shard)
            check_value("loaded", dict(fresh.state[param]), {"momentum_buffer": local, "step": torch.tensor(7.0)})
        except AssertionError as error:
            return [str(error)]
    return [""]
