"""The face of torch.distributed.checkpoint: its functions and signatures, with this library's files and Layouts underneath.

    from fsdp_optim import dcp   # in place of: import torch.distributed.checkpoint as dcp

`state_tree.py` tells the weights of a state dict from the rest; `saving.py` and `loading.py` have the calls.
"""

from __future__ import annotations

from fsdp_optim.dcp.loading import load
from fsdp_optim.dcp.saving import async_save, save

__all__ = ["async_save", "load", "save"]
