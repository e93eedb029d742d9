"""What hooks can depend on, as a key: units of modules with equal keys have equal Views, which are learned once."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fsdp_optim.adapters.state_dict_hooks import HookedUnit

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device, CodeType)
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module: parameters, children, hooks."""

_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.", "torch._dynamo.", "fairscale.")
_DEPTH = 12


class _Same:
    """Something that is equal to itself alone. It keeps what it is of alive, so that no other gets its id."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def kind_of(unit: HookedUnit) -> tuple[object, ...]:
    """Return the key of a unit: classes, attributes and hooks of its modules, names and shapes of its parameters."""
    prefix = unit.outermost.prefix
    numbers = {module: number for number, module in enumerate(unit.modules)}
    keys: list[object] = [(fqn.removeprefix(prefix), tensor.shape) for fqn, tensor in unit.tensors.items()]
    for hooked in unit.hooked:
        keys.append((numbers[hooked.module], hooked.path[len(prefix) :]))
        keys += [_key(hook.call, numbers, _DEPTH) for hook in (*hooked.save, *hooked.load)]
    for module in unit.modules:
        keys.append((type(module), tuple(_attributes(module, numbers))))
    return tuple(keys)


def _attributes(module: nn.Module, numbers: Mapping[nn.Module, int]) -> Iterator[tuple[str, object]]:
    if all(cls is nn.Module or cls.__module__.startswith(_WRAPPERS) for cls in type(module).__mro__[:-1]):
        return  # a wrapper's own, in which no hook of the model looks
    for name, value in vars(module).items():
        if name not in _OF_TORCH:
            yield name, _key(value, numbers, _DEPTH)


def _key(value: Any, numbers: Mapping[nn.Module, int], depth: int) -> object:
    """Return a key that is equal only for values which hooks cannot tell apart."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, nn.Module) and value in numbers:
        return "module", numbers[value]
    if depth:
        parts = _parts(value)
        if parts is not None:
            return type(value), tuple(_key(part, numbers, depth - 1) for part in parts)
    return _Same(value)


def _parts(value: Any) -> Sequence[object] | None:
    """Return what a value consists of; None if that is unknown."""
    parts: Sequence[object] | None = None
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        parts = (value.__module__, value.__code__, value.__defaults__, value.__kwdefaults__, *map(_in_cell, cells))
    elif isinstance(value, MethodType):
        parts = (value.__func__, value.__self__)
    elif type(value) is functools.partial:
        parts = (value.func, value.args, value.keywords)
    elif isinstance(value, BuiltinFunctionType):
        parts = (value.__module__, value.__qualname__)
    elif type(value) in (tuple, list, torch.Size):
        parts = value
    elif type(value) is dict:
        parts = (*value.keys(), *value.values())
    elif isinstance(value, Set) and type(value) in (set, frozenset) and all(isinstance(each, _PLAIN) for each in value):
        parts = sorted(value, key=repr)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = tuple(getattr(value, each.name, None) for each in fields(value))
    elif type(value).__qualname__ == "_WrappedHook":  # torch's, around a hook of load_state_dict()
        parts = (value.hook, value.module() if value.with_module else None)
    return parts


def _in_cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None
