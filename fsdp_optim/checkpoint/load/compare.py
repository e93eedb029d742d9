"""The check of a load: compare the live model and optimizer with the checkpoint, bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from msgspec import structs

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.casting import castable
from fsdp_optim.checkpoint.common.contents import weights_of
from fsdp_optim.checkpoint.common.trees import key_of
from fsdp_optim.checkpoint.load.reading import CheckpointEnd, StoredValue, elements_in, read_constants, stored_value
from fsdp_optim.checkpoint.load.targets import State, Weights
from fsdp_optim.checkpoint.load.tree_targets import TreeTargets
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import Reader
from fsdp_optim.layout import Boxes, Placement, row_major_strides
from fsdp_optim.layout.views import PlacedPart
from fsdp_optim.move import End, Key, Slice, move
from fsdp_optim.plan import Copy, clip_to_target
from fsdp_optim.state.live.local import LocalParam, Optimizers
from fsdp_optim.state.live.local_dict import opaque_values
from fsdp_optim.state.values.kinds import is_scalar
from fsdp_optim.state.values.same import same
from fsdp_optim.state.values.summary import Scalar
from fsdp_optim.tensors.memory import dtype_name, flat_slice
from fsdp_optim.transport.agree import all_equal, exchange_reports
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local


def check_bitwise(
    reader: ModelReader,
    optim: Optimizers | None,
    group: RankGroup,
    loaded_from: Reader,
    *,
    weights: Weights,
    state: State | None,
    trees: TreeTargets | None,
    options: LoadArguments,
) -> None:
    """Read the complete checkpoint again with verification, and compare it with the live model, optimizer and trees.

    Called by all ranks. Raises CheckpointError on all ranks if an element differs, or if no rank has it.
    """
    failure = Failure()
    values: list[StoredValue] = [*weights.stored_values(), *(state.stored_values() if state is not None else ())]
    if state is not None:
        values = [value for value in values if not value.is_state or value.fqn not in state.fit.missing]
    in_trees = [v for v in trees.stored_values() if key_of(v.fqn) not in trees.of_objects] if trees is not None else []
    target, loaded = _CompareEnd(group.rank, {}, frozenset()), None
    with failure:
        if state is not None and optim is not None:
            loaded = state.kept.read(reader, optim, options.call, group.ranks)
    values = cut_as_live(group, loaded, values, failure)
    with failure:
        checkpoint = loaded_from.verified()
        model = weights_of(reader, group.ranks, options.call)
        live: dict[Key, torch.Tensor | None] = {
            value.key: held_part(model, value) for value in values if not value.is_state
        }
        weights.module_values.check(model.module_values)
        state_cast = state.cast if state is not None else frozenset()
        cast = frozenset(
            value.key
            for value in values
            if (
                (value.fqn, value.name) in state_cast
                if value.is_state
                else is_cast(model, value, castable_with=options.cast)
            )
        )
        if state is not None and loaded is not None:
            live.update((value.key, held_part(loaded, value)) for value in values if value.is_state)
            read_constants(
                checkpoint, [stored for stored in checkpoint.index.optim_tensors.values() if not stored.shape]
            )
            _check_scalars(state, loaded)
            _check_opaque(state, loaded)
            _check_groups(state, loaded, options.keep_hyperparameters)
            _check_other_keys(state, loaded)
        if trees is not None:
            held = {
                value.key: trees.held(value.fqn)
                for value in in_trees
                if value.placement.shard_of(group.rank) is not None
            }
            live |= {value.key: held.get(value.key) for value in in_trees}
            cast |= _cast_trees(held, in_trees, castable_with=options.cast)
        target = _CompareEnd(group.rank, live, cast)
        budget = group.budget.share(
            4, "what the files have, and the live tensors: windows of them, on the host, and during the comparison"
        )
        source = CheckpointEnd(checkpoint, group.rank, budget, as_needed=True, plans=group.world.plans)
        move([*values, *in_trees], source, target, group, budget, failure)
    nbytes_of_ranks = exchange_reports(group, b"%d" % target.nbytes, failure.error)
    total, expected = sum(map(int, nbytes_of_ranks)), sum(value.nbytes for value in (*values, *in_trees))
    if total != expected:
        raise CheckpointError(
            f"{loaded_from.index.where}: {total} of {expected} bytes were found in the live model, optimizer and trees"
        )


def check_trees_alone(loaded_from: Reader, trees: TreeTargets, *, castable: bool) -> None:
    """Do the same on one rank that has loaded trees by itself. No communication."""
    parts = trees.read_alone(loaded_from.verified())
    compared = [part for part in parts if key_of(part.value.fqn) not in trees.of_objects]
    values = [stored_value(part.value) for part in compared]
    held = {value.key: trees.held(value.fqn) for value in values}
    rank = trees.local.view.rank
    _CompareEnd(rank, held, _cast_trees(held, values, castable_with=castable)).drain(compared)


def _cast_trees(
    held: Mapping[Key, torch.Tensor | None], values: Sequence[StoredValue], *, castable_with: bool
) -> frozenset[Key]:
    """Return the tensors of trees that a load has cast. `castable_with`: the `cast` argument of the load."""
    live = ((value, held.get(value.key)) for value in values)
    return frozenset(
        value.key for value, flat in live if castable_with and flat is not None and flat.dtype != value.dtype
    )


def cut_as_live(
    group: RankGroup, loaded: Local | None, values: list[StoredValue], failure: Failure
) -> list[StoredValue]:
    """Return the values with the placements of the live optimizer: a DTensor in the state of a plain parameter has its own cut.

    Called by all ranks, because the DTensors of a rank may be on one of several meshes.
    """
    own_places: dict[Key, Placement] = {}
    with failure:
        for value in values if loaded is not None else ():
            param = loaded.by_fqn.get(value.fqn) if value.is_state and loaded is not None else None
            live = (param.state or {}).get(value.name) if param is not None else None
            where = param.handle.own_place(live) if param is not None else None
            own_places.update({value.key: where} if where is not None else {})
    content = pickle.dumps(own_places) if own_places else b""
    places = dict(own_places)
    if not all_equal(group, "cuts of the state", content, failure.error):
        for report in exchange_reports(group, content):
            for key, where in (pickle.loads(report) if report else {}).items():
                places[key] = places.get(key, where).join(where) or where
    return [structs.replace(value, placement=places[value.key]) if value.key in places else value for value in values]


@dataclass
class _CompareEnd(End):
    """The target of the check: compares the arriving elements with the live ones.

    `live`: this rank's part of each value in memory, None if it has none. `cast`: the values that the load has cast. `nbytes`:
    the bytes compared so far; of several replicas, only the first rank counts its bytes.
    """

    rank: int
    live: Mapping[Key, torch.Tensor | None]
    cast: frozenset[Key]
    nbytes: int = 0

    is_stored = True

    def drain(self, parts: Sequence[Slice]) -> None:
        for part in parts:
            held, shard = self.live[part.value.key], part.cut.shard_of(self.rank)
            if held is None or part.flat is None or shard is None:
                continue
            if held.dtype != part.value.dtype and part.value.key not in self.cast:
                raise CheckpointError(
                    f"{part.value.fqn}: {part.value.name} is {dtype_name(held.dtype)} in the live model or optimizer, "
                    f"but was saved as {dtype_name(part.value.dtype)}"
                )
            live = flat_slice(held, part.start, part.start + part.flat.numel()).cpu()
            mask = _mask_of(part.cut, shard, part.start, part.flat.numel())
            differs = _first_difference(live, part.flat, mask)
            if differs is not None:
                self._refuse(part, part.start + differs)
            if part.cut.holders(shard)[0] == self.rank:
                self.nbytes += part.flat.nbytes if mask is None else int(mask.sum()) * part.flat.itemsize

    def _refuse(self, part: Slice, index: int) -> NoReturn:
        """Raise CheckpointError for the element at `index` of this rank's part."""
        value, stored = part.value, stored_value(part.value).stored
        storage_rank, offset, _, _ = next(elements_in(stored.placement, part.cut, self.rank, index, 1))
        file, start = stored.place_on(storage_rank)
        where = (
            f"element {offset}"
            if part.value.key in self.cast
            else f"byte {start + offset * stored.itemsize} of its data"
        )
        cast = (
            f", cast to {dtype_name(held.dtype)}"
            if (held := self.live[value.key]) is not None and value.key in self.cast
            else ""
        )
        raise CheckpointError(
            f"{value.fqn}: {value.name} on rank {self.rank} differs from {file}{cast}: the first difference is at {where}"
        )


