"""The tensors of a save by torch's planner: the items of all ranks' plans say which rank writes which box of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import PlannedTensor
from fsdp_optim.formats.base.records import Half
from fsdp_optim.layout import Block, Box, Boxes, Shape
from fsdp_optim.tensors.memory import dtype_name

ItemBox: TypeAlias = "tuple[Shape, Shape]"
"""The offsets and the sizes of a box."""

ItemName: TypeAlias = "tuple[str, Shape]"
"""What tells an item of a rank from its others: the key of the tensor, and the offsets of the box."""

_HALF: Half = "state"


@dataclass(frozen=True)
class BoxedTensor:
    """One tensor of a save. `writers`: the rank that writes each of its boxes."""

    key: str
    dtype: torch.dtype
    shape: Shape
    writers: dict[ItemBox, int] = field(default_factory=dict)

    @property
    def planned(self) -> PlannedTensor:
        return PlannedTensor(self.key, dtype_name(self.dtype), self.shape, _HALF)

    @property
    def order(self) -> tuple[int, int]:
        """The place in the file: large elements first, so that each tensor is aligned, and those of one rank side by side."""
        ranks = set(self.writers.values())
        return -self.dtype.itemsize, min(ranks) if len(ranks) == 1 else -1


@dataclass(frozen=True)
class PlannedBoxes:
    """The tensors of a save in the order of their bytes.

    `skipped`: by rank, the items that another rank writes too, where the planner has not left them out.
    """

    tensors: Sequence[BoxedTensor]
    skipped: Sequence[frozenset[ItemName]]

    @classmethod
    def of(cls, plans: Sequence[SavePlan]) -> PlannedBoxes:
        """Read the plans of all ranks.

        Raises CheckpointError that names a tensor whose boxes do not make it up, and one that a file cannot hold.
        """
        tensors: dict[str, BoxedTensor] = {}
        skipped: list[set[ItemName]] = [set() for _ in plans]
        for rank, plan in enumerate(plans):
            if not getattr(plan, "usable", True):
                raise CheckpointError(
                    f"rank {rank} sends no items, because the planner keeps plans of earlier saves: make the planner without "
                    "enable_plan_caching=True"
                )
            for item in plan.items:
                if item.type is WriteItemType.BYTE_IO:
                    continue
                box = box_of(item)
                tensor = _tensor_of(tensors, item, rank)
                if tensor.writers.setdefault(box, rank) != rank:
                    skipped[rank].add((tensor.key, box[0]))
        _check_all(tensors.values())
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.order)
        return cls(ordered, [frozenset(names) for names in skipped])


def box_of(item: WriteItem) -> ItemBox:
    """Return the box of a tensor that an item writes. Raises CheckpointError for an item without one."""
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn}: the plan has an item for a tensor that says nothing about the tensor")
    chunk = item.tensor_data.chunk
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _tensor_of(tensors: dict[str, BoxedTensor], item: WriteItem, rank: int) -> BoxedTensor:
    data, key = item.tensor_data, item.index.fqn
    if data is None:
        raise CheckpointError(f"{key}: the plan has an item for a tensor that says nothing about the tensor")
    dtype, shape = data.properties.dtype, tuple(data.size)
    if data.properties.layout is not torch.strided:
        raise CheckpointError(
            f"{key}: is a sparse tensor ({data.properties.layout}): give its to_dense(), or its indices and values"
        )
    known = tensors.setdefault(key, BoxedTensor(key, dtype, shape))
    if (known.dtype, known.shape) != (dtype, shape):
        raise CheckpointError(
            f"{key}: is a {dtype} tensor of {list(shape)} on rank {rank}, and a {known.dtype} tensor of {list(known.shape)} on a "
            "lower rank: give them different keys"
        )
    return known


def _check_all(tensors: Iterable[BoxedTensor]) -> None:
    checked: set[tuple[Shape, tuple[ItemBox, ...]]] = set()  # layers share their cuts
    for tensor in tensors:
        boxes = tuple(tensor.writers)
        if boxes != ((tuple([0] * len(tensor.shape)), tensor.shape),) and (tensor.shape, boxes) not in checked:
            _check(tensor)
            checked.add((tensor.shape, boxes))


def _check(tensor: BoxedTensor) -> None:
    """Raise CheckpointError where boxes lie outside of a tensor or overlap, and where elements are in none."""
    shape = tensor.shape
    for (offsets, sizes), rank in tensor.writers.items():
        if len(offsets) != len(shape) or any(o + n > full for o, n, full in zip(offsets, sizes, shape, strict=False)):
            raise CheckpointError(
                f"{tensor.key}: rank {rank} has a box at {list(offsets)} of the sizes {list(sizes)}, outside of the shape "
                f"{list(shape)}"
            )
    filled = [box for box in tensor.writers if 0 not in box[1]]
    by_rank: dict[int, tuple[Block, ...]] = {n: (Block(Box(*box), 0),) for n, box in enumerate(filled)}
    listed = Boxes(shape, tuple(by_rank.items()))
    if listed.overlap is not None:
        first, other = listed.overlap
        raise CheckpointError(
            f"{tensor.key}: the boxes at {list(first.offsets)} of the sizes {list(first.sizes)} and at {list(other.offsets)} of "
            f"the sizes {list(other.sizes)} overlap: ranks must save distinct boxes of a tensor"
        )
    gap = listed.gap()
    if gap is not None:
        raise CheckpointError(
            f"{tensor.key}: no rank has its elements [{gap[0]}, {gap[1]}) of {prod(shape)}: save with all ranks that have a part "
            "of it, without no_dist=True"
        )


def owned_by(tensors: Sequence[BoxedTensor], num_ranks: int) -> list[list[str]]:
    """Return, for each rank, the keys of the tensors that it writes boxes of."""
    keys: dict[int, list[str]] = defaultdict(list)
    for tensor in tensors:
        for rank in set(tensor.writers.values()):
            keys[rank].append(tensor.key)
    return [keys[rank] for rank in range(num_ranks)]
