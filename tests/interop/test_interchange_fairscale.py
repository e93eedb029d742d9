"""Full dicts go both ways between this library, fairscale itself and plain optimizers."""

from __future__ import annotations

import copy
import io
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel as FairscaleFSDP
from kit.compare import check_same
from kit.groups import (
    NUM_NET_PARAMS,
    Net,
    Sharded,
    adam,
    check_full,
    check_gathered,
    fill,
    frozen_copy,
    gradient,
    names_in,
    nested_net,
    new_groups,
    plain_net,
    step_plain,
    told_by,
)
from kit.trained import state_by_name
from kit.wrapping import by_name
from parameterized import parameterized
from torch import Tensor, nn

import fsdp_optim
import fsdp_optim.fairscale
from fsdp_optim.fairscale import FullyShardedDataParallel as FSDP
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

STEPS = 3
UNITS = [  # of nested_net, as fairscale numbers them
    ["first.weight", "first.bias", "last.weight", "last.bias"],
    ["middle.0.weight", "middle.0.bias"],
    ["middle.2.weight"],
]
MIDDLE = UNITS[1]


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=0.01)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def asgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(params, lr=0.1)


Make = Callable[[Any], torch.optim.Optimizer]


# --------------------------------------------------------------------------------- theirs -> ours


def gather_by_fairscale(model: Any, optim: torch.optim.Optimizer, features: int) -> Any:
    """The result of fairscale's own method on GPUs, on all ranks.

    Tensor.cpu() copies there; on CPU tensors it does not, and all of fairscale's values would be one reused buffer. NCCL
    takes a 0-dim tensor for one of shape (1,), gloo does not. The method turns the live optimizer's steps into floats,
    which is undone here.
    """
    all_gather = dist.all_gather

    def gather_any_shape(parts: list[Tensor], part: Tensor, group: Any) -> None:
        all_gather(parts, part.view(parts[0].shape), group=group)

    with torch.no_grad():
        model(torch.zeros(1, features))  # it needs a forward before
    before = frozen_copy(optim)
    with (
        mock.patch.object(Tensor, "cpu", lambda tensor: tensor.clone()),
        mock.patch.object(dist, "all_gather", gather_any_shape),
    ):
        full = FairscaleFSDP.gather_full_optim_state_dict(model, optim)
    optim.load_state_dict(before)
    return told_by(0, full)


def fairscale_dict(plain: nn.Module, optim: torch.optim.Optimizer, world_size: int) -> dict[str, Any]:
    """The dict of a nested_net in fairscale's format, by hand.

    Ids count by unit, `step` is a number, other 0-dim tensors are lists (an entry per rank) and only the last parameter of
    a unit has them.
    """
    state = state_by_name(plain, optim)
    names = [name for unit in UNITS for name in unit]
    unit_of = {name: index for index, unit in enumerate(UNITS) for name in unit}

    def values(name: str) -> Iterator[tuple[str, Any]]:
        for key, value in state[name].items():
            if key == "step":
                yield key, value.item()
            elif value.dim() > 0:
                yield key, value
            elif name == UNITS[unit_of[name]][-1]:
                yield key, [value] * world_size

    group = {**optim.state_dict()["param_groups"][0], "params": list(range(len(names)))}
    return {
        "state": {i: dict(values(n)) for i, n in enumerate(names) if n in state},
        "param_groups": [group],
        "param_id_map": {i: unit_of[n] if n in state else None for i, n in enumerate(names)},
        "uncollected_local_ids": [],
    }


def with_steps(shard: Any, step: Callable[[Tensor], Any]) -> Any:
    """An optimizer's own dict with its `step` in another form."""
    shard = copy.deepcopy(shard)
    for values in shard["state"].values():
        if "step" in values:
            values["step"] = step(values["step"])
    return shard


@fairscale_on_cpu()
def reference_is_fairscales(make: Make, unused: list[str]) -> None:
    """The dict by hand, which the tests below use, is just what fairscale itself writes."""
    model, optim, sharded = nested_net(0, make)
    sharded.step(optim, range(STEPS), unused)
    plain, plain_optim = Net(), None
    fill(plain)
    plain_optim = make(plain.parameters())
    step_plain(plain, plain_optim, range(STEPS), unused)
    full = gather_by_fairscale(model, optim, features=5)
    check_same("fairscale's own dict", full, fairscale_dict(plain, plain_optim, dist.get_world_size()), in_order=False)
    # and it can be read where it was written
    check_same(
        "shard",
        fsdp_optim.get_shard_from_optim_state_dict(model, optim, full),
        with_steps(frozen_copy(optim), float),
        in_order=False,
    )


