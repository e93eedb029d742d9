"""No call leaves anything in the rendezvous store: not where ranks see different things, nor where calls fail."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import error_text
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Trained
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import Meeting, RankGroup
from fsdp_optim.transport.job import JobStore

WORLD = 2
ROUNDS = int(os.environ.get("STORE_ROUNDS", "1"))  # 1500 for a long run


class Calls:
    """A trained and a fresh model, with all that the calls below need."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder)
        self.trained, self.fresh = (Trained("FSDP2", adam, steps) for steps in (1, 0))
        self.full = self.trained.gather(None)
        self.sharded = get_optimizer_state_dict(self.trained.model, self.trained.optim)
        self.save(self.path / "saved")
        self.me = dist.get_rank()

    @property
    def both(self) -> tuple[Any, Any]:
        return self.trained.model, self.trained.optim

    def save(self, path: Path, **kwargs: Any) -> Any:
        return fsdp_optim.save(
            path, *self.both, overwrite=True, **as_options(fsdp_optim.SaveOptions, **kwargs, durable=False)
        )

    def own_opaque(self) -> Any:
        """Opaque state, and something else in it on each rank, so that reports travel."""
        for values in self.trained.optim.state.values():
            values["table"] = [torch.arange(self.me + 3)] * (self.me + 1)
        return contextlib.ExitStack()

    def without_opaque(self) -> None:
        for values in self.trained.optim.state.values():
            values.pop("table", None)


def in_buckets(calls: Calls) -> None:
    for _ in fsdp_optim.iter_full_optim_state(*calls.both, options=fsdp_optim.CallOptions(bucket_nbytes=64)):
        pass


def stopped_early(calls: Calls) -> None:
    for _ in fsdp_optim.iter_full_optim_state(
        *calls.both, options=fsdp_optim.CallOptions(bucket_nbytes=64, timeout=20.0)
    ):
        if calls.me:
            break


def called_while_suspended(calls: Calls) -> None:
    iterator = fsdp_optim.iter_full_optim_state(
        *calls.both, options=fsdp_optim.CallOptions(bucket_nbytes=64, timeout=20.0)
    )
    next(iterator)
    calls.trained.gather(0)


def transferred(calls: Calls) -> None:
    fsdp_optim.transfer_optim_state(*calls.both, calls.fresh.model, calls.fresh.optim)


def opaque(calls: Calls) -> None:
    calls.own_opaque()
    try:
        calls.trained.gather(0)
        calls.trained.scatter(calls.trained.gather(0), 0)
    finally:
        calls.without_opaque()


def late(calls: Calls) -> None:
    """One rank comes when the other has given up, and is in its next call."""
    in_next_call = calls.path / "in the next call"
    if calls.me:
        while not in_next_call.exists():
            time.sleep(0.01)
        in_next_call.unlink()
        calls.trained.gather(0, timeout=20.0)
        return
    kind, text = error_text(lambda: calls.trained.gather(0, timeout=0.1))
    if kind != "RankTimeoutError":
        raise AssertionError(f"{kind}: {text}")
    with mock.patch.object(Meeting, "enter", _enters_and_says(in_next_call)):
        calls.trained.gather(0, timeout=20.0)


def _enters_and_says(path: Path) -> Callable[[RankGroup, JobStore], Meeting]:
    """Enter a meeting, and make a file for the rank that must come later; a rank that came earlier would be told so."""
    enter, said = Meeting.enter, []

    def entered(group: RankGroup, store: JobStore) -> Meeting:
        meeting = enter(group, store)
        if not said:
            said.append(True)
            path.touch()
        return meeting

    return entered


def with_fingerprint(calls: Calls) -> None:
    calls.save(calls.path / "printed", fingerprint=True)
    fsdp_optim.load(calls.path / "printed", calls.fresh.model, calls.fresh.optim)


def refused_load(calls: Calls) -> None:
    fsdp_optim.load(
        calls.path / ("saved" if calls.me else "nowhere"),
        calls.fresh.model,
        calls.fresh.optim,
        options=fsdp_optim.LoadOptions(timeout=20.0),
    )


def managed(calls: Calls) -> None:
    """A manager's life: made, resumed, stepped, gone back, closed."""
    with fsdp_optim.CheckpointManager(
        calls.path / "managed", *calls.both, every=2, options=fsdp_optim.ManagerOptions(durable=False)
    ) as manager:
        step = manager.resume()
        for more in range(1, 4):
            manager.step(step + more)
        manager.save(step + 4)
        manager.wait()
        manager.rollback(to=step + 4)


