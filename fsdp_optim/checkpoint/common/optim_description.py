"""The description of the optimizer's state: made from the live state at a save, and turned into a full dict at a load."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from fsdp_optim.checkpoint.common.contents import SavedHalf
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.description import (
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
from fsdp_optim.state.dicts.full import RESERVED_KEYS
from fsdp_optim.state.dicts.names import Names
from fsdp_optim.state.values.classes import class_names_written
from fsdp_optim.state.values.kinds import Kind

_WORD_OF = {Kind.SHARDED.value: TENSOR, Kind.SCALAR.value: SCALAR_TENSOR}  # the kinds with stored elements
_KIND_OF = {word: kind for kind, word in _WORD_OF.items()}


def describe(state: SavedHalf) -> OptimDescription:
    """The description of the state to save. Raises CheckpointError for a value that no reader accepts."""
    for index, hyper in enumerate(state.local.optim.groups):
        for name in hyper:
            if not isinstance(name, str):
                raise CheckpointError(
                    f"param group {index}: the name of a hyperparameter is {name!r}, but must be a str"
                )
    keys = {(tensor.fqn, tensor.name): tensor.stored_name for tensor in state.tensors}
    params = {}
    for fqn, param in state.global_state.params.items():
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
            GroupDescription(tuple(hyper.items()), state.global_state.group_fqns(index))
            for index, hyper in enumerate(state.local.optim.groups)
        ),
        other_keys=dict(state.local.optim.other_keys),
        params=params,
        optimizer_class=class_names_written([known.name for known in state.local.optim.classes]),
    )


class StateFiles(Protocol):
    """Access to the tensors of the optimizer's state that files contain, or will contain."""

    def described(self, key: str) -> tuple[Shape, str]:
        """The shape of a tensor and torch's name of its dtype."""

    def constants(self, keys: Sequence[str]) -> list[torch.Tensor]:
        """The values of some small tensors."""


def full_dict(
    files: StateFiles,
    description: OptimDescription,
    names: Names,
    keys: dict[tuple[str, str], str],
    off_mesh: Collection[str] = (),
) -> dict[str, Any]:
    """A full dict by name. Tensors whose elements are in files are meta tensors, whose keys are added to `keys`.

    `off_mesh`: FQNs of parameters that are no DTensors: what was cut by itself and has their shape is cut like them
    (`following_params`).

    Raises ValueError if the description and the files contradict each other.
    """
    reserved = [key for key in description.other_keys if key in RESERVED_KEYS]
    if reserved:
        raise ValueError(f"{reserved[0]!r} cannot be another key of an optimizer")
    if off_mesh:
        description = _following_params(files, description, names, off_mesh)
    small = [key for param in description.params.values() for _, kind, key in param.values if _is_read_at_once(kind)]
    constants = dict(zip(small, files.constants(small), strict=True))
    state: dict[str, dict[str, Any]] = {}
    kinds: dict[str, dict[str, str]] = {}
    for fqn, param in description.params.items():
        if param.has_state:
            kinds[fqn] = {name: _KIND_OF.get(kind, kind) for name, kind, _ in param.values}
        state[fqn] = {}
        for name, kind, content in param.values:
            if kind == TENSOR:
                keys[names.canonical(fqn), name] = content
            state[fqn][name] = _value(files, constants, fqn, param, (name, kind, content))
    groups = [{**dict(group.hyperparameters), "params": list(group.params)} for group in description.groups]
    of: Mapping[str, Any] = {}
    if description.optimizer_class is not None:
        of = {"optimizer_class": description.optimizer_class}
    return {**description.other_keys, **of, "state": state, "param_groups": groups, "kinds": kinds}


def _following_params(
    files: StateFiles, description: OptimDescription, names: Names, off_mesh: Collection[str]
) -> OptimDescription:
    def kind_of(shape: Shape, kind: str, content: Any) -> str:
        return TENSOR if kind.partition(" ")[0] == PLACED and files.described(content)[0] == shape else kind

    params = {
        fqn: replace(param, values=tuple((name, kind_of(param.shape, kind, at), at) for name, kind, at in param.values))
        if names.canonical(fqn) in off_mesh
        else param
        for fqn, param in description.params.items()
    }
    return replace(description, params=params)


def _value(
    files: StateFiles,
    constants: Mapping[Any, torch.Tensor],
    fqn: str,
    param: ParamDescription,
    value: tuple[Any, str, Any],
) -> Any:
    """One value of a parameter's state. `value`: its name, its kind, and its key or itself."""
    name, kind, content = value
    if kind == TENSOR:
        shape, dtype = files.described(content)
        if shape != param.shape:
            raise ValueError(f"{content} has shape {list(shape)}, its parameter {list(param.shape)}")
        return torch.empty(shape, dtype=dtype_named(dtype), device="meta")
    if _is_read_at_once(kind):
        if kind == SCALAR_TENSOR and constants[content].dim():
            raise ValueError(f"{content} is a scalar of shape {list(constants[content].shape)}")
        return constants[content]
    if kind in (SCALAR, OPAQUE):
        return content
    raise ValueError(f"{fqn}: {name} has the kind {kind!r}, which is not known")


def _is_read_at_once(kind: str) -> bool:
    """Whether every rank reads the whole tensor before it plans the load."""
    return kind == SCALAR_TENSOR or kind.partition(" ")[0] == PLACED
