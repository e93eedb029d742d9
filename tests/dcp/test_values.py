"""BytesIO and ShardedTensors in the trees of `dcp.save`: kept, read and written, by every call and in every folder."""

from __future__ import annotations

import io
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from kit.compare import check_same, refused
from kit.cut_trees import complete, emptied, numbers, sharded
from kit.folders import InFolder
from kit.trained import Trained
from kit.wrapping import cpu
from safetensors.torch import load_file
from torch.distributed._shard.sharded_tensor import ShardedTensor

import fsdp_optim
from fsdp_optim import dcp
from fsdp_optim.testing import run_on_ranks

WORLD = 4
QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)

FULL = {
    "rows": numbers(9, 5),
    "few": numbers(2, 3, first=100),  # the last ranks have none
    "line": numbers(13, first=200, dtype=torch.int64),
    "half": numbers(8, 2, first=300, dtype=torch.bfloat16),
}


def buffer(data: bytes, at: int = 0) -> io.BytesIO:
    made = io.BytesIO(data)
    made.seek(at)
    return made


def state_of(value: io.BytesIO) -> tuple[bytes, int]:
    return value.getvalue(), value.tell()


def buffers() -> dict[str, Any]:
    return {"short": buffer(b"\0abc\xff", 2), "none": buffer(b""), "long": [buffer(bytes(range(256)) * 64, 16384), 5]}


def check_buffers(what: str, loaded: dict[str, Any]) -> None:
    wanted = buffers()
    got = {"short": loaded["short"], "none": loaded["none"], "long": loaded["long"][0]}
    for name, value in got.items():
        assert type(value) is io.BytesIO, (what, name, value)
        check_same(f"{what}: {name}", state_of(value), state_of(wanted["long"][0] if name == "long" else wanted[name]))


# ------------------------------------------------------------------------------------------- on ranks


def buffers_of_ranks(root: Path) -> None:
    ways: dict[str, Any] = {
        "ours": lambda tree, path: dcp.save(tree, checkpoint_id=path, options=QUIET),
        "torch's files": lambda tree, path: dcp.save(tree, checkpoint_id=path, format="dcp", options=QUIET),
        "planned": lambda tree, path: dcp.save(tree, checkpoint_id=path, planner=torch_dcp.DefaultSavePlanner()),
        "torch wrote": lambda tree, path: torch_dcp.save(tree, checkpoint_id=path),
        "in the background": _changed_afterwards,
    }
    for name, save in ways.items():
        save({"b": buffers(), "x": numbers(3)}, root / name)
        into: dict[str, Any] = {"b": {"short": None, "none": buffer(b"?"), "long": [None, 0]}, "x": torch.zeros(3)}
        dcp.load(into, checkpoint_id=root / name)
        check_buffers(name, into["b"])
        if name != "ours":
            continue
        own = fsdp_optim.load(root / name)
        check_buffers("in a result", own.state["b"])
    for name in ("torch's files", "torch wrote"):
        into = {"b": {"short": buffer(b"?"), "none": buffer(b"?"), "long": [buffer(b"?"), 0]}, "x": torch.zeros(3)}
        torch_dcp.load(into, checkpoint_id=root / name)
        check_buffers(f"{name}, torch reads", into["b"])
    into = {"b": {"short": buffer(b"?"), "none": buffer(b"?"), "long": [buffer(b"?"), 0]}, "x": torch.zeros(3)}
    dcp.load(into, checkpoint_id=root / "ours", planner=torch_dcp.DefaultLoadPlanner())
    check_buffers("planned load", into["b"])
    fsdp_optim.save(
        root / "own", torch.nn.Linear(1, 1), state={"own": fsdp_optim.per_rank(buffer(b"%d" % dist.get_rank()))}
    )
    result = fsdp_optim.load(root / "own", torch.nn.Linear(1, 1), state={"own": fsdp_optim.per_rank(None)})
    check_same("of each rank", state_of(result.state["own"]), (b"%d" % dist.get_rank(), 0))


