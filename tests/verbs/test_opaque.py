"""State that is not shaped like its parameter: kept per rank on the same layout, refused by name on another."""

from __future__ import annotations

import itertools
import shutil
import unittest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand, those
from kit.compare import Differs, check_refused, check_same, error_text
from kit.local_parts import local_of
from kit.models import Net
from kit.opaque import OPAQUE, Blockwise, Wide, eight_bits, opaque_state
from kit.trained import STEPS, Trained
from kit.wrapping import cpu, snapshot
from kit.wraps import WRAPPERS
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


def same_layout(wrapper: str) -> None:
    with cpu():
        trained, target = (Trained(wrapper, Blockwise, steps) for steps in (STEPS, 0))
        before = snapshot(trained)
        fulls = {key_by: trained.gather(None, key_by) for key_by in ("id", "name")}
        to_last = trained.gather(dist.get_world_size() - 1)
        check_same("after gathering", snapshot(trained), before)
        wanted = opaque_state(trained)
        for what, full in fulls.items():
            target.fresh_optimizer()
            fsdp_optim.load_optim_state_dict(target.optim, target.shard(full))
            check_same(f"opaque values, by {what}", opaque_state(target), wanted)
        target.fresh_optimizer()
        fsdp_optim.load_optim_state_dict(target.optim, target.scatter(to_last, dist.get_world_size() - 1))
        check_same("opaque values, scattered", opaque_state(target), wanted)
        again = target.gather(None)
        check_same("gathered again", again["state"], fulls["id"]["state"])
        # what is in the dict is its own: training on leaves it alone
        kept = {name: value.clone() for name, value in again["state"][0].items() if isinstance(value, torch.Tensor)}
        target.step([9])
        for name, value in kept.items():
            check_same(f"{name} after a step", again["state"][0][name], value)


def gathered(wrapper: str) -> Any:
    with cpu():
        return Trained(wrapper, Blockwise).gather(0)


def into(wrapper: str, full: Any) -> list[tuple[str, str]]:
    with cpu():
        target = Trained(wrapper, Blockwise, steps=0)
        before = snapshot(target)
        errors = [error_text(lambda: target.shard(full)), error_text(lambda: target.scatter(full))]
        check_same("after being refused", snapshot(target), before)
        return errors


SIZES = (2, 3, 1)


class OpaqueTest(unittest.TestCase):
    @expand(*those(itertools.product(WRAPPERS, SIZES), lambda w, n: n == SIZES[list(WRAPPERS).index(w) % 3]))
    def test_same_layout_gets_every_rank_its_own(self, wrapper: str, world_size: int) -> None:
        run_on_ranks(same_layout, world_size, wrapper)

    @expand(
        # another world size, another wrapper, and both, of each kind of layout
        soon=[
            ("FSDP1 flat", 2, "FSDP1 flat", 3),
            ("FSDP2", 3, "plain", 1),
            ("fairscale flat", 2, "FSDP2", 2),
            ("plain", 1, "FSDP2", 2),
            ("DDP", 2, "FSDP1 flat", 2),
            ("HSDP", 4, "FSDP2", 4),
        ],
        later=[
            ("FSDP1 orig", 2, "FSDP1 orig", 4),
            ("FSDP2", 2, "FSDP2", 3),
            ("fairscale flat", 2, "fairscale flat", 4),
            ("FSDP1 orig", 2, "FSDP2", 2),
            ("FSDP1 flat", 2, "plain", 1),
        ],
    )
    def test_another_layout_is_refused_by_name(self, wrapper: str, size: int, target: str, target_size: int) -> None:
        full = run_on_ranks(gathered, size, wrapper)[0]
        by_rank = run_on_ranks(into, target_size, target, full)
        for place, verb in enumerate(("shard", "scatter")):
            errors = [errors_of_rank[place] for errors_of_rank in by_rank]
            self.assertEqual({kind for kind, _ in errors}, {"StateError"}, errors)
            for _, text in errors:
                self.assertTrue(any(name in text for name in OPAQUE), f"{verb}: {text}")
                self.assertTrue(any(name in text for name, _ in Net().named_parameters()), f"{verb}: {text}")
        check_refused("scatter", [errors_of_rank[1] for errors_of_rank in by_rank], "StateError")

    @parameterized.expand([("plain", 1, "DDP", 3), ("DDP", 2, "plain", 1), ("plain", 2, "plain", 1)])
    def test_whole_parameters_are_one_layout(self, wrapper: str, size: int, target: str, target_size: int) -> None:
        """Every rank has the same whole value: nothing depends on how many there are."""
        full = run_on_ranks(gathered, size, wrapper)[0]
        for errors in run_on_ranks(into, target_size, target, full):
            self.assertEqual(errors, [("", ""), ("", "")])


# ------------------------------------------------------------------------------------------- torchao


def adam_of_eight_bits() -> None:
    trained, target = (Trained("FSDP2", eight_bits, steps, Wide) for steps in (2, 0))
    full = trained.gather(None)
    fsdp_optim.load_optim_state_dict(target.optim, target.shard(full))
    again = target.gather(None)
    for trained_on in (trained, target):
        trained_on.step([5])
    moments = [
        [local_of(run.optim.state[param]["exp_avg"]).dequantize() if param.dim() > 1 else None for param in run.params]
        for run in (trained, target)
    ]
    if list(again["state"]) != list(full["state"]):
        raise Differs(f"{list(again['state'])}, not {list(full['state'])}")
    check_same("moments, trained on", moments[1], moments[0])


@pytest.mark.slow  # torchao compiles its step for a minute; test_checkpoint_blocks.py saves and loads the state without a step
class TorchaoTest(unittest.TestCase):
    def test_8_bit_adam_on_fsdp2(self) -> None:
        try:
            import torchao.optim  # noqa: F401
        except ImportError as error:
            self.skipTest(f"torchao is not installed: {error}")
        if shutil.which("g++") is None:
            self.skipTest("torchao compiles its optimizers with g++, and there is none")
        run_on_ranks(adam_of_eight_bits, 2)
