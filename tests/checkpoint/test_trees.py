"""Trees of tensors in `state=`: saved by all ranks as one full tensor each, and read into any cut, in place."""

from __future__ import annotations

import io
import unittest
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_same, error_text, refused
from kit.cut_trees import FULL, complete, cut, emptied, meshes, numbers
from kit.folders import InFolder
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import fsdp_optim
from fsdp_optim.checkpoint.load.tree_targets import TreeTargets
from fsdp_optim.testing import run_on_ranks

QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)
WORLD = 4


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(1, 1)


def save(path: Path, state: Any, model: nn.Module | None = None, **more: Any) -> None:
    fsdp_optim.save(path, model or small_model(), state=state, **{"options": QUIET, **more})


def load(path: Path, state: Any, model: nn.Module | None = None, **more: Any) -> fsdp_optim.LoadResult:
    return fsdp_optim.load(path, model or small_model(), state=state, **more)


# ------------------------------------------------------------------------------------------- cases on ranks


def every_cut(root: Path) -> None:
    torch.manual_seed(0)
    flat, grid = meshes()
    tree = {"ema": OrderedDict(cut(flat, grid)), "listed": [numbers(3), (numbers(2, first=9), "text")], "step": 7}
    for format in ("safetensors", "dcp"):
        path = root / format
        save(path, {"tree": tree}, format=format)
        for other in (False, True):
            into = {
                "ema": OrderedDict(emptied(cut(flat, grid, other=other))),
                "listed": emptied(tree["listed"]),
                "step": 0,
            }
            held = into["ema"]["rows"], into["listed"][1][0]
            result = load(path, {"tree": into})
            for name, full in FULL.items():
                check_same(f"{format}: {name}", complete(into["ema"][name]), full)
            check_same(
                "in a list and in a tuple", [into["listed"][0], into["listed"][1][0]], [numbers(3), numbers(2, first=9)]
            )
            check_same(
                "plain values come back",
                (result.state["tree"]["step"], result.state["tree"]["listed"][1][1]),
                (7, "text"),
            )
            is_same = result.state["tree"]["ema"]["rows"] is held[0] and result.state["tree"]["listed"][1][0] is held[1]
            check_same("the result has the tensors that were filled", is_same, True)
            kinds = type(result.state["tree"]["ema"]), type(result.state["tree"]["listed"][1])
            check_same("containers", kinds, (OrderedDict, tuple))
    if dist.get_rank() == 0:
        stored = load_file(root / "safetensors" / "state.safetensors")
        check_same("the file", {name: stored[f"tree.ema.{name}"] for name in FULL}, FULL)


def stateful_objects(root: Path) -> None:
    """An object of sharded tensors gets them as its own are cut; state_dict() is not written to."""

    class Ema:
        def __init__(self, tree: dict[str, Any]) -> None:
            self.tree, self.loaded = tree, None

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.tree, "decay": 0.9}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state
            if state["decay"] > 1:
                raise ValueError("a decay above one")

    flat, grid = meshes()
    ema = Ema(cut(flat, grid))
    save(root / "a", {"ema": ema})
    into = Ema(emptied(cut(flat, grid, other=True)))
    before = {name: complete(tensor).clone() for name, tensor in into.tree.items()}
    result = load(root / "a", {"ema": into})
    assert into.loaded is not None
    for name, full in FULL.items():
        given = into.loaded["shadow"][name]
        check_same(f"{name}: class", type(given), type(into.tree[name]))
        if isinstance(given, DTensor):
            check_same(f"{name}: its cut", given.placements, into.tree[name].placements)
        check_same(name, complete(given), full)
        check_same(f"{name}: what state_dict() returned is not written to", complete(into.tree[name]), before[name])
    check_same("in the result", result.state["ema"]["decay"], 0.9)

    changed = Ema({**emptied(cut(flat, grid)), "copies": torch.zeros(9), "half": torch.zeros(2, 6).t().bfloat16()})
    load(root / "a", {"ema": changed})
    check_same("of another shape", changed.loaded["shadow"]["copies"], FULL["copies"])
    check_same("of other strides", complete(changed.loaded["shadow"]["half"]), FULL["half"])

    fresh = Ema({})  # it has no tensors yet, so it gets them complete
    load(root / "a", {"ema": fresh})
    check_same("complete tensors", fresh.loaded, {"shadow": FULL, "decay": 0.9})

    model = fully_shard(nn.Linear(4, 6), mesh=flat)
    average = fully_shard(nn.Linear(4, 6), mesh=flat)
    save(root / "b", {"average": average}, model)
    other = fully_shard(nn.Linear(4, 6), mesh=flat)
    load(root / "b", {"average": other}, model)
    for name, param in average.named_parameters():
        check_same(name, other.get_parameter(name).full_tensor(), param.full_tensor())


