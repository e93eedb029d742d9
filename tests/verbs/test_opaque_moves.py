"""Opaque values move as bytes through the transport: what they are is kept, and the rendezvous store hardly sees them."""

from __future__ import annotations

import dataclasses
import unittest
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from kit.optimizers import adam
from kit.trained import Trained

from fsdp_optim.state.values import same
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import meeting
from fsdp_optim.transport.packing import pack, unpack

NUMEL = 300_000


@dataclasses.dataclass(eq=False)
class Table:
    """An object of a user's own."""

    name: str
    values: Any


def values_of(rank: int) -> dict[str, Any]:
    """Values of every kind, others on each rank; large ones, strided ones, empty ones."""
    base = torch.arange(NUMEL, dtype=torch.float64) + rank
    return {
        "codes": (torch.arange(NUMEL) + rank).to(torch.uint8),
        "strided": base.view(500, -1).t(),
        "empty": torch.empty(0, 3),
        "nested": [{"array": numpy.arange(1000) + rank, "none": None, "no array": numpy.empty(0)}, ("a", base[:7])],
        "object": Table(f"of rank {rank}", torch.full((3, 2), float(rank))),
    }


def moved(wrapper: str, bucket_nbytes: int) -> int:
    """Gathered and scattered; how many bytes this rank put into the store."""
    trained = Trained(wrapper, adam, 1)
    whole = wrapper in ("DDP", "plain")
    for values in trained.optim.state.values():
        values.update(values_of(0 if whole else dist.get_rank()))
    wanted = [dict(values) for values in trained.optim.state.values()]
    nbytes = 0
    put = meeting.Meeting._put

    def counted(self: Any, content: bytes) -> None:
        nonlocal nbytes
        nbytes += len(content)
        put(self, content)

    with mock.patch.object(meeting.Meeting, "_put", counted):
        last = dist.get_world_size() - 1
        full = trained.gather(last, "name", bucket_nbytes=bucket_nbytes)
        for values in trained.optim.state.values():
            for name in values_of(0):
                del values[name]
        shard = trained.scatter(full, last, bucket_nbytes=bucket_nbytes)
    shard_values = [values for _, values in sorted(shard["state"].items())]
    for got, expected in zip(shard_values, wanted, strict=True):
        for name in values_of(0):
            if not same(got[name], expected[name]):
                raise AssertionError(f"{name}: {got[name]!r}, not {expected[name]!r}")
    return nbytes


class OpaqueMovesTest(unittest.TestCase):
    def test_every_kind_arrives_and_the_store_sees_only_lengths(self) -> None:
        for wrapper, bucket_nbytes in (("FSDP2", 1 << 20), ("DDP", 64 << 20)):
            for nbytes in run_on_ranks(moved, 2, wrapper, bucket_nbytes):
                self.assertLess(
                    nbytes, 60_000, f"{wrapper}: the values are {NUMEL * 9} bytes and more, of each parameter"
                )

    def test_taken_apart_and_put_together(self) -> None:
        value = values_of(3)
        shared = torch.ones(4)
        value["twice"] = [shared, shared]
        packed = pack(value)
        self.assertEqual(packed.parts[-1].data_ptr(), shared.data_ptr())  # nothing is copied
        self.assertLess(packed.nbytes[0], 10_000)
        flat = [part.contiguous().reshape(-1).view(torch.uint8).clone() for part in packed.parts]
        again = unpack(flat)
        self.assertTrue(same(again, value))
        self.assertIs(again["twice"][0], again["twice"][1])
        again["nested"][0]["array"][0] = 7  # its own, and writable
        self.assertEqual(value["nested"][0]["array"][0], 3)
