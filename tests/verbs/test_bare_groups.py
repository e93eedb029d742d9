"""A full dict whose groups have no hyperparameters, such as other libraries write, does not take those of the live optimizer."""

from __future__ import annotations

import unittest

import torch
from kit.compare import check_same
from torch import nn

import fsdp_optim
from fsdp_optim import StateError


class TestBareGroups(unittest.TestCase):
    def test_they_are_refused_and_live_groups_are_the_way_out(self) -> None:
        model = nn.Linear(3, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.75)
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")
        bare = {"state": full["state"], "param_groups": [{"params": ["weight", "bias"]}]}
        wanted = (
            "param group 0, of weight: the saved state has no hyperparameters, .* has .*lr.*: give param_groups='live'"
        )
        for strict in (True, False):
            with self.assertRaisesRegex(StateError, wanted):
                fsdp_optim.get_shard_from_optim_state_dict(model, optim, bare, strict=strict)
        shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, bare, param_groups="live")
        fsdp_optim.load_optim_state_dict(optim, shard)
        check_same("lr", optim.param_groups[0]["lr"], 0.5)
        check_same("momentum", optim.state[model.bias], full["state"]["bias"])


if __name__ == "__main__":
    unittest.main()