def older(full: Any, make_step: Callable[[float], Any]) -> Any:
    """fairscale's dict with `step` as other versions of torch and fairscale wrote it."""
    full = copy.deepcopy(full)
    last_of_unit = {local_id: key for key, local_id in full["param_id_map"].items()}
    for key, values in full["state"].items():
        step = make_step(values.pop("step"))
        if not isinstance(step, list) or key in last_of_unit.values():
            values["step"] = step
    return full


def zero_dim(step: float) -> list[Tensor]:
    return [torch.tensor(step) for _ in range(2)]


STEP_FORMS: list[tuple[str, Any, Any]] = [
    ("a float, as fairscale 0.4.13 with torch >= 1.12", float, float),
    ("an int, as before torch 1.12", int, int),
    ("a list of 0-dim tensors, one per rank that saved", zero_dim, torch.clone),
]


@fairscale_on_cpu()
def read_fairscales(make: Make, cls: type[nn.Module]) -> None:
    """Every way into this library, at a world size that the dict was not written at, for every form of `step`."""
    rank, make_plain = dist.get_rank(), plain_net(STEPS, make)
    reference = fairscale_dict(*make_plain, world_size=2)
    _, live, _ = nested_net(STEPS, make, cls)
    state = state_by_name(*make_plain)
    for form, make_step, wanted_step in STEP_FORMS:
        full = {**older(reference, make_step), "loss_scale": 128.0}
        untouched = copy.deepcopy(full)
        wanted = {**with_steps(frozen_copy(live), wanted_step), "loss_scale": 128.0}
        model, optim, sharded = nested_net(0, make, cls)
        shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)
        check_same(f"get_shard, {form}", shard, wanted, in_order=False)
        if cls is FSDP:
            check_same(
                f"the method without optimizer, {form}",
                model.get_shard_from_optim_state_dict(full),
                wanted,
                in_order=False,
            )
        given = full if rank == 1 else None
        check_same(
            f"scatter, {form}",
            fsdp_optim.scatter_full_optim_state_dict(model, optim, given, source_rank=1),
            wanted,
            in_order=False,
        )
        named = fsdp_optim.rekey_optim_state_dict(full, model, "name")
        by_names = {n: {**v, "step": wanted_step(v["step"])} for n, v in state.items()}
        check_same(f"rekey, {form}", named["state"], by_names, in_order=False)
        check_same(f"the input, {form}", full, untouched, in_order=False)
        optim.load_state_dict(shard)
        for param, saved in zip(optim.param_groups[0]["params"], live.param_groups[0]["params"], strict=True):
            param.data.copy_(saved)
        sharded.step(optim, [STEPS, STEPS + 1])
        full = fsdp_optim.gather_full_optim_state_dict(model, optim)
        check_gathered(full, 0, *plain_net(STEPS + 2, make))


def with_experts(expert: int, steps: int) -> Any:
    """A model with a unit on groups of one rank that is not collected, and its optimizer: those of one rank."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    sharded = Sharded(net, lambda name: f"rank{expert}.{name}" if name.startswith("1.") else name)
    net[1] = sharded.wrap(net[1], process_group=new_groups([0], [1]), no_broadcast_optim_state=True)
    model = sharded.wrap(net)
    optim = adam(model.parameters())
    sharded.step(optim, range(steps))
    return model, optim


@fairscale_on_cpu()
def read_fairscales_experts() -> None:
    """The state that fairscale itself gathers of units with no_broadcast_optim_state: rank 0's, which all ranks get."""
    rank = dist.get_rank()

    full = gather_by_fairscale(*with_experts(rank, STEPS), features=3)
    check_same("what fairscale calls uncollected", full["uncollected_local_ids"], [1], in_order=False)
    wanted = with_steps(frozen_copy(with_experts(0, STEPS)[1]), float)
    model, optim = with_experts(rank, 0)
    check_same("get_shard", fsdp_optim.get_shard_from_optim_state_dict(model, optim, full), wanted, in_order=False)
    given = full if rank == 0 else None
    check_same("scatter", fsdp_optim.scatter_full_optim_state_dict(model, optim, given), wanted, in_order=False)


# --------------------------------------------------------------------------------- ours -> theirs


def loose_steps(shard: Any) -> Any:
    """A shard whose 0-dim tensors are numbers, as fairscale's reader may give either."""
    shard = copy.deepcopy(shard)
    for values in shard["state"].values():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                values[key] = value.item()
    return shard