def _mask_of(cut: Placement, shard: int, start: int, numel: int) -> torch.Tensor | None:
    """Return which elements of a window of a local tensor are of the value; None where all are.

    Between the elements of a part of a fused parameter lie those of other parts.
    """
    blocks = cut.blocks(shard) if isinstance(cut, (PlacedPart, Boxes)) else ()
    if all(block.strides is None for block in blocks) and len(blocks) < 2:
        return None
    mask = torch.zeros(numel, dtype=torch.bool)
    for block in blocks:
        sizes, strides = block.box.sizes or (1,), block.local_strides or (1,)
        every = Copy(0, 0, sizes, 0, row_major_strides(sizes), block.offset, strides)
        for piece in clip_to_target(every, start, start + numel):
            mask.as_strided(piece.sizes, piece.target_strides, piece.target_offset).fill_(True)
    return mask


def _first_difference(live: torch.Tensor, saved: torch.Tensor, mask: torch.Tensor | None) -> int | None:
    """Return the index of the first element that differs in any bit or, after a cast, in its value; None if there is none.

    `mask`: the elements that are compared; None: all of them.
    """
    if live.dtype == saved.dtype:
        a, b = (flat.contiguous().view(torch.uint8) for flat in (live, saved))
        if torch.equal(a, b):
            return None
        unequal = (a != b).view(-1, live.itemsize).any(1)
    else:
        cast = saved.to(live.dtype)
        unequal = (live != cast) & ~(live.isnan() & cast.isnan())
    if mask is not None:
        unequal &= mask
    index = unequal.nonzero()
    return int(index[0]) if len(index) else None


