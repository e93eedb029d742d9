"""The rendezvous store of a job: connections of our own to it, signs of life of ranks, and the last rank that leaves."""

from fsdp_optim.transport.job.job_store import JobStore, rendezvous_store
from fsdp_optim.transport.job.pulse import Pulse, Watch, lost_ranks

__all__ = [
    "JobStore",
    "Pulse",
    "Watch",
    "lost_ranks",
    "rendezvous_store",
]
