"""`Writer` and `Reader` under torch's own save and load: bit for bit against the complete tensors, on 2 and 4 ranks."""

from __future__ import annotations

import os
import signal
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.compare import check_same
from kit.cut_trees import FULL, complete, emptied, meshes, numbers
from kit.cut_trees import cut as cut_over
from kit.folders import InFolder
from kit.forked import run
from parameterized import parameterized
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_optim
from fsdp_optim.dcp import Reader, Writer
from fsdp_optim.testing import run_on_ranks

WORLD = 4


VALUES = {
    "step": 7,
    "text": "é",
    "listed": [1, (2.5, None)],
    "data": b"\0\xff",
    "object": range(3),
    "nan": float("inf"),
}


def cut(*, other: bool = False) -> dict[str, Any]:
    """Each of FULL, cut over ranks."""
    return cut_over(*meshes(), other=other)


def check_file(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    """The tensors that safetensors finds in the file, in any order."""
    there = load_file(path / "state.safetensors")
    check_same("safetensors", dict(sorted(there.items())), dict(sorted(wanted.items())))


def error_of(call: Callable[[], Any]) -> str:
    """The text of torch's error, which is no Exception."""
    try:
        call()
    except dcp.api.CheckpointException as error:
        return str(error)
    return "no error"


def on_lowest(check: Callable[[], None]) -> None:
    """What one rank alone checks, while the others wait."""
    if dist.get_rank() == 0:
        check()
    dist.barrier()


# ------------------------------------------------------------------------------------------- cases on ranks


def every_cut(root: Path) -> None:
    path = root / "a"
    held = {"model": cut(), **VALUES}
    dcp.save(held, storage_writer=Writer(path, durable=False))
    into = {"model": cut(other=True), **dict.fromkeys(VALUES)}
    into["model"] = emptied(into["model"])
    dcp.load(into, storage_reader=Reader(path))
    check_same("into other cuts", complete(into), {"model": FULL, **VALUES})
    small = {"model": emptied(cut(other=True)), **dict.fromkeys(VALUES)}
    dcp.load(small, storage_reader=Reader(path, bucket_nbytes=24))
    check_same("in small windows", complete(small), {"model": FULL, **VALUES})

    def look() -> None:
        check_file(path, {f"model.{name}": full for name, full in FULL.items()})
        assert fsdp_optim.verify(path).has_checksums
        tree = {
            "model": emptied({name: full.clone(memory_format=torch.contiguous_format) for name, full in FULL.items()})
        }
        result = fsdp_optim.load(path, None, state=tree, strict=False)
        check_same("our load", tree["model"], FULL)
        check_same("values", {name: result.state[name] for name in VALUES}, VALUES)

    on_lowest(look)


def small_memory(root: Path) -> None:
    """A writer with a few bytes for copies writes the same."""
    path = root / "a"
    dcp.save({"model": cut()}, storage_writer=Writer(path, durable=False, bucket_nbytes=16, checksums=False))
    on_lowest(lambda: check_file(path, {f"model.{name}": full for name, full in FULL.items()}))
    dcp.save({"model": cut()}, storage_writer=Writer(path, durable=False, max_file_size=600))
    names = {file.name for file in path.glob("*.safetensors")}
    assert len(names) > 3, names
    into = {"model": emptied(cut())}
    dcp.load(into, storage_reader=Reader(path))
    check_same("in several files", complete(into), {"model": FULL})


def many_short_rows(root: Path) -> None:
    """More rows than are written one by one, which also meet the segments of other tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = {"a": numbers(3000, 7), "b": numbers(2, 3, 500, first=50_000), "c": numbers(100, 9000, first=9)}
    ways = {"a": Shard(1), "b": Shard(1), "c": Shard(1)}
    dcp.save(
        {name: distribute_tensor(value, mesh, [ways[name]]) for name, value in full.items()},
        storage_writer=Writer(root / "a", durable=False),
    )
    on_lowest(lambda: check_file(root / "a", full))
    on_lowest(lambda: fsdp_optim.verify(root / "a") and None)
    into = {name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]) for name, value in full.items()}
    dcp.load(into, storage_reader=Reader(root / "a"))
    check_same("into rows", complete(into), full)


def ids_and_calls(root: Path) -> None:
    """`checkpoint_id` of the call, a Writer that is used again, an asynchronous save, and ranks with nothing to write."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    writer, reader = Writer(durable=False), Reader()
    for number in range(2):
        full = numbers(1, 3, first=10 * number)  # only one rank has a part
        dcp.save(
            {"w": distribute_tensor(full, mesh, [Shard(0)])}, checkpoint_id=root / str(number), storage_writer=writer
        )
        into = {"w": distribute_tensor(torch.zeros(1, 3), mesh, [Shard(0)])}
        dcp.load(into, checkpoint_id=str(root / str(number)), storage_reader=reader)
        check_same("by checkpoint_id", complete(into), {"w": full})
    held = {"w": distribute_tensor(numbers(8, 3), mesh, [Shard(0)]), "step": 3}
    future = dcp.async_save(held, storage_writer=Writer(root / "0", durable=False))
    held["w"].to_local().zero_()
    future.result()
    into = {"w": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)]), "step": 0}
    dcp.load(into, storage_reader=Reader(root / "0"))
    check_same("a save in the background replaces", complete(into), {"w": numbers(8, 3), "step": 3})


