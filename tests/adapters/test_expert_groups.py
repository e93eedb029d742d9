"""Units on other process groups than the root's: experts, each rank's own."""

from __future__ import annotations

import logging
import unittest
from collections.abc import Sequence

import torch.distributed as dist
from kit.compare import check_same
from kit.groups import (
    STEPS,
    Distribution,
    Experts,
    Sharded,
    adam,
    check_alike,
    check_gathered,
    error_of,
    frozen_copy,
    name_of_experts,
    names_in,
    new_groups,
    plain_experts,
    rename_experts,
    told_by,
    with_experts,
)
from kit.trained import state_by_name
from kit.wrapping import by_name
from parameterized import parameterized
from torch import nn

import fsdp_optim
import fsdp_optim.fairscale
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks


@fairscale_on_cpu()
def gather_all_experts(no_broadcast: bool) -> None:
    distribution = [[0], [1], [2]]
    plain, plain_optim = plain_experts(3)
    model, optim, _ = with_experts(distribution[dist.get_rank()], no_broadcast=no_broadcast)
    name_of = name_of_experts(distribution)
    for recipient in (0, 1, 2, None):
        full = fsdp_optim.fairscale.gather_full_optim_state_dict(
            model, optim, recipient, collect="all", options=fsdp_optim.CallOptions(name_of=name_of)
        )
        check_gathered(full, recipient, plain, plain_optim)
        if full is not None and full["uncollected_local_ids"]:
            raise AssertionError(f"all are collected, but listed as uncollected: {full['uncollected_local_ids']}")
    full = fsdp_optim.fairscale.gather_full_optim_state_dict(
        model, optim, None, "name", collect="all", options=fsdp_optim.CallOptions(name_of=name_of)
    )
    check_same("state by name", full["state"], state_by_name(plain, plain_optim), in_order=False)
    listed = dict(
        fsdp_optim.fairscale.iter_full_optim_state(
            model, optim, None, collect="all", options=fsdp_optim.CallOptions(name_of=name_of)
        )
    )
    check_same("iterated", listed, state_by_name(plain, plain_optim), in_order=False)


@fairscale_on_cpu()
def gather_experts_from_anywhere(distribution: Distribution) -> None:
    """The ids are those of the unwrapped model, whichever rank has which expert."""
    plain, plain_optim = plain_experts(3)
    model, optim, _ = with_experts(distribution[dist.get_rank()])
    name_of = name_of_experts(distribution)
    full = fsdp_optim.fairscale.gather_full_optim_state_dict(
        model, optim, None, collect="all", options=fsdp_optim.CallOptions(name_of=name_of)
    )
    check_same("state by name", by_name(full), state_by_name(plain, plain_optim), in_order=False)
    check_gathered(full, None, plain, plain_optim)


@fairscale_on_cpu()
def resume_experts(distribution: Distribution, verb: str) -> None:
    """Every rank gets its own experts' state from a dict with all experts, as its own optimizer would have it."""
    rank = dist.get_rank()
    plain, plain_optim = plain_experts(4)
    full = {**plain_optim.state_dict(), "param_id_map": {}, "num_padded": [], "uncollected_local_ids": []}
    full["param_groups"] = [{**full["param_groups"][0], "param_names": names_in(plain)}]
    trained = frozen_copy(with_experts(distribution[rank])[1])
    model, optim, sharded = with_experts(distribution[rank], steps=0)
    name_of = name_of_experts(distribution)
    if verb == "shard":
        shard = fsdp_optim.get_shard_from_optim_state_dict(
            model, optim, full, options=fsdp_optim.CallOptions(name_of=name_of)
        )
    elif verb == "by name":
        named = {**full, "state": state_by_name(plain, plain_optim)}
        named["param_groups"] = [{**full["param_groups"][0], "params": names_in(plain)}]
        shard = fsdp_optim.get_shard_from_optim_state_dict(
            model, optim, named, options=fsdp_optim.CallOptions(name_of=name_of)
        )
    elif verb == "method":
        shard = model.get_shard_from_optim_state_dict(full, optim, name_of=name_of)
    else:
        source = len(distribution) - 1
        given = full if rank == source else None
        shard = fsdp_optim.scatter_full_optim_state_dict(
            model, optim, given, source, options=fsdp_optim.CallOptions(name_of=name_of)
        )
    check_same(f"{verb} on rank {rank}", shard, trained, in_order=False)
    fsdp_optim.load_optim_state_dict(optim, shard)
    sharded.step(optim, [STEPS])


