"""DTensors that are cut in another way than torch cuts: veScale's RaggedShard (a stand-in), Megatron-FSDP's, mistakes."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._dtensor_spec as specs
from kit.cases import expand, some
from kit.checkpoints import load, save
from kit.compare import check_same
from kit.tables import Table
from kit.trained import STEPS, Oracle, Trained
from kit.uneven import (
    UNEVEN,
    RaggedShard,
    StridedRaggedShard,
    dtensor,
    in_buffer,
    replace_params,
)
from kit.wrapping import check_full, check_trip, snapshot
from parameterized import parameterized
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp_optim
from fsdp_optim.errors import FsdpOptimError
from fsdp_optim.testing import run_on_ranks

ShardOrderEntry: Any = getattr(specs, "ShardOrderEntry", None)


def trip(kind: str) -> None:
    wrap, _ = UNEVEN[kind]
    check_trip(wrap)
    uneven, plain = Trained(wrap), Trained("plain", steps=0)
    fsdp_optim.transfer_optim_state(uneven.model, uneven.optim, plain.model, plain.optim)
    check_full("transferred to plain", plain.gather(None), Oracle().full())
    back = Trained(wrap, steps=0)
    fsdp_optim.transfer_optim_state(plain.model, plain.optim, back.model, back.optim)
    check_full("transferred back", back.gather(None), Oracle().full())


TRIPS = Table(trip, *some([(size, kind) for kind, (_, sizes) in UNEVEN.items() for size in sizes], every=2))


def save_to(path: Path, kinds: list[str]) -> None:
    for kind in kinds:
        uneven = Trained(UNEVEN[kind][0])
        before = snapshot(uneven)
        save(path / kind, uneven)
        check_same("after saving", snapshot(uneven), before)


def load_from(path: Path, saved: list[str], kinds: list[str]) -> None:
    for kind in saved:
        for wrap in [*(UNEVEN[other][0] for other in kinds), "FSDP2"]:
            target = Trained(wrap, steps=1)
            load(path / kind, target, compare=True)
            alike = Trained(wrap)
            check_same("loaded", snapshot(target)["values"], snapshot(alike)["values"])
            check_full("loaded", target.gather(None), Oracle().full())
            target.step(range(STEPS, STEPS + 1))
            check_full("trained on", target.gather(None), Oracle(steps=STEPS + 1).full())


class UnevenTest(unittest.TestCase):
    @expand(*TRIPS.soon_and_later)
    def test_every_verb(self, world_size: int, kind: str) -> None:
        """A round trip with uneven parts, and ranks without a part."""
        TRIPS(world_size, kind)

    @expand(soon=[(4, 3), (2, 4)], later=[(3, 2), (1, 4)])
    def test_save_and_load(self, saved: int, loaded: int) -> None:
        """A round trip into every other cut that the ranks can have, and into FSDP2."""
        kinds = {size: [kind for kind, (_, sizes) in UNEVEN.items() if size in sizes] for size in (saved, loaded)}
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_to, saved, Path(folder), kinds[saved], timeout=200)
            run_on_ranks(load_from, loaded, Path(folder), kinds[saved], kinds[loaded], timeout=200)


def from_fsdp2(path: Path) -> None:
    save(path, Trained("FSDP2"))


def into_uneven(path: Path) -> None:
    for kind, (wrap, sizes) in UNEVEN.items():
        if dist.get_world_size() in sizes:
            target = Trained(wrap, steps=0)
            load(path, target)
            check_full(kind, target.gather(None), Oracle().full())


class FromFSDP2Test(unittest.TestCase):
    def test_a_checkpoint_of_fsdp2(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(from_fsdp2, 2, Path(folder) / "saved")
            run_on_ranks(into_uneven, 4, Path(folder) / "saved")


class OneWeight(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (8, 3)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape))


def told(call: Any) -> str:
    """The error of a call, which every rank must raise."""
    try:
        call()
    except FsdpOptimError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def one_dtensor(make: Any) -> nn.Module:
    return replace_params(OneWeight(), lambda whole, _: nn.Parameter(make(whole)))


def by_rows(sizes: list[int]) -> Any:
    """A DTensor of Shard(0) whose ranks have any number of rows."""
    mesh = init_device_mesh("cpu", (len(sizes),))
    return one_dtensor(lambda whole: dtensor(whole.split(sizes)[dist.get_rank()].clone(), mesh, [Shard(0)], whole))


def momentum_of(model: nn.Module) -> torch.optim.Optimizer:
    """With a state that a test may replace: no gradient, no step."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optim.state[param]["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
    return optim


def told_of(model: nn.Module, optim: Any = None) -> str:
    optim = optim or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return told(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, None))


def without_a_word() -> str:
    """Two of the ranks have what torch would give them."""
    return told_of(by_rows([2, 2, 3, 1]))


def uneven_state(wrapped: bool) -> str:
    """A state value that is cut unevenly, of a parameter that is cut evenly, or not at all (ZeRO-1)."""
    model: Any = by_rows([2, 2, 2, 2]) if wrapped else nn.parallel.DistributedDataParallel(OneWeight())
    optim = momentum_of(model)
    (param,) = model.parameters()
    optim.state[param]["momentum_buffer"] = next(by_rows([2, 2, 3, 1]).parameters()).detach()
    return told_of(model, optim)


def state_of_another_shape() -> str:
    """A value of one number for each row, of a parameter with rows as no rule of torch says."""
    model = in_buffer(OneTwo())
    optim = momentum_of(model)
    param = model.weight
    local = torch.zeros(len(param.to_local()))
    mesh = param.device_mesh
    optim.state[param]["rows"] = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=param.shape[:1], stride=(1,)
    )
    return told_of(model, optim)


