"""Nothing is changed by a call: not the model, not the optimizer, not what is handed in; and results share no memory."""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel as FairscaleFSDP
from kit.cases import expand, some
from kit.compare import check_same, tensors_in
from kit.groups import (
    Net,
    Sharded,
    adam,
    check_gathered,
    fill,
    frozen_copy,
    nested_net,
    plain_net,
    snapshot,
    step_plain,
    told_by,
)
from kit.options import as_options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fsdp_optim
import fsdp_optim.fairscale
from fsdp_optim.fairscale import FullyShardedDataParallel as FSDP
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

Call = tuple[str, Callable[[], Any]]


def storages_in(value: Any) -> dict[int, str]:
    """Address of every storage with memory -> where a tensor with it is."""
    paths = {}
    for path, tensor in tensors_in(value):
        if tensor.untyped_storage().nbytes():
            paths[tensor.untyped_storage().data_ptr()] = path
    return paths


def check_apart(result: Any, other: Any, what: str) -> None:
    """Raise if two values have a tensor that shares memory."""
    paths = storages_in(other)
    for address, path in storages_in(result).items():
        if address in paths:
            raise AssertionError(f"{what}: {path} shares its memory with {paths[address]}")


def check_own_storages(result: Any, what: str) -> None:
    """Raise unless every tensor has a storage of its own, not larger than itself, on the CPU."""
    known: dict[int, str] = {}
    for path, tensor in tensors_in(result):
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes:
            raise AssertionError(f"{what}: {path} has {tensor.nbytes} bytes in a storage of {storage.nbytes()}")
        if tensor.nbytes and storage.data_ptr() in known:
            raise AssertionError(f"{what}: {path} and {known[storage.data_ptr()]} have one storage")
        if tensor.device.type != "cpu" or tensor.requires_grad:
            raise AssertionError(f"{what}: {path} is on {tensor.device}, requires_grad={tensor.requires_grad}")
        known[storage.data_ptr()] = path


def attributes(model: nn.Module, optim: Any) -> dict[str, Any]:
    """The parts of a model and an optimizer besides numbers: flags, lazily made attributes, identities."""
    state = getattr(optim, "state", {})
    return {
        "modules": {
            name: {
                key: value if isinstance(value, (bool, int, float, str, type(None))) else (type(value), id(value))
                for key, value in vars(module).items()
            }
            for name, module in model.named_modules()
        },
        "params": {name: (id(p), p.data_ptr(), sorted(vars(p))) for name, p in model.named_parameters()},
        "grads": {name: (id(p.grad), p._version) for name, p in model.named_parameters()},
        "state": {
            (index, key): (type(value), id(value), value.data_ptr() if isinstance(value, Tensor) else value)
            for index, values in enumerate(state.values())
            for key, value in values.items()
        },
        "state keys": [id(param) for param in state],
        "groups": [(id(group), [id(p) for p in group["params"]], list(group)) for group in optim.param_groups],
        "global": (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.get_rng_state().tolist(),
        ),
    }


