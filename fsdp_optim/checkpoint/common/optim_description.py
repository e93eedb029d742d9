"""The optimizer of the index of a new checkpoint, made from the live state at a save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_optim.checkpoint.common.contents import SavedHalf
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.description import OPAQUE, SCALAR
from fsdp_optim.formats.base.index import ReadSmall, SavedOptim
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.state.values.classes import class_names_written
from fsdp_optim.tensors.memory import dtype_name


def describe(state: SavedHalf, stored: Mapping[str, StoredTensor]) -> SavedOptim:
    """Describe the state to save, with its kinds. `stored`: its tensors, by key.

    Raises CheckpointError for a value that no reader accepts.
    """
    for index, hyper in enumerate(state.local.optim.groups):
        for name in hyper:
            if not isinstance(name, str):
                raise CheckpointError(
                    f"param group {index}: the name of a hyperparameter is {name!r}, but must be a str"
                )
    tensors: dict[str, dict[Any, StoredTensor]] = {}
    for value in state.tensors:
        tensors.setdefault(value.fqn, {})[value.name] = stored[value.stored_name]
    entries: dict[str, dict[Any, Any]] = {}
    kinds: dict[str, Mapping[Any, str]] = {}
    shared: dict[int, Mapping[Any, str]] = {}  # by the id of a summary, which many parameters have in common
    for fqn, param in state.global_state.params.items():
        summary, in_files = param.summary, tensors.get(fqn, {})
        if summary is None:
            entries[fqn] = {}
            continue
        if len(in_files) == len(summary.names):  # nearly always
            of_kind = shared.get(id(summary))
            if of_kind is None:
                of_kind = shared[id(summary)] = dict(summary.kinds)
            entries[fqn], kinds[fqn] = {name: in_files[name] for name in of_kind}, of_kind
            continue
        values, words = dict[Any, Any](), dict[Any, str]()
        entries[fqn], kinds[fqn] = values, words
        scalars = dict(summary.scalars)
        for name, kind in summary.kinds:
            if name in in_files:
                values[name], words[name] = in_files[name], kind
            elif name in scalars:
                values[name], words[name] = scalars[name].value, SCALAR
            elif (fqn, name) in state.opaque:
                values[name], words[name] = state.opaque[fqn, name], OPAQUE
    groups = [
        {**hyper, "params": list(state.global_state.group_fqns(index))}
        for index, hyper in enumerate(state.local.optim.groups)
    ]
    classes = class_names_written([known.name for known in state.local.optim.classes])
    full: dict[str, Any] = {"state": entries, "param_groups": groups, "kinds": kinds}
    if classes is not None:
        full["optimizer_class"] = classes
    shapes = {fqn: param.placement.shape for fqn, param in state.global_state.params.items()}
    return SavedOptim(full, dict(state.local.optim.other_keys), shapes)


def stored_tensors(state: SavedHalf) -> dict[str, StoredTensor]:
    """Return the tensors of the state to save, by key. Their places in files are not known yet."""
    return {
        value.stored_name: StoredTensor(
            value.stored_name, dtype_name(value.dtype), value.placement.shape, "the new file", 0
        )
        for value in state.tensors
    }


def small_values(state: SavedHalf) -> ReadSmall:
    """Return a function that reads small tensors of the state to save. Only scalars have elements, which all ranks know."""

    def read(stored: Sequence[StoredTensor]) -> list[torch.Tensor]:
        asked = {tensor.key for tensor in stored}
        by_key = {value.stored_name: value for value in state.tensors if value.stored_name in asked}
        values = (by_key[tensor.key] for tensor in stored)
        return [
            value.constant
            if value.constant is not None
            else torch.zeros((), dtype=value.dtype, device="cpu").expand(value.placement.shape)
            for value in values
        ]

    return read
