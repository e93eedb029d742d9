"""Tensors by name that no module has, such as those of a dict: they are read as the parameters of a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters.reader import ModelReader
from fsdp_optim.tensors.dtensors import is_dtensor
from fsdp_optim.tensors.memory import is_plain


class _WithExtraState(nn.Module):
    """Stands for a module when only its extra state is known."""

    _version = None  # type: ignore[assignment]  # of the code of a class that is not known

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def get_extra_state(self) -> Any:
        return self._value

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: it is here to say that the state can be loaded."""


def reader_of(tensors: Mapping[str, torch.Tensor], rank: int) -> ModelReader:
    """Return a reader of some tensors. Their names are its FQNs; two names of one tensor are two parameters of one memory.

    A DTensor lies where its mesh and its placements say. Any other tensor lies on all ranks that have one of its name.
    """
    module, seen = nn.Module(), set[int]()
    for name, tensor in tensors.items():
        module._parameters[name] = tensor.detach() if id(tensor) in seen else tensor  # type: ignore[assignment]
        seen.add(id(tensor))
    return ModelReader(module, rank)


def module_of(tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> nn.Module:
    """Return a module whose parameters have the names and the memory of some tensors, so that these are saved as a model is.

    A tensor that says itself how it is cut over ranks (ShardedTensor) stays the object that it is. `extra`: the extra state of
    modules, by its FQN.
    """
    states = {fqn.rpartition(".")[0]: _WithExtraState(value) for fqn, value in extra.items()}
    module: nn.Module = states.get("", nn.Module())
    module._modules.update({path: state for path, state in states.items() if path})
    for name, tensor in tensors.items():
        is_ordinary = is_plain(tensor) or is_dtensor(tensor)
        module._parameters[name] = nn.Parameter(tensor.detach(), requires_grad=False) if is_ordinary else tensor  # type: ignore[assignment]
    return module
