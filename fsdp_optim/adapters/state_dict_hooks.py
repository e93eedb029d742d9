"""Modules whose state_dict() is changed by hooks of their own, which other names of parameters may be learned from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters.tree import ModuleTree, join
from fsdp_optim.layout import Shape
from fsdp_optim.options import NameOf
from fsdp_optim.view import ModelView, Original

OF_TORCH = ("torch.", "fairscale.")
"""Packages whose hooks keep the names of the unwrapped model, or restore them."""


@dataclass(frozen=True, eq=False)
class Hook:
    """A hook as it was registered. `takes_over`: what it returns takes the place of the dict that it was given."""

    call: Callable[..., Any]
    takes_over: bool = False

    @property
    def name(self) -> str:
        """The name that its authors know it by."""
        function = function_of(self.call)
        return str(getattr(function, "__qualname__", type(function).__name__))


@dataclass(frozen=True, eq=False)
class HookedModule:
    """A module with hooks of its own.

    Attributes:
        path: its path in the unwrapped model.
        save: the hooks that change what state_dict() returns, in their order.
        load: the hooks that change what load_state_dict() takes, in their order.
    """

    module: nn.Module
    path: str
    save: tuple[Hook, ...]
    load: tuple[Hook, ...]

    @property
    def prefix(self) -> str:
        """What the names of its parameters begin with."""
        return f"{self.path}." if self.path else ""

    @property
    def metadata(self) -> dict[str, Any]:
        """What torch gives its hooks as `local_metadata`."""
        return {"version": getattr(self.module, "_version", None)}

    @property
    def what(self) -> str:
        """The module, as errors name it."""
        return f"{self.path or 'the model'} ({type(self.module).__name__})"


@dataclass(frozen=True, eq=False)
class HookedTensor:
    """A parameter or persistent buffer in a module with hooks: its unsharded shape, and the live tensor on this rank.

    Attributes:
        fqn: its name in state_dict().
        name: its name in the job, which `name_of` may give; None for a buffer where `name_of` is given.
        named: gives the names in the job of the parts that the hooks make of it.
    """

    fqn: str
    name: str | None
    shape: Shape
    live: torch.Tensor
    named: Callable[[str], str] = field(default=str)


@dataclass(frozen=True, eq=False)
class HookedUnit:
    """An outermost module with hooks, the modules with hooks inside it, and all parameters and buffers inside it.

    Attributes:
        hooked: the modules with hooks in the order of `model.modules()`, the outermost first.
        other_paths: other paths to the outermost module, whose parameters are tied.
    """

    hooked: tuple[HookedModule, ...]
    tensors: Mapping[str, HookedTensor]
    modules: tuple[nn.Module, ...]
    other_paths: tuple[str, ...] = ()

    @property
    def outermost(self) -> HookedModule:
        return self.hooked[0]


def function_of(method: Any) -> Callable[..., Any]:
    """Return the function inside a method, or inside what functools has wrapped around it."""
    while isinstance(method, functools.partial):
        method = method.func
    function: Callable[..., Any] = getattr(method, "__func__", method)
    return function


def is_of(method: Any, places: tuple[str, ...]) -> bool:
    """Return whether a method or a hook is defined in one of the packages `places`."""
    function = function_of(method)
    return str(getattr(function, "__module__", None) or type(function).__module__).startswith(places)


def hooked_units(tree: ModuleTree, view: ModelView, name_of: NameOf | None) -> list[HookedUnit]:
    """Return the outermost modules with hooks of their own. No hook is run."""
    outermost: dict[nn.Module, tuple[nn.Module, ...]] = {}
    inside: set[nn.Module] = set()
    for module in tree.modules:
        if module not in inside and _saving(module):
            outermost[module] = tuple(module.modules())
            inside.update(outermost[module])
    listed = _tensors_of(tree, view, name_of, inside) if outermost else {}
    units: list[HookedUnit] = []
    for module, members in outermost.items():
        hooked = tuple(_hooked(tree, other) for other in members if _saving(other) or _loading(other))
        tensors = {fqn: tensor for other in members for fqn, tensor in listed.get(other, ())}
        units.append(HookedUnit(hooked, tensors, members, tuple(tree.other_paths(module))))
    return units


def hooks_before(module: nn.Module) -> Collection[Callable[..., Any]]:
    """Return the hooks that are called before state_dict() reads a module."""
    return module._state_dict_pre_hooks.values() if module._state_dict_pre_hooks else ()  # few modules have some


def hooks_after(module: nn.Module) -> Collection[Callable[..., Any]]:
    """Return the hooks that may change what state_dict() has read."""
    return module._state_dict_hooks.values() if module._state_dict_hooks else ()


def _saving(module: nn.Module) -> tuple[Hook, ...]:
    return tuple(
        Hook(hook, takes_over=not getattr(hook, "_from_public_api", False))
        for hook in hooks_after(module)
        if not is_of(hook, OF_TORCH)
    )


def _loading(module: nn.Module) -> tuple[Hook, ...]:
    if not module._load_state_dict_pre_hooks:
        return ()
    hooks = module._load_state_dict_pre_hooks.values()
    return tuple(Hook(hook) for hook in hooks if not is_of(getattr(hook, "hook", hook), OF_TORCH))


def _hooked(tree: ModuleTree, module: nn.Module) -> HookedModule:
    return HookedModule(module, tree.path(module), _saving(module), _loading(module))


def _tensors_of(
    tree: ModuleTree, view: ModelView, name_of: NameOf | None, modules: Collection[nn.Module]
) -> dict[nn.Module, list[tuple[str, HookedTensor]]]:
    """Return the parameters and persistent buffers of some modules, with those that a wrapper has taken out of them."""
    by_module: dict[nn.Module, list[tuple[str, HookedTensor]]] = {}
    for named in view.handles:
        handle = named.handle
        places = [(position, o.module, o.attribute) for position, o in enumerate(handle.originals)]
        for position, module, attribute in [*places, *handle.aliases]:
            if module not in modules:
                continue
            placement, fqn = handle.originals[position].placement, tree.fqn(module, attribute)
            rename = _renaming(name_of, handle.originals[0])
            tensor = HookedTensor(fqn, rename(fqn), tuple(placement.shape), handle.param, rename)
            by_module.setdefault(module, []).append((fqn, tensor))
    for module in modules:
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                fqn = join(tree.path(module), attribute)
                name = fqn if name_of is None else None
                by_module.setdefault(module, []).append((fqn, HookedTensor(fqn, name, tuple(buffer.shape), buffer)))
    return by_module


def _renaming(name_of: NameOf | None, original: Original) -> Callable[[str], str]:
    if name_of is None:
        return str
    rank = min(original.placement.ranks)
    return lambda fqn: name_of(fqn, rank)


def contents_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that are registered in a module itself."""
    for registered in (module._parameters, module._buffers):
        for name, tensor in registered.items():
            if tensor is not None:
                yield name, tensor
