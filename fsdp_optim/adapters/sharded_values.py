"""Values of a sharded optimizer dict that are spread over ranks, and describe how."""

from __future__ import annotations

from typing import TypeGuard

import torch

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.registry import all_adapters
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import Placement
from fsdp_optim.memory import is_plain


def is_sharded_value(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a state value is spread over ranks."""
    return isinstance(value, torch.Tensor) and not is_plain(value) and _adapter_of(value) is not None


def read_sharded_value(fqn: str, value: torch.Tensor) -> tuple[Placement, torch.Tensor]:
    """Where a value lives, and this rank's elements of it as a 1-D tensor."""
    adapter = _adapter_of(value)
    if adapter is None:
        raise WrapperError(f"{fqn}: a {type(value).__name__} is not spread over ranks")
    return adapter.read_sharded_value(fqn, value)


def _adapter_of(value: torch.Tensor) -> Adapter | None:
    return next((one for one in all_adapters() if one.is_present() and one.is_sharded_value(value)), None)
