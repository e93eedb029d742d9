"""How many messages a call sends does not depend on how many parameters there are."""

from __future__ import annotations

import unittest
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import check_same
from kit.optimizers import adam
from kit.trained import Trained
from kit.wrapping import check_full, cpu
from kit.wraps import in_ddp, in_fairscale, in_fsdp1, in_fsdp2
from parameterized import parameterized
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class Count(TorchDispatchMode):
    """Counts everything that a process group is asked for: collectives, sends and receives, functional ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            name = str(func)
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.calls.values())


class Blocks(nn.Module):
    """`num_units` blocks with `per_unit` parameters each."""

    num_units, per_unit = 16, 63

    def __init__(self) -> None:
        super().__init__()
        shapes = ((3, 2), (5,), (2, 7), (1,))
        self.blocks = nn.ModuleList(
            nn.ParameterList([torch.empty(shapes[i % 4]) for i in range(self.per_unit)]) for _ in range(self.num_units)
        )

    @property
    def units(self) -> tuple[str, ...]:
        return (*(f"blocks.{i}" for i in range(self.num_units)), "")


class SomeBlocks(Blocks):
    num_units, per_unit = 4, 16


class HundredsOfBlocks(Blocks):
    num_units, per_unit = 7, 29


class FewBlocks(Blocks):
    num_units, per_unit = 2, 4


WRAPS: dict[str, Any] = {
    "FSDP1 flat": in_fsdp1,
    "FSDP1 orig": lambda model: in_fsdp1(model, use_orig_params=True),
    "FSDP2": in_fsdp2,
    "fairscale flat": in_fairscale,
    "fairscale non-flat": lambda model: in_fairscale(model, flatten_parameters=False),
    "DDP": in_ddp,
}


def is_counted() -> dict[str, int]:
    """That the counter sees what it is to see."""
    peer = 1 - dist.get_rank()
    value = torch.zeros(3)
    with Count() as count:
        dist.all_reduce(value)
        dist.broadcast(value, 0)
        works = [dist.irecv(torch.empty(3), peer), dist.isend(value.clone(), peer)]
        dist.barrier()
        works += dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, torch.empty(3), peer), dist.P2POp(dist.isend, value.clone(), peer)]
        )
        for work in works:
            work.wait()
    dist.barrier()
    return count.calls


def counted(kind: str, model: type[nn.Module], num_buckets: int = 1) -> dict[str, int]:
    """Calls of one gather to rank 0, one scatter from it, and one iteration, on this rank."""
    with cpu():
        trained, target = (Trained(WRAPS[kind], adam, steps, model) for steps in (1, 0))
        nbytes = sum(param.numel() for param in model().parameters()) * 4 * 2
        bucket = 64 << 20 if num_buckets == 1 else -(-nbytes // num_buckets)
        trained.gather(0)  # connections are made in the first call
        counts = {}
        with Count() as count:
            full = trained.gather(0, bucket_nbytes=bucket)
        counts["gather"] = count.total
        with Count() as count:
            scattered = fsdp_optim.scatter_full_optim_state_dict(
                target.model, target.optim, full, 0, options=fsdp_optim.CallOptions(bucket_nbytes=bucket)
            )
        counts["scatter"] = count.total
        with Count() as count:
            listed = sum(
                1
                for _ in fsdp_optim.iter_full_optim_state(
                    trained.model, trained.optim, 0, options=fsdp_optim.CallOptions(bucket_nbytes=bucket)
                )
            )
        counts["iterate"] = count.total
        with Count() as count:
            everywhere = trained.gather(None, bucket_nbytes=bucket)
        counts["gather to all"] = count.total
        with Count() as count:
            shard = target.shard(everywhere)
        counts["shard"] = count.total
        check_same("values iterated", listed, len(trained.numbers.start))
        check_same("groups", shard["param_groups"], scattered["param_groups"])
        if full is not None:
            check_full("on all", everywhere, {key: full[key] for key in full})
    return counts


class CountTest(unittest.TestCase):
    def test_the_counter_counts(self) -> None:
        calls = run_on_ranks(is_counted, 2)[0]
        for name in ("allreduce", "broadcast", "barrier"):
            self.assertTrue(any(name in call for call in calls), calls)
        for name in ("send", "recv"):
            self.assertEqual(sum(n for call, n in calls.items() if call.startswith(f"c10d.{name}")), 2, calls)

    # torch takes seconds for a thousand DTensors on each rank
    @expand(
        soon=[("FSDP2", 2, HundredsOfBlocks)],
        later=[("FSDP2", 2, Blocks), ("fairscale flat", 4, Blocks)],
    )
    def test_many_parameters_cost_as_many_calls_as_eight(self, kind: str, world_size: int, model: type[Blocks]) -> None:
        self.assertGreaterEqual(model.num_units * model.per_unit, 1000 if model is Blocks else 200)
        many, few = (run_on_ranks(counted, world_size, kind, blocks) for blocks in (model, FewBlocks))
        for rank, (calls, calls_of_few) in enumerate(zip(many, few, strict=True)):
            self.assertEqual(calls["shard"], 0)
            for verb, number in calls.items():
                self.assertLessEqual(
                    number, calls_of_few[verb] + 4, f"{verb} on rank {rank}: {calls_of_few} and {calls}"
                )
                self.assertLessEqual(number, 40, f"{verb} on rank {rank}: {calls}")

    @parameterized.expand(("FSDP1 flat",))
    def test_calls_grow_with_the_buckets_only(self, kind: str) -> None:
        for rank, (of_one_bucket, of_eight) in enumerate(
            zip(run_on_ranks(counted, 3, kind, SomeBlocks), run_on_ranks(counted, 3, kind, SomeBlocks, 8), strict=True)
        ):
            for verb in ("gather", "scatter", "gather to all"):
                # a bucket is two rounds of messages to and from each of two peers
                self.assertLessEqual(
                    of_eight[verb],
                    of_one_bucket[verb] + 8 * 2 * 4 * 2,
                    f"{verb} on rank {rank}: {of_one_bucket} and {of_eight}",
                )
