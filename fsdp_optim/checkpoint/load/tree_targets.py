"""Tensors of `state=` as targets of a load: each rank's memory for the elements that it needs, and the tensors made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from msgspec import Struct

from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.contents import TREE
from fsdp_optim.checkpoint.common.trees import key_of, local_of
from fsdp_optim.checkpoint.load.reading import CheckpointEnd, StoredValue
from fsdp_optim.errors import StateError, shortened
from fsdp_optim.formats.base.protocols import Reader, StoredTensor
from fsdp_optim.move import Slice
from fsdp_optim.state.dicts.packed import LocalId
from fsdp_optim.state.live.state_memory import StateMemory
from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.state.merged.replicas import ELEMENTS
from fsdp_optim.state.values.summary import Summary
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.verbs.call import Local, agree_on_state

_BUDGET_ALONE = 64 << 20  # bytes, of copies of device memory on the host


class TreeTargets(Struct, frozen=True):
    """The tensors of this rank that get elements of a checkpoint.

    `flats`: 1-D tensors with them, by local id. `of_objects`: the keys of tensors that objects get, which are not overwritten.
    """

    local: Local
    global_state: GlobalState | None
    stored: Mapping[str, StoredTensor]
    flats: Mapping[LocalId, torch.Tensor]
    of_objects: Collection[str] = ()

    @classmethod
    def agree_on_state(
        cls,
        group: RankGroup,
        targets: Mapping[str, torch.Tensor],
        trees: Mapping[str, StoredTensor],
        options: LoadArguments,
        of_objects: Collection[str],
    ) -> TreeTargets:
        """Agree with the other ranks on the tensors to fill, by key. Called by all ranks. `trees`: those of the checkpoint.

        Raises StateError for a tensor that is cut in another shape than it was saved in.
        """
        local, global_state = agree_on_state(
            group,
            lambda: local_of(targets, group.rank, group.ranks),
            options,
            "the tensors of state=",
            with_state=False,
            what=ELEMENTS,
        )
        return cls._of(local, global_state, trees, of_objects)

    @classmethod
    def alone(
        cls,
        rank: int,
        targets: Mapping[str, torch.Tensor],
        trees: Mapping[str, StoredTensor],
        of_objects: Collection[str],
    ) -> TreeTargets:
        """Return the same for this rank alone. No communication."""
        return cls._of(local_of(targets, rank, (rank,)), None, trees, of_objects)

    @classmethod
    def _of(
        cls,
        local: Local,
        global_state: GlobalState | None,
        trees: Mapping[str, StoredTensor],
        of_objects: Collection[str],
    ) -> TreeTargets:
        memory, flats, rank = StateMemory(local.view.rank), {}, local.view.rank
        differing = []
        for param in local.optim.params:
            (fqn,) = param.named.fqns
            stored, shape = trees[key_of(fqn)], param.named.placements[fqn].shape
            if stored.shape != shape:
                differing.append(f"{fqn}: shape {list(stored.shape)} in the checkpoint, {list(shape)} on rank {rank}")
                continue
            summary = Summary(sharded=((TREE, stored.dtype),), names=(TREE,))
            flats[param.local_id] = memory.of(param, summary)[TREE]
        if differing:
            raise StateError(
                f"tensors of state= have other shapes than the saved ones:\n{shortened(differing, 20, chr(10))}"
            )
        return cls(local, global_state, trees, flats, of_objects)

    def stored_values(self) -> Iterator[StoredValue]:
        """Yield the values to move, the same on all ranks."""
        params = self.global_state.params if self.global_state is not None else {}
        for fqn, param in params.items():
            local = self.local.by_fqn.get(fqn)
            flat = self.flats[local.local_id] if local is not None else None
            yield StoredValue.of(fqn, TREE, self.stored[key_of(fqn)], param.placement, flat, is_state=False)

    def held(self, fqn: str) -> torch.Tensor | None:
        """Return this rank's part of a live tensor, as it is now; None if it has none."""
        param = self.local.by_fqn.get(fqn)
        return param.handle.held(param.handle.as_value()) if param is not None and not param.handle.skipped else None

    def read_alone(self, checkpoint: Reader) -> Sequence[Slice]:
        """Read this rank's elements, without the other ranks. Returns them."""
        slices = []
        for param in self.local.optim.params:
            (fqn,) = param.named.fqns
            placement, flat = param.named.placements[fqn], self.flats[param.local_id]
            value = StoredValue.of(fqn, TREE, self.stored[key_of(fqn)], placement, flat, is_state=False)
            slices.append(Slice(value, placement, flat))
        budget = Budget(_BUDGET_ALONE, "copies of device memory on the host")
        CheckpointEnd(checkpoint, self.local.view.rank, budget, as_needed=True).fill(slices)
        return slices

    def tensors(self, but: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Return new tensors with the elements that were read, cut as the live ones, by key, except those of some keys.

        They are in the memory that `install` reads, in other strides.
        """
        return {
            key: param.handle.from_local(self.flats[param.local_id])
            for param in self.local.optim.params
            if (key := key_of(param.named.fqns[0])) not in but
        }

    def install(self, keys: Collection[str]) -> None:
        """Write the elements that were read into some of the live tensors."""
        for param in self.local.optim.params:
            if key_of(param.named.fqns[0]) in keys:
                param.handle.install(self.flats[param.local_id])
