"""One file per wrapper, each turning a model into Handles. `ModelReader` puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch.distributed as dist
from torch import nn

from fsdp_optim.adapters import dtensor, fairscale, fsdp1, replicated
from fsdp_optim.adapters.buffers import Buffers, Rename, read_buffers
from fsdp_optim.adapters.module_values import read_module_values
from fsdp_optim.adapters.tree import TRANSPARENT_CHILDREN, ModuleTree
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import Ranks
from fsdp_optim.options import NameOf
from fsdp_optim.view import Handle, ModelView, ModuleValues, NamedHandle

__all__ = ["ModelReader"]

_WRAPPER_PARTS = TRANSPARENT_CHILDREN | fairscale.WRAPPER_CHILDREN | fsdp1.WRAPPER_CHILDREN


class ModelReader:
    """Reads a model as this rank sees it. Makes no collective call and changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._tree = ModuleTree(model, _is_wrapper_child, dtensor.sharded_params)
        self._views: dict[tuple[tuple[int, ...], NameOf | None], ModelView] = {}

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self._tree.root).__name__

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that share the model: all ranks of all its wrappers; this rank alone for a plain module."""
        return tuple(sorted({_me()}.union(*self._rank_sets)))

    @property
    def is_wrapped(self) -> bool:
        """Whether anything in the model is sharded or replicated over ranks."""
        return bool(self._rank_sets)

    @cached_property
    def _rank_sets(self) -> list[Ranks]:
        return [ranks for adapter in (fairscale, fsdp1, dtensor, replicated) for ranks in adapter.rank_sets(self._tree)]

    def read(self, ranks: Sequence[int] | None = None, name_of: NameOf | None = None) -> ModelView:
        """The live parameters, and where their originals live. Read once; a reader is made for each call.

        Args:
            ranks: the global ranks that share the model (None: `self.ranks`).
            name_of: gives parameters other names, where ranks use one name for different ones.
        """
        key = tuple(sorted(self.ranks if ranks is None else ranks)), name_of
        if key not in self._views:
            self._views[key] = self._read(*key)
        return self._views[key]

    def _read(self, everyone: tuple[int, ...], name_of: NameOf | None) -> ModelView:
        tree = self._tree
        sharded = [handle for adapter in (fairscale, fsdp1, dtensor) for handle in adapter.handles(tree)]
        claimed = {id(handle.param) for handle in sharded}
        _check_unclaimed(tree, claimed)
        rest = replicated.handles(tree, claimed, everyone)
        naming = _Naming(tree, name_of)
        named = [naming.name(handle) for handle in (*sharded, *rest)]
        by_param = {id(n.handle.param): n for n in named}
        live = {id(param): position for position, (param, _) in enumerate(tree.params())}
        unit_order = [by_param[id(p)] for p in fairscale.param_order(tree)]
        return ModelView(
            handles=tuple(sorted(named, key=lambda n: live.get(id(n.handle.param), len(live)))),
            order=naming.order,
            ranks=everyone,
            rank=_me(),
            aliases=naming.aliases,
            unit_order=tuple(fqn for n in unit_order for fqn in n.fqns) or None,
            mixed=naming.mixed,
            wrapper_parts=_WRAPPER_PARTS,
            given_names=naming.given_names,
        )

    def reshard(self) -> None:
        """Let go of whole parameters that a forward pass has left, so that the next one sees new shards."""
        for adapter in (fairscale, fsdp1, dtensor):
            adapter.reshard(self._tree)

    def buffers(self, view: ModelView, name_of: NameOf | None = None) -> Buffers:
        """The buffers that a state_dict() has: whole on every rank that holds the parameters near them."""
        return read_buffers(self._tree, view, _renamed_by(name_of))

    def module_values(self, view: ModelView, name_of: NameOf | None = None) -> ModuleValues:
        """What a state_dict() has besides parameters and buffers."""
        return read_module_values(self._tree, view, _renamed_by(name_of))


def _renamed_by(name_of: NameOf | None) -> Rename:
    return lambda fqn, ranks: fqn if name_of is None else name_of(fqn, min(ranks))


def _check_unclaimed(tree: ModuleTree, claimed: set[int]) -> None:
    """Refuse part of a wrapped model: what a wrapper has flattened or cut would pass for whole parameters.

    Raises WrapperError.
    """
    for param, sites in tree.params():
        if id(param) not in claimed:
            for name, adapter in (("fairscale FSDP", fairscale), ("torch FSDP", fsdp1)):
                if adapter.has_cut(param):
                    raise WrapperError(
                        f"{tree.fqn(*sites[0])}: {name} has flattened or cut this parameter (rank {_me()} holds shape "
                        f"{list(param.shape)}), and the {name} module around it is not part of the {type(tree.root).__name__} "
                        "that was given: pass the wrapped root instead of a module inside it"
                    )


def _me() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _is_wrapper_child(module: nn.Module, name: str) -> bool:
    return any(adapter.is_wrapper_child(module, name) for adapter in (fairscale, fsdp1, replicated))


class _Naming:
    """Names of the original parameters, and their order in the unwrapped model."""

    def __init__(self, tree: ModuleTree, name_of: NameOf | None) -> None:
        self._tree, self._name_of = tree, name_of
        self._keys: dict[str, tuple[int, int, int]] = {}
        self.aliases: dict[str, str] = {}
        self.given_names: dict[str, str] = {}

    @property
    def order(self) -> tuple[str, ...]:
        """As the unwrapped model's parameters(): by module, then by place in the module."""
        return tuple(sorted(self._keys, key=self._keys.__getitem__))

    @property
    def mixed(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Of each module that has both, the parameters that were taken and those that stayed registered."""
        kinds: dict[int, tuple[list[str], list[str]]] = {}
        for fqn in self.order:
            module, kind, _ = self._keys[fqn]
            kinds.setdefault(module, ([], []))[kind].append(fqn)
        return tuple((tuple(taken), tuple(left)) for taken, left in kinds.values() if taken and left)

    def name(self, handle: Handle) -> NamedHandle:
        fqns = []
        for original in handle.originals:
            module, attribute = original.module, original.attribute
            fqn = self._rename(handle, self._tree.fqn(module, attribute))
            if fqn in self._keys:
                raise WrapperError(f"{fqn}: two parameters of the model have this name")
            if original.place is not None:
                self._keys[fqn] = (self._tree.index(module), 0, original.place)
            else:
                self._keys[fqn] = (self._tree.index(module), 1, list(module._parameters).index(attribute))
            self._add_aliases(handle, module, attribute, fqn)
            fqns.append(fqn)
        for position, module, attribute in handle.aliases:
            self.aliases[self._rename(handle, self._tree.fqn(module, attribute))] = fqns[position]
            self._add_aliases(handle, module, attribute, fqns[position])
        return NamedHandle(handle, tuple(fqns))

    def _add_aliases(self, handle: Handle, module: nn.Module, attribute: str, fqn: str) -> None:
        for other in self._tree.other_fqns(module, attribute):
            self.aliases[self._rename(handle, other)] = fqn

    def _rename(self, handle: Handle, fqn: str) -> str:
        if self._name_of is None:
            return fqn
        given = self._name_of(fqn, min(handle.originals[0].placement.ranks))
        self.given_names[fqn] = given
        return given
