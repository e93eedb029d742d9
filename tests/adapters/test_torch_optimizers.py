"""Optimizers of torch.optim, tensor learning rates, several optimizers over one model, one optimizer per parameter."""

from __future__ import annotations

import functools
import itertools
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import torch
from kit.cases import expand, some
from kit.compare import Differs, check_refused, check_same, error_text
from kit.local_parts import local_of
from kit.models import Net, freeze_stem
from kit.optimizers import OfModel, adam, adamw_tensor_lr, sgd
from kit.tables import Table
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import check_trip, cpu
from kit.wraps import WRAPPERS
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

O = torch.optim  # noqa: E741

ELEMENTWISE: dict[str, Callable[[Any], O.Optimizer]] = {
    "Adam": adam,
    "Adam amsgrad": lambda p: O.Adam(p, lr=0.01, amsgrad=True),
    "Adam foreach": lambda p: O.Adam(p, lr=0.01, foreach=True),
    "AdamW with a tensor as learning rate": adamw_tensor_lr,
    "NAdam": lambda p: O.NAdam(p, lr=0.01),
    "RAdam": lambda p: O.RAdam(p, lr=0.01),
    "Adamax": lambda p: O.Adamax(p, lr=0.01),
    "Adadelta": lambda p: O.Adadelta(p, lr=0.1),
    "Adagrad, eager state": lambda p: O.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
    "RMSprop": lambda p: O.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: O.Rprop(p, lr=0.01),
    "ASGD": lambda p: O.ASGD(p, lr=0.01),
    "SGD without state": lambda p: O.SGD(p, lr=0.01),
    "SGD with momentum": lambda p: O.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
}

_IN_PLACE = "in-place operations that require placement changes are not supported"

TORCH_REFUSES: Mapping[tuple[str, str], str] = {("FSDP2", "Rprop"): _IN_PLACE, ("FSDP2 x TP", "Rprop"): _IN_PLACE}
"""(wrapper, optimizer) -> torch's words."""


def stepped(wrapper: str, optimizer: str) -> str:
    """torch's error message, for optimizers that torch refuses to step."""
    with cpu():
        make = ELEMENTWISE[optimizer]
        if (wrapper, optimizer) in TORCH_REFUSES:
            return error_text(lambda: Trained(wrapper, make, by_torch=True))[1]
        check_trip(wrapper, make, by_torch=True)
        return ""


def step_both_ways(wrapper: str) -> None:
    """torch's own step of DTensors gives the same result as the quick step of the other tests."""
    with cpu():
        for make in (adam, adamw_tensor_lr, sgd):
            quick, slow = (
                Trained(wrapper, make, prepare=freeze_stem, unused=("head.bias",), by_torch=by_torch)
                for by_torch in (False, True)
            )
            for what, values, other in (
                ("parameters", quick.params, slow.params),
                *((f"state of {i}", *both) for i, both in enumerate(zip(state_of(quick), state_of(slow), strict=True))),
            ):
                check_same(what, [described(value) for value in values], [described(value) for value in other])


def state_of(trained: Trained) -> list[Any]:
    """Of every parameter: names and values, one after the other."""
    return [[part for item in trained.optim.state.get(p, {}).items() for part in item] for p in trained.params]


def described(value: Any) -> Any:
    if isinstance(value, DTensor):
        spec = (value.placements, value.shape, value.stride(), value.device_mesh.mesh.tolist())
        return [local_of(value).detach(), str(spec), value.requires_grad]
    return value


class StepTest(unittest.TestCase):
    @expand(*some([("FSDP2", 3), ("HSDP", 4), ("FSDP2 x TP", 4)], every=3, first=2))
    def test_a_quick_step_of_dtensors_is_what_torch_does(self, wrapper: str, world_size: int) -> None:
        run_on_ranks(step_both_ways, world_size, wrapper)


