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
import traceback
import unittest
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from kit.checkpoints import (
    Whole,
    buffers_of,
    check_files,
    everything,
    load,
    mine,
    oracle_after,
    save,
    scramble,
)
from kit.optimizers import two_groups
from kit.saved_and_loaded import FURTHER, check_groups, in_order
from kit.torch_limits import cannot_make, skip_if
from kit.wrapping import (
    STEPS,
    WRAPPERS,
    Differs,
    OfModel,
    Oracle,
    Trained,
    check_same,
    cpu,
)
from parameterized import parameterized
from safetensors import safe_open
from torch import Tensor

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

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


def save_all(root: Path, wrappers: Sequence[str]) -> dict[str, str]:
    """On one rank: what went wrong with each wrapper."""
    return {wrapper: _report(lambda wrapper=wrapper: _save_one(root, wrapper)) for wrapper in wrappers}


def _save_one(root: Path, wrapper: str) -> None:
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
"""What `make test` has: every wrapper cut unevenly, and some on one rank and on four. `make test-long` has all."""
POSSIBLE = [(w, n) for w, n in EACH if not cannot_make(w)]


def wrappers_at(world_size: int, every: bool) -> list[str]:
    return [wrapper for wrapper, size in (EACH if every else QUICK) if size == world_size and not cannot_make(wrapper)]


def sources_of(target: str, world_size: int) -> list[tuple[str, int]]:
    """Which checkpoints are loaded into this wrapper at this world size: every fourth, from another one on for each target.

    The files of all sources hold the same, which `test_files_hold_the_unwrapped_model_and_optimizer` compares; what differs is
    where in them it lies. `make test-long` loads all of them.
    """
    chosen = QUICK[(3 * QUICK.index((target, world_size))) % 4 :: 4]
    return [(source, size) for source, size in chosen if not cannot_make(source)]


def load_all(root: Path, every: bool) -> dict[str, dict[str, str]]:
    """On one rank: by target, by source: what went wrong."""
    found: dict[str, dict[str, str]] = {}
    for target in wrappers_at(dist.get_world_size(), every):
        with cpu():
            found[target] = _load_into(root, target, POSSIBLE if every else sources_of(target, dist.get_world_size()))
    return found


def _load_into(root: Path, wrapper: str, sources: Sequence[tuple[str, int]]) -> dict[str, str]:
    world_size, found = dist.get_world_size(), {}
    target, alike = (Trained(wrapper, OfModel(two_groups), steps, model=Whole) for steps in (0, STEPS))
    wanted, live = mine(alike), [id(param) for param in target.model.parameters()]
    for turn, (source, size) in enumerate(sources):
        path = root / f"{source} {size}"
        scramble(target, forget=turn % 2 == 0)
        found[path.name] = _report(lambda path=path, source=source: _load_one(path, source, target, wanted))
    check_same("live parameters", [id(param) for param in target.model.parameters()], live)
    for one in (target, alike):
        one.step(range(STEPS, FURTHER))
    found["trained on"] = _report(lambda: check_same("trained on", mine(target), mine(alike)))
    found["saved again"] = _report(lambda: save(root / f"again {wrapper} {world_size}", target) and None)
    return found


def _load_one(path: Path, source: str, target: Trained, wanted: dict[str, Any]) -> None:
    check = "bitwise" if dist.get_world_size() == 3 else None
    restored = load(path, target, check=check)
    check_same("restored", mine(target), wanted)
    check_same("extra", dict(restored), {"wrapper": source, "table": torch.arange(5)})
    scratch = [value.tolist() for name, value in buffers_of(target).items() if name.endswith("scratch")]
    check_same("a buffer that is not persistent", scratch, [[1.0] * 3])
    check_same("saved by", restored.summary.world_size, int(path.name.split()[-1]))
    check_same("absent", sorted(restored.summary.absent), [])