class ToHalf(DefaultSavePlanner):
    """A planner that changes what is written."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        halved = {name: value.to(torch.bfloat16) for name, value in state_dict.items()}
        super().set_up_planner(halved, storage_meta, is_coordinator)


class Unflattened(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


def planners(root: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = numbers(6, 4)
    dcp.save(
        {"w": distribute_tensor(full, mesh, [Shard(0)])},
        storage_writer=Writer(root / "half", durable=False),
        planner=ToHalf(),
    )
    into = {"w": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)])}
    dcp.load(into, storage_reader=Reader(root / "half"))
    check_same("cast as torch casts", complete(into), {"w": full})
    tree = {"plain": {"a": [1, {"b": 2}], "t": numbers(3)}, "w": numbers(2)}
    dcp.save(tree, storage_writer=Writer(root / "tree", durable=False), planner=Unflattened())
    back: dict[str, Any] = {"plain": None, "w": torch.zeros(2)}
    dcp.load(back, storage_reader=Reader(root / "tree"), planner=DefaultLoadPlanner(False, False))
    check_same("dicts as they are", back, tree)


def failing(root: Path) -> None:
    """A rank that fails leaves the checkpoint that was there, on all ranks the error is torch's, and the next save works."""
    path = root / "a"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp.save({"w": distribute_tensor(numbers(8, 3), mesh, [Shard(0)])}, storage_writer=Writer(path, durable=False))
    before = (path / "state.safetensors").read_bytes() if dist.get_rank() == 0 else b""
    new = {"w": distribute_tensor(numbers(8, 3, first=50), mesh, [Shard(0)])}

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == dist.get_world_size() - 1:
                raise OSError("the disk has gone")
            return super().resolve_data(write_item)

    writer = Writer(path, durable=False)
    text = error_of(lambda: dcp.save(new, storage_writer=writer, planner=Failing()))
    assert "the disk has gone" in text, text
    on_lowest(lambda: check_same("untouched", (path / "state.safetensors").read_bytes(), before))
    writer.reset()
    on_lowest(lambda: check_same("nothing is left", [file.name for file in root.iterdir()], ["a"]))
    caching = DefaultSavePlanner(enable_plan_caching=True)
    caching._cached_plans_key = str(root)  # torch keeps the plans for the life of the process
    for planner, words in (
        (caching, "enable_plan_caching"),
        (DefaultSavePlanner(), "complex128"),
    ):
        held: dict[str, Any] = (
            {"w": new["w"]} if words != "complex128" else {"w": torch.ones(2, dtype=torch.complex128)}
        )
        texts = [error_of(partial(dcp.save, held, storage_writer=writer, planner=planner)) for _ in range(2)]
        assert words in texts[1], texts
    dcp.save(new, storage_writer=writer)
    into = {"w": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])}
    dcp.load(into, storage_reader=Reader(path))
    check_same("the next save", complete(into), {"w": numbers(8, 3, first=50)})


