"""Buffers, and replicas that nobody keeps equal: compared before they are saved, with their other names, in their own dtypes."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_refused, check_same, error_text
from kit.optimizers import adam
from kit.trained import Trained
from kit.wrapping import cpu
from kit.wraps import in_fairscale, in_fsdp1
from parameterized import parameterized
from torch import nn
from torch.distributed.fsdp import MixedPrecision

import fsdp_optim
from fsdp_optim.state.values import fold_of
from fsdp_optim.testing import run_on_ranks


class Normed(nn.Module):
    units = ("first", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)


def weight_of(target: Trained) -> torch.Tensor:
    return target.params[0].detach()


def moment_of(target: Trained) -> torch.Tensor:
    moment: torch.Tensor = target.optim.state[target.params[0]]["exp_avg"]
    return moment


def buffer_named(name: str) -> Callable[[Trained], torch.Tensor]:
    return lambda target: next(value for key, value in target.model.named_buffers() if key.endswith(name))


# (wrapper, the tensor that has one element changed on one rank, the name in the error)
DIFFERENT: Mapping[str, tuple[str, Callable[[Trained], torch.Tensor], tuple[str, ...]]] = {
    "a weight of DDP": ("DDP", weight_of, ("first.weight: its elements are not the same", "name_of")),
    "a moment of DDP": ("DDP", moment_of, ("first.weight: its ",)),
    "statistics of DDP": (
        "DDP",
        buffer_named("running_mean"),
        ("norm.running_mean: its elements are not the same", "BatchNorm"),
    ),
    "a counter of DDP": ("DDP", buffer_named("num_batches_tracked"), ("norm.num_batches_tracked",)),
    "statistics of FSDP2": ("FSDP2", buffer_named("running_var"), ("norm.running_var: its elements are not the same",)),
    "statistics of FSDP1": ("FSDP1 flat", buffer_named("running_var"), ("norm.running_var",)),
    "statistics of fairscale": ("fairscale flat", buffer_named("running_var"), ("norm.running_var",)),
    "a counter without a wrapper": ("plain", buffer_named("num_batches_tracked"), ("norm.num_batches_tracked",)),
}


def differ(folder: str, rank_that_differs: int) -> dict[str, list[tuple[str, str]]]:
    told = {}
    with cpu():
        for name, (wrapper, changed, _) in DIFFERENT.items():
            target = Trained(wrapper, adam, 1, Normed)
            tensor = changed(target)
            if dist.get_rank() == rank_that_differs:
                with torch.no_grad():
                    tensor.view(-1)[-1] += 1
            had = tensor.clone()
            path = Path(folder, name.replace(" ", "-"))
            plain = fsdp_optim.SaveOptions(process_group=target.process_group)
            lowest = replace(plain, on_replica_mismatch="lowest_rank")
            ways = [
                partial(way, path, target.model, target.optim, options=plain)
                for way in (fsdp_optim.save, fsdp_optim.async_save)
            ]
            told[name] = [error_text(way) for way in ways]
            check_same("nothing is written", [*Path(folder).glob("*.s*"), path.exists()], [False])
            ways[0](options=lowest)
            ways[1](options=lowest, overwrite=True).wait()
            check_same("nothing is changed", tensor, had)
            fsdp_optim.load(
                path,
                target.model,
                target.optim,
                options=fsdp_optim.LoadOptions(process_group=target.process_group, compare=True),
            )
            of_lowest: list[Any] = [had]
            dist.broadcast_object_list(of_lowest, 0)
            check_same(f"{name}: the lowest rank's", changed(target), of_lowest[0])
            ways[0](overwrite=True)  # they are equal now
    return told


# ------------------------------------------------------------------------------------------ names


class Two(nn.Module):
    """Buffers with two names: one that is registered twice, and those of a module in two places."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        table = torch.tensor([1.0, 2.0])
        self.first.register_buffer("table", table)
        self.second.register_buffer("mirror", table if tied else table.clone())
        self.norm = nn.BatchNorm1d(2)
        self.other = self.norm if tied else nn.BatchNorm1d(2)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers(remove_duplicate=False)}


