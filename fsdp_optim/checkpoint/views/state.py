"""The optimizer of a checkpoint as it is seen through Views: values that are cut or joined, scalars, and param groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from msgspec import structs

from fsdp_optim.checkpoint.views.mapped import MappedFiles
from fsdp_optim.checkpoint.views.names import Seen
from fsdp_optim.errors import StateError, shortened
from fsdp_optim.formats.base.index import ReadSmall, SavedOptim
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import BoundView
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.values.kinds import Kind, is_scalar
from fsdp_optim.state.values.same import same
from fsdp_optim.tensors.memory import dtype_name

_SHARDED, _PLACED = Kind.SHARDED.value, Kind.PLACED.value
_Values = Mapping[Any, Any]


@dataclass(frozen=True)
class SeenState:
    """The state of a checkpoint's optimizer, by the names that Views have, with a StoredTensor for each tensor in files.

    Attributes:
        known: the shapes of parameters, as far as weights or records show them.
        files: makes the tensors that are cut and joined.
        read: reads small tensors.
    """

    where: str
    full: FullState
    known: Mapping[str, Shape]
    files: MappedFiles
    read: ReadSmall

    @staticmethod
    def named(where: str, full: FullState, name_of: Callable[[str], str]) -> FullState:
        """Return a state with other names. Raises StateError where two would be one."""
        listed = dict.fromkeys([*full.state, *(fqn for _, fqns in full.groups for fqn in fqns)])
        if all(name_of(fqn) == fqn for fqn in listed):
            return full
        known: dict[str, str] = {}
        for fqn in listed:
            other = known.setdefault(name_of(fqn), fqn)
            if other != fqn:
                raise StateError(
                    f"{where}: {name_of(fqn)}: the optimizer has two parameters of this name, {other} and {fqn}: leave "
                    "the Views out"
                )
        return replace(
            full,
            state={name_of(fqn): values for fqn, values in full.state.items()},
            groups=tuple((hyper, tuple(map(name_of, fqns))) for hyper, fqns in full.groups),
            kinds={name_of(fqn): words for fqn, words in full.kinds.items()},
            local_ids={name_of(fqn): number for fqn, number in full.local_ids.items()},
            uncollected=frozenset(map(name_of, full.uncollected)),
        )

    @cached_property
    def listed(self) -> Collection[str]:
        """The parameters of the optimizer."""
        return dict.fromkeys([*(fqn for _, fqns in self.full.groups for fqn in fqns), *self.full.state])

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes of all parameters: those that are known, and of others that of their largest value."""
        shapes = dict(self.known)
        for fqn in self.listed:
            if fqn not in shapes:
                values = [value.shape for value in self.full.state.get(fqn, {}).values() if _is_tensor(value)]
                if values:
                    shapes[fqn] = max(map(tuple, values), key=prod)
        return shapes

    @cached_property
    def _group_of(self) -> dict[str, int]:
        return {fqn: index for index, (_, fqns) in enumerate(self.full.groups) for fqn in fqns}

    def seen(self, names: Seen) -> FullState:
        """Return the state as it is seen.

        Raises StateError, which names the parameter and the value, where a value cannot be cut, or parts cannot be joined.
        """
        full = self.full
        joined = {live: bound for live, bound in names.joined.items() if self._check_complete(live, bound)}
        names = replace(names, joined=joined)
        state, kinds, ids = dict[str, _Values](), dict[str, Mapping[Any, str]](), dict[str, Any]()
        scalars = _Scalars.of(self, joined.values())
        for fqn in dict.fromkeys([*full.state, *full.kinds]):
            live = names.joined_of.get(fqn)
            if fqn in names.split:
                self._split(names.split[fqn], state, kinds)
            elif live is None:
                state.update({fqn: full.state[fqn]} if fqn in full.state else {})
                kinds.update({fqn: full.kinds[fqn]} if fqn in full.kinds else {})
            elif live not in state:
                self._join(live, joined[live], state, kinds, scalars)
        for fqn, number in full.local_ids.items():
            for name in names.order([fqn]):
                ids.setdefault(name, number)
        return replace(
            full,
            state=state,
            kinds=kinds,
            groups=tuple((hyper, tuple(names.order(fqns))) for hyper, fqns in full.groups),
            local_ids=ids,
            uncollected=frozenset(names.order(sorted(full.uncollected))),
        )

    # ------------------------------------------------------------------------------------------------ cut

    def _split(self, bound: BoundView, state: dict[str, _Values], kinds: dict[str, Mapping[Any, str]]) -> None:
        """Add the state of the parts of a fused parameter."""
        values, words = self.full.state.get(bound.name), self.full.kinds.get(bound.name)
        new_words = dict(words) if words is not None else None
        shape = bound.live_shape
        cut = [name for name, value in (values or {}).items() if self._is_cut(bound, name, value, shape, words)]
        if new_words is not None:
            new_words.update(dict.fromkeys(cut, _SHARDED))
        of_parts: dict[Any, dict[str, StoredTensor]] = {
            name: dict(self.files.split(values[name], bound.parts, partial(_key, name=name))) for name in cut if values
        }
        for part in bound.names:
            if values is not None:
                state[part] = {
                    name: of_parts[name][part] if name in of_parts else _rekeyed(value, part, name)
                    for name, value in values.items()
                }
            if new_words is not None:
                kinds[part] = new_words

    def _is_cut(self, bound: BoundView, name: Any, value: Any, shape: Shape, words: Mapping[Any, str] | None) -> bool:
        """Return whether a value is cut like its fused parameter; False for a scalar. Raises StateError for all others."""
        word = (words or {}).get(name, "")
        is_sharded = _is_sharded(value, shape, word)
        if is_sharded is not None:
            return is_sharded
        raise StateError(
            f"{self.where}: {bound.name}: {name} is {_what(value, word)}, not of the shape {list(shape)} of the parameter, and "
            f"cannot be cut into its parts ({shortened(bound.names)}): leave the View of {bound.name} out"
        )

    # ------------------------------------------------------------------------------------------------ joined

    def _check_complete(self, live: str, bound: BoundView) -> bool:
        """Return whether an optimizer has the parts of a parameter. Raises StateError where it has some, or in two groups."""
        groups = [(part, self._group_of[part]) for part in bound.names if part in self._group_of]
        if not groups:
            return False
        without = next((part for part in bound.names if part not in self._group_of), None)
        (first, group), *others = groups
        if without is not None:
            raise StateError(
                f"{self.where}: {live}: the optimizer has its part {first} and not {without}, so it cannot have both as one "
                "parameter: leave the View out"
            )
        for part, other in others:
            if other != group:
                raise StateError(
                    f"{self.where}: {live}: its part {first} is in param group {group} and {part} in param group {other}, and "
                    "one parameter is in one group: leave the View out"
                )
        return True

    def _join(
        self,
        live: str,
        bound: BoundView,
        state: dict[str, _Values],
        kinds: dict[str, Mapping[Any, str]],
        scalars: _Scalars,
    ) -> None:
        """Add the state of the parameter that parts make."""
        first, *others = bound.names
        full, own = self.full, _named_values(self.full, first)
        for part in others:
            if _named_values(full, part) != own:
                raise StateError(
                    f"{self.where}: {live}: its parts {first} and {part} have different state, {_listed(own)} and "
                    f"{_listed(_named_values(full, part))}, and one parameter has one: leave the View out"
                )
        words = dict(full.kinds[first]) if first in full.kinds else None
        values: dict[Any, Any] = {}
        for name, value in full.state.get(first, {}).items():
            sources = [full.state[part][name] for part in bound.names]
            cut = [
                self._is_joined(live, part, name, source, how.shape)
                for (part, how), source in zip(bound.parts, sources, strict=True)
            ]
            if all(cut):
                check_dtypes(f"{self.where}: {live}: {name}", bound.names, sources)
                parts = [how for _, how in bound.parts]
                values[name] = self.files.joined(list(zip(sources, parts, strict=True)), _key(live, name))
                if words is not None:
                    words[name] = _SHARDED
            else:
                scalars.check_equal(live, bound, name)
                values[name] = _rekeyed(value, live, name)
        if first in full.state:
            state[live] = values
        if words is not None:
            kinds[live] = words

    def _is_joined(self, live: str, part: str, name: Any, value: Any, shape: Shape) -> bool:
        word = self.full.kinds.get(part, {}).get(name, "")
        is_sharded = _is_sharded(value, shape, word)
        if is_sharded is not None:
            return is_sharded
        raise StateError(
            f"{self.where}: {part}: {name} is {_what(value, word)}, not of the shape {list(shape)} of the parameter, and cannot "
            f"become a value of {live}: leave the View out"
        )


