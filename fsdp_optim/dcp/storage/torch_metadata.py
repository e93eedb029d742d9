"""The index of a checkpoint as torch's metadata: its tensors and values under the keys that torch's planner looks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.dcp.storage.model_places import ModelPlaces, record_of
from fsdp_optim.dcp.storage.saved_values import at_path
from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.dcp.values import flattened, key_of, unasked_in
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import COMMON, MODULES, StoredTensor
from fsdp_optim.formats.base.tree_values import InFile
from fsdp_optim.formats.own.extras import PlannedValues
from fsdp_optim.tensors.memory import dtype_named

_STATE, _GROUPS = "state", "param_groups"
_NOT_TORCHS = ("kinds", "optimizer_class")  # what a full dict has besides the entries of the optimizer's own
Path = tuple["str | int", ...]


@dataclass(frozen=True)
class RawBytes:
    """A value as the bytes that a planner made of it."""

    data: bytes


@dataclass
class TorchKeys:
    """What a checkpoint has, by torch's keys.

    Attributes:
        tensors: the places of tensors.
        values: values that are no tensors: plain ones, `RawBytes`, or `Withheld` where it is not read.
        paths: the path of each key in the dict that was saved.
        save_id: the id of the save by a `Writer`; None for any other save.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    save_id: str | None = None

    @classmethod
    def of(
        cls, index: CheckpointIndex, *, model: str | ModelPlaces | None, optim: str | None, allow_pickle: bool
    ) -> TorchKeys:
        """Read the keys of a checkpoint.

        `model`, `optim`: the names of the model's and the optimizer's dict; "": at the top; None: as they were saved.
        """
        keys, how = cls(), record_of(index)
        common = index.extras.get(COMMON)
        if isinstance(common, PlannedValues):
            common = common.kept  # torch reads the bytes of its objects itself
        tree = common.as_tree(allow_pickle=allow_pickle) if common is not None else {}
        if "paths" in how:
            keys._add_planned(index, tree, how)
        else:
            for path, leaf in flattened(tree, ()) if tree else ():  # an empty dict is a value, but here it has no key
                keys._add(path, index.trees[leaf.key] if isinstance(leaf, InFile) else leaf)
        of_model: Path | None = None
        if isinstance(model, ModelPlaces):
            of_model, model = model.place_of(index, {*index.weights, *index.aliases}, keys._has_below), None
        of_model = _place(model, how.get("model", ["model"])) if of_model is None else of_model
        of_optim = _place(optim, how.get("optim", ["optimizer"]))
        for fqn, stored in index.weights.items():
            keys._add((*of_model, fqn), stored)
        for alias, fqn in index.aliases.items():
            if fqn in index.weights:
                keys._add((*of_model, alias), index.weights[fqn])
        if MODULES in index.extras:
            for fqn, kept in index.extras[MODULES].decoded_each(allow_pickle=allow_pickle).items():
                for path, leaf in flattened(kept if isinstance(kept, Withheld) else kept[1], (*of_model, fqn)):
                    keys._add(path, leaf)
        if index.optim is not None:
            saved = index.optim.decoded(allow_pickle=allow_pickle, records=RECORDS)
            keys._add_optim({**saved.full, **saved.other_keys}, of_optim)
        if "paths" not in how:
            keys._leave_out_empty()
        return keys

    def _leave_out_empty(self) -> None:
        """Leave out the empty dicts for which torch has no keys: its load would take their keys for those of torch 2.3."""
        leaves = [(path, self.values.get(key)) for key, path in self.paths.items()]
        unasked = unasked_in(leaves)
        for key in [key for key, path in self.paths.items() if path in unasked]:
            del self.paths[key], self.values[key]

    def _has_below(self, place: Path) -> bool:
        return any(key.startswith(f"{key_of(place)}.") for key in self.tensors)

    def _add_planned(self, index: CheckpointIndex, tree: Any, how: Mapping[str, Any]) -> None:
        """Add what a `Writer` has saved, under the keys of its planner."""
        raw, self.save_id = set(how["raw"]), how.get("save_id")
        for key, path in how["paths"].items():
            leaf = at_path(tree, path)
            if isinstance(leaf, InFile):
                leaf = index.trees[leaf.key]
            self._add(tuple(path), RawBytes(leaf) if key in raw else leaf, key)

    def _add_optim(self, full: Mapping[str, Any], root: Path) -> None:
        """Add the state and the groups, these nested and flattened, so that both forms of an optimizer's dict find theirs."""
        for fqn, values in full.get(_STATE, {}).items():
            for name, value in values.items():
                for path, leaf in flattened(value, (*root, _STATE, str(fqn), str(name))):
                    self._add(path, leaf)
        for number, group in enumerate(full.get(_GROUPS, ())):
            for name, value in group.items():
                for path, leaf in flattened(value, (*root, _GROUPS, number, name)):
                    self._add(path, leaf)
                for fqn in group.get("params", ()) if name != "params" else ():
                    for path, leaf in flattened(value, (*root, f"{_GROUPS}.{fqn}.{name}")):
                        self._add(path, leaf)
        for name, value in full.items():
            if name not in (_STATE, _GROUPS, *_NOT_TORCHS):
                for path, leaf in flattened(value, (*root, str(name))):
                    self._add(path, leaf)

    def _add(self, path: Path, leaf: Any, key: str = "") -> None:
        key = key or key_of(path)
        if key in self.tensors or key in self.values:
            if (self.tensors | self.values)[key] is leaf:
                return
            raise CheckpointError(
                f"{key}: two values of the checkpoint have this key in a state dict of torch: give Reader(path, model=, optim=) "
                "other names for the dicts of the model and the optimizer"
            )
        self.paths[key] = path
        if isinstance(leaf, StoredTensor):
            self.tensors[key] = leaf
        else:
            self.values[key] = leaf

    def metadata(self) -> Metadata:
        """Return torch's metadata. Each tensor is one chunk; a planner asks for the part that it needs."""
        entries: dict[str, STORAGE_TYPES] = {key: _tensor_metadata(stored) for key, stored in self.tensors.items()}
        for key, value in self.values.items():
            entries[key] = _of_tensor(value) if _is_tensor(value) else BytesStorageMetadata()
        return Metadata(entries, planner_data=dict(self.paths), storage_data={})


def _place(name: str | None, saved: Sequence[str]) -> Path:
    """Return the path of a dict that a caller may have named; `saved`: where it was."""
    if name is None:
        return tuple(saved)
    return (name,) if name else ()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tensor_metadata(stored: StoredTensor) -> TensorStorageMetadata:
    return _entry(dtype_named(stored.dtype), torch.Size(stored.shape))


def _of_tensor(tensor: torch.Tensor) -> TensorStorageMetadata:
    return _entry(tensor.dtype, tensor.shape)


def _entry(dtype: torch.dtype, size: torch.Size) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
