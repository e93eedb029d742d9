"""load_optim_state: half precision, hooks, optimizers of other packages, and what is logged."""

from __future__ import annotations

import copy
import logging
import unittest
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel as FairscaleFSDP
from kit.compare import check_same
from kit.groups import (
    Net,
    Sharded,
    adam,
    check_full,
    error_of,
    frozen_copy,
    names_in,
    nested_net,
    numbers,
    plain_net,
    step_plain,
)
from kit.wrapping import by_name
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.fairscale import FullyShardedDataParallel as FSDP
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

STEPS = 3

# ---------------------------------------------------------------------------------------------- load


def half_precision(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in half precision whose optimizer keeps its moments, and more, in others."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for index, param in enumerate(model.parameters()):
        optim.state[param] = {
            "step": torch.tensor(3.0),
            "exp_avg": numbers(f"exp_avg {index}", param.shape),
            "exp_avg_sq": numbers(f"exp_avg_sq {index}", param.shape).square().double(),
            "codes": numbers(f"codes {index}", param.shape).mul(100).to(torch.int8),
            "half": numbers(f"half {index}", param.shape).to(dtype),
            "count": 7,
        }
    return model, optim


class Hooked(torch.optim.SGD):
    """Counts what load_state_dict does to it."""

    calls = 0

    def load_state_dict(self, state_dict: Any) -> None:
        self.calls += 1
        super().load_state_dict(state_dict)


@fairscale_on_cpu()
def load_fp16_shards() -> None:
    """fairscale in pure float16: the moments were saved in float32, and stay that, through every step of the way."""

    def build() -> Any:
        net = Net().half()
        sharded = Sharded(net)
        model = sharded.wrap(net, compute_dtype=torch.float16)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optim = build()
    (param,) = model.parameters()
    optim.state[param] = {
        "step": torch.tensor(3.0),
        "exp_avg": numbers(f"a {dist.get_rank()}", param.shape),
        "exp_avg_sq": numbers(f"b {dist.get_rank()}", param.shape).square(),
    }
    for name in ("exp_avg", "exp_avg_sq"):
        flat = optim.state[param][name]
        padding = model.numel_padded_per_param[0]
        flat[len(flat) - padding :] = 0
    wanted = frozen_copy(optim)
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
    check_same("dtype in the full dict", full["state"][0]["exp_avg"].dtype, torch.float32, in_order=False)
    fresh, fresh_optim = build()
    fsdp_optim.load_optim_state_dict(fresh_optim, fresh.get_shard_from_optim_state_dict(full))
    check_same("loaded", fresh_optim.state_dict(), wanted, in_order=False)
    check_same(
        "gathered again", fsdp_optim.gather_full_optim_state_dict(fresh, fresh_optim, None), full, in_order=False
    )


class TestLoad(unittest.TestCase):
    @parameterized.expand([(torch.bfloat16,), (torch.float16,)])
    def test_every_value_keeps_its_dtype(self, dtype: torch.dtype) -> None:
        model, optim = half_precision(dtype)
        saved = frozen_copy(optim)
        fresh_model = copy.deepcopy(model)
        fresh = torch.optim.Adam(fresh_model.parameters(), lr=0.5)
        fresh.load_state_dict(copy.deepcopy(saved))
        assert fresh.state_dict()["state"][0]["exp_avg"].dtype == dtype, "torch's own method does not cast any more"
        fsdp_optim.load_optim_state_dict(fresh, copy.deepcopy(saved))
        check_same("loaded", fresh.state_dict(), saved, in_order=False)
        check_same(
            "order of the values",
            [list(values) for values in fresh.state.values()],
            [list(values) for values in optim.state.values()],
            in_order=False,
        )

    @parameterized.expand([(1,), (2,)])
    def test_shards_of_a_half_precision_model(self, world_size: int) -> None:
        run_on_ranks(load_fp16_shards, world_size)

    def test_otherwise_as_the_optimizers_own_method(self) -> None:
        for make in (
            adam,
            lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            lambda params: torch.optim.ASGD(params, lr=0.1),
            lambda params: torch.optim.Adagrad(params, lr=0.1),
        ):
            plain, trained = plain_net(STEPS, make)
            saved = frozen_copy(trained)
            saved["param_groups"][0]["lr"] = 0.125
            results = []
            for load in (lambda o, s: o.load_state_dict(s), fsdp_optim.load_optim_state_dict):
                model = copy.deepcopy(plain)
                optim = make(model.parameters())
                load(optim, copy.deepcopy(saved))
                loaded = frozen_copy(optim)
                step_plain(model, optim, range(STEPS, STEPS + 2))
                results.append((loaded, frozen_copy(optim), model.state_dict(), type(optim.state)))
            check_same("load_optim_state_dict and load_state_dict", results[1], results[0], in_order=False)
            assert results[1][0]["param_groups"][0]["lr"] == 0.125

    def test_it_goes_through_the_optimizers_own_method(self) -> None:
        """Optimizers that override it, and those that have hooks, rely on that."""
        model, trained = plain_net(STEPS, lambda params: Hooked(params, lr=0.1, momentum=0.9))
        optim = Hooked(model.parameters(), lr=0.3, momentum=0.9)
        hooked: list[str] = []
        optim.register_load_state_dict_pre_hook(lambda *_: hooked.append("pre"))
        optim.register_load_state_dict_post_hook(lambda *_: hooked.append("post"))
        fsdp_optim.load_optim_state_dict(optim, frozen_copy(trained))
        check_same("loaded", optim.state_dict(), trained.state_dict(), in_order=False)
        assert optim.calls == 1
        assert hooked == ["pre", "post"]

    def test_it_replaces_what_was_there(self) -> None:
        """Also a state that the saved optimizer did not have, as torch's own method does."""
        model, optim = plain_net(STEPS)
        saved = frozen_copy(optim)
        del saved["state"][2]
        step_plain(model, optim, range(STEPS, STEPS + 2))
        fsdp_optim.load_optim_state_dict(optim, saved)
        check_same("loaded", optim.state_dict(), saved, in_order=False)

    def test_the_shard_stays_what_it_was(self) -> None:
        _, optim = plain_net(STEPS)
        saved = frozen_copy(optim)
        kept = copy.deepcopy(saved)
        _, fresh = plain_net(0)
        fsdp_optim.load_optim_state_dict(fresh, saved)
        check_same("the shard", saved, kept, in_order=False)


# ---------------------------------------------------------------------------------------------- optimizer-like


class Breaks(torch.optim.Adam):
    """Changes its state and its groups where they are, and then refuses."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for values in self.state.values():
            values["step"] = torch.tensor(99.0)
            del values["exp_avg"]
        self.param_groups[0]["lr"] = 7.0
        self.param_groups.append({"params": []})
        raise ValueError("refused halfway")


class Keyed:
    """Has names for its parameters, and lists them in another order than its groups; its load casts, as torch's does."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self.params = params
        self.param_groups: list[dict[str, Any]] = [{"params": list(params.values()), "lr": 0.1}]
        self.state: dict[nn.Parameter, dict[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        state = {name: dict(self.state[param]) for name, param in self.params.items() if param in self.state}
        return {"state": state, "param_groups": [{**self.param_groups[0], "params": sorted(self.params, reverse=True)}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, values in state_dict["state"].items():
            param = self.params[name]
            self.state[param] = {key: value.to(param.dtype) for key, value in values.items()}


class TestBefore(unittest.TestCase):
    def test_what_a_load_that_fails_has_changed_in_place_is_put_back(self) -> None:
        model = nn.Linear(3, 2)
        optim = Breaks(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
        before, groups = copy.deepcopy(torch.optim.Adam.state_dict(optim)), list(optim.param_groups)
        with self.assertRaisesRegex(fsdp_optim.StateError, "refused halfway.*nothing was loaded"):
            fsdp_optim.load_optim_state_dict(optim, before)  # type: ignore[arg-type]
        check_same("the optimizer", torch.optim.Adam.state_dict(optim), before)
        self.assertEqual([id(group) for group in optim.param_groups], [id(group) for group in groups])

    def test_a_hyperparameter_that_only_the_optimizer_has_is_kept_where_asked_for(self) -> None:
        """The saved run did not know it, and a step may need it."""
        optim = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
        shard = copy.deepcopy(optim.state_dict())
        optim.param_groups[0]["scale"] = 7.0
        fsdp_optim.load_optim_state_dict(optim, shard, keep_hyperparameters=["scale"])  # type: ignore[arg-type]
        self.assertEqual(optim.param_groups[0]["scale"], 7.0)

    def test_names_find_the_parameters_whatever_their_order(self) -> None:
        """Values of equal shapes; one of them is wider than its parameter."""
        params = {"a": nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)), "b": nn.Parameter(torch.zeros(3))}
        optim = Keyed(params)
        values = {name: torch.tensor([1.0, 2.0, 3.0]) / (3 + number) for number, name in enumerate(params)}
        shard = {**optim.state_dict(), "state": {name: {"exp_avg": value} for name, value in values.items()}}
        fsdp_optim.load_optim_state_dict(optim, copy.deepcopy(shard))  # type: ignore[arg-type]
        check_same("state", {name: optim.state[param]["exp_avg"] for name, param in params.items()}, values)


class FP16Optimizer:
    """As fairseq's: has `param_groups` and `state_dict()`, whose dict has `loss_scale`; it is no torch.optim.Optimizer."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._wrapped = optim
        self.scale = 128.0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._wrapped.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {**self._wrapped.state_dict(), "loss_scale": self.scale, "history": {"lr": [0.1, 0.2]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        self.scale = rest.pop("loss_scale")
        rest.pop("history")
        self._wrapped.load_state_dict(rest)

    def step(self) -> None:
        self._wrapped.step()


class TwoMethods:
    """The least that is asked for."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.param_groups = optim.param_groups
        self.state_dict = optim.state_dict


@fairscale_on_cpu()
def use_optimizer_like(cls: Any) -> None:
    model, inner, _ = nested_net(cls=cls)
    optim = FP16Optimizer(inner)
    optim.scale = 64.0
    extra = {"loss_scale": 64.0, "history": {"lr": [0.1, 0.2]}}
    for key_by in ("id", "name"):
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, None, key_by)  # type: ignore[arg-type]
        check_same("extra keys of the full dict", {key: full[key] for key in extra}, extra, in_order=False)
        for shard in (
            fsdp_optim.get_shard_from_optim_state_dict(model, optim, full),
            fsdp_optim.scatter_full_optim_state_dict(model, optim, full if dist.get_rank() == 1 else None, 1),
        ):
            check_same("shard with extra keys", shard, optim.state_dict(), in_order=False)
        _, fresh_inner, sharded = nested_net(0, cls=cls)
        fresh = FP16Optimizer(fresh_inner)
        fsdp_optim.load_optim_state_dict(fresh, shard)
        check_same("loaded", fresh.state_dict(), optim.state_dict(), in_order=False)
        sharded.step(fresh, [STEPS])
    check_full(fsdp_optim.rekey_optim_state_dict(full, model, "id"), *names_and(plain_net()))
    least = fsdp_optim.gather_full_optim_state_dict(model, TwoMethods(inner), None)
    check_full(least, *names_and(plain_net()))
    check_same("extra keys", set(least) & set(extra), set(), in_order=False)
    for name, values in fsdp_optim.iter_full_optim_state(model, optim, None):
        check_same(name, values, by_name(least)[name], in_order=False)
    if cls is FSDP:
        method = model.get_shard_from_optim_state_dict(fsdp_optim.gather_full_optim_state_dict(model, optim, None))
        check_same("shard by the method, without the optimizer", method, optim.state_dict(), in_order=False)


def names_and(trained: tuple[nn.Module, torch.optim.Optimizer]) -> tuple[torch.optim.Optimizer, list[str]]:
    return trained[1], names_in(trained[0])


def cannot_be_loaded_exactly() -> None:
    """An optimizer-like object that would cast, and has no `state` to put the values into: not silently."""
    _, optim = half_precision(torch.bfloat16)
    before = frozen_copy(optim)
    like = FP16Optimizer(optim)
    shard = copy.deepcopy(like.state_dict())
    kind, message, _ = error_of(lambda: fsdp_optim.load_optim_state_dict(like, shard))
    loaded = frozen_copy(optim)
    if kind:
        check_same(message, (kind, "bfloat16" in message), ("StateError", True), in_order=False)
        check_same("nothing is half loaded", loaded, before, in_order=False)
    else:
        check_same("loaded as it was saved", loaded["state"], before["state"], in_order=False)


class TestOptimizerLike(unittest.TestCase):
    @parameterized.expand([(FSDP,), (FairscaleFSDP,)])
    def test_two_members_are_enough_and_extra_keys_stay(self, cls: Any) -> None:
        run_on_ranks(use_optimizer_like, 2, cls)

    def test_a_cast_is_not_silent(self) -> None:
        cannot_be_loaded_exactly()


class TestLogging(unittest.TestCase):
    def test_a_summary_is_logged(self) -> None:
        """Nothing silent: tensors, bytes, and parameters without state are told on the logger `fsdp_optim`."""
        model, optim = plain_net(0)
        step_plain(model, optim, range(2), unused=["last.weight"])
        with self.assertLogs(logging.getLogger("fsdp_optim"), level="INFO") as logs:
            full = fsdp_optim.gather_full_optim_state_dict(model, optim)
        tensors = [value for values in full["state"].values() for value in values.values() if value.dim()]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        text = " ".join(logs.output).replace(",", "").replace("_", "")
        assert str(len(tensors)) in text, logs.output
        assert str(nbytes) in text or f"{nbytes / 1024:.1f}" in text or f"{nbytes / (1 << 20):.1f}" in text, logs.output
        assert "without state: last.weight" in text, logs.output
