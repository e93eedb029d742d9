"""Models on some of the ranks, several models at once, replicas, and calls without side effects."""

from __future__ import annotations

import time
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import Differs, check_refused, check_same, error_text
from kit.models import Net
from kit.optimizers import adam, sgd
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import check_full, check_trip, cpu, snapshot
from kit.wraps import WRAPPERS, in_ddp, in_fairscale, in_fsdp1, in_fsdp2, in_hsdp, mesh_2d
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class Other(nn.Module):
    """Another model, with a parameter that `Net` has too, of another shape."""

    units = ("block", "")

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(3, 4)
        self.head = nn.Linear(4, 3)


def on_group(kind: str, *memberships: list[int]) -> Callable[[nn.Module], Any]:
    """A wrapper over that group of ranks which this rank is in. All ranks of the world must call this."""
    own_ranks = next((ranks for ranks in memberships if dist.get_rank() in ranks), None)
    groups = [dist.new_group(ranks) for ranks in memberships]
    meshes = [DeviceMesh("cpu", ranks) for ranks in memberships]
    meshes_2d = [DeviceMesh("cpu", [[rank] for rank in ranks], mesh_dim_names=("r", "s")) for ranks in memberships]
    if own_ranks is None:
        return lambda model: model
    place = memberships.index(own_ranks)
    group, mesh, mesh_of_replicas = groups[place], meshes[place], meshes_2d[place]
    wraps: dict[str, Callable[[Any], Any]] = {
        "FSDP1 flat": lambda model: in_fsdp1(model, process_group=group),
        "FSDP1 orig": lambda model: in_fsdp1(model, process_group=group, use_orig_params=True),
        "FSDP1 NO_SHARD": lambda model: in_fsdp1(
            model, process_group=group, sharding_strategy=ShardingStrategy.NO_SHARD
        ),
        "FSDP2": lambda model: in_fsdp2(model, mesh),
        "HSDP": lambda model: in_fsdp2(model, mesh_of_replicas),
        "TP": lambda model: parallelize_module(model, mesh, dict(model.tensor_parallel)),
        "DDP": lambda model: in_ddp(model, process_group=group),
        # without a group for its reduce-scatter, fairscale makes one of all ranks of the world, with all of them
        "fairscale flat": lambda model: in_fairscale(model, process_group=group, process_group_reduce_scatter=group),
        "fairscale non-flat": lambda model: in_fairscale(
            model, process_group=group, process_group_reduce_scatter=group, flatten_parameters=False
        ),
    }
    return wraps[kind]


KINDS = (
    "FSDP1 flat",
    "FSDP1 orig",
    "FSDP1 NO_SHARD",
    "FSDP2",
    "HSDP",
    "TP",
    "DDP",
    "fairscale flat",
    "fairscale non-flat",
)


def on_last_two_ranks(kind: str) -> None:
    """Ranks 0 and 1 have no part in the model, make no call, and wait for nothing."""
    with cpu():
        wrap = on_group(kind, [2, 3])
        if dist.get_rank() >= 2:
            check_trip(wrap, ranks=(2, 3))


def on_one_rank(kind: str) -> None:
    with cpu():
        wrap = on_group(kind, [1])
        if dist.get_rank() == 1:
            check_trip(wrap, ranks=(1,))


def two_models(kinds: tuple[str, str]) -> None:
    """Two independent trainings, on ranks 0, 2 and 1, 3."""
    with cpu():
        wraps = [on_group(kind, [0, 2], [1, 3]) for kind in kinds]
        half = dist.get_rank() % 2
        model, make = ((Net, adam), (Other, sgd))[half]
        for _ in range(3):
            check_trip(wraps[half], make, model, ranks=(half, half + 2))


def one_of_two_is_late(kind: str) -> list[float]:
    """Seconds that this rank's call took. The ranks 0, 1 come two seconds late to their own model."""
    with cpu():
        wrap = on_group(kind, [0, 1], [2, 3])
        trained = Trained(wrap)
        dist.barrier()
        if dist.get_rank() < 2:
            time.sleep(2.0)
        start = time.monotonic()
        full = trained.gather(None)
        spent = time.monotonic() - start
        check_full("gathered", full, Oracle().full())
        return [spent]


