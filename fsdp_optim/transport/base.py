"""What moves between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_optim.plan import Copy


@dataclass(frozen=True)
class Item:
    """One tensor to move: the copies of one state value of one parameter that this rank takes part in.

    Ranks list the items that they share in the same order. `source` and `target` are this rank's local tensors, 1-D;
    None where it has no part on that side, and a `target` of None where its elements are to be dropped.
    """

    copies: Sequence[Copy]
    dtype: torch.dtype
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
