"""Experts as slices of stacked parameters: plain parameters of a rank that are declared to be a part of a larger parameter."""

from __future__ import annotations

import unittest
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import check_refused, check_same, error_text
from kit.folders import InFolder
from kit.slices import Experts, Moe, TrainedSlices, whole_moe
from kit.trained import STEPS
from kit.wraps import in_fsdp1
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

BOUNDS: dict[str, dict[int, list[int]]] = {
    "plain": {1: [0, 8], 2: [0, 4, 8], 3: [0, 3, 6, 8], 4: [0, 2, 4, 6, 8]},
    "uneven": {2: [0, 7, 8], 4: [0, 3, 3, 7, 8]},  # a rank without experts
}


def in_place(kind: str, steps: int, declared: int | None = None) -> TrainedSlices:
    """This rank's part; in kinds that are not in BOUNDS, two ranks share the experts of a half."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind in BOUNDS:
        first, stop = BOUNDS[kind][world][rank : rank + 2]
        return TrainedSlices(first, stop, steps, declared=declared)
    half = rank // 2
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    everyone = init_device_mesh("cpu", (4,))

    def in_fsdp2(model: Moe) -> nn.Module:
        fully_shard(model.experts, mesh=grid["edp"])
        return fully_shard(model, mesh=everyone)

    def in_units_of_fsdp1(model: Moe, orig: bool) -> nn.Module:
        experts: Any = in_fsdp1(model.experts, process_group=grid["edp"].get_group(), use_orig_params=orig)
        model.experts = experts
        return in_fsdp1(model, use_orig_params=orig)

    wraps: dict[str, Any] = {
        "replicas": lambda model: model,
        "FSDP2": in_fsdp2,
        "FSDP1 flat": partial(in_units_of_fsdp1, orig=False),
        "FSDP1 orig": partial(in_units_of_fsdp1, orig=True),
    }
    return TrainedSlices(4 * half, 4 * half + 4, steps, wraps[kind], declared=declared)


def by_name(state: Any) -> dict[str, Any]:
    return dict(sorted(state.items()))


def trip(kind: str, folder: str) -> None:
    """Every verb and a save, compared with the training of the whole model."""
    trained, target = in_place(kind, STEPS), in_place(kind, 0)
    oracle, further, last = whole_moe(STEPS), whole_moe(STEPS + 1), dist.get_world_size() - 1
    full = trained.gather(None)
    check_same("gathered", {"state": full["state"]}, {"state": oracle.full()["state"]})
    named = trained.gather(last, "name")
    check_same("on the recipient", named is not None, dist.get_rank() == last)
    listed = dict(fsdp_optim.iter_full_optim_state(trained.model, trained.optim, None))
    check_same("iterated", by_name(listed), by_name(oracle.by_name()))
    whole = fsdp_optim.gather_full_model_state_dict(trained.model, last)
    if whole is not None:
        check_same("weights", by_name(whole), by_name(oracle.model.state_dict()))
    fsdp_optim.load_optim_state_dict(target.optim, target.shard(full))
    fsdp_optim.scatter_full_model_state_dict(target.model, whole, last)
    check_same("weights, scattered", target.weights(), trained.weights())
    target.step([STEPS])
    check_same("trained on", by_name(target.gather(None, "name")["state"]), by_name(further.by_name()))
    fsdp_optim.load_optim_state_dict(target.optim, target.scatter(named, last))
    check_same("scattered", by_name(target.gather(None, "name")["state"]), by_name(oracle.by_name()))
    fsdp_optim.save(f"{folder}/step", trained.model, trained.optim)


def loaded(kind: str, folder: str) -> None:
    target, wanted = in_place(kind, 0), in_place(kind, STEPS)
    fsdp_optim.load(f"{folder}/step", target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True))
    check_same("weights", target.weights(), wanted.weights())
    check_same("state", target.gather(None, "name"), wanted.gather(None, "name"))
    fsdp_optim.async_save(f"{folder}/again-{kind}", target.model, target.optim).wait()


NOW = [("plain", 4), ("FSDP2", 4), ("uneven", 4)]
LATER = [("plain", 2), ("replicas", 4), ("FSDP1 flat", 4), ("FSDP1 orig", 4), ("uneven", 2)]


# ------------------------------------------------------------------------------------------ mistakes


def mistakes(kind: str, offsets: list[int], change: bool) -> list[tuple[str, str]]:
    trained = in_place(kind, STEPS, declared=offsets[dist.get_rank()])
    if change and dist.get_rank() == 3:
        with torch.no_grad():
            trained.params[0 if kind == "plain" else 2].add_(1)
    return [
        error_text(partial(fsdp_optim.gather_full_model_state_dict, trained.model)),
        *([] if change else [error_text(partial(trained.gather, None))]),
    ]


MISTAKES = [
    ("overlap", "plain", [0, 1, 4, 6], False, ("experts.up", "rank 0", "rank 1", "[0:2,", "[1:3,", "overlap")),
    ("gap", "plain", [0, 2, 4, 4], False, ("experts.up", "elements 90 to 119 of 120", "rank 0", "[0:2,")),
    ("of other size", "FSDP2", [0, 0, 3, 3], False, ("experts.up", "rank 1", "rank 2", "[2:4,", "[3:5,", "overlap")),
    ("unequal offsets of one group", "FSDP2", [0, 0, 4, 3], False, ("experts.", "rank 2", "rank 3")),
    ("unequal replicas", "replicas", [0, 0, 4, 4], True, ("experts.up", "rank 2", "rank 3")),
]


class SlicesTest(InFolder):
    @expand(NOW, LATER)
    def test_every_verb(self, kind: str, world_size: int) -> None:
        run_on_ranks(trip, world_size, kind, str(self.root))
        oracle, plain = whole_moe(STEPS), whole_moe(0)
        fsdp_optim.load(self.root / "step", plain.model, plain.optim, options=fsdp_optim.LoadOptions(compare=True))
        check_same("the whole model", plain.model.state_dict(), oracle.model.state_dict())
        check_same("its state", plain.by_name(), oracle.by_name())
        for other, size in (("plain", 2), ("FSDP2", 4)) if (kind, world_size) == ("plain", 4) else ():
            run_on_ranks(loaded, size, other, str(self.root))
            again = whole_moe(0)
            fsdp_optim.load(self.root / f"again-{other}", again.model, again.optim)
            check_same("saved again", again.by_name(), oracle.by_name())

    def test_an_unsharded_checkpoint(self) -> None:
        oracle = whole_moe(STEPS)
        fsdp_optim.save(self.root / "step", oracle.model, oracle.optim)
        run_on_ranks(loaded, 3, "plain", str(self.root))

    @parameterized.expand(MISTAKES)
    def test_mistakes(self, _: str, kind: str, offsets: list[int], change: bool, words: tuple[str, ...]) -> None:
        for errors in zip(*run_on_ranks(mistakes, 4, kind, offsets, change), strict=True):
            check_refused(kind, list(errors), "StateError", *words)

    def test_declarations_that_cannot_be(self) -> None:
        experts = Experts(2)
        for what, name, shape, offset in (
            ("an end behind the shape", "up", (8, 3, 5), (7, 0, 0)),
            ("an offset behind the shape", "up", (8, 3, 5), (9, 0, 0)),
            ("a dimension less", "up", (8, 3, 5), (2, 0)),
            ("below zero", "up", (8, 3, 5), (-2, 0, 0)),
            ("no numbers", "up", (8, 3, 5), "200"),
            ("no name", 3, (8, 3, 5), (2, 0, 0)),
        ):
            kind, text = error_text(
                partial(fsdp_optim.declare_slice, experts, name, global_shape=shape, offset=offset)  # type: ignore[arg-type]
            )
            self.assertEqual(kind, "WrapperError", f"{what}: {text}")
        fsdp_optim.declare_slice(experts, "up", global_shape=(8, 9, 9, 9), offset=(0, 0, 0, 0))
        kind, text = error_text(partial(fsdp_optim.gather_full_model_state_dict, experts))
        self.assertEqual((kind, "up" in text, "[2, 3, 5]" in text), ("WrapperError", True, True), text)


if __name__ == "__main__":
    unittest.main()
