"""The optimizer of this rank: its parameters and their state, and whether a full state fits it."""

from fsdp_optim.state.live.local import LocalParam
from fsdp_optim.state.live.optimizer_reader import read_optimizer

__all__ = [
    "LocalParam",
    "read_optimizer",
]