def held_part(local: Local, value: StoredValue) -> torch.Tensor | None:
    """Return this rank's part of a value in memory; None if it has none, or no plain tensor."""
    param = _param_of(local, value)
    live = (param.state or {})[value.name] if param is not None else None
    if param is None or live is None:
        return None
    return param.handle.held(live) if param.handle.own_place(live) is None else param.handle.placed_local(live)


def _param_of(local: Local, value: StoredValue) -> LocalParam | None:
    """Return the live parameter that has a value on this rank; None if no parameter has elements of it here."""
    param = local.by_fqn.get(value.fqn)
    if param is None or param.handle.skipped or value.placement.shard_of(local.view.rank) is None:
        return None
    if param.state is None or value.name not in param.state:
        raise CheckpointError(f"{value.fqn}: {value.name} was loaded, but is not in the live optimizer")
    return param


def is_cast(local: Local, value: StoredValue, *, castable_with: bool) -> bool:
    """Return whether a load may and did cast a weight. `castable_with`: the `cast` argument of the load."""
    param = _param_of(local, value)
    if param is None or param.handle.weights_dtype == value.dtype:
        return False
    return castable(param.handle, value.stored.dtype, cast=castable_with)


def _check_scalars(state: State, loaded: Local) -> None:
    for fqn, param in loaded.by_fqn.items():
        is_checked = fqn not in state.fit.missing and not param.handle.skipped
        for name, value in state.full.state.get(fqn, {}).items() if is_checked else ():
            if is_scalar(value) and not (isinstance(value, torch.Tensor) and value.is_meta):
                live = (param.state or {}).get(name)
                if Scalar.of(live) != Scalar.of(value):
                    raise CheckpointError(f"{fqn}: {name} is {live!r} in the live optimizer, but {value!r} was saved")


def _check_opaque(state: State, loaded: Local) -> None:
    """Compare opaque values with the values that the checkpoint gives for this rank."""
    for param, summary in state.load_plan.receiving:
        fqn = param.named.fqns[0]
        if not state.fit.missing or fqn not in state.fit.missing:
            expected = opaque_values(param, summary, lambda fqn, name: state.full.state[fqn][name], loaded.view.rank)
            live = loaded.by_fqn[fqn].state or {}
            for name, value in expected.items():
                if name not in live or not same(live[name], value):
                    raise CheckpointError(f"{fqn}: {name} in the live optimizer differs from the saved value")


def _check_groups(state: State, loaded: Local, keep: Sequence[str]) -> None:
    """Compare the hyperparameters of every live group."""
    saved = {fqn: hyper for hyper, fqns in state.full.groups for fqn in fqns}
    for fqn, param in loaded.by_fqn.items():
        live = loaded.optim.groups[param.group_index]
        for key, value in saved.get(fqn, {}).items():
            if key not in keep and (key not in live or not same(live[key], value)):
                raise CheckpointError(
                    f"{fqn}: {key} of its group is {live.get(key)!r} in the live optimizer, but {value!r} was saved"
                )


def _check_other_keys(state: State, loaded: Local) -> None:
    """Compare the other keys of the optimizer's own dict."""
    for key, value in state.full.other_keys.items():
        if key in loaded.optim.other_keys and not same(loaded.optim.other_keys[key], value):
            raise CheckpointError(
                f"{key} is {loaded.optim.other_keys[key]!r} in the live optimizer, but {value!r} was saved"
            )
