"""Declared slices: a rank's parameter that is a part of a larger parameter, such as its experts in a stack of all experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import Struct, structs
from torch import nn

from fsdp_optim.adapters.tree import ModuleTree
from fsdp_optim.arguments import is_integer
from fsdp_optim.errors import WrapperError
from fsdp_optim.layout import Block, Box, Boxes, Placement, Shape, Whole
from fsdp_optim.view import Handle

_DECLARED = "_fsdp_optim_slices"


class DeclaredSlice(Struct, frozen=True):
    """Where a parameter of this rank lies in the global parameter."""

    global_shape: Shape
    offset: Shape


def declare(module: nn.Module, name: str, global_shape: Sequence[int], offset: Sequence[int]) -> None:
    """Note in a module where one of its parameters lies in a larger parameter. Raises WrapperError for an impossible slice."""
    if not isinstance(module, nn.Module) or not isinstance(name, str):
        raise WrapperError(
            f"declare_slice takes a module and the name of a parameter in it, not a {type(module).__name__} and {name!r}"
        )
    numbers = {"global_shape": global_shape, "offset": offset}
    for what, given in numbers.items():
        if not isinstance(given, (list, tuple)) or not all(is_integer(number) and number >= 0 for number in given):
            raise WrapperError(f"{name}: {what} must be integers of at least 0, one for each dimension, not {given!r}")
    declared_slice = DeclaredSlice(tuple(map(int, global_shape)), tuple(map(int, offset)))
    param = module._parameters.get(name)
    if len(declared_slice.offset) != len(declared_slice.global_shape) or any(
        o > n for o, n in zip(declared_slice.offset, declared_slice.global_shape, strict=True)
    ):
        raise WrapperError(
            f"{name}: the offset {list(declared_slice.offset)} is not an index into the shape {list(declared_slice.global_shape)}"
        )
    if param is not None and param.dim() == len(declared_slice.offset):
        _check_inside(name, tuple(param.shape), declared_slice, "")
    declared = getattr(module, _DECLARED, {})
    setattr(module, _DECLARED, {**declared, name: declared_slice})


def has_declared(tree: ModuleTree) -> bool:
    """Return whether a module of the model has declared slices."""
    return any(_DECLARED in module.__dict__ for module in tree.modules)


def as_declared(tree: ModuleTree, handle: Handle, rank: int) -> Handle:
    """Return the Handle with its declared slices in place of complete parameters."""
    originals, is_declared = [], False
    for original in handle.originals:
        declared = vars(original.module).get(_DECLARED, {}).get(original.attribute)
        if declared is not None:
            fqn = tree.fqn(original.module, original.attribute)
            original, is_declared = (
                structs.replace(original, placement=_in_whole(fqn, original.placement, declared, rank)),
                True,
            )
        originals.append(original)
    if not is_declared:
        return handle
    return replace(handle, originals=tuple(originals), loose=False)


def _in_whole(fqn: str, placement: Placement, declared: DeclaredSlice, rank: int) -> Boxes:
    """Return the Placement in the global parameter of a slice that has `placement`. Other ranks list their own slices."""
    if placement.is_open:
        raise WrapperError(f"{fqn}: this tensor describes its own shards, so it cannot be declared as a slice too")
    _check_inside(fqn, placement.shape, declared, f"on rank {rank} ")
    by_rank: dict[int, tuple[Block, ...]] = {}
    if isinstance(placement, Whole):  # the other ranks may have other slices
        by_rank[rank] = _moved(placement.blocks(0), declared.offset)
    else:
        for shard in range(placement.num_shards):
            blocks = _moved(placement.blocks(shard), declared.offset)
            by_rank.update(dict.fromkeys(placement.holders(shard), blocks))
    return Boxes(declared.global_shape, tuple(sorted(by_rank.items())), is_open=True, apart=True)


def _check_inside(fqn: str, shape: Shape, declared: DeclaredSlice, where: str) -> None:
    whole, offset = declared.global_shape, declared.offset
    if len(shape) != len(whole) or any(o + n > most for o, n, most in zip(offset, shape, whole, strict=True)):
        raise WrapperError(
            f"{fqn}: {where}a slice of shape {list(shape)} at {list(offset)} does not fit into the declared global_shape "
            f"{list(whole)}"
        )


def _moved(blocks: Sequence[Block], offset: Shape) -> tuple[Block, ...]:
    return tuple(
        replace(block, box=Box(tuple(a + b for a, b in zip(block.box.offsets, offset, strict=True)), block.box.sizes))
        for block in blocks
    )
