"""save and load: every wrapper at several world sizes, what plain safetensors sees, and what is refused.

The oracle is the unwrapped model, trained alike; files are opened with safetensors alone. What one wrapper loads is compared
with the same wrapper that has trained itself, elements of padding left out.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import json
import logging
import os
import random
import tempfile
import threading
import traceback
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.checkpoints import (
    InFolder,
    Whole,
    buffers_of,
    check_files,
    everything,
    header_of,
    load,
    load_trained,
    mine,
    opened,
    optims_of,
    oracle_after,
    save,
    save_trained,
    scramble,
)
from kit.groups import (
    Distribution,
    name_of_experts,
    plain_experts,
    with_experts,
)
from kit.models import Tied
from kit.opaque import Blockwise, opaque_state
from kit.optimizers import Peculiar, two_groups
from kit.options import as_options, state_for
from kit.torch_limits import cannot_make, cannot_run, skip_if
from kit.trained import state_by_name
from kit.wrapping import (
    STEPS,
    WRAPPERS,
    Differs,
    Net,
    OfModel,
    Oracle,
    Trained,
    adam,
    adamw_tensor_lr,
    check_refused,
    check_same,
    cpu,
    error_text,
    freeze_stem,
    in_fairscale,
    in_fsdp1,
    in_fsdp2,
    local_of,
    sgd,
    without_stem,
)
from parameterized import parameterized
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import fsdp_optim
import fsdp_optim.fairscale
from fsdp_optim.storage.posix import writer
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks
from fsdp_optim.verbs.load_state import load_shard

SIZES = (1, 3, 4)  # of the matrix; most other tests have 2 ranks
FURTHER = STEPS + 2


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    stem = [param for name, param in named if "stem" in name.split(".")]
    rest = [param for name, param in named if "stem" not in name.split(".")]
    return [adam(stem), sgd(rest)]


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


def check_groups(folder: Path, oracle: Oracle) -> None:
    name_of = {id(param): name for name, param in oracle.model.named_parameters()}
    wanted = [
        {**{k: group[k] for k in sorted(group)}, "params": [name_of[id(p)] for p in group["params"]]}
        for group in oracle.optim.param_groups
    ]
    got = [{k: group[k] for k in sorted(group)} for group in json.loads(header_of(folder, "optim")["param_groups"])]
    check_same("param_groups", got, json.loads(json.dumps(wanted)))


def in_order(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """With the values of each parameter by the order of their names."""
    return {name: {key: values[key] for key in sorted(values)} for name, values in state.items()}


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
    check = dist.get_world_size() == 3
    restored = load(path, target, compare=check)
    check_same("restored", mine(target), wanted)
    check_same("extra", dict(restored.state), {"wrapper": source, "table": torch.arange(5)})
    scratch = [value.tolist() for name, value in buffers_of(target).items() if name.endswith("scratch")]
    check_same("a buffer that is not persistent", scratch, [[1.0] * 3])
    check_same("saved by", restored.world_size, int(path.name.split()[-1]))
    check_same("absent", sorted(restored.absent), [])


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
        restored = fsdp_optim.load(
            str(folder_of(False) / source), fresh.model, fresh.optim, options=fsdp_optim.LoadOptions(progress=False)
        )
        wanted = oracle_after(STEPS)
        check_same("model", dict(fresh.model.state_dict()), dict(wanted.model.state_dict()))
        check_same("state", in_order(fresh.by_name()), in_order(wanted.by_name()))
        groups = [dict(enumerate(one.optim.state_dict()["param_groups"])) for one in (fresh, wanted)]
        check_same("groups", in_order(groups[0]), in_order(groups[1]))
        self.assertEqual(restored.state["wrapper"], source.rpartition(" ")[0])
        self.assertIsInstance(restored.state, dict)

    def test_only_the_extra(self) -> None:
        saved_all(3, False)
        restored = fsdp_optim.load(folder_of(False) / "FSDP2 3")
        check_same("extra", dict(restored.state), {"wrapper": "FSDP2", "table": torch.arange(5)})


# ------------------------------------------------------------------------------------------ other states


def save_with_few_open(path: Path, kwargs: Mapping[str, Any], durable: bool) -> None:
    """Raise where more files were open at once than are said to be."""
    most, real = 0, writer.FolderWriter._fd

    def count(self: writer.FolderWriter, name: str) -> int:
        nonlocal most
        fd = real(self, name)
        most = max(most, len(self._open))
        return fd

    with mock.patch.object(writer, "_MOST_OPEN", 2), mock.patch.object(writer.FolderWriter, "_fd", count):
        save_trained(path, "FSDP1 orig", kwargs, max_file_size=200, overwrite=True, durable=durable)
    check_same("open at once", most, 2)


OTHERS: dict[str, dict[str, Any]] = {
    "a frozen unit": {"prepare": freeze_stem},
    "a unit that is never used": {"unused": ("stem.weight", "stem.bias")},
    "not trained yet": {"steps": 0},
    "parameters that no optimizer has": {"prepare": freeze_stem, "make": OfModel(without_stem)},
    "several optimizers": {"make": OfModel(two_optimizers)},
    "a learning rate that is a tensor": {"make": adamw_tensor_lr},
    "tied weights": {"model": Tied},
}
ABSENT = {
    "a frozen unit": ["stem.bias", "stem.weight"],
    "a unit that is never used": ["stem.bias", "stem.weight"],
    "not trained yet": sorted(name for name, _ in Net().named_parameters()),
}
TRIPS = (("FSDP1 flat", 2, "FSDP2", 3), ("FSDP2", 4, "fairscale flat", 2), ("DDP", 2, "FSDP1 orig", 3))  # in turn


class StatesTest(InFolder):
    @expand(
        soon=[(case, *TRIPS[i % 3]) for i, case in enumerate(OTHERS)][::2],
        later=[(case, *TRIPS[(i + j) % 3]) for i, case in enumerate(OTHERS) for j in (0, 1) if i % 2 or j],
    )
    def test_trip(self, case: str, source: str, size: int, target: str, target_size: int) -> None:
        kwargs = OTHERS[case]
        run_on_ranks(save_trained, size, self.path, source, kwargs)
        oracle = Oracle(**kwargs)
        if isinstance(oracle.optim, torch.optim.Optimizer) and case != "a learning rate that is a tensor":
            check_groups(self.path, oracle)
        check_files(self.path, oracle)
        for found in run_on_ranks(load_trained, target_size, self.path, target, kwargs):
            self.assertEqual(found["absent"], ABSENT.get(case, []))
        self.check_only("step-1")

    @expand(soon=[("fairscale flat", 3, "FSDP2", 2)], later=[("FSDP1 orig", 2, "FSDP2", 3), ("DDP", 2, "HSDP", 4)])
    def test_values_of_every_type(self, source: str, size: int, target: str, target_size: int) -> None:
        """Moments of one, two and eight bytes, 0-dim tensors, numbers, words, None."""
        kwargs = {"make": Peculiar}
        run_on_ranks(save_trained, size, self.path, source, kwargs)
        check_files(self.path, Oracle(Peculiar))
        run_on_ranks(load_trained, target_size, self.path, target, kwargs)

    @expand(*some((("fairscale flat",), ("FSDP1 flat",), ("FSDP1 orig",), ("FSDP2",)), every=2, first=1))
    def test_ranks_that_hold_nothing(self, wrapper: str) -> None:
        """Four ranks, and parameters of one element or none; saved by them, and restored on them."""
        kwargs = {"model": Sparse}
        run_on_ranks(save_trained, 4, self.path, wrapper, kwargs)
        check_files(self.path, Oracle(model=Sparse))
        run_on_ranks(load_trained, 1, self.path, wrapper, kwargs)
        run_on_ranks(save_trained, 1, self.path, wrapper, kwargs, overwrite=True)
        run_on_ranks(load_trained, 4, self.path, wrapper, kwargs)
        self.check_only("step-1")

    def test_tied_weights_open_as_one(self) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"model": Tied})
        names = list(safetensors.torch.load_file(self.path / "model.safetensors"))
        self.assertIn("embed.weight", names)
        self.assertNotIn("out.weight", names)
        model, oracle = Tied(), Oracle(model=Tied)
        safetensors.torch.load_model(model, str(self.path / "model.safetensors"))
        check_same("safetensors' own loading", dict(model.state_dict()), dict(oracle.model.state_dict()))
        self.assertIs(model.out.weight, model.embed.weight)

    @expand(soon=[("FSDP2 x TP", 4, "FSDP1 flat", 3)], later=[("FSDP1 flat", 3, "FSDP2 x TP", 4)])
    def test_buffer_of_a_tensor_parallel_unit(self, source: str, size: int, target: str, target_size: int) -> None:
        """torch makes it a DTensor."""
        skip_if(self, cannot_make(source) or cannot_make(target))
        kwargs = {"model": WithOffset}
        run_on_ranks(save_trained, size, self.path, source, kwargs)
        check_files(self.path, Oracle(model=WithOffset))
        run_on_ranks(load_trained, target_size, self.path, target, kwargs)

    @expand(*some(("fairscale flat", "FSDP1 orig", "FSDP2"), every=2))
    def test_state_that_is_not_shaped_like_its_parameter(self, wrapper: str) -> None:
        run_on_ranks(save_blockwise, 2, self.path, wrapper)
        self.assertEqual(run_on_ranks(load_blockwise, 2, self.path, wrapper), [("", "")] * 2)
        check_refused(
            "3 ranks", run_on_ranks(load_blockwise, 3, self.path, wrapper), "StateError", "absmax", "2 shards"
        )

    def test_experts_on_groups_of_their_own(self) -> None:
        run_on_ranks(save_experts, 3, self.path, [[0], [1], [2]])
        plain, optim = plain_experts(3)
        self.assertEqual(sorted(opened(self.path, "model")), sorted(name for name, _ in plain.named_parameters()))
        state = {
            f"state.{n}.{key}": v for n, values in state_by_name(plain, optim).items() for key, v in values.items()
        }
        check_same("optim", opened(self.path, "optim"), {key: state[key] for key in sorted(state)})
        run_on_ranks(load_experts, 2, self.path, [[2], [0, 1]])
        for stem in ("model", "optim"):
            check_same(f"{stem}, again", opened(self.root / "again", stem), opened(self.path, stem))

    def test_model_on_some_of_the_ranks(self) -> None:
        """Rank 0 has no part in it, and makes no call."""
        run_on_ranks(trip_on_last_two, 3, self.path)
        check_files(self.path, Oracle())

    @expand(soon=[("FSDP1 flat", "FSDP2")], later=[("FSDP2", "fairscale flat"), ("plain", "DDP")])
    def test_no_optimizer(self, source: str, target: str) -> None:
        run_on_ranks(save_weights, 2, self.path, source)
        self.assertEqual(list(self.path.glob("optim*")), [])
        check_same("model", opened(self.path, "model"), dict(sorted(Oracle(model=Whole).model.state_dict().items())))
        check_refused("an optimizer, and no state", run_on_ranks(load_weights, 3, self.path, target), "StateError")

    def test_weights_alone_of_a_checkpoint_with_an_optimizer(self) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP1 orig", {"model": Whole})
        run_on_ranks(load_weights, 3, self.path, "FSDP2")

    @expand(soon=[("in_place", 3), ("per_rank_files", 3)], later=[("in_place", 1), ("per_rank_files", 1)])
    def test_strategy(self, strategy: str, size: int) -> None:
        kwargs = {"model": Whole, "make": OfModel(two_groups)}
        run_on_ranks(save_trained, size, self.path, "FSDP1 flat", kwargs, strategy=strategy, durable=True)
        check_files(self.path, oracle_after(STEPS))
        check_groups(self.path, oracle_after(STEPS))
        run_on_ranks(load_trained, 2, self.path, "FSDP2", kwargs, compare=True)

    @parameterized.expand((("small buckets", {"bucket_nbytes": 4096}), ("no checksums", {"checksums": False})))
    def test_option(self, _: str, options: dict[str, Any]) -> None:
        kwargs = {"model": Whole, "make": OfModel(two_groups)}
        run_on_ranks(save_trained, 3, self.path, "fairscale flat", kwargs, **options)
        check_files(self.path, oracle_after(STEPS))
        self.assertEqual(bool(list(self.path.glob("*.sums"))), options.get("checksums", True))
        options.pop("checksums", None)
        run_on_ranks(load_trained, 2, self.path, "FSDP2", kwargs, **options)

    def test_more_files_than_may_be_open(self) -> None:
        kwargs = {"model": Whole, "make": OfModel(two_groups)}
        for durable in (True, False):
            run_on_ranks(save_with_few_open, 2, self.path, kwargs, durable)
            check_files(self.path, oracle_after(STEPS))
            self.assertGreater(len(list(self.path.glob("*.safetensors"))), 8)
        run_on_ranks(load_trained, 3, self.path, "FSDP2", kwargs, compare=True)

    def test_several_files(self) -> None:
        kwargs = {"model": Whole, "make": OfModel(two_groups)}
        limit = 200
        run_on_ranks(save_trained, 3, self.path, "HSDP", kwargs, max_file_size=limit)
        oracle = oracle_after(STEPS)
        check_files(self.path, oracle)
        check_groups(self.path, oracle)
        for stem in ("model", "optim"):
            index = json.loads((self.path / f"{stem}.safetensors.index.json").read_text())
            names = sorted(file.name for file in self.path.glob(f"{stem}*.safetensors"))
            self.assertGreater(len(names), 2)
            self.assertEqual(names, [f"{stem}-{i + 1:05}-of-{len(names):05}.safetensors" for i in range(len(names))])
            self.assertEqual(sorted(set(index["weight_map"].values())), names)
            nbytes = {name: value.nbytes for name, value in opened(self.path, stem).items()}
            self.assertEqual(index["metadata"]["total_size"], sum(nbytes.values()))
            for name in names:
                inside = [nbytes[key] for key, file in index["weight_map"].items() if file == name]
                self.assertTrue(len(inside) == 1 or sum(inside) <= limit, (name, inside))
        run_on_ranks(load_trained, 2, self.path, "FSDP1 orig", kwargs)


def save_blockwise(path: Path, wrapper: str) -> None:
    with cpu():
        save(path, Trained(wrapper, Blockwise))


def load_blockwise(path: Path, wrapper: str) -> tuple[str, str]:
    """State that is not shaped like its parameter: back on as many ranks as it is of, refused on others."""
    with cpu():
        alike, target = (Trained(wrapper, Blockwise, steps) for steps in (STEPS, 1))
        before = everything(target)
        error = error_text(lambda: load(path, target))
        if error[0]:
            check_same("after the refusal", everything(target), before)
        else:
            check_same("opaque values", opaque_state(target), opaque_state(alike))
            check_same("restored", mine(target), mine(alike))
        return error


@fairscale_on_cpu()
def save_experts(path: Path, distribution: Distribution) -> None:
    model, optim, _ = with_experts(distribution[dist.get_rank()])
    fsdp_optim.save(
        path, model, optim, options=fsdp_optim.SaveOptions(name_of=name_of_experts(distribution), progress=False)
    )


@fairscale_on_cpu()
def load_experts(path: Path, distribution: Distribution) -> None:
    model, optim, _ = with_experts(distribution[dist.get_rank()], steps=0)
    name_of = name_of_experts(distribution)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-3)
    fsdp_optim.load(path, model, optim, options=fsdp_optim.LoadOptions(name_of=name_of, progress=False, compare=True))
    full = fsdp_optim.fairscale.gather_full_optim_state_dict(
        model, optim, None, "name", collect="all", options=fsdp_optim.CallOptions(name_of=name_of)
    )
    check_same("state", in_order(full["state"]), in_order(state_by_name(*plain_experts(3))))
    fsdp_optim.save(
        path.parent / "again", model, optim, options=fsdp_optim.SaveOptions(name_of=name_of, progress=False)
    )


class WithOffset(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem.register_buffer("offset", torch.tensor([0.1, 0.2]))


class Sparse(nn.Module):
    """First, in the middle and last: parameters that most of four ranks have nothing of."""

    units = ("inner", "")

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0, 5))
        self.inner = nn.Linear(1, 1)
        self.between = nn.Parameter(torch.empty(2, 3))
        self.last = nn.Parameter(torch.empty(1))
        self.nothing = nn.Parameter(torch.empty(0))


def trip_on_last_two(path: Path) -> None:
    mesh = DeviceMesh("cpu", [1, 2])
    if dist.get_rank():
        trained, target = (Trained(lambda model: in_fsdp2(model, mesh), steps=steps) for steps in (STEPS, 0))
        save(path, trained, per_rank_extra={"rank": dist.get_rank()})
        scramble(target)
        restored = load(path, target)
        check_same("restored", mine(target), mine(trained))
        check_same("of this rank", restored.state["rank"], dist.get_rank())


def save_weights(path: Path, wrapper: str) -> None:
    with cpu():
        trained = Trained(wrapper, model=Whole)
        fsdp_optim.save(
            path, trained.model, options=fsdp_optim.SaveOptions(process_group=trained.process_group, progress=False)
        )


def load_weights(path: Path, wrapper: str) -> tuple[str, str]:
    """Returns what is said to an optimizer for which there is no state."""
    with cpu():
        alike, target = Trained(wrapper, model=Whole), Trained(wrapper, model=Whole, steps=0)
        before = everything(target)
        error = ("", "")
        if not list(path.glob("optim*")):
            error = error_text(lambda: load(path, target))
            check_same("after the refusal", everything(target), before)
        state = mine(target)["state"]
        fsdp_optim.load(
            path, target.model, options=fsdp_optim.LoadOptions(process_group=target.process_group, progress=False)
        )
        got, wanted = mine(target), mine(alike)
        check_same("parameters", got["values"], wanted["values"])
        check_same("buffers", got["buffers"], wanted["buffers"])
        check_same("the optimizer is left alone", got["state"], state)
        return error


# ------------------------------------------------------------------------------------------ after a forward pass

LIVE: dict[str, str | Callable[[nn.Module], Any]] = {
    **{wrapper: wrapper for wrapper in WRAPPERS if wrapper != "FSDP2 x TP"},
    "fairscale, not resharding": lambda model: in_fairscale(model, reshard_after_forward=False),
    "FSDP1 SHARD_GRAD_OP": lambda model: in_fsdp1(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "FSDP1 orig SHARD_GRAD_OP": lambda model: in_fsdp1(
        model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True
    ),
    "FSDP1 NO_SHARD": lambda model: in_fsdp1(model, sharding_strategy=ShardingStrategy.NO_SHARD),
    "FSDP2, not resharding": lambda model: in_fsdp2(model, reshard_after_forward=False),
}


def evaluate(trained: Trained) -> Tensor:
    """Some wrappers leave whole parameters in the model after it."""
    trained.model.eval()
    with torch.no_grad():
        return trained.model(torch.arange(10.0).reshape(2, 5) / 64).clone()


def train_really(trained: Trained) -> None:
    trained.forget_gradients()
    trained.model.train()
    for _ in range(2):
        trained.model(torch.arange(10.0).reshape(2, 5) / 64).sum().backward()
        for optim in optims_of(trained):
            optim.step()
            optim.zero_grad()


def held(trained: Trained) -> dict[str, Any]:
    """`mine` without state of parameters of which this rank has nothing: torch's FSDP1 does not count their steps."""
    found = mine(trained)
    state = {name: values for name, values in found["state"].items() if found["values"][name].numel()}
    return {**found, "state": state}


