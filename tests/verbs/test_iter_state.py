"""iter_full_optim_state: every parameter's state in bounded memory."""

from __future__ import annotations

import itertools
import unittest
import weakref
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.groups import (
    Net,
    adam,
    fill,
    names_in,
    nested_net,
    step_plain,
)
from kit.peaks import MIB, Peak
from kit.trained import state_by_name
from parameterized import parameterized
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import StateError
from fsdp_optim.fairscale import FullyShardedDataParallel as FSDP
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

BUCKETS = (1, 16, 17, 64, 100, 1000, 1 << 26)  # bytes: less than an element, less than a parameter, more than all
STEPS = 3


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
        iterated = list(
            fsdp_optim.iter_full_optim_state(
                model, optim, recipient, options=fsdp_optim.CallOptions(bucket_nbytes=nbytes)
            )
        )
        expected = wanted if recipient in (rank, None) else [(name, None) for name, _ in wanted]
        check_same(f"iterated to {recipient} in buckets of {nbytes} bytes", iterated, expected, in_order=False)
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
    elements, peaks = Elements(), []
    for _ in range(3):
        with Peak() as peak:
            for _, values in fsdp_optim.iter_full_optim_state(
                model, optim, None, options=fsdp_optim.CallOptions(bucket_nbytes=8 * MIB)
            ):
                for value in values.values() if values is not None else ():
                    elements.add(value)
                del value, values
        peaks.append(peak.mib)
    if elements.most > 3 * 2 * MIB:  # the one in hand, and a bucket
        raise AssertionError(f"{elements.most * 4 / MIB:.0f} MiB of results were alive at once")
    return min(peaks)  # what gloo receives ahead of a slow rank is a matter of chance; what is kept would be in each


class TestIter(unittest.TestCase):
    @parameterized.expand([(1,), (3,)])
    def test_order_and_values(self, world_size: int) -> None:
        run_on_ranks(iterate_everything, world_size)

    def test_memory_is_bounded(self) -> None:
        """8 MiB in hand, 8 MiB of buckets, 8 MiB of results, and as much again of what gloo and the allocator keep."""
        for mib in run_on_ranks(memory_of_iter, 2):
            assert mib < 64, f"{mib:.0f} MiB for a state of 96 MiB"

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
