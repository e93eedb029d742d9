"""Declare: add facts about the parameters of a module on this rank that the module does not record. No communication."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_optim.adapters import slices


def declare_slice(module: nn.Module, name: str, global_shape: Sequence[int], offset: Sequence[int]) -> None:
    """Declare that a parameter of a module on this rank is a slice of a larger parameter."""
    slices.declare(module, name, global_shape, offset)