def load_after_evaluation(root: Path, wrapper: str) -> None:
    with cpu():
        source, alike, target = (Trained(LIVE[wrapper], steps=steps) for steps in (STEPS, STEPS, 0))
        parts, wanted = mine(alike), evaluate(alike)
        check_same("outputs", evaluate(source), wanted)
        save(root / "evaluated", source)
        check_same("outputs after saving", evaluate(source), wanted)
        if torch.equal(evaluate(target), wanted):
            raise Differs("the outputs were to depend on the parameters")
        load(root / "evaluated", target)
        check_same("restored", mine(target), parts)
        check_same("outputs after loading", evaluate(target), wanted)


def load_between_steps(root: Path, wrapper: str) -> None:
    with cpu():
        source, target = (Trained(LIVE[wrapper], steps=steps) for steps in (STEPS, 1))
        train_really(source)
        train_really(target)
        save(root / "trained", source)
        load(root / "trained", target)
        check_same("restored", held(target), held(source))
        for one in (source, target):
            train_really(one)
        check_same("trained on", held(target), held(source))
        check_same("outputs", evaluate(target), evaluate(source))


CASTING: dict[str, Callable[[nn.Module], Any]] = {
    "fairscale": in_fairscale,  # to float32
    "FSDP1": lambda model: in_fsdp1(model, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16)),
    "FSDP1 orig": lambda model: in_fsdp1(
        model, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16), use_orig_params=True
    ),
}


