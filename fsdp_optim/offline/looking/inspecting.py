"""Inspect: the content of a checkpoint of any format, read from its description, without elements of tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import closing
from math import prod
from typing import Any

import torch

from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.retry import retry_if_replaced
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, store_at
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.index import CheckpointIndex, Facts
from fsdp_optim.formats.base.protocols import COMMON, MODULES, StoredTensor
from fsdp_optim.layout import Shape
from fsdp_optim.results.contents import CheckpointSummary, GroupInfo, TensorInfo
from fsdp_optim.tensors.memory import dtype_name, dtype_named


def inspect(place: Place, storage_options: StorageOptions = None) -> CheckpointSummary:
    """Read the content of a checkpoint. No communication."""
    store = store_at(place, options=storage_options)
    with closing(retry_if_replaced(lambda: open_checkpoint(store, verify=True))) as checkpoint:
        index = checkpoint.index
        state, groups, classes = _optimizer(index)
        return CheckpointSummary(
            path=index.where,
            format=index.facts.format_name,
            about=_about(index.facts),
            world_size=index.facts.world_size,
            step=index.facts.step,
            weights=index.facts.weights.which,
            weights_dtype=index.facts.weights.dtype,
            model={key: _info(tensor) for key, tensor in index.weights.items()},
            aliases=dict(index.aliases),
            has_optim=index.optim is not None,
            state=state,
            groups=groups,
            optimizer_class=classes,
            extras=tuple(sorted(index.extras, key=lambda name: (name not in (COMMON, MODULES), name))),
            trees={key: _info(tensor) for key, tensor in index.trees.items()},
        )


def _about(facts: Facts) -> dict[str, str]:
    of_fused = {"views": facts.views, "fused_state": facts.fused_state, "not_elementwise": facts.joint_steps}
    return {**facts.about, **{name: "\n".join(texts) for name, texts in of_fused.items() if texts}}


def _info(stored: StoredTensor) -> TensorInfo:
    return _info_of_kind(stored.dtype, stored.shape)


@functools.lru_cache(maxsize=256)
def _info_of_kind(dtype: str, shape: Shape) -> TensorInfo:
    """Return one object for all tensors that are alike, because there may be a hundred thousand."""
    return TensorInfo(dtype, shape, prod(shape) * dtype_named(dtype).itemsize)


_State = dict[Any, dict[Any, "TensorInfo | str"]]


def _optimizer(index: CheckpointIndex) -> tuple[_State, tuple[GroupInfo, ...], tuple[str, ...]]:
    if index.optim is None:
        return {}, (), ()
    with as_checkpoint_error(index.where):
        return _of_full_dict(index.optim.decoded(allow_pickle=False, records=RECORDS).full)


def _of_full_dict(full: Mapping[str, Any]) -> tuple[_State, tuple[GroupInfo, ...], tuple[str, ...]]:
    if "param_groups" not in full:  # torch's flattened dict: state.<fqn>.<name>
        flat: _State = {}
        for key, value in full.items():
            fqn, _, name = str(key).removeprefix("state.").rpartition(".")
            if str(key).startswith("state."):
                flat.setdefault(fqn, {})[name] = _described(value)
        return flat, (), ()
    entries, kinds = full.get("state", {}), full.get("kinds")
    state = {
        key: {name: _described(value) for name, value in values.items()}
        for key, values in entries.items()
        if kinds is None or key in kinds  # else the parameter has no state
    }
    groups = tuple(
        GroupInfo(
            _shown({name: value for name, value in group.items() if name not in ("params", "param_names")}),
            tuple(group.get("param_names") or group["params"]),
        )
        for group in full["param_groups"]
    )
    names = full.get("optimizer_class") or ()
    return state, groups, (names,) if isinstance(names, str) else tuple(names)


def _described(value: object) -> TensorInfo | str:
    """Describe a value of the state: a tensor by its facts, a small value by its text."""
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
    """Return hyperparameters with the elements of small tensors, and descriptions of others."""
    return {
        str(name): value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in hyperparameters.items()
    }
