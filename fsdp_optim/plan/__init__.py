"""The copies that lead from one Layout to another: planned for any rank, in any process, by arithmetic. No torch."""

from fsdp_optim.plan.copies import Copy, part_from, part_into
from fsdp_optim.plan.planner import copies_into, copies_of, plan, replica_of
from fsdp_optim.plan.runs import Runs, has_from, num_into

__all__ = [
    "Copy",
    "Runs",
    "copies_into",
    "copies_of",
    "has_from",
    "num_into",
    "part_from",
    "part_into",
    "plan",
    "replica_of",
]