def load_cast_buffers(root: Path, wrapper: str, first: str) -> None:
    """`first`: which of the two has been through a forward pass, which is when wrappers cast their buffers."""
    with cpu():
        source, alike, target = (Trained(CASTING[wrapper], steps=steps, model=Whole) for steps in (STEPS, STEPS, 0))
        for one in (source, target):
            if first in ("both", "source" if one is source else "target"):
                evaluate(one)
        save(root / "step-1", source)
        load(root / "step-1", target)
        check_same("outputs", evaluate(target), evaluate(alike))
        buffers, wanted = buffers_of(target), buffers_of(alike)
        check_same("names of buffers", list(buffers), list(wanted))
        for name, buffer in wanted.items():
            torch.testing.assert_close(buffers[name].double(), buffer.double(), rtol=2**-8, atol=0, msg=name)


class LiveTest(InFolder):
    @expand(*some(itertools.product(CASTING, ("source", "target", "both")), every=4))
    def test_buffers_that_the_wrapper_casts(self, wrapper: str, first: str) -> None:
        """A job that is started again has not cast its buffers yet when it loads."""
        run_on_ranks(load_cast_buffers, 2, self.root, wrapper, first)

    @expand(*some(LIVE, every=4))
    def test_after_an_evaluation(self, wrapper: str) -> None:
        """Outputs after loading are those of what was loaded."""
        skip_if(self, cannot_run(wrapper))
        run_on_ranks(load_after_evaluation, 4 if wrapper == "HSDP" else 2, self.root, wrapper)
        check_files(self.root / "evaluated", Oracle())

    @expand(*some(LIVE, every=4, first=2))
    def test_between_steps(self, wrapper: str) -> None:
        skip_if(self, cannot_run(wrapper))
        run_on_ranks(load_between_steps, 4 if wrapper == "HSDP" else 2, self.root, wrapper)


