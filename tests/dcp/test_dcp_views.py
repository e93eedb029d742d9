"""`dcp.load` through Views: checkpoints of this library and of torch, fused or not, into state dicts that are fused or not."""

from __future__ import annotations

import tempfile
import unittest
from typing import Any

import torch.distributed.checkpoint as torch_dcp
from kit.cases import expand, some
from kit.compare import check_same, refused_on_ranks, sorted_state
from kit.fused import VIEWS, TrainedFused, Unfused
from kit.optimizers import adam
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch.distributed.checkpoint.state_dict import StateDictOptions

import fsdp_optim
from fsdp_optim import CallOptions, LoadOptions, SaveOptions, View, dcp
from fsdp_optim.testing import run_on_ranks

FUSED, UNFUSED = True, False
KINDS = ("ours", "ours, canonical", "dcp.save", "torch", "torch, flattened", "canonical by torch")
CUT_BY_HOOKS = ("torch, cut", "torch, cut, flattened")


def trained(is_fused: bool, steps: int) -> Trained:
    return TrainedFused("FSDP2", adam, steps) if is_fused else Trained("FSDP2", adam, steps, Unfused)


def saved(folder: str, kind: str) -> None:
    with cpu():
        source = trained(not kind.startswith("canonical"), STEPS)
        options = StateDictOptions(flatten_optimizer_state_dict=kind.endswith("flattened"))
        if kind.startswith("ours"):
            views = VIEWS if kind.endswith("canonical") else ()
            fsdp_optim.save(folder, source.model, source.optim, options=SaveOptions(views=views))
            return
        model, optim = dcp.get_state_dict(source.model, source.optim, options=options)
        if kind.startswith(CUT_BY_HOOKS):  # the weights alone
            model = fsdp_optim.gather_full_model_state_dict(source.model, None, options=CallOptions(views=VIEWS))
        (dcp if kind == "dcp.save" else torch_dcp).save(
            {"model": model, "optim": optim, "step": 7}, checkpoint_id=folder
        )


def loaded(folder: str, is_fused: bool, is_flat: bool, num: int = STEPS) -> None:
    with cpu():
        target, options = trained(is_fused, 0), StateDictOptions(flatten_optimizer_state_dict=is_flat)
        model, optim = dcp.get_state_dict(target.model, target.optim, options=options)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=folder, options=LoadOptions(views=VIEWS))
        dcp.set_state_dict(target.model, target.optim, model_state_dict=model, optim_state_dict=optim, options=options)
        oracle, views = Oracle(adam, num, Unfused), VIEWS if is_fused else []
        state = target.gather(None, "name", views=views)["state"]
        check_same("state", sorted_state(state), sorted_state(oracle.by_name()))
        weights = fsdp_optim.gather_full_model_state_dict(target.model, None, options=CallOptions(views=views))
        check_same("weights", dict(sorted(weights.items())), dict(sorted(oracle.values().items())))


def refused(folder: str) -> None:
    with cpu():
        target = trained(UNFUSED, 0)
        model, optim = dcp.get_state_dict(target.model, target.optim)

        def load(views: Any) -> None:
            dcp.load({"model": model, "optim": optim}, checkpoint_id=folder, options=LoadOptions(views=views))

        nothing, wrong = (
            View("zz", "r", {"yy": "r"}),
            View("ff.w13", "f (a + b) c", {"x": "(f a) c", "y": "(f b) c"}, a=1, b=2),
        )
        refused_on_ranks("nothing", lambda: load([*VIEWS, nothing]), "StateError", "View('zz'", "leave the View out")
        refused_on_ranks("shape", lambda: load([wrong]), "LayoutError", "ff.w13", "the axes")
        refused_on_ranks("kind", lambda: load(["x"]), "StateError", "views must be a list of Views")
        fused = trained(FUSED, 1)
        weights, state = dcp.get_state_dict(fused.model, fused.optim)
        save = {"views": VIEWS[:1]}
        refused_on_ranks(
            "save",
            lambda: dcp.save(
                {"model": weights, "optim": state}, checkpoint_id=f"{folder}-2", options=SaveOptions(**save)
            ),
            "StateError",
            "attention.wqkv.weight",
            "fsdp_optim.save",
        )
        dcp.save({"model": weights}, checkpoint_id=f"{folder}-3", options=SaveOptions(**save))
        assert "attention.wq.weight" in fsdp_optim.inspect(f"{folder}-3").model


class TestLoad(unittest.TestCase):
    @expand(
        *some(
            [
                (kind, is_fused, is_flat, num)
                for kind in KINDS
                for is_fused in (FUSED, UNFUSED)
                for is_flat in (False, True)
                for num in (1, 3)
                if "torch" not in kind or is_flat == kind.endswith("flattened")  # a tree of torch has one form
            ],
            every=3,
        )
    )
    def test_round_trips(self, kind: str, is_fused: bool, is_flat: bool, num: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(saved, 2, f"{folder}/step", kind)
            run_on_ranks(loaded, num, f"{folder}/step", is_fused, is_flat)

    @parameterized.expand(
        [(kind, is_fused, num) for kind in CUT_BY_HOOKS for is_fused in (FUSED, UNFUSED) for num in (1, 3)]
    )
    def test_weights_that_hooks_have_cut_beside_fused_state(self, kind: str, is_fused: bool, num: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(saved, 2, f"{folder}/step", kind)
            run_on_ranks(loaded, num, f"{folder}/step", is_fused, kind.endswith("flattened"))

    def test_refusals(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(saved, 2, f"{folder}/step", "ours")
            run_on_ranks(refused, 2, f"{folder}/step")
