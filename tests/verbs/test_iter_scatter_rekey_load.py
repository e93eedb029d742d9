"""iter, scatter, rekey and load; DistributedDataParallel and plain modules; optimizers that only look like one."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import logging
import unittest
import weakref
from pathlib import Path
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
    check_gathered,
    error_of,
    fill,
    frozen_copy,
    gradient,
    names_in,
    nested_net,
    new_groups,
    numbers,
    plain_net,
    step_plain,
)
from kit.options import as_options
from kit.trained import state_by_name
from kit.wrapping import by_name
from parameterized import parameterized
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fsdp_optim
from fsdp_optim.errors import StateError
from fsdp_optim.fairscale import FullyShardedDataParallel as FSDP
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

STEPS = 3
BUCKETS = (1, 16, 17, 64, 100, 1000, 1 << 26)  # bytes: less than an element, less than a parameter, more than all


# ---------------------------------------------------------------------------------------------- iter


@fairscale_on_cpu()
def iterate_everything() -> None:
    """In the unwrapped model's order, on every rank; what gather gives, to the bit, in buckets of any size."""
    rank = dist.get_rank()
    model, optim, sharded = nested_net(0)
    sharded.step(optim, range(STEPS), unused=["middle.0.weight"])  # one unit has no state
    plain = Net()
    fill(plain)
    plain_optim = adam(plain.parameters())
    step_plain(plain, plain_optim, range(STEPS), unused=["middle.0.weight", "middle.0.bias"])
    state = state_by_name(plain, plain_optim)
    wanted = [(name, state.get(name, {})) for name in names_in(plain)]
    for recipient, nbytes in itertools.product((0, dist.get_world_size() - 1, None), BUCKETS):
        found = list(
            fsdp_optim.iter_full_optim_state(
                model, optim, recipient, options=fsdp_optim.CallOptions(bucket_nbytes=nbytes)
            )
        )
        mine = wanted if recipient in (rank, None) else [(name, None) for name, _ in wanted]
        check_same(f"iterated to {recipient} in buckets of {nbytes} bytes", found, mine, in_order=False)
    listed = dict(fsdp_optim.iter_full_optim_state(model, optim, None))
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, None, key_by="name")
    check_same(
        "iter and gather", {name: values for name, values in listed.items() if values}, full["state"], in_order=False
    )


class Elements:
    """How many elements of results are alive: each tensor is told to say when it goes."""

    def __init__(self) -> None:
        self.alive, self.most = 0, 0

    def add(self, tensor: Tensor) -> None:
        self.alive += tensor.numel()
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._gone, tensor.numel())

    def _gone(self, numel: int) -> None:
        self.alive -= numel


MIB = 1 << 20