def _report(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception:
        return traceback.format_exc()
    return ""


def folder_of(every: bool) -> Path:
    folder = matrix_root() / ("every" if every else "some")
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def saved_all(world_size: int, every: bool) -> dict[str, str]:
    """By wrapper: the first rank's words about what went wrong, or ""."""
    wrappers = wrappers_at(world_size, every)
    by_rank = run_on_ranks(save_all, world_size, folder_of(every), wrappers, timeout=200.0)
    return {wrapper: next((one[wrapper] for one in by_rank if one[wrapper]), "") for wrapper in wrappers}


@functools.cache
def loaded_all(world_size: int, every: bool) -> dict[str, dict[str, str]]:
    for size in SIZES:
        saved_all(size, every)
    by_rank = run_on_ranks(load_all, world_size, folder_of(every), every, timeout=200.0)
    return {
        target: {
            source: next((one[target][source] for one in by_rank if one[target][source]), "") for source in sources
        }
        for target, sources in by_rank[0].items()
    }


def check_loaded(wrapper: str, world_size: int, sources: Sequence[tuple[str, int]], found: Mapping[str, str]) -> None:
    wrong = [f"from {source}:\n{text}" for source, text in found.items() if text]
    if wrong:
        raise Differs(f"{len(wrong)} of {len(found)} into {wrapper} on {world_size} ranks\n{wrong[0]}")
    check_same("loaded", set(found), {f"{source} {size}" for source, size in sources} | {"trained on", "saved again"})


class Matrix(unittest.TestCase):
    def check_saved(self, wrapper: str, world_size: int, every: bool) -> None:
        skip_if(self, cannot_make(wrapper))
        self.assertEqual(saved_all(world_size, every)[wrapper], "")
        folder = folder_of(every) / f"{wrapper} {world_size}"
        check_files(folder, oracle_after(STEPS))
        check_groups(folder, oracle_after(STEPS))

    def check_restored(self, wrapper: str, world_size: int, sources: Sequence[tuple[str, int]], every: bool) -> None:
        skip_if(self, cannot_make(wrapper))
        check_loaded(wrapper, world_size, sources, loaded_all(world_size, every)[wrapper])

    def check_saved_again(self, wrapper: str, world_size: int, every: bool) -> None:
        skip_if(self, cannot_make(wrapper))
        self.assertEqual(loaded_all(world_size, every)[wrapper]["saved again"], "")
        check_files(folder_of(every) / f"again {wrapper} {world_size}", oracle_after(FURTHER))


@pytest.mark.slow
class WholeMatrixTest(Matrix):
    @parameterized.expand(EACH)
    def test_files_hold_the_unwrapped_model_and_optimizer(self, wrapper: str, world_size: int) -> None:
        self.check_saved(wrapper, world_size, every=True)

    @parameterized.expand(EACH)
    def test_every_wrapper_is_restored_exactly(self, wrapper: str, world_size: int) -> None:
        self.check_restored(wrapper, world_size, POSSIBLE, every=True)

    @parameterized.expand(EACH)
    def test_what_was_restored_and_trained_on_is_saved_again(self, wrapper: str, world_size: int) -> None:
        self.check_saved_again(wrapper, world_size, every=True)


class MatrixTest(Matrix):
    @parameterized.expand(QUICK)
    def test_files_hold_the_unwrapped_model_and_optimizer(self, wrapper: str, world_size: int) -> None:
        self.check_saved(wrapper, world_size, every=False)

    @parameterized.expand(QUICK)
    def test_every_wrapper_is_restored_exactly(self, wrapper: str, world_size: int) -> None:
        self.check_restored(wrapper, world_size, sources_of(wrapper, world_size), every=False)

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
        saved_all(int(source.split()[-1]), False)
        fresh = Oracle(OfModel(two_groups), 0, Whole)
        fresh.model.load_state_dict(safetensors.torch.load_file(folder_of(False) / source / "model.safetensors"))
        load_plain(folder_of(False) / source, fresh.optim)
        check_same("plain optimizer", in_order(fresh.by_name()), in_order(oracle_after(STEPS).by_name()))
        fresh.step(range(STEPS, FURTHER))
        check_same("trained on", in_order(fresh.by_name()), in_order(oracle_after(FURTHER).by_name()))
        check_same("trained on", dict(fresh.model.state_dict()), dict(oracle_after(FURTHER).model.state_dict()))

    @parameterized.expand(("fairscale flat 4", "HSDP 4", "FSDP2 3", "plain 1"))
    def test_load_without_ranks(self, source: str) -> None:
        saved_all(int(source.split()[-1]), False)
        fresh = Oracle(OfModel(two_groups), 0, Whole)
        restored = fsdp_optim.load(str(folder_of(False) / source), fresh.model, fresh.optim, progress=False)
        wanted = oracle_after(STEPS)
        check_same("model", dict(fresh.model.state_dict()), dict(wanted.model.state_dict()))
        check_same("state", in_order(fresh.by_name()), in_order(wanted.by_name()))
        groups = [dict(enumerate(one.optim.state_dict()["param_groups"])) for one in (fresh, wanted)]
        check_same("groups", in_order(groups[0]), in_order(groups[1]))
        self.assertEqual(restored["wrapper"], source.rpartition(" ")[0])
        self.assertIsInstance(restored, dict)

    def test_only_the_extra(self) -> None:
        saved_all(3, False)
        restored = fsdp_optim.load(folder_of(False) / "FSDP2 3")
        check_same("extra", dict(restored), {"wrapper": "FSDP2", "table": torch.arange(5)})
