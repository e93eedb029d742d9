"""The optimizer's state in a checkpoint as a `FullState`: of this library's description, or of another library's full dict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_optim.checkpoint.common.contents import RECORDS
from fsdp_optim.checkpoint.common.optim_description import full_dict
from fsdp_optim.checkpoint.load.matching import renamed_names
from fsdp_optim.checkpoint.load.reading import read_constants
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import FormatReader, StoredTensor
from fsdp_optim.formats.base.trees import tensors_in, unread_in
from fsdp_optim.layout import Shape
from fsdp_optim.memory import dtype_named
from fsdp_optim.options import Rename
from fsdp_optim.state.dicts.dialects import normalize
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.dicts.names import Names
from fsdp_optim.state.values.kinds import Kind


@dataclass(frozen=True)
class StoredState:
    """The optimizer's state in a checkpoint.

    Attributes:
        full: the state by FQN. Tensors whose elements are in files are meta tensors.
        tensors: (FQN, name) -> the stored tensor of each of these.
    """

    full: FullState
    tensors: Mapping[tuple[str, str], StoredTensor]

    @classmethod
    def of(
        cls,
        checkpoint: FormatReader,
        names: Names,
        shapes: Mapping[str, Shape],
        *,
        allow_pickle: bool = False,
        rename: Rename | None = None,
        off_mesh: Collection[str] = (),
    ) -> StoredState:
        """The state for a model whose parameters have these names and shapes. Reads small tensors, on this rank.

        `off_mesh`: as for `full_dict`.

        Raises StateError if no optimizer was saved, or if the checkpoint cannot say whose state it has.
        """
        if not checkpoint.has_optim:
            raise StateError(f"{checkpoint.where}: was saved without an optimizer: load it without optim=")
        if checkpoint.full_dict is not None:
            return _of_foreign(checkpoint, renamed_names(names, checkpoint, rename), shapes)
        keys: dict[tuple[str, str], str] = {}
        description = checkpoint.description(allow_pickle=allow_pickle, records=RECORDS)
        names = renamed_names(names, checkpoint, rename, description.params)
        with as_checkpoint_error(f"{checkpoint.where}: the optimizer"):
            as_dict = full_dict(_CheckpointFiles(checkpoint), description, names, keys, off_mesh)
        return cls(normalize(as_dict, names), {place: _stored(checkpoint, key) for place, key in keys.items()})


@dataclass(frozen=True)
class _CheckpointFiles:
    """The `StateFiles` of a checkpoint."""

    checkpoint: FormatReader

    def described(self, key: str) -> tuple[Shape, str]:
        stored = _stored(self.checkpoint, key)
        return stored.shape, stored.dtype

    def constants(self, keys: Sequence[str]) -> list[torch.Tensor]:
        return read_constants(self.checkpoint, [_stored(self.checkpoint, key) for key in keys])


def _stored(checkpoint: FormatReader, key: str) -> StoredTensor:
    if key not in checkpoint.optim:
        raise CheckpointError(f"{checkpoint.where}: the description of the optimizer names {key}, which is in no file")
    return checkpoint.optim[key]


# ------------------------------------------------------------------------------------------- other libraries


def _of_foreign(checkpoint: FormatReader, names: Names, shapes: Mapping[str, Shape]) -> StoredState:
    where = f"{checkpoint.where}: the optimizer"
    tree: Any = checkpoint.full_dict
    stand_ins = _StandIns(checkpoint, [stored for stored in tensors_in(tree) if _numel(stored) <= 1])
    with as_checkpoint_error(where):
        full = normalize(stand_ins.in_place_of_stored(tree), names)
        _check_read(where, full)
        evidence = full.evidence(shapes)
        sharded = {
            (fqn, name): stored
            for fqn, values in full.state.items()
            for name, value in values.items()
            if (stored := stand_ins.stored_of(value)) is not None
            and full.kind_of(fqn, name, value, shapes.get(fqn, stored.shape), evidence) is Kind.SHARDED
        }
        whole = stand_ins.read_others(frozenset(id(full.state[fqn][name]) for fqn, name in sharded))
        metas = {place: _meta_of(stored) for place, stored in sharded.items()}
        full = replace(
            full,
            state={
                fqn: {
                    name: metas[fqn, name] if (fqn, name) in metas else _mapped(value, whole)
                    for name, value in values.items()
                }
                for fqn, values in full.state.items()
            },
            groups=tuple((_mapped(hyper, whole), fqns) for hyper, fqns in full.groups),
            other_keys=_mapped(full.other_keys, whole),
        )
    return StoredState(full, sharded)


def _check_read(where: str, full: FullState) -> None:
    """Raise CheckpointError for an object in the state or in the groups whose class is not known."""
    named = [(f"{name} of {fqn}", value) for fqn, values in full.state.items() for name, value in values.items()]
    named += [(f"{key} of a param group", value) for hyper, _ in full.groups for key, value in hyper.items()]
    named += [(f"{key}", value) for key, value in full.other_keys.items()]
    for what, value in named:
        unread = unread_in(value)
        if unread is not None:
            raise CheckpointError(
                f"{where}: {what} is a {unread.what}, and making one can run any code: if you trust the author of the file, read "
                "it with torch.load, and give its dict to scatter_full_optim_state_dict"
            )


def _numel(stored: StoredTensor) -> int:
    return stored.placement.numel


class _StandIns:
    """Meta tensors in the place of stored tensors; those of at most one element are read, because readers look at them."""

    def __init__(self, checkpoint: FormatReader, small: Sequence[StoredTensor]) -> None:
        self._checkpoint = checkpoint
        unique = {stored.key: stored for stored in small}
        self._small = dict(zip(unique, read_constants(checkpoint, list(unique.values())), strict=True))
        # By id; the tensors are kept, so ids stay unique.
        self._metas: dict[int, tuple[torch.Tensor, StoredTensor]] = {}
        self._read: dict[int, tuple[torch.Tensor, StoredTensor]] = {}

    def in_place_of_stored(self, tree: Any) -> Any:
        return _replaced(tree, self._stand_in)

    def _stand_in(self, stored: StoredTensor) -> torch.Tensor:
        if stored.key in self._small:
            value = self._small[stored.key].clone()  # one for each place of a tensor that has several
            self._read[id(value)] = (value, stored)
            return value
        meta = _meta_of(stored)
        self._metas[id(meta)] = (meta, stored)
        return meta

    def stored_of(self, value: object) -> StoredTensor | None:
        found = self._metas.get(id(value)) or self._read.get(id(value))
        return found[1] if found is not None else None

    def read_others(self, but: frozenset[int]) -> Callable[[object], Any]:
        """A function that returns the elements of a stand-in, read whole, and every other value as it is.

        `but`: the ids of stand-ins that stay.
        """
        others = [(number, stored) for number, (_, stored) in self._metas.items() if number not in but]
        read = read_constants(self._checkpoint, [stored for _, stored in others])
        by_id = {number: value for (number, _), value in zip(others, read, strict=True)}
        return lambda value: by_id.get(id(value), value)


def _meta_of(stored: StoredTensor) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=dtype_named(stored.dtype), device="meta")


def _replaced(tree: Any, of: Callable[[StoredTensor], torch.Tensor]) -> Any:
    """The same dicts and lists with another value in the place of each StoredTensor."""
    if isinstance(tree, StoredTensor):
        return of(tree)
    if isinstance(tree, Mapping):
        return {key: _replaced(value, of) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_replaced(value, of) for value in tree)
    return tree


def _mapped(tree: Any, of: Callable[[object], Any]) -> Any:
    """The same dicts and lists with another value in the place of each leaf."""
    if isinstance(tree, Mapping):
        return {key: _mapped(value, of) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, of) for value in tree)
    return of(tree)
