"""Every limit in docs/wrappers.md ends in an error with a way out."""

from __future__ import annotations

import unittest
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import Differs, check_same, error_text
from kit.options import as_options
from kit.trained import Trained
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


def plain_beside_sharded() -> tuple[str, str]:
    """One rank gives a plain dict, the others sharded ones."""
    trained = Trained("FSDP2", model=lambda: nn.Linear(4, 2))
    full = trained.gather(None, "name")
    sharded = get_optimizer_state_dict(trained.model, trained.optim)
    return error_text(lambda: trained.shard(full if dist.get_rank() else sharded, timeout=1.5))


def all_stages() -> tuple[str, str]:
    """A dict of all pipeline stages, on a rank that has one."""
    rank = dist.get_rank()
    stage = nn.Sequential()
    stage.add_module(str(rank), nn.Linear(3, 2))
    optim = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    for param in stage.parameters():
        param.grad = torch.full_like(param, rank + 1.0)
    optim.step()
    group = {"process_group": dist.group.WORLD}
    full = fsdp_optim.gather_full_optim_state_dict(
        stage, optim, None, key_by="name", **as_options(fsdp_optim.CallOptions, **group)
    )
    told = error_text(lambda: fsdp_optim.get_shard_from_optim_state_dict(stage, optim, full))
    shard: Any = fsdp_optim.scatter_full_optim_state_dict(
        stage, optim, full if rank == 0 else None, **as_options(fsdp_optim.CallOptions, **group)
    )
    check_same("scattered", shard["state"], optim.state_dict()["state"])
    return told


class LimitsTest(unittest.TestCase):
    def test_a_rank_with_a_plain_dict_is_named(self) -> None:
        first, last = run_on_ranks(plain_beside_sharded, 2)
        self.assertEqual(last, ("", ""))
        self.assertEqual(first[0], "RankTimeoutError")
        self.assertIn("rank 1 did not arrive", first[1])

    def test_a_dict_of_all_stages_goes_through_scatter(self) -> None:
        for rank, (kind, text) in enumerate(run_on_ranks(all_stages, 2)):
            self.assertEqual(kind, "StateError")
            self.assertIn(f"{1 - rank}.weight", text)

    def test_an_order_of_its_own_cannot_be_told_without_the_optimizer(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        optim = torch.optim.SGD(reversed(list(model.parameters())), lr=0.1, momentum=0.9)
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, number + 1.0)
        optim.step()
        by_name = fsdp_optim.rekey_optim_state_dict(optim.state_dict(), model, "name", optim=optim)
        check_same("with optim=", by_name["state"]["0.weight"], dict(optim.state[model[0].weight]))
        without = fsdp_optim.rekey_optim_state_dict(optim.state_dict(), model, "name")
        if torch.equal(
            without["state"]["0.weight"]["momentum_buffer"], by_name["state"]["0.weight"]["momentum_buffer"]
        ):
            raise Differs("the order can be told: say so in docs/wrappers.md")