# ------------------------------------------------------------------------------------------ bytes


class Wide(nn.Module):
    """A few MiB, most of it in tensors of one size."""

    units = (*(f"layers.{i}" for i in range(4)), "")
    tensor_parallel = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))


@contextlib.contextmanager
def counted() -> Iterator[dict[str, collections.Counter[str]]]:
    """Bytes that this process reads from and writes to each file through `os`, by the file's name."""
    found = {"read": collections.Counter[str](), "written": collections.Counter[str]()}
    lock = threading.Lock()

    def counting(name: str, which: str) -> Any:
        real = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            result = real(fd, *args)
            file = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            with lock:
                found[which][file] += result if isinstance(result, int) else len(result)
            return result

        return mock.patch.object(os, name, call)

    with contextlib.ExitStack() as stack:
        for name in ("pread", "preadv", "read"):
            stack.enter_context(counting(name, "read"))
        for name in ("pwrite", "pwritev", "write"):
            stack.enter_context(counting(name, "written"))
        yield found


def tensor_bytes(counts: Mapping[str, int]) -> int:
    return sum(n for file, n in counts.items() if file.startswith(("model", "optim")) and file.endswith(".safetensors"))


def head_and_data(file: Path) -> tuple[int, int]:
    """How long the header of a safetensors file is, and the rest."""
    with file.open("rb") as stream:
        head = 8 + int.from_bytes(stream.read(8), "little")
    return head, file.stat().st_size - head


def sizes_of(folder: Path) -> tuple[int, int]:
    """Of all headers, and of all data."""
    files = [*folder.glob("model*.safetensors"), *folder.glob("optim*.safetensors")]
    heads, data = zip(*map(head_and_data, files), strict=True)
    return sum(heads), sum(data)


CUT_ANEW = ("fairscale flat", "FSDP2", "HSDP")
"""The wrappers of which a checkpoint of another world size is read, too."""


def bytes_written(root: Path, wrappers: Sequence[str]) -> dict[str, dict[str, int]]:
    found = {}
    for wrapper in wrappers:
        with cpu():
            trained = Trained(wrapper, steps=1, model=Wide)
            with counted() as counts:
                save(root / f"{wrapper} {dist.get_world_size()}", trained)
            found[wrapper] = {f: n for f, n in counts["written"].items() if tensor_bytes({f: n})}
    return found


def bytes_read(root: Path, size: int, wrappers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """By wrapper: read, and said to be read."""
    found = {}
    for wrapper in wrappers:
        with cpu():
            target = Trained(wrapper, steps=0, model=Wide)
            with counted() as counts:
                restored = load(root / f"{wrapper} {size}", target)
            found[wrapper] = (tensor_bytes(counts["read"]), restored.nbytes)
    return found


class BytesTest(unittest.TestCase):
    def test_every_byte_is_written_once_and_read_once(self) -> None:
        self.check_bytes((*CUT_ANEW, "DDP"), CUT_ANEW)

    @pytest.mark.slow
    def test_every_byte_is_written_once_and_read_once_by_every_wrapper(self) -> None:
        self.check_bytes(tuple(WRAPPERS), tuple(WRAPPERS))

    def check_bytes(self, wrappers: Sequence[str], cut_anew: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            written = run_on_ranks(bytes_written, 4, root, wrappers)
            run_on_ranks(bytes_written, 3, root, cut_anew)
            by_size = {
                4: run_on_ranks(bytes_read, 4, root, 4, wrappers),
                3: run_on_ranks(bytes_read, 4, root, 3, cut_anew),
            }
            sizes = {path.name: sizes_of(path) for path in root.iterdir()}
        wrong = []
        for wrapper in wrappers:
            heads, data = sizes[f"{wrapper} 4"]
            by_rank = [sum(counts[wrapper].values()) for counts in written]
            if not data <= sum(by_rank) <= data + heads:
                wrong.append(f"{wrapper}: {data} bytes and {heads} of headers, written {by_rank}, {sum(by_rank)}")
            if max(by_rank) > 1.1 * data / 4 + heads:
                wrong.append(f"{wrapper}: {data} bytes, written not evenly: {by_rank}")
            for size, found in by_size.items():
                if wrapper not in found[0]:
                    continue
                heads, data = sizes[f"{wrapper} {size}"]
                by_rank, said = ([counts[wrapper][i] for counts in found] for i in (0, 1))
                where = f"{wrapper}, saved by {size}, loaded by 4: {data} bytes and {heads} of headers, read {by_rank}"
                if not data <= sum(by_rank) <= 1.05 * data + 4 * heads:
                    wrong.append(f"{where}, {sum(by_rank)}")
                if max(by_rank) > 1.1 * data / 4 + heads:
                    wrong.append(f"{where}: not evenly")
                if not all(data / 4.4 <= one <= read for one, read in zip(said, by_rank, strict=True)):
                    wrong.append(f"{where}, said {said}")
        self.assertEqual(wrong, [])

    @parameterized.expand(("DDP", "plain"))
    def test_replicas_share_one_large_tensor(self, wrapper: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_on_ranks(bytes_of_one, 4, Path(folder) / "step-1", wrapper)
            heads, data = sizes_of(Path(folder) / "step-1")
        self.assertTrue(data <= sum(by_rank) <= data + heads, (by_rank, data, heads))
        self.assertLess(max(by_rank), 1.1 * data / 4 + heads, by_rank)

    def test_with_per_rank_files_one_rank_writes_a_file(self) -> None:
        """All of its data. The headers are the first rank's."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step-1"
            by_rank = run_on_ranks(files_written, 3, path)
            sizes = {file.name: head_and_data(file) for file in path.glob("*-of-*.safetensors")}
        owners = set()
        for name, (head, data) in sizes.items():
            written = [counts.get(name, 0) for counts in by_rank]
            owner = written.index(max(written))
            owners.add(owner)
            self.assertTrue(data <= written[owner] <= data + head, (name, head, data, written))
            self.assertTrue(data <= sum(written) <= data + head, (name, head, data, written))
        self.assertEqual(owners, {0, 1, 2})


def bytes_of_one(path: Path, wrapper: str) -> int:
    trained = Trained(wrapper, steps=0, model=lambda: nn.Linear(1024, 1024, bias=False))
    with counted() as counts:
        save(path, trained)
    return tensor_bytes(counts["written"])


def files_written(path: Path) -> dict[str, int]:
    trained = Trained("FSDP2", steps=1, model=Wide)
    with counted() as counts:
        save(path, trained, strategy="per_rank_files")
    return dict(counts["written"])


# ------------------------------------------------------------------------------------------ extra


@dataclasses.dataclass
class Own:
    """A class of the trainer's."""

    best: float
    table: list[int]


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.IntEnum):
    RED = 1


def trainer_state() -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 3)
    wide = torch.arange(12.0).reshape(3, 4)
    return {
        "step": 1000,
        "big": 2**70 + 1,
        "negative zero": -0.0,
        "tiny": 5e-324,
        "third": 1 / 3,
        "infinite": [float("inf"), float("-inf")],
        "none": None,
        "flags": [True, False, 1, 0],
        "word": 'ö "quoted" \n\x00 日本語 😀',
        "tuple": (1, (2.0, None), [3, ("four",)], ()),
        "nested": {"a": {"b": {"": [{}, [], {"c.d/e": (1,)}]}}},
        "__tuple__": {"__tuple__": [1, 2]},
        "tensor": {"__tensor__": 0, "$tensor": "x", "__type__": "tuple", "type": "tensor", "tuple": [1], "dict": {}},
        "__metadata__": {"__metadata__": "x"},
        "../../up": "/etc",
        "scheduler": scheduler.state_dict(),
        "python": random.Random(3).getstate(),
        "rng": torch.get_rng_state(),
        "tensors": (
            torch.tensor(1.5, dtype=torch.bfloat16),
            torch.empty(0, 3, dtype=torch.int16),
            torch.tensor([True, False, True]),
            torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float64),
            wide.t(),
            wide[1:, ::2],
            wide[1],
            {"deep": [torch.tensor(2**62)]},
        ),
    }


