"""Meshes and process groups, which many parameters share, are read once in a call."""

from __future__ import annotations

import collections
import contextlib
import shutil
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.optimizers import adam
from kit.tables import Table
from kit.trained import Trained
from kit.wraps import fsdp1_hybrid
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Replicate, distribute_tensor

import fsdp_optim
from fsdp_optim.adapters import ModuleTree, fsdp1

Seen = collections.Counter[int]


@contextlib.contextmanager
def counted_meshes() -> Iterator[Seen]:
    """By the id of a mesh, how often this library reads the tensor of the ranks."""
    seen, real = Seen(), DeviceMesh.mesh

    def mesh(self: DeviceMesh) -> torch.Tensor:
        if sys._getframe(1).f_globals["__name__"].startswith("fsdp_optim."):
            seen[id(self)] += 1
        return real.__get__(self)  # type: ignore[attr-defined, no-any-return]

    with mock.patch.object(DeviceMesh, "mesh", property(mesh)):
        yield seen


@contextlib.contextmanager
def counted_groups() -> Iterator[Seen]:
    """By the id of a process group, how often the ranks of a unit are read."""
    seen, real = Seen(), fsdp1._replicas_of

    def replicas_of(group: Any, *others: Any) -> Any:
        seen[id(group)] += 1
        return real(group, *others)

    with mock.patch.object(fsdp1, "_replicas_of", replicas_of):
        yield seen


def check_once(name: str, call: Callable[[], Any], counted: Callable[[], Any]) -> Any:
    with counted() as seen:
        result = call()
    check_same(f"{name}: how often each is read", set(seen.values()), {1})
    return result


WRAPS: dict[str, Any] = {
    "FSDP2": (counted_meshes, "FSDP2"),
    "HSDP": (counted_meshes, "HSDP"),
    "FSDP1 orig": (counted_groups, "FSDP1 orig"),
    "FSDP1 hybrid": (counted_groups, fsdp1_hybrid((1, 2), ShardingStrategy.HYBRID_SHARD, False)),
}


def reads(kind: str) -> None:
    """On every rank: each call reads each mesh or group once, and moves the right elements."""
    counted, wrap = WRAPS[kind]
    trained, target = Trained(wrap, adam, 2), Trained(wrap, adam, 1)
    if counted is counted_meshes:
        for param in trained.params:  # a value with a cut of its own for each parameter
            mesh = param.device_mesh
            whole = [Replicate() for _ in range(mesh.ndim)]
            trained.optim.state[param]["factor"] = distribute_tensor(torch.arange(3.0), mesh, whole)
    full = check_once("gather", lambda: trained.gather(None), counted)
    shard = check_once("shard", lambda: target.shard(full), counted)
    check_once("scatter", lambda: target.scatter(full if dist.get_rank() == 0 else None, 0), counted)
    paths = [tempfile.mkdtemp()]
    dist.broadcast_object_list(paths, 0)
    path = Path(paths[0]) / "step"
    check_once("save", lambda: fsdp_optim.save(path, trained.model, trained.optim), counted)
    check_once("load", lambda: fsdp_optim.load(path, target.model, target.optim), counted)
    check_same("loaded", target.gather(None), full)
    fsdp_optim.load_optim_state_dict(target.optim, shard)
    check_same("sharded", target.gather(None), full)
    dist.barrier()
    shutil.rmtree(paths[0], ignore_errors=True)


READS = Table(reads, [(2, kind) for kind in WRAPS])


class SharedReadsTest(unittest.TestCase):
    @parameterized.expand([case for case in READS.cases if "FSDP1" in case[1]])
    def test_the_ranks_of_a_group_are_read_once_in_a_call(self, *case: Any) -> None:
        READS(*case)

    @parameterized.expand([case for case in READS.cases if "FSDP1" not in case[1]])
    @unittest.skipUnless(isinstance(vars(DeviceMesh).get("mesh"), property), "a mesh keeps its tensor in older torch")
    def test_a_mesh_is_read_once_in_a_call(self, *case: Any) -> None:
        READS(*case)


def test_once_compares_things_by_identity_and_keeps_them_alive() -> None:
    tree = ModuleTree(nn.Linear(1, 1), is_wrapper_child=lambda module, name: False)
    calls: list[object] = []

    def read(*things: object) -> list[object]:
        calls.append(things)
        return [*things]

    def other(*things: object) -> None:
        return None

    first = [1]
    assert tree.once(read, first) is tree.once(read, first)
    assert tree.once(read, [1]) == [[1]]
    assert tree.once(read, first, None) == [first, None]
    assert tree.once(other, first) is None
    for _ in range(50):  # each list is gone after its call, and another one may get its place
        number = len(calls)
        assert tree.once(read, [number]) == [[number]]
    assert len(calls) == 53
