"""Calls on ranks whose hosts are far from each other: the values are the oracle's, and each rank prints what each call took.

far.py FOLDER

Lines are `took <call>: <seconds> s, <round trips to the store>`; the first call of each kind comes first.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kit.checkpoints import Whole, mine, scramble
from kit.compare import check_same
from kit.optimizers import OfModel, two_groups
from kit.options import as_options
from kit.round_trips import RoundTrips, counted
from kit.trained import Trained
from kit.wrapping import cpu

import fsdp_optim

KWARGS: dict[str, Any] = {"model": Whole, "make": OfModel(two_groups)}
QUIET: dict[str, Any] = {"progress": False, "timeout": 120.0}
TWICE = range(2)


def trained(steps: int) -> Trained:
    return Trained("FSDP2", steps=steps, **KWARGS)


class Far:
    """The calls, on one model."""

    def __init__(self, root: Path, trips: RoundTrips) -> None:
        self.root, self._trips = root, trips
        self.one, self.other = trained(2), trained(0)
        self.wanted = mine(self.one)

    @contextlib.contextmanager
    def timed(self, call: str) -> Iterator[None]:
        dist.barrier()
        begun, before = time.monotonic(), self._trips.of_call
        yield
        print(f"took {call}: {time.monotonic() - begun:.3f} s, {self._trips.of_call - before}", flush=True)

    def check(self, what: str, loaded: Trained) -> None:
        check_same(what, mine(loaded), self.wanted)

    def gather(self) -> None:
        for _ in TWICE:
            with self.timed("gather"):
                full = self.one.gather(None)
        self.other.optim.load_state_dict(self.other.shard(full))
        check_same("gathered", mine(self.other)["state"], self.wanted["state"])

    def save_and_load(self) -> None:
        for number in TWICE:
            with self.timed("save"):
                fsdp_optim.save(
                    self.root / f"saved-{number}",
                    self.one.model,
                    self.one.optim,
                    **as_options(fsdp_optim.SaveOptions, **QUIET),
                )
            scramble(self.other)
            with self.timed("load"):
                fsdp_optim.load(
                    self.root / f"saved-{number}",
                    self.other.model,
                    self.other.optim,
                    **as_options(fsdp_optim.LoadOptions, **QUIET),
                )
            self.check("loaded", self.other)

    def async_save(self) -> None:
        for number in TWICE:
            path = self.root / f"later-{number}"
            with self.timed("async_save"):
                handle = fsdp_optim.async_save(
                    path, self.one.model, self.one.optim, step=number, **as_options(fsdp_optim.SaveOptions, **QUIET)
                )
            with self.timed("its wait"):
                handle.wait()
            scramble(self.other)
            fsdp_optim.load(path, self.other.model, self.other.optim, **as_options(fsdp_optim.LoadOptions, **QUIET))
            self.check("saved in the background", self.other)

    def manager(self) -> None:
        options: dict[str, Any] = {"every": 100, "agree_every": 2, "signals": (), **QUIET}
        for number in TWICE:
            with self.timed("CheckpointManager()"):
                manager = fsdp_optim.CheckpointManager(
                    self.root / f"run-{number}",
                    self.one.model,
                    self.one.optim,
                    **as_options(fsdp_optim.ManagerOptions, **options),
                )
            with self.timed("manager.resume, nothing there"):
                manager.resume()
            with self.timed("first manager.step"):
                manager.step(1)
            for step in (2, 4, 6):
                with self.timed("manager.step without a meeting"):
                    manager.step(step)
                with self.timed("manager.step with a meeting"):
                    manager.step(step + 1)
            with self.timed("manager.step that saves"):
                manager.step(100)
            manager.close()
            scramble(self.other)
            with self.timed("resume"):
                fsdp_optim.resume(
                    self.root / f"run-{number}",
                    self.other.model,
                    self.other.optim,
                    **as_options(fsdp_optim.LoadOptions, **QUIET),
                )
            self.check("resumed", self.other)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    root = Path(folder)
    if dist.get_rank() == 0:
        root.mkdir()
    dist.barrier()
    with cpu(), counted() as trips:
        far = Far(root, trips)
        for part in (far.gather, far.save_and_load, far.async_save, far.manager):
            part()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