def ordinary_folders(root: Path) -> None:
    """What `fsdp_optim.save` has written, under the keys of torch's own dicts, on fewer ranks; and torch's own folders."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(numbers(4, 6)).square().mean().backward()
    optim.step()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ema = {"w": distribute_tensor(numbers(9, 2), mesh, [Shard(0)]), "n": 4}
    state = {"ema": ema, "step": 5}
    fsdp_optim.save(root / "ours", model, optim, state=state, options=fsdp_optim.SaveOptions(durable=False))
    wanted = complete(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optim), **state}
    )
    dcp.save({"model": get_model_state_dict(model), "step": 5}, checkpoint_id=root / "torch")
    held = {
        "model": emptied(get_model_state_dict(model)),
        "optimizer": get_optimizer_state_dict(model, optim),
        "ema": {"w": distribute_tensor(torch.zeros(9, 2), mesh, [Shard(0)]), "n": 0},
        "step": 0,
    }
    held["optimizer"]["state"] = emptied(held["optimizer"]["state"])
    for group in held["optimizer"]["param_groups"]:
        group["lr"] = 0.0
    dcp.load(held, storage_reader=Reader(root / "ours"))
    check_same("ours", complete(held), wanted)
    other = {"model": emptied(get_model_state_dict(model)), "step": 0}
    dcp.load(other, storage_reader=Reader(root / "torch"))
    check_same("torch's", complete(other), {"model": wanted["model"], "step": 5})


CASES = [every_cut, small_memory, many_short_rows, ids_and_calls, planners, failing, ordinary_folders]


def all_cases(root: Path) -> None:
    for case in CASES:
        folder = root / f"{case.__name__}-{dist.get_world_size()}"
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        case(folder)


KILLED = """
import os, signal, sys, torch, torch.distributed.checkpoint as dcp
from fsdp_optim.dcp import Writer
from fsdp_optim.dcp.storage.staged_save import StagedSave
path, at = {path!r}, {at!r}
def kill(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
if at == "write":
    class Planner(dcp.DefaultSavePlanner):
        resolve_data = kill
else:
    Planner = dcp.DefaultSavePlanner
    StagedSave.commit = kill
dcp.save({{"w": torch.ones(5)}}, storage_writer=Writer(path), planner=Planner(), no_dist=True)
"""


class TestOnRanks(InFolder):
    @parameterized.expand([(2,), (WORLD,)])
    def test_bit_for_bit(self, world: int) -> None:
        run_on_ranks(all_cases, world, self.root)


class TestAlone(InFolder):
    """One process, without a process group."""

    def save(self, name: str, tree: Any, **options: Any) -> None:
        dcp.save(tree, storage_writer=Writer(self.root / name, durable=False, **options), no_dist=True)

    def test_without_ranks(self) -> None:
        self.save("a", {"x": {"w": numbers(3, 2)}, "n": 2}, step=9)
        into = {"x": {"w": torch.zeros(3, 2)}, "n": 0}
        dcp.load(into, storage_reader=Reader(self.root / "a"), no_dist=True)
        check_same("one process", into, {"x": {"w": numbers(3, 2)}, "n": 2})
        self.assertEqual(fsdp_optim.load(self.root / "a").step, 9)
        wider = {"x": {"w": torch.zeros(3, 2, dtype=torch.float64).t().contiguous().t()}, "n": 0}
        dcp.load(wider, storage_reader=Reader(self.root / "a"), no_dist=True)
        check_same("cast, into strides", wider["x"]["w"].contiguous(), numbers(3, 2).double())
        self.save("nothing", {})
        self.save("values", {"a": {"b": 1}})
        values = {"a": {"b": 0}}
        dcp.load(values, storage_reader=Reader(self.root / "values"), no_dist=True)
        check_same("values alone", values, {"a": {"b": 1}})

    def test_conversions(self) -> None:
        tree = {"x": {"w": numbers(30, 2)}, "n": 2}
        self.save("0", tree)
        for number, format in enumerate(["safetensors", "dcp"]):
            fsdp_optim.convert(self.root / str(number), self.root / str(number + 1), format=format)
            into = {"x": {"w": torch.zeros(30, 2)}, "n": 0}
            dcp.load(into, storage_reader=Reader(self.root / str(number + 1)), no_dist=True)
            check_same(format, into, tree)

    def test_places(self) -> None:
        self.assertTrue(Writer.validate_checkpoint_id(self.root) and Reader.validate_checkpoint_id(str(self.root)))
        self.assertFalse(Writer.validate_checkpoint_id("abc://b/c") or Reader.validate_checkpoint_id("abc://b/c"))
        self.save("a", {"w": numbers(2)})
        with self.assertRaisesRegex(dcp.api.CheckpointException, "already exists"):
            self.save("a", {"w": numbers(2)}, overwrite=False)
        with self.assertRaisesRegex(dcp.api.CheckpointException, "the Writer has no path"):
            dcp.save({"w": numbers(2)}, storage_writer=Writer(), no_dist=True)
        (self.root / "mine").mkdir()
        (self.root / "mine" / "notes.txt").write_text("mine")
        with self.assertRaisesRegex(dcp.api.CheckpointException, "is not a checkpoint"):
            self.save("mine", {"w": numbers(2)})

    def test_damage_is_found(self) -> None:
        self.save("a", {"w": numbers(4000)})
        file = self.root / "a" / "state.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        into = {"w": torch.zeros(4000)}
        with self.assertRaisesRegex(dcp.api.CheckpointException, "state.safetensors"):
            dcp.load(into, storage_reader=Reader(self.root / "a"), no_dist=True)
        dcp.load(into, storage_reader=Reader(self.root / "a", verify=False), no_dist=True)
        self.assertEqual(int((into["w"] != numbers(4000)).sum()), 1)

    @parameterized.expand([("write",), ("commit",)])
    def test_a_killed_save_leaves_the_old_checkpoint(self, at: str) -> None:
        self.save("a", {"w": numbers(5)})
        done = run(KILLED.format(path=str(self.root / "a"), at=at))
        self.assertEqual(done.returncode, -signal.SIGKILL, done.stderr)
        into = {"w": torch.zeros(5)}
        dcp.load(into, storage_reader=Reader(self.root / "a"), no_dist=True)
        check_same("the old one", into, {"w": numbers(5)})
        self.save("a", {"w": numbers(5, first=9)})
        self.assertEqual(os.listdir(self.root), ["a"])

    def test_parts_of_a_tensor_that_nobody_has(self) -> None:
        """A plan in which elements are missing, overlap or lie outside is refused by name, before anything is made."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

        def item(first: int, num: int) -> WriteItem:
            chunk = ChunkStorageMetadata(torch.Size([first]), torch.Size([num]))
            data = TensorWriteData(chunk, TensorProperties(), torch.Size([10]))
            return WriteItem(MetadataIndex("w", torch.Size([first])), WriteItemType.SHARD, tensor_data=data)

        for parts, words in (
            ([(0, 4), (6, 4)], r"w: no rank has its elements \[4, 6\) of 10"),
            ([(0, 6), (5, 5)], "overlap"),
            ([(0, 6), (6, 5)], "outside"),
        ):
            writer = Writer(self.root / "a")
            plans = [SavePlan([item(*part)], storage_data="machine") for part in parts]
            with self.assertRaisesRegex(fsdp_optim.CheckpointError, words):
                writer.prepare_global_plan(plans)
            self.assertEqual(os.listdir(self.root), [])


if __name__ == "__main__":
    unittest.main()
