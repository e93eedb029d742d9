"""Parameters and state values that describe their own shards: all verbs, and checkpoints, bit for bit."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import torch
from kit.cases import expand, some
from kit.checkpoints import load, save
from kit.compare import check_same
from kit.local_parts import local_of
from kit.shards import SHARDS
from kit.tables import Table
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import check_full, check_trip, snapshot

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


def trip(kind: str) -> None:
    check_trip(SHARDS[kind])
    sharded, plain = Trained(SHARDS[kind]), Trained("plain", steps=0)
    fsdp_optim.transfer_optim_state(sharded.model, sharded.optim, plain.model, plain.optim)
    check_full("transferred to plain", plain.gather(None), Oracle().full())
    back = Trained(SHARDS[kind], steps=0)
    fsdp_optim.transfer_optim_state(plain.model, plain.optim, back.model, back.optim)
    check_full("transferred back", back.gather(None), Oracle().full())


TRIPS = Table(trip, *some([(size, kind) for size in (4, 2, 1) for kind in SHARDS], every=4))


def notes_of(optim: torch.optim.Optimizer) -> list[object]:
    return [values["note"] for values in optim.state.values()]


def opaque(kind: str) -> None:
    """Each rank's own value comes back to it, though a rank knows only its own shards of the parameters."""
    source, target = Trained(SHARDS[kind]), Trained(SHARDS[kind])
    for values in source.optim.state.values():
        values["note"] = ["of", *local_of(values["exp_avg"]).flatten().tolist()]
    full = source.gather(0)
    shard = fsdp_optim.scatter_full_optim_state_dict(target.model, target.optim, full, source_rank=0)
    fsdp_optim.load_optim_state_dict(target.optim, shard)
    check_same("notes", notes_of(target.optim), notes_of(source.optim))


OPAQUE = Table(opaque, *some([(size, kind) for size in (4, 2) for kind in SHARDS], every=2))


def save_to(path: Path) -> None:
    for kind in SHARDS:
        sharded = Trained(SHARDS[kind])
        before = snapshot(sharded)
        save(path / kind, sharded)
        check_same("after saving", snapshot(sharded), before)


def load_from(path: Path) -> None:
    for saved in SHARDS:
        for wrap in (SHARDS[saved], "FSDP2"):
            target = Trained(wrap, steps=1)
            load(path / saved, target, compare=True)
            alike = Trained(wrap)
            check_same("loaded", snapshot(target)["values"], snapshot(alike)["values"])
            check_full("loaded", target.gather(None), Oracle().full())
            target.step(range(STEPS, STEPS + 1))
            check_full("trained on", target.gather(None), Oracle(steps=STEPS + 1).full())


class TestOwnShards(unittest.TestCase):
    @expand(*TRIPS.soon_and_later)
    def test_every_verb(self, world_size: int, kind: str) -> None:
        """A round trip with uneven shards, several shards on one rank, and ranks without shards."""
        TRIPS(world_size, kind)

    @expand(*OPAQUE.soon_and_later)
    def test_opaque_values(self, world_size: int, kind: str) -> None:
        """Values that are no tensors, of each shard."""
        OPAQUE(world_size, kind)

    @expand(soon=[(4, 2)], later=[(2, 2), (2, 4)])
    def test_save_and_load(self, saved: int, loaded: int) -> None:
        """A round trip into the same wrapper and into FSDP2."""
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_to, saved, Path(folder), timeout=200)
            run_on_ranks(load_from, loaded, Path(folder), timeout=200)


if __name__ == "__main__":
    unittest.main()
