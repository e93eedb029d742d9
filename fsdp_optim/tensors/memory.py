"""Memory for tensors, the names of their dtypes, and the copies of a plan inside one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import compress
from pickle import PicklingError
from typing import Any, TypeVar

import torch

from fsdp_optim.errors import StateError
from fsdp_optim.plan import Copy
from fsdp_optim.tensors.rearranged import rearrange
from fsdp_optim.tensors.transposed import copy_transposed

T = TypeVar("T")


@dataclass(frozen=True)
class Budget:
    """Bytes that a rank may hold for temporary buffers. `use`: the purpose of the buffers, for readers of the code."""

    nbytes: int
    use: str = "one call"

    def share(self, num: int, use: str) -> Budget:
        """Return the equal share of each of `num` uses that need memory at the same time."""
        return Budget(max(self.nbytes // num, 1), use)

    def num_fitting(self, nbytes: int) -> int:
        """Return how many uses of `nbytes` each have room at the same time."""
        return self.nbytes // nbytes


def in_batches(
    items: Iterable[T],
    nbytes_of: Callable[[T], int],
    most_nbytes: int,
    joins: Callable[[T, T], bool] | None = None,
) -> Iterator[list[T]]:
    """Yield items in their order, in batches of at most `most_nbytes`; a larger item is a batch by itself.

    `joins(last, item)`: whether an item may join the batch that ends with `last`; None: every item may.
    """
    batch: list[T] = []
    total = 0
    for item in items:
        nbytes = nbytes_of(item)
        if batch and (total + nbytes > most_nbytes or (joins is not None and not joins(batch[-1], item))):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes
    if batch:
        yield batch


_PIECE_NBYTES = 2 << 20


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors as if the caller had no inference mode and no default device.

    A tensor that is made in inference mode cannot be changed outside of inference mode. A tensor that a third-party class
    makes without a device, in a copy for example, would go to the default device.
    """
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `float32`."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=64)
def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that has a name such as `float32`; the inverse of `dtype_name`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype of torch {torch.__version__}")
    return dtype


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(value: object) -> bool:
    """Return whether a value is a torch.Tensor or Parameter, and no other subclass, so that its bytes are all of it."""
    return type(value) in _PLAIN


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the local tensors of a ShardedTensor, which supports few operations by itself; any other tensor alone."""
    shards = getattr(value, "local_shards", None)
    return tuple(getattr(shard, "tensor", shard) for shard in shards()) if callable(shards) else (value,)


def flatten(value: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as a contiguous 1-D tensor: a view where the tensor is contiguous, else a copy."""
    if type(value) is not torch.Tensor or value.requires_grad or value.is_conj() or value.is_neg():
        value = _resolved(value)
    elif value.dim() == 1 and value.stride(0) == 1:
        return value
    value = value.contiguous()
    return _in_a_row(value if value.dim() == 1 else value.view(-1))


def _in_a_row(flat: torch.Tensor) -> torch.Tensor:
    """Return a contiguous 1-D tensor with the stride 1: without it, a tensor of one element cannot be viewed as bytes."""
    return flat if flat.stride(0) == 1 else flat.as_strided((len(flat),), (1,))


def bytes_in_memory(value: torch.Tensor) -> bytes:
    """Return the elements of a tensor on the CPU in row-major order, as bytes."""
    data: bytes = flatten(value).view(torch.uint8).numpy().tobytes()
    return data


