"""Which class an optimizer is of, under whatever wraps it."""

from __future__ import annotations

from typing import Any

_INNER = ("optimizer", "_optimizer", "optim")
"""Where wrappers of optimizers keep the one that steps: Accelerate, DeepSpeed, fairseq, torch, fairscale."""


def innermost(optim: Any) -> Any:
    """The optimizer inside all wrappers that there are around one."""
    seen = {id(optim)}
    while True:
        found = (vars(optim).get(name) if hasattr(optim, "__dict__") else None for name in _INNER)
        inner = next((one for one in found if hasattr(one, "param_groups") and hasattr(one, "state_dict")), None)
        if inner is None or id(inner) in seen:
            return optim
        seen.add(id(inner))
        optim = inner


def is_of_torch(optim: Any) -> bool:
    """Whether the optimizer that steps is one of torch.optim's own, of which the values are known."""
    return type(innermost(optim)).__module__.startswith("torch.optim")
