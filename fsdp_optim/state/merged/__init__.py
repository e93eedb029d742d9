"""The global state: every rank reports its part (reports.py), and every rank merges all reports into the same value.

`merge_reports` calls `merge_param` for each parameter; replicas are compared by fingerprints (prints.py), and refused
where they differ (replicas.py).
"""

from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.state.merged.reports import LiveParam, RankReport

__all__ = [
    "GlobalState",
    "LiveParam",
    "RankReport",
]
