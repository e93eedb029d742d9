"""save and load: every wrapper at several world sizes, and what plain safetensors sees.

The oracle is the unwrapped model, trained alike; files are opened with safetensors alone. What one wrapper loads is compared
with the same wrapper that has trained itself, elements of padding left out.
"""

from __future__ import annotations

import atexit
import collections
import copy
import functools
import itertools
import json
import tempfile
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from kit.checkpoints import (
    FURTHER,
    Whole,
    buffers_of,
    check_files,
    check_groups,
    everything,
    in_order,
    load,
    mine,
    oracle_after,
    save,
    scramble,
)
from kit.compare import Differs, check_same, error_text
from kit.optimizers import OfModel, two_groups
from kit.tables import Table
from kit.torch_limits import cannot_make, skip_if
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from safetensors import safe_open
from torch import Tensor

import fsdp_optim

SIZES = (1, 3, 4)  # of the matrix; most other tests have 2 ranks

# ------------------------------------------------------------------------------------------ save, load, compare


def load_plain(folder: Path, optim: torch.optim.Optimizer) -> None:
    """A use without this library: a plain optimizer out of optim.safetensors."""
    with safe_open(folder / "optim.safetensors", "pt") as file:
        groups = json.loads(file.metadata()["param_groups"])
        state: dict[str, dict[str, Tensor]] = {name: {} for group in groups for name in group["params"]}
        for key in file.keys():  # noqa: SIM118
            name, _, value = key.removeprefix("state.").rpartition(".")
            state[name][value] = file.get_tensor(key)
    ids = {name: i for i, name in enumerate(state)}
    groups = [{**group, "params": [ids[name] for name in group["params"]]} for group in groups]
    optim.load_state_dict({"state": {ids[name]: s for name, s in state.items() if s}, "param_groups": groups})


# ------------------------------------------------------------------------------------------ the matrix


@functools.cache
def matrix_root() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def save_one(root: Path, wrapper: str) -> None:
    with cpu():
        trained = Trained(wrapper, OfModel(two_groups), model=Whole)
        extra = {"wrapper": wrapper, "table": torch.arange(5)}
        before, given = everything(trained), copy.deepcopy(extra)
        save(root / f"{wrapper} {dist.get_world_size()}", trained, extra=extra)
        check_same("after saving", everything(trained), before)
        check_same("extra, after saving", extra, given)


EACH = list(itertools.product(WRAPPERS, SIZES))
ALONE, ON_FOUR = ("FSDP2", "plain"), ("fairscale flat", "HSDP", "FSDP2 x TP")
QUICK = [(w, n) for w, n in EACH if n == 3 or (n == 1 and w in ALONE) or (n == 4 and w in ON_FOUR)]
"""What `make test-all` has: every wrapper cut unevenly, and some on one rank and on four. `make test-long` has all."""
POSSIBLE = [(w, n) for w, n in EACH if not cannot_make(w)]


def sources_of(target: str, world_size: int) -> list[tuple[str, int]]:
    """Which checkpoints are loaded into this wrapper at this world size: every fourth, from another one on for each target.

    The files of all sources hold the same, which `test_files_hold_the_unwrapped_model_and_optimizer` compares; what differs is
    where in them it lies. `make test-long` loads all of them.
    """
    chosen = QUICK[(3 * QUICK.index((target, world_size))) % 4 :: 4]
    return [(source, size) for source, size in chosen if not cannot_make(source)]


def load_into(root: Path, every: bool, wrapper: str) -> None:
    """On one rank: load the checkpoints of all sources into one wrapper, train on, and save again.

    What differs is raised after the last collective call, so that a rank which finds something leaves nobody waiting.
    """
    world_size, problems = dist.get_world_size(), []
    compare = world_size == 3
    with cpu():
        target, alike = (Trained(wrapper, OfModel(two_groups), steps, model=Whole) for steps in (0, STEPS))
        wanted, live = mine(alike), [id(param) for param in target.model.parameters()]
        sources = POSSIBLE if every else sources_of(wrapper, world_size)
        for turn, (source, size) in enumerate(sources):
            scramble(target, forget=turn % 2 == 0)
            restored = load(root / f"{source} {size}", target, compare=compare)
            _, differs = error_text(partial(check_one, restored, source, size, target, wanted))
            problems += [f"from {source} {size}: {differs}"] if differs else []
        check_same("live parameters", [id(param) for param in target.model.parameters()], live)
        for trained in (target, alike):
            trained.step(range(STEPS, FURTHER))
        _, differs = error_text(partial(check_same, "trained on", mine(target), mine(alike)))
        problems += [differs] if differs else []
        save(root / f"again {wrapper} {world_size}", target)
    if problems:
        raise Differs("\n".join(problems))


def check_one(restored: Any, source: str, size: int, target: Trained, wanted: dict[str, Any]) -> None:
    check_same("restored", mine(target), wanted)
    check_same("extra", dict(restored.state), {"wrapper": source, "table": torch.arange(5)})
    scratch = [value.tolist() for name, value in buffers_of(target).items() if name.endswith("scratch")]
    check_same("a buffer that is not persistent", scratch, [[1.0] * 3])
    check_same("saved by", restored.world_size, size)
    check_same("absent", sorted(restored.absent), [])


def folder_of(every: bool) -> Path:
    folder = matrix_root() / ("every" if every else "some")
    folder.mkdir(exist_ok=True)
    return folder


