"""`dcp.save`, `dcp.load` and `dcp.async_save` with the trees that trainers give torch.distributed.checkpoint."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from kit.compare import check_same, refused
from kit.cut_trees import complete, emptied
from kit.dcp_trees import AppState, app, everything, nested, trained
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp_optim
from fsdp_optim import dcp
from fsdp_optim.testing import run_on_ranks

WORLD = 4

Save = Callable[..., Any]


def round_trip(path: Path, tree_of: Callable[[nn.Module, Any], dict[str, Any]], save: Save, load: Save) -> None:
    model, optim = trained()
    wanted = everything(model, optim)
    save(tree_of(model, optim), checkpoint_id=path)
    other, other_optim = trained(seed=1)
    into = tree_of(other, other_optim)
    load(into, checkpoint_id=path)
    if not any(isinstance(value, AppState) for value in into.values()):
        set_state_dict(other, other_optim, model_state_dict=into["model"], optim_state_dict=into["optim"])
    check_same(f"{path.name}", everything(other, other_optim), wanted)


def planned_save(tree: dict[str, Any], **options: Any) -> None:
    dcp.save(tree, planner=torch_dcp.DefaultSavePlanner(), **options)


def planned_load(tree: dict[str, Any], **options: Any) -> None:
    dcp.load(tree, planner=torch_dcp.DefaultLoadPlanner(), **options)


def trees_of_trainers(root: Path) -> None:
    as_dcp = {"format": "dcp"}
    for name, tree_of in (("nested", nested), ("app", app)):
        round_trip(root / f"{name}, ours", tree_of, dcp.save, dcp.load)
        round_trip(root / f"{name}, torch's files", tree_of, lambda *a, **k: dcp.save(*a, **k, **as_dcp), dcp.load)
        round_trip(root / f"{name}, titan", tree_of, lambda *a, **k: dcp.save(*a, **k, format="torchtitan"), dcp.load)
        round_trip(root / f"{name}, torch reads", tree_of, lambda *a, **k: dcp.save(*a, **k, **as_dcp), torch_dcp.load)
        round_trip(root / f"{name}, torch wrote", tree_of, torch_dcp.save, dcp.load)
        round_trip(root / f"{name}, planned", tree_of, planned_save, dcp.load)
        round_trip(root / f"{name}, planned load", tree_of, dcp.save, planned_load)
        round_trip(root / f"{name}, async", tree_of, lambda *a, **k: dcp.async_save(*a, **k).result(), dcp.load)
    model, optim = trained()
    model_dict, optim_dict = get_state_dict(model, optim)
    for place in ("nested, ours", "app, ours"):
        check_same("other tools open the weights", load_file(root / place / "model.safetensors"), complete(model_dict))
    stored = load_file(root / "nested, ours" / "optim.safetensors")
    for fqn, values in optim_dict["state"].items():
        for name, value in values.items():
            check_same(fqn, stored[f"state.{fqn}.{name}"], complete(value))


def plain_values_and_identity(root: Path) -> None:
    tensor, inner = torch.arange(3.0), {"x": torch.arange(4), "name": "a"}
    dcp.save(
        {"t": tensor, "d": inner, "l": [torch.ones(1), 2], "step": 7, "own": {"seed": 5}}, checkpoint_id=root / "a"
    )
    numbers, listed = {"x": torch.zeros(4, dtype=torch.int64), "name": ""}, [torch.zeros(1), 0]
    into: dict[str, Any] = {"t": torch.zeros(3), "d": numbers, "l": listed, "step": 0}
    held = into["t"], numbers["x"], listed[0]
    dcp.load(into, checkpoint_id=root / "a")
    check_same("values", into, {"t": tensor, "d": inner, "l": [torch.ones(1), 2], "step": 7})
    loaded = into["t"], into["d"]["x"], into["l"][0]
    check_same("in place", [a is b for a, b in zip(held, loaded, strict=True)], [True] * 3)
    check_same("the same dicts and lists", (into["d"] is numbers, into["l"] is listed), (True, True))
    dcp.save({"t": tensor + 1}, checkpoint_id=root / "a")  # replaces it
    dcp.load({"t": held[0]}, checkpoint_id=root / "a")
    check_same("replaced", held[0], tensor + 1)


def ends_of_lists(root: Path) -> None:
    """torch saves no empty dict, so that a list that ends with one is shorter in its checkpoint: the item stays."""
    tree: dict[str, Any] = {
        "runs": [torch.ones(2), {"best": 1}, {}, {}],
        "losses": [1, 2],
        "deep": [[torch.ones(1), {}]],
    }
    torch_dcp.save(tree, checkpoint_id=root / "a")
    for load in (torch_dcp.load, dcp.load):
        runs, losses = [torch.zeros(2), {"best": 0}, {}, {}], [0, 0]
        into: dict[str, Any] = {"runs": runs, "losses": losses, "deep": [[torch.zeros(1), {}]]}
        load(into, checkpoint_id=root / "a")
        check_same(load.__module__, into, tree)
        check_same("the same list", into["runs"] is runs, load is dcp.load)
    torch_dcp.save(
        {"a": [[torch.ones(1)], [{}]], "b": [torch.ones(1), [{"c": {}}], {}]}, checkpoint_id=root / "nothing"
    )
    into = {"a": [[torch.zeros(1)], [{}]], "b": [torch.zeros(1), [{"c": {}}], {}]}
    dcp.load(into, checkpoint_id=root / "nothing")
    check_same("inside of lists", into, {"a": [[torch.ones(1)], [{}]], "b": [torch.ones(1), [{"c": {}}], {}]})
    torch_dcp.save({"runs": [torch.ones(1), torch.full((1,), 2.0)]}, checkpoint_id=root / "more")
    for load in (torch_dcp.load, dcp.load):
        fewer: dict[str, Any] = {"runs": [torch.zeros(1)]}
        load(fewer, checkpoint_id=root / "more")
        check_same("a shorter list", fewer, {"runs": [torch.ones(1)]})
    longer: dict[str, Any] = {"losses": [0, 0, 0]}
    dcp.load(longer, checkpoint_id=root / "a")
    check_same("one value", longer, {"losses": [1, 2]})


def empty_dicts(root: Path) -> None:
    """torch saves nothing of a dict without values, so its checkpoints lack what the tree here has."""
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, state_of in (("torch's", get_state_dict), ("ours", dcp.get_state_dict)):
        weights, groups = state_of(model, optim)
        tree: dict[str, Any] = {"model": weights, "optim": groups, "seen": {}, "app": {"n": 1, "runs": {"best": {}}}}
        check_same("the optimizer has no state", groups["state"], {})
        torch_dcp.save(tree, checkpoint_id=root / name)
        for load in (torch_dcp.load, dcp.load):
            seen, best = {}, {}
            into = {**emptied(tree), "seen": seen, "app": {"n": 0, "runs": {"best": best}}}
            load(into, checkpoint_id=root / name)
            check_same(f"{name}, {load.__module__}", into, tree)
            check_same("the same dicts", (into["seen"] is seen, into["app"]["runs"]["best"] is best), (True, True))
    dcp.save({"w": torch.ones(2), "seen": {}}, checkpoint_id=root / "own")
    for lacking in ({"seen": {"x": {}}}, {"seen": {}, "more": [{}], "other": {}}):
        into = {"w": torch.zeros(2), **lacking}
        dcp.load(into, checkpoint_id=root / "own")
        check_same("ours lacks it too", into, {"w": torch.ones(2), **lacking})


def what_is_refused(root: Path) -> None:
    dcp.save({"d": {"x": torch.arange(4.0)}, "list": [torch.ones(4)], "step": 1}, checkpoint_id=root / "a")
    kept = torch.full((4,), -1.0)
    for tree, words in (
        ({"d": {"x": kept, "y": kept}}, ("state['d']['y']: this call has it, the checkpoint does not",)),
        ({"d": {"x": kept, "n": 1}}, ("state['d']['n']: this call has it, the checkpoint does not",)),
        ({"d": {"x": kept, "in": {"e": {}, "n": None}}}, ("state['d']['in']: this call has it, the checkpoint",)),
        ({"d": {"x": kept}, "other": 1}, ("state['other']: this call has it and the checkpoint does not",)),
        ({"d": {"x": kept}, "other": {"e": {}, "l": []}}, ("state['other']: this call has it and the checkpoint",)),
        ({"list": [kept, {"n": 1}]}, ("state['list'][1]: this call has it, the checkpoint does not",)),
        ({"list": [kept, kept]}, ("state['list'][1]: this call has it, the checkpoint does not",)),
        ({"d": {"x": torch.zeros(5)}}, ("state['d']['x']: shape [4] in the checkpoint, [5] here",)),
        ({"d": {"x": torch.zeros(4).double()}}, ("float32 in the checkpoint, float64 here", "cast=True")),
    ):
        refused(lambda tree=tree: dcp.load(tree, checkpoint_id=root / "a"), fsdp_optim.StateError, *words)
    check_same("nothing was filled", kept, torch.full((4,), -1.0))
    refused(lambda: dcp.load({"d": 1}, checkpoint_id=root / "none"), fsdp_optim.CheckpointError, "none")
    refused(lambda: dcp.save({"d": 1}), fsdp_optim.StateError, "checkpoint_id=")
    refused(lambda: dcp.save([1], checkpoint_id=root / "b"), fsdp_optim.StateError, "state_dict must be a dict")


def groups_of_ranks(root: Path) -> None:
    """Two halves of the job save and load by themselves, and one rank alone."""
    rank = dist.get_rank()
    halves = [dist.new_group(list(range(WORLD // 2))), dist.new_group(list(range(WORLD // 2, WORLD)))]
    half = rank // (WORLD // 2)
    path = root / f"half {half}"
    dcp.save({"x": torch.full((3,), float(half))}, checkpoint_id=path, process_group=halves[half])
    into = {"x": torch.zeros(3)}
    dcp.load(into, checkpoint_id=path, process_group=halves[half])
    check_same("a half", into["x"], torch.full((3,), float(half)))
    if rank == 1:
        dcp.save({"x": torch.ones(3), "n": 1}, checkpoint_id=root / "alone", no_dist=True)
        alone = {"x": torch.zeros(3), "n": 0}
        dcp.load(alone, checkpoint_id=root / "alone", no_dist=True)
        check_same("alone", alone, {"x": torch.ones(3), "n": 1})
    dist.barrier()


def at_another_world_size(root: Path) -> None:
    for name, tree_of in (("nested", nested), ("app", app)):
        for way in ("ours", "torch's files", "torch wrote"):
            torch.manual_seed(0)
            model, optim = trained(seed=1)
            into = tree_of(model, optim)
            dcp.load(into, checkpoint_id=root / "trees_of_trainers" / f"{name}, {way}")
            if name == "nested":
                set_state_dict(model, optim, model_state_dict=into["model"], optim_state_dict=into["optim"])
            stored = load_file(root / "trees_of_trainers" / "nested, ours" / "model.safetensors")
            check_same(f"{name}, {way}", complete(get_state_dict(model, optim)[0]), stored)


def on_ranks(root: Path) -> None:
    for case in (
        trees_of_trainers,
        plain_values_and_identity,
        ends_of_lists,
        empty_dicts,
        what_is_refused,
        groups_of_ranks,
    ):
        case(root / case.__name__)


class SaveLoadTest(unittest.TestCase):
    def test_on_ranks(self) -> None:
        root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, root)
        run_on_ranks(on_ranks, WORLD, root)
        run_on_ranks(at_another_world_size, 2, root)


if __name__ == "__main__":
    unittest.main()
