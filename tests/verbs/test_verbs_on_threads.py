"""Every verb on ranks that are threads, for models that say themselves where their parameters live: no process groups."""

from __future__ import annotations

import copy
import tempfile
import unittest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.cases import expand, some
from kit.compare import check_same, error_text
from kit.described import CUTS, STEPS, DescribedAdapter, Training, oracle
from kit.optimizers import adam, sgd
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import RankError
from fsdp_optim.adapters import use_adapters
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.local_extents import snapshot_of
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.checkpoint.load import opening
from fsdp_optim.checkpoint.load.targets import Weights
from fsdp_optim.checkpoint.save import background
from fsdp_optim.testing import run_on_threads, thread_rank
from fsdp_optim.transport import RankGroup, world_here
from fsdp_optim.transport.in_process import InProcessTransport
from fsdp_optim.verbs import load_state

MAKES: dict[str, Callable[[Any], Any]] = {"Adam": adam, "SGD": sgd}
CASES = [
    (cut, size, make) for cut in CUTS for size in (1, 2, 3, 4) for make in (("Adam", "SGD") if size == 3 else ("Adam",))
]
NEXT = dict(zip(CUTS, [*list(CUTS)[1:], *list(CUTS)[:1]], strict=True))


def state_of(optim: Any) -> Any:
    return copy.deepcopy(optim.state_dict()["state"])


def every_verb(cut: str, make: str, folder: str) -> None:
    world = world_here()
    rank, ranks = world.rank, tuple(range(world.size))
    with use_adapters([DescribedAdapter()]):
        run = Training(cut, ranks, rank, MAKES[make])
        wanted = oracle(MAKES[make]).optim.state_dict()["state"]
        for recipient in (*ranks, None):
            full = fsdp_optim.gather_full_optim_state_dict(
                run.model, run.optim, recipient, options=fsdp_optim.CallOptions(bucket_nbytes=64)
            )
            if (full is None) != (recipient not in (rank, None)):
                raise AssertionError(f"rank {rank} got a {type(full).__name__}, the recipient is {recipient}")
            if full is not None:
                check_same(f"gathered to {recipient}", full["state"], wanted)
        listed = dict(
            fsdp_optim.iter_full_optim_state(
                run.model, run.optim, None, options=fsdp_optim.CallOptions(bucket_nbytes=64)
            )
        )
        check_same("iterated", list(listed.values()), list(wanted.values()))
        other = Training(NEXT[cut], ranks, rank, MAKES[make], steps=0)
        again = Training(NEXT[cut], ranks, rank, MAKES[make])
        shards = {
            "shard": fsdp_optim.get_shard_from_optim_state_dict(other.model, other.optim, full),
            "scatter": fsdp_optim.scatter_full_optim_state_dict(
                other.model,
                other.optim,
                full if rank == ranks[-1] else None,
                ranks[-1],
                options=fsdp_optim.CallOptions(bucket_nbytes=64),
            ),
        }
        for verb, shard in shards.items():
            fsdp_optim.load_optim_state_dict(other.optim, shard)
            check_same(verb, state_of(other.optim), state_of(again.optim))
        moved = Training(NEXT[cut], ranks, rank, MAKES[make], steps=0)
        fsdp_optim.transfer_optim_state(run.model, run.optim, moved.model, moved.optim)
        check_same("transferred", state_of(moved.optim), state_of(again.optim))
        path = Path(folder)
        fsdp_optim.save(
            path / "saved",
            run.model,
            run.optim,
            options=fsdp_optim.SaveOptions(durable=False, bucket_nbytes=300),
            state={"step": 2},
        )
        fsdp_optim.async_save(
            path / "later", run.model, run.optim, options=fsdp_optim.SaveOptions(durable=False)
        ).wait()
        for name in ("saved", "later"):
            loaded = Training(NEXT[cut], ranks, rank, MAKES[make], steps=0)
            fsdp_optim.load(path / name, loaded.model, loaded.optim, options=fsdp_optim.LoadOptions(compare=True))
            check_same(f"loaded what was {name}", state_of(loaded.optim), state_of(again.optim))
            for param, expected_param in zip(loaded.model.parameters(), again.model.parameters(), strict=True):
                check_same("weights", param.detach(), expected_param.detach())
        further = oracle(MAKES[make], STEPS + 1).optim.state_dict()["state"]
        loaded.step([STEPS])
        check_same(
            "trained on", fsdp_optim.gather_full_optim_state_dict(loaded.model, loaded.optim, None)["state"], further
        )