CASES = list(itertools.product(("FSDP1 flat", "FSDP1 orig", "FSDP2", "DDP"), ELEMENTWISE))
AT_ONCE = [
    *(case for case in CASES if case in TORCH_REFUSES),
    *(case for number, case in enumerate(CASES) if (number + number // len(ELEMENTWISE)) % 4 == 0),
    ("FSDP2 x TP", "Adam foreach"),
    ("HSDP", "NAdam"),
    ("fairscale flat", "Adagrad, eager state"),
]
"""Every optimizer in one wrapper: the library never looks at an optimizer's class. `make test-long` has all pairs."""
LATER = [case for case in CASES if case not in AT_ONCE]
STEPPED, STEPPED_LATER = (Table(stepped, [(2, *case) for case in cases]) for cases in (AT_ONCE, LATER))


class ElementwiseTest(unittest.TestCase):
    def test_every_optimizer_is_stepped(self) -> None:
        self.assertEqual({optimizer for _, optimizer in AT_ONCE}, set(ELEMENTWISE))

    @expand(AT_ONCE, LATER)
    def test_state_is_the_unwrapped_optimizers(self, wrapper: str, optimizer: str) -> None:
        words = (STEPPED_LATER if (wrapper, optimizer) in LATER else STEPPED)(2, wrapper, optimizer)
        expected = TORCH_REFUSES.get((wrapper, optimizer))
        if expected is not None:
            self.assertIn(expected, words[0])
            self.skipTest(f"torch refuses {optimizer} in {wrapper}: {words[0]}")

    def test_capturable(self) -> None:
        if not torch.cuda.is_available():
            self.skipTest("Adam(capturable=True) steps on CUDA parameters only, and there is no GPU")
        model = nn.Linear(3, 2).cuda()
        optim = O.Adam(model.parameters(), capturable=True)
        model(torch.ones(3, device="cuda")).sum().backward()
        optim.step()
        full = fsdp_optim.gather_full_optim_state_dict(model, optim)
        fsdp_optim.load_optim_state_dict(optim, fsdp_optim.get_shard_from_optim_state_dict(model, optim, full))
        self.assertEqual({v["step"].device.type for v in optim.state.values()}, {"cuda"})

    def test_tensor_learning_rate_is_not_shared(self) -> None:
        """The learning rate in the dict is a separate tensor, which further training does not change, nor the reverse."""
        oracle, other = Oracle(adamw_tensor_lr), Oracle(adamw_tensor_lr, steps=0)
        full = fsdp_optim.gather_full_optim_state_dict(oracle.model, oracle.optim)
        oracle.optim.param_groups[0]["lr"].fill_(7.0)
        self.assertIsInstance(full["param_groups"][0]["lr"], torch.Tensor)
        self.assertAlmostEqual(float(full["param_groups"][0]["lr"]), 0.01)
        shard = fsdp_optim.get_shard_from_optim_state_dict(other.model, other.optim, full)
        full["param_groups"][0]["lr"].fill_(5.0)
        self.assertAlmostEqual(float(shard["param_groups"][0]["lr"]), 0.01)
        fsdp_optim.load_optim_state_dict(other.optim, shard)
        self.assertAlmostEqual(float(other.optim.param_groups[0]["lr"]), 0.01)


# ------------------------------------------------------------------------------------------- Adafactor, Muon


def adafactor(params: Any) -> O.Optimizer:
    return O.Adafactor(params, lr=0.01)


class Matrices(nn.Module):
    """A model for Muon, which steps matrices only."""

    units = ("first", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)
        self.last = nn.Linear(3, 5, bias=False)


def muon(params: Any) -> O.Optimizer:
    return O.Muon(params, lr=0.01)


def fused(params: Any) -> O.Optimizer:
    return O.Adam(params, lr=0.01, fused=True)


def exact_afterwards(wrapper: str, make: Any, model: type[nn.Module], full: Any) -> Any:
    """Gather a trained state, or load `full` and gather it again, to all ranks."""
    with cpu():
        trained = Trained(wrapper, make, STEPS if full is None else 0, model)
        if full is not None:
            fsdp_optim.load_optim_state_dict(trained.optim, trained.shard(full))
            first = trained.gather(None)
            fsdp_optim.load_optim_state_dict(trained.optim, trained.scatter(full))
            check_same("shard's and scatter's", trained.gather(None), first)
        again = trained.gather(None)
        values = [v for values in again["state"].values() for v in values.values() if isinstance(v, torch.Tensor)]
        if any(isinstance(value, DTensor) for value in values):
            raise Differs("there are DTensors in a full dict")
        return again


def factored(full: Any) -> Any:
    """Adafactor's state under FSDP2, put in by hand from a plain Adafactor's (torch 2.13's does not step DTensors)."""
    trained = Trained(full["wrapper"], adafactor, 0)
    names = {id(param): name for name, param in trained.model.named_parameters()}
    by_name = full["state"]
    for param in trained.params:
        values = dict(by_name[names[id(param)]])
        for name, value in values.items():
            if value.dim():
                # a dimension of size 1 was summed over, so every rank has it whole
                placements = [
                    Replicate() if p.is_replicate() or value.shape[p.dim] != param.shape[p.dim] else p
                    for p in param.placements
                ]
                values[name] = distribute_tensor(value, param.device_mesh, placements)
        trained.optim.state[param] = values
    gathered = trained.gather(None)
    target = Trained(full["wrapper"], adafactor, 0)
    fsdp_optim.load_optim_state_dict(target.optim, target.shard(gathered))
    for param, other in zip(trained.params, target.params, strict=True):
        for name, value in trained.optim.state[param].items():
            loaded = target.optim.state[other][name]
            if type(loaded) is not type(value):
                raise Differs(f"{names[id(param)]}: {name} is a {type(loaded).__name__}, not a {type(value).__name__}")
            if isinstance(value, DTensor) and (loaded.placements, loaded.shape) != (value.placements, value.shape):
                raise Differs(f"{names[id(param)]}: {name} is {loaded.placements}, not {value.placements}")
            check_same(f"{names[id(param)]}: {name}", local_of(loaded), local_of(value))
    return gathered


@functools.cache
def of_plain(make: Any, model: type[nn.Module]) -> dict[str, Any]:
    return Oracle(make, STEPS, model).full()


def check_close(what: str, got: Any, wanted: Any) -> None:
    """The same keys and shapes, and nearly the same numbers: sums over ranks round otherwise."""
    for key, values in wanted["state"].items():
        if list(got["state"][key]) != list(values):
            raise Differs(f"{what}: {key} has {list(got['state'][key])}, not {list(values)}")
        for name, value in values.items():
            tensor = got["state"][key][name]
            if tensor.shape != value.shape or tensor.dtype != value.dtype:
                raise Differs(f"{what}: {name} of {key}: {tensor.dtype} {list(tensor.shape)}, not {list(value.shape)}")
            if not torch.allclose(tensor, value, rtol=1e-3, atol=1e-5):
                raise Differs(f"{what}: {name} of {key} differs by {float((tensor - value).abs().max())}")


def adafactor_steps() -> str:
    return error_text(lambda: exact_afterwards("FSDP2", adafactor, Net, None))[1]


class FactoredTest(unittest.TestCase):
    """Adafactor's factored moments are DTensors with placements of their own: they are resharded like anything else."""

    @expand(*some([("FSDP2", 2), ("FSDP2", 3), ("FSDP2", 4), ("HSDP", 4)], every=2, first=1))
    def test_adafactor_of_dtensors(self, wrapper: str, world_size: int) -> None:
        plain = Oracle(adafactor)
        given = {"wrapper": wrapper, "state": plain.by_name()}
        for full in run_on_ranks(factored, world_size, given):
            check_same(f"Adafactor in {wrapper} on {world_size}", full["state"], plain.full()["state"])

    @expand(*some([("DDP", 2), ("plain", 3)], every=2))
    def test_adafactor_of_whole_parameters(self, wrapper: str, world_size: int) -> None:
        full = run_on_ranks(exact_afterwards, world_size, wrapper, adafactor, Net, None)[0]
        check_same(f"Adafactor in {wrapper}", full["state"], of_plain(adafactor, Net)["state"])
        for target, size in (("FSDP2", 3), ("FSDP2", 1), ("HSDP", 2), ("DDP", 2), ("plain", 1)):
            again = run_on_ranks(exact_afterwards, size, target, adafactor, Net, full)[0]
            check_same(f"{wrapper} on {world_size} -> {target} on {size}", again["state"], full["state"])

    def test_adafactor_steps_dtensors(self) -> None:
        words = run_on_ranks(adafactor_steps, 2)[0]
        if words:
            self.assertIn(_IN_PLACE, words)
            self.skipTest(f"torch refuses Adafactor in FSDP2: {words}")

    @expand(*some([("FSDP1 flat", 3), ("FSDP1 orig", 2), ("FSDP2", 3), ("DDP", 2)], every=2))
    def test_fused_adam(self, wrapper: str, world_size: int) -> None:
        """The optimizer's rounding depends on the index of an element in its tensor, so ranks differ in the last bit."""
        full = run_on_ranks(exact_afterwards, world_size, wrapper, fused, Net, None)[0]
        check_close(f"fused Adam in {wrapper}", full, of_plain(fused, Net))
        again = run_on_ranks(exact_afterwards, 2, wrapper, fused, Net, full)[0]
        check_same("loaded, gathered again", again["state"], full["state"])

    @expand(*some([("FSDP2", 2), ("FSDP2", 3), ("HSDP", 4), ("DDP", 2)], every=3))
    def test_muon(self, wrapper: str, world_size: int) -> None:
        full = run_on_ranks(exact_afterwards, world_size, wrapper, muon, Matrices, None)[0]
        check_same(f"Muon's momentum in {wrapper}", full["state"], of_plain(muon, Matrices)["state"])
        again = run_on_ranks(exact_afterwards, 2, "FSDP2", muon, Matrices, full)[0]
        check_same("loaded, gathered again", again["state"], full["state"])


# ------------------------------------------------------------------------------------------- LBFGS


def lbfgs(wrapper: str) -> list[tuple[str, str]]:
    with cpu():
        trained = Trained(wrapper, lambda p: O.LBFGS(p, lr=0.1), steps=0)
        full = Oracle().full()
        return [
            error_text(lambda: trained.gather(0)),
            error_text(lambda: trained.shard(full)),
            error_text(lambda: trained.scatter(full)),
        ]


class RefusedTest(unittest.TestCase):
    @expand(*some(WRAPPERS, every=4))
    def test_lbfgs_is_refused_by_name(self, wrapper: str) -> None:
        by_rank = run_on_ranks(lbfgs, 2, wrapper)
        for place, verb in enumerate(("gather", "shard", "scatter")):
            check_refused(verb, [errors[place] for errors in by_rank], "WrapperError", "LBFGS")


# ------------------------------------------------------------------------------------------- several optimizers


def one_per_parameter(model: nn.Module) -> list[O.Optimizer]:
    """One optimizer per parameter, as for steps in the backward pass."""
    return [adam([param]) for param in model.parameters()]


def in_two_halves(model: nn.Module) -> tuple[O.Optimizer, ...]:
    """Adam for the first half of the parameters, SGD for the rest. Not in the order of the model."""
    params = list(model.parameters())
    half = len(params) // 2
    return O.SGD(params[half:], lr=0.01, momentum=0.9), adam(params[:half])


def per_parameter(wrapper: str) -> None:
    with cpu():
        check_trip(wrapper, OfModel(one_per_parameter), oracle_make=adam)


def several(wrapper: str) -> None:
    """Each optimizer gets its own state back."""
    with cpu():
        trained, target = (Trained(wrapper, OfModel(in_two_halves), steps) for steps in (STEPS, 0))
        full, named = trained.gather(None), trained.gather(None, "name")
        listed = dict(
            fsdp_optim.iter_full_optim_state(
                trained.model, trained.optim, None, options=fsdp_optim.CallOptions(process_group=trained.process_group)
            )
        )
        shard, scattered = target.shard(full), target.scatter(full)
        if not isinstance(shard, (list, tuple)) or len(shard) != 2:
            raise Differs(f"get_shard gives a {type(shard).__name__} for two optimizers")
        lrs = [[("momentum" in group, len(group["params"])) for group in part["param_groups"]] for part in shard]
        alike = [[("momentum" in g, len(g["params"])) for g in o.state_dict()["param_groups"]] for o in target.optim]
        fsdp_optim.load_optim_state_dict(target.optim, shard)
        again = target.gather(None, "name")
        fsdp_optim.load_optim_state_dict(target.optim, scattered)
        third = target.gather(None, "name")
        target.step([STEPS])
        check_same("groups of the shards", lrs, alike)
        check_same("again", again["state"], named["state"])
        check_same("again, scattered", third["state"], named["state"])
        check_same(
            "iterated", {n: s for n, s in listed.items() if s}, {n: named["state"][n] for n in listed if listed[n]}
        )
        if len(named["param_groups"]) != 2:
            raise Differs(f"{len(named['param_groups'])} groups, not 2")
        for name, values in named["state"].items():
            if set(values) not in ({"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}):
                raise Differs(f"{name} has {set(values)}")
        check_elements(trained, named)


def check_elements(trained: Trained, named: Mapping[str, Any]) -> None:
    """Raise unless the dict has every element of this rank's state."""
    tables: dict[str, torch.Tensor] = {}
    for name, values in named["state"].items():
        start = trained.numbers.start[name]
        for key, value in values.items():
            if value.dim():
                table = tables.setdefault(key, torch.full((10_000,), float("nan")))
                table[start : start + value.numel()] = value.reshape(-1)
    first = min(trained.numbers.start.values())
    for optim in trained.optim:
        for param, values in optim.state.items():
            index = next(i for p, i in zip(trained.params, trained.index, strict=True) if p is param)
            real = index >= first
            for key, value in values.items():
                local = local_of(value).reshape(-1)
                if local.numel() == index.numel() and value.dim():
                    check_same(key, tables[key][index[real]], local[real])


def other_number(wrapper: str) -> list[tuple[str, str]]:
    """A list of shards for another number of optimizers."""
    with cpu():
        trained = Trained(wrapper, OfModel(in_two_halves))
        shards = trained.shard(trained.gather(None))
        return [error_text(lambda: fsdp_optim.load_optim_state_dict(trained.optim, list(shards)[:1]))]


class SeveralTest(unittest.TestCase):
    @expand(*some([w for w in WRAPPERS if w != "plain"], every=2))
    def test_one_optimizer_per_parameter_is_one_optimizer(self, wrapper: str) -> None:
        run_on_ranks(per_parameter, 2, wrapper)

    @expand(*some(WRAPPERS, every=2))
    def test_two_optimizers_over_one_model(self, wrapper: str) -> None:
        run_on_ranks(several, 2, wrapper)

    def test_a_list_of_another_length_is_refused(self) -> None:
        for errors in run_on_ranks(other_number, 2, "FSDP2"):
            self.assertEqual(errors[0][0], "StateError", errors)