@fairscale_on_cpu()
def memory_of_iter() -> float:
    """Peak of extra memory, in MiB, on a recipient that uses one parameter after the other. The state has 96 MiB."""
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(12)]  # 4 MiB each, and twice that of state
    model = FSDP(nn.Sequential(*(FSDP(layer) for layer in layers)))
    optim = adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.25)
    optim.step()
    optim.zero_grad()
    small, small_optim, _ = nested_net()
    list(fsdp_optim.iter_full_optim_state(small, small_optim, None))  # what gloo keeps is there from now on
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _status("VmRSS")
    elements = Elements()
    for _, values in fsdp_optim.iter_full_optim_state(
        model, optim, None, options=fsdp_optim.CallOptions(bucket_nbytes=8 * MIB)
    ):
        for value in values.values() if values is not None else ():
            elements.add(value)
        del value, values
    if elements.most > 3 * 2 * MIB:  # the one in hand, and a bucket
        raise AssertionError(f"{elements.most * 4 / MIB:.0f} MiB of results were alive at once")
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class TestIter(unittest.TestCase):
    @parameterized.expand([(1,), (3,)])
    def test_order_and_values(self, world_size: int) -> None:
        run_on_ranks(iterate_everything, world_size)

    def test_memory_is_bounded(self) -> None:
        """8 MiB in hand, 8 MiB of buckets, 8 MiB of results; and some for the measure."""
        for mib in run_on_ranks(memory_of_iter, 2):
            assert mib < 48, f"{mib:.0f} MiB for a state of 96 MiB"

    @parameterized.expand([("0.bias", BUCKETS[-1]), ("0.bias", BUCKETS[0]), ("0.weight", BUCKETS[0])])
    def test_state_that_changes_meanwhile(self, changed: str, nbytes: int) -> None:
        """The items of one iteration are of one moment: a step in between is an error, in a batch and between batches.

        Before a batch is moved, the items that the caller has already are looked at, too.
        """

        def in_place(values: dict[str, Any]) -> None:
            values["exp_avg"].add_(1)

        def replaced(values: dict[str, Any]) -> None:
            values["exp_avg"] = values["exp_avg"].clone()

        def added(values: dict[str, Any]) -> None:
            values["more"] = 1

        for change in (in_place, replaced, added):
            model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
            optim = adam(model.parameters())
            step_plain(model, optim, range(1))
            items = fsdp_optim.iter_full_optim_state(model, optim, options=fsdp_optim.CallOptions(bucket_nbytes=nbytes))
            self.assertEqual(next(items)[0], "0.weight")
            change(optim.state[model.get_parameter(changed)])
            with self.assertRaisesRegex(
                StateError, f"{changed}: .* was changed while iter_full_optim_state was under way"
            ):
                next(items)


# ---------------------------------------------------------------------------------------------- gather and scatter


@fairscale_on_cpu()
def gather_and_scatter_in_buckets(flatten: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = plain_net()
    model, optim, _ = nested_net(flatten_parameters=flatten)
    fresh, fresh_optim, _ = nested_net(0, flatten_parameters=flatten)
    wanted = frozen_copy(optim)
    for nbytes, recipient in zip(BUCKETS, itertools.cycle((*range(world_size), None)), strict=False):
        full = fsdp_optim.gather_full_optim_state_dict(
            model, optim, recipient, options=fsdp_optim.CallOptions(bucket_nbytes=nbytes)
        )
        check_gathered(full, recipient, *plain)
        source = recipient if recipient is not None else world_size - 1
        shard = fsdp_optim.scatter_full_optim_state_dict(
            fresh, fresh_optim, full, source, options=fsdp_optim.CallOptions(bucket_nbytes=nbytes)
        )
        check_same(f"scattered from {source} in buckets of {nbytes} bytes", shard, wanted, in_order=False)
        if full is not None:
            check_same(
                "shard", fsdp_optim.get_shard_from_optim_state_dict(fresh, fresh_optim, full), wanted, in_order=False
            )
    nothing: Any = {"not": "a full dict"}
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, 0)
    shard = fsdp_optim.scatter_full_optim_state_dict(fresh, fresh_optim, full if rank == 0 else nothing, 0)
    check_same("`full` is looked at on the source rank only", shard, wanted, in_order=False)


@fairscale_on_cpu()
def scatter_by_name_and_absent() -> None:
    """A dict by name, of a model one unit of which was never used; into an optimizer that has not stepped."""
    model, optim, sharded = nested_net(0)
    sharded.step(optim, range(STEPS), unused=["middle.2.weight"])
    wanted = frozen_copy(optim)
    for key_by in ("name", "id"):
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, 1, key_by)  # type: ignore[arg-type]
        fresh, fresh_optim, _ = nested_net(0)
        shard = fsdp_optim.scatter_full_optim_state_dict(fresh, fresh_optim, full, 1)
        check_same(f"scattered by {key_by}", shard, wanted, in_order=False)
        check_same("a unit without state has none", sorted(shard["state"]), [0, 1], in_order=False)