CALLS: dict[str, Callable[[Training, str], Any]] = {
    "gather": lambda run, path: fsdp_optim.gather_full_optim_state_dict(
        run.model, run.optim, 0, options=fsdp_optim.CallOptions(timeout=20.0)
    ),
    "transfer": lambda run, path: fsdp_optim.transfer_optim_state(
        run.model, run.optim, run.model, run.optim, options=fsdp_optim.CallOptions(timeout=20.0)
    ),
    "save": lambda run, path: fsdp_optim.save(
        path, run.model, run.optim, options=fsdp_optim.SaveOptions(durable=False, timeout=20.0)
    ),
    "load": lambda run, path: fsdp_optim.load(path, run.model, run.optim, options=fsdp_optim.LoadOptions(timeout=20.0)),
}


def each_rank_fails(verb: str, folder: str) -> list[tuple[str, str]]:
    """Each rank in turn has an optimizer of another model."""
    world, errors = world_here(), []
    with use_adapters([DescribedAdapter()]):
        for failing in range(world.size):
            run = Training("rows", range(world.size), world.rank, adam)
            if verb == "load":
                CALLS["save"](run, f"{folder}/{failing}")
            if world.rank == failing:
                run.optim = adam([torch.nn.Parameter(torch.ones(2))])
            errors.append(error_text(lambda: CALLS[verb](run, f"{folder}/{failing}")))  # noqa: B023
    return errors


def one_in_another_call() -> list[tuple[str, str]]:
    world, errors = world_here(), []
    with use_adapters([DescribedAdapter()]):
        run = Training("rows", range(world.size), world.rank, adam)
        for odd in range(world.size):
            verb = "gather" if world.rank == odd else "transfer"
            errors.append(error_text(lambda: CALLS[verb](run, "")))  # noqa: B023
        CALLS["gather"](run, "")
    return errors


def one_does_not_come(absent: int) -> tuple[str, str]:
    world = world_here()
    with use_adapters([DescribedAdapter()]):
        run = Training("rows", range(world.size), world.rank, adam)
        if world.rank == absent:
            return "", ""
        return error_text(
            lambda: fsdp_optim.gather_full_optim_state_dict(
                run.model, run.optim, 0, options=fsdp_optim.CallOptions(timeout=0.5)
            )
        )


def save_in_background(path: str) -> tuple[str, str]:
    world = world_here()
    with use_adapters([DescribedAdapter()]):
        run = Training("rows", range(world.size), world.rank, adam)
        return error_text(
            lambda: fsdp_optim.async_save(
                path, run.model, run.optim, options=fsdp_optim.SaveOptions(durable=False, timeout=20.0)
            ).wait()
        )


def load_again(path: str) -> tuple[str, str]:
    world = world_here()
    with use_adapters([DescribedAdapter()]):
        run = Training("columns", range(world.size), world.rank, adam)
        return error_text(
            lambda: fsdp_optim.load(path, run.model, run.optim, options=fsdp_optim.LoadOptions(timeout=20.0))
        )


class Loses(InProcessTransport):
    """A transport on which nothing that one rank sends arrives."""

    sender = 0

    def _move(self, group: RankGroup, *args: Any) -> None:
        """Others notice it long before anybody stops waiting for them in the meeting at the end."""
        super()._move(replace(group, timeout=0.3), *args)

    def _post(self, letters: Any) -> None:
        super()._post({} if thread_rank() == self.sender else letters)


class Raises(Loses):
    """A transport that breaks its promise: sending raises on one rank."""

    def _move(self, group: RankGroup, *args: Any) -> None:
        if group.rank == self.sender:
            raise OSError("the cable is cut")
        super()._move(group, *args)


def with_lost_messages(verb: str) -> tuple[str, str]:
    world = world_here()
    with use_adapters([DescribedAdapter()]):
        run, target = (Training(cut, range(world.size), world.rank, adam) for cut in ("rows", "columns"))
        if verb == "gather":
            return error_text(
                lambda: fsdp_optim.gather_full_optim_state_dict(
                    run.model, run.optim, 0, options=fsdp_optim.CallOptions(timeout=20.0)
                )
            )
        return error_text(
            lambda: fsdp_optim.transfer_optim_state(
                run.model, run.optim, target.model, target.optim, options=fsdp_optim.CallOptions(timeout=20.0)
            )
        )