def ranks_with_different_trees(root: Path) -> None:
    """Trees are joined by the keys of their dicts; what cannot be joined is refused on all ranks."""
    rank = dist.get_rank()
    own = {f"expert.{rank}": numbers(4, 2, first=10 * rank), "shared": numbers(3), "rank": rank}
    save(root / "a", {"experts": own, "only": {f"on {rank}": rank}})
    if rank == 0:
        wanted = {f"experts.expert.{r}": numbers(4, 2, first=10 * r) for r in range(WORLD)} | {
            "experts.shared": numbers(3)
        }
        check_same("the file", load_file(root / "a" / "state.safetensors"), wanted)
    moved = {f"expert.{(rank + 1) % WORLD}": torch.zeros(4, 2)}
    result = load(root / "a", {"experts": moved, "only": None}, strict=False)
    check_same(
        "another rank's expert", moved[f"expert.{(rank + 1) % WORLD}"], numbers(4, 2, first=10 * ((rank + 1) % WORLD))
    )
    check_same("plain values of the lowest rank", result.state["experts"]["rank"], 0)
    check_same("values of one rank alone", result.state["only"], {f"on {r}": r for r in range(WORLD)})

    for state, words in (
        (
            {"x": [numbers(1)] * (1 + rank % 2)},
            ("state['x']: has 1 items on a lower rank and 2 items on rank 1", "per_rank("),
        ),
        ({"x": numbers(1) if rank else {"a": 1}}, ("state['x']: has a dict on a lower rank and a tensor on rank 1",)),
        ({"x": {"a.b": numbers(1)} if rank else {"a": {"b": numbers(1)}}}, ("both would be the tensor x.a.b",)),
        ({"x": numbers(3, first=rank)}, ("state.x: its elements are not the same on", "on_replica_mismatch")),
    ):
        refused(lambda state=state: save(root / "refused", state), fsdp_optim.StateError, *words)
    save(
        root / "lowest",
        {"x": numbers(3, first=rank)},
        options=fsdp_optim.SaveOptions(durable=False, on_replica_mismatch="lowest_rank"),
    )
    check_same("the lowest rank's", load(root / "lowest", None).state["x"], numbers(3))


def what_is_refused(root: Path) -> None:
    flat, grid = meshes()
    partial = DTensor.from_local(numbers(2, 2), flat, [Partial()])
    refused(lambda: save(root / "p", {"t": {"sum": partial}}), fsdp_optim.WrapperError, "state.t.sum", "P(sum)")
    refused(
        lambda: save(root / "p", {"t": {"a.b": numbers(1), "a": {"b": numbers(1)}}}),
        fsdp_optim.StateError,
        "state['t']['a.b']",
        "state['t']['a']['b']",
        "t.a.b",
    )
    refused(
        lambda: save(root / "p", {"own": fsdp_optim.per_rank({"t": cut(flat, grid)["rows"]})}),
        fsdp_optim.StateError,
        "state['own']['t']",
        "without per_rank()",
    )

    save(root / "a", {"t": {"w": numbers(4, 2), "b": numbers(2)}})
    fill = {"w": torch.full((4, 2), -1.0), "b": torch.full((2,), -1.0)}
    for state, more, words in (
        ({"w": torch.zeros(4, 2)}, {}, ("state['t']['b']: the checkpoint has it, this call does not", "strict=False")),
        ({**fill, "c": torch.zeros(1)}, {}, ("state['t']['c']: this call has it, the checkpoint does not",)),
        ({**fill, "b": torch.zeros(3)}, {}, ("state['t']['b']: shape [2] in the checkpoint, [3] here",)),
        (
            {**fill, "b": torch.zeros(2).double()},
            {},
            ("state['t']['b']: float32 in the checkpoint, float64 here", "cast=True"),
        ),
        (
            {**fill, "b": torch.zeros(2).long()},
            {"options": fsdp_optim.LoadOptions(cast=True)},
            ("float32 in the checkpoint, int64 here",),
        ),
        ({**fill, "b": torch.zeros(1).expand(2)}, {}, ("state['t']['b']: its elements share memory",)),
    ):
        refused(lambda state=state, more=more: load(root / "a", {"t": state}, **more), fsdp_optim.StateError, *words)
    check_same("nothing was filled", fill, {"w": torch.full((4, 2), -1.0), "b": torch.full((2,), -1.0)})
    cast = {"w": torch.zeros(4, 2).double(), "b": torch.zeros(2).bfloat16()}
    load(root / "a", {"t": cast}, options=fsdp_optim.LoadOptions(cast=True))
    check_same("cast", cast, {"w": numbers(4, 2).double(), "b": numbers(2).bfloat16()})
    some = {"w": torch.zeros(4, 2), "c": torch.full((1,), -1.0)}
    result = load(root / "a", {"t": some}, strict=False)
    check_same("keys", (result.missing_keys, result.unexpected_keys), (("state['t']['c']",), ("state['t']['b']",)))
    check_same("filled", some, {"w": numbers(4, 2), "c": torch.full((1,), -1.0)})


