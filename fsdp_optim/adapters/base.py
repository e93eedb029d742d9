"""The protocol between a wrapper and the rest of the library. A new wrapper needs one class that implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters.tree import ModuleTree
from fsdp_optim.layout import Placement, Ranks
from fsdp_optim.view import Handle

Place = tuple[nn.Module, str]
"""A module and the name of an attribute of the module."""


class Adapter(ABC):
    """The adapter of one wrapper. It reads the wrapper's own numbers, makes no collective call, changes nothing, has no state.

    The order of calls, on every rank, for one model:

    1. `is_present`; of an absent adapter only `wrapper_parts` is used.
    2. `is_wrapper_child` for the children of every class of module, once for each name, then `stand_ins` once: they make the
       `ModuleTree`, which gives every later method the modules, their live parameters and the FQNs of the unwrapped model.
    3. `rank_sets`: the ranks that must make a call about this model.
    4. `handles`: the live parameters. The adapters are called in the order of their list, which begins with the users' own, and
       the first Handle for a tensor counts. Then `has_cut` for every tensor without a Handle.
    5. `param_order` and, for a call about an optimizer, `masters`.
    6. For a checkpoint, `cast_buffers` once and `buffer` for every buffer; `reshard` after new weights were loaded.

    `is_sharded_value` and `read_sharded_value` are for sharded dicts, of which every rank has a part; they need no model.

    A Handle gives a Placement for each original parameter (from a few integers that every rank knows), and the local tensor
    with this rank's elements (`local`, `from_local`). An adapter raises `WrapperError` for a parameter that it cannot represent,
    naming the FQN and the fix. `fsdp_optim.testing.AdapterConformance` proves an adapter.
    """

    name: str
    """The name of the wrapper in error messages."""

    wrapper_parts: frozenset[str] = frozenset()
    """The name components that the wrapper inserts, and that are not part of an FQN."""

    @abstractmethod
    def is_present(self) -> bool:
        """Return whether the wrapper is loaded in this process, without importing it."""

    @abstractmethod
    def rank_sets(self, tree: ModuleTree) -> Iterable[Ranks]:
        """Return the global ranks of every group over which something in the model is sharded or replicated."""

    @abstractmethod
    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterable[Handle]:
        """Return the live parameters that this wrapper has made, in any order; each original parameter is in exactly one of them.

        Args:
            ranks: the global ranks that share the model, sorted.
            claimed: the `id()`s of tensors that already have Handles from other adapters, and need no Handle here.
        """

    def kind(self, tree: ModuleTree) -> str:
        """Return what users call this wrapper as it is in a model, in the line that says what a load has done."""
        return self.name

    def is_wrapper_child(self, module: nn.Module, name: str) -> bool:
        """Return whether the child `name` is the wrapped module of `module`, so that the name is not part of an FQN.

        A module of the user's own may have a child of this name too: override this with a check of the class of `module`. Nothing
        else of the module may matter, because the answer counts for all modules of that class.
        """
        return name in self.wrapper_parts

    def stand_ins(self, modules: Collection[nn.Module]) -> Mapping[Place, torch.Tensor]:
        """Return place -> live parameter, where another tensor is registered temporarily."""
        return {}

    def masters(self, tree: ModuleTree, optims: Sequence[Any]) -> Iterable[Handle]:
        """Return the Handles of tensors that an optimizer holds in place of the model's parameters, such as fp32 copies.

        The originals of a master are the model's parameters: all originals of a live parameter, or none. State is read and
        loaded with these Handles, weights with the Handles of `handles`. The Handle of a master needs the attribute `master`.
        """
        return ()

    def has_cut(self, param: torch.Tensor) -> bool:
        """Return whether this wrapper has flattened or cut a tensor, so that it must not count as a complete parameter."""
        return False

    def param_order(self, tree: ModuleTree) -> Iterable[torch.Tensor]:
        """Return the live parameters in the order of ids in the wrapper's own full dict; empty if it has no such dict."""
        return ()

    def cast_buffers(self, tree: ModuleTree) -> Iterable[torch.Tensor]:
        """Return the buffers that the wrapper casts to a dtype of its own in the first forward pass."""
        return ()

    def buffer(self, tree: ModuleTree, fqn: str, value: torch.Tensor) -> Handle | None:
        """Return the Handle of a buffer that this wrapper has cut over ranks; None for any other buffer."""
        return None

    def is_sharded_value(self, value: torch.Tensor) -> bool:
        """Return whether a value of a sharded dict is cut over ranks by this wrapper."""
        return False

    def read_sharded_value(self, fqn: str, value: torch.Tensor) -> tuple[Placement, torch.Tensor]:
        """Return the placement of such a value, and this rank's elements as a 1-D tensor."""
        raise NotImplementedError

    def read_sharded_values(self, values: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[Placement, torch.Tensor]]:
        """Return the same of each value. A wrapper overrides this method if it can read values that are cut alike together."""
        return [self.read_sharded_value(fqn, value) for fqn, value in values]

    def reshard(self, tree: ModuleTree) -> None:  # noqa: B027
        """Free the unsharded parameters that a forward pass has left, so that the next forward pass uses the new shards."""