class ChangedOrRefused:
    """Values that JSON would give back as other values."""

    values: dict[str, Any] = {
        "numbers as keys": {30: 1, 40: 2},
        "True as a key": {True: "a"},
        "None as a key": {None: "a"},
        "tuples as keys": {(1, 2): "a"},
        "a set": {1, 2},
        "bytes": b"\x00\xff",
        "complex": 1j,
        "not a number": float("nan"),
        "numpy's float": numpy.float64(0.5),
        "numpy's int": numpy.int64(3),
        "numpy's array": numpy.arange(3),
        "Counter": collections.Counter({3: 1}),
        "OrderedDict": collections.OrderedDict(a=1),
        "defaultdict": collections.defaultdict(int, a=1),
        "named tuple": Point(1, 2),
        "enum": Colour.RED,
        "Size": torch.Size([1, 2]),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "half a character": "\ud800",
        "own class": Own(0.5, [1, 2]),
    }


def alike(got: Any, wanted: Any) -> bool:
    return type(got) is type(wanted) and repr(got) == repr(wanted)


class Tripwire:
    """Raises when it is unpickled, and leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


class ExtraTest(InFolder):
    def plain(self) -> nn.Module:
        return nn.Linear(3, 2)

    def test_comes_back_as_it_was(self) -> None:
        extra = trainer_state()
        given = copy.deepcopy(extra)
        fsdp_optim.save(self.path, self.plain(), state=state_for(extra))
        check_same("what was given", extra, given)
        restored = fsdp_optim.load(self.path, self.plain())
        check_same("extra", dict(restored.state), given)
        self.assertEqual(str(restored.state["negative zero"]), "-0.0")
        for tensor in restored.state["tensors"][:-1]:
            tensor.zero_()  # each in memory of its own, that can be written to
        check_same("read again", dict(fsdp_optim.load(self.path).state), given)

    def test_none_and_nothing(self) -> None:
        for number, extra in enumerate((None, {})):
            path = self.root / f"step-{number}"
            fsdp_optim.save(path, self.plain(), state=state_for(extra))
            restored = fsdp_optim.load(path)
            self.assertEqual(dict(restored.state), {})
            self.assertEqual((tuple(restored.missing_keys), tuple(restored.unexpected_keys)), ((), ()))

    @parameterized.expand(ChangedOrRefused.values)
    def test_never_changed_in_silence(self, case: str) -> None:
        """Given back as it was, or refused by name; with allow_pickle=True always given back."""
        value = ChangedOrRefused.values[case]
        extra = {"good": 1, "outer": [{"inner name": value}]}
        kind, text = error_text(lambda: fsdp_optim.save(self.path, self.plain(), state=state_for(extra)))
        if kind:
            self.assertIn("inner name", text)
            self.assertIn("allow_pickle", text)
            self.assertEqual(kind, "CheckpointError")
            self.check_only()
        else:
            back = fsdp_optim.load(self.path).state["outer"][0]["inner name"]
            self.assertTrue(alike(back, value), f"{value!r} ({type(value)}) came back as {back!r} ({type(back)})")
        fsdp_optim.save(
            self.path,
            self.plain(),
            state=state_for(extra),
            options=fsdp_optim.SaveOptions(allow_pickle=True),
            overwrite=True,
        )
        back = fsdp_optim.load(self.path, options=fsdp_optim.LoadOptions(allow_pickle=True)).state["outer"][0][
            "inner name"
        ]
        self.assertTrue(alike(back, value), f"{value!r} came back from the pickle as {back!r} ({type(back)})")

    @parameterized.expand((("of an own class", Own(0.5, [1])), ("nothing but an object", object()), ("code", print)))
    def test_a_value_that_is_neither_json_nor_a_tensor(self, _: str, value: Any) -> None:
        extra = {"outer": [{"inner name": value}]}
        for arguments in ({"extra": extra}, {"per_rank_extra": extra}):
            kind, text = error_text(
                lambda arguments=arguments: fsdp_optim.save(
                    self.path, self.plain(), **as_options(fsdp_optim.SaveOptions, **arguments)
                )
            )
            self.assertEqual(kind, "CheckpointError", text)
            self.assertIn("inner name", text)
            self.check_only()

    def test_nothing_is_unpickled_unasked(self) -> None:
        mark = self.root / "mark"
        extra = {"bomb": Tripwire(mark)}
        source, model = self.plain(), self.plain()
        fsdp_optim.save(
            self.path,
            source,
            state=state_for(extra, extra),
            options=fsdp_optim.SaveOptions(allow_pickle=True),
        )
        self.check_only("step-1")
        restored = fsdp_optim.load(self.path, model)  # the weights need no trust
        check_same("the model", dict(model.state_dict()), dict(source.state_dict()))
        for ask in (lambda: restored.state["bomb"], lambda: dict(restored.state)):
            kind, text = error_text(ask)
            self.assertEqual(kind, "CheckpointError", text)
            self.assertIn("allow_pickle", text)
        self.check_only("step-1")
        fsdp_optim.load(self.path, model, options=fsdp_optim.LoadOptions(allow_pickle=True))
        self.check_only("step-1", "mark")

    @expand(
        soon=[("FSDP2", 2, "fairscale flat", 4), ("FSDP1 flat", 4, "FSDP1 orig", 2)], later=[("DDP", 3, "plain", 3)]
    )
    def test_of_each_rank(self, source: str, size: int, target: str, target_size: int) -> None:
        run_on_ranks(save_per_rank, size, self.path, source)
        found = run_on_ranks(load_per_rank, target_size, self.path, target)
        for rank, (missing, state, records) in enumerate(found):
            wanted = of_rank(rank) if rank < size else {}
            check_same("values", state, {"step": 7, "pair": (1, 2), **wanted})
            absent = () if rank < size else tuple(f"state[{name!r}]" for name in of_rank(0))
            check_same("missing", missing, absent)
            told = [text for text in records if "had no values of its own" in text]
            self.assertEqual(bool(told), rank >= size, (rank, records))

    def test_one_rank_has_a_value_that_is_refused(self) -> None:
        for bad in (0, 1, 2):
            errors = run_on_ranks(save_bad_extra, 3, self.path, bad)
            check_refused(f"rank {bad}", errors, "CheckpointError", "inner name")
            self.check_only()


def of_rank(rank: int) -> dict[str, Any]:
    return {"rank": rank, "rng": torch.arange(rank + 3), "nested": {"tuple": (rank, None)}}


def save_per_rank(path: Path, wrapper: str) -> None:
    with cpu():
        save(path, Trained(wrapper), extra={"step": 7, "pair": (1, 2)}, per_rank_extra=of_rank(dist.get_rank()))


def load_per_rank(path: Path, wrapper: str) -> tuple[tuple[str, ...], dict[str, Any], list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp_optim")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with cpu():
            restored = load(path, Trained(wrapper, steps=0))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return restored.missing_keys, dict(restored.state), records


def save_bad_extra(path: Path, bad: int) -> tuple[str, str]:
    value: Any = object() if dist.get_rank() == bad else [1, 2]
    return error_text(lambda: save(path, Trained("FSDP2"), per_rank_extra={"outer": [{"inner name": value}]}))


# ------------------------------------------------------------------------------------------ refusals, strict, keep


class Reshaped(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.mix = nn.Parameter(torch.empty(3, 2, 4))


class Renamed(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.top = self.head
        del self.head


class OtherBuffers(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3, 2)
        self.count = torch.tensor(1, dtype=torch.int32)
        self.register_buffer("newer", torch.zeros(1))
        del self.empty


class Longer(Whole):
    """`Whole` and one more unit, with a buffer of its own."""

    units = ("stem", "block.0", "block", "added", "")

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Linear(3, 2)
        self.added.register_buffer("seen", torch.tensor([4, 5]))


class Small(nn.Module):
    """Few enough elements that bf16 has a number for each."""

    units = ("inner", "")

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.last = nn.Linear(7, 5, bias=False)


def halves(model: nn.Module) -> None:
    model.to(torch.bfloat16)


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "shapes": (
        {"model": Whole},
        {"model": Reshaped},
        ("head.weight", "[2, 5]", "[3, 5]", "head.bias", "[2]", "[3]", "mix", "[3, 2, 5]", "[3, 2, 4]"),
    ),
    "names": ({"model": Whole}, {"model": Renamed}, ("head.weight", "head.bias", "top.weight", "top.bias")),
    "dtypes": (
        {"model": Small},
        {"model": Small, "prepare": halves},
        ("inner.weight", "inner.bias", "last.weight", "bfloat16", "float32"),
    ),
    "buffers": (
        {"model": Whole},
        {"model": OtherBuffers},
        ("mean", "[2, 3]", "[3, 2]", "count", "int64", "int32", "newer", "empty"),
    ),
    "longer": ({"model": Whole}, {"model": Longer}, ("added.weight", "added.bias", "added.seen")),
    "shorter": ({"model": Longer}, {"model": Whole}, ("added.weight", "added.bias", "added.seen")),
    "trained now": ({"prepare": freeze_stem}, {}, ("stem.weight", "frozen")),
}
ONLY_WITH_TORCH = ("dtypes",)  # fairscale refuses to wrap parameters that are not fp32


def save_sources(root: Path, wrapper: str) -> None:
    with cpu():
        for case, (source, _, _) in DIFFERENT.items():
            if case not in ONLY_WITH_TORCH or "fairscale" not in wrapper:
                save(root / case, Trained(wrapper, **source))


def load_refused(root: Path, wrapper: str) -> dict[str, tuple[str, str]]:
    found = {}
    with cpu():
        for case, (_, kwargs, _) in DIFFERENT.items():
            if case in ONLY_WITH_TORCH and "fairscale" in wrapper:
                continue
            target = Trained(wrapper, **{**kwargs, "steps": 2})
            before = everything(target)
            found[case] = error_text(lambda case=case, target=target: load(root / case, target))
            check_same(f"{case}: after the refusal", everything(target), before)
    return found


class RefusedTest(InFolder):
    @expand(
        soon=[("fairscale flat", "FSDP2")],
        later=[("FSDP1 flat", "FSDP1 orig"), ("FSDP2", "fairscale flat"), ("DDP", "plain")],
    )
    def test_another_model(self, source: str, target: str) -> None:
        run_on_ranks(save_sources, 2, self.root, source)
        cases = [case for case in DIFFERENT if (self.root / case).exists()]
        if "fairscale" in source:  # something to refuse is there anyway
            run_on_ranks(save_trained, 2, self.root / "dtypes", "FSDP2", DIFFERENT["dtypes"][0])
            cases.append("dtypes")
        by_rank = run_on_ranks(load_refused, 3, self.root, target)
        tried = [case for case in cases if case in by_rank[0]]
        self.assertGreaterEqual(len(tried), len(DIFFERENT) - 1)
        for case in tried:
            check_refused(case, [one[case] for one in by_rank], "StateError", *DIFFERENT[case][2])

    def test_files_that_are_not_there(self) -> None:
        for path in (self.root / "none", self.root):
            errors = run_on_ranks(load_refused_at, 2, path)
            check_refused(str(path), errors, "CheckpointError", str(path))
        self.assertTrue(issubclass(fsdp_optim.CheckpointError, (fsdp_optim.FsdpOptimError)))
        self.assertTrue(issubclass(fsdp_optim.CheckpointError, OSError))

    def test_a_path_that_is_taken(self) -> None:
        kwargs = {"model": Whole, "make": OfModel(two_groups)}
        run_on_ranks(save_trained, 2, self.path, "FSDP2", kwargs)
        check_refused(
            "taken", run_on_ranks(save_refused_at, 2, self.path), "CheckpointError", str(self.path), "overwrite"
        )
        check_files(self.path, oracle_after(STEPS))
        self.check_only("step-1")
        run_on_ranks(save_trained, 3, self.path, "FSDP1 orig", {**kwargs, "steps": FURTHER}, overwrite=True)
        check_files(self.path, oracle_after(FURTHER))
        self.check_only("step-1")

    @parameterized.expand((("longer",), ("shorter",)))
    def test_not_strict(self, case: str) -> None:
        source, target, names = DIFFERENT[case]
        run_on_ranks(save_trained, 2, self.path, "FSDP1 flat", source)
        by_rank = run_on_ranks(load_not_strict, 3, self.path, "FSDP2", target)
        missing, unexpected = (sorted(names), []) if case == "longer" else ([], sorted(names))
        self.assertEqual(by_rank, [(missing, unexpected)] * 3)
        for stem in ("model", "optim"):
            saved, before, after = (opened(self.root / name, stem) for name in ("step-1", "before", "after"))
            self.assertEqual(list(after), list(before))
            check_same(stem, after, {name: saved.get(name, before[name]) for name in before})
            kept = [name for name in before if name not in saved]
            self.assertEqual(bool(kept), case == "longer")

    def test_not_strict_refuses_other_shapes(self) -> None:
        source, target, words = DIFFERENT["shapes"]
        run_on_ranks(save_trained, 2, self.path, "FSDP1 flat", source)
        errors = run_on_ranks(refused_not_strict, 2, self.path, "FSDP2", target)
        check_refused("shapes", errors, "StateError", *words)

    @expand(soon=[("fairscale flat", "FSDP2")], later=[("FSDP1 orig", "fairscale flat")])
    def test_hyperparameters_that_stay(self, source: str, target: str) -> None:
        run_on_ranks(save_trained, 2, self.path, source, {"make": OfModel(two_groups)})
        errors = run_on_ranks(load_keeping, 2, self.path, target)
        check_refused("an unknown one", errors, "StateError", "lrr")

    def test_a_hyperparameter_that_only_the_first_optimizer_has(self) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"make": OfModel(two_optimizers)})
        errors = run_on_ranks(load_keeping_betas, 2, self.path)
        check_refused("SGD has no betas", errors, "StateError", "betas")

    @parameterized.expand(("strict", "check", "optim"))
    def test_ranks_that_ask_for_different_things(self, case: str) -> None:
        """Refused at once, and by all: none of them waits for another."""
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {})
        errors = run_on_ranks(load_differently, 2, self.path, case, timeout=40.0)
        words = "do not make the same call" if case == "optim" else "every rank must make the same calls"
        check_refused(case, errors, "RankError", words)

    def test_another_number_of_groups(self) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"make": OfModel(two_groups)})
        errors = run_on_ranks(load_refused_at, 2, self.path)
        check_refused("groups", errors, "StateError", "groups", "2", "1")


def load_refused_at(path: Path) -> tuple[str, str]:
    target = Trained("FSDP2", torch.optim.AdamW)
    before = everything(target)
    error = error_text(lambda: load(path, target))
    check_same("after the refusal", everything(target), before)
    return error


def load_differently(path: Path, case: str) -> tuple[str, str]:
    target, is_first = Trained("FSDP2", steps=1), dist.get_rank() == 0
    before = everything(target)
    options: dict[str, Any] = {"strict": is_first} if case == "strict" else {}
    if case == "check":
        options["compare"] = is_first
    optim = target.optim if case != "optim" or is_first else None
    error = error_text(
        lambda: fsdp_optim.load(
            path, target.model, optim, **as_options(fsdp_optim.LoadOptions, **options, progress=False, timeout=8.0)
        )
    )
    check_same("after the refusal", everything(target), before)
    return error


def load_keeping_betas(path: Path) -> tuple[str, str]:
    target = Trained("FSDP2", OfModel(two_optimizers), steps=1)
    before = everything(target)
    error = error_text(lambda: load(path, target, keep_hyperparameters=("betas",)))
    check_same("after the refusal", everything(target), before)
    return error


def save_refused_at(path: Path) -> tuple[str, str]:
    return error_text(lambda: save(path, Trained("FSDP2", steps=1)))


def load_not_strict(path: Path, wrapper: str, kwargs: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    with cpu():
        target = Trained(wrapper, **{**kwargs, "steps": 2})
        save(path.parent / "before", target)
        restored = load(path, target, strict=False)
        save(path.parent / "after", target)
        target.step([7])
        return sorted(restored.missing_keys), sorted(restored.unexpected_keys)


def refused_not_strict(path: Path, wrapper: str, kwargs: Mapping[str, Any]) -> tuple[str, str]:
    with cpu():
        target = Trained(wrapper, **{**kwargs, "steps": 2})
        before = everything(target)
        error = error_text(lambda: load(path, target, strict=False))
        check_same("after the refusal", everything(target), before)
        return error


def load_keeping(path: Path, wrapper: str) -> tuple[str, str]:
    with cpu():
        alike = Trained(wrapper, OfModel(two_groups))
        for keep, lrs, betas in (
            ((), [0.5, 0.125], (0.5, 0.75)),
            (("lr",), [7.0, 8.0], (0.5, 0.75)),
            (("lr", "betas"), [7.0, 8.0], (0.0, 0.25)),
        ):
            target = Trained(wrapper, OfModel(two_groups), steps=0)
            for group, lr in zip(target.optim.param_groups, (7.0, 8.0), strict=True):
                group.update(lr=lr, weight_decay=lr, betas=(0.0, 0.25))
            load(path, target, keep_hyperparameters=keep)
            got = target.optim.param_groups
            check_same(f"keep={keep}, lr", [group["lr"] for group in got], lrs)
            check_same(f"keep={keep}, betas", [group["betas"] for group in got], [betas, betas])
            check_same(f"keep={keep}, weight_decay", [group["weight_decay"] for group in got], [0.25, 0.01])
            check_same(f"keep={keep}, state", mine(target)["state"], mine(alike)["state"])
        before = everything(target)
        error = error_text(lambda: load(path, target, keep_hyperparameters=("lrr",)))
        check_same("after the refusal", everything(target), before)
        return error


# ------------------------------------------------------------------------------------------ half-way


class Failing(torch.optim.Adam):
    """Loads a state and then raises, on one rank."""

    rank = 0

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if (dist.get_rank() if dist.is_initialized() else 0) == self.rank:
            raise MemoryError("the loader of this optimizer has failed")


class FailingLike:
    """A wrapper around an optimizer that is no optimizer of torch: only its state_dict shows the state."""

    def __init__(self, params: Any) -> None:
        self.inner, self.fails = Failing(params), True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        if self.fails:
            self.fails = False  # it takes back what it had
            self.inner.load_state_dict(state_dict)
        else:
            torch.optim.Adam.load_state_dict(self.inner, state_dict)

    def step(self) -> None:
        self.inner.step()


class FailingAgain(FailingLike):
    """And once more when it is given back what it had."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class WithScale(Failing):
    """Keeps something of its own beside the state, and changes its groups in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.loss_scale = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loss_scale": self.loss_scale}

    def load_state_dict(self, state_dict: Any) -> None:
        self.loss_scale = 512.0
        for group in self.param_groups:
            group["lr"] = 99.0
            group["new"] = True
        super().load_state_dict(state_dict)


def load_failing(path: Path, wrapper: str, kind: Any, rank: int) -> list[tuple[str, str]]:
    """With state before, and without; the model and the optimizer must be as before on every rank."""
    errors = []
    with cpu(), mock.patch.object(Failing, "rank", rank):
        for steps in (0, 1):
            target = Trained(wrapper, kind, steps=steps, model=Whole)
            # those that are no torch.optim.Optimizer make groups of their own from what they are given
            seen = everything if kind in (Failing, WithScale) or isinstance(kind, OfModel) else mine
            seen = values_of if kind is FailingAgain else seen
            before, optims = seen(target), [id(optim) for optim in optims_of(target)]
            errors.append(error_text(lambda: load(path, target)))  # noqa: B023
            check_same("after the failure", seen(target), before)
            check_same("optimizers", [id(optim) for optim in optims_of(target)], optims)
            check_same("loss scale", getattr(target.optim, "loss_scale", 1.0), 1.0)
            target.step([STEPS])  # and it can go on
    return errors


class HalfWayTest(InFolder):
    @expand(
        *some(
            [
                (wrapper, Failing, rank)
                for wrapper, rank in (("FSDP2", 0), ("FSDP2", 1), ("fairscale flat", 1), ("DDP", 0))
            ]
            + [("FSDP1 orig", FailingLike, 1), ("FSDP2", FailingAgain, 0), ("FSDP2", WithScale, 1)],
            every=3,
        )
    )
    def test_an_optimizer_that_fails_on_one_rank(self, wrapper: str, kind: Any, rank: int) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"model": Whole})
        by_rank = run_on_ranks(load_failing, 2, self.path, wrapper, kind, rank)
        for errors in zip(*by_rank, strict=True):
            check_refused("failed", errors, "RankError", f"rank {rank}", "the loader of this optimizer has failed")

    def test_the_second_of_two(self) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"model": Whole})
        by_rank = run_on_ranks(load_failing, 2, self.path, "FSDP2", OfModel(failing_second), 1)
        for errors in zip(*by_rank, strict=True):
            check_refused("failed", errors, "RankError", "rank 1", "the loader of this optimizer has failed")


def values_of(trained: Trained) -> Any:
    """Parameters and buffers."""
    return {key: value for key, value in mine(trained).items() if key in ("values", "buffers")}


def failing_second(model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    return [adam(params[:3]), Failing(params[3:])]


# ------------------------------------------------------------------------------------------ the restore check


class Forgetful(torch.optim.Adam):
    """Loads a state without an error, and has zeros afterwards."""

    forgets = "exp_avg"

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for values in self.state.values():
            local_of(values[self.forgets]).zero_()


class ForgetfulOfSteps(Forgetful):
    forgets = "step"


def lossy(name: str) -> Any:
    """Loads everything, but one number of one value, or of a group."""

    def load_and_lose(optim: Any, *args: Any, **kwargs: Any) -> Any:
        found = load_shard(optim, *args, **kwargs)
        values = next((its for its in reversed(optim.state.values()) if name in its), optim.param_groups[-1])
        if isinstance(values[name], Tensor):
            local_of(values[name]).view(-1)[-1] += 1
        elif isinstance(values[name], list):
            values[name][0] = 0.25
        else:
            values[name] *= 2
        return found

    return mock.patch("fsdp_optim.verbs.load_on_all.load_shard", load_and_lose)


def load_and_lose(path: Path, wrapper: str) -> dict[str, list[tuple[str, str]]]:
    """By what is lost: everything loaded, checked; something lost, unchecked; checked; and the rate said to be kept."""
    found = {}
    with cpu():
        for name in LOST:
            target = Trained(wrapper, Blockwise, steps=0)
            found[name] = [error_text(lambda: load(path, target, compare=True))]  # noqa: B023
            with lossy(name):
                found[name] += [
                    error_text(lambda: load(path, target, **options))  # noqa: B023
                    for options in ({}, {"compare": True}, {"compare": True, "keep_hyperparameters": ("lr",)})
                ]
    return found


LOST = ("absmax", "codes", "table", "lr", "step", "moment")


def load_forgetful(path: Path, wrapper: str, kind: type[Forgetful], check: bool) -> tuple[str, str]:
    with cpu():
        target = Trained(wrapper, kind, steps=0)
        return error_text(lambda: load(path, target, compare=check))


def load_damaged(path: Path, wrapper: str) -> dict[str, tuple[str, str]]:
    with cpu():
        target = Trained(wrapper, steps=1, model=Whole)
        before, found = everything(target), {}
        found["verified"] = error_text(lambda: load(path, target))
        check_same("after the refusal", everything(target), before)
        found["not verified"] = error_text(lambda: load(path, target, verify=False))
        found["checked"] = error_text(lambda: load(path, target, verify=False, compare=True))
        return found


class Untied(Tied):
    """Where the other has one parameter of two names, this has two."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(param.detach().clone()))