def calls_of(model: Any, optim: Any, full: Any) -> list[Call]:
    """Every function of the library that takes a model and an optimizer; `full` is there on all ranks."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    tells = any(isinstance(module, (FSDP, FairscaleFSDP, DDP)) for module in model.modules())
    group: dict[str, Any] = (
        {} if tells else {"process_group": dist.group.WORLD}
    )  # a plain model does not tell who shares it
    named = fsdp_optim.rekey_optim_state_dict(full, model, "name")
    calls: list[Call] = [
        (
            "gather",
            lambda: fsdp_optim.gather_full_optim_state_dict(
                model, optim, **as_options(fsdp_optim.CallOptions, **group)
            ),
        ),
        (
            "gather by name",
            lambda: fsdp_optim.fairscale.gather_full_optim_state_dict(
                model, optim, None, "name", collect="all", **as_options(fsdp_optim.CallOptions, **group)
            ),
        ),
        (
            "iter",
            lambda: list(
                fsdp_optim.iter_full_optim_state(
                    model, optim, None, **as_options(fsdp_optim.CallOptions, **group, bucket_nbytes=64)
                )
            ),
        ),
        (
            "get_shard",
            lambda: fsdp_optim.get_shard_from_optim_state_dict(
                model, optim, full, **as_options(fsdp_optim.CallOptions, **group)
            ),
        ),
        (
            "get_shard by name",
            lambda: fsdp_optim.get_shard_from_optim_state_dict(
                model, optim, named, **as_options(fsdp_optim.CallOptions, **group)
            ),
        ),
        (
            "scatter",
            lambda: fsdp_optim.scatter_full_optim_state_dict(
                model, optim, full if rank == last else None, last, **as_options(fsdp_optim.CallOptions, **group)
            ),
        ),
        (
            "scatter, full on all",
            lambda: fsdp_optim.scatter_full_optim_state_dict(
                model, optim, full, **as_options(fsdp_optim.CallOptions, **group)
            ),
        ),
        ("rekey", lambda: fsdp_optim.rekey_optim_state_dict(full, model, "name")),
        ("rekey back", lambda: fsdp_optim.rekey_optim_state_dict(named, model, "id")),
    ]
    if isinstance(model, FairscaleFSDP):
        calls.append(("for_fairscale", lambda: fsdp_optim.fairscale.for_fairscale(full)))
    if isinstance(model, FSDP):
        calls += [
            ("method gather", lambda: model.gather_full_optim_state_dict(optim, 0)),
            ("method get_shard", lambda: model.get_shard_from_optim_state_dict(full)),
            ("method get_shard with optimizer", lambda: model.get_shard_from_optim_state_dict(full, optim)),
        ]
    return calls


def check_calls(model: Any, optim: Any, what: str) -> None:
    """Make every call, and compare everything before and after."""
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
    given = copy.deepcopy(full)
    addresses = [(path, id(tensor), tensor.data_ptr()) for path, tensor in tensors_in(full)]
    calls = calls_of(model, optim, full)
    before, looks = snapshot(model, optim), attributes(model, optim)
    for name, call in calls:
        result = call()
        check_same(f"{what}: {name} changed the model or the optimizer", snapshot(model, optim), before, in_order=False)
        check_same(
            f"{what}: {name} changed what the model or the optimizer has",
            attributes(model, optim),
            looks,
            in_order=False,
        )
        check_same(f"{what}: {name} changed the dict that it was given", full, given, in_order=False)
        check_same(
            f"{what}: {name} changed the tensors of the dict that it was given",
            [(path, id(tensor), tensor.data_ptr()) for path, tensor in tensors_in(full)],
            addresses,
            in_order=False,
        )
        live = [optim.state_dict(), list(model.parameters()), [p.grad for p in model.parameters()]]
        if "rekey" not in name and name != "for_fairscale":  # these share their tensors with what they are given
            check_apart(result, full, f"{what}: result of {name} and the dict")
            check_own_storages(result, f"{what}: result of {name}")
        check_apart(result, live, f"{what}: result of {name} and the live training")


@fairscale_on_cpu()
def on_fairscale(cls: Any) -> None:
    """Before any forward, after a real training step with its gradients there, and after training on from a load."""
    model, optim, sharded = nested_net(2, cls=cls)
    check_calls(model, optim, "before any forward")
    for unit in (m for m in model.modules() if isinstance(m, FairscaleFSDP)):
        if unit._is_root is not None or any(hasattr(p, "_full_param_padded") for p in unit.params):
            raise AssertionError("fairscale's lazy initialisation was done by a call")
    for number in range(2):
        optim.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optim.step()
    if not all(p.grad is not None for p in model.parameters()):
        raise AssertionError("there are no gradients that a call could change")
    check_calls(model, optim, "after training")
    model.eval()
    check_calls(model, optim, "in eval mode")
    model.train()
    shard = fsdp_optim.get_shard_from_optim_state_dict(
        model, optim, fsdp_optim.gather_full_optim_state_dict(model, optim, None)
    )
    fsdp_optim.load_optim_state_dict(optim, shard)
    sharded.step(optim, [7])
    check_calls(model, optim, "after a load and a step")


@fairscale_on_cpu()
def training_is_not_disturbed() -> None:
    """Calls between forward and backward, and between backward and step: the training ends where it would without."""

    def train(gathering: bool) -> Any:
        model, optim, _ = nested_net(0)
        for number in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
            loss = model(x).square().mean()
            if gathering:
                fsdp_optim.gather_full_optim_state_dict(model, optim, None)
            loss.backward()
            if gathering:
                full = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
                fsdp_optim.scatter_full_optim_state_dict(model, optim, full)
            optim.step()
            optim.zero_grad()
        return snapshot(model, optim)

    check_same(
        "training with gathers in it, and without", train(gathering=True), train(gathering=False), in_order=False
    )


@fairscale_on_cpu()
def step_stays_a_tensor() -> None:
    """fairscale's own gather turns the live optimizer's steps into floats; then the next step fails."""
    model, optim, sharded = nested_net(2)
    for _ in range(2):
        full = fsdp_optim.gather_full_optim_state_dict(model, optim)
        kinds = {type(values["step"]) for values in optim.state.values()}
        kinds |= {type(values["step"]) for values in full["state"].values()} if full is not None else set()
        check_same(f"step is a tensor, live and gathered: {kinds}", kinds == {Tensor}, True, in_order=False)
    sharded.step(optim, [2])
    check_gathered(fsdp_optim.gather_full_optim_state_dict(model, optim), 0, *plain_net())


def replicated(kind: str) -> tuple[Any, Any]:
    net = Net()
    fill(net)
    model: Any = DDP(net) if kind == "ddp" else net
    optim = adam(net.parameters())
    step_plain(net, optim, range(2))
    return model, optim


def on_replicated(kind: str) -> None:
    check_calls(*replicated(kind), kind)


@fairscale_on_cpu()
def on_loose_parts() -> None:
    """Wholes on every rank: where a gather has nothing to move, it must copy all the same."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    sharded = Sharded(net)
    net[0] = sharded.wrap(net[0], flatten_parameters=False)
    optim = adam(net.parameters())
    sharded.step(optim, range(2))
    check_calls(net, optim, "half in units")


