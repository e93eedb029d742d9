"""A tree of `dcp.save` with the dicts of two models whose parameters have equal names: no optimizer is stored as the other's."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same, error_text, refused
from kit.cut_trees import complete, emptied
from kit.dcp_trees import everything, trained
from kit.folders import InFolder
from parameterized import parameterized
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

import fsdp_optim
from fsdp_optim import dcp
from fsdp_optim.testing import run_on_ranks

QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)


def stepped(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.ones(2, 3)).square().sum().backward()
    optim.step()
    return model, optim


def trees(weights: Any, state: Any, others: Any, flat: Any) -> dict[str, dict[str, Any]]:
    """Trees in which one place tells that `state`, or `flat`, is the optimizer of `weights`, which have the names of `others`."""
    return {
        "beside": {"teacher": {"model": others}, "student": {"model": weights, "optim": state}},
        "beside, first": {"student": {"optim": state, "model": weights}, "teacher": {"model": others}},
        "deeper": {"model": others, "student": {"state_dict": weights, "optim": state}},
        "an average": {"ema": {"state_dict": others}, "app": {"module": weights, "optimizer": state, "step": 7}},
        "two keys": {"state_dict": others, "model": weights, "optimizer": state},
        "another key": {"model": weights, "ema": others, "optim": state},
        "no model's key": {"state_dict": weights, "ema": others, "optim": state},
        "at the top": {"ema": {"state_dict": others}, **weights, "optimizer": state},
        "a tensor at the top": {"state_dict": weights, "optimizer": state, "step": torch.tensor(7)},
        "flattened": {"teacher": {"model": others}, "student": {"model": weights, "optim": flat}},
        "other names": {"model": weights, "optims": {"a": state}, "ema": {f"m.{k}": v for k, v in others.items()}},
    }


def unsure(weights: Any, state: Any, others: Any) -> dict[str, dict[str, Any]]:
    """Trees that do not tell whose optimizer it is."""
    return {
        "beside neither": {"student": {"model": weights}, "teacher": {"model": others}, "optim": state},
        "two keys": {"state_dict": others, "module": weights, "optim": state},
        "top or dict": {"module": weights, **others, "optim": state},
        "in a list": {"app": {"model": weights}, "averages": [others], "optim": state},
        "no model's key": {"teacher": {"model": others}, "student": {"net": weights, "optim": state}},
    }


NAMES = list(trees({}, {}, {}, {}))


def check_trees(root: Path, pairs: Any, get: Any) -> None:
    """Each tree is loaded by `fsdp_optim.load` as the pair that it has, and by `dcp.load` as it is, by torch's planner too."""
    (model, optim), (other, _), make = pairs
    (weights, state), others = get(model, optim), other.state_dict()
    flat = dcp.get_state_dict(model, optim, options=dcp.StateDictOptions(flatten_optimizer_state_dict=True))[1]
    for name, tree in trees(weights, state, others, flat).items():
        dcp.save(tree, checkpoint_id=root / name, options=QUIET)
        loaded = make()
        fsdp_optim.load(root / name, *loaded)
        check_same(name, everything(*loaded), everything(model, optim))
        check_round_trip(root / name, tree)


def check_round_trip(path: Path, tree: dict[str, Any]) -> None:
    for planner in (None, DefaultLoadPlanner()):
        into = emptied(tree)
        dcp.load(into, checkpoint_id=path, planner=planner)
        check_same(f"{path.name}, {planner}", complete(into), complete(tree))


def on_ranks(root: Path) -> None:
    check_trees(root, (trained(), trained(seed=1), lambda: trained(seed=2)), get_state_dict)
    (model, optim), (other, _) = trained(), trained(seed=1)
    weights, state = get_state_dict(model, optim)
    twins = {"student": {"model": weights}, "teacher": {"model": other.state_dict()}}
    if dist.get_rank():
        twins["teacher"]["optim"] = state
    kind, text = error_text(lambda: dcp.save(twins, checkpoint_id=root / "differing", options=QUIET))
    check_same("ranks that find different models", kind, "RankError")
    check_same("both are named", [name for name in twins if name in text], list(twins))


