"""Memory for the tensors of a tree that are on the meta device, so that a load has a place for their elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fsdp_optim.tensors.dtensors import dtensor_cut_like, is_dtensor, local_of
from fsdp_optim.tensors.elements import MOST_DEEP, is_on_meta


def with_memory(tree: Any) -> Any:
    """Return a tree in which tensors on the meta device are new ones, without values; the same object if there are none.

    A DTensor gets memory on the device of its mesh, another tensor on that of the meshes in the tree, else on torch's default.
    """
    tensors = list(_tensors_in(tree))
    if not any(map(is_on_meta, tensors)):
        return tree
    meshes = [tensor.device_mesh.device_type for tensor in tensors if is_dtensor(tensor)]
    return _replaced(tree, torch.device(meshes[0]) if meshes else torch.get_default_device())


def _tensors_in(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)) and depth < MOST_DEEP:
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors_in(value, depth + 1)


def _replaced(tree: Any, device: torch.device, depth: int = 0) -> Any:
    if isinstance(tree, torch.Tensor):
        return _made(tree, device) if is_on_meta(tree) else tree
    if depth == MOST_DEEP:  # the load refuses such trees
        return tree
    if isinstance(tree, dict):
        return {key: _replaced(value, device, depth + 1) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_replaced(value, device, depth + 1) for value in tree)
    return tree


def _made(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not is_dtensor(tensor):
        return torch.empty_like(tensor, device=device)
    local = torch.empty_like(local_of(tensor), device=tensor.device_mesh.device_type)
    return dtensor_cut_like(local, tensor)