@fairscale_on_cpu()
def hyperparameters_are_copied() -> None:
    """A tensor lr, a list, a dict in a group: writing into the full dict, or into a shard, changes no live one."""
    model, optim, _ = nested_net(1)
    group = optim.param_groups[0]
    group["lr"] = torch.tensor(0.25)
    group["plan"] = {"milestones": [1, 2, 3]}
    before = snapshot(model, optim)
    full = told_by(0, fsdp_optim.gather_full_optim_state_dict(model, optim))
    gathered = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
    check_same("lr", gathered["param_groups"][0]["lr"], torch.tensor(0.25), in_order=False)
    gathered["param_groups"][0]["lr"].fill_(9)
    gathered["param_groups"][0]["plan"]["milestones"].append(4)
    gathered["param_groups"][0]["params"].clear()
    check_same("the optimizer, after writing into the full dict", snapshot(model, optim), before, in_order=False)
    given = copy.deepcopy(full)
    for shard in (
        fsdp_optim.get_shard_from_optim_state_dict(model, optim, full),
        fsdp_optim.scatter_full_optim_state_dict(model, optim, full),
    ):
        shard["param_groups"][0]["lr"].fill_(9)
        shard["param_groups"][0]["plan"]["milestones"].append(4)
        shard["param_groups"][0]["params"].clear()
        for _, tensor in tensors_in(shard["state"]):
            tensor.fill_(1)
        check_same("the full dict, after writing into a shard", full, given, in_order=False)
        check_same("the optimizer, after writing into a shard", snapshot(model, optim), before, in_order=False)


@fairscale_on_cpu()
def later_steps_leave_results_alone() -> None:
    """Gathered and iterated values are of that moment, whatever the training does afterwards."""
    model, optim, sharded = nested_net(2)
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
    listed = dict(fsdp_optim.iter_full_optim_state(model, optim, None))
    shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)
    kept = copy.deepcopy([full, listed, shard])
    for name, values in listed.items():
        check_own_storages(values, f"iter: {name}")
    sharded.step(optim, range(2, 5))
    check_same("results, after more steps", [full, listed, shard], kept, in_order=False)
    check_same("the optimizer has state", frozen_copy(optim)["state"] == {}, False, in_order=False)


class TestSideEffects(unittest.TestCase):
    @expand(*some([(1, FSDP), (2, FSDP), (2, FairscaleFSDP)], every=2, first=1))
    def test_fairscale(self, world_size: int, cls: Any) -> None:
        run_on_ranks(on_fairscale, world_size, cls)

    @expand(*some([("ddp", 2), ("plain", 1), ("plain", 2)], every=2))
    def test_replicated(self, kind: str, world_size: int) -> None:
        run_on_ranks(on_replicated, world_size, kind)

    def test_half_in_units(self) -> None:
        run_on_ranks(on_loose_parts, 2)

    def test_training_goes_where_it_would_have_gone(self) -> None:
        run_on_ranks(training_is_not_disturbed, 2)

    def test_the_live_step_stays_a_tensor(self) -> None:
        run_on_ranks(step_stays_a_tensor, 2)

    def test_hyperparameters_are_copied(self) -> None:
        run_on_ranks(hyperparameters_are_copied, 2)

    def test_later_steps_leave_results_alone(self) -> None:
        run_on_ranks(later_steps_leave_results_alone, 2)


class TestTheComparisons(unittest.TestCase):
    """The facts that the tests above rest on."""

    def test_a_shared_storage_is_seen(self) -> None:
        tensor = torch.zeros(4)
        with self.assertRaisesRegex(AssertionError, "shares its memory"):
            check_apart({"a": [tensor[1:]]}, [tensor[:1]], "here")
        with self.assertRaisesRegex(AssertionError, "in a storage of 16"):
            check_own_storages({"a": tensor[1:]}, "here")
        with self.assertRaisesRegex(AssertionError, "have one storage"):
            check_own_storages({"a": tensor, "b": tensor}, "here")

    def test_a_changed_flag_is_seen(self) -> None:
        model = Net()
        optim = adam(model.parameters())
        looks = attributes(model, optim)
        model.middle[0].training = False
        with self.assertRaisesRegex(AssertionError, "middle.0"):
            check_same("here", attributes(model, optim), looks, in_order=False)
