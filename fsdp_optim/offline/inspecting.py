"""Inspect: the content of a checkpoint of any format, read from its description, without elements of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch

from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, store_at
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.description import OPAQUE, SCALAR, OptimDescription
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import COMMON, MODULES, FormatReader, StoredTensor, weights_in
from fsdp_optim.memory import dtype_name
from fsdp_optim.results import CheckpointSummary, GroupInfo, TensorInfo


def inspect(place: Place, storage_options: StorageOptions = None) -> CheckpointSummary:
    """Read the content of a checkpoint. No communication."""
    with closing(open_checkpoint(store_at(place, options=storage_options), verify=True)) as checkpoint:
        state, groups, classes = _optimizer(checkpoint)
        return CheckpointSummary(
            path=checkpoint.where,
            format=checkpoint.format_name,
            about=checkpoint.about(),
            world_size=checkpoint.world_size,
            step=checkpoint.step,
            weights=weights_in(checkpoint).which,
            weights_dtype=weights_in(checkpoint).dtype,
            model={key: _info(one) for key, one in checkpoint.model.items()},
            aliases=dict(checkpoint.aliases),
            has_optim=checkpoint.has_optim,
            state=state,
            groups=groups,
            optimizer_class=classes,
            extras=tuple(sorted(checkpoint.extras, key=lambda name: (name not in (COMMON, MODULES), name))),
        )


def _info(stored: StoredTensor) -> TensorInfo:
    return TensorInfo(stored.dtype, stored.shape, stored.placement.numel * stored.itemsize)


_State = dict[Any, dict[Any, "TensorInfo | str"]]


def _optimizer(checkpoint: FormatReader) -> tuple[_State, tuple[GroupInfo, ...], tuple[str, ...]]:
    if not checkpoint.has_optim:
        return {}, (), ()
    if checkpoint.full_dict is not None:
        with as_checkpoint_error(checkpoint.where):
            return _of_full_dict(checkpoint.full_dict)
    return _of_description(checkpoint, checkpoint.description(allow_pickle=False, records=RECORDS))


def _of_description(
    checkpoint: FormatReader, description: OptimDescription
) -> tuple[_State, tuple[GroupInfo, ...], tuple[str, ...]]:
    state: _State = {}
    for fqn, param in description.params.items():
        if param.has_state:
            state[fqn] = {
                name: _described(content) if kind in (SCALAR, OPAQUE) else _info(checkpoint.optim[content])
                for name, kind, content in param.values
            }
    groups = tuple(GroupInfo(_shown(dict(group.hyperparameters)), group.params) for group in description.groups)
    names = description.optimizer_class
    return state, groups, (names,) if isinstance(names, str) else tuple(names or ())


def _of_full_dict(full: Mapping[str, Any]) -> tuple[_State, tuple[GroupInfo, ...], tuple[str, ...]]:
    if "param_groups" not in full:  # torch's flattened dict: state.<fqn>.<name>
        flat: _State = {}
        for key, value in full.items():
            fqn, _, name = str(key).removeprefix("state.").rpartition(".")
            if str(key).startswith("state."):
                flat.setdefault(fqn, {})[name] = _described(value)
        return flat, (), ()
    entries = full.get("state", {})
    state = {key: {name: _described(value) for name, value in values.items()} for key, values in entries.items()}
    groups = tuple(
        GroupInfo(
            _shown({name: value for name, value in group.items() if name not in ("params", "param_names")}),
            tuple(group.get("param_names") or group["params"]),
        )
        for group in full["param_groups"]
    )
    return state, groups, ()


def _described(value: object) -> TensorInfo | str:
    """A value of the state: a tensor's description, or the text of a small value."""
    if isinstance(value, StoredTensor):
        return _info(value)
    if isinstance(value, torch.Tensor):
        return TensorInfo(dtype_name(value.dtype), tuple(value.shape), value.nbytes)
    if isinstance(value, Withheld):
        return "a pickle"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    return type(value).__name__


def _shown(hyperparameters: Mapping[Any, Any]) -> dict[str, Any]:
    """Hyperparameters with the elements of small tensors, and descriptions of others."""
    return {
        str(name): value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in hyperparameters.items()
    }
