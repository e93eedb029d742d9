"""A name that another parameter of the model has exactly is no name of a wrapped one: moments never land on a namesake."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import torch
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import LoadOptions, StateError

CHILDREN = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
Load = Callable[[nn.Module, Any, nn.Module, Any, bool], None]


class Around(nn.Module):
    """A module around another one, with a parameter of its own of the same name and shape."""

    def __init__(self, child: str) -> None:
        super().__init__()
        self.add_module(child, nn.Linear(3, 3, bias=False))
        self.weight = nn.Parameter(torch.ones(3, 3))


def adam(*params: nn.Parameter) -> torch.optim.Optimizer:
    optim = torch.optim.Adam(params)
    for number, param in enumerate(params):
        param.grad = torch.full_like(param, number + 1.0)
    optim.step()
    return optim


def from_folder(model: nn.Module, optim: Any, other: nn.Module, live: Any, strict: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fsdp_optim.save(f"{folder}/a", model, optim)
        fsdp_optim.load(f"{folder}/a", other, live, strict=strict, options=LoadOptions(param_groups="live"))


def by_shard(model: nn.Module, optim: Any, other: nn.Module, live: Any, strict: bool) -> None:
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, key_by="name")
    shard = fsdp_optim.get_shard_from_optim_state_dict(other, live, full, strict=strict)
    fsdp_optim.load_optim_state_dict(live, shard)


WAYS: Mapping[str, Load] = {"folder": from_folder, "shard": by_shard}


class NamesOfOthersTest(unittest.TestCase):
    @parameterized.expand([(child, way) for child in CHILDREN for way in WAYS])
    def test_the_child_was_trained_and_the_other_is(self, child: str, way: str) -> None:
        model, other = Around(child), Around(child)
        optim, live = adam(model.get_parameter(f"{child}.weight")), torch.optim.Adam([other.weight])
        with self.assertRaisesRegex(StateError, rf"{child}\.weight: the full dict has it"):
            WAYS[way](model, optim, other, live, True)
        self.assertEqual(dict(live.state), {})

    @parameterized.expand([(child,) for child in CHILDREN])
    def test_both_were_trained_and_one_is(self, child: str) -> None:
        """Not strictly: each gets its own, and that of the other is left out."""
        model, other = Around(child), Around(child)
        optim = adam(model.get_parameter(f"{child}.weight"), model.weight)
        for name in (f"{child}.weight", "weight"):
            live = torch.optim.Adam([other.get_parameter(name)])
            from_folder(model, optim, other, live, False)
            loaded = live.state[other.get_parameter(name)]
            expected = optim.state[model.get_parameter(name)]
            self.assertTrue(torch.equal(loaded["exp_avg"], expected["exp_avg"]), name)


if __name__ == "__main__":
    unittest.main()
