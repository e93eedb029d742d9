"""Whether models share a tensor, by their modules: names of tensors are found only where they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from fsdp_optim.adapters.tree import join
from fsdp_optim.options import Model


def shared_tensor(models: Mapping[str, Model]) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """Return the model, and the name in it, of a parameter or persistent buffer that two models have in common; None for none."""
    owners: dict[int, tuple[str, nn.Module]] = {}
    for model, value in models.items():
        for tensor, module in _tensors(value):
            other, owner = owners.setdefault(id(tensor), (model, module))
            if other != model:
                return (other, _path(models[other], owner, tensor)), (model, _path(value, module, tensor))
    return None


def _tensors(model: Model) -> Iterator[tuple[torch.Tensor, nn.Module]]:
    for stage in [model] if isinstance(model, nn.Module) else model:
        for module in stage.modules():
            for param in module._parameters.values():
                if param is not None:
                    yield param, module
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield buffer, module


def _path(model: Model, owner: nn.Module, tensor: torch.Tensor) -> str:
    for stage in [model] if isinstance(model, nn.Module) else model:
        for path, module in stage.named_modules():
            tensors = {**module._parameters, **module._buffers} if module is owner else {}
            for name, value in tensors.items():
                if value is tensor:
                    return join(path, name)
    raise RuntimeError("unreachable: the module is one of the model")