@fairscale_on_cpu()
def read_by_fairscale(full: Any, make: Make, unused: list[str], cls: type[nn.Module]) -> None:
    untouched = copy.deepcopy(full)
    model, live, sharded = nested_net(0, make, cls)
    sharded.step(live, range(STEPS), unused)
    wanted = frozen_copy(live)
    converted = fsdp_optim.fairscale.for_fairscale(full)
    shard = FairscaleFSDP.get_shard_from_optim_state_dict(model, converted)
    shard.pop("num_padded", None)
    shard.pop(
        "fqns"
    )  # carried along by fairscale, so that this library reads the converted dict right; torch ignores it
    for values in shard["state"].values():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == (1,) and name in ("step", "mu_product", "eta", "mu"):
                raise AssertionError(f"{name} has shape (1,): torch.optim then fails")
    check_same("fairscale's shard", loose_steps(shard), loose_steps(wanted), in_order=False)
    check_same("what for_fairscale was given", full, untouched, in_order=False)

    model, optim, sharded = nested_net(0, make, cls)
    optim.load_state_dict(shard)
    for param, saved in zip(optim.param_groups[0]["params"], live.param_groups[0]["params"], strict=True):
        param.data.copy_(saved)
    sharded.step(optim, [STEPS, STEPS + 1], unused)
    again = fsdp_optim.gather_full_optim_state_dict(model, optim)
    plain = Net()
    fill(plain)
    plain_optim = make(plain.parameters())
    step_plain(plain, plain_optim, range(STEPS + 2), unused)
    check_gathered(again, 0, plain, plain_optim)


@fairscale_on_cpu()
def gather(make: Make, unused: list[str]) -> Any:
    model, optim, sharded = nested_net(0, make)
    sharded.step(optim, range(STEPS), unused)
    return fsdp_optim.gather_full_optim_state_dict(model, optim)


@fairscale_on_cpu()
def experts_read_by_fairscale() -> None:
    """Units on groups of one, that are not collected: fairscale's reader gives the recipient's to every rank."""
    rank = dist.get_rank()

    model, optim = with_experts(rank, STEPS)
    full = told_by(0, fsdp_optim.gather_full_optim_state_dict(model, optim))
    shard = FairscaleFSDP.get_shard_from_optim_state_dict(model, fsdp_optim.fairscale.for_fairscale(full))
    shard.pop("fqns")
    check_same(
        "fairscale's shard", loose_steps(shard), loose_steps(frozen_copy(with_experts(0, STEPS)[1])), in_order=False
    )


# --------------------------------------------------------------------------------- ours <-> plain


def saved_and_loaded(value: Any) -> Any:
    """Through a file, read by the reader that runs no code from it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@fairscale_on_cpu()
def gather_two_groups() -> Any:
    net = Net()
    sharded = Sharded(net)
    front = [sharded.wrap(net.first), sharded.wrap(net.middle[0])]
    net.first, net.middle[0] = front
    model = sharded.wrap(net)
    early = [p for unit in front for p in unit.parameters()]
    late = [p for p in model.parameters() if all(p is not q for q in early)]
    groups = [{"params": late, "lr": 0.02, "weight_decay": 0.0}, {"params": early, "lr": 0.01, "custom": "b"}]
    optim = torch.optim.AdamW(groups, lr=1.0)
    sharded.step(optim, range(STEPS))
    return fsdp_optim.gather_full_optim_state_dict(model, optim)


@fairscale_on_cpu()
def read_plain(saved: Any) -> None:
    """A plain optimizer's own dict is a full dict: it has ids in the unwrapped model's order, and nothing else."""
    _, live, _ = nested_net()
    wanted = frozen_copy(live)
    model, optim, _ = nested_net(0)
    check_same("get_shard", fsdp_optim.get_shard_from_optim_state_dict(model, optim, saved), wanted, in_order=False)
    check_same("the method without optimizer", model.get_shard_from_optim_state_dict(saved), wanted, in_order=False)
    given = saved if dist.get_rank() == 0 else None
    check_same("scatter", fsdp_optim.scatter_full_optim_state_dict(model, optim, given), wanted, in_order=False)


def combinations() -> Iterator[tuple[str, Any, list[str]]]:
    for make in (adam, nadam, sgd):
        yield make.__name__, make, []
    yield "adam_unused", adam, MIDDLE
    yield "adam_unused_last", adam, UNITS[2]


class TestFairscalesDict(unittest.TestCase):
    """fairscale's own full dict, read here."""

    @parameterized.expand([(n, m, u) for n, m, u in combinations()])
    def test_the_reference_is_what_fairscale_writes_and_is_read(self, _: str, make: Make, unused: list[str]) -> None:
        run_on_ranks(reference_is_fairscales, 2, make, unused)

    @parameterized.expand([("adam", adam, FSDP), ("nadam", nadam, FairscaleFSDP)])
    def test_it_is_read_at_another_world_size_and_trains_on(self, _: str, make: Make, cls: Any) -> None:
        run_on_ranks(read_fairscales, 3, make, cls)

    def test_its_uncollected_experts_are_read(self) -> None:
        run_on_ranks(read_fairscales_experts, 2)


