"""Tensors that describe their own shards in one of two ways that torch.distributed.checkpoint knows.

One way is `__create_chunk_list__` and `__get_tensor_shard__` (torch's `_Checkpointable`, also inside a DTensor), which give the
chunks of this rank. The other way is `local_shards()`, each with `tensor`, `metadata.shard_offsets` and `metadata.shard_sizes`,
and possibly `metadata().shards_metadata` with the shards of all ranks (ShardedTensor). The Placement of a tensor that knows only
this rank's shards is open: the ranks all-gather their lists at the rendezvous of the call.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.tree import ModuleTree
from fsdp_optim.errors import LayoutError, WrapperError
from fsdp_optim.layout import Block, Box, Boxes, Placement, Ranks, Shape, row_major_strides
from fsdp_optim.tensors.dtensors import grid_of
from fsdp_optim.tensors.memory import flatten, is_plain
from fsdp_optim.view import Handle, Original

_DTENSOR_MODULE = "torch.distributed.tensor"
_SHARDED_MODULE = "torch.distributed._shard.sharded_tensor"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"


class CheckpointableAdapter(Adapter):
    """The adapter of parameters, and of values in sharded dicts, that describe their own shards."""

    name = "a tensor that describes its own shards"

    def is_present(self) -> bool:
        """Return True always, because such tensors are recognised by their methods."""
        return True

    def kind(self, tree: ModuleTree) -> str:
        return "tensors that describe their shards"

    def rank_sets(self, tree: ModuleTree) -> Iterator[Ranks]:
        """Yield the ranks of the process group or mesh of each tensor; all ranks of the job for a tensor without either."""
        for param, _ in tree.listed(_params):
            yield _ranks_of(param) if _inside(param) is param else _ranks_of_mesh(param, tree)

    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterator[Handle]:
        for param, sites in tree.listed(_params):
            if id(param) in claimed:
                continue
            fqn = tree.fqn(*sites[0])
            shards = Shards.of(fqn, param)
            yield ShardsHandle(
                param=param,
                originals=(Original(*sites[0], shards.placement(fqn)),),
                local_shape=shards.local_shape,
                aliases=tuple((0, module, attribute) for module, attribute in sites[1:]),
                fqn=fqn,
                boxes=shards.boxes,
                shape=shards.shape,
            )

    def is_sharded_value(self, value: torch.Tensor) -> bool:
        return describes_itself(value)

    def read_sharded_value(self, fqn: str, value: torch.Tensor) -> tuple[Placement, torch.Tensor]:
        shards = Shards.of(fqn, value)
        return shards.placement(fqn), flatten(shards.local(value.dtype))


def _params(tree: ModuleTree) -> list[tuple[torch.Tensor, list[tuple[nn.Module, str]]]]:
    return [(param, sites) for param, sites in tree.params() if describes_itself(param)]


def describes_itself(value: object) -> bool:
    """Return whether a tensor describes which boxes of the unsharded tensor it holds on this rank."""
    if not isinstance(value, torch.Tensor) or is_plain(value):
        return False
    inside = _inside(value)
    if type(inside) is torch.Tensor and not vars(inside):  # a program may give a tensor the methods
        return False  # nearly always
    return _has_chunks(inside) or (inside is value and callable(getattr(value, "local_shards", None)))


def _has_chunks(value: object) -> bool:
    return hasattr(value, "__create_chunk_list__") and hasattr(value, "__get_tensor_shard__")


def _inside(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose methods describe the shards: the local tensor of a DTensor, else the value itself."""
    module = sys.modules.get(_DTENSOR_MODULE)
    return value._local_tensor if module is not None and isinstance(value, module.DTensor) else value


def _ranks_of_mesh(value: Any, tree: ModuleTree) -> Ranks:
    return tree.once(grid_of, value.device_mesh).in_order()


def _ranks_of(value: Any) -> Ranks:
    group = getattr(value, "_process_group", None)
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    return range(dist.get_world_size()) if dist.is_initialized() else (0,)


@dataclass(frozen=True)
class _ShardOffsets:
    """A stand-in for torch's MetadataIndex, if torch.distributed.checkpoint is not loaded."""

    fqn: str
    offset: Any
    index: int