class VerbsOnThreadsTest(unittest.TestCase):
    @expand(*some(CASES, every=2))
    def test_every_verb(self, cut: str, size: int, make: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_threads(every_verb, size, cut, make, folder)

    @parameterized.expand(tuple(CALLS))
    def test_a_failure_on_each_rank_in_turn(self, verb: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_threads(each_rank_fails, 3, verb, folder)
        for failing in range(3):
            errors = {errors_of_rank[failing] for errors_of_rank in by_rank}
            self.assertEqual(len(errors), 1, errors)
            ((kind, text),) = errors
            self.assertEqual(kind, "WrapperError", text)
            self.assertIn(f"rank {failing}", text)

    def test_a_copy_that_fails_on_each_rank_in_turn(self) -> None:
        """The call itself raises, on all ranks, and nothing is left for the background."""

        def copy_of(live: Any) -> Any:
            if thread_rank() == bad:
                raise MemoryError("no memory for the copy")
            return snapshot_of(live)

        with tempfile.TemporaryDirectory() as folder, mock.patch.object(background, "snapshot_of", copy_of):
            for bad in range(3):
                errors = run_on_threads(save_in_background, 3, f"{folder}/{bad}")
                self.assertEqual(len(set(errors)), 1, errors)
                self.assertEqual(errors[0][0], RankError.__name__, errors)
                self.assertIn(f"rank {bad}: MemoryError: no memory for the copy", errors[0][1])
            self.assertEqual(list(Path(folder).iterdir()), [])

    def test_weights_that_cannot_be_put_in_on_each_rank_in_turn(self) -> None:
        def install(weights: Weights) -> None:
            if thread_rank() == bad:
                raise OSError("the device is gone")

        with tempfile.TemporaryDirectory() as folder:
            run_on_threads(save_in_background, 3, f"{folder}/step")
            with mock.patch.object(Weights, "install", install):
                for bad in range(3):
                    errors = run_on_threads(load_again, 3, f"{folder}/step")
                    self.assertEqual(len(set(errors)), 1, errors)
                    why = "the weights could not be written into the model: OSError: the device is gone"
                    self.assertIn(f"rank {bad}: {why}", errors[0][1])

    def test_a_transfer_that_cannot_be_loaded_on_each_rank_in_turn(self) -> None:
        real = load_state.load_shard

        def load(*args: Any, **kwargs: Any) -> Any:
            if thread_rank() == bad:
                raise OSError("the device is gone")
            return real(*args, **kwargs)

        with mock.patch.object(load_state, "load_shard", load):
            for bad in range(3):
                errors = run_on_threads(with_lost_messages, 3, "transfer")
                self.assertEqual(len(set(errors)), 1, errors)
                self.assertIn(f"rank {bad}: OSError: the device is gone", errors[0][1])

    def test_a_rank_that_sees_another_checkpoint(self) -> None:
        """It may see the other one for a moment, in which the path is replaced."""

        def opened(store: Any, **kwargs: Any) -> Any:
            looks[thread_rank()] += 1
            is_elsewhere = thread_rank() == 1 and looks[1] <= wrong_looks
            return open_checkpoint(store_at(f"{folder}/other") if is_elsewhere else store, **kwargs)

        with tempfile.TemporaryDirectory() as folder, mock.patch.object(opening, "open_checkpoint", opened):
            for name in ("step", "other"):
                run_on_threads(save_in_background, 3, f"{folder}/{name}")
            for case in ((1, ""), (99, "the ranks see different checkpoints")):
                (wrong_looks, words), looks = case, [0, 0, 0]
                errors = run_on_threads(load_again, 3, f"{folder}/step")
                self.assertEqual(len(set(errors)), 1, errors)
                self.assertEqual((bool(errors[0][1]), words in errors[0][1]), (bool(words), True), errors)
                self.assertEqual(len(set(looks)), 1, looks)

    def test_ranks_in_other_calls(self) -> None:
        by_rank = run_on_threads(one_in_another_call, 3)
        for odd in range(3):
            errors = {errors_of_rank[odd] for errors_of_rank in by_rank}
            self.assertEqual(len(errors), 1, errors)
            ((kind, text),) = errors
            self.assertEqual(kind, "RankError")
            self.assertIn("gather_full_optim_state_dict", text)
            self.assertIn("transfer_optim_state", text)

    def test_a_rank_that_does_not_come(self) -> None:
        for absent in range(3):
            errors = run_on_threads(one_does_not_come, 3, absent)
            self.assertEqual(errors.pop(absent), ("", ""))
            self.assertEqual(len(set(errors)), 1, errors)
            self.assertEqual(errors[0][0], "RankTimeoutError")
            self.assertIn(f"rank {absent} did not arrive within 0.5 s", errors[0][1])

    def test_lost_messages(self) -> None:
        """All ranks say the same, of whoever gave up first: a rank may wait for one that waits for the sender."""
        for verb, sender in (("gather", 1), ("gather", 2), ("transfer", 0), ("transfer", 2)):
            losing = type("Losing", (Loses,), {"sender": sender})
            errors = run_on_threads(with_lost_messages, 3, verb, transport=losing)
            self.assertEqual(len(set(errors)), 1, errors)
            self.assertEqual(errors[0][0], RankError.__name__)
            self.assertIn("lost the connection to rank", errors[0][1])

    def test_a_transport_that_raises_when_all_are_ready(self) -> None:
        for sender in range(3):
            errors = run_on_threads(
                with_lost_messages, 3, "gather", transport=type("Raising", (Raises,), {"sender": sender})
            )
            self.assertEqual({kind for kind, _ in errors}, {RankError.__name__}, errors)
            self.assertTrue(any(f"rank {sender}: OSError: the cable is cut" in text for _, text in errors), errors)


if __name__ == "__main__":
    unittest.main()
