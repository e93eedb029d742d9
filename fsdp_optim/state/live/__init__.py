"""The optimizer of this rank: its parameters and their state, and whether a full state fits it."""

from fsdp_optim.state.live.local import LocalParam, read_optimizer

__all__ = [
    "LocalParam",
    "read_optimizer",
]