def async_and_managed(root: Path) -> None:
    flat, grid = meshes()
    tree = cut(flat, grid)
    handle = fsdp_optim.async_save(root / "async", nn.Linear(1, 1), state={"t": tree}, options=QUIET)
    for tensor in tree.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()  # training continues
    handle.wait()
    into = emptied(cut(flat, grid, other=True))
    load(root / "async", {"t": into})
    for name, full in FULL.items():
        check_same(f"async: {name}", complete(into[name]), full)

    model = fully_shard(nn.Linear(4, 6), mesh=flat)
    tree = cut(flat, grid)
    with fsdp_optim.CheckpointManager(root / "run", model, state={"t": tree}) as manager:
        manager.save(3)
    into = emptied(cut(flat, grid, other=True))
    with fsdp_optim.CheckpointManager(root / "run", model, state={"t": into}) as manager:
        check_same("the step", manager.resume(), 3)
    for name, full in FULL.items():
        check_same(f"manager: {name}", complete(into[name]), full)


def a_failing_rank(root: Path) -> None:
    """One rank's object refuses: nothing is filled, on any rank."""

    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"x": numbers(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if dist.get_rank() == 2:
                raise ValueError("not today")

    flat, grid = meshes()
    save(root / "a", {"t": cut(flat, grid), "picky": Picky()})
    into = emptied(cut(flat, grid))
    refused(lambda: load(root / "a", {"t": into, "picky": Picky()}), fsdp_optim.StateError, "not today")
    for name, full in FULL.items():
        check_same(name, complete(into[name]), emptied(full))


def compared(root: Path) -> None:
    """`compare=True` reads the tensors of trees again, and finds those that are not what was saved, on any rank."""
    flat, grid = meshes()
    compare = fsdp_optim.LoadOptions(compare=True, cast=True)

    class Ignoring:
        def state_dict(self) -> dict[str, Any]:
            return {"x": numbers(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    save(root / "a", {"t": cut(flat, grid), "listed": [numbers(3)], "object": Ignoring()})
    into = {**emptied(cut(flat, grid, other=True)), "columns": torch.zeros(3, 10).double()}
    load(root / "a", {"t": into, "listed": [torch.zeros(3)], "object": Ignoring()}, options=compare)
    check_same("cast", into["columns"], FULL["columns"].double())
    for rank, name in ((1, "rows"), (0, "listed")):
        wrong = {"t": emptied(cut(flat, grid, other=True)), "listed": [torch.full((3,), -1.0)], "object": Ignoring()}
        with mock.patch.object(
            TreeTargets, "install", _leaving(name) if dist.get_rank() == rank else TreeTargets.install
        ):
            refused(
                lambda wrong=wrong: load(root / "a", wrong, options=compare),
                fsdp_optim.CheckpointError,
                f"rank {rank}",
                "state.listed.0" if name == "listed" else "state.t.rows",
                "differs from state.safetensors",
            )


def _leaving(name: str) -> Any:
    """An `install` that forgets some tensors."""
    install = TreeTargets.install
    return lambda self, keys: install(self, [key for key in keys if name not in key])


def beside_a_model_of_torch(root: Path) -> None:
    """Tensors beside the model in a folder of torch.distributed.checkpoint, cut by its ranks."""
    flat, grid = meshes()
    model = fully_shard(nn.Linear(4, 6), mesh=flat)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model_dict, optim_dict = get_state_dict(model, optim)
    tree = {"model": model_dict, "optimizer": optim_dict, "ema": cut(flat, grid), "count": 3}
    torch.distributed.checkpoint.save(tree, checkpoint_id=root / "torch")
    read_from_torch(root)


def read_from_torch(root: Path) -> None:
    flat, grid = meshes()
    model = fully_shard(nn.Linear(4, 6), mesh=flat)
    into = emptied(cut(flat, grid, other=True))
    result = fsdp_optim.load(root / "torch", model, state={"ema": into, "count": None})
    for name, full in FULL.items():
        check_same(name, complete(into[name]), full)
    check_same("a plain value", result.state["count"], 3)


def at_another_world_size(root: Path) -> None:
    read_from_torch(root / "beside_a_model_of_torch")
    flat, grid = meshes()
    into = emptied(cut(flat, grid, other=True))
    load(root / "every_cut" / "safetensors", {"tree": {"ema": into, "listed": [torch.zeros(3), (torch.zeros(2), "")]}})
    for name, full in FULL.items():
        check_same(name, complete(into[name]), full)


def on_ranks(root: Path) -> None:
    for case in (
        every_cut,
        stateful_objects,
        ranks_with_different_trees,
        what_is_refused,
        async_and_managed,
        a_failing_rank,
        compared,
        beside_a_model_of_torch,
    ):
        case(root / case.__name__)


# ------------------------------------------------------------------------------------------- one process


class TreesTest(InFolder):
    def test_on_ranks(self) -> None:
        run_on_ranks(on_ranks, WORLD, self.root)
        run_on_ranks(at_another_world_size, 2, self.root)
        tree = {
            "ema": {name: torch.full_like(full, 0) for name, full in FULL.items()},
            "listed": [torch.zeros(3), (torch.zeros(2), "")],
        }
        for model in (nn.Linear(1, 1), None):
            emptied_tree = emptied(tree)
            fsdp_optim.load(self.root / "every_cut" / "dcp", model, state={"tree": emptied_tree})
            check_same("one process", dict(emptied_tree["ema"]), FULL)

    def test_values_that_nothing_asks_for_are_read_on_access(self) -> None:
        big = torch.arange(20_000_000, dtype=torch.float32)
        save(self.root / "a", {"big": {"x": big}, "small": {"y": numbers(3)}})
        result = load(self.root / "a", None)
        self.assertLess(result.nbytes, 1000)
        check_same("small", result.state["small"], {"y": numbers(3)})
        check_same("big", result.state["big"]["x"], big)
        later = load(self.root / "a", {"big": None, "small": None})
        save(self.root / "a", {"big": {"x": big}}, overwrite=True)
        kind, text = error_text(lambda: later.state["big"])
        self.assertEqual(kind, "CheckpointError")
        self.assertIn("replaced by another checkpoint after the load", text)

    def test_tensors_that_are_not_contiguous(self) -> None:
        held = numbers(6, 4)
        save(self.root / "a", {"x": {"t": held.t(), "every": held[::2, 1:]}, "y": [held[1:]]})
        for model in (small_model(), None):
            room = torch.full((8, 12), -1.0)
            into = {"x": {"t": torch.zeros(6, 4).t(), "every": room[1:7:2, ::4]}, "y": [torch.zeros(5, 9)[:, 5:]]}
            fsdp_optim.load(self.root / "a", model, state=into)
            check_same("t", into["x"]["t"], held.t())
            check_same("every", into["x"]["every"], held[::2, 1:])
            check_same("a part of a tensor", into["y"][0], held[1:])

    def test_torch_reads_and_writes_the_same_keys(self) -> None:
        tree = {"ema": {"a.weight": numbers(4, 3), "n": 3}, "listed": [numbers(2), (numbers(2, first=5),)]}
        save(self.root / "ours", {"tree": tree}, format="dcp")
        into = {"tree": {"ema": {"a.weight": torch.zeros(4, 3), "n": 0}}}
        torch.distributed.checkpoint.load(into, checkpoint_id=self.root / "ours", no_dist=True)
        check_same("torch's load", into["tree"]["ema"], {"a.weight": numbers(4, 3), "n": 3})
        check_same("ours", load(self.root / "ours", None).state["tree"], tree)

    def test_conversions_keep_trees(self) -> None:
        tree = {"ema": {"w": numbers(40, 3), "n": 3}, "listed": [numbers(2), (numbers(2, first=5),)]}
        save(self.root / "0", {"tree": tree})
        for number, format in enumerate(["dcp", "safetensors", "safetensors", "torch", "safetensors"]):
            fsdp_optim.convert(self.root / str(number), self.root / str(number + 1), format=format)
            fsdp_optim.verify(self.root / str(number + 1))
            check_same(format, load(self.root / str(number + 1), None).state["tree"], tree)
        self.assertEqual(fsdp_optim.diff(self.root / "0", self.root / "3").differing, ())
        changed = {**tree, "ema": {"w": numbers(40, 3) + 1, "n": 3}}
        save(self.root / "changed", {"tree": changed})
        differing = fsdp_optim.diff(self.root / "0", self.root / "changed").differing
        self.assertEqual([value.name for value in differing], ["state=:tree.ema.w"])

    def test_one_process_compares(self) -> None:
        save(self.root / "a", {"x": {"w": numbers(6, 4), "n": 1}})
        compare = fsdp_optim.LoadOptions(compare=True)
        fsdp_optim.load(
            self.root / "a", state={"x": {"w": torch.zeros(6, 4).t().contiguous().t(), "n": 0}}, options=compare
        )
        for model in (small_model(), None):
            with mock.patch.object(TreeTargets, "install", _leaving("w")):
                refused(
                    lambda model=model: fsdp_optim.load(
                        self.root / "a", model, state={"x": {"w": torch.zeros(6, 4)}}, options=compare
                    ),
                    fsdp_optim.CheckpointError,
                    "state.x.w",
                    "differs from state.safetensors",
                )

    def test_diff_names_plain_values(self) -> None:
        first = {"x": {"w": numbers(3), "step": 7, "text": "a", "same": (1, "b"), "data": io.BytesIO(b"ab"), "old": 1}}
        second = {
            "x": {"w": numbers(3), "step": 8, "text": "b", "same": (1, "b"), "data": io.BytesIO(b"abc"), "new": None}
        }
        for number, state in enumerate((first, second)):
            save(self.root / str(number), state)
        differences = fsdp_optim.diff(self.root / "0", self.root / "1")
        self.assertEqual(
            {(value.name, value.a, value.b) for value in differences.objects},
            {
                ("state=:x.step", "7", "8"),
                ("state=:x.text", "'a'", "'b'"),
                ("state=:x.data", "a BytesIO of 2 bytes", "a BytesIO of 3 bytes"),
            },
        )
        self.assertEqual((differences.only_in_a, differences.only_in_b), (("state=:x.old",), ("state=:x.new",)))
        self.assertEqual(differences.differing, ())
        self.assertFalse(differences.equal)
        self.assertTrue(fsdp_optim.diff(self.root / "0", self.root / "0").equal)
        step = fsdp_optim.diff(self.root / "0", self.root / "1", match="state=:x.st*")
        self.assertEqual([value.name for value in step.objects], ["state=:x.step"])

    def test_damage_in_a_tree_is_found(self) -> None:
        save(self.root / "a", {"tree": {"w": numbers(400, 3)}})
        file = self.root / "a" / "state.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        for call in (
            lambda: fsdp_optim.verify(self.root / "a"),
            lambda: load(self.root / "a", {"tree": {"w": torch.zeros(400, 3)}}),
        ):
            kind, text = error_text(call)
            self.assertEqual(kind, "CheckpointError")
            self.assertIn("state.safetensors", text)
            self.assertIn("tree.w", text)

    def test_only_checkpoints_with_tensors_in_trees_have_the_new_version(self) -> None:
        for name, state, version in (("a", {"n": 1}, 2), ("b", {"n": numbers(1)}, 4)):
            save(self.root / name, state)
            self.assertIn(f'"version":{version}', (self.root / name / "fsdp_optim.json").read_text())


if __name__ == "__main__":
    unittest.main()