def load_untied(path: Path, wrapper: str) -> None:
    with cpu():
        target = Trained(wrapper, model=Untied, steps=0)
        restored = fsdp_optim.load(
            path,
            target.model,
            options=fsdp_optim.LoadOptions(process_group=target.process_group, progress=False, compare=True),
        )
        check_same("missing", restored.missing_keys, ())


class CheckTest(InFolder):
    @expand(
        *some(
            [(wrapper, Forgetful) for wrapper in ("fairscale flat", "FSDP1 flat", "FSDP1 orig", "FSDP2", "DDP")]
            + [(wrapper, ForgetfulOfSteps) for wrapper in ("FSDP1 flat", "FSDP2")],
            every=3,
        )
    )
    def test_state_that_the_optimizer_lost_is_found(self, wrapper: str, kind: type[Forgetful]) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {})
        self.assertEqual(run_on_ranks(load_forgetful, 3, self.path, wrapper, kind, False), [("", "")] * 3)
        errors = run_on_ranks(load_forgetful, 3, self.path, wrapper, kind, True)
        check_refused("zeros", errors, "CheckpointError", kind.forgets)

    @expand(soon=["FSDP2"], later=["fairscale flat", "plain"])
    def test_what_was_tied_and_is_not_any_more(self, wrapper: str) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"model": Tied})
        run_on_ranks(load_untied, 2, self.path, wrapper)

    @expand(*some(("FSDP1 flat", "FSDP2", "DDP"), every=2, first=1))
    def test_every_kind_of_value_is_compared(self, wrapper: str) -> None:
        run_on_ranks(save_trained, 2, self.path, wrapper, {"make": Blockwise})
        by_rank = run_on_ranks(load_and_lose, 2, self.path, wrapper)
        for name in LOST:
            honest, unchecked, checked, kept = zip(*(one[name] for one in by_rank), strict=True)
            check_same(f"{name}, honest", honest, (("", ""),) * 2)
            check_same(f"{name}, unchecked", unchecked, (("", ""),) * 2)
            check_refused(f"{name}, lost", checked, "CheckpointError", name)
            if name == "lr":
                check_same("kept", kept, (("", ""),) * 2)
            else:
                check_refused(f"{name}, kept", kept, "CheckpointError", name)

    @parameterized.expand(
        [
            (stem, name, wrapper)
            for stem, name, wrapper in (
                ("model", "head.weight", "FSDP2"),
                ("model", "block.1.mask", "FSDP1 flat"),
                ("optim", "state.scale.exp_avg", "FSDP1 flat"),
                ("optim", "state.scale.step", "FSDP2"),
            )
        ]
    )
    def test_a_flipped_bit(self, stem: str, name: str, wrapper: str) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"model": Whole})
        self.flip(self.path / f"{stem}.safetensors", name)
        by_rank = run_on_ranks(load_damaged, 3, self.path, wrapper)
        check_refused("verified", [one["verified"] for one in by_rank], "CheckpointError", f"{stem}.safetensors")
        self.assertEqual([one["not verified"] for one in by_rank], [("", "")] * 3)
        named = name.removeprefix("state.").rpartition(".")[0]
        check_refused("checked", [one["checked"] for one in by_rank], "CheckpointError", named)

    def flip(self, file: Path, name: str) -> None:
        """One bit of the last byte of that tensor."""
        content = bytearray(file.read_bytes())
        head = int.from_bytes(content[:8], "little")
        stop = json.loads(content[8 : 8 + head])[name]["data_offsets"][1]
        content[8 + head + stop - 1] ^= 1
        file.write_bytes(content)
