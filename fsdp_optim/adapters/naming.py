"""The FQNs of original parameters, and their order in the unwrapped model."""

from __future__ import annotations

from torch import nn

from fsdp_optim.adapters.tree import ModuleTree
from fsdp_optim.errors import WrapperError
from fsdp_optim.options import NameOf
from fsdp_optim.view import Handle, NamedHandle


class Naming:
    """Names Handles one after the other, and collects the order of the unwrapped model on the way."""

    def __init__(self, tree: ModuleTree, name_of: NameOf | None) -> None:
        self._tree, self._name_of = tree, name_of
        self._keys: dict[str, tuple[int, int, int]] = {}
        self._modules: dict[str, nn.Module] = {}
        self.aliases: dict[str, str] = {}
        self.given_names: dict[str, str] = {}
        self._places: dict[nn.Module, dict[str, int]] = {}
        self._has_taken = False  # whether a wrapper has taken any parameter out of its module

    @property
    def order(self) -> tuple[str, ...]:
        """The FQNs in the order of the unwrapped model's parameters(): by module, then by place in the module."""
        return tuple(sorted(self._keys, key=self._keys.__getitem__))

    @property
    def mixed(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """(taken parameters, registered parameters) of each module that has both."""
        if not self._has_taken:
            return ()
        by_module: dict[int, tuple[list[str], list[str]]] = {}
        for fqn in self.order:
            module, is_registered, _ = self._keys[fqn]
            by_module.setdefault(module, ([], []))[is_registered].append(fqn)
        return tuple((tuple(taken), tuple(left)) for taken, left in by_module.values() if taken and left)

    def name(self, handle: Handle) -> NamedHandle:
        """Return the Handle with its FQNs. Raises WrapperError where two parameters would have one name."""
        fqns = []
        for original in handle.originals:
            module, attribute, place = original.module, original.attribute, original.place
            fqn, index = self._tree.named(module, attribute)
            if self._name_of is not None:
                fqn = self._rename(handle, fqn)
            if fqn in self._keys:
                raise self._same_name(fqn, module)
            self._modules[fqn] = module
            if place is not None:
                self._keys[fqn] = (index, 0, place)
                self._has_taken = True
            else:
                self._keys[fqn] = (index, 1, self._place_in(module, attribute))
            if self._tree.has_other_paths:
                self._add_aliases(handle, module, attribute, fqn)
            fqns.append(fqn)
        for position, module, attribute in handle.aliases:
            other = self._rename(handle, self._tree.fqn(module, attribute))
            if other != fqns[position]:  # a tied parameter may have the same name in two pipeline stages
                self.aliases[other] = fqns[position]
            self._add_aliases(handle, module, attribute, fqns[position])
        return NamedHandle(handle, tuple(fqns))

    def _same_name(self, fqn: str, module: nn.Module) -> WrapperError:
        """Return the error of a second parameter of one name, which is in `module`."""
        first, second = self._tree.root_of(self._modules[fqn]), self._tree.root_of(module)
        if first == second:
            return WrapperError(
                f"{fqn}: two parameters of the model have this name: give name_of= that tells them apart"
            )
        return WrapperError(
            f"{fqn}: the stages {first} and {second} in the list of this rank have two tensors of this name: if "
            "they are one tied parameter, register the same Parameter in both stages; else give name_of= that tells "
            "them apart"
        )

    def _place_in(self, module: nn.Module, attribute: str) -> int:
        registered = module._parameters
        if len(registered) == 1 and attribute in registered:
            return 0
        places = self._places.get(module)
        if places is None:
            places = self._places[module] = {attribute: place for place, attribute in enumerate(registered)}
        return places[attribute]

    def _add_aliases(self, handle: Handle, module: nn.Module, attribute: str, fqn: str) -> None:
        for other in self._tree.other_fqns(module, attribute):
            self.aliases[self._rename(handle, other)] = fqn

    def _rename(self, handle: Handle, fqn: str) -> str:
        if self._name_of is None:
            return fqn
        name = self._name_of(fqn, min(handle.originals[0].placement.ranks))
        self.given_names[fqn] = name
        return name
