"""Extra memory of a save to an object store and of a load from it: within the budget on every rank.

Measured as the operating system sees it, with malloc as it is: memory that it keeps counts too.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch.distributed as dist
from kit.cases import expand
from kit.compare import Differs
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.options import as_options
from kit.peaks import MIB, Peak
from kit.proxy import Fault, Proxy
from kit.servers import Options, new_bucket, port_of, shared
from kit.trained import Trained
from kit.wrapping import cpu
from torch import nn

import fsdp_optim
from fsdp_optim.buckets.objects import PART_NBYTES
from fsdp_optim.buckets.s3 import S3Bucket
from fsdp_optim.testing import RankPool

BUDGET_MIB, PART_MIB = 6, 1
SLACK_MIB = 3  # connections, threads, and what Python keeps
USUAL_MIB = 64


class Layers(nn.Module):
    """Some 16 MiB, and 48 MiB with Adam's state."""

    units = ("layers.0", "layers.1", "layers.2", "layers.3", "")
    tensor_parallel: dict[str, Any] = {}
    width = 1024

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width + 1, bias=False) for _ in range(4))


class LargeLayers(Layers):
    """Some 61 MiB, and 183 MiB with Adam's state."""

    width = 2000


def measured(url: str, options: Options) -> dict[str, float]:
    """The extra memory of each verb on this rank, in MiB. A first save and load start what stays: threads and connections."""
    peaks = {}
    asked: Options = {"storage_options": options, "progress": False, "bucket_nbytes": BUDGET_MIB * MIB}
    with cpu():
        trained = Trained("FSDP2", adam, 1, Layers)
        trained.forget_gradients()
        for step in ("first", "second"):
            dist.barrier()
            with Peak() as peak:
                fsdp_optim.save(
                    f"{url}/{step}", trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **asked)
                )
            peaks["save"] = peak.mib
            dist.barrier()
            with Peak() as peak:
                fsdp_optim.load(
                    f"{url}/{step}", trained.model, trained.optim, **as_options(fsdp_optim.LoadOptions, **asked)
                )
            peaks["load"] = peak.mib
    state = sum(local_of(value).nbytes for values in trained.optim.state.values() for value in values.values())
    return {**peaks, "state": state / MIB, "shard": (state + sum(local_of(p).nbytes for p in trained.params)) / MIB}


def saved(bucket: str, wrapper: str, options: Options) -> list[float]:
    """The extra memory of the first save of this rank, and of the second one, in MiB.

    The client library is there: it takes what it takes, for whatever it is used.
    """
    peaks = []
    with cpu():
        trained = Trained(wrapper, adam, 1, LargeLayers)
        trained.forget_gradients()
        S3Bucket(bucket, options).look("nothing")
        for step in ("first", "second"):
            dist.barrier()
            with Peak() as peak:
                fsdp_optim.save(
                    f"s3://{bucket}/{step}",
                    trained.model,
                    trained.optim,
                    options=fsdp_optim.SaveOptions(storage_options=options, progress=False),
                )
            peaks.append(peak.mib)
    return peaks


class MemoryTest(unittest.TestCase):
    def setUp(self) -> None:
        self.pool = RankPool()  # of its own: what malloc keeps of other tests would be used first
        self.addCleanup(self.pool.close)
        self.options = shared("rclone")
        self.bucket = new_bucket(self.options)

    @expand([(2,)], [(1,)])
    def test_extra_memory(self, num_ranks: int) -> None:
        slow = Fault("Delay", method="PUT", times=-1, seconds=0.4)  # parts wait: the budget is what holds them back
        with Proxy(port_of(self.options), [slow]) as proxy:
            given = {**proxy.options(self.options), "part_nbytes": PART_MIB * MIB}
            by_rank = self.pool.run(measured, num_ranks, f"s3://{self.bucket}/run", given)
        print(by_rank)
        for measured_mib in by_rank:
            # A load reads all of the shard into memory of its own before it changes anything.
            most = {"save": BUDGET_MIB + SLACK_MIB, "load": measured_mib["shard"] + BUDGET_MIB + SLACK_MIB}
            if any(measured_mib[verb] > most[verb] for verb in most) or measured_mib["state"] < 15:
                raise Differs(f"MiB on each rank: {by_rank}, at most {most}")

    @expand([("FSDP2",)], [("fairscale flat",)])
    def test_the_usual_memory(self, wrapper: str) -> None:
        """All of it lies within the usual `bucket_nbytes`, for a first save too: also threads, connections, and code."""
        self.check_usual(saved, wrapper)

    def check_usual(self, measure: Any, given: str) -> None:
        slow = Fault("Delay", method="PUT", times=-1, seconds=1.0)
        with Proxy(port_of(self.options), [slow]) as proxy:
            options = {**proxy.options(self.options), "part_nbytes": PART_NBYTES}
            by_rank = self.pool.run(measure, 2, self.bucket, given, options)
            self.assertGreaterEqual(proxy.most_delayed, 16, "as many parts at a time as fill the memory of two ranks")
        print(by_rank)
        self.assertLessEqual(max(mib for of_saves in by_rank for mib in of_saves), USUAL_MIB, by_rank)


if __name__ == "__main__":
    unittest.main()
