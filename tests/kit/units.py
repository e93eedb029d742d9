"""Units of fairscale FSDP written down by hand, and the live parameters that FSDP must then make.

A `Wrapping` is read twice: `wrap` makes the wrappers, and `live_parameters` says, from the definition of FSDP alone and without
asking any wrapper, which originals lie in which live parameter and in which order the live ones come. Fairscale's full dicts
record that (`param_id_map`, `num_padded`), and a model cannot say it where a rank has no elements of a parameter. Which elements
a rank has is read from the model, as for all wrappers (`kit.trained`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kit.models import build
from kit.wraps import wrap_units


@dataclass(frozen=True)
class Unit:
    """One FSDP wrapper around the module at `path` ("" is the root). Of two at one path the first is the inner one."""

    path: str
    flatten: bool = True
    options: tuple[tuple[str, Any], ...] = ()


Wrapping = tuple[Unit, ...]


def units(*paths: str, flatten: bool = True, **options: Any) -> Wrapping:
    return tuple(Unit(path, flatten, tuple(options.items())) for path in paths)


@dataclass(frozen=True)
class Live:
    """One parameter of the wrapped model: its originals in order; a flat one is always one-dimensional.

    `is_cut=False`: it is in no wrapper, and so it is whole on every rank.
    """

    fqns: tuple[str, ...]
    is_flat: bool
    is_cut: bool = True


def wrap(model: nn.Module, wrapping: Wrapping, fairscale: bool = False) -> Any:
    """Wrap from the inside out. A later sibling that uses an earlier one's parameter gets it as a shared one."""
    for unit in sorted(wrapping, key=lambda unit: -_depth(unit.path)):
        model = wrap_units(model, functools.partial(_as_unit, unit, fairscale), [unit.path])
    return model


def _as_unit(unit: Unit, fairscale: bool, module: nn.Module) -> Any:
    from fairscale.nn import FullyShardedDataParallel as FairscaleFSDP

    from fsdp_optim.fairscale import FullyShardedDataParallel as OurFSDP

    shared = [p for p in module.parameters(recurse=False) if getattr(p, "_is_sharded", False)]
    wrapper_cls = FairscaleFSDP if fairscale else OurFSDP
    wrapped = wrapper_cls(module, flatten_parameters=unit.flatten, **dict(unit.options))
    for param in shared:
        wrapped.append_shared_param(param)
    return wrapped


@functools.cache
def lives_of(model: str, wrapping: Wrapping) -> tuple[Live, ...]:
    """The live parameters of a model of `kit.models`, by its name."""
    return live_parameters(build(model), wrapping)


def live_parameters(plain: nn.Module, wrapping: Wrapping) -> tuple[Live, ...]:
    """The live parameters in the order of the wrapped model's `parameters()`."""
    names = {param: fqn for fqn, param in plain.named_parameters()}
    flattens = {}  # by path, the innermost wrapper's
    for unit in wrapping:
        flattens.setdefault(unit.path, unit.flatten)
    owner = {fqn: _owner(fqn, flattens) for fqn in names.values()}
    return tuple(dict.fromkeys(_walk(plain, "", flattens, owner, names)))


def _walk(
    module: nn.Module,
    path: str,
    flattens: Mapping[str, bool],
    owner: Mapping[str, str | None],
    names: Mapping[Any, str],
) -> Iterator[Live]:
    if flattens.get(path):
        fqns = tuple(fqn for fqn, unit in owner.items() if unit == path)
        if fqns:
            yield Live(fqns, True)
    for _, param in module.named_parameters(recurse=False):
        unit = owner[names[param]]
        if unit is None or not flattens[unit]:
            yield Live((names[param],), False, is_cut=unit is not None)
    for name, child in module.named_children():
        yield from _walk(child, f"{path}.{name}" if path else name, flattens, owner, names)


def _owner(fqn: str, paths: Mapping[str, bool]) -> str | None:
    """The innermost wrapped module that the parameter is in."""
    around = [path for path in paths if path == "" or fqn.startswith(f"{path}.")]
    return max(around, key=_depth, default=None)


def _depth(path: str) -> int:
    return len(path.split(".")) if path else 0


def padding(live: Live, numel: int, world_size: int) -> list[int]:
    """The padding of every rank, counted on the chunks that torch makes; empty for an uncut parameter."""
    if not live.is_cut:
        return []
    sizes = [chunk.numel() for chunk in torch.empty(numel).chunk(world_size)]
    return [sizes[0] - size for size in sizes] + [sizes[0]] * (world_size - len(sizes))


WRAPPINGS: dict[str, tuple[str, Wrapping]] = {
    "one unit": ("mlp", units("")),
    "middle": ("mlp", units("2", "")),  # the root's parameters lie around the unit's
    "first": ("mlp", units("0", "")),  # the root's parameters come last, its live parameter first
    "every layer": ("mlp", units("0", "2", "4", "")),  # the root has no parameters
    "no parameters": ("mlp", units("1", "2", "")),  # nor has the Tanh
    "twice": ("mlp", units("2", "2", "")),
    "unflattened": ("mlp", units("", flatten=False)),
    "unflattened layers": ("mlp", units("0", "2", "", flatten=False)),
    "flat in unflattened": ("mlp", units("2") + units("", flatten=False)),
    "unflattened in flat": ("mlp", units("2", flatten=False) + units("")),
    "deep": ("deep", units("1.3.2", "1.3", "1", "2", "")),
    "deep, no own": ("deep", units("1.0", "1.2", "1.3.0", "1.3.2", "1.3", "1", "3", "")),
    "deep, both": ("deep", units("1.3", flatten=False) + units("1") + units("", flatten=False)),
    "tiny": ("tiny", units("0", "")),
    "tiny, unflattened": ("tiny", units("0", "", flatten=False)),
    "odd": ("odd", units("")),
    "odd, unflattened": ("odd", units("", flatten=False)),
    "scalars": ("scalars", units("")),
    "scalars, unflattened": ("scalars", units("", flatten=False)),
    "tied": ("tied", units("body", "")),
    "tied, unflattened": ("tied", units("body") + units("", flatten=False)),
    "own": ("own", units("module", "")),
    "own, unflattened": ("own", units("module.1", "flat_param") + units("", flatten=False)),
    "siblings": ("siblings", units("first", flatten=False) + units("middle") + units("last", "", flatten=False)),
    "siblings, the later one owns": ("siblings", units("last", "first", "middle", "", flatten=False)),
}

UNITS = {
    "": ["scale", "mix", "head.weight", "head.bias"],
    "stem": ["stem.weight", "stem.bias"],
    "block": ["block.1.weight", "block.1.bias", "block.2.weight"],
    "block.0": ["block.0.weight", "block.0.bias"],
}
"""The units of `kit.models.Net`, in the order of the wrapped model's parameters, as `convert(units=...)` takes them."""