GOOD: dict[str, Callable[[Calls], Any]] = {
    "gather": lambda calls: calls.trained.gather(0),
    "gather to all": lambda calls: calls.trained.gather(None),
    "iterate": in_buckets,
    "scatter": lambda calls: calls.trained.scatter(calls.full, 1),
    "sharded": lambda calls: calls.trained.shard(calls.sharded),
    "transfer": transferred,
    "save": lambda calls: calls.save(calls.path / "again"),
    "save a file per rank": lambda calls: calls.save(
        calls.path / "each", options=fsdp_optim.SaveOptions(strategy="per_rank_files")
    ),
    "async_save": lambda calls: fsdp_optim.async_save(
        calls.path / "later", *calls.both, overwrite=True, options=fsdp_optim.SaveOptions(durable=False)
    ).wait(),
    "fingerprint": lambda calls: fsdp_optim.fingerprint(*calls.both, state={"rank": calls.me}),
    "save and load with a fingerprint": with_fingerprint,
    "load": lambda calls: fsdp_optim.load(calls.path / "saved", calls.fresh.model, calls.fresh.optim),
    "load, checked": lambda calls: fsdp_optim.load(
        calls.path / "saved", calls.fresh.model, calls.fresh.optim, options=fsdp_optim.LoadOptions(compare=True)
    ),
    "resume": lambda calls: fsdp_optim.resume(calls.path, calls.fresh.model, calls.fresh.optim),
    "resume from nothing": lambda calls: fsdp_optim.resume(calls.path / "none", calls.fresh.model, calls.fresh.optim),
    "manager": managed,
    "different reports, opaque values": opaque,
    "late": late,
    "stopped early by all": lambda calls: next(
        fsdp_optim.iter_full_optim_state(*calls.both, options=fsdp_optim.CallOptions(bucket_nbytes=64))
    ),
}
FAILING: dict[str, Callable[[Calls], Any]] = {
    "an argument on one rank": lambda calls: calls.trained.gather(0, "ids" if calls.me else "id", timeout=20.0),
    "different arguments": lambda calls: calls.trained.gather(calls.me, timeout=20.0),
    "different calls": lambda calls: (
        calls.trained.gather(0, timeout=20.0) if calls.me else calls.trained.scatter(calls.full, timeout=20.0)
    ),
    "another optimizer": lambda calls: fsdp_optim.gather_full_optim_state_dict(
        calls.trained.model,
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]) if calls.me else calls.trained.optim,
        options=fsdp_optim.CallOptions(timeout=20.0),
    ),
    "nothing to scatter": lambda calls: calls.trained.scatter(None, 1, timeout=20.0),
    "stopped early by one": stopped_early,
    "called while suspended": called_while_suspended,
    "save to a taken path": lambda calls: fsdp_optim.save(
        calls.path / "saved", *calls.both, options=fsdp_optim.SaveOptions(timeout=20.0)
    ),
    "load of what is not there on one rank": refused_load,
}


def keys_left(folder: str) -> list[tuple[str, int, str]]:
    """Each call, the keys that more rounds of it have added to the store, and its error."""
    calls, results = Calls(folder), []
    store = dist.distributed_c10d._get_default_store()
    for label, call in {**GOOD, **FAILING}.items():
        counts = []
        error = ""
        for rounds in (1, ROUNDS, ROUNDS, ROUNDS):
            for _ in range(rounds):
                error = error_text(lambda: call(calls))[0]  # noqa: B023
            calls.trained.gather(0)  # whatever a failing call has left, the next two take away
            calls.trained.gather(0)
            dist.barrier()
            counts.append(store.num_keys())
            dist.barrier()
        # The keys of the job itself, such as the first signs of life of its ranks, come once; what a call leaves, with each call.
        results.append((label, min(after - before for before, after in itertools.pairwise(counts)), error))
    return results


class StoreKeysTest(unittest.TestCase):
    def test_as_many_keys_after_many_calls_as_after_a_few(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(keys_left, WORLD, folder, timeout=600.0 + ROUNDS * 10)
        for number, results in enumerate(by_rank):
            for label, more, error in results:
                with self.subTest(label):
                    self.assertEqual(more, 0, f"{label}: {more} keys for {ROUNDS} calls")
                    self.assertEqual(
                        bool(error), label in FAILING and (label != "stopped early by one" or number == 0), error
                    )
