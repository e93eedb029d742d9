"""The reader of a model, which combines the descriptions of all adapters into one view."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.adapters.base import Adapter, Place
from fsdp_optim.adapters.buffers import Buffers, Rename, read_buffers
from fsdp_optim.adapters.known import all_adapters
from fsdp_optim.adapters.masters import with_masters
from fsdp_optim.adapters.module_values import read_module_values
from fsdp_optim.adapters.naming import Naming
from fsdp_optim.adapters.slices import as_declared, has_declared
from fsdp_optim.adapters.state_dict_hooks import HookedUnit, hooked_units
from fsdp_optim.adapters.transformers_names import StoredNames, stored_names_of
from fsdp_optim.adapters.tree import TRANSPARENT_CHILDREN, ModuleTree
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import Ranks
from fsdp_optim.options import Model, NameOf
from fsdp_optim.tensors.elements import is_fake, is_lazy, why_without_elements
from fsdp_optim.tensors.memory import is_plain
from fsdp_optim.view import Handle, ModelView, ModuleValues

if TYPE_CHECKING:
    from fsdp_optim.layout.views import View


class ModelReader:
    """A reader of one model on this rank. It makes no collective call and changes nothing."""

    def __init__(self, model: Model, rank: int | None = None) -> None:
        """`model`: also a list of pipeline stages. `rank`: this global rank (None: the rank in torch.distributed)."""
        self._rank = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
        known = all_adapters()
        self._wrapper_parts = TRANSPARENT_CHILDREN.union(*(adapter.wrapper_parts for adapter in known))
        self._adapters = tuple(adapter for adapter in known if adapter.is_present())
        self.is_staged = not isinstance(model, nn.Module)
        self._tree = ModuleTree(
            *([model] if isinstance(model, nn.Module) else model),
            is_wrapper_child=self._is_wrapper_child,
            stand_ins=self._stand_ins,
        )
        self.learned: dict[
            str, tuple[View, ...]
        ] = {}  # the Views that this call learns from the model, by their source
        self._views: dict[tuple[tuple[int, ...], NameOf | None], ModelView] = {}

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self._tree.root).__name__

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that share the model: all ranks of all its wrappers; this rank alone for a plain module."""
        return tuple(sorted({self._rank}.union(*self._rank_sets)))

    @property
    def is_wrapped(self) -> bool:
        """Whether a wrapper shards or replicates anything in the model over ranks."""
        return bool(self._rank_sets)

    @cached_property
    def wrappers(self) -> str:
        """The names of the wrappers of the model, as users call them; empty for a plain module."""
        kinds = [adapter.kind(self._tree) for adapter, sets in self._sets_of_adapters if sets]
        return " and ".join(kinds)

    @cached_property
    def _rank_sets(self) -> list[Ranks]:
        sets = [ranks for _, of_adapter in self._sets_of_adapters for ranks in of_adapter]
        if self._has_declared and dist.is_initialized():
            sets.append(range(dist.get_world_size()))  # a slice does not show which other ranks have slices
        return sets

    @cached_property
    def _sets_of_adapters(self) -> list[tuple[Adapter, list[Ranks]]]:
        return [(adapter, list(adapter.rank_sets(self._tree))) for adapter in self._adapters]

    @cached_property
    def _has_declared(self) -> bool:
        return has_declared(self._tree)

    def read(self, ranks: Sequence[int] | None = None, name_of: NameOf | None = None, optim: Any = None) -> ModelView:
        """Return the live parameters, and where their originals live. The result is cached; every call makes a new reader.

        Args:
            ranks: the global ranks that share the model (None: `self.ranks`).
            name_of: gives parameters unique names, if ranks use one name for different parameters.
            optim: an optimizer, or several; if it holds masters, these replace the parameters.
        """
        key = tuple(sorted(self.ranks if ranks is None else ranks)), name_of
        if key not in self._views:
            self._views[key] = self._read(*key)
        view = self._views[key]
        optims = () if optim is None else tuple(optim) if isinstance(optim, (list, tuple)) else (optim,)
        masters = [handle for adapter in self._adapters for handle in adapter.masters(self._tree, optims)]
        return with_masters(view, masters, Naming(self._tree, name_of)) if masters else view

    def _read(self, everyone: tuple[int, ...], name_of: NameOf | None) -> ModelView:
        self._check_elements()
        tree, handles = self._tree, self._handles(everyone)
        naming = Naming(tree, name_of)
        named = [naming.name(handle) for handle in handles]
        by_param = {id(n.handle.param): n for n in named}
        live = {id(param): position for position, (param, _) in enumerate(tree.params())}
        unit_order = [by_param[id(p)] for adapter in self._adapters for p in adapter.param_order(tree)]
        return ModelView(
            handles=tuple(sorted(named, key=lambda n: live.get(id(n.handle.param), len(live)))),
            order=naming.order,
            ranks=everyone,
            rank=self._rank,
            aliases=naming.aliases,
            unit_order=tuple(fqn for n in unit_order for fqn in n.fqns) or None,
            mixed=naming.mixed,
            wrapper_parts=self._wrapper_parts,
            given_names=naming.given_names,
        )

    def _check_elements(self) -> None:
        """Raise WrapperError for a parameter or buffer without a shape, or of FakeTensorMode."""
        wrong = [
            (self._tree.fqn(*sites[0]), param) for param, sites in self._tree.params() if _is_without_elements(param)
        ]
        wrong += [(fqn, buffer) for fqn, buffer, _ in self._tree.buffers() if _is_without_elements(buffer)]
        for fqn, value in wrong:
            raise WrapperError(f"{fqn}: on rank {self._rank} this tensor {why_without_elements(value)}")

    def _handles(self, everyone: tuple[int, ...]) -> list[Handle]:
        """Return the Handle of every live parameter, from the first adapter that claims it; the last adapter claims the rest."""
        *specific, rest = self._adapters
        claimed: dict[int, Handle] = {}
        for adapter in specific:
            for handle in adapter.handles(self._tree, everyone, claimed):
                claimed.setdefault(id(handle.param), handle)
        self._check_unclaimed(claimed)
        for handle in rest.handles(self._tree, everyone, claimed):
            claimed.setdefault(id(handle.param), handle)
        if not self._has_declared:
            return list(claimed.values())
        return [as_declared(self._tree, handle, self._rank) for handle in claimed.values()]

    def _check_unclaimed(self, claimed: Collection[int]) -> None:
        """Raise WrapperError for a part of a wrapped model, whose flattened or cut tensors would count as complete parameters."""
        for param, sites in self._tree.params():
            if id(param) not in claimed:
                for adapter in self._adapters:
                    if adapter.has_cut(param):
                        raise WrapperError(
                            f"{self._tree.fqn(*sites[0])}: {adapter.name} has flattened or cut this parameter (rank {self._rank} "
                            f"holds shape {list(param.shape)}), and the {adapter.name} module around it is not part of the "
                            f"{self.name} that was given: pass the wrapped root instead of a module inside it"
                        )

    def hooked_units(self, view: ModelView, name_of: NameOf | None = None) -> list[HookedUnit]:
        """Return the modules whose state_dict() is changed by hooks of their own. No hook is run."""
        return hooked_units(self._tree, view, name_of)

    def reshard(self) -> None:
        """Free the unsharded parameters that a forward pass has left, so that the next forward pass uses the new shards."""
        for adapter in self._adapters:
            adapter.reshard(self._tree)

    def buffers(self, view: ModelView, name_of: NameOf | None = None) -> Buffers:
        """Return the persistent buffers, as a wrapper has cut them, else complete on the ranks with the nearest parameters."""
        return read_buffers(self._tree, self._adapters, view, _renamed_by(name_of))

    @property
    def buffer_fqns(self) -> tuple[str, ...]:
        """The FQNs of the persistent buffers."""
        return tuple(fqn for fqn, _, _ in self._tree.buffers())

    def unsaved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers with persistent=False by FQN, which no checkpoint has."""
        return self._tree.unsaved_buffers()

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module with its FQN. A wrapper has the FQN of the module inside it, and comes before it."""
        return ((self._tree.path(module), module) for module in self._tree.modules)

    def versions(self) -> dict[str, Any]:
        """Return the version of the code of each module by path, as `state_dict()` has it beside the entries.

        That of a module counts, and not that of a wrapper around it.
        """
        return {path: getattr(module, "_version", None) for path, module in self._tree.every_path()}

    def stored_names(self) -> StoredNames | None:
        """Return how transformers renames the model's weights in its files; None where the files have the model's names."""
        return stored_names_of(self._tree.root.modules())

    def module_values(
        self, view: ModelView, name_of: NameOf | None = None, *, runs_hooks: bool = False
    ) -> ModuleValues:
        """Return the entries of state_dict() that are neither parameters nor buffers.

        `runs_hooks`: the call learns from the hooks of state_dict(), so that they are not listed as ignored.
        """
        return read_module_values(self._tree, view, _renamed_by(name_of), runs_hooks=runs_hooks)

    def _is_wrapper_child(self, module: nn.Module, name: str) -> bool:
        return any(adapter.is_wrapper_child(module, name) for adapter in self._adapters)

    def _stand_ins(self, modules: Collection[nn.Module]) -> Mapping[Place, torch.Tensor]:
        live_params: dict[Place, torch.Tensor] = {}
        for adapter in self._adapters:
            live_params.update(adapter.stand_ins(modules))
        return live_params


def _is_without_elements(value: torch.Tensor) -> bool:
    if is_plain(value):
        return value.is_nested
    return is_lazy(value) or is_fake(value)


def _renamed_by(name_of: NameOf | None) -> Rename:
    return lambda fqn, ranks: fqn if name_of is None else name_of(fqn, min(ranks))
