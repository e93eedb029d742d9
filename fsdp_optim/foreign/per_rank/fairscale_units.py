"""How fairscale flattens parameters, for files of its shards: the parameters in each unit, and their common state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.description import OPAQUE, SCALAR, TENSOR, ParamDescription
from fsdp_optim.formats.base.protocols import CheckpointContents
from fsdp_optim.layout import Shape

_FLAT = "flat_param_0"
_FIX = (
    'give units={"": [...], "layers.0": [...]}: for each module that FSDP wraps, its path and the FQNs of the parameters that it '
    "flattens, both in the order of the wrapped model's parameters()"
)

Units = Mapping[str, Sequence[str]]
"""The FQNs in each flat parameter, in order, by the path of the module that FSDP wraps."""


@dataclass(frozen=True)
class FlatUnit:
    """A flat parameter: the FQNs in it, their shapes, and the common part of their state (None without state).

    `is_flat` False: a parameter that is cut by itself.
    """

    path: str
    fqns: tuple[str, ...]
    shapes: tuple[Shape, ...]
    state: ParamDescription | None
    aliases: tuple[tuple[str, str], ...]
    is_flat: bool = True

    @property
    def name(self) -> str:
        """The name of the parameter inside the module that FSDP wraps."""
        return _FLAT if self.is_flat else self.inside(self.fqns[0])

    @property
    def key(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def numel(self) -> int:
        return sum(map(prod, self.shapes))

    def inside(self, fqn: str) -> str:
        return fqn[len(self.path) + 1 :] if self.path else fqn

    def shard(self, rank: int, world_size: int) -> tuple[int, int, int]:
        """Return the first element of a rank's shard, one past its last, and the length of every shard, with padding."""
        each = -(-self.numel // world_size)
        start = min(rank * each, self.numel)
        return start, min(start + each, self.numel), each

    def slices(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield the slices of parameters in a range of elements of the flat parameter."""
        at = 0
        for fqn, shape in zip(self.fqns, self.shapes, strict=True):
            first, last = max(start - at, 0), min(stop - at, prod(shape))
            if first < last:
                yield fqn, first, last
            at += prod(shape)


@dataclass(frozen=True)
class FairscaleCut:
    """How a checkpoint's parameters are flattened. `flattens`: False: each parameter of a wrapped module is cut by itself.

    `units`: the FQNs in each flat parameter of the model that saved, by the path of the wrapped module.
    """

    units: Units
    flattens: bool


def cut_of(contents: CheckpointContents) -> FairscaleCut | None:
    """Return the cut that the source of a conversion says; None if it says nothing."""
    return contents.cut if isinstance(contents.cut, FairscaleCut) else None


def units_of(contents: CheckpointContents, given: Units | None, *, flattens: bool) -> Iterator[FlatUnit]:
    """Yield the units, checked against the weights and the state."""
    cut = cut_of(contents)
    units = given if given is not None else cut.units if cut is not None else None
    if units is None:
        raise StateError(f"the checkpoint does not say how fairscale flattens its parameters: {_FIX}")
    optim = contents.optim
    seen: set[str] = set()
    for path, fqns in units.items():
        for fqn in fqns:
            if fqn not in contents.params:
                raise StateError(f"units has {fqn}, which the checkpoint does not have: {_FIX}")
            if fqn in seen:
                raise StateError(f"units has {fqn} twice: {_FIX}")
            if path and not fqn.startswith(f"{path}."):
                raise StateError(f"units has {fqn} in the module {path!r}, in which it is not: {_FIX}")
            seen.add(fqn)
        aliases = tuple((fqn, other) for other, fqn in contents.aliases.items() if fqn in fqns)
        for fqn, other in aliases:
            if path and not other.startswith(f"{path}."):
                raise StateError(
                    f"{fqn} is {other} too, outside of the module {path!r}: fairscale ties weights inside of one unit only"
                )
        for members in [fqns] if flattens or not fqns else [[fqn] for fqn in fqns]:
            state = _common_state(path, members, optim.params) if optim is not None and members else None
            shapes = tuple(contents.params[fqn] for fqn in members)
            yield FlatUnit(path, tuple(members), shapes, state, aliases if flattens else (), flattens)
    listed = [fqn for group in optim.groups for fqn in group.params] if optim is not None else []
    left = [fqn for fqn in listed if fqn not in seen]
    if left:
        raise StateError(f"units does not have {left[0]}, a parameter of the optimizer: {_FIX}")


def _common_state(path: str, fqns: Sequence[str], params: Mapping[str, ParamDescription]) -> ParamDescription | None:
    """Return the common state of the parameters of a unit, as the values of the first; None if none of them has state."""
    first = params.get(fqns[0])
    for fqn in fqns:
        param = params.get(fqn)
        has, had = param is not None and param.has_state, first is not None and first.has_state
        if has != had:
            with_state, without = (fqn, fqns[0]) if has else (fqns[0], fqn)
            raise StateError(
                f"{with_state} has state and {without} has none: fairscale keeps one state for the unit {path!r}"
            )
        if param is None or first is None or not has:
            continue
        for name, kind, _ in param.values:
            if kind == OPAQUE or (kind not in (SCALAR, TENSOR)):
                raise CheckpointError(
                    f"{fqn}: {name!r} of its state is not cut like the parameter, so it has no place in a flat shard"
                )
        values, first_values = ({name: (kind, value) for name, kind, value in two.values} for two in (param, first))
        different = [name for name in values | first_values if not _are_equal(values.get(name), first_values.get(name))]
        if different:
            name = different[0]
            raise StateError(
                f"{fqns[0]} and {fqn} differ in {name!r} of their state ({_shown(first_values.get(name))} and "
                f"{_shown(values.get(name))}): fairscale keeps one state for the unit {path!r}"
            )
    return first if first is not None and first.has_state else None


def _are_equal(first: tuple[str, Any] | None, other: tuple[str, Any] | None) -> bool:
    if first is None or other is None or first[0] != other[0]:
        return False
    if first[0] == TENSOR:
        return True
    (_, a), (_, b) = first, other
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        )
    return type(a) is type(b) and bool(a == b)


def _shown(value: tuple[str, Any] | None) -> str:
    return "none" if value is None else "a tensor" if value[0] == TENSOR else repr(value[1])
