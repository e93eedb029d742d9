"""Replicas that no wrapper keeps equal, or that only groups of ranks keep equal: differences are never taken for one state."""

from __future__ import annotations

import unittest
from collections.abc import Callable

import torch
import torch.distributed as dist
from kit.compare import check_refused, error_text
from kit.local_parts import local_of
from kit.trained import Trained
from kit.wrapping import cpu
from kit.wraps import in_ddp, in_fsdp1, mesh_2d
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from fsdp_optim import gather_full_optim_state_dict
from fsdp_optim.testing import run_on_ranks


def in_hybrid_of_one(*, orig: bool) -> Callable[[nn.Module], nn.Module]:
    """HYBRID_SHARD over one rank, which torch turns into NO_SHARD without a sum of the gradients over the replicas."""
    return lambda model: in_fsdp1(
        model,
        device_mesh=mesh_2d((dist.get_world_size(), 1)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=orig,
    )


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "HYBRID_SHARD over one rank, flat": in_hybrid_of_one(orig=False),
    "HYBRID_SHARD over one rank, orig": in_hybrid_of_one(orig=True),
}


def hybrid_apart(kind: str) -> tuple[str, str]:
    """Gather after each rank has moments of its own."""
    with cpu():
        trained = Trained(WRAPS[kind])
        for values in trained.optim.state.values():
            local_of(values["exp_avg"]).add_(dist.get_rank())
        return error_text(lambda: trained.gather(None))


def pairs_apart() -> tuple[str, str]:
    """Gather a model with two parts: DDP keeps one equal on ranks 0, 1 and on ranks 2, 3; all four ranks shard the other."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2
    model = nn.ModuleDict({"sharded": nn.Linear(4, 4), "paired": in_ddp(nn.Linear(3, 2), process_group=pairs[pair])})
    fully_shard(model["sharded"], mesh=init_device_mesh("cpu", (4,)))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    for param in model["paired"].parameters():
        optim.state[param]["momentum_buffer"].add_(pair)
    return error_text(lambda: gather_full_optim_state_dict(model, optim, None))


def notes_apart() -> tuple[str, str]:
    """Gather a value of another kind than DDP keeps equal: each rank has a list of its own."""
    with cpu():
        trained = Trained("DDP")
        next(iter(trained.optim.state.values()))["notes"] = [dist.get_rank()]
        return error_text(lambda: trained.gather(None))


def beside_ddp(inside_first: bool) -> tuple[str, str]:
    """Gather a model with two layers of one shape: DDP keeps one equal, nothing the other, which each rank has for itself."""
    layers = {"inside": in_ddp(nn.Linear(3, 2)), "outside": nn.Linear(3, 2)}
    model = nn.ModuleDict(dict(sorted(layers.items(), reverse=not inside_first)))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    optim.state[layers["outside"].weight]["momentum_buffer"].add_(dist.get_rank())
    return error_text(lambda: gather_full_optim_state_dict(model, optim, None))


class ApartTest(unittest.TestCase):
    @parameterized.expand([(True,), (False,)])
    def test_a_layer_outside_ddp_is_not_taken_for_one_inside(self, inside_first: bool) -> None:
        errors = run_on_ranks(beside_ddp, 2, inside_first)
        check_refused("beside", errors, "StateError", "outside.weight", "on_replica_mismatch")

    @parameterized.expand([(kind,) for kind in WRAPS])
    def test_torch_does_not_keep_them_equal(self, kind: str) -> None:
        check_refused(kind, run_on_ranks(hybrid_apart, 2, kind), "StateError", "exp_avg", "on_replica_mismatch")

    def test_values_that_ddp_does_not_keep_equal(self) -> None:
        check_refused("notes", run_on_ranks(notes_apart, 2), "StateError", "notes", "on_replica_mismatch")

    def test_ddp_keeps_pairs_of_ranks_equal(self) -> None:
        check_refused("pairs", run_on_ranks(pairs_apart, 4), "StateError", "paired.weight")


if __name__ == "__main__":
    unittest.main()
