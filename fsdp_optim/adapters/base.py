"""The protocol between a wrapper and the rest of the library. A new wrapper is one class that keeps these promises."""

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
"""A module and the name of an attribute of it."""


class Adapter(ABC):
    """One wrapper. It reads the wrapper's own numbers, makes no collective call, changes nothing, and keeps no state.

    The order of calls, on every rank, for one model:

    1. `is_present`; an adapter that is not present is asked nothing else, but for `wrapper_parts`.
    2. `is_wrapper_child` for every child of every module, then `stand_ins` once: they make the `ModuleTree`, which gives
       every later method the modules, their live parameters and the FQNs of the unwrapped model.
    3. `rank_sets`: the ranks that have to make a call about this model.
    4. `handles`: the live parameters. The adapters are asked in the order of their list, those that users have added first, and
       the first that gives a Handle for a tensor has it. Then `has_cut` for every tensor that nobody has given a Handle for.
    5. `param_order` and, for a call about an optimizer, `masters`.
    6. For a checkpoint, `cast_buffers` once and `buffer` for every buffer; `reshard` after new weights were loaded.

    `is_sharded_value` and `read_sharded_value` are for dicts of which every rank has its part, which no model is needed for.

    A Handle says where each original parameter lives on every rank (a Placement, from a few integers that every rank knows)
    and which tensor of this rank has its elements (`local`, `from_local`). What cannot be represented is a `WrapperError`
    that names the parameter and the way out. `fsdp_optim.testing.AdapterConformance` proves an adapter.
    """

    name: str
    """What errors call the wrapper."""

    wrapper_parts: frozenset[str] = frozenset()
    """What the wrapper puts into the names of parameters, which is no part of an FQN."""

    @abstractmethod
    def is_present(self) -> bool:
        """Whether the wrapper is loaded in this process; it is never imported only to find out."""

    @abstractmethod
    def rank_sets(self, tree: ModuleTree) -> Iterable[Ranks]:
        """The global ranks of every group over which something in the model is sharded or replicated."""

    @abstractmethod
    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterable[Handle]:
        """The live parameters that this wrapper has made, in any order; each original parameter in one of them.

        Args:
            ranks: the global ranks that share the model, sorted.
            claimed: the `id`s of tensors that other adapters have given Handles for; those need not be given again.
        """

    def is_wrapper_child(self, module: nn.Module, name: str) -> bool:
        """Whether the child `name` is what `module` wraps, so that the name is no part of an FQN."""
        return name in self.wrapper_parts

    def stand_ins(self, modules: Iterable[nn.Module]) -> Mapping[Place, torch.Tensor]:
        """The live parameters in whose place another tensor is registered for the time being."""
        return {}

    def masters(self, tree: ModuleTree, optims: Sequence[Any]) -> Iterable[Handle]:
        """Tensors that the groups of an optimizer hold in place of the model's parameters, as fp32 copies of them.

        Their originals are the model's parameters, all originals of a live parameter or none. State is read and loaded by
        these Handles, weights by those of `handles`. Handles of masters need `master`.
        """
        return ()

    def has_cut(self, param: torch.Tensor) -> bool:
        """Whether a tensor is part of what this wrapper has flattened or cut, so that it must not pass for a parameter."""
        return False

    def param_order(self, tree: ModuleTree) -> Iterable[torch.Tensor]:
        """The live parameters in the order in which the wrapper's own full dict counts them, where it has such a count."""
        return ()

    def cast_buffers(self, tree: ModuleTree) -> Iterable[torch.Tensor]:
        """The buffers that the wrapper casts to a dtype of its own in the first forward pass."""
        return ()

    def buffer(self, tree: ModuleTree, fqn: str, value: torch.Tensor) -> Handle | None:
        """A buffer that is spread over ranks; None where this wrapper has not done that."""
        return None

    def is_sharded_value(self, value: torch.Tensor) -> bool:
        """Whether a value of a sharded dict is spread over ranks, and says how in this wrapper's way."""
        return False

    def read_sharded_value(self, fqn: str, value: torch.Tensor) -> tuple[Placement, torch.Tensor]:
        """Where such a value lives, and this rank's elements of it, 1-D."""
        raise NotImplementedError

    def reshard(self, tree: ModuleTree) -> None:  # noqa: B027
        """Let go of whole parameters that a forward pass has left, so that the next one sees the new shards."""
