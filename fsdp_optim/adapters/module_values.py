"""The entries of state_dict() that are neither parameters nor buffers: extra state, and additions of _save_to_state_dict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters.buffers import Near, Rename
from fsdp_optim.adapters.state_dict_hooks import OF_TORCH, function_of, hooks_after, hooks_before, is_of
from fsdp_optim.adapters.tree import ModuleTree, join
from fsdp_optim.errors import StateError
from fsdp_optim.tensors.model_dict import EXTRA, with_metadata
from fsdp_optim.view import ModelView, ModuleValue, ModuleValues

_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.", "torch._dynamo.", "fairscale.")


def read_module_values(tree: ModuleTree, view: ModelView, rename: Rename, *, runs_hooks: bool = False) -> ModuleValues:
    """Return the entries of all modules. Parameters are not gathered, and hooks are not run.

    Raises StateError where a module's own code fails.
    """
    values: dict[str, ModuleValue] = {}
    extra_state_loaders: dict[str, nn.Module] = {}
    lost: list[str] = []
    adding = _adding(tree.modules)
    near, taken = Near(tree, view), _names_of_params(view) if adding else {}
    for module in adding:
        path = tree.path(module)
        if _may_load_others(module):
            extra_state_loaders[path] = module
        own = {*module._parameters, *module._buffers, *taken.get(module, ())} - module._non_persistent_buffers_set
        for key, value in _saved(path, module).items():
            if key in own:
                continue
            fqn = join(path, key)
            if not _is_restored(module, key):
                lost.append(fqn)
                continue
            ranks = near.ranks(fqn)
            others = tuple(rename(other, ranks) for other in tree.other_fqns(module, key))
            name = rename(fqn, ranks)
            entry = ModuleValue(module, key, value, others)
            first = values.get(name)
            values[name] = entry if first is None else replace(first, stage_copies=(*first.stage_copies, entry))
    return ModuleValues(values, extra_state_loaders, tuple(lost), tuple(_hooked(tree, runs_hooks=runs_hooks)))


def _overrides(module: nn.Module, name: str) -> bool:
    """Return whether a module's class overrides a method of nn.Module, other than the classes of wrappers."""
    method = getattr(module, name)
    return function_of(method) is not getattr(nn.Module, name) and not is_of(method, _WRAPPERS)


def _has_extra(module: nn.Module) -> bool:
    return _overrides(module, "get_extra_state")


def _adding(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that add entries of their own. A class is examined once, unless a module has methods of its own."""
    of_class: dict[type[nn.Module], bool] = {}
    modules_that_add = []
    for module in modules:
        kind, own = type(module), module.__dict__
        if "get_extra_state" in own or "_save_to_state_dict" in own:
            adds = _adds(module)
        elif kind in of_class:
            adds = of_class[kind]
        else:
            adds = of_class[kind] = _adds(module)
        if adds:
            modules_that_add.append(module)
    return modules_that_add


def _adds(module: nn.Module) -> bool:
    return _has_extra(module) or _overrides(module, "_save_to_state_dict")


def _may_load_others(module: nn.Module) -> bool:
    """Return whether a module may load entries that it does not have now, because its entries may depend on its history."""
    return _overrides(module, "_save_to_state_dict") and _overrides(module, "_load_from_state_dict")


def _is_restored(module: nn.Module, key: str) -> bool:
    return _overrides(module, "_load_from_state_dict") or (key == EXTRA and _overrides(module, "set_extra_state"))


def _names_of_params(view: ModelView) -> dict[nn.Module, set[str]]:
    """Return, by module, the names of its parameters, including the parameters that a wrapper has taken out."""
    names: dict[nn.Module, set[str]] = {}
    for named in view.handles:
        for original in named.handle.originals:
            names.setdefault(original.module, set()).add(original.attribute)
        for _, module, attribute in named.handle.aliases:
            names.setdefault(module, set()).add(attribute)
    return names


def _saved(path: str, module: nn.Module) -> dict[str, Any]:
    """Return the entries that a module itself puts into a state_dict(), including parameters and buffers, not copied."""
    if not _overrides(module, "_save_to_state_dict"):
        return {EXTRA: _of_module(path, module, "get_extra_state")}
    entries = with_metadata({}, {})  # some modules read this attribute
    _of_module(path, module, "_save_to_state_dict", [entries, "", True])
    return dict(entries)


def _of_module(path: str, module: nn.Module, name: str, args: Sequence[Any] = ()) -> Any:
    """Return the result of a method of a module. Raises StateError where the method fails."""
    try:
        with torch.no_grad():
            return getattr(module, name)(*args)
    except Exception as error:
        raise StateError(
            f"{path or 'the model'}: {name}() of this {type(module).__name__} raised {type(error).__name__}: {error}; a save or "
            "load needs this method for the entries of state_dict() that are neither parameters nor buffers: repair the method"
        ) from error


def put(module: nn.Module, values: dict[str, Any], path: str, version: Any) -> None:
    """Load entries that `read_module_values` read into a module. Raises StateError where the module rejects the entries.

    `version`: the version of the saved module's code.
    """
    if set(values) == {EXTRA} and not _overrides(module, "_load_from_state_dict"):
        _of_module(path, module, "set_extra_state", [values[EXTRA]])
        return
    metadata = {} if version is None else {"version": version}
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    args = [OrderedDict(values), "", metadata, True, missing, unexpected, errors]
    _of_module(path, module, "_load_from_state_dict", args)
    refused = [key for key in unexpected if key in values]
    if errors or refused:
        why = "; ".join(errors) or f"{refused[0]!r} is unknown"
        raise StateError(
            f"{path or 'the model'}: this {type(module).__name__} refused the saved entries of its state_dict(): {why}"
        )


def _hooked(tree: ModuleTree, *, runs_hooks: bool) -> Iterator[str]:
    """Yield the modules whose state_dict() is changed by hooks or overrides, which this library does not run."""
    plain = dict[type[nn.Module], bool]()  # whether a class has the state_dict() of nn.Module
    for module in tree.modules:
        kind, before, after = type(module), hooks_before(module), () if runs_hooks else hooks_after(module)
        if kind not in plain:
            plain[kind] = getattr(kind, "state_dict", None) is nn.Module.state_dict
        if not before and not after and plain[kind] and "state_dict" not in module.__dict__:
            continue  # nearly always
        foreign = [hook for hook in (*before, *after) if not is_of(hook, OF_TORCH)]
        if function_of(module.state_dict) is not nn.Module.state_dict and not is_of(module.state_dict, OF_TORCH):
            foreign.append(module.state_dict)
        if foreign:
            name = getattr(function_of(foreign[0]), "__qualname__", type(foreign[0]).__name__)
            yield f"{tree.path(module) or 'the model'} ({type(module).__name__}: {name})"