@fairscale_on_cpu()
def same_experts_gathered_and_given_back() -> None:
    """A round trip with the gathered dict."""
    rank = dist.get_rank()
    saved, loaded = [[0], [1], [2]], [[2], [0], [1]]
    model, optim, _ = with_experts(saved[rank])
    full = fsdp_optim.fairscale.gather_full_optim_state_dict(
        model, optim, None, collect="all", options=fsdp_optim.CallOptions(name_of=name_of_experts(saved))
    )
    wanted = frozen_copy(with_experts(loaded[rank])[1])
    model, optim, _ = with_experts(loaded[rank], steps=0)
    name_of = name_of_experts(loaded)
    check_same(
        "shard",
        fsdp_optim.get_shard_from_optim_state_dict(model, optim, full, options=fsdp_optim.CallOptions(name_of=name_of)),
        wanted,
        in_order=False,
    )


@fairscale_on_cpu()
def gather_own_experts_only() -> None:
    """fairscale's meaning of no_broadcast_optim_state: no `collect`, no `name_of`."""
    rank = dist.get_rank()
    model, optim, _ = with_experts([rank])
    local_ids = {id(param): local_id for local_id, param in enumerate(optim.param_groups[0]["params"])}
    (expert_id,) = (local_ids[id(param)] for param in model.module.experts.parameters())
    plain, plain_optim = plain_experts(3)
    wanted = {
        name.replace(f"experts.{rank}.", "experts.0."): values
        for name, values in state_by_name(plain, plain_optim).items()
        if not name.startswith("experts.") or name.startswith(f"experts.{rank}.")
    }
    for recipient in (0, 1, 2, None):
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient)
        if recipient not in (rank, None):
            check_same("of another rank than the recipient", full, None, in_order=False)
            continue
        check_same(f"state on rank {rank}: its own expert, no other's", by_name(full), wanted, in_order=False)
        check_same("uncollected_local_ids", full["uncollected_local_ids"], [expert_id], in_order=False)
        names = full["param_groups"][0]["param_names"]
        uncollected = {names[key] for key, local_id in full["param_id_map"].items() if local_id == expert_id}
        check_same(
            "originals of the uncollected", sorted(uncollected), ["experts.0.bias", "experts.0.weight"], in_order=False
        )


@fairscale_on_cpu()
def gather_notes_of_own_experts() -> None:
    """A list in the state of each rank's expert, which has the same name on all ranks: each rank gets its own."""
    rank = dist.get_rank()
    model, optim, _ = with_experts([rank])
    for param in model.module.experts.parameters():
        optim.state[param]["notes"] = [rank]
    for recipient in (0, 1, None):
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient, key_by="name")
        if full is not None:
            (notes,) = (values["notes"] for values in full["state"].values() if "notes" in values)
            check_same(f"notes on rank {rank}", dict(notes.by_shard), {0: [rank]})


class Warnings(logging.Handler):
    """The library's warnings on this rank."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("fsdp_optim").addHandler(self)
        return self.lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger("fsdp_optim").removeHandler(self)


@fairscale_on_cpu()
def load_uncollected(verb: str) -> None:
    """The recipient's expert goes to every rank, as fairscale gives it, and a warning is logged."""
    rank = dist.get_rank()
    for source in (0, 1):
        model, optim, _ = with_experts([rank])
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, source)
        wanted = frozen_copy(with_experts([source])[1])  # this rank's trunk and head, the source's expert
        model, optim, _ = with_experts([rank], steps=0)
        full = told_by(source, full)
        with Warnings() as warnings:
            if verb == "shard":
                shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)
            else:
                given = full if rank == source else None
                shard = fsdp_optim.scatter_full_optim_state_dict(model, optim, given, source)
        check_same(f"{verb} on rank {rank} of what rank {source} gathered", shard, wanted, in_order=False)
        if not any("experts.0.weight" in line and "no_broadcast_optim_state" in line for line in warnings):
            raise AssertionError(f"no warning on rank {rank}: {warnings}")