def numbered(model: nn.Module, start: int) -> nn.Module:
    with torch.no_grad():
        for number, value in enumerate(model.buffers()):
            value.fill_(start + number)
    return model


# ------------------------------------------------------------------------------------------ dtypes


class Rotary(nn.Module):
    units = ("first", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.register_buffer("angles", (torch.arange(1, 6) / 3).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.angles.sum().to(x.dtype)


MIXED: Mapping[str, Callable[[nn.Module], Any]] = {
    "FSDP1": lambda model: in_fsdp1(model, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16)),
    "fairscale": lambda model: in_fairscale(model, mixed_precision=True, buffer_dtype=torch.bfloat16),
}


def cast_by_wrappers(folder: str) -> dict[str, tuple[str, str]]:
    """A checkpoint from before the first forward pass loads into models whose wrapper has cast the buffers, and the reverse."""
    told = {}
    with cpu():
        for name, wrap in MIXED.items():
            path = Path(folder, name)
            before = Trained(wrap, adam, 1, Rotary)
            fsdp_optim.save(path, before.model, before.optim)
            after = Trained(wrap, adam, 1, Rotary)
            buffer = next(value for _, value in after.model.named_buffers())
            buffer.data = torch.zeros(5, dtype=torch.bfloat16)  # as the first forward pass leaves it
            fsdp_optim.load(path, after.model, after.optim, options=fsdp_optim.LoadOptions(compare=True))
            check_same(name, buffer, (torch.arange(1, 6) / 3).to(torch.bfloat16))
            # what the check finds where a cast buffer is something else
            load, reader = (
                partial(fsdp_optim.load, path, after.model, after.optim, options=fsdp_optim.LoadOptions(compare=True)),
                after.model,
            )
            told[name] = error_text(lambda load=load, reader=reader: altered_after_install(load, reader))
            fsdp_optim.load(path, after.model, after.optim)
            fsdp_optim.save(path, after.model, after.optim, overwrite=True)
            fsdp_optim.load(path, before.model, before.optim, options=fsdp_optim.LoadOptions(compare=True))
            check_same(
                f"{name}, back",
                next(value for _, value in before.model.named_buffers()),
                (torch.arange(1, 6) / 3).to(torch.bfloat16).to(torch.float32),
            )
    return told


def altered_after_install(load: Callable[[], Any], model: nn.Module) -> None:
    """Run a load with one element of the buffer changed between the end of the load and the check."""
    from fsdp_optim.checkpoint.load import restore

    check, number = restore.check_bitwise, dist.get_rank() if dist.is_initialized() else 0

    def altered(*args: Any, **options: Any) -> None:
        if number == 0:
            next(value for _, value in model.named_buffers())[2] += 1
        check(*args, **options)

    restore.check_bitwise = altered
    try:
        load()
    finally:
        restore.check_bitwise = check


# ------------------------------------------------------------------------------------------ stages


def stages(folder: str) -> None:
    """Pipeline stages without a wrapper, with BatchNorm each: a stage's buffers are on the ranks of the stage."""
    rank = dist.get_rank()

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(f"stage{rank}", numbered(nn.BatchNorm1d(2), 3 * rank))

    model = Stage()
    fsdp_optim.save(f"{folder}/stages", model, options=fsdp_optim.SaveOptions(process_group=dist.group.WORLD))
    wanted = buffers_of(model)
    numbered(model, 50)
    fsdp_optim.load(
        f"{folder}/stages", model, options=fsdp_optim.LoadOptions(process_group=dist.group.WORLD, compare=True)
    )
    check_same("its own", buffers_of(model), wanted)


class BuffersTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    @expand(*some([(1,), (2,)], every=2, first=1))
    def test_what_differs_between_ranks_is_named(self, rank: int) -> None:
        by_rank = run_on_ranks(differ, 3, self.folder, rank)
        for name, (_, _, words) in DIFFERENT.items():
            for way in (0, 1):
                errors = [of_rank[name][way] for of_rank in by_rank]
                more = (f"rank {rank}", "on_replica_mismatch='lowest_rank'")
                check_refused(name, errors, "StateError", *words, *more)

    def test_stages(self) -> None:
        run_on_ranks(stages, 3, self.folder)

    @parameterized.expand([(saved, loaded) for saved in (True, False) for loaded in (True, False)])
    def test_two_names(self, saved_tied: bool, loaded_tied: bool) -> None:
        saved, target = numbered(Two(tied=saved_tied), 3), numbered(Two(tied=loaded_tied), 90)
        fsdp_optim.save(self.folder, saved)
        stored = safetensors.torch.load_file(f"{self.folder}/model.safetensors")
        if saved_tied:
            check_same("once", {"first.table", "norm.running_mean"} <= set(stored), True)
            check_same("not twice", {"second.mirror", "other.running_mean"} & set(stored), set())
        if saved_tied or not loaded_tied:
            fsdp_optim.load(self.folder, target, options=fsdp_optim.LoadOptions(compare=True))
            check_same("all names", buffers_of(target), buffers_of(saved))
        else:  # as for tied parameters: the first name counts, and what has no place is named
            kind, text = error_text(partial(fsdp_optim.load, self.folder, target))
            check_same(
                "refused", (kind, "second.mirror" in text, "other.running_mean" in text), ("StateError", True, True)
            )

    @parameterized.expand(
        [
            (torch.float32, torch.bfloat16, False),
            (torch.float64, torch.float32, False),
            (torch.bfloat16, torch.float16, False),
            (torch.float16, torch.bfloat16, False),
            (torch.bfloat16, torch.float32, True),
            (torch.float32, torch.float64, True),
            (torch.float8_e4m3fn, torch.bfloat16, True),
            (torch.float16, torch.float8_e5m2, False),
        ]
    )
    def test_another_dtype(self, saved: torch.dtype, live: torch.dtype, is_exact: bool) -> None:
        model, target = Rotary(saved), Rotary(live)
        target.angles.zero_()
        fsdp_optim.save(self.folder, model)
        if not is_exact:
            kind, text = error_text(partial(fsdp_optim.load, self.folder, target))
            check_same("refused", (kind, "angles" in text, "cast=True" in text), ("StateError", True, True))
            check_same("as it was", target.angles, torch.zeros(5, dtype=live))
        fsdp_optim.load(self.folder, target, options=fsdp_optim.LoadOptions(cast=not is_exact, compare=True))
        check_same("the same numbers", target.angles, model.angles.to(live))

    def test_what_wrappers_cast(self) -> None:
        by_rank = run_on_ranks(cast_by_wrappers, 2, self.folder)
        for name in MIXED:
            check_refused(
                name, [errors[name] for errors in by_rank], "CheckpointError", "angles", "rank 0", "element 2"
            )

    def test_one_other_bit_gives_another_fold(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex128, torch.bool):
            value = torch.zeros((1 << 20) + 3, dtype=dtype)
            folds = {fold_of(value)}
            for at in (0, 1, (1 << 20) - 1, 1 << 20, -1):
                other = value.clone()
                other.view(torch.uint8).view(-1, dtype.itemsize)[at, -1] ^= 1
                folds.add(fold_of(other))
            swapped = value.clone()
            swapped[5] = 1
            folds |= {fold_of(swapped), fold_of(swapped.flip(0)), fold_of(swapped[:-1])}
            self.assertEqual(len(folds), 9, dtype)
            self.assertEqual(fold_of(swapped.repeat(2).view(2, -1).t()[:, 0]), fold_of(swapped))
        self.assertEqual(fold_of(torch.empty(0)), fold_of(torch.empty(0)))
