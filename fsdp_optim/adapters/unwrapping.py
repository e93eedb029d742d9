"""What is inside the wrappers of a model: the module, and the names of its tensors."""

from __future__ import annotations

from torch import nn

from fsdp_optim.adapters.known import is_wrapper_child


def clean_name(model: nn.Module, name: str) -> str:
    """The FQN of a parameter or buffer: its name in `model.named_parameters()` without the parts that wrappers insert."""
    module: nn.Module | None = model
    kept = []
    for part in name.split("."):
        if module is None or not is_wrapper_child(module, part):
            kept.append(part)
        module = module._modules.get(part) if module is not None else None
    return ".".join(kept)


def module_inside(wrapper: nn.Module) -> nn.Module | None:
    """The module that a wrapper has inside itself, which may be a wrapper too; None for a module that is no wrapper."""
    inside = [child for name, child in wrapper.named_children() if is_wrapper_child(wrapper, name)]
    return inside[0] if len(inside) == 1 else None
