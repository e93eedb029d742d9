"""The copies that redistribute parameters from one Placement to another, planned by arithmetic for any rank. No torch."""

from fsdp_optim.plan.copies import Copy, clip_to_source, clip_to_target, runs_of
from fsdp_optim.plan.planner import copies_into, copies_of, replica_of
from fsdp_optim.plan.rank_plan import Plans, RankPlan, Way, Ways
from fsdp_optim.plan.request import Request
from fsdp_optim.plan.table import CopyTable, has_from, num_into, run_table
from fsdp_optim.plan.windows import LocalRanges, Window, windows

__all__ = [
    "Copy",
    "CopyTable",
    "LocalRanges",
    "Plans",
    "RankPlan",
    "Request",
    "Way",
    "Ways",
    "Window",
    "clip_to_source",
    "clip_to_target",
    "copies_into",
    "copies_of",
    "has_from",
    "num_into",
    "replica_of",
    "run_table",
    "runs_of",
    "windows",
]