@dataclass(frozen=True)
class _Scalars:
    """The scalars of parts that are joined, by FQN and name, read together."""

    where: str
    values: Mapping[tuple[str, Any], Any]

    @classmethod
    def of(cls, state: SeenState, bounds: Any) -> _Scalars:
        named = [
            (part, name, value)
            for bound in bounds
            for part in bound.names
            for name, value in state.full.state.get(part, {}).items()
            if not isinstance(value, StoredTensor) or not value.shape
        ]
        stored = [value for _, _, value in named if isinstance(value, StoredTensor)]
        read = iter(state.read(stored) if stored else ())
        return cls(
            state.where,
            {(part, name): next(read) if isinstance(value, StoredTensor) else value for part, name, value in named},
        )

    def check_equal(self, live: str, bound: BoundView, name: Any) -> None:
        """Raise StateError that names two parts with different scalars."""
        first, *others = bound.names
        own = self.values.get((first, name))
        for part in others:
            other = self.values.get((part, name))
            if not same(own, other):
                raise StateError(
                    f"{self.where}: {live}: its parts {first} and {part} have different {name}, {_text(own)} and {_text(other)}, "
                    "and one parameter has one: leave the View out"
                )


def check_dtypes(what: str, names: Sequence[str], tensors: Sequence[StoredTensor]) -> None:
    """Raise StateError that names two parts with different dtypes."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != tensors[0].dtype:
            raise StateError(
                f"{what}: its parts {names[0]} and {name} have different dtypes, {tensors[0].dtype} and {tensor.dtype}, and one "
                "tensor has one: leave the View out"
            )


def as_full_state(saved: SavedOptim) -> FullState:
    """Return the full dict by FQN that records its kinds, for `SeenState`. `with_full_state` is the inverse."""
    full = saved.full
    groups = [
        ({k: v for k, v in group.items() if k != "params"}, tuple(group["params"])) for group in full["param_groups"]
    ]
    return FullState(full["state"], tuple(groups), {}, kinds=full["kinds"])


def with_full_state(saved: SavedOptim, full: FullState, shapes: Mapping[str, Shape]) -> SavedOptim:
    """Return a recorded optimizer with this state. `shapes`: of all its parameters."""
    groups = [{**hyper, "params": list(fqns)} for hyper, fqns in full.groups]
    new = {**saved.full, "state": full.state, "kinds": full.kinds, "param_groups": groups}
    listed = dict.fromkeys([*full.state, *(fqn for group in groups for fqn in group["params"])])
    return replace(saved, full=new, shapes={fqn: shapes[fqn] for fqn in listed if fqn in shapes}, through=None)


def _named_values(full: FullState, fqn: str) -> tuple[Any, ...] | None:
    """Return the names of a parameter's values; None for a parameter without state."""
    values = full.state.get(fqn)
    return tuple(sorted(values or (), key=str)) if values or fqn in full.kinds else None


def _listed(names: tuple[Any, ...] | None) -> str:
    return "none" if names is None else f"({shortened(map(str, names)) or 'no values'})"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (StoredTensor, torch.Tensor)) and len(value.shape) > 0


def _rekeyed(value: Any, fqn: str, name: Any) -> Any:
    return structs.replace(value, key=_key(fqn, name)) if isinstance(value, StoredTensor) else value


def _key(fqn: str, name: Any) -> str:
    return f"state.{fqn}.{name}"


def _is_sharded(value: Any, shape: Shape, word: str) -> bool | None:
    """Return whether a value has the elements of its parameter; False for a scalar, None for all others."""
    if isinstance(value, StoredTensor) and value.shape == shape and (not word or word.startswith((_SHARDED, _PLACED))):
        return True
    return False if is_scalar(value) or (isinstance(value, StoredTensor) and not value.shape) else None


def _what(value: Any, word: str) -> str:
    if isinstance(value, (StoredTensor, torch.Tensor)):
        dtype = value.dtype if isinstance(value, StoredTensor) else dtype_name(value.dtype)
        return f"a {word or dtype} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _text(value: Any) -> str:
    return repr(value.item()) if isinstance(value, torch.Tensor) and value.numel() == 1 else repr(value)
