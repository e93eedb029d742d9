"""Gather: from a live optimizer to unsharded values of every parameter, on one rank or on all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import RankError, StateError
from fsdp_optim.layout import Placement, Ranks
from fsdp_optim.move import StateValue, move
from fsdp_optim.options import GatherArguments, Model
from fsdp_optim.state.dicts.full import FullDict
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.merged.gathered import assemble
from fsdp_optim.state.merged.global_state import GlobalState, Param
from fsdp_optim.tensors.memory import dtype_named
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local, agree_on_state, collective_call, log_summary, read_local
from fsdp_optim.verbs.ends import LiveEnd, WholeEnd
from fsdp_optim.verbs.gather_opaque import OpaqueValues, gather_opaque
from fsdp_optim.verbs.replicas import compare_unsharded, synchronize


@dataclass(frozen=True)
class Gathering:
    """A gather that all ranks have agreed on, before any value moves."""

    group: RankGroup
    local: Local
    global_state: GlobalState
    recipients: tuple[int, ...]

    @property
    def receives(self) -> bool:
        return self.group.rank in self.recipients

    def recipients_of(self, placement: Placement, param: Param) -> tuple[int, ...]:
        """Return the recipients of a parameter's values in this placement. If ranks hold variants, each gets its own variant."""
        return tuple(rank for rank in self.recipients if not param.variants or rank in placement.ranks)


def begin(reader: ModelReader, group: RankGroup, optim: Optimizers, options: GatherArguments) -> Gathering:
    """Agree with the other ranks on the values to gather."""
    recipient_rank = options.recipient_rank
    alone = not reader.is_wrapped and len(group.ranks) == 1

    def read() -> Local:
        local = read_local(
            reader, optim, options.call, group.ranks
        )  # this error explains more if the model is a part of a wrapped model
        if recipient_rank is not None and recipient_rank not in group.ranks:
            if alone and 0 <= recipient_rank < group.world.size:
                raise RankError(
                    f"recipient_rank is {recipient_rank}, and nothing in this model shows that rank {recipient_rank} shares "
                    f"it, so the state of rank {group.rank} would be lost: give process_group=, the ranks that share the "
                    "model, or recipient_rank=None, which gives each rank its own state"
                )
            raise RankError(
                f"recipient_rank {recipient_rank} is not one of the ranks {list(group.ranks)} that share this model; give "
                "one of these, or None for all of them"
            )
        return local

    synchronize(group, optim)
    mismatch = options.call.on_replica_mismatch
    local, global_state = agree_on_state(group, read, options, with_state=True, on_replica_mismatch=mismatch)
    global_state = compare_unsharded(group, local, global_state, mismatch)
    recipients = group.ranks if recipient_rank is None else (recipient_rank,)
    if options.key_by == "id":
        _check_ids(global_state, recipients)
    return Gathering(group, local, global_state, recipients)


def _check_ids(global_state: GlobalState, recipients: Sequence[int]) -> None:
    """Raise StateError, on all ranks, if no order of ids can be right."""
    each = recipients if any(param.variants for param in global_state.params.values()) else recipients[:1]
    for rank in each:
        reason = global_state.as_seen_by(rank).unknown_order
        if reason:
            raise StateError(f"{reason}, and ids would name other parameters' state: give key_by='name'")


def gather(model: Model, optim: Optimizers, options: GatherArguments) -> FullDict | None:
    """Return the full dict on recipients, None elsewhere."""
    begun = time.monotonic()
    with collective_call("gather_full_optim_state_dict", [model], options, options.call) as ((reader,), group):
        gathering = begin(reader, group, optim, options)
        failure = Failure()
        values = move_state(gathering, tuple(gathering.global_state.params.values()), failure)
        full = None
        if gathering.receives and failure.error is None:
            full = assemble(gathering.global_state, values, gathering.local.optim, group.rank, options.key_by)
        if failure.error is None and group.rank == gathering.recipients[0]:
            summaries = {fqn: param.summary for fqn, param in gathering.global_state.params.items()}
            log_summary("gathered", summaries, values, begun, group.rank)
        agree(group, "gathered", failure.error, fatal=failure.fatal)
    return full


def move_state(gathering: Gathering, params: Sequence[Param], failure: Failure) -> dict[tuple[str, str], Any]:
    """Move the state of some parameters to the recipients. Returns the values by (FQN, name) there, and nothing elsewhere.

    Scalars are left out, because all ranks know them already.
    """
    values: list[StateValue] = []
    opaque: list[OpaqueValues] = []
    for param in params:
        for variant in _variants(param, gathering.recipients) if param.variants else (param,):
            if variant.summary is not None:
                values += _values_of(variant)
                if variant.summary.opaque:
                    opaque += _opaque_of(variant, gathering.recipients_of(variant.placement, param))
    varied = {param.fqn for param in params if param.variants}

    def ranks_of(value: StateValue) -> Ranks:
        if value.fqn not in varied:
            return gathering.recipients
        return tuple(rank for rank in gathering.recipients if rank in value.placement.ranks)

    return _move(gathering, values, opaque, ranks_of if varied else None, failure)


Needs = Callable[[str], tuple[tuple[int, ...], Mapping[int, tuple[int, ...]]]]
"""A function of an FQN: the ranks that need its values and, if not all need every shard, by shard the ranks that need it."""


def move_unsharded(gathering: Gathering, needs: Needs, failure: Failure) -> dict[tuple[str, str], Any]:
    """Move the values of all parameters that are not cut like their parameter, to the ranks that need them, as `move_state`."""
    values: list[StateValue] = []
    opaque: list[OpaqueValues] = []
    for param in gathering.global_state.params.values():
        targets, by_shard = needs(param.fqn)
        for variant in _variants(param, gathering.recipients) if targets else ():
            values += _placed_of(variant)
            opaque += [replace(values, needs=by_shard) for values in _opaque_of(variant, targets)]
    return _move(gathering, values, opaque, lambda value: needs(value.fqn)[0], failure)


def _move(
    gathering: Gathering,
    values: Sequence[StateValue],
    opaque: Sequence[OpaqueValues],
    ranks_of: Callable[[StateValue], Ranks] | None,
    failure: Failure,
) -> dict[tuple[str, str], Any]:
    group, whole = gathering.group, WholeEnd(gathering.group, gathering.recipients, ranks_of)
    move(values, LiveEnd(gathering.local), whole, group, group.budget, failure)
    return {**whole.made, **gather_opaque(group, gathering.local, opaque, failure)}


def _variants(param: Param, recipients: tuple[int, ...]) -> list[Param]:
    """Return the variants of a parameter that recipients get: the parameter, or one for each group of ranks with recipients."""
    variants = (param.as_seen_by(rank) for rank in recipients) if param.variants else (param,)
    return list({variant.placement: variant for variant in variants if variant is not None}.values())


def _values_of(param: Param) -> list[StateValue]:
    if param.summary is None:
        return []
    fqn, placement = param.fqn, param.placement
    values = [StateValue(fqn, name, dtype_named(dtype), placement) for name, dtype in param.summary.sharded]
    return values + _placed_of(param) if param.summary.placed else values


def _placed_of(param: Param) -> list[StateValue]:
    placed = param.summary.placed if param.summary is not None else ()
    return [StateValue(param.fqn, name, dtype_named(dtype), placement) for name, (dtype, placement) in placed]


def _opaque_of(param: Param, targets: tuple[int, ...]) -> list[OpaqueValues]:
    names = tuple(name for name, _ in param.summary.opaque) if param.summary is not None else ()
    return [OpaqueValues(param.fqn, names, param.placement, targets)] if names and targets else []
