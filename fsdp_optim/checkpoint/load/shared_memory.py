"""Tensors of this rank that share memory: a load writes both, so that the checkpoint must have the same elements for both.

A Parameter that is registered twice has one name, and its stored copies are compared before anything is read. Here are tensors
that only share their memory (`b.data = a.data`), and one tensor in two places of a tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from fsdp_optim.checkpoint.common.trees import key_of
from fsdp_optim.checkpoint.load.targets import Weights
from fsdp_optim.checkpoint.load.tree_targets import TreeTargets
from fsdp_optim.errors import StateError
from fsdp_optim.tensors.memory import flatten
from fsdp_optim.view import NamedHandle


class _Target(NamedTuple):
    """A live tensor, and the elements to write, in the order of its own."""

    name: str
    live: torch.Tensor
    flat: torch.Tensor

    @property
    def first(self) -> int:
        """The place of its first byte in its storage."""
        return int(self.live.storage_offset()) * self.live.itemsize

    @property
    def last(self) -> int:
        """The place behind its last byte."""
        reach = sum((num - 1) * step for num, step in zip(self.live.shape, self.live.stride(), strict=True))
        return self.first + (reach + 1) * self.live.itemsize


def check_shared(weights: Weights | None, trees: TreeTargets | None, keys: Collection[str], rank: int) -> None:
    """Raise StateError for two live tensors in the same memory that get different elements. `keys`: those of trees to be filled.

    Tensors that overlap in part are compared there if both are contiguous.
    """
    targets = [*_of_weights(weights), *_of_trees(trees, keys)]
    storages = [live.untyped_storage().data_ptr() for _, live, _ in targets]
    if len(set(storages)) == len(storages):
        return
    of_storage: dict[int, list[_Target]] = {}
    for storage, (named, live, loaded) in zip(storages, targets, strict=True):
        if storage and live.numel():  # freed memory has none
            of_storage.setdefault(storage, []).append(_Target(named.fqns[0], live, flatten(loaded)))
    for in_one in of_storage.values():
        _check_in_one(sorted(in_one, key=lambda target: target.first), rank)


def _check_in_one(targets: Sequence[_Target], rank: int) -> None:
    """Raise StateError for tensors in one storage that differ where they overlap. `targets`: in the order of their places."""
    before: list[_Target] = []  # those that the next one is compared with
    for target in targets:
        before = [
            other
            for other in before
            if other.first == target.first or (other.live.is_contiguous() and other.last > target.first)
        ]
        for other in before:
            if not _agree(other, target):
                raise StateError(
                    f"{target.name} shares its memory with {other.name} on rank {rank}, but they differ in the checkpoint; "
                    "nothing was loaded: give each a tensor of its own, or load a checkpoint in which they are equal; "
                    "strict=False loads the last of them"
                )
        before.append(target)


def _of_weights(weights: Weights | None) -> Iterator[tuple[NamedHandle, torch.Tensor, torch.Tensor]]:
    """Yield the Handle of each parameter, its live elements on this rank, and those to write."""
    memory = weights.memory if weights is not None else {}
    for param in weights.local.optim.params if weights is not None else ():
        of_param = memory.get(param.local_id)
        if of_param is not None and len(of_param) == 1:
            named = param.named
            handle = named.handle
            live = handle.held(handle.as_value())
            if type(live) is torch.Tensor:  # the storage of other classes is not all of them
                yield named, live, next(iter(of_param.values()))


def _of_trees(
    trees: TreeTargets | None, keys: Collection[str]
) -> Iterator[tuple[NamedHandle, torch.Tensor, torch.Tensor]]:
    for param in trees.local.optim.params if trees is not None else ():
        (fqn,), live = param.named.fqns, param.handle.weights()
        if trees is not None and key_of(fqn) in keys and type(live) is torch.Tensor:
            yield param.named, live, trees.flats[param.local_id]


def _agree(other: _Target, target: _Target) -> bool:
    """Return whether two tensors get the same elements where they overlap; True where that cannot be told."""
    live, before = target.live, other.live
    if live.dtype != before.dtype:
        return True
    if (target.first, live.shape, live.stride()) == (other.first, before.shape, before.stride()):
        return _equal(other.flat, target.flat, live.dtype)
    offset, left = divmod(target.first - other.first, live.itemsize)
    if left or not (live.is_contiguous() and before.is_contiguous()):
        return True
    num = min(before.numel() - offset, live.numel())
    return _equal(other.flat[offset : offset + num], target.flat[:num], live.dtype)


def _equal(flat: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether elements are equal, bit for bit, in the dtype of the live tensors."""
    if flat.dtype != other.dtype:
        flat, other = flat.to(dtype), other.to(dtype)
    return flat.numel() == other.numel() and torch.equal(flat.view(torch.uint8), other.view(torch.uint8))