class TestScatter(unittest.TestCase):
    @parameterized.expand([(1, True), (2, True), (4, True), (3, False)])
    def test_bit_exact_from_every_rank_in_buckets_of_any_size(self, world_size: int, flatten: bool) -> None:
        run_on_ranks(gather_and_scatter_in_buckets, world_size, flatten)

    def test_by_name_and_absent(self) -> None:
        run_on_ranks(scatter_by_name_and_absent, 2)


# ---------------------------------------------------------------------------------------------- rekey


@fairscale_on_cpu()
def rekey_round_trips() -> Any:
    model, optim, _ = nested_net()
    plain, plain_optim = plain_net()
    by_id = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
    named = fsdp_optim.gather_full_optim_state_dict(model, optim, None, key_by="name")
    for what, one in (("wrapped", model), ("not wrapped", plain)):
        check_same(
            f"id -> name, model {what}", fsdp_optim.rekey_optim_state_dict(by_id, one, "name"), named, in_order=False
        )
        check_same(
            f"name -> id, model {what}", fsdp_optim.rekey_optim_state_dict(named, one, "id"), by_id, in_order=False
        )
        check_same(
            f"id -> id, model {what}", fsdp_optim.rekey_optim_state_dict(by_id, one, "id"), by_id, in_order=False
        )
        check_same(
            f"name -> name, model {what}", fsdp_optim.rekey_optim_state_dict(named, one, "name"), named, in_order=False
        )
    check_same("names are in the unwrapped model's order", list(named["state"]), names_in(plain), in_order=False)
    check_same("params", named["param_groups"][0]["params"], names_in(plain), in_order=False)
    check_same("keys of param_id_map", set(named["param_id_map"]), set(names_in(plain)), in_order=False)
    rekeyed = fsdp_optim.rekey_optim_state_dict(by_id, model, "name")
    check_same(
        "not a copy",
        rekeyed["state"]["last.bias"]["exp_avg"].data_ptr(),
        by_id["state"][6]["exp_avg"].data_ptr(),
        in_order=False,
    )
    named_plain = fsdp_optim.rekey_optim_state_dict(plain_optim.state_dict(), plain, "name")
    check_same(
        "a plain optimizer's dict by name", named_plain["state"], state_by_name(plain, plain_optim), in_order=False
    )
    for full in (named, named_plain):
        shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)
        check_same("shard of a dict by name", shard, frozen_copy(optim), in_order=False)
    return by_id


class TestRekey(unittest.TestCase):
    def test_round_trips(self) -> None:
        run_on_ranks(rekey_round_trips, 2)

    def test_groups_and_extra_keys_stay(self) -> None:
        plain = Net()
        params = list(plain.parameters())
        groups = [{"params": params[3:], "lr": 0.1}, {"params": [], "lr": 0.3}, {"params": params[:3], "lr": 0.2}]
        optim = torch.optim.SGD(groups, momentum=0.9)
        step_plain(plain, optim, range(2))
        full = {**optim.state_dict(), "loss_scale": 8.0}
        names = names_in(plain)
        for group, part in zip(full["param_groups"], (names[3:], [], names[:3]), strict=True):
            group["param_names"] = part
        named = fsdp_optim.rekey_optim_state_dict(full, plain, "name")
        check_same(
            "params", [group["params"] for group in named["param_groups"]], [names[3:], [], names[:3]], in_order=False
        )
        check_same("lr", [group["lr"] for group in named["param_groups"]], [0.1, 0.3, 0.2], in_order=False)
        check_same("loss_scale", named["loss_scale"], 8.0, in_order=False)
        check_same("and back", fsdp_optim.rekey_optim_state_dict(named, plain, "id"), full, in_order=False)


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
            found = []
            for load in (lambda o, s: o.load_state_dict(s), fsdp_optim.load_optim_state_dict):
                model = copy.deepcopy(plain)
                optim = make(model.parameters())
                load(optim, copy.deepcopy(saved))
                loaded = frozen_copy(optim)
                step_plain(model, optim, range(STEPS, STEPS + 2))
                found.append((loaded, frozen_copy(optim), model.state_dict(), type(optim.state)))
            check_same("load_optim_state_dict and load_state_dict", found[1], found[0], in_order=False)
            assert found[1][0]["param_groups"][0]["lr"] == 0.125

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


