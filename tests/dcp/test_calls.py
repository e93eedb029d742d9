"""The calls of `fsdp_optim.dcp` as torch's tests make them: the order of objects, and storage by position and in `async_save`."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_same, refused
from kit.models import Net
from kit.wrapping import cpu
from kit.wraps import in_fairscale
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp_optim
from fsdp_optim import dcp
from fsdp_optim.dcp import Reader, Writer
from fsdp_optim.testing import run_on_ranks

WORLD = 3


class Counter:
    """A Stateful object whose methods are collective calls: all ranks must be in the same object."""

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def meet(self) -> None:
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, self.name)
        if names != [self.name] * len(names):
            raise AssertionError(f"{self.name}: other ranks are in {names}")

    def state_dict(self) -> dict[str, Any]:
        self.meet()
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.meet()
        self.value = state["value"]


def counters(first: int) -> dict[str, Any]:
    """Three objects, in another order on each rank."""
    names = [*"abc", *"abc"][dist.get_rank() :][:3]
    return {name: Counter(name, first + ord(name)) for name in names}


def values_of(objects: dict[str, Any]) -> dict[str, int]:
    return {name: objects[name].value for name in sorted(objects)}


def ranks_with_other_orders(root: Path) -> None:
    wanted = values_of(counters(7))
    dcp.save(counters(7), checkpoint_id=root / "dcp")
    into = counters(0)
    order = list(into)
    dcp.load(into, checkpoint_id=root / "dcp")
    check_same("dcp.load", values_of(into), wanted)
    check_same("the order of the caller's dict", list(into), order)
    dcp.async_save(counters(7), checkpoint_id=root / "later").result()
    model = torch.nn.Linear(2, 2)
    fsdp_optim.save(
        root / "own", model, state=counters(7), options=fsdp_optim.SaveOptions(on_replica_mismatch="lowest_rank")
    )
    into = counters(0)
    fsdp_optim.load(root / "own", model, state=into)
    check_same("fsdp_optim.load", values_of(into), wanted)


def storage_as_the_second_argument(root: Path) -> None:
    dcp.save({"x": torch.arange(3.0)}, Writer(root / "a"))
    into = {"x": torch.zeros(3)}
    dcp.load(into, Reader(root / "a"))
    check_same("by position", into["x"], torch.arange(3.0))


class Doubling(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item) * 2


def in_the_background(root: Path) -> None:
    """A storage or a planner of a save in the background goes to torch's own call."""
    wanted = {"x": torch.arange(3.0)}
    for name, given, factor in (
        ("writer", {"storage_writer": Writer(root / "writer")}, 1),
        ("planner", {"checkpoint_id": root / "planner", "planner": Doubling()}, 2),
        ("own", {"checkpoint_id": root / "own"}, 1),
    ):
        future = dcp.async_save({"x": torch.arange(3.0)}, **given)
        check_same(f"{name}: a Future", isinstance(future, Future), True)
        future.result()
        into = {"x": torch.zeros(3)}
        dcp.load(into, checkpoint_id=root / name)
        check_same(name, into, {"x": wanted["x"] * factor})
    if dist.get_rank() == 1:
        dcp.async_save(wanted, checkpoint_id=root / "alone", no_dist=True).result()
        into = {"x": torch.zeros(3)}
        dcp.load(into, checkpoint_id=root / "alone", no_dist=True)
        check_same("alone", into, wanted)
    dist.barrier()


def tensors_without_memory(root: Path) -> None:
    """Tensors on the meta device get memory, in the dicts that the caller has; an object there is refused."""
    mesh = init_device_mesh("cpu", (WORLD,))
    full = torch.arange(10.0).view(5, 2)  # uneven on three ranks
    dcp.save(
        {"model": {"w": distribute_tensor(full, mesh, [Shard(0)]), "b": full[0]}, "o": [full]}, checkpoint_id=root / "a"
    )
    with torch.device("meta"):
        inner = {
            "w": DTensor.from_local(
                torch.empty(2 if dist.get_rank() < 2 else 1, 2),
                mesh,
                [Shard(0)],
                shape=(5, 2),
                stride=(2, 1),
                run_check=False,
            )
        }
        into: dict[str, Any] = {"model": inner | {"b": torch.empty(2)}, "o": [torch.empty(5, 2)]}
    model, others = into["model"], into["o"]
    dcp.load(into, checkpoint_id=root / "a")
    check_same("the caller's dict and list", [into["model"] is model, into["o"] is others], [True, True])
    check_same("DTensor", model["w"].full_tensor(), full)
    check_same("placements", model["w"].placements == (Shard(0),), True)
    check_same("others", [model["b"], *others], [full[0], full])
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    dcp.save({"model": torch.nn.Linear(2, 2)}, checkpoint_id=root / "b")
    refused(lambda: dcp.load({"model": module}, checkpoint_id=root / "b"), fsdp_optim.WrapperError, "meta device")


class Process:
    value = "process"


def refusals(root: Path) -> None:
    refused(
        lambda: dcp.async_save({"x": 1}, checkpoint_id=root / "a", async_checkpointer_type=Process),
        fsdp_optim.StateError,
        "async_checkpointer_type=",
        "writes in a thread",
        "storage_writer=",
    )
    refused(lambda: dcp.async_save({"x": 1}), fsdp_optim.StateError, "checkpoint_id=")


def fairscale_has_no_form(root: Path) -> None:
    with cpu():
        for flat in (True, False):
            model = in_fairscale(Net(), flatten_parameters=flat)
            optim = torch.optim.Adam(model.parameters())
            for call in (
                lambda model=model, optim=optim: dcp.get_optimizer_state_dict(model, optim),
                lambda model=model, optim=optim: dcp.get_state_dict(model, optim),
                lambda model=model, optim=optim: dcp.set_optimizer_state_dict(model, optim, {}),
                lambda model=model: dcp.set_model_state_dict(model, {}),
            ):
                refused(call, fsdp_optim.WrapperError, "fairscale's FSDP", "torch's dicts have no form")


def on_ranks(root: Path) -> None:
    for case in (
        fairscale_has_no_form,
        ranks_with_other_orders,
        storage_as_the_second_argument,
        in_the_background,
        tensors_without_memory,
        refusals,
    ):
        case(root / case.__name__)


class CallsTest(unittest.TestCase):
    def test_on_ranks(self) -> None:
        root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, root)
        run_on_ranks(on_ranks, WORLD, root)

    def test_torchs_converter_reads_a_model_alone(self) -> None:
        from torch.distributed.checkpoint import format_utils

        with tempfile.TemporaryDirectory() as root, mock.patch.object(format_utils, "FileSystemReader", Reader):
            model = torch.nn.Linear(2, 3)
            dcp.save({"model": model}, checkpoint_id=f"{root}/a")
            format_utils.dcp_to_torch_save(f"{root}/a", f"{root}/model.pt")
            check_same("model.pt", torch.load(f"{root}/model.pt"), {"model": dict(model.state_dict())})


if __name__ == "__main__":
    unittest.main()