def _changed_afterwards(tree: dict[str, Any], path: Path) -> None:
    future = dcp.async_save(tree, checkpoint_id=path, options=QUIET)
    tree["b"]["short"].truncate(0)
    tree["x"].zero_()
    future.result()


def sharded_tensors(root: Path) -> None:
    """By dcp.save and torch's, in either's files, and into ShardedTensors and plain tensors."""
    tree = {"model": {name: sharded(full) for name, full in FULL.items()}, "ema": {"w": sharded(FULL["rows"])}, "n": 3}
    wanted = {"model": FULL, "ema": {"w": FULL["rows"]}, "n": 3}
    dcp.save(tree, checkpoint_id=root / "ours", options=QUIET)
    dcp.save(tree, checkpoint_id=root / "torch's files", format="dcp", options=QUIET)
    torch_dcp.save(tree, checkpoint_id=root / "torch wrote")
    future = dcp.async_save(tree, checkpoint_id=root / "in the background", options=QUIET)
    for value in (*tree["model"].values(), tree["ema"]["w"]):
        for shard in value.local_shards():
            shard.tensor.zero_()
    future.result()
    check_same(
        "the file", dict(sorted(load_file(root / "ours" / "model.safetensors").items())), dict(sorted(FULL.items()))
    )
    read_sharded(root)
    stored = emptied(wanted)
    torch_dcp.load(stored, checkpoint_id=root / "torch's files")
    check_same("torch reads ours", stored["model"], FULL)


def read_sharded(root: Path) -> None:
    wanted = {"model": FULL, "ema": {"w": FULL["rows"]}, "n": 3}
    for name in ("ours", "torch's files", "torch wrote", "in the background"):
        into: dict[str, Any] = {
            "model": {name: emptied(sharded(full)) for name, full in FULL.items()},
            "ema": {"w": emptied(sharded(FULL["rows"]))},
            "n": 0,
        }
        held = [shard.tensor for shard in into["model"]["rows"].local_shards()]
        dcp.load(into, checkpoint_id=root / name)
        check_same(name, complete(into), wanted)
        loaded = [shard.tensor for shard in into["model"]["rows"].local_shards()]
        check_same(f"{name}: in place", [a is b for a, b in zip(held, loaded, strict=True)], [True] * len(held))
        plain = emptied(wanted)
        dcp.load(plain, checkpoint_id=root / name)
        check_same(f"{name}: plain", plain, {**wanted})


def what_is_refused(root: Path) -> None:
    dcp.save({"w": {"x": sharded(FULL["rows"])}}, checkpoint_id=root / "a", options=QUIET)
    kept = emptied(sharded(FULL["rows"]))
    for into, words in (
        ({"x": emptied(sharded(numbers(8, 5)))}, ("state['w']['x']: shape [9, 5] in the checkpoint, [8, 5] here",)),
        ({"x": emptied(sharded(numbers(9, 5).double()))}, ("float32 in the checkpoint, float64 here", "cast=True")),
        ({"x": kept, "y": emptied(sharded(FULL["few"]))}, ("state['w']['y']: this call has it",)),
    ):
        refused(lambda into=into: dcp.load({"w": into}, checkpoint_id=root / "a"), fsdp_optim.StateError, *words)
    check_same("untouched", complete(kept), emptied(FULL["rows"]))
    wider = {"x": emptied(sharded(numbers(9, 5).double()))}
    dcp.load({"w": wider}, checkpoint_id=root / "a", options=fsdp_optim.LoadOptions(cast=True))
    check_same("cast", complete(wider["x"]), FULL["rows"].double())
    refused(
        lambda: fsdp_optim.save(
            root / "b", torch.nn.Linear(1, 1), state={"own": fsdp_optim.per_rank(sharded(FULL["rows"]))}
        ),
        fsdp_optim.StateError,
        "ShardedTensor",
        "without per_rank()",
    )