def every_recipient(kind: str) -> None:
    """Replicas of shards: every recipient gets the whole state, whatever its replica."""
    with cpu():
        trained = Trained(REPLICATED[kind])
        wanted = Oracle().full()
        for recipient in range(dist.get_world_size()):
            full = trained.gather(recipient)
            if dist.get_rank() == recipient:
                check_full(f"on rank {recipient}", full, wanted)
            elif full is not None:
                raise Differs(f"rank {dist.get_rank()} got something, but recipient_rank was {recipient}")
        for source in range(dist.get_world_size()):
            target = Trained(REPLICATED[kind], steps=0)
            fsdp_optim.load_optim_state_dict(target.optim, target.scatter(wanted, source))
            check_full(f"scattered from rank {source}", target.gather(None), wanted)


REPLICATED: dict[str, Callable[[nn.Module], Any]] = {
    "HSDP 2 x 2": lambda model: in_hsdp(model, (2, 2)),
    "HSDP 4 x 1": lambda model: in_hsdp(model, (4, 1)),
    "FSDP1 HYBRID_SHARD": lambda model: in_fsdp1(
        model, device_mesh=mesh_2d((2, 2)), sharding_strategy=ShardingStrategy.HYBRID_SHARD
    ),
    "FSDP1 HYBRID_SHARD, orig": lambda model: in_fsdp1(
        model,
        device_mesh=mesh_2d((2, 2)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
    ),
    "DDP": in_ddp,
}


class GroupsTest(unittest.TestCase):
    @expand(*some(KINDS, every=3))
    def test_model_on_the_last_two_of_four_ranks(self, kind: str) -> None:
        run_on_ranks(on_last_two_ranks, 4, kind, timeout=60.0)

    @parameterized.expand(("FSDP1 flat", "FSDP1 orig", "FSDP2", "DDP", "fairscale flat"))
    def test_model_on_one_rank_that_is_not_the_first(self, kind: str) -> None:
        run_on_ranks(on_one_rank, 3, kind, timeout=60.0)

    @expand(
        *some(
            [
                (("FSDP2", "FSDP2"),),
                (("FSDP1 flat", "FSDP2"),),
                (("FSDP1 orig", "FSDP1 flat"),),
                (("HSDP", "fairscale flat"),),
                (("DDP", "FSDP1 orig"),),
            ],
            every=2,
        )
    )
    def test_two_models_on_disjoint_groups_at_once(self, kinds: tuple[str, str]) -> None:
        run_on_ranks(two_models, 4, kinds, timeout=60.0)

    @parameterized.expand(("FSDP1 orig", "FSDP2"))
    def test_a_model_does_not_wait_for_another_ones_ranks(self, kind: str) -> None:
        spent = run_on_ranks(one_of_two_is_late, 4, kind, timeout=60.0)
        self.assertLess(max(spent[2][0], spent[3][0]), 1.5)

    @expand(*some(REPLICATED, every=2))
    def test_recipient_and_source_in_every_replica(self, kind: str) -> None:
        run_on_ranks(every_recipient, 4, kind)


# ------------------------------------------------------------------------------------------- side effects


def before_the_first_step(wrapper: str) -> None:
    """An optimizer that has not stepped has no state, neither before nor after, and its gradients stay."""
    with cpu():
        trained = Trained(wrapper, steps=0)
        trained.step([0])
        trained.optim = adam(trained.model.parameters())  # gradients are there, state is not
        before = snapshot(trained)
        full = trained.gather(None)
        named = trained.gather(None, "name")
        shard = trained.shard(full)
        scattered = trained.scatter(full)
        check_same("after four calls", snapshot(trained), before)
        if full["state"] or named["state"] or shard["state"] or scattered["state"]:
            raise Differs(f"state out of nothing: {list(full['state'])}, {list(shard['state'])}")
        fsdp_optim.load_optim_state_dict(trained.optim, shard)
        if any(trained.optim.state.values()):
            raise Differs("loading nothing made state")
        trained.forget_gradients()
        trained.step(range(STEPS))
        again = trained.gather(None)
        check_full("trained afterwards", again, Oracle().full())


def after_a_refused_call(wrapper: str) -> list[tuple[str, str]]:
    """A call that raises an error changes nothing."""
    with cpu():
        trained = Trained(wrapper)
        full = trained.gather(None)
        broken = {**full, "state": {**full["state"], 3: {**full["state"][3], "exp_avg": torch.zeros(2, 2)}}}
        before = snapshot(trained)
        errors = [
            error_text(lambda: trained.shard(broken)),
            error_text(lambda: trained.scatter(broken)),
            error_text(lambda: trained.gather(17)),
        ]
        check_same("after refused calls", snapshot(trained), before)
        check_full("gathered again", trained.gather(None), Oracle().full())
        return errors


def different_calls(wrapper: str) -> tuple[str, str]:
    """Ranks with different arguments all raise an error at once."""
    with cpu():
        trained = Trained(wrapper)
        return error_text(lambda: trained.gather(dist.get_rank()))


def one_rank_fails(wrapper: str) -> tuple[str, str]:
    """The optimizer of one rank cannot be read."""
    with cpu():
        trained = Trained(wrapper)
        if dist.get_rank() == 1:
            trained.optim.state_dict = _broken
        return error_text(lambda: trained.gather(0))


def _broken() -> Any:
    raise ValueError("this rank's optimizer is broken on purpose")


class SideEffectsTest(unittest.TestCase):
    @expand(*some(WRAPPERS, every=4))
    def test_an_optimizer_that_has_not_stepped_stays_so(self, wrapper: str) -> None:
        run_on_ranks(before_the_first_step, 2, wrapper)

    @expand(*some(WRAPPERS, every=4))
    def test_a_refused_call_changes_nothing(self, wrapper: str) -> None:
        by_rank = run_on_ranks(after_a_refused_call, 2, wrapper)
        check_refused("shard", [errors[0] for errors in by_rank], "StateError", "stem.bias", "exp_avg", "7")
        check_refused("scatter", [errors[1] for errors in by_rank], "StateError", "stem.bias", "exp_avg", "7")
        check_refused("gather to nobody", [errors[2] for errors in by_rank], "RankError", "17")

    @expand(*some(WRAPPERS, every=4, first=1))
    def test_ranks_that_make_different_calls_hear_of_it(self, wrapper: str) -> None:
        check_refused("different recipients", run_on_ranks(different_calls, 2, wrapper), "RankError", "recipient_rank")

    @expand(*some(WRAPPERS, every=4))
    def test_one_rank_that_fails_fails_all_with_its_reason(self, wrapper: str) -> None:
        errors = run_on_ranks(one_rank_fails, 3, wrapper)
        check_refused("a broken optimizer", errors, "RankError", "rank 1", "broken on purpose")


def late_rank() -> tuple[str, str]:
    """Rank 1 comes too late."""
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1]))
    optim = adam(model.parameters())
    if dist.get_rank() == 1:
        time.sleep(3.0)
        return "", ""
    return error_text(
        lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, options=fsdp_optim.CallOptions(timeout=1.0))
    )


class TimeoutTest(unittest.TestCase):
    def test_a_rank_that_does_not_come_is_named(self) -> None:
        name, text = run_on_ranks(late_rank, 2)[0]
        self.assertEqual(name, "RankTimeoutError", text)
        self.assertIn("rank 1", text)
        self.assertIn("within 1 s", text)


def unwrapped_without_ranks() -> None:
    """A plain model needs no process group at all."""
    oracle = Oracle()
    full = fsdp_optim.gather_full_optim_state_dict(oracle.model, oracle.optim)
    check_full("plain", full, oracle.full())
    other = Oracle(steps=0)
    shard = fsdp_optim.get_shard_from_optim_state_dict(other.model, other.optim, full)
    fsdp_optim.load_optim_state_dict(other.optim, shard)
    check_same("loaded", other.by_name(), oracle.by_name())
    scattered = fsdp_optim.scatter_full_optim_state_dict(other.model, other.optim, full)
    check_same("scattered", scattered, shard)


class PlainTest(unittest.TestCase):
    def test_without_torch_distributed(self) -> None:
        if dist.is_initialized():
            raise Differs("this process has a process group")
        unwrapped_without_ranks()