# ---------------------------------------------------------------------------------------------- replicated


def replicated(kind: str, steps: int, model: nn.Module | None = None) -> tuple[Any, Any, Any]:
    net = model or Net()
    fill(net)
    wrapped: Any = DDP(net) if kind == "ddp" else net
    optim = adam(net.parameters())
    step_plain(net, optim, range(steps))
    return wrapped, optim, net


def everything_replicated(kind: str) -> None:
    """Every function, on a model that each rank has all of. `kind`: ddp, plain (each rank alone), group (told so)."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    plain = plain_net()
    model, optim, _ = replicated(kind, STEPS)
    wanted = frozen_copy(optim)
    options: dict[str, Any] = {"process_group": dist.group.WORLD} if kind == "group" else {}
    for recipient in (0, last, None) if kind != "plain" else (rank, None):
        full = fsdp_optim.gather_full_optim_state_dict(
            model, optim, recipient, **as_options(fsdp_optim.CallOptions, **options)
        )
        check_gathered(full, recipient, *plain)
        listed = list(
            fsdp_optim.iter_full_optim_state(
                model, optim, recipient, **as_options(fsdp_optim.CallOptions, **options, bucket_nbytes=64)
            )
        )
        check_same("names", [name for name, _ in listed], names_in(plain[0]), in_order=False)
        if recipient in (rank, None):
            check_same("iterated", dict(listed), state_by_name(*plain), in_order=False)
    fresh, fresh_optim, net = replicated(kind, 0)
    check_same(
        "get_shard", fsdp_optim.get_shard_from_optim_state_dict(fresh, fresh_optim, full), wanted, in_order=False
    )
    mine = full if rank == last else None  # also a plain model's state comes from one rank to all
    shard = fsdp_optim.scatter_full_optim_state_dict(
        fresh, fresh_optim, mine, last, **as_options(fsdp_optim.CallOptions, **options)
    )
    check_same("scatter", shard, wanted, in_order=False)
    named = fsdp_optim.rekey_optim_state_dict(full, fresh, "name")
    check_same("by name: without `module.`", named["state"], state_by_name(*plain), in_order=False)
    check_same(
        "get_shard by name",
        fsdp_optim.get_shard_from_optim_state_dict(fresh, fresh_optim, named),
        wanted,
        in_order=False,
    )
    fsdp_optim.load_optim_state_dict(fresh_optim, shard)
    for param, saved in zip(net.parameters(), plain[0].parameters(), strict=True):
        param.data.copy_(saved)
    step_plain(net, fresh_optim, [STEPS])
    check_same(
        "trained on", frozen_copy(fresh_optim)["state"], plain_net(STEPS + 1)[1].state_dict()["state"], in_order=False
    )


def replicas_that_differ() -> list[tuple[str, str, float]]:
    """A plain module on several ranks: nobody keeps the copies equal, so that a difference must not go unnoticed."""
    model, optim, _ = replicated("plain", STEPS)
    if dist.get_rank() == 1:
        next(iter(optim.state.values()))["exp_avg"][0, 0] += 1
    group = dist.group.WORLD
    return [
        error_of(
            lambda: fsdp_optim.gather_full_optim_state_dict(
                model, optim, options=fsdp_optim.CallOptions(process_group=group)
            )
        )
    ]


@fairscale_on_cpu()
def between_wrappers() -> None:
    """The state that fairscale FSDP gathered goes into DDP, and the other way round; also with a part of the ranks in DDP."""
    sharded, sharded_optim, _ = nested_net()
    ddp, ddp_optim, _ = replicated("ddp", STEPS)
    a = fsdp_optim.gather_full_optim_state_dict(sharded, sharded_optim, None)
    b = fsdp_optim.gather_full_optim_state_dict(ddp, ddp_optim, None)
    check_same("gathered from FSDP and from DDP", a["state"], b["state"], in_order=False)
    check_same(
        "FSDP's dict into DDP",
        fsdp_optim.get_shard_from_optim_state_dict(ddp, ddp_optim, a),
        frozen_copy(ddp_optim),
        in_order=False,
    )
    check_same(
        "DDP's dict into FSDP",
        fsdp_optim.get_shard_from_optim_state_dict(sharded, sharded_optim, b),
        frozen_copy(sharded_optim),
        in_order=False,
    )


def ddp_on_two_of_three() -> None:
    group = new_groups([1, 2])
    if group is None:
        return
    net = Net()
    fill(net)
    model = DDP(net, process_group=group)
    optim = adam(net.parameters())
    step_plain(net, optim, range(STEPS))
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, 2)
    check_gathered(full, 2, *plain_net())
    check_same(
        "scatter", fsdp_optim.scatter_full_optim_state_dict(model, optim, full, 2), frozen_copy(optim), in_order=False
    )


def real_ddp_training() -> None:
    """DDP that really averages gradients: all ranks have the same state, and any may receive it."""
    torch.manual_seed(3)
    net = Net()
    model = DDP(net)
    optim = adam(model.parameters())
    for step in range(2):
        optim.zero_grad()
        model(numbers(f"input {step} of rank {dist.get_rank()}", (4, 5))).square().mean().backward()
        optim.step()
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, 1)
    if full is not None:
        check_full(full, optim, names_in(net))


class TestReplicated(unittest.TestCase):
    @parameterized.expand([("ddp", 2), ("ddp", 1), ("plain", 2), ("group", 3)])
    def test_every_function(self, kind: str, world_size: int) -> None:
        run_on_ranks(everything_replicated, world_size, kind)

    def test_without_torch_distributed(self) -> None:
        """In one process that knows of no ranks at all."""
        assert not dist.is_initialized()
        model, optim = plain_net()
        full = fsdp_optim.gather_full_optim_state_dict(model, optim)
        check_full(full, optim, names_in(model))
        check_same(
            "iterated",
            dict(fsdp_optim.iter_full_optim_state(model, optim)),
            state_by_name(model, optim),
            in_order=False,
        )
        _, fresh = plain_net(0)
        for shard in (
            fsdp_optim.get_shard_from_optim_state_dict(model, optim, full),
            fsdp_optim.scatter_full_optim_state_dict(model, optim, full),
        ):
            check_same("shard", shard, optim.state_dict(), in_order=False)
            fsdp_optim.load_optim_state_dict(fresh, shard)

    def test_copies_that_differ_are_an_error(self) -> None:
        ((first,), (second,)) = run_on_ranks(replicas_that_differ, 2)
        assert first[:2] == second[:2]
        assert first[0] == "StateError", first
        assert "first.weight" in first[1], first

    def test_between_wrappers(self) -> None:
        run_on_ranks(between_wrappers, 2)

    def test_ddp_on_a_group_without_rank_0(self) -> None:
        run_on_ranks(ddp_on_two_of_three, 3)

    def test_ddp_that_averages(self) -> None:
        run_on_ranks(real_ddp_training, 2)


# ---------------------------------------------------------------------------------------------- optimizer-like


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


def test_the_numbers_mean_something() -> None:
    assert torch.equal(gradient("a", 0, (2,)), gradient("a", 0, (2,)))
    assert not torch.equal(gradient("a", 0, (2,)), gradient("b", 0, (2,)))
    assert not torch.equal(gradient("a", 0, (2,)), gradient("a", 1, (2,)))
