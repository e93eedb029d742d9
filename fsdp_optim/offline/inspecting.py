"""Inspect: the content of a checkpoint of any format, read from its description, without elements of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, store_at
from fsdp_optim.errors import counted_noun
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import COMMON, MODULES, StoredTensor
from fsdp_optim.memory import dtype_name


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        dtype: torch's name of the dtype.
        shape: the shape.
        nbytes: the number of bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class GroupInfo:
    """One param group of a checkpoint.

    Attributes:
        hyperparameters: their values by name.
        params: the parameters by FQN, or by id where there are no names.
    """

    hyperparameters: Mapping[str, Any]
    params: tuple[Any, ...]


@dataclass(frozen=True, repr=False)
class Inspected:
    """The contents of a checkpoint, without the elements of its tensors.

    Attributes:
        path: the path or URL of the checkpoint.
        format: the name of its format.
        about: facts about the save, for users.
        world_size: the number of ranks that saved; 0 if unknown.
        step: the `step` that was given to `save`.
        weights: which of the model's weights were saved: "all", "trainable" or "none"; None if unknown.
        weights_dtype: torch's name of the dtype to which the save cast floating weights; None if it did not, or if unknown.
        model: the weights and buffers by FQN.
        aliases: other names of these, each with the FQN.
        has_optim: whether an optimizer was saved.
        state: the optimizer's state by FQN, or by id where there are no names: tensors, and the texts of other values.
        groups: its param groups.
        optimizer_class: the name of its class, or one for each group; empty if unknown.
        extras: the names of other values, of the trainer and of modules: "common", "model", and "rank-00000" and so on.
    """

    path: str
    format: str
    about: Mapping[str, str]
    world_size: int
    step: int | None
    weights: str | None
    weights_dtype: str | None
    model: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]
    has_optim: bool
    state: Mapping[Any, Mapping[Any, TensorInfo | str]]
    groups: tuple[GroupInfo, ...]
    optimizer_class: tuple[str, ...]
    extras: tuple[str, ...]

    def __repr__(self) -> str:
        """The figures; a tree of all tensors would fill the screen."""
        values = [value for its in self.state.values() for value in its.values()]
        parts = {
            "path": repr(self.path),
            "format": repr(self.format),
            "world_size": self.world_size,
            "step": self.step,
            "weights": repr(self.weights),
            "model": f"<{counted_noun(len(self.model), 'tensor')}>",
            "state": f"<{counted_noun(len(values), 'value')} of {counted_noun(len(self.state), 'parameter')}>",
            "nbytes": self.nbytes,
            "extras": self.extras,
        }
        return f"Inspected({', '.join(f'{name}={value}' for name, value in parts.items())})"

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        tensors = [*self.model.values(), *(value for values in self.state.values() for value in values.values())]
        return sum(one.nbytes for one in tensors if isinstance(one, TensorInfo))


def inspect(place: Place, storage_options: StorageOptions = None) -> Inspected:
    """Read the content of a checkpoint. No communication."""
    with closing(open_checkpoint(store_at(place, options=storage_options), verify=True)) as checkpoint:
        index = checkpoint.index
        state, groups, classes = _optimizer(index)
        return Inspected(
            path=index.where,
            format=index.facts.format_name,
            about=index.facts.about,
            world_size=index.facts.world_size,
            step=index.facts.step,
            weights=index.facts.weights.which,
            weights_dtype=index.facts.weights.dtype,
            model={key: _info(one) for key, one in index.weights.items()},
            aliases=dict(index.aliases),
            has_optim=index.optim is not None,
            state=state,
            groups=groups,
            optimizer_class=classes,
            extras=tuple(sorted(index.extras, key=lambda name: (name not in (COMMON, MODULES), name))),
        )


def _info(stored: StoredTensor) -> TensorInfo:
    return TensorInfo(stored.dtype, stored.shape, stored.placement.numel * stored.itemsize)


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
