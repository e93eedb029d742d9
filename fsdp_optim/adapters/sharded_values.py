"""Values of a sharded optimizer dict that are cut over ranks, and describe how."""

from __future__ import annotations

from typing import TypeGuard

import torch

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.known import all_adapters
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import Placement
from fsdp_optim.memory import is_plain


def is_sharded_value(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a state value is cut over ranks."""
    return isinstance(value, torch.Tensor) and not is_plain(value) and _adapter_of(value) is not None


def read_sharded_value(fqn: str, value: torch.Tensor) -> tuple[Placement, torch.Tensor]:
    """Return the placement of a value, and this rank's elements as a 1-D tensor."""
    adapter = _adapter_of(value)
    if adapter is None:
        raise WrapperError(f"{fqn}: no adapter knows how this {type(value).__name__} is cut over ranks")
    return adapter.read_sharded_value(fqn, value)


def _adapter_of(value: torch.Tensor) -> Adapter | None:
    return next((a for a in all_adapters() if a.is_present() and a.is_sharded_value(value)), None)