class OneTwo(OneWeight):
    """Of two parameters, of which the first makes the second begin in the middle of a rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.first = None, nn.Parameter(torch.zeros(5))  # type: ignore[assignment]
        self.weight = nn.Parameter(torch.arange(24.0).reshape(8, 3))


def in_order(where: str) -> str:
    """Rows over both dimensions of a mesh, the second one first: all local shapes are torch's, and the rows are not."""
    mesh = init_device_mesh("cpu", (2, 2))
    outer, inner = mesh.get_coordinate() or (0, 0)

    if where == "mesh":
        mesh._shard_order = [1, 0]
    model = one_dtensor(
        lambda whole: dtensor(whole.view(2, 2, 2, 3)[inner, outer].clone(), mesh, [Shard(0)] * 2, whole)
    )
    if where == "spec":
        model.weight._spec.shard_order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    return told_of(model)


def chunk_order() -> None:
    """The same rows as in `in_order`, where the chunk lists say where they are."""
    mesh = init_device_mesh("cpu", (2, 2))
    mesh._shard_order = [1, 0]
    outer, inner = mesh.get_coordinate() or (0, 0)
    model = one_dtensor(
        lambda whole: dtensor(whole.view(2, 2, 2, 3)[inner, outer].clone(), mesh, [Shard(0)] * 2, whole)
    )
    (param,) = model.parameters()
    tell(param, [4 * inner + 2 * outer, 0])
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optim.state[param]["momentum_buffer"] = param.detach() + 100
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
    check_same(
        "in the order of the chunk lists", full["state"][0]["momentum_buffer"], OneWeight().weight.detach() + 100
    )


def tell(param: Any, offsets: list[int]) -> None:
    local = param._local_tensor
    local.__create_chunk_list__ = lambda: [ChunkStorageMetadata(torch.Size(offsets), local.shape)]


def wrong_lists(offsets: list[int]) -> str:
    model = by_rows([2, 2, 3, 1])
    tell(next(model.parameters()), [offsets[dist.get_rank()], 0])
    return told_of(model)


RAGGED: dict[str, tuple[list[Any], int, str]] = {
    "too few units": ([RaggedShard((0,), (1, 2, 1))], 6, "has 4 ranks in this dimension of the mesh"),
    "units that do not divide": (
        [RaggedShard((0,), (1, 2, 1, 1))],
        6,
        "8 elements in these dims on a rank, which the units",
    ),
    "other dims": ([RaggedShard((1,), (1, 1, 1, 0))], 6, "whose first dimensions are not those dims"),
    "another cut": ([RaggedShard((0,), (1, 3, 3, 1))], 6, "has 6 elements, and"),
    "interleaved": ([StridedRaggedShard((0,), (1, 1, 1, 1))], 6, "does not interleave"),
}


def wrong_ragged(name: str) -> str:
    spec, numel, _ = RAGGED[name]
    mesh = init_device_mesh("cpu", (4,))
    return told_of(one_dtensor(lambda whole: dtensor(torch.zeros(numel), mesh, spec, whole)))


def ragged_after_a_shard() -> str:
    mesh = init_device_mesh("cpu", (2, 2))
    spec = [Shard(0), RaggedShard((0,), (1, 1))]
    return told_of(one_dtensor(lambda whole: dtensor(torch.zeros(6), mesh, spec, whole)))


class RefusedTest(unittest.TestCase):
    """What no rank can place is refused on all ranks, by name, and never read as if it were cut evenly."""

    def refused(self, *call: Any, words: tuple[str, ...]) -> None:
        for text in run_on_ranks(call[0], 4, *call[1:]):
            for word in words:
                self.assertIn(word, text)

    def test_rows_without_a_word(self) -> None:
        self.refused(without_a_word, words=("weight: ", "has shape [3, 3]", "give [2, 3]", "__create_chunk_list__"))

    @parameterized.expand([(True,), (False,)])
    def test_state_with_other_rows(self, wrapped: bool) -> None:
        self.refused(uneven_state, wrapped, words=("a state value of shape [8, 3]", "[3, 3]", "[2, 3]"))

    def test_state_of_another_shape(self) -> None:
        self.refused(state_of_another_shape, words=("weight: a state value of shape [8]", "the local tensor on rank"))

    @parameterized.expand([("spec",), ("mesh",)])
    def test_another_order(self, where: str) -> None:
        if where == "spec" and ShardOrderEntry is None:
            self.skipTest("DTensors of this torch have one order")
        self.refused(in_order, where, words=("weight: ", "dimension 0", "[1, 0]", "[0, 1]"))

    def test_another_order_with_chunk_lists(self) -> None:
        run_on_ranks(chunk_order, 4)

    @parameterized.expand([([0, 2, 5, 7], "which overlap"), ([0, 2, 3, 7], "which overlap"), ([0, 2, 4, 8], "rank 3")])
    def test_wrong_chunk_lists(self, offsets: list[int], words: str) -> None:
        self.refused(wrong_lists, offsets, words=("weight: ", words))

    @parameterized.expand(sorted(RAGGED))
    def test_wrong_units(self, name: str) -> None:
        self.refused(wrong_ragged, name, words=("weight: ", RAGGED[name][2]))

    def test_units_after_a_shard(self) -> None:
        self.refused(ragged_after_a_shard, words=("weight: ", "must come first"))


if __name__ == "__main__":
    unittest.main()
