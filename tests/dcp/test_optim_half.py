"""The optimizer in a tree of `dcp.save` is stored as the model's own: every other call of the library takes it, and back."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_same, error_text, refused
from kit.cut_trees import complete, emptied
from kit.dcp_trees import AppState, everything, trained
from kit.folders import InFolder
from parameterized import parameterized
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fsdp_optim
from fsdp_optim import dcp
from fsdp_optim.testing import run_on_ranks

WORLD = 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)

TreeOf = Callable[..., dict[str, Any]]


def nested(model: nn.Module, optim: Any, get: Any = get_state_dict) -> dict[str, Any]:
    weights, state = get(model, optim)
    return {"model": weights, "optim": state, "step": 7}


def flattened(model: nn.Module, optim: Any, get: Any = get_state_dict) -> dict[str, Any]:
    weights, state = get(model, optim, options=FLAT)
    return {**weights, "optimizer": state, "step": 7}


def app(model: nn.Module, optim: Any) -> dict[str, Any]:
    return {"app": AppState(model, optim), "ema": {"w": torch.arange(3.0), "n": 1}}


FACES: dict[str, TreeOf] = {"nested": nested, "flattened": flattened, "app": app}


def load_tree(path: Path, tree_of: TreeOf, model: nn.Module, optim: Any) -> None:
    """Load into the tree of a model and an optimizer, and set it."""
    tree = tree_of(model, optim)
    dcp.load(tree, checkpoint_id=path)
    if tree_of is nested:
        set_state_dict(model, optim, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
    elif tree_of is flattened:
        weights = {name: value for name, value in tree.items() if name not in ("optimizer", "step")}
        set_state_dict(model, optim, model_state_dict=weights, optim_state_dict=tree["optimizer"], options=FLAT)


def each_way(root: Path) -> None:
    """What either call has saved, the other loads, bit for bit; the files are the same."""
    model, optim = trained()
    wanted = everything(model, optim)
    fsdp_optim.save(root / "own", model, optim, state={"step": 7}, options=QUIET)
    fsdp_optim.save(root / "app", model, optim, state={"app": {"step": 7}, "ema": {"w": torch.arange(3.0), "n": 1}})
    fsdp_optim.save(root / "own dcp", model, optim, state={"step": 7}, format="dcp", options=QUIET)
    for name, tree_of in FACES.items():
        path = root / name
        if name == "app":
            dcp.async_save(tree_of(model, optim), checkpoint_id=path).result()
        else:
            dcp.save(tree_of(model, optim), checkpoint_id=path)
        check_same(
            f"{name}: weights", load_file(path / "model.safetensors"), load_file(root / "own" / "model.safetensors")
        )
        check_same(
            f"{name}: state",
            dict(sorted(load_file(path / "optim.safetensors").items())),
            dict(sorted(load_file(root / "own" / "optim.safetensors").items())),
        )
        other, other_optim = trained(seed=1)
        result = fsdp_optim.load(path, other, other_optim, options=fsdp_optim.LoadOptions(compare=True))
        check_same(f"{name}: fsdp_optim.load", everything(other, other_optim), wanted)
        check_same(f"{name}: result", (result.missing_keys, result.unexpected_keys), ((), ()))
        for source in (path, root / ("app" if name == "app" else "own")):
            other, other_optim = trained(seed=1)
            load_tree(source, tree_of, other, other_optim)
            check_same(f"{name}: dcp.load of {source.name}", everything(other, other_optim), wanted)
    other, other_optim = trained(seed=1)
    tree = nested(other, other_optim)
    dcp.load(tree, checkpoint_id=root / "own dcp")
    set_state_dict(other, other_optim, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
    check_same("fsdp_optim.save in torch's files", everything(other, other_optim), wanted)


def at_another_world_size(root: Path) -> None:
    wanted = None
    for name, tree_of in FACES.items():
        for source, load in ((name, load_tree), ("app" if name == "app" else "own", load_tree), (name, None)):
            model, optim = trained(seed=1)
            if load is None:
                fsdp_optim.load(root / source, model, optim)
            else:
                load(root / source, tree_of, model, optim)
            loaded = everything(model, optim)
            wanted = loaded if wanted is None else wanted
            check_same(f"{name} from {source}", loaded, wanted)
    stored = load_file(root / "own" / "optim.safetensors")
    model, optim = trained(seed=1)
    fsdp_optim.load(root / "nested", model, optim)
    for fqn, values in get_state_dict(model, optim)[1]["state"].items():
        for key, value in values.items():
            check_same(f"{fqn}: {key}", complete(value), stored[f"state.{fqn}.{key}"])


def partial_loads(root: Path) -> None:
    """A tree that asks for less gets it, and no byte of the rest."""
    model, optim = trained()
    dcp.save(nested(model, optim), checkpoint_id=root / "a")
    weights, state = get_state_dict(model, optim)
    name = next(iter(weights))
    weight_alone = {"model": {name: emptied(weights[name])}}
    dcp.load(weight_alone, checkpoint_id=root / "a")
    check_same("one weight", complete(weight_alone["model"][name]), complete(weights[name]))
    some = {"optim": {"state": emptied(state["state"]), "param_groups": [{"lr": 0.0, "params": []}]}, "step": 0}
    some["optim"]["param_groups"] = [{**group, "lr": 0.0} for group in state["param_groups"]]
    dcp.load(some, checkpoint_id=root / "a")
    check_same("the optimizer alone", complete(some), complete({"optim": state, "step": 7}))


def in_several_files(root: Path) -> None:
    """Small files, and a file or more of each rank: the same elements."""
    model, optim = trained()
    tree = {**nested(model, optim), "ema": torch.arange(50.0)}
    for name, more in (("small", {}), ("of ranks", {"strategy": "per_rank_files"})):
        options = fsdp_optim.SaveOptions(durable=False, max_file_size=600, **more)
        dcp.save(tree, checkpoint_id=root / name, options=options)
        assert len(list((root / name).glob("optim-*.safetensors"))) > 1
        into = emptied(tree)
        dcp.load(into, checkpoint_id=root / name)
        check_same(f"{name}: dcp.load", complete(into), complete(tree))
        other, other_optim = trained(seed=1)
        fsdp_optim.load(root / name, other, other_optim)
        check_same(f"{name}: fsdp_optim.load", everything(other, other_optim), everything(model, optim))


def renamed(root: Path) -> None:
    """`rename` of a save and of a load maps the names of weights and of state alike."""
    model, optim = trained()
    tree = nested(model, optim)
    dcp.save(tree, checkpoint_id=root / "a", options=fsdp_optim.SaveOptions(rename={"0.": "first."}))
    names = load_file(root / "a" / "optim.safetensors")
    assert "state.first.weight.exp_avg" in names, list(names)
    into = emptied(nested(model, optim))
    dcp.load(into, checkpoint_id=root / "a", options=fsdp_optim.LoadOptions(rename={"first.": "0."}))
    check_same("renamed", complete(into), complete(tree))


def what_is_not_the_optimizer(root: Path) -> None:
    """Where no dict or several may be the model's optimizer, all are values of the trainer: they come back as they are."""
    model, optim = trained()
    weights, state = get_state_dict(model, optim)
    other = {**state, "state": emptied(state["state"])}
    foreign = {"state": {"else": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1.0, "params": ["else"]}]}
    name = next(iter(weights))
    deep = {**state, "state": {fqn: {"factors": {"q": torch.ones(2)}} for fqn in state["state"]}}
    for number, tree in enumerate(
        (
            {"model": weights, "one": state, "two": other},
            {"model": weights, "optim": foreign},
            {"model": weights, "optim": deep},
            {"model": weights, "optim": {f"param_groups.{name}.lr": 1.0, f"state.{name}.factors.q": torch.ones(2)}},
            {"model": weights, "optim": {"state": {0: {"step": torch.ones(2)}}, "param_groups": [{"params": [0]}]}},
            {"optim": state},
        )
    ):
        path = root / str(number)
        dcp.save(tree, checkpoint_id=path)
        into = emptied(tree)
        dcp.load(into, checkpoint_id=path)
        check_same(f"tree {number}", complete(into), complete(tree))
        if number < 5:
            words = "state['one'] and state['two']" if not number else "state['optim']"
            refused(
                lambda path=path: fsdp_optim.load(path, *trained()),
                fsdp_optim.StateError,
                "without an optimizer",
                words,
            )
    dcp.save({"model": weights, "optim": state}, checkpoint_id=root / "one")
    refused(
        lambda: dcp.load({"a": state, "b": other}, checkpoint_id=root / "one"),
        fsdp_optim.StateError,
        "each of a, b may be its dict",
    )


