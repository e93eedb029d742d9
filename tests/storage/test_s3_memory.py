"""Extra memory of a save to an object store and of a load from it: within the budget on every rank.

Measured as the operating system sees it, with malloc as it is: memory that it keeps counts too.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch.distributed as dist
from kit.peaks import MIB, Peak
from kit.proxy import Fault, Proxy
from kit.servers import Options, new_bucket, port_of, shared
from kit.wrapping import Differs, Trained, adam, cpu, local_of
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import RankPool

BUDGET_MIB, PART_MIB = 6, 1
SLACK_MIB = 3  # connections, threads, and what Python keeps


class Layers(nn.Module):
    """Some 16 MiB, and 48 MiB with Adam's state."""

    units = ("layers.0", "layers.1", "layers.2", "layers.3", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1025, bias=False) for _ in range(4))


def measured(url: str, options: Options) -> dict[str, float]:
    """The extra memory of each verb on this rank, in MiB. A first save and load start what stays: threads and connections."""
    found = {}
    asked: Options = {"storage_options": options, "progress": False, "bucket_nbytes": BUDGET_MIB * MIB}
    with cpu():
        one = Trained("FSDP2", adam, 1, Layers)
        one.forget_gradients()
        for step in ("first", "second"):
            dist.barrier()
            with Peak() as peak:
                fsdp_optim.save(f"{url}/{step}", one.model, one.optim, **asked)
            found["save"] = peak.mib
            dist.barrier()
            with Peak() as peak:
                fsdp_optim.load(f"{url}/{step}", one.model, one.optim, **asked)
            found["load"] = peak.mib
    state = sum(local_of(value).nbytes for values in one.optim.state.values() for value in values.values())
    return {**found, "state": state / MIB, "shard": (state + sum(local_of(p).nbytes for p in one.params)) / MIB}


class MemoryTest(unittest.TestCase):
    @parameterized.expand([(1,), (2,)])
    def test_extra_memory(self, num_ranks: int) -> None:
        pool = RankPool()  # of its own: what malloc keeps of other tests would be used first
        self.addCleanup(pool.close)
        options = shared("rclone")
        url = f"s3://{new_bucket(options)}/run"
        slow = Fault("Delay", method="PUT", times=-1, seconds=0.4)  # parts wait: the budget is what holds them back
        with Proxy(port_of(options), [slow]) as proxy:
            given = {**proxy.options(options), "part_nbytes": PART_MIB * MIB}
            by_rank = pool.run(measured, num_ranks, url, given)
        print(by_rank)
        for one in by_rank:
            # A load reads all of the shard into memory of its own before it changes anything.
            most = {"save": BUDGET_MIB + SLACK_MIB, "load": one["shard"] + BUDGET_MIB + SLACK_MIB}
            if any(one[verb] > most[verb] for verb in most) or one["state"] < 15:
                raise Differs(f"MiB on each rank: {by_rank}, at most {most}")


if __name__ == "__main__":
    unittest.main()
