"""Handles of persistent buffers, which most wrappers neither cut nor keep equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.tree import ModuleTree
from fsdp_optim.errors import StateError, WrapperError
from fsdp_optim.layout import Ranks, Whole
from fsdp_optim.tensors.memory import same_bits
from fsdp_optim.view import Handle, ModelView, NamedHandle, Original

Rename = Callable[[str, Ranks], str]
"""(FQN on this rank, the ranks that hold the buffer) -> FQN that is unique in the job"""


@dataclass(frozen=True)
class Buffers:
    """The buffers in a state_dict(), without duplicates. `aliases`: other FQN of a buffer -> FQN in `handles`."""

    handles: tuple[NamedHandle, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


def read_buffers(tree: ModuleTree, adapters: Sequence[Adapter], view: ModelView, rename: Rename) -> Buffers:
    """Return the persistent buffers, each complete on the ranks that hold the nearest parameters, unless a wrapper has cut it."""
    near = Near(tree, view)
    cast = {id(buffer) for adapter in adapters for buffer in adapter.cast_buffers(tree)}
    handles: dict[str, Handle] = {}
    aliases: dict[str, str] = {}
    for fqn, value, others in tree.buffers():
        ranks, loose = near.ranks(fqn), near.is_loose(fqn)
        name = rename(fqn, ranks)
        handle = next((cut for adapter in adapters if (cut := adapter.buffer(tree, fqn, value)) is not None), None)
        if handle is None:
            place = Original(tree.root, fqn, Whole(tuple(value.shape), ranks))
            handle = Handle(
                value,
                (place,),
                tuple(value.shape),
                synchronized=False,
                loose=loose,
                cast_by_wrapper=id(value) in cast,
            )
        handles[name] = handle if name not in handles else _joined_copies(name, handles[name], handle)
        aliases.update({rename(other, ranks): name for other in others})
    return Buffers(tuple(NamedHandle(handle, (name,)) for name, handle in handles.items()), aliases)


@dataclass(frozen=True, kw_only=True)
class StageCopiesHandle(Handle):
    """The Handle of a buffer with a copy in several pipeline stages of this rank. The copies are saved as one buffer."""

    stage_copies: tuple[torch.Tensor, ...]

    def install(self, flat: torch.Tensor) -> None:
        super().install(flat)
        with torch.no_grad():
            for stage_copy in self.stage_copies:
                stage_copy.copy_(flat.view(self.local_shape))

    def check_equal(self, fqn: str) -> None:
        if not all(same_bits(self.param, stage_copy) for stage_copy in self.stage_copies):
            raise StateError(
                f"{fqn}: {len(self.stage_copies) + 1} pipeline stages of this rank have a buffer of this name, and the buffers "
                "differ: make them equal, or give name_of= that tells them apart"
            )


def _joined_copies(fqn: str, first: Handle, other: Handle) -> Handle:
    """Join the Handles of two buffers of one name. Raises WrapperError where the two cannot be saved as one buffer."""
    plain = all(type(handle) in (Handle, StageCopiesHandle) for handle in (first, other))
    if not plain or (first.local_shape, first.param.dtype) != (other.local_shape, other.param.dtype):
        raise WrapperError(
            f"{fqn}: two buffers have this name, of shape {list(first.local_shape)} and {first.param.dtype}, and of shape "
            f"{list(other.local_shape)} and {other.param.dtype}: give name_of= that tells them apart"
        )
    known = first.stage_copies if isinstance(first, StageCopiesHandle) else ()
    fields_of_first = {item.name: getattr(first, item.name) for item in fields(Handle)}
    return StageCopiesHandle(**fields_of_first, stage_copies=(*known, other.param))


class Near:
    """The ranks that have a module's buffers and other entries: the ranks that hold parameters of the module."""

    def __init__(self, tree: ModuleTree, view: ModelView) -> None:
        self._tree, self._view = tree, view

    @cached_property
    def _by_prefix(self) -> dict[str, tuple[set[int], bool]]:
        """Path of a module -> the ranks that hold its parameters, and whether all of its parameters are loose."""
        by_prefix: dict[str, tuple[set[int], bool]] = {}
        for named in self._view.handles:
            for original in named.handle.originals:
                parts = self._tree.fqn(original.module, original.attribute).split(".")
                for length in range(1, len(parts)):
                    ranks, loose = by_prefix.get(".".join(parts[:length]), (set(), True))
                    known = (ranks.union(original.placement.ranks), loose and named.handle.loose)
                    by_prefix[".".join(parts[:length])] = known
        return by_prefix

    def ranks(self, fqn: str) -> Ranks:
        """Return the ranks that hold parameters of the buffer's module, or of the nearest outer module with parameters."""
        return tuple(sorted(self._nearest(fqn)[0]))

    def is_loose(self, fqn: str) -> bool:
        """Return whether no wrapper knows these ranks, as for a pipeline stage without wrapper."""
        return self._nearest(fqn)[1]

    def _nearest(self, fqn: str) -> tuple[set[int], bool]:
        parts = fqn.split(".")
        for length in range(len(parts) - 1, 0, -1):
            nearest = self._by_prefix.get(".".join(parts[:length]))
            if nearest is not None and nearest[0]:
                return nearest
        return set(self._view.ranks), True