def on_ranks(fn: Callable[..., None], every: bool) -> Table:
    cases = [(size, wrapper) for wrapper, size in (EACH if every else QUICK) if not cannot_make(wrapper)]
    return Table(fn, cases, timeout=300.0)


@functools.cache
def saves(every: bool) -> Table:
    return on_ranks(partial(save_one, folder_of(every)), every)


@functools.cache
def loads(every: bool) -> Table:
    """Of what all the sources have saved; `test_files_hold_the_unwrapped_model_and_optimizer` reports a save that failed."""
    for case in saves(every).cases:
        error_text(lambda: saves(every)(*case))  # noqa: B023
    return on_ranks(partial(load_into, folder_of(every), every), every)


def saved(source: str) -> None:
    """Have the checkpoint of a wrapper and a world size ("FSDP2 3") saved."""
    wrapper, _, size = source.rpartition(" ")
    saves(False)(int(size), wrapper)


class Matrix(unittest.TestCase):
    def check_saved(self, wrapper: str, world_size: int, every: bool) -> None:
        skip_if(self, cannot_make(wrapper))
        saves(every)(world_size, wrapper)
        folder = folder_of(every) / f"{wrapper} {world_size}"
        check_files(folder, oracle_after(STEPS))
        check_groups(folder, oracle_after(STEPS))

    def check_restored(self, wrapper: str, world_size: int, every: bool) -> None:
        skip_if(self, cannot_make(wrapper))
        loads(every)(world_size, wrapper)

    def check_saved_again(self, wrapper: str, world_size: int, every: bool) -> None:
        skip_if(self, cannot_make(wrapper))
        loads(every)(world_size, wrapper)
        check_files(folder_of(every) / f"again {wrapper} {world_size}", oracle_after(FURTHER))


@pytest.mark.slow
class WholeMatrixTest(Matrix):
    @parameterized.expand(EACH)
    def test_files_hold_the_unwrapped_model_and_optimizer(self, wrapper: str, world_size: int) -> None:
        self.check_saved(wrapper, world_size, every=True)

    @parameterized.expand(EACH)
    def test_every_wrapper_is_restored_exactly(self, wrapper: str, world_size: int) -> None:
        self.check_restored(wrapper, world_size, every=True)

    @parameterized.expand(EACH)
    def test_what_was_restored_and_trained_on_is_saved_again(self, wrapper: str, world_size: int) -> None:
        self.check_saved_again(wrapper, world_size, every=True)


class MatrixTest(Matrix):
    @parameterized.expand(QUICK)
    def test_files_hold_the_unwrapped_model_and_optimizer(self, wrapper: str, world_size: int) -> None:
        self.check_saved(wrapper, world_size, every=False)

    @parameterized.expand(QUICK)
    def test_every_wrapper_is_restored_exactly(self, wrapper: str, world_size: int) -> None:
        self.check_restored(wrapper, world_size, every=False)

    def test_every_source_is_loaded_by_someone(self) -> None:
        loaded = collections.Counter(source for target in QUICK for source in sources_of(*target))
        self.assertEqual(set(loaded), {(wrapper, size) for wrapper, size in QUICK if not cannot_make(wrapper)})
        self.assertGreater(min(loaded.values()), 2)

    @parameterized.expand(QUICK)
    def test_what_was_restored_and_trained_on_is_saved_again(self, wrapper: str, world_size: int) -> None:
        self.check_saved_again(wrapper, world_size, every=False)

    @parameterized.expand(("fairscale flat 4", "FSDP1 orig 3", "FSDP2 x TP 4", "plain 1"))
    def test_plain_pytorch_goes_on_with_it(self, source: str) -> None:
        """No ranks, and nothing of this library."""
        skip_if(self, cannot_make(source))
        saved(source)
        fresh = Oracle(OfModel(two_groups), 0, Whole)
        fresh.model.load_state_dict(safetensors.torch.load_file(folder_of(False) / source / "model.safetensors"))
        load_plain(folder_of(False) / source, fresh.optim)
        check_same("plain optimizer", in_order(fresh.by_name()), in_order(oracle_after(STEPS).by_name()))
        fresh.step(range(STEPS, FURTHER))
        check_same("trained on", in_order(fresh.by_name()), in_order(oracle_after(FURTHER).by_name()))
        check_same("trained on", dict(fresh.model.state_dict()), dict(oracle_after(FURTHER).model.state_dict()))

    @parameterized.expand(("fairscale flat 4", "HSDP 4", "FSDP2 3", "plain 1"))
    def test_load_without_ranks(self, source: str) -> None:
        saved(source)
        fresh = Oracle(OfModel(two_groups), 0, Whole)
        restored = fsdp_optim.load(
            str(folder_of(False) / source), fresh.model, fresh.optim, options=fsdp_optim.LoadOptions(progress=False)
        )
        wanted = oracle_after(STEPS)
        check_same("model", dict(fresh.model.state_dict()), dict(wanted.model.state_dict()))
        check_same("state", in_order(fresh.by_name()), in_order(wanted.by_name()))
        groups = [dict(enumerate(oracle.optim.state_dict()["param_groups"])) for oracle in (fresh, wanted)]
        check_same("groups", in_order(groups[0]), in_order(groups[1]))
        self.assertEqual(restored.state["wrapper"], source.rpartition(" ")[0])
        self.assertIsInstance(restored.state, dict)

    def test_only_the_extra(self) -> None:
        saved("FSDP2 3")
        restored = fsdp_optim.load(folder_of(False) / "FSDP2 3")
        check_same("extra", dict(restored.state), {"wrapper": "FSDP2", "table": torch.arange(5)})
