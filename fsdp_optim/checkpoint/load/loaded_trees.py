"""The trees in `state=` during a load: which tensor of the checkpoint goes into which tensor here.

A tree of the caller is filled in place. An object gets a tree of new tensors, cut as those that its state_dict() has now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_optim.checkpoint.common.trees import is_tree_tensor, shown
from fsdp_optim.dtensors import is_dtensor
from fsdp_optim.elements import MOST_DEEP
from fsdp_optim.errors import StateError, counted_noun, shortened
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.tree_values import BRANCHES, InFile, items_of, leaves_of
from fsdp_optim.memory import dtype_name, dtype_named

_MOST_NAMED = 20  # differences in one error


@dataclass
class LoadedTrees:
    """The pairs of saved and live tensors of one load.

    Attributes:
        stored: the tensors of the checkpoint, by key.
        cast: whether floating tensors may be cast to the dtype of the live tensors.
        targets: the live tensors that get elements, by key.
        in_place: the keys of tensors of trees, which are overwritten; the others only show how an object's tensors are cut.
        missing, unexpected: the places of tensors that only this call has, and only the checkpoint.
    """

    stored: Mapping[str, StoredTensor]
    cast: bool
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    in_place: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    _differences: list[str] = field(default_factory=list)
    _casts: bool = False

    def add_object(self, name: str, saved: Any, state: Any) -> None:
        """Pair the tensors of an object. `state`: what its state_dict() returns now.

        A tensor of another shape than the saved one, or that the object does not have yet, is given to it completely.
        """
        live = dict(_tensors_of(state))
        for path, leaf in leaves_of(saved):
            tensor = live.get(path) if isinstance(leaf, InFile) else None
            if tensor is None:
                continue
            if tuple(tensor.shape) == self.stored[leaf.key].shape:
                self.targets[leaf.key] = tensor
            elif is_dtensor(tensor):
                self._differs(name, path, f"shape {list(self.stored[leaf.key].shape)}", f"{list(tensor.shape)}")

    def add_tree(self, name: str, saved: Any, tree: Any) -> None:
        """Pair the tensors of a tree of the caller, which are overwritten. A tree without tensors is only a name."""
        live = dict(_tensors_of(tree))
        if not live:
            return
        saved_at = {path: leaf.key for path, leaf in leaves_of(saved) if isinstance(leaf, InFile)}
        self.missing += [
            place for path in live if path not in saved_at and (place := shown((name, *path))) not in self.missing
        ]
        self.unexpected += [shown((name, *path)) for path in saved_at if path not in live]
        for path, key in saved_at.items():
            if path in live:
                self._add_target(name, path, key, live[path])

    def check_keys(self, saved: Any, tree: Any, path: tuple[Any, ...]) -> None:
        """Note the keys of dicts that the checkpoint does not have."""
        if isinstance(tree, Mapping):
            here = dict(items_of(saved)) if isinstance(saved, Mapping) else {}
            for key, item in tree.items():
                if key not in here:
                    self.missing.append(shown((*path, key)))
                else:
                    self.check_keys(here[key], item, (*path, key))

    def _add_target(self, name: str, path: tuple[Any, ...], key: str, tensor: torch.Tensor) -> None:
        stored, dtype = self.stored[key], dtype_name(tensor.dtype)
        if stored.shape != tuple(tensor.shape):
            self._differs(name, path, f"shape {list(stored.shape)}", f"{list(tensor.shape)}")
        elif stored.dtype != dtype and not self._is_castable(tensor, stored):
            self._differs(name, path, stored.dtype, dtype)
        elif not is_dtensor(tensor) and _shares_elements(tensor):
            self._differences.append(
                f"{shown((name, *path))}: its elements share memory (expand), so it cannot be filled"
            )
        else:
            self.targets[key] = self.in_place[key] = tensor

    def _is_castable(self, tensor: torch.Tensor, stored: StoredTensor) -> bool:
        if not (tensor.is_floating_point() and dtype_named(stored.dtype).is_floating_point):
            return False
        self._casts = True
        return self.cast

    def _differs(self, name: str, path: tuple[Any, ...], saved: str, live: str) -> None:
        self._differences.append(f"{shown((name, *path))}: {saved} in the checkpoint, {live} here")

    def check(self, where: str, *, strict: bool, allow_unexpected: bool = False) -> None:
        """Raise StateError if the trees do not fit. `strict`: missing and unexpected tensors count."""
        unexpected = [] if allow_unexpected else self.unexpected
        differences, fixes = list(self._differences), []
        if strict:
            differences += [f"{place}: this call has it, the checkpoint does not" for place in self.missing]
            differences += [f"{place}: the checkpoint has it, this call does not" for place in unexpected]
            if self.missing or unexpected:
                fixes.append("strict=False fills the tensors that both sides have")
        if self._casts and not self.cast:
            fixes.append("cast=True converts floating dtypes")
        if differences:
            ways = f" ({'; '.join(fixes)})" if fixes else ""
            raise StateError(
                f"{where} does not fit state=; nothing was loaded. {counted_noun(len(differences), 'difference')}{ways}:\n"
                + shortened(differences, _MOST_NAMED, "\n")
            )


def _shares_elements(tensor: torch.Tensor) -> bool:
    return any(num > 1 and not step for num, step in zip(tensor.shape, tensor.stride(), strict=True))


def _tensors_of(tree: Any, depth: int = 0) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
    """Return the tensors of a live tree, each with its path, but none that no save accepts because it lies too deep."""
    if is_tree_tensor(tree):
        return [((), tree)]
    if type(tree) not in BRANCHES or depth > MOST_DEEP:
        return []
    return [((key, *path), tensor) for key, item in items_of(tree) for path, tensor in _tensors_of(item, depth + 1)]
