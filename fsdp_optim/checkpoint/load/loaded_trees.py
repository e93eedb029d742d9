"""The trees in `state=` during a load: which tensor of the checkpoint goes into which tensor here.

A tree of the caller is filled in place. An object gets a tree of new tensors, cut as those that its state_dict() has now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_optim.checkpoint.common.casting import can_convert, check_range
from fsdp_optim.checkpoint.common.trees import is_opened, is_tree_tensor, is_unsaved, shown
from fsdp_optim.errors import StateError, WrapperError, counted_noun, shortened
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.tree_values import BRANCHES, InFile, items_of, leaves_of
from fsdp_optim.tensors.elements import MOST_DEEP, is_on_meta, shares_elements
from fsdp_optim.tensors.memory import dtype_name, dtype_named, is_plain

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
    _small: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # live, saved
    _differences: list[str] = field(default_factory=list)
    _casts: bool = False

    def add_object(self, name: str, saved: Any, state: Any) -> None:
        """Pair the tensors of an object. `state`: what its state_dict() returns now.

        A tensor of another shape than the saved one, or that the object does not have yet, is given to it completely.
        """
        _check_memory(name, state)
        live = dict(_tensors_of(state))
        for path, leaf in leaves_of(saved):
            tensor = live.get(path) if isinstance(leaf, InFile) else None
            if tensor is None:
                continue
            if tuple(tensor.shape) == self.stored[leaf.key].shape:
                self.targets[leaf.key] = tensor
            elif not is_plain(tensor):
                self._differs(name, path, f"shape {list(self.stored[leaf.key].shape)}", f"{list(tensor.shape)}")

    def add_tree(self, name: str, saved: Any, tree: Any) -> None:
        """Pair the tensors of a tree of the caller, which are overwritten. A tree without tensors is only a name."""
        _check_memory(name, tree)
        live = dict(_tensors_of(tree))
        if not live:
            return
        saved_at = {path: leaf.key for path, leaf in leaves_of(saved) if isinstance(leaf, InFile)}
        small = {path: leaf for path, leaf in leaves_of(saved) if isinstance(leaf, torch.Tensor)}
        for path, leaf in small.items():
            if path not in live:
                continue
            if not is_plain(live[path]):
                self._differences.append(
                    f"{shown((name, *path))}: a value that this checkpoint has in memory cannot fill a "
                    f"{type(live[path]).__name__}: give an ordinary tensor, and distribute it after the load"
                )
            elif self._fits(name, path, leaf.shape, dtype_name(leaf.dtype), live[path]):
                check_range(shown((name, *path)), [leaf], leaf.dtype, live[path].dtype)
                self._small.append((live[path], leaf))
        lacking = (shown((name, *path)) for path in live if path not in saved_at and path not in small)
        self.missing += [place for place in lacking if place not in self.missing]
        self.unexpected += [shown((name, *path)) for path in saved_at if path not in live]
        for path, key in saved_at.items():
            if path in live:
                self._add_target(name, path, key, live[path])

    def check_keys(self, saved: Any, tree: Any, path: tuple[Any, ...]) -> None:
        """Note the keys of dicts that the checkpoint does not have, but none whose values torch saves nothing of."""
        if isinstance(tree, Mapping):
            here = dict(items_of(saved)) if isinstance(saved, Mapping) else {}
            for key, item in tree.items():
                if key in here:
                    self.check_keys(here[key], item, (*path, key))
                elif not is_unsaved(item):
                    self.missing.append(shown((*path, key)))
        elif isinstance(tree, (list, tuple)) and isinstance(saved, (list, tuple)):
            is_filled = isinstance(tree, list) and is_opened(tree)  # else another list takes its place
            if len(tree) == len(saved) or is_filled:
                for index, (there, item) in enumerate(zip(saved, tree, strict=False)):
                    self.check_keys(there, item, (*path, index))
            if is_filled:
                rest = range(len(saved), len(tree))
                self.missing += [shown((*path, index)) for index in rest if not is_unsaved(tree[index])]

    def fill_small(self) -> None:
        """Fill the live tensors that the checkpoint has in memory."""
        for live, saved in self._small:
            with torch.no_grad():
                live.copy_(saved)

    def _add_target(self, name: str, path: tuple[Any, ...], key: str, tensor: torch.Tensor) -> None:
        if self._fits(name, path, self.stored[key].shape, self.stored[key].dtype, tensor):
            self.targets[key] = self.in_place[key] = tensor

    def _fits(self, name: str, path: tuple[Any, ...], shape: Sequence[int], saved: str, tensor: torch.Tensor) -> bool:
        """Return whether a live tensor can be filled; note why not. `saved`: the name of the saved dtype."""
        dtype = dtype_name(tensor.dtype)
        if tuple(shape) != tuple(tensor.shape):
            self._differs(name, path, f"shape {list(shape)}", f"{list(tensor.shape)}")
        elif saved != dtype and not self._is_castable(tensor, saved):
            self._differs(name, path, saved, dtype)
        elif is_plain(tensor) and shares_elements(tensor):
            self._differences.append(
                f"{shown((name, *path))}: its elements share memory (expand), so it cannot be filled: give its .contiguous()"
            )
        else:
            return True
        return False

    def _is_castable(self, tensor: torch.Tensor, saved: str) -> bool:
        if not can_convert(dtype_named(saved), tensor.dtype):
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


def asked_of(saved: Any, tree: Any) -> Any:
    """Return the part of a saved tree that a tree of the caller asks for: of its dicts, the keys that these have here."""
    if isinstance(saved, Mapping) and isinstance(tree, Mapping):
        return {key: asked_of(saved[key], item) for key, item in tree.items() if key in saved}
    if isinstance(saved, (list, tuple)) and isinstance(tree, (list, tuple)) and len(saved) == len(tree):
        return type(saved)([asked_of(item, other) for item, other in zip(saved, tree, strict=True)])
    return saved


def _tensors_of(tree: Any, depth: int = 0) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
    """Return the tensors of a live tree, each with its path, but none that no save accepts because it lies too deep."""
    if is_tree_tensor(tree):
        return [((), tree)]
    if type(tree) not in BRANCHES or depth > MOST_DEEP:
        return []
    return [((key, *path), tensor) for key, item in items_of(tree) for path, tensor in _tensors_of(item, depth + 1)]


def _check_memory(name: str, tree: Any) -> None:
    """Raise WrapperError for a tensor on the meta device: it cannot be filled, and an object would pass its values over."""
    for path, leaf in leaves_of(tree):
        if isinstance(leaf, torch.Tensor) and is_on_meta(leaf):
            raise WrapperError(
                f"{shown((name, *path))}: this tensor is on the meta device and has no memory to load into: give it memory "
                "first, a module by to_empty(device=...)"
            )
