"""Handles of persistent buffers, which most wrappers neither cut nor keep equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.tree import ModuleTree
from fsdp_optim.layout import Ranks, Whole
from fsdp_optim.view import Handle, ModelView, NamedHandle, Original

Rename = Callable[[str, Ranks], str]
"""(FQN on this rank, the ranks that hold the buffer) -> FQN that is unique in the job"""


@dataclass(frozen=True)
class Buffers:
    """The buffers in a state_dict(), without duplicates. `aliases`: other FQN of a buffer -> FQN in `handles`."""

    handles: tuple[NamedHandle, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


def read_buffers(tree: ModuleTree, adapters: Sequence[Adapter], view: ModelView, rename: Rename) -> Buffers:
    """The persistent buffers, each whole on the ranks that hold the nearest parameters, unless a wrapper has cut it."""
    near = Near(tree, view)
    cast = {id(buffer) for adapter in adapters for buffer in adapter.cast_buffers(tree)}
    handles = []
    aliases: dict[str, str] = {}
    for fqn, value, others in tree.buffers():
        ranks, loose = near.ranks(fqn), near.is_loose(fqn)
        name = rename(fqn, ranks)
        handle = next((found for adapter in adapters if (found := adapter.buffer(tree, fqn, value)) is not None), None)
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
        handles.append(NamedHandle(handle, (name,)))
        aliases.update({rename(other, ranks): name for other in others})
    return Buffers(tuple(handles), aliases)


class Near:
    """The ranks that have a module's buffers and other entries: the ranks that hold parameters of the module."""

    def __init__(self, tree: ModuleTree, view: ModelView) -> None:
        self._everyone = view.ranks
        self._by_prefix: dict[str, tuple[set[int], bool]] = {}
        for named in view.handles:
            for original in named.handle.originals:
                parts = tree.fqn(original.module, original.attribute).split(".")
                for length in range(1, len(parts)):
                    ranks, loose = self._by_prefix.get(".".join(parts[:length]), (set(), True))
                    known = (ranks.union(original.placement.ranks), loose and named.handle.loose)
                    self._by_prefix[".".join(parts[:length])] = known

    def ranks(self, fqn: str) -> Ranks:
        """The ranks that hold parameters of the buffer's module, or of the nearest outer module with parameters."""
        return tuple(sorted(self._nearest(fqn)[0]))

    def is_loose(self, fqn: str) -> bool:
        """Whether no wrapper knows these ranks, as for a pipeline stage without wrapper."""
        return self._nearest(fqn)[1]

    def _nearest(self, fqn: str) -> tuple[set[int], bool]:
        parts = fqn.split(".")
        for length in range(len(parts) - 1, 0, -1):
            found = self._by_prefix.get(".".join(parts[:length]))
            if found is not None and found[0]:
                return found
        return set(self._everyone), True
