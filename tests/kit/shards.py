"""Models whose parameters describe their own shards: with torch's classes, and with a tensor class of this kit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.common_op_utils import _register_default_op
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, _sharded_op_impl
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties as Properties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Along
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from kit.local_parts import LOCAL_ACCESS, LocalAccess

Offsets = tuple[int, ...]


def boxes_of(shape: Sequence[int], number: int) -> dict[int, list[tuple[Offsets, Offsets]]]:
    """(offsets, sizes) of every rank: uneven, two on the first rank, and none on the last one, of every second tensor."""
    ranks = dist.get_world_size()
    holders = ranks - 1 if ranks > 1 and number % 2 else ranks
    dim = number % len(shape) if shape else 0
    boxes: dict[int, list[tuple[Offsets, Offsets]]] = {rank: [] for rank in range(ranks)}
    size = shape[dim]
    cuts = sorted({0, size, *(min(size, 1 + part * size // (holders + 1)) for part in range(1, holders + 1))})
    for place, (start, stop) in enumerate(itertools.pairwise(cuts)):
        offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
        sizes = tuple(stop - start if d == dim else n for d, n in enumerate(shape))
        boxes[place % holders].append((offsets, sizes))
    return boxes


def cut(whole: Tensor, offsets: Offsets, sizes: Offsets) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole.detach().clone().contiguous()


def joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A single shard, or several shards joined into one tensor, as the shape of a gradient."""
    if len(tensors) == 1:
        return tensors[0].detach()
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0, dtype=dtype)


def put(local: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write back into several shards, of which `joined` is a copy."""
    for part, tensor in zip(parted(local, tensors), tensors, strict=True):
        tensor.detach().copy_(part)


def parted(local: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(local.reshape(-1), [tensor.numel() for tensor in tensors]) if tensors else ()
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class ChunkedAccess(LocalAccess):
    @staticmethod
    def local_of(param: Any) -> Tensor:
        return joined(param.parts, param.dtype)

    @staticmethod
    def like(local: Tensor, param: Any) -> Tensor:
        return Chunked(parted(local, param.parts), param.offsets, tuple(param.shape), local.dtype)

    @staticmethod
    def put(local: Tensor, param: Any) -> None:
        put(local, param.parts)


class Chunked(torch.Tensor):
    """Some boxes of a tensor, which knows the boxes of its own rank only, and no other ranks."""

    parts: list[Tensor]
    offsets: list[Offsets]

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], offsets: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)  # type: ignore[attr-defined]
        made.parts, made.offsets = list(parts), list(offsets)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.empty_like.default):
            raise NotImplementedError(f"{func} of a Chunked")
        (chunked_tensor, *_), kwargs = args, kwargs or {}
        parts = [func(part, **kwargs) for part in chunked_tensor.parts]
        return cls(parts, chunked_tensor.offsets, chunked_tensor.shape, kwargs.get("dtype") or chunked_tensor.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Chunked({self.offsets})"

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)(copy.deepcopy(self.parts), self.offsets, self.shape, self.dtype)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(o), part.shape) for o, part in zip(self.offsets, self.parts, strict=True)
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, Properties(), torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(p for o, p in zip(self.offsets, self.parts, strict=True) if tuple(index.offset) == tuple(o))


class ShardedAccess(LocalAccess):
    @staticmethod
    def local_of(param: Any) -> Tensor:
        return joined([shard.tensor for shard in param.local_shards()], param.dtype)

    @staticmethod
    def like(local: Tensor, param: Any) -> Tensor:
        shards = param.local_shards()
        parts = parted(local, [shard.tensor for shard in shards])
        made = [Shard(part, shard.metadata) for part, shard in zip(parts, shards, strict=True)]
        metadata = copy.deepcopy(param.metadata())
        metadata.tensor_properties.requires_grad = False
        return ShardedTensor._init_from_local_shards_and_global_metadata(made, metadata)

    @staticmethod
    def put(local: Tensor, param: Any) -> None:
        put(local, [shard.tensor for shard in param.local_shards()])


class InDTensor(LocalAccess):
    @staticmethod
    def put(local: Tensor, param: Any) -> None:
        put(local, param._local_tensor.local_shards())

    @staticmethod
    def local_of(param: Any) -> Tensor:
        return joined(param._local_tensor.local_shards(), param.dtype)

    @staticmethod
    def like(local: Tensor, param: Any) -> Tensor:
        inside = param._local_tensor
        offsets = [tuple(chunk.offsets) for chunk in inside.local_chunks if chunk.sizes.numel()]
        parts = LocalShardsWrapper(parted(local, inside.local_shards()), offsets)
        return DTensor.from_local(
            parts,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=torch.empty(param.shape, device="meta").stride(),
        )


def chunked(param: Tensor, number: int) -> Tensor:
    own_boxes = boxes_of(param.shape, number)[dist.get_rank()]
    return Chunked(
        [cut(param, *box) for box in own_boxes], [offsets for offsets, _ in own_boxes], param.shape, param.dtype
    )


def sharded_tensor(param: Tensor, number: int) -> Tensor:
    boxes = boxes_of(param.shape, number)
    metadata = {
        rank: [ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu") for offsets, sizes in rank_boxes]
        for rank, rank_boxes in boxes.items()
    }
    own_shards = metadata[dist.get_rank()]
    shards = [Shard(cut(param, tuple(m.shard_offsets), tuple(m.shard_sizes)), m) for m in own_shards]
    whole = ShardedTensorMetadata(
        [shard for rank_boxes in metadata.values() for shard in rank_boxes],
        param.shape,
        TensorProperties(dtype=param.dtype),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, whole)


def in_dtensor(param: Tensor, number: int) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own_boxes = boxes_of(param.shape, number)[dist.get_rank()]
    local = LocalShardsWrapper([cut(param, *box) for box in own_boxes], [offsets for offsets, _ in own_boxes])
    return DTensor.from_local(
        local, mesh, [Along(0)], run_check=False, shape=param.shape, stride=param.contiguous().stride()
    )


def with_params(make: Callable[[Tensor, int], Tensor], model: nn.Module) -> nn.Module:
    """Replace every parameter by the result of `make`."""
    for number, (name, param) in enumerate(list(model.named_parameters())):
        path, _, attribute = name.rpartition(".")
        live = nn.Parameter(make(param.detach(), number), requires_grad=param.requires_grad)
        model.get_submodule(path)._parameters[attribute] = live
    return model


def in_chunks(model: nn.Module) -> nn.Module:
    return with_params(chunked, model)


def in_sharded_tensors(model: nn.Module) -> nn.Module:
    return with_params(sharded_tensor, model)


def in_dtensors_of_shards(model: nn.Module) -> nn.Module:
    return with_params(in_dtensor, model)


SHARDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "chunk lists": in_chunks,
    "ShardedTensor": in_sharded_tensors,
    "DTensor of shards": in_dtensors_of_shards,
}

_register_default_op(torch.Tensor.grad.__set__, _sharded_op_impl)  # type: ignore[attr-defined]  # torch has the getter only

LOCAL_ACCESS[:0] = [
    (lambda param: isinstance(param, Chunked), ChunkedAccess),
    (lambda param: isinstance(param, ShardedTensor), ShardedAccess),
    (lambda param: isinstance(getattr(param, "_local_tensor", None), LocalShardsWrapper), InDTensor),
]
