"""Test sharded training without a GPU: fairscale FSDP on CPU, and functions on live local ranks.

    def steps_on_a_rank() -> float:                       # at module level, so that a worker can import it
        with fairscale_on_cpu():
            model = FullyShardedDataParallel(nn.Linear(8, 8))
            ...                                           # forward, backward, step, gather: as on GPUs
            return loss.item()

    losses = run_on_ranks(steps_on_a_rank, world_size=4)  # one result per rank

Importing this module loads torch, but neither fairscale nor pytest, and starts nothing.
"""

from __future__ import annotations

from fsdp_optim.testing.adapter_conformance import AdapterConformance
from fsdp_optim.testing.bucket_conformance import BucketConformance
from fsdp_optim.testing.conformance import StoreConformance
from fsdp_optim.testing.fairscale_cpu import fairscale_on_cpu, forget_fairscale_groups
from fsdp_optim.testing.foreign_readers import ReaderConformance, WrittenSample
from fsdp_optim.testing.formats import FormatConformance
from fsdp_optim.testing.ranks import RankPool, RanksFailed, WorkerDied, run_on_ranks
from fsdp_optim.testing.resumes import ProvenResume, ResumeDiffers, ResumeJob, prove_resume
from fsdp_optim.testing.threads import run_on_threads, thread_rank
from fsdp_optim.testing.worker import RemoteError

__all__ = [
    "AdapterConformance",
    "BucketConformance",
    "FormatConformance",
    "ProvenResume",
    "RankPool",
    "RanksFailed",
    "ReaderConformance",
    "RemoteError",
    "ResumeDiffers",
    "ResumeJob",
    "StoreConformance",
    "WorkerDied",
    "WrittenSample",
    "fairscale_on_cpu",
    "forget_fairscale_groups",
    "prove_resume",
    "run_on_ranks",
    "run_on_threads",
    "thread_rank",
]