class TwinModelsTest(InFolder):
    @parameterized.expand([(name,) for name in NAMES])
    def test_the_pair_that_the_tree_has(self, name: str) -> None:
        (model, optim), (other, _) = stepped(0), stepped(1)
        weights, state = dcp.get_state_dict(model, optim)
        flat = dcp.get_optimizer_state_dict(
            model, optim, options=dcp.StateDictOptions(flatten_optimizer_state_dict=True)
        )
        tree = trees(weights, state, other.state_dict(), flat)[name]
        dcp.save(tree, checkpoint_id=self.root / name, no_dist=True, options=QUIET)
        loaded = stepped(2)
        fsdp_optim.load(self.root / name, *loaded)
        check_same(name, dcp.get_state_dict(*loaded), (dict(weights), state))
        self.check_loaded(tree, self.root / name)

    @parameterized.expand([(name,) for name in unsure({}, {}, {})])
    def test_a_tree_that_does_not_tell(self, name: str) -> None:
        """The optimizer stays a dict of the trainer, which `fsdp_optim.load` names."""
        (model, optim), (other, _) = stepped(0), stepped(1)
        tree = unsure(*dcp.get_state_dict(model, optim), other.state_dict())[name]
        dcp.save(tree, checkpoint_id=self.root / "a", no_dist=True, options=QUIET)
        words = ("without an optimizer of its model", "optim']", "beside it where other dicts have these names too")
        refused(lambda: fsdp_optim.load(self.root / "a", *stepped(2)), fsdp_optim.StateError, *words)
        self.check_loaded(tree, self.root / "a")

    def test_loads_of_other_trees(self) -> None:
        """The order of a tree and what else it has do not say where the saved model belongs; where it was saved does."""
        (model, optim), (other, _) = stepped(0), stepped(1)
        weights, state = dcp.get_state_dict(model, optim)
        both = {"teacher": {"model": other.state_dict()}, "student": {"model": weights, "optim": state}}
        dcp.save(both, checkpoint_id=self.root / "both", no_dist=True, options=QUIET)
        models = {name: {"model": branch["model"]} for name, branch in both.items()}
        dcp.save(models, checkpoint_id=self.root / "models", no_dist=True, options=QUIET)
        top = {"ema": {"state_dict": other.state_dict()}, **weights}
        dcp.save({**top, "optim": state}, checkpoint_id=self.root / "top", no_dist=True, options=QUIET)
        for place, tree in (
            ("both", models),
            ("both", dict(reversed(models.items()))),
            ("both", {"teacher": models["teacher"]}),
            ("both", {"student": models["student"]}),
            ("models", dict(reversed(models.items()))),
            ("top", top),
        ):
            self.check_loaded(tree, self.root / place)
        self.check_loaded({"model": weights, "ema": {"state_dict": other.state_dict()}}, self.root / "top")
        self.check_loaded({"model": weights, "ema": {"state_dict": other.state_dict()}}, self.own(model, optim, other))

    def own(self, model: nn.Module, optim: Any, other: nn.Module) -> Path:
        """A checkpoint of `fsdp_optim.save` with another model among the values of the trainer."""
        path = self.root / "own"
        fsdp_optim.save(path, model, optim, state={"ema": {"state_dict": other.state_dict()}}, options=QUIET)
        weights, state = dcp.get_state_dict(model, optim)
        app = {"ema": {"state_dict": other.state_dict()}, "app": {"model": weights, "optim": state}}
        into = emptied(app)
        dcp.load(into, checkpoint_id=path, no_dist=True)
        check_same("into a tree", into, app, in_order=False)
        return path

    def check_loaded(self, tree: dict[str, Any], path: Path) -> None:
        for planner in (None, DefaultLoadPlanner()):
            into = emptied(tree)
            dcp.load(into, checkpoint_id=path, planner=planner, no_dist=True)
            check_same(f"{path.name}, {planner}", into, tree, in_order=False)

    def test_on_ranks(self) -> None:
        run_on_ranks(on_ranks, 2, self.root)


if __name__ == "__main__":
    unittest.main()
