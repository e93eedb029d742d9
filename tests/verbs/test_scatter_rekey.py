"""scatter in buckets of any size, and rekey there and back."""

from __future__ import annotations

import itertools
import unittest
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.groups import (
    Net,
    check_gathered,
    frozen_copy,
    names_in,
    nested_net,
    plain_net,
    step_plain,
)
from kit.trained import state_by_name
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

BUCKETS = (1, 16, 17, 64, 100, 1000, 1 << 26)  # bytes: less than an element, less than a parameter, more than all
STEPS = 3

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
    for what, module in (("wrapped", model), ("not wrapped", plain)):
        check_same(
            f"id -> name, model {what}", fsdp_optim.rekey_optim_state_dict(by_id, module, "name"), named, in_order=False
        )
        check_same(
            f"name -> id, model {what}", fsdp_optim.rekey_optim_state_dict(named, module, "id"), by_id, in_order=False
        )
        check_same(
            f"id -> id, model {what}", fsdp_optim.rekey_optim_state_dict(by_id, module, "id"), by_id, in_order=False
        )
        check_same(
            f"name -> name, model {what}",
            fsdp_optim.rekey_optim_state_dict(named, module, "name"),
            named,
            in_order=False,
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