@fairscale_on_cpu()
def gather_colliding() -> list[tuple[str, str, float]]:
    """Ranks whose experts have one name: the errors for the same shapes, and for different ones, twice each."""
    rank = dist.get_rank()
    alone = new_groups(*([r] for r in range(dist.get_world_size())))
    errors = []
    for shapes_differ in (False, True):
        for collect in ("wrapper", "all"):
            net = Experts([0])
            net.experts["0"] = nn.Linear(6, 3) if shapes_differ and rank == 1 else net.experts["0"]
            sharded = Sharded(net, rename_experts([rank]))
            flags = {"no_broadcast_optim_state": collect == "all"}
            net.experts["0"] = sharded.wrap(net.experts["0"], process_group=alone, **flags)
            model = sharded.wrap(net)
            optim = adam(model.parameters())
            sharded.step(optim, range(STEPS))
            call = lambda: fsdp_optim.fairscale.gather_full_optim_state_dict(model, optim, collect=collect)  # noqa: B023, E731
            errors.append(error_of(call))
    return errors


@fairscale_on_cpu()
def gather_keyed_by_rank(key_of_rank: Sequence[int]) -> None:
    """Ranks whose experts already have unique names."""
    rank = dist.get_rank()
    plain, plain_optim = plain_experts(len(key_of_rank))
    for no_broadcast in (True, False):
        key = key_of_rank[rank]
        model, optim, _ = with_experts([key], no_broadcast=no_broadcast, keys=[key])
        full = fsdp_optim.fairscale.gather_full_optim_state_dict(
            model, optim, collect="all" if no_broadcast else "wrapper"
        )
        if full is not None:
            check_same("state by name", by_name(full), state_by_name(plain, plain_optim), in_order=False)
        check_gathered(full, 0, plain, plain_optim)
    key = key_of_rank[rank]
    model, optim, _ = with_experts([key], keys=[key])
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
    wanted = {
        name: values
        for name, values in state_by_name(plain, plain_optim).items()
        if not name.startswith("experts.") or name.startswith(f"experts.{key}.")
    }
    check_same("not collected, with names of their own: only this rank's", by_name(full), wanted, in_order=False)


class TestExperts(unittest.TestCase):
    """Units on groups of one rank."""

    @parameterized.expand([(True,), (False,)])
    def test_every_expert_is_gathered_under_its_own_name(self, no_broadcast: bool) -> None:
        run_on_ranks(gather_all_experts, 3, no_broadcast)

    @parameterized.expand([([[2], [0], [1]],), ([[1], [2], [0]],), ([[0, 1], [2]],), ([[2], [0, 1]],)])
    def test_ids_do_not_depend_on_which_rank_has_which_experts(self, distribution: Distribution) -> None:
        run_on_ranks(gather_experts_from_anywhere, len(distribution), distribution)

    @parameterized.expand(
        [
            ("shard", [[0], [1], [2], [3]]),
            ("shard", [[2], [3], [0], [1]]),
            ("shard", [[3, 1], [], [0, 2]]),  # fewer ranks, and one has none
            ("method", [[1, 0], [3, 2]]),
            ("by name", [[1, 0], [3, 2]]),
            ("scatter", [[2], [3], [0], [1]]),
            ("scatter", [[3, 1], [], [0, 2]]),
        ]
    )
    def test_each_rank_gets_its_own_experts_back(self, verb: str, distribution: Distribution) -> None:
        run_on_ranks(resume_experts, len(distribution), distribution, verb)

    def test_what_was_gathered_is_given_back(self) -> None:
        run_on_ranks(same_experts_gathered_and_given_back, 3)

    def test_no_broadcast_optim_state_means_what_it_means_to_fairscale(self) -> None:
        run_on_ranks(gather_own_experts_only, 3)

    def test_values_of_an_uncollected_expert_are_those_of_the_recipient(self) -> None:
        run_on_ranks(gather_notes_of_own_experts, 3)

    @parameterized.expand([("shard",), ("scatter",)])
    def test_an_uncollected_expert_is_given_to_every_rank_with_a_warning(self, verb: str) -> None:
        run_on_ranks(load_uncollected, 2, verb)

    def test_different_experts_of_one_name_are_an_error_that_names_name_of(self) -> None:
        for index, errors in enumerate(zip(*run_on_ranks(gather_colliding, 2), strict=True)):
            numbers_told = ("rank 0", "rank 1") if index < 2 else ("[3, 5]", "[3, 6]")
            check_alike(errors, "StateError", "experts.0.", "name_of", *numbers_told)

    @parameterized.expand([([0, 1, 2],), ([2, 0, 1],)])
    def test_experts_with_names_of_their_own_need_no_name_of(self, key_of_rank: Sequence[int]) -> None:
        run_on_ranks(gather_keyed_by_rank, 3, key_of_rank)