def on_ranks(root: Path) -> None:
    for case in (each_way, partial_loads, in_several_files, renamed, what_is_not_the_optimizer):
        case(root / case.__name__)


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in leaves(item)]
    return [leaf for item in tree.values() for leaf in leaves(item)] if isinstance(tree, dict) else [tree]


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    params = list(model.parameters())
    optim = torch.optim.AdamW([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=torch.tensor(0.25))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optim.step()
    return model, optim


class Factored(torch.optim.Optimizer):
    """State of every kind: like the parameter, of a shape of its own, numbers, text, nothing."""

    def __init__(self, params: Any, *, filled: bool) -> None:
        super().__init__(params, {"lr": 0.5 if filled else 0.0, "betas": (0.5, 0.25), "name": "a" if filled else ""})
        for number, param in enumerate(p for group in self.param_groups for p in group["params"]):
            self.state[param] = {
                "exp_avg": torch.full_like(param, 3.0 + number if filled else 0.0).detach(),
                "row": torch.arange(float(param.shape[0])) + (number if filled else 9.0),
                "step": torch.tensor(7.0 if filled else 0.0),
                "count": 5 if filled else 0,
                "phase": "warm" if filled else "",
                "nothing": None,
            }


class Counted(torch.optim.Optimizer):
    """State of numbers alone."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__(model.parameters(), {"lr": 0.5 - count / 100})
        for param in model.parameters():
            self.state[param] = {"count": count}


class OptimHalfTest(InFolder):
    def test_on_ranks(self) -> None:
        run_on_ranks(on_ranks, WORLD, self.root)
        run_on_ranks(at_another_world_size, 2, self.root / "each_way")

    @parameterized.expand([("nested",), ("flattened",)])
    def test_one_process(self, name: str) -> None:
        """Two groups, a learning rate that is a tensor; resume, convert, diff, inspect and thin take the checkpoint."""
        model, optim = plain()
        tree = FACES[name](model, optim)
        dcp.save(
            tree,
            checkpoint_id=self.root / "runs" / "step-7",
            no_dist=True,
            options=fsdp_optim.SaveOptions(durable=False),
        )
        path = self.root / "runs" / "step-7"
        fsdp_optim.save(self.root / "own", model, optim, state={"step": 7}, options=QUIET)
        differences = fsdp_optim.diff(self.root / "own", path)
        self.assertTrue(differences.equal, differences)
        proven = [fsdp_optim.load(place, *plain()).receipt.num_proven for place in (self.root / "own", path)]
        self.assertEqual(proven[1], proven[0])
        into = emptied(tree)
        dcp.load(into, checkpoint_id=path, no_dist=True)
        check_same("the tree", into, tree)
        other, other_optim = plain()
        with torch.no_grad():
            for tensor in (*other.parameters(), *(v for s in other_optim.state.values() for v in s.values())):
                tensor.zero_()
        fsdp_optim.resume(self.root / "runs", other, other_optim, strict=False)
        check_same("resumed", everything(other, other_optim), everything(model, optim))
        for number, format in enumerate(("dcp", "torch", "safetensors")):
            before = path if not number else self.root / str(number - 1)
            fsdp_optim.convert(before, self.root / str(number), format=format)
            other, other_optim = plain()
            fsdp_optim.load(self.root / str(number), other, other_optim)
            check_same(format, everything(other, other_optim), everything(model, optim))
        self.assertTrue(fsdp_optim.verify(path).has_checksums)
        fsdp_optim.thin(path)
        refused(lambda: fsdp_optim.load(path, *plain()), fsdp_optim.StateError, "was thinned")
        refused(lambda: dcp.load(into, checkpoint_id=path, no_dist=True), fsdp_optim.StateError, "this call has it")
        del into["optim" if name == "nested" else "optimizer"]
        dcp.load(into, checkpoint_id=path, no_dist=True)

    @parameterized.expand([("nested",), ("flattened",)])
    def test_values_of_every_kind(self, name: str) -> None:
        """Saved by each of the two, and loaded by each: in place, and with the values of the other dict."""

        def made(*, filled: bool) -> tuple[nn.Module, Factored]:
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
            with torch.no_grad():
                for number, param in enumerate(model.parameters()):
                    param.fill_(number + 1.0 if filled else 0.0)
            return model, Factored(model.parameters(), filled=filled)

        def tree_of(model: nn.Module, optim: Any) -> dict[str, Any]:
            return (nested if name == "nested" else flattened)(
                model, optim, get=dcp.get_state_dict
            )  # torch flattens no text

        model, optim = made(filled=True)
        wanted = dcp.get_state_dict(model, optim)
        dcp.save(tree_of(model, optim), checkpoint_id=self.root / "dcp", no_dist=True, options=QUIET)
        fsdp_optim.save(self.root / "own", model, optim, state={"step": 7}, options=QUIET)
        for place in ("dcp", "own"):
            other, other_optim = made(filled=False)
            fsdp_optim.load(self.root / place, other, other_optim)
            check_same(f"fsdp_optim.load of {place}", dcp.get_state_dict(other, other_optim), wanted)
            tree = tree_of(*made(filled=False))
            held = [tensor for tensor in leaves(tree) if isinstance(tensor, torch.Tensor)]
            dcp.load(tree, checkpoint_id=self.root / place, no_dist=True)
            check_same(f"dcp.load of {place}", tree, tree_of(model, optim), in_order=False)
            loaded = [tensor for tensor in leaves(tree) if isinstance(tensor, torch.Tensor)]
            self.assertTrue(all(a is b for a, b in zip(held, loaded, strict=True)))

    @parameterized.expand(itertools.product(("nested", "flattened"), ("no state", "numbers")))
    def test_without_tensors_of_state(self, name: str, kind: str) -> None:
        """An optimizer whose state has no tensors, alone in the tree and beside tensors of the trainer."""
        tree_of = nested if name == "nested" else flattened

        def made(rate: float, count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = nn.Linear(3, 2)
            return model, torch.optim.SGD(model.parameters(), lr=rate) if kind == "no state" else Counted(model, count)

        model, optim = made(0.05, 5)
        wanted = dcp.get_state_dict(model, optim)
        for place, more in (("alone", {}), ("beside", {"ema": {"w": torch.ones(3)}})):
            tree = {**tree_of(model, optim, get=dcp.get_state_dict), **more}
            options = dataclasses.replace(QUIET, fingerprint=True)
            dcp.save(tree, checkpoint_id=self.root / place, no_dist=True, options=options)
            other, other_optim = made(0.5, 0)
            result = fsdp_optim.load(self.root / place, other, other_optim)
            check_same(f"{place}: missing", result.missing_keys, ())
            check_same(f"{place}: fsdp_optim.load", dcp.get_state_dict(other, other_optim), wanted)
            for planner in (None, DefaultLoadPlanner()):
                into = {**tree_of(*made(0.5, 0), get=dcp.get_state_dict), **emptied(more)}
                dcp.load(into, checkpoint_id=self.root / place, planner=planner, no_dist=True)
                check_same(f"{place}: dcp.load, {planner}", into, tree, in_order=False)
        fsdp_optim.save(self.root / "own", model, optim, state={"step": 7}, options=QUIET)
        differences = fsdp_optim.diff(self.root / "own", self.root / "alone")
        self.assertTrue(differences.equal, differences)

    def test_tied_weights_and_extra_state(self) -> None:
        """Names of one tensor, and what modules add to their state dicts, in the tree of a checkpoint of fsdp_optim.save."""

        class Counting(nn.Linear):
            seen = 0

            def get_extra_state(self) -> Any:
                return {"seen": self.seen}

            def set_extra_state(self, state: Any) -> None:
                self.seen = state["seen"]

        def made(number: float) -> nn.Module:
            model = nn.Sequential(Counting(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
            model[1].weight = model[0].weight
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(number)
            model[0].seen = int(number)
            return model

        model = made(5.0)
        fsdp_optim.save(self.root / "own", model, options=QUIET)
        dcp.save(
            {"model": dcp.get_model_state_dict(model)}, checkpoint_id=self.root / "dcp", no_dist=True, options=QUIET
        )
        for place in ("own", "dcp"):
            tree = {"model": dcp.get_model_state_dict(made(0.0))}
            dcp.load(tree, checkpoint_id=self.root / place, no_dist=True)
            check_same(place, tree, {"model": dict(dcp.get_model_state_dict(model))}, in_order=False)
            other = made(0.0)
            fsdp_optim.load(self.root / place, other)
            check_same(f"{place}, a live model", other.state_dict(), model.state_dict(), in_order=False)
            at_top = dict(dcp.get_model_state_dict(made(0.0)))
            dcp.load(at_top, checkpoint_id=self.root / place, no_dist=True)
            check_same(f"{place}, at the top", at_top, dict(dcp.get_model_state_dict(model)), in_order=False)

    def test_keys_that_fall_together(self) -> None:
        """A weight, and a tensor of another dict, whose names joined by dots are equal."""
        tree = {
            "model": {"ema.w": torch.arange(3.0)},
            "ema": {"w": torch.arange(4.0)},
            "model.ema": {"w": torch.ones(2)},
        }
        dcp.save(tree, checkpoint_id=self.root / "a", no_dist=True, options=QUIET)
        into = emptied(tree)
        dcp.load(into, checkpoint_id=self.root / "a", no_dist=True)
        check_same("each its own", into, tree)

    def test_many_weights_at_the_top(self) -> None:
        """Ranks compare the names of a long state dict by a digest; an error names few of them."""
        tree = {f"layers.{number}.weight": torch.full((2,), float(number)) for number in range(2000)}
        dcp.save(tree, checkpoint_id=self.root / "a", no_dist=True, options=QUIET)
        into = emptied(tree)
        dcp.load(into, checkpoint_id=self.root / "a", no_dist=True)
        check_same("all", into, tree)
        kind, text = error_text(lambda: dcp.load({**into, "more": 1}, checkpoint_id=self.root / "a", no_dist=True))
        self.assertEqual(kind, "StateError")
        self.assertIn("state['more']: this call has it and the checkpoint does not", text)
        self.assertLess(len(text), 3000)

    def test_a_flattened_dict_with_equal_groups(self) -> None:
        """It does not say which groups there were."""
        model = nn.Linear(2, 3)
        optim = torch.optim.AdamW([{"params": [param]} for param in model.parameters()])
        model(torch.ones(1, 2)).sum().backward()
        optim.step()
        dcp.save(flattened(model, optim), checkpoint_id=self.root / "a", no_dist=True, options=QUIET)
        wanted = copy.deepcopy(everything(model, optim))
        model(torch.ones(1, 2)).sum().backward()
        optim.step()
        refused(
            lambda: fsdp_optim.load(self.root / "a", model, optim), fsdp_optim.StateError, "2", "param_groups='live'"
        )
        fsdp_optim.load(self.root / "a", model, optim, options=fsdp_optim.LoadOptions(param_groups="live"))
        check_same("by name", everything(model, optim), wanted)


if __name__ == "__main__":
    unittest.main()
