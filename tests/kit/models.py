"""Small models, ways to wrap them in fairscale FSDP, and where FSDP must then keep every element.

A `Wrapping` is written down by hand and read twice: `wrap` makes the wrappers, `live_parameters` and `cut` say, from
the definition of FSDP alone and without asking any wrapper, which originals lie in which live parameter, in which order
the live ones come, and which elements each rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------- models


class Odd(nn.Module):
    """Parameters of awkward sizes: one without dimensions, one without elements, some smaller than a world of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.pair = nn.Parameter(torch.randn(2))
        self.tail = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.scale + self.pair.sum() + self.nothing.sum() + self.tail.sum()


class Scalars(nn.Module):
    """A model with 0-dimensional parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.5))
        self.b = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + self.b


class Tied(nn.Module):
    """Embedding and output share a weight that is known by the embedding's name; its module comes last in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.out = nn.Linear(4, 6)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.embed(tokens)))


class Siblings(nn.Module):
    """Three layers, of which the last uses the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Detour(nn.Module):
    """A model whose forward does not use the middle layer. (fairscale cannot train such a layer in a separate unit.)"""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.unused = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Own(nn.Module):
    """Parameters of its own, registered after its children, and names that look like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 3)))
        self.weight = nn.Parameter(torch.randn(3))
        self.listed = nn.ParameterList([torch.randn(2, 3), torch.randn(1)])
        self.flat_param = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.flat_param(self.module(x) * self.weight + self.listed[0].sum(0) * self.listed[1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def used_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4), layer)


def deep() -> nn.Module:
    """Sequentials in Sequentials, 3-d convolution weights, a layer without bias."""
    inner = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 5))
    middle = nn.Sequential(nn.Conv1d(2, 3, kernel_size=2), nn.Flatten(), nn.Linear(9, 6), inner)
    return nn.Sequential(nn.Unflatten(1, (2, 4)), middle, nn.Sequential(nn.Tanh()), nn.Linear(5, 2))


def tiny() -> nn.Module:
    """A model with fewer elements than ranks."""
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2, bias=False))


MODELS = {
    "mlp": (mlp, (5,)),
    "deep": (deep, (8,)),
    "tiny": (tiny, (1,)),
    "odd": (Odd, (3,)),
    "scalars": (Scalars, (2,)),
    "tied": (Tied, None),
    "siblings": (Siblings, (4,)),
    "detour": (Detour, (4,)),
    "own": (Own, (3,)),
    "used twice": (used_twice, (4,)),
}


def build(name: str) -> nn.Module:
    """The same parameters at every call."""
    torch.default_generator.manual_seed(7)  # torch.manual_seed seeds all kinds of devices, which takes longer
    return MODELS[name][0]()


def batch(name: str, step: int, size: int = 12) -> Tensor:
    """One global batch, divisible among 1, 2, 3 and 4 ranks."""
    shape, generator = MODELS[name][1], torch.Generator().manual_seed(1000 + step)
    if shape is None:
        return torch.randint(0, 6, (size, 3), generator=generator)
    return torch.randn(size, *shape, generator=generator)


# ---------------------------------------------------------------------------------------------------- wrapping


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


def wrap(model: nn.Module, wrapping: Wrapping, fairscale: bool = False) -> nn.Module:
    """Wrap from the inside out. A later sibling that uses an earlier one's parameter gets it as a shared one."""
    from fairscale.nn import FullyShardedDataParallel as FairscaleFSDP

    from fsdp_optim import FullyShardedDataParallel as OurFSDP

    wrapper_cls = FairscaleFSDP if fairscale else OurFSDP
    for unit in sorted(wrapping, key=lambda unit: -_depth(unit.path)):
        module = model.get_submodule(unit.path)
        shared = [p for p in module.parameters(recurse=False) if getattr(p, "_is_sharded", False)]
        wrapped = wrapper_cls(module, flatten_parameters=unit.flatten, **dict(unit.options))
        for param in shared:
            wrapped.append_shared_param(param)
        if unit.path == "":
            model = wrapped
        else:
            parent, _, name = unit.path.rpartition(".")
            setattr(model.get_submodule(parent), name, wrapped)
    return model


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
        mine = tuple(fqn for fqn, unit in owner.items() if unit == path)
        if mine:
            yield Live(mine, True)
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


def cut(live: Live, values: Sequence[Tensor], rank: int, world_size: int) -> Tensor:
    """What one rank holds of the originals of a live parameter: chunks of them laid end to end, zero-padded."""
    if not live.is_cut or (world_size == 1 and not live.is_flat):
        return values[0].clone()
    flat = torch.cat([value.reshape(-1) for value in values])
    chunks = list(flat.chunk(world_size))
    mine = chunks[rank] if rank < len(chunks) else flat[:0]
    return torch.cat([mine, flat.new_zeros(chunks[0].numel() - mine.numel())])


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
