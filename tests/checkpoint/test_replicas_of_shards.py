"""Replicas of shards, which HSDP has, and any DTensor that is cut on a part of its mesh: a save compares them as those of DDP."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import Differs, check_refused, check_same, error_text
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.trained import Trained
from kit.wrapping import cpu
from kit.wraps import fsdp1_hybrid, fsdp1_hybrid_groups, in_hsdp, mesh_2d
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.verbs import replicas

RANKS = 4
SIDE = 600  # a matrix of so many rows is larger than the tensors that one rank writes alone


class Layers(nn.Module):
    units = ("first", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))  # so that there is padding, and a shard without elements
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 5)


def cut_by_hand(model: nn.Module, *placements: Any) -> nn.Module:
    mesh = mesh_2d((2, 2))
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    return model


HYBRID = ShardingStrategy.HYBRID_SHARD

# how the model is wrapped, and the rank that holds the same as the last one
WRAPPERS: Mapping[str, tuple[Callable[[nn.Module], Any], int]] = {
    "FSDP2": (lambda model: in_hsdp(model, (2, 2)), 1),
    "FSDP1": (fsdp1_hybrid((2, 2), HYBRID, False), 1),
    "FSDP1 orig": (fsdp1_hybrid((2, 2), HYBRID, True), 1),
    "FSDP1 on process groups": (fsdp1_hybrid_groups, 2),
    "DTensor, cut on the first mesh dimension": (lambda model: cut_by_hand(model, Shard(0), Replicate()), 2),
}


def weight_of(target: Trained, name: str = "") -> torch.Tensor:
    return max((local_of(param).detach() for param in target.params), key=torch.Tensor.numel)


def moment_of(target: Trained, name: str = "exp_avg") -> torch.Tensor:
    param = max(target.params, key=lambda param: local_of(param).numel())
    return local_of(target.optim.state[param][name])


CHANGED: Mapping[str, tuple[Callable[[Trained], torch.Tensor], str]] = {
    "a weight": (weight_of, ": its elements are not the same on "),
    "a moment": (moment_of, ": its step, exp_avg, exp_avg_sq is not the same on "),
}


def ways(path: Path, target: Trained) -> list[Callable[..., Any]]:
    return [partial(way, path, target.model, target.optim) for way in (fsdp_optim.save, fsdp_optim.async_save)]


def of_lowest(tensor: torch.Tensor, others: tuple[int, ...]) -> torch.Tensor:
    """The values of the lowest of the ranks that hold the same as this rank, one of `others`."""
    had: list[Any] = [None] * RANKS
    dist.all_gather_object(had, tensor)
    return had[min(others)]


def differ(folder: str, wrapper: str, what: str, rank: int) -> list[tuple[str, str]]:
    """One element differs on one rank: nothing is saved, or what the lowest rank has."""
    wrap, partner = WRAPPERS[wrapper]
    with cpu():
        target = Trained(wrap, adam, 1, Layers)
        tensor = CHANGED[what][0](target)
        if dist.get_rank() == rank:
            with torch.no_grad():
                tensor.view(-1)[0] += 1
        had = tensor.clone()
        path = Path(folder, f"{rank}")
        told = [error_text(way) for way in ways(path, target)]
        check_same("nothing is written", [*Path(folder).iterdir()], [])
        for way, more in zip(ways(path, target), ({}, {"overwrite": True}), strict=True):
            done = way(options=fsdp_optim.SaveOptions(on_replica_mismatch="lowest_rank"), **more)
            if hasattr(done, "wait"):
                done.wait()
            check_same("nothing is changed", tensor, had)
        fsdp_optim.load(path, target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True))
        step = RANKS - 1 - partner  # between two that hold the same
        holders = tuple(holder for holder in (dist.get_rank(), dist.get_rank() ^ step))
        check_same("the lowest rank's", CHANGED[what][0](target), of_lowest(had, holders))
        ways(path, target)[0](overwrite=True)  # they are equal now
    return told


# ------------------------------------------------------------------------------------------ half and half


def large(folder: str) -> None:
    """A tensor that is so large that each of its replicas would write a part of it."""
    rank = dist.get_rank()
    model = cut_by_hand(nn.Linear(SIDE, SIDE, bias=False), Replicate(), Shard(0))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        local_of(model.weight).fill_(float(rank))
    whole = torch.full((SIDE, SIDE), float(rank))
    optim.state[model.weight] = {
        "momentum_buffer": torch.full_like(model.weight, float(rank)),
        "placed": DTensor.from_local(whole, model.weight.device_mesh, (Replicate(), Replicate()), run_check=False),
    }
    for kind in ("save", "async_save"):
        path = Path(folder, kind)
        check_told(error_text(lambda path=path: fsdp_optim.save(path, model, optim)), "weight", "rank 0 and rank 2")
        done = getattr(fsdp_optim, kind)(
            path, model, optim, options=fsdp_optim.SaveOptions(on_replica_mismatch="lowest_rank")
        )
        if kind == "async_save":
            done.wait()
        plain = nn.Linear(SIDE, SIDE, bias=False)
        other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        fsdp_optim.load(
            path, plain, other, options=fsdp_optim.LoadOptions(process_group=dist.group.WORLD, compare=True)
        )
        wanted = torch.cat([torch.zeros(SIDE // 2, SIDE), torch.ones(SIDE // 2, SIDE)])
        check_same("the lowest ranks'", plain.weight.detach(), wanted)
        check_same("their moments", other.state[plain.weight]["momentum_buffer"], wanted)
        check_same("their placed values", other.state[plain.weight]["placed"], torch.zeros(SIDE, SIDE))


def check_told(told: object, *words: str) -> None:
    missing = [word for word in words if word not in str(told)]
    if missing:
        raise Differs(f"{missing} are not in: {told}")


# ------------------------------------------------------------------------------------------ values of all kinds


def with_values(placements: tuple[Any, ...], value: Callable[[int, Any], Any]) -> tuple[nn.Module, Any]:
    """A weight that is cut so, and `value(rank, mesh)` in its state."""
    model = cut_by_hand(nn.Linear(4, 8, bias=False), *placements)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optim.state[model.weight] = {
        "momentum_buffer": torch.ones_like(model.weight),
        "its": value(dist.get_rank(), model.weight.device_mesh),
    }
    return model, optim


def placed(numbers: Callable[[int], int], *placements: Any) -> Callable[[int, Any], Any]:
    def make(rank: int, mesh: Any) -> torch.Tensor:
        local = torch.full((4,), float(numbers(rank)))
        return DTensor.from_local(local, mesh, placements, run_check=False)

    return make


ON_SHARDS, ON_REPLICAS = (Replicate(), Shard(0)), (Shard(0), Replicate())

# (how the weight is cut, the value, whether replicas differ)
VALUES: Mapping[str, tuple[tuple[Any, ...], Callable[[int, Any], Any], bool]] = {
    "cut among the replicas": (ON_SHARDS, placed(lambda rank: rank // 2, *ON_REPLICAS), False),
    "cut among the replicas, and different": (ON_SHARDS, placed(lambda rank: rank, *ON_REPLICAS), True),
    "cut, of a weight that is whole": ((Replicate(), Replicate()), placed(lambda rank: rank % 2, *ON_SHARDS), False),
    "cut otherwise, and different": ((Replicate(), Replicate()), placed(lambda rank: rank, *ON_SHARDS), True),
    "whole": (ON_SHARDS, placed(lambda rank: 1, Replicate(), Replicate()), False),
    "whole, and different": (ON_SHARDS, placed(lambda rank: rank, Replicate(), Replicate()), True),
    "quantised": (ON_SHARDS, lambda rank, mesh: torch.full((3, 2), rank % 2, dtype=torch.uint8), False),
    "quantised, and different": (ON_SHARDS, lambda rank, mesh: torch.full((3, 2), rank, dtype=torch.uint8), True),
}


def values_of_all_kinds(folder: str) -> None:
    for what, (placements, value, differs) in VALUES.items():
        path = Path(folder, what)
        model, optim = with_values(placements, value)
        told = error_text(lambda path=path, model=model, optim=optim: fsdp_optim.save(path, model, optim))
        check_same(f"{what}: refused, {told[1]}", bool(told[0]), differs)
        if differs:
            check_told(told, "StateError", "weight", "its", "rank 0", "lowest_rank")
            fsdp_optim.save(path, model, optim, options=fsdp_optim.SaveOptions(on_replica_mismatch="lowest_rank"))
        had = local_of(optim.state[model.weight]["its"]).clone()
        optim.state[model.weight]["its"] = value(99, model.weight.device_mesh)
        fsdp_optim.load(path, model, optim, options=fsdp_optim.LoadOptions(compare=True))
        got = optim.state[model.weight]["its"]
        numbers = {float(number) for number in local_of(got).flatten()}
        own_value = value(dist.get_rank(), model.weight.device_mesh)
        if not differs:
            check_same(what, local_of(got), had)
        elif isinstance(own_value, DTensor):
            _, coordinate = own_value.placements, model.weight.device_mesh.get_coordinate()
            lowest = sum(
                where * scale
                for where, scale, placement in zip(coordinate, (2, 1), own_value.placements, strict=True)
                if placement.is_shard()
            )
            check_same(what, numbers, {float(lowest)})
        else:
            check_same(what, numbers, {float(dist.get_rank() % 2)})


def save_with_padding(folder: str) -> None:
    """Padding belongs to nobody, and is not saved: it may differ."""
    with cpu():
        target = Trained(WRAPPERS["FSDP1"][0], adam, 1, Layers)
        num = 0
        for param in target.params:
            num_padded = param._shard_numel_padded
            for value in (param.detach(), target.optim.state[param]["exp_avg"]) if num_padded else ():
                value[-num_padded:] = 50.0 + dist.get_rank()
            num += num_padded
        of_all_ranks: list[int] = [0] * RANKS
        dist.all_gather_object(of_all_ranks, num)
        check_same("there is some", max(of_all_ranks) > 0, True)
        fsdp_optim.save(Path(folder, "padded"), target.model, target.optim)


# ------------------------------------------------------------------------------------------ who tells what


def watch(folder: str) -> dict[str, Any]:
    """The digests of shards that this rank sends, those that it reads, and how often all reports travel."""
    traffic: dict[str, Any] = {"told": [], "read": [], "exchanged": 0}
    real_tell, real_exchange = replicas.all_gather_bytes, replicas.exchange_reports

    def tell(group: Any, step: str, content: bytes, **more: Any) -> Any:
        traffic["told"].append(len(content))
        told = real_tell(group, step, content, **more)

        def content_of(rank: int) -> bytes:
            traffic["read"].append(rank)
            return told.content_of(rank)

        return mock.Mock(content_of=content_of)

    def exchange(*args: Any, **kwargs: Any) -> Any:
        traffic["exchanged"] += 1
        return real_exchange(*args, **kwargs)

    with (
        cpu(),
        mock.patch.object(replicas, "all_gather_bytes", tell),
        mock.patch.object(replicas, "exchange_reports", exchange),
    ):
        target = Trained(WRAPPERS["FSDP2"][0], adam, 1, Layers)
        fsdp_optim.save(Path(folder, "equal"), target.model, target.optim)
        traffic["equal"] = dict(traffic, told=list(traffic["told"]), read=list(traffic["read"]))
        traffic.update(told=[], read=[])
        uncut = Trained("FSDP2", adam, 1, Layers)
        fsdp_optim.save(Path(folder, "uncut"), uncut.model, uncut.optim)
    return traffic


def fail_in_turn(folder: str) -> list[tuple[str, str]]:
    """The digest of one rank cannot be made: all ranks raise."""
    told = []
    with cpu():
        target = Trained(WRAPPERS["FSDP2"][0], adam, 1, Layers)
        for rank in range(RANKS):
            broken = mock.Mock(side_effect=fsdp_optim.StateError(f"broken on {rank}"))
            with mock.patch.object(
                replicas, "prints_of_states", broken if dist.get_rank() == rank else replicas.prints_of_states
            ):
                told.append(error_text(lambda: fsdp_optim.save(Path(folder, "no"), target.model, target.optim)))
        fsdp_optim.save(Path(folder, "yes"), target.model, target.optim)
    return told


def several(folder: str) -> tuple[str, str]:
    """Two parameters differ, on two ranks that hold different parts, and a third one on another."""
    with cpu():
        target = Trained(WRAPPERS["FSDP2"][0], adam, 1, Layers)
        names = [name for name, _ in target.model.named_parameters()]
        for name, ranks in (("first.weight", (3,)), ("first.bias", (2, 3)), ("last.weight", (2,))):
            if dist.get_rank() in ranks:
                local_of(target.optim.state[target.params[names.index(name)]]["exp_avg"]).add_(1)
        return error_text(lambda: fsdp_optim.save(Path(folder, "no"), target.model, target.optim))


class ReplicasOfShardsTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    @expand(
        *some(
            [
                *((wrapper, "a moment", RANKS - 1) for wrapper in WRAPPERS),
                *((wrapper, "a weight", RANKS - 1) for wrapper in ("FSDP2", "FSDP1")),
                *(("FSDP2", "a moment", rank) for rank in range(RANKS - 1)),
            ],
            every=3,
        )
    )
    def test_what_differs_is_named(self, wrapper: str, what: str, rank: int) -> None:
        step = RANKS - 1 - WRAPPERS[wrapper][1]
        low, high = sorted((rank, rank ^ step))
        by_rank = run_on_ranks(differ, RANKS, self.folder, wrapper, what, rank)
        for way in (0, 1):
            words = (f"{CHANGED[what][1]}rank {low} and rank {high}, which hold the same part of it", "name_of")
            check_refused(
                wrapper, [errors[way] for errors in by_rank], "StateError", *words, "on_replica_mismatch='lowest_rank'"
            )

    def test_no_save_is_half_of_each(self) -> None:
        run_on_ranks(large, RANKS, self.folder)

    def test_values_of_all_kinds(self) -> None:
        run_on_ranks(values_of_all_kinds, RANKS, self.folder)

    def test_padding_may_differ(self) -> None:
        run_on_ranks(save_with_padding, RANKS, self.folder)

    def test_all_that_differ_are_named(self) -> None:
        errors = run_on_ranks(several, RANKS, self.folder)
        words = ("first.weight: its ", "rank 1 and rank 3", "2 more parameters like it: first.bias, last.weight")
        check_refused("several", errors, "StateError", *words)

    def test_each_rank_reads_of_one_other_only(self) -> None:
        for rank, traffic in enumerate(run_on_ranks(watch, RANKS, self.folder)):
            equal = traffic["equal"]
            self.assertEqual(equal["told"], [16 * 5] * 2 if rank < 2 else [0, 0])  # a digest of each parameter
            self.assertEqual(equal["read"], [] if rank < 2 else [rank - 2] * 2)
            self.assertEqual(equal["exchanged"], 0)
            # nothing where a wrapper has no replicas
            self.assertEqual((traffic["told"], traffic["exchanged"]), ([], 0))

    def test_each_rank_fails_in_turn(self) -> None:
        by_rank = run_on_ranks(fail_in_turn, RANKS, self.folder)
        for rank in range(RANKS):
            check_refused(
                f"rank {rank}", [errors[rank] for errors in by_rank], "StateError", f"rank {rank}: broken on {rank}"
            )
        self.assertEqual([path.name for path in Path(self.folder).iterdir()], ["yes"])


if __name__ == "__main__":
    unittest.main()