@dataclass(frozen=True)
class Shards:
    """A tensor's description of its shards on this rank. `by_rank`: the Boxes of every rank; None if they are not known."""

    shape: Shape
    boxes: tuple[Box, ...]
    tensors: tuple[torch.Tensor, ...]
    by_rank: tuple[tuple[int, tuple[Box, ...]], ...] | None = None

    @classmethod
    def of(cls, fqn: str, value: Any) -> Shards:
        """Read the description. Raises WrapperError for a shard whose shape differs from its box."""
        inside = _inside(value)
        shape, by_rank = tuple(value.shape), None
        if _has_chunks(inside):
            held = list(_chunks(fqn, inside))
            items = value.__create_write_items__(fqn, value) if hasattr(value, "__create_write_items__") else ()
            shape = next((tuple(item.tensor_data.size) for item in items), shape)
        else:
            by_offsets = {_box(shard.metadata): shard.tensor for shard in value.local_shards()}
            by_rank = _boxes_by_rank(value)
            boxes = dict(by_rank).get(_me(), ()) if by_rank is not None else tuple(by_offsets)
            missing = [box for box in boxes if box.numel and box not in by_offsets]
            if missing:
                raise WrapperError(
                    f"{fqn}: the metadata of this {type(value).__name__} lists {missing[0]} on rank {_me()}, which has no such "
                    "local shard: make the tensor with metadata that agrees with its local shards"
                )
            held = [(box, by_offsets[box]) for box in boxes if box.numel]
        for box, tensor in held:
            if tuple(tensor.shape) != box.sizes:
                raise WrapperError(
                    f"{fqn}: on rank {_me()} its shard at {list(box.offsets)} has shape {list(tensor.shape)}, and the "
                    f"description says {list(box.sizes)}: make the tensor with a description that agrees with its shards"
                )
        return cls(shape, tuple(box for box, _ in held), tuple(tensor for _, tensor in held), by_rank)

    @property
    def local_shape(self) -> Shape:
        """The shape of a single shard; a 1-D shape for several shards, which lie one after the other, or for none."""
        return self.boxes[0].sizes if len(self.boxes) == 1 else (sum(box.numel for box in self.boxes),)

    def placement(self, fqn: str) -> Boxes:
        """Return the placement of the tensor, open if this rank knows its own shards only."""
        by_rank = self.by_rank if self.by_rank is not None else ((_me(), self.boxes),)
        try:
            return Boxes(
                self.shape,
                tuple((rank, _blocks(boxes)) for rank, boxes in sorted(by_rank)),
                is_open=self.by_rank is None,
            )
        except LayoutError as error:
            raise WrapperError(
                f"{fqn}: the description that this tensor gives of its own shards is wrong: {error}"
            ) from error

    def local(self, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's elements in the local shape: the memory of a single shard, or a copy of several shards."""
        if len(self.tensors) == 1:
            return self.tensors[0].detach()
        if not self.tensors:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.cat([flatten(tensor) for tensor in self.tensors])

    def fill(self, flat: torch.Tensor) -> None:
        """Overwrite the shards with the elements of a 1-D tensor."""
        at = 0
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.detach().copy_(flat[at : at + tensor.numel()].view(tensor.shape))
                at += tensor.numel()


def _chunks(fqn: str, value: Any) -> Iterator[tuple[Box, torch.Tensor]]:
    loaded = sys.modules.get(_METADATA_MODULE)
    index_of = loaded.MetadataIndex if loaded is not None else _ShardOffsets
    for number, chunk in enumerate(value.__create_chunk_list__()):
        if prod(chunk.sizes):
            yield (
                Box(tuple(chunk.offsets), tuple(chunk.sizes)),
                value.__get_tensor_shard__(index_of(fqn, chunk.offsets, number)),
            )


def _box(metadata: Any) -> Box:
    return Box(tuple(metadata.shard_offsets), tuple(metadata.shard_sizes))


def _boxes_by_rank(value: Any) -> tuple[tuple[int, tuple[Box, ...]], ...] | None:
    """Return the boxes of every global rank from a tensor's metadata; None for a tensor without metadata."""
    metadata = getattr(value, "metadata", None)
    if not callable(metadata):
        return None
    boxes_of: dict[int, tuple[Box, ...]] = dict.fromkeys(_ranks_of(value), ())
    for shard in metadata().shards_metadata:
        box, rank = _box(shard), shard.placement.rank()
        boxes_of[rank] = (*boxes_of.get(rank, ()), *([box] if box.numel else []))
    return tuple(sorted(boxes_of.items()))


def _blocks(boxes: Sequence[Box]) -> tuple[Block, ...]:
    starts = [sum(box.numel for box in boxes[:number]) for number in range(len(boxes))]
    return tuple(map(Block, boxes, starts))


def _me() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True, kw_only=True)
class ShardsHandle(Handle):
    """The Handle of a parameter that describes its own shards; state values have the same class and the same shards."""

    fqn: str
    boxes: tuple[Box, ...]
    shape: Shape

    def weights(self) -> torch.Tensor:
        return self._shards_of(self.param).local(self.param.dtype)

    def install(self, flat: torch.Tensor) -> None:
        shards = self._shards_of(self.param)
        with torch.inference_mode(mode=any(tensor.is_inference() for tensor in shards.tensors)):
            shards.fill(flat)

    def held(self, value: torch.Tensor) -> torch.Tensor | None:
        if is_plain(value):
            return super().held(value)
        return self._shards_of(value).local(value.dtype) if self.is_held(value) else None

    def is_held(self, value: torch.Tensor) -> bool:
        if is_plain(value) or not describes_itself(value):
            return super().is_held(value)
        shards = self._shards_of(value)
        return shards.shape == self.shape and shards.boxes == self.boxes

    def from_local(self, flat: torch.Tensor) -> torch.Tensor:
        parts = torch.split(flat, [box.numel for box in self.boxes]) if self.boxes else ()
        tensors = [part.view(box.sizes) for part, box in zip(parts, self.boxes, strict=True)]
        return _like_param(self.fqn, self.param, self.boxes, tensors, flat.dtype)

    @property
    def marks(self) -> bool:
        return True

    def is_marked(self, value: torch.Tensor) -> bool:
        return describes_itself(value) and self.is_held(value)

    @property
    def is_cut(self) -> bool:
        return sum(box.numel for box in self.boxes) < prod(self.shape) or super().is_cut

    @property
    def device(self) -> torch.device:
        tensors = self._shards_of(self.param).tensors
        return tensors[0].device if tensors else torch.device("cpu")

    @property
    def is_meta(self) -> bool:
        return any(tensor.is_meta for tensor in self._shards_of(self.param).tensors)

    def _shards_of(self, value: torch.Tensor) -> Shards:
        return Shards.of(self.fqn, value)


