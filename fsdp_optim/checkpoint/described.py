"""The optimizer's state as a checkpoint describes it: drawn from what is saved, and made a full dict when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from fsdp_optim.checkpoint.contents import Half
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.description import (
    OPAQUE,
    PLACED,
    SCALAR,
    SCALAR_TENSOR,
    TENSOR,
    GroupDescription,
    OptimDescription,
    ParamDescription,
)
from fsdp_optim.layout import Shape
from fsdp_optim.memory import dtype_named
from fsdp_optim.state.classes import class_names_written
from fsdp_optim.state.full import RESERVED_KEYS
from fsdp_optim.state.kinds import Kind
from fsdp_optim.state.names import Names

_WORD_OF = {Kind.SHARDED.value: TENSOR, Kind.SCALAR.value: SCALAR_TENSOR}  # for a kind whose elements are stored
_KIND_OF = {word: kind for kind, word in _WORD_OF.items()}


def describe(state: Half) -> OptimDescription:
    """Everything of the optimizer's state but the elements of tensors. Raises CheckpointError for what no reader takes."""
    for index, hyper in enumerate(state.local.optim.groups):
        for name in hyper:
            if not isinstance(name, str):
                raise CheckpointError(
                    f"param group {index}: the name of a hyperparameter is {name!r}, and has to be a word"
                )
    keys = {(tensor.fqn, tensor.name): tensor.stored_name for tensor in state.tensors}
    params = {}
    for fqn, param in state.picture.params.items():
        values: list[tuple[Any, str, Any]] = []
        summary = param.summary
        scalars = dict(summary.scalars) if summary is not None else {}
        for name, kind in summary.kinds if summary is not None else ():
            if (fqn, name) in keys:
                values.append((name, _WORD_OF.get(kind, kind), keys[fqn, name]))
            elif name in scalars:
                values.append((name, SCALAR, scalars[name].value))
            elif (fqn, name) in state.opaque:
                values.append((name, OPAQUE, state.opaque[fqn, name]))
        params[fqn] = ParamDescription(param.placement.shape, tuple(values), summary is not None)
    return OptimDescription(
        groups=tuple(
            GroupDescription(tuple(hyper.items()), state.picture.group_fqns(index))
            for index, hyper in enumerate(state.local.optim.groups)
        ),
        extra=dict(state.local.optim.extra),
        params=params,
        optimizer_class=class_names_written([one.name for one in state.local.optim.classes]),
    )


class StateFiles(Protocol):
    """The tensors of the optimizer's state, as they are in the files, or will be."""

    def described(self, key: str) -> tuple[Shape, str]:
        """The shape of a tensor and its dtype."""

    def constants(self, keys: Sequence[str]) -> list[torch.Tensor]:
        """All of some small tensors."""


def full_dict(
    files: StateFiles, description: OptimDescription, names: Names, keys: dict[tuple[str, str], str]
) -> dict[str, Any]:
    """A full dict by name, with tensors without memory where elements are in the files; fills in their keys.

    Raises ValueError where the description and the files contradict each other.
    """
    reserved = [key for key in description.extra if key in RESERVED_KEYS]
    if reserved:
        raise ValueError(f"{reserved[0]!r} is no key of an optimizer's own")
    small = [key for param in description.params.values() for _, how, key in param.values if _is_read_at_once(how)]
    constants = dict(zip(small, files.constants(small), strict=True))
    state: dict[str, dict[str, Any]] = {}
    kinds: dict[str, dict[str, str]] = {}
    for fqn, param in description.params.items():
        if param.has_state:
            kinds[fqn] = {name: _KIND_OF.get(how, how) for name, how, _ in param.values}
        state[fqn] = {}
        for name, how, what in param.values:
            if how == TENSOR:
                keys[names.canonical(fqn), name] = what
            state[fqn][name] = _value(files, constants, fqn, param, (name, how, what))
    groups = [{**dict(group.hyperparameters), "params": list(group.params)} for group in description.groups]
    of: Mapping[str, Any] = {}
    if description.optimizer_class is not None:
        of = {"optimizer_class": description.optimizer_class}
    return {**description.extra, **of, "state": state, "param_groups": groups, "kinds": kinds}


def _value(
    files: StateFiles,
    constants: Mapping[Any, torch.Tensor],
    fqn: str,
    param: ParamDescription,
    value: tuple[Any, str, Any],
) -> Any:
    """One value of a parameter's state."""
    name, how, what = value
    if how == TENSOR:
        shape, dtype = files.described(what)
        if shape != param.shape:
            raise ValueError(f"{what} has shape {list(shape)}, its parameter {list(param.shape)}")
        return torch.empty(shape, dtype=dtype_named(dtype), device="meta")
    if _is_read_at_once(how):
        if how == SCALAR_TENSOR and constants[what].dim():
            raise ValueError(f"{what} is a scalar of shape {list(constants[what].shape)}")
        return constants[what]
    if how in (SCALAR, OPAQUE):
        return what
    raise ValueError(f"{fqn}: {name} is called {how!r}, which is no kind of value")


def _is_read_at_once(how: str) -> bool:
    """Whether every rank needs all of a tensor before it can decide anything."""
    return how == SCALAR_TENSOR or how.partition(" ")[0] == PLACED
