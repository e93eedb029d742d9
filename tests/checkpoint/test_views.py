"""Fused, stacked and transposed parameters under their canonical names: saved, loaded, gathered and trained on, bit for bit."""

from __future__ import annotations

import itertools
import tempfile
import unittest
from typing import Any

import torch
from kit.cases import expand, some
from kit.compare import Differs, check_same, sorted_state
from kit.fused import VIEWS, TrainedFused, Unfused
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu

import fsdp_optim
from fsdp_optim import CallOptions, LoadOptions, SaveOptions, View
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

FUSED, UNFUSED = True, False
WRAPPERS = ("FSDP2", "HSDP", "FSDP2 x TP", "FSDP1 flat", "FSDP1 orig", "fairscale flat", "DDP", "plain")


def trained(is_fused: bool, wrap: str, make: Any, steps: int) -> Trained:
    return TrainedFused(wrap, make, steps) if is_fused else Trained(wrap, make, steps, Unfused)


def views_of(is_fused: bool) -> list[View]:
    return VIEWS if is_fused else []


def state_of(target: Trained, is_fused: bool) -> Any:
    """The state on every rank by canonical name."""
    return sorted_state(target.gather(None, "name", views=views_of(is_fused))["state"])


def weights_of(target: Trained, is_fused: bool) -> dict[str, torch.Tensor]:
    options = CallOptions(views=views_of(is_fused), process_group=target.process_group)
    return dict(sorted(fsdp_optim.gather_full_model_state_dict(target.model, None, options=options).items()))


def check_trained(what: str, target: Trained, is_fused: bool, oracle: Oracle) -> None:
    check_same(f"{what}, state", state_of(target, is_fused), sorted_state(oracle.by_name()))
    check_same(f"{what}, weights", weights_of(target, is_fused), dict(sorted(oracle.values().items())))


def gathered(wrapper: str) -> None:
    """On one rank: what a gather gives of a fused model is what it gives of the unfused one, which was trained by itself."""
    with cpu(), fairscale_on_cpu():
        check_trained(wrapper, TrainedFused(wrapper, adam, STEPS), FUSED, Oracle(adam, STEPS, Unfused))


def fingerprinted(wrapper: str) -> None:
    """On one rank: a fused and an unfused run have one fingerprint, which Views make of elements that lie elsewhere."""
    with cpu(), fairscale_on_cpu():
        fused, apart = TrainedFused(wrapper, adam, STEPS), Trained(wrapper, adam, STEPS, Unfused)
        prints = [
            fsdp_optim.fingerprint(
                side.model, side.optim, options=CallOptions(views=views, process_group=side.process_group)
            )
            for side, views in ((fused, VIEWS), (apart, []), (fused, VIEWS[1:]))
        ]
        check_same(f"{wrapper}, differences", list(prints[0].differences(prints[1])), [])
        if not prints[0].differences(prints[2]):
            raise Differs("a fused parameter has the fingerprint of its parts")


def saved(folder: str, is_fused: bool, wrapper: str, make: Any = adam) -> None:
    with cpu(), fairscale_on_cpu():
        source = trained(is_fused, wrapper, make, STEPS)
        options = SaveOptions(views=views_of(is_fused), process_group=source.process_group)
        fsdp_optim.save(folder, source.model, source.optim, options=options)


def resumed(folder: str, is_fused: bool, wrapper: str, make: Any = adam) -> None:
    """On one rank: load, compare, train on, compare; what is live stays where it is in memory."""
    with cpu(), fairscale_on_cpu():
        target = trained(is_fused, wrapper, make, 0)
        places = [(id(param), local_of(param).data_ptr()) for param in target.params]
        options = LoadOptions(views=views_of(is_fused), process_group=target.process_group, compare=True)
        fsdp_optim.load(folder, target.model, target.optim, options=options)
        if wrapper != "FSDP1 flat":
            check_same("places", [(id(param), local_of(param).data_ptr()) for param in target.params], places)
        check_trained("loaded", target, is_fused, Oracle(make, STEPS, Unfused))
        target.step(range(STEPS, STEPS + 2))
        check_trained("trained on", target, is_fused, Oracle(make, STEPS + 2, Unfused))


class TestViews(unittest.TestCase):
    @expand(*some(list(itertools.product(WRAPPERS, (1, 2, 4))), every=4, first=1))
    def test_a_gather_has_the_parts(self, wrapper: str, world_size: int) -> None:
        run_on_ranks(gathered, world_size, wrapper)

    @expand(*some(["FSDP2", "FSDP1 flat", "FSDP2 x TP", "plain"], every=2))
    def test_fused_and_unfused_have_one_fingerprint(self, wrapper: str) -> None:
        run_on_ranks(fingerprinted, 2, wrapper)

    @expand(
        *some(
            [
                (first, is_fused, n, second, m)
                for (first, n), (second, m) in itertools.product(itertools.product(WRAPPERS, (2, 4)), repeat=2)
                for is_fused in (FUSED, UNFUSED)
            ],
            every=53,
        )
    )
    def test_a_run_goes_on_fused_or_unfused(self, first: str, is_fused: bool, n: int, second: str, m: int) -> None:
        """Saved in one form and wrapper, and gone on with in the other form, another wrapper and world size."""
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(saved, n, f"{folder}/step", is_fused, first)
            run_on_ranks(resumed, m, f"{folder}/step", not is_fused, second)

    @expand(*some([("FSDP2", 2, 4), ("FSDP2 x TP", 4, 2), ("FSDP1 flat", 4, 2), ("plain", 1, 2)], every=1))
    def test_a_fused_run_goes_on_fused(self, wrapper: str, n: int, m: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(saved, n, f"{folder}/step", FUSED, wrapper)
            run_on_ranks(resumed, m, f"{folder}/step", FUSED, "FSDP2")