def _like_param(
    fqn: str, param: Any, boxes: Sequence[Box], tensors: list[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor of the parameter's class, with the parameter's shards, and the elements of `tensors`.

    Raises WrapperError for a tensor class that neither `empty_like` nor a copy can make.
    """
    inside = _inside(param)
    sharded = sys.modules.get(_SHARDED_MODULE)
    if sharded is not None and isinstance(param, sharded.ShardedTensor):
        return _sharded_tensor(sharded, param, boxes, tensors, dtype)
    with torch.no_grad():
        if inside is not param:
            local: Any = type(inside)(tensors, [box.offsets for box in boxes])
            value: torch.Tensor = sys.modules[_DTENSOR_MODULE].DTensor.from_local(
                local,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=torch.Size(param.shape),
                stride=row_major_strides(tuple(param.shape)),
            )
            return value
        try:
            value = torch.empty_like(param, dtype=dtype, requires_grad=False)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if param.dtype != dtype:
                raise WrapperError(
                    f"{fqn}: torch.empty_like() of this {type(param).__name__} with dtype={dtype} fails ({error}), so no state "
                    "value of this dtype can be made for the parameter: implement empty_like for the class"
                ) from error
            value = copy.deepcopy(param).detach()
        shards = Shards.of(fqn, value) if describes_itself(value) else None
        if shards is None or shards.boxes != tuple(boxes) or value.dtype != dtype:
            raise WrapperError(
                f"{fqn}: torch.empty_like() of this {type(param).__name__} gives a tensor with other shards, or of another "
                "dtype, so no state value can be made for the parameter: implement empty_like for the class"
            )
        shards.fill(torch.cat([flatten(tensor) for tensor in tensors]) if tensors else torch.empty(0, dtype=dtype))
        return value


def _sharded_tensor(
    module: Any, param: Any, boxes: Sequence[Box], tensors: list[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    by_box = dict(zip(boxes, tensors, strict=True))
    metadata = copy.deepcopy(param.metadata())
    metadata.tensor_properties.dtype, metadata.tensor_properties.requires_grad = dtype, False
    shards = [
        module.Shard(
            by_box[box] if (box := _box(shard.metadata)).numel else shard.tensor.detach().to(dtype), shard.metadata
        )
        for shard in param.local_shards()
    ]
    sharded_tensor: torch.Tensor = module.ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=param._process_group
    )
    return sharded_tensor