def fsdp1(root: Path) -> None:
    """The dicts of FSDP1 without a mesh, model and optimizer, saved as a tree and loaded into another."""
    with cpu():
        trained = Trained("FSDP1 orig")
        weights, state = dcp.get_state_dict(trained.model, trained.optim)
        assert any(isinstance(value, ShardedTensor) for value in weights.values())
        dcp.save({"model": weights, "optim": state}, checkpoint_id=root / "a", options=QUIET)
        other = Trained("FSDP1 orig", steps=1)
        into = dict(zip(("model", "optim"), dcp.get_state_dict(other.model, other.optim), strict=True))
        dcp.load(into, checkpoint_id=root / "a")
        check_same("the model", complete(into["model"]), complete(weights))
        check_same("the optimizer", complete(into["optim"]), complete(state))
        fresh = Trained("FSDP1 orig", steps=1)
        fsdp_optim.load(root / "a", fresh.model, fresh.optim)
        again = dcp.get_state_dict(fresh.model, fresh.optim)
        check_same("fsdp_optim.load", complete(list(again)), complete([weights, state]))


def on_ranks(root: Path) -> None:
    for case in (buffers_of_ranks, sharded_tensors, what_is_refused, fsdp1):
        case(root / case.__name__)


def at_another_world_size(root: Path) -> None:
    read_sharded(root / "sharded_tensors")
    into: dict[str, Any] = {"b": {"short": None, "none": None, "long": [None, 0]}, "x": torch.zeros(3)}
    dcp.load(into, checkpoint_id=root / "buffers_of_ranks" / "ours")
    check_buffers("another world size", into["b"])


# ------------------------------------------------------------------------------------------- one process


class Counting:
    """Counts the calls of state_dict()."""

    def __init__(self) -> None:
        self.calls, self.loaded = 0, None

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"x": numbers(3) * self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class ValuesTest(InFolder):
    def test_on_ranks(self) -> None:
        run_on_ranks(on_ranks, WORLD, self.root)
        run_on_ranks(at_another_world_size, 2, self.root)

    def test_conversions_keep_buffers(self) -> None:
        dcp.save({"b": buffers(), "x": numbers(3)}, checkpoint_id=self.root / "0", no_dist=True, options=QUIET)
        for number, format in enumerate(("dcp", "safetensors", "torch", "safetensors")):
            fsdp_optim.convert(self.root / str(number), self.root / str(number + 1), format=format)
            check_buffers(format, fsdp_optim.load(self.root / str(number + 1)).state["b"])
        closed = buffer(b"a")
        closed.close()
        refused(
            lambda: dcp.save({"b": closed}, checkpoint_id=self.root / "c", no_dist=True),
            fsdp_optim.CheckpointError,
            "BytesIO",
        )

    def test_objects_are_asked_once(self) -> None:
        first = Counting()
        dcp.save({"o": first, "n": 1}, checkpoint_id=self.root / "a", no_dist=True, options=QUIET)
        self.assertEqual(first.calls, 1)
        for planner in (None, torch_dcp.DefaultLoadPlanner()):
            into = {"o": Counting(), "n": 0}
            dcp.load(into, checkpoint_id=self.root / "a", planner=planner, no_dist=True)
            self.assertEqual((into["o"].calls, into["n"]), (1, 1))
            check_same("loaded", into["o"].loaded, {"x": numbers(3)})

    def test_a_manifest_is_read_once(self) -> None:
        from fsdp_optim.formats.own import reader

        dcp.save({"n": 1, "x": numbers(3)}, checkpoint_id=self.root / "a", no_dist=True, options=QUIET)
        with mock.patch.object(reader, "manifest_in", wraps=reader.manifest_in) as read:
            dcp.load({"n": 0, "x": torch.zeros(3)}, checkpoint_id=self.root / "a", no_dist=True)
        self.assertEqual(read.call_count, 1)


if __name__ == "__main__":
    unittest.main()