class TestForFairscale(unittest.TestCase):
    """Our full dict, read by fairscale."""

    @parameterized.expand([*combinations(), ("asgd", asgd, [])])
    def test_fairscale_reads_what_was_gathered_and_trains_on(self, _: str, make: Make, unused: list[str]) -> None:
        full = run_on_ranks(gather, 2, make, unused)[0]
        run_on_ranks(read_by_fairscale, 3, full, make, unused, FairscaleFSDP if make is adam else FSDP)

    def test_fairscale_reads_uncollected_experts(self) -> None:
        run_on_ranks(experts_read_by_fairscale, 2)

    def test_it_shares_tensors_but_no_dicts(self) -> None:
        full = run_on_ranks(gather, 2, adam, [])[0]
        untouched = copy.deepcopy(full)
        converted = fsdp_optim.fairscale.for_fairscale(full)
        assert converted["state"][0]["exp_avg"].data_ptr() == full["state"][0]["exp_avg"].data_ptr()
        for key in ("state", "param_id_map"):
            converted[key].clear()
        converted["param_groups"][0]["params"].clear()
        converted["param_groups"][0]["lr"] = 5
        check_same("the full dict", full, untouched, in_order=False)

    def test_a_dict_by_name_is_refused(self) -> None:
        full = run_on_ranks(gather, 2, adam, [])[0]
        named = fsdp_optim.rekey_optim_state_dict(full, Net(), "name")
        with self.assertRaisesRegex(fsdp_optim.StateError, "id"):
            fsdp_optim.fairscale.for_fairscale(named)


class TestPlainOptimizer(unittest.TestCase):
    @parameterized.expand([(make.__name__, make) for make in (adam, nadam, sgd, asgd)])
    def test_it_loads_what_was_gathered_and_trains_on(self, _: str, make: Make) -> None:
        full = saved_and_loaded(run_on_ranks(gather, 3, make, [])[0])
        trained, trained_optim = plain_net(STEPS, make)
        resumed = Net()
        resumed.load_state_dict(trained.state_dict())
        optim = make(resumed.parameters())
        optim.load_state_dict(full)
        check_same("loaded", optim.state_dict()["state"], trained_optim.state_dict()["state"], in_order=False)
        step_plain(trained, trained_optim, [STEPS, STEPS + 1])
        step_plain(resumed, optim, [STEPS, STEPS + 1])
        check_same("trained on", optim.state_dict()["state"], trained_optim.state_dict()["state"], in_order=False)
        check_same("the model trained on", resumed.state_dict(), trained.state_dict(), in_order=False)

    def test_groups_that_cross_the_models_order(self) -> None:
        full = run_on_ranks(gather_two_groups, 2)[0]
        plain = Net()
        fill(plain)
        params = dict(plain.named_parameters())
        early = [*MIDDLE, "first.weight", "first.bias"]
        optim = torch.optim.AdamW(
            [
                {"params": [p for n, p in params.items() if n not in early], "lr": 0.02, "weight_decay": 0.0},
                {"params": [p for n, p in params.items() if n in early], "lr": 0.01, "custom": "b"},
            ],
            lr=1.0,
        )
        step_plain(plain, optim, range(STEPS))
        names = [n for n in params if n not in early] + [n for n in params if n in early]
        check_full(full, optim, names)
        optim.load_state_dict(full)

    def test_its_own_dict_is_read(self) -> None:
        plain, optim = plain_net()
        assert len(names_in(plain)) == NUM_NET_PARAMS
        run_on_ranks(read_plain, 3, saved_and_loaded(optim.state_dict()))

    def test_the_numbers_differ_by_name(self) -> None:
        """So that a value under a wrong id is seen, also where shapes are the same."""
        assert not torch.equal(gradient("a", 0, (3,)), gradient("b", 0, (3,)))
        full = {**plain_net()[1].state_dict()}
        full["param_groups"] = [{**full["param_groups"][0], "param_names": names_in(Net())}]
        state = by_name(full)
        assert not torch.equal(state["middle.0.bias"]["exp_avg"], state["middle.2.weight"]["exp_avg"][0])
