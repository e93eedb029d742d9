"""The content of DeepSpeed's `*_model_states.pt`: weights that are not trained, buffers, names, and the trainer's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from msgspec import structs

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.torch_archive import TorchArchive
from fsdp_optim.foreign.deepspeed.added import AddedByUs
from fsdp_optim.foreign.deepspeed.cuts import cut_fragments
from fsdp_optim.foreign.deepspeed.trees import (
    any_tensor,
    check_same_dtype,
    listed,
    mapping,
    read_files,
    readable,
    shapes_of,
    whole_number,
)
from fsdp_optim.foreign.reader import ForeignValues, versioned
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.model_dict import is_extra_state, versions_beside

OF_FILES = frozenset(
    (
        *("module", "optimizer", "param_shapes", "shared_params", "buffer_names"),
        *("frozen_param_shapes", "frozen_param_fragments", "universal_checkpoint_info"),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    )
)
"""The values that DeepSpeed keeps for itself, and no user needs."""

_OF_DEEPSPEED = frozenset(
    (
        *("lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples", "ds_config", "ds_version"),
    )
)
"""Values of DeepSpeed that users may need, beside their own `client_state`."""


@dataclass(frozen=True)
class ModelFiles:
    """The files with the model: one file before stage 3 of ZeRO, and in stage 3 one of each rank.

    In stage 3 each of them names all parameters, so other ranks' files than the first are read only where they are needed: for
    frozen parameters, of which each has a part, and for the values that a rank gave.
    """

    opened: Opened
    names: Sequence[str]

    @cached_property
    def first(self) -> TorchArchive:
        """The file of the first rank."""
        archive = read_files(self.opened, self.names[:1])[0]
        with as_checkpoint_error(archive.where):
            mapping(archive.value, "the file")
        return archive

    @cached_property
    def all(self) -> Sequence[TorchArchive]:
        """The files of all ranks."""
        others = read_files(self.opened, self.names[1:])
        for archive in others:
            self._check_beside(archive)
        return [self.first, *others]

    @property
    def read(self) -> Sequence[TorchArchive]:
        """The files whose tensors are in the checkpoint."""
        return self.all if self.saved.get("frozen_param_shapes") else [self.first]

    def of_rank(self, rank: int) -> TorchArchive:
        """Return the file of one rank, which may be read for this call."""
        if rank == 0 or "all" in vars(self):
            return self.all[rank] if rank else self.first
        archive = read_files(self.opened, [self.names[rank]])[0]
        self._check_beside(archive)
        return archive

    def _check_beside(self, archive: TorchArchive) -> None:
        with as_checkpoint_error(archive.where):
            saved, first = mapping(archive.value, "the file"), self.saved
            for name in ("global_steps", "dp_world_size", "param_shapes"):
                if saved.get(name) != first.get(name):
                    raise CheckpointError(
                        f"{archive.where}: differs in {name} from {self.file}: {saved.get(name)!r:.80} is not "
                        f"{first.get(name)!r:.80}; the files are of different saves"
                    )

    @property
    def file(self) -> str:
        return self.first.where

    @property
    def saved(self) -> Mapping[str, Any]:
        """The values of the first rank's file."""
        value: Mapping[str, Any] = self.first.value
        return value

    @property
    def num_ranks(self) -> int:
        with as_checkpoint_error(self.file):
            return whole_number(self.saved.get("dp_world_size", 0), "dp_world_size")

    @property
    def step(self) -> int | None:
        step = self._added.step if self._added.is_ours else self.saved.get("global_steps")
        return step if type(step) is int and step >= 0 else None

    @cached_property
    def module(self) -> Mapping[str, StoredTensor]:
        """The module's own state dict, as far as it is tensors."""
        with as_checkpoint_error(self.file):
            saved = self.saved.get("module")
            if saved is None:
                raise CheckpointError(
                    f"{self.file}: has no weights, because pipeline stages have files of their own: convert the checkpoint with "
                    "deepspeed.checkpoint.ds_to_universal"
                )
            return {
                str(name): structs.replace(value, key=str(name))
                for name, value in mapping(saved, "module").items()
                if isinstance(value, StoredTensor) and not is_extra_state(str(name))
            }

    @property
    def buffers(self) -> Mapping[str, StoredTensor]:
        with as_checkpoint_error(self.file):
            names = listed(self.saved.get("buffer_names") or (), "buffer_names")
            return {name: self.module[name] for name in names if isinstance(name, str) and name in self.module}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of shared parameters, each with the name that the flat groups have."""
        with as_checkpoint_error(self.file):
            return {
                str(alias): str(name)
                for alias, name in mapping(self.saved.get("shared_params") or {}, "shared_params").items()
            }

    def frozen(self) -> Mapping[str, StoredTensor]:
        """Weights that are not trained, where DeepSpeed saves them beside the module: from stage 2 of ZeRO on."""
        with as_checkpoint_error(self.file):
            shapes = shapes_of(self.saved.get("frozen_param_shapes") or {}, "frozen_param_shapes")
        weights = {}
        for name, shape in shapes.items():
            fragments = []
            for archive in self.all:
                with as_checkpoint_error(archive.where):
                    of_rank = mapping(archive.value["frozen_param_fragments"], "frozen_param_fragments")
                    fragments.append(any_tensor(of_rank[name], name))
            files = [archive.where for archive in self.all]
            check_same_dtype(name, fragments, files)
            if len(fragments) == 1 and fragments[0].shape == shape:
                weights[name] = structs.replace(fragments[0], key=name)
            else:
                with as_checkpoint_error(self.file):
                    weights[name] = cut_fragments(name, shape, fragments, files)
        return weights

    @property
    def module_values(self) -> Mapping[str, Any]:
        """Values in the module's state dict that are neither parameters nor buffers (of `get_extra_state`)."""
        saved = self.saved.get("module")
        kept = {
            str(name): readable(self.first, str(name), value)
            for name, value in (saved.items() if isinstance(saved, dict) else ())
            if not isinstance(value, StoredTensor) or is_extra_state(str(name))
        }
        return versioned(versions_beside(saved), kept)

    # ------------------------------------------------------------------------------------------- values of the trainer

    def extra(self, scaler: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of the first rank. `scaler`: the numbers of the loss scaler."""
        added_by_us = self._added.names
        values = _values(
            self.first, lambda name: name not in OF_FILES and name not in added_by_us, with_none=bool(added_by_us)
        )
        of_scaler = {"loss_scaler": dict(scaler)} if scaler and "loss_scaler" not in values else {}
        return {**{name: self._added.restored(value, (name,)) for name, value in values.items()}, **of_scaler}

    def rank_extras(self) -> Sequence[ForeignValues]:
        """Return the values that each rank gave, None for a rank that gave none; empty where only the first rank has a file."""
        return _RankExtras(self) if len(self.names) > 1 else self._added.rank_extras()

    def pickled(self, extra: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]] | None:
        """Return a function that reads the values with real objects in the place of Unread."""
        return _pickled(self.first, extra, self._added.restored)

    @cached_property
    def _added(self) -> AddedByUs:
        """What this library has added to a universal checkpoint that it has written."""
        return AddedByUs.of(self.first)


class _RankExtras(Sequence[ForeignValues]):
    """The values of each rank, whose file is read when they are asked for."""

    def __init__(self, models: ModelFiles) -> None:
        self._models = models

    def __len__(self) -> int:
        return len(self._models.names)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        archive = self._models.of_rank(range(len(self))[index])
        values = _of_rank(archive)
        return ForeignValues(values or None, _pickled(archive, values))


def _of_rank(archive: TorchArchive) -> dict[str, Any]:
    return _values(archive, lambda name: name not in OF_FILES | _OF_DEEPSPEED)


def _as_it_is(value: Any, at: tuple[Any, ...]) -> Any:
    return value


def _pickled(
    archive: TorchArchive, values: Mapping[str, Any], restored: Callable[[Any, tuple[Any, ...]], Any] = _as_it_is
) -> Callable[[], Mapping[str, Any]] | None:
    names = [name for name, value in values.items() if isinstance(value, Withheld)]
    if not names:
        return None

    def loaded() -> Mapping[str, Any]:
        tree = archive.unpickled()
        real = {name: restored(archive.materialised(tree.get(name)), (name,)) for name in names if name in tree}
        return {**values, **real}

    return loaded


def _values(archive: TorchArchive, is_wanted: Callable[[str], bool], *, with_none: bool = False) -> dict[str, Any]:
    return {
        name: readable(archive, name, value)
        for name, value in archive.value.items()
        if isinstance(name, str) and is_wanted(name) and (value is not None or with_none)
    }


def flat_as(stored: StoredTensor, key: str, shape: tuple[int, ...]) -> StoredTensor:
    """Return a tensor that was saved flat, in the shape of its parameter. Raises ValueError if the numbers of elements differ."""
    if prod(stored.shape) != prod(shape):
        raise ValueError(f"{key} has {prod(stored.shape)} elements, not those of the shape {list(shape)}")
    return structs.replace(stored, key=key, shape=shape)