def _resolved(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose bytes are its elements: torch conjugates and negates some views lazily."""
    return value.detach().resolve_conj().resolve_neg()


def pieces(value: torch.Tensor, most_numel: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the elements of a tensor in row-major order, as pairs (index of the first element, 1-D tensor).

    A contiguous tensor gives one view of all elements, any other tensor gives copies of at most `most_numel` elements.
    """
    value = _resolved(value)
    if value.is_contiguous():
        yield 0, _in_a_row(value.view(-1))
        return
    for start in range(0, value.numel(), most_numel):
        piece = torch.empty(min(most_numel, value.numel() - start), dtype=value.dtype, device=value.device)
        _copy_elements(value, start, piece)
        yield start, piece


def bytes_in_pieces(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a dense tensor in row-major order, as 1-D byte tensors on the CPU of at most 2 MiB each.

    Tensors of equal shape and dtype are cut into the same pieces, whatever their strides.
    """
    most_numel = max(_PIECE_NBYTES // value.itemsize, 1)
    for _, flat in pieces(value.detach().as_subclass(torch.Tensor), most_numel):
        for start in range(0, len(flat), most_numel):
            yield flat[start : start + most_numel].cpu().view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype, on any devices, have the same bits."""
    return all(torch.equal(*pair) for pair in zip(bytes_in_pieces(a), bytes_in_pieces(b), strict=True))


def flat_slice(value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements [start, stop) of a tensor in row-major order, 1-D: a view of a contiguous tensor, else a copy."""
    if type(value) is not torch.Tensor or value.requires_grad or value.is_conj() or value.is_neg():
        value = _resolved(value)
    elif value.dim() == 1 and not start and stop == value.numel() and value.stride(0) == 1:
        return value  # nearly always
    if value.is_contiguous():
        return _in_a_row(value.view(-1))[start:stop]
    piece = torch.empty(stop - start, dtype=value.dtype, device=value.device)
    _copy_elements(value, start, piece)
    return piece


def _copy_elements(value: torch.Tensor, start: int, piece: torch.Tensor) -> None:
    """Fill `piece` with elements of `value` from index `start` on: part of a row, then full rows, then part of a row."""
    if value.dim() == 1:
        piece.copy_(value[start : start + len(piece)])
        return
    width = value[0].numel()
    row, at = divmod(start, width)
    filled = 0
    if at:
        filled = min(width - at, len(piece))
        _copy_elements(value[row], at, piece[:filled])
        row += 1
    rows = (len(piece) - filled) // width
    if rows:
        piece[filled : filled + rows * width].view(rows, *value.shape[1:]).copy_(value[row : row + rows])
        filled += rows * width
    if filled < len(piece):
        _copy_elements(value[row + rows], 0, piece[filled:])


def copy_in_memory(copies: Iterable[Copy], source: torch.Tensor, target: torch.Tensor) -> None:
    """Execute copies between two 1-D local tensors."""
    for copy in copies:
        target_view(copy, target).copy_(source_view(copy, source))


def copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first one: in one call of torch, but for large transposed ones."""
    at_once = [pair for pair in pairs if pair[0].dim() < 2 or not copy_transposed(*pair)]
    if at_once:
        targets, sources = zip(*at_once, strict=True)
        torch._foreach_copy_(targets, sources)


def source_view(copy: Copy, flat: torch.Tensor) -> torch.Tensor:
    """Return the elements of a 1-D local tensor that a copy reads."""
    return _strided_view(flat, copy.sizes, copy.source_offset, copy.source_strides)


def target_view(copy: Copy, flat: torch.Tensor) -> torch.Tensor:
    """Return the elements of a 1-D local tensor that a copy writes."""
    return _strided_view(flat, copy.sizes, copy.target_offset, copy.target_strides)


def _strided_view(flat: torch.Tensor, sizes: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> torch.Tensor:
    if strides == (1,):
        return flat.narrow(0, offset, sizes[0])
    return flat.as_strided(sizes, strides, flat.storage_offset() + offset)


def in_shape(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a contiguous tensor in another shape. `view` takes numbers in a third of the time that a tuple takes."""
    if flat.shape == shape:
        return flat
    return flat.view(*shape) if shape else flat.view(shape)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into the target at its place, without autograd, in one call of torch.

    That call does not take targets whose elements are conjugated or negated when they are read: they are filled one by one.
    """
    are_lazy = [target.is_conj() or target.is_neg() for target in targets]
    with torch.no_grad():
        for target, source in zip(compress(targets, are_lazy), compress(sources, are_lazy), strict=True):
            target.copy_(source)
        if any(are_lazy):
            are_plain = [not is_lazy for is_lazy in are_lazy]
            targets, sources = list(compress(targets, are_plain)), list(compress(sources, are_plain))
        if targets:
            torch._foreach_copy_(targets, sources)


def laid_out_like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor, in row-major order, as a tensor of the shape and memory order of `like`.

    The result shares the memory of `flat`, whose elements are rearranged where `like` is not contiguous: fused optimizers pair
    the elements of a parameter and of its state by their order in memory (channels_last, transposed parameters).
    """
    value = in_shape(flat, like.shape)
    if like.stride() == value.stride():
        return value  # nearly always
    strides = torch.empty_like(like, device="meta", memory_format=torch.preserve_format).stride()
    if strides == value.stride():
        return value
    rearrange(flat, like.shape, sorted(range(like.dim()), key=lambda dim: -strides[dim]))
    return flat.as_strided(like.shape, strides)


def detached_copy(value: Any) -> Any:
    """Return a copy that shares no memory with the value. Plain tensors are copied to the CPU, also inside containers."""
    if is_plain(value):
        return value.detach().to("cpu", copy=True)
    if type(value) is dict:
        return {key: detached_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(detached_copy, value))
    if isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "to_local"):
        return _own_dtensor(value)
    try:
        return deepcopy(value)
    except NotImplementedError:  # a tensor subclass without clone(), as torchao has them
        if not hasattr(value, "__tensor_flatten__"):
            raise
        names, context = value.__tensor_flatten__()
        parts = {name: detached_copy(getattr(value, name)) for name in names}
        return type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())


def _own_dtensor(value: Any) -> Any:
    """Return a local copy of a DTensor. A deepcopy of a partial DTensor would call a collective, which others may not make."""
    with torch.no_grad():
        local = value.to_local().clone()
    of_all = {"shape": value.shape, "stride": value.stride()}
    return type(value).from_local(local, value.device_mesh, value.placements, run_check=False, **of_all)


def named_copy(where: str, value: Any) -> Any:
    """Return a `detached_copy` of a value. Raises StateError that names a value which cannot be copied."""
    return made_of(value, detached_copy, f"{where}: is a {type(value).__name__} that cannot be copied")


def made_of(value: Any, make: Callable[[Any], T], refusal: str) -> T:
    """Return `make(value)`, which copies or pickles. Raises StateError that begins with `refusal` where the value refuses it."""
    try:
        return make(value)
    except (TypeError, AttributeError, PicklingError) as error:  # by which Python says that it cannot be done
        raise StateError(f"{refusal}: {type(error).__name__}: {error}: keep tensors and plain values there") from error


def map_container(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a dict, list or tuple with `change` applied to its items; any other value unchanged."""
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    return value
