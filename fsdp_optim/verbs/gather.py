"""Gather: from the live wrapper to every parameter whole, on one rank or on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import RankError, StateError, counted_noun
from fsdp_optim.layout import Layout, Placement
from fsdp_optim.memory import dtype_named, empty
from fsdp_optim.plan import Copy, plan
from fsdp_optim.state.full import FullDict, KeyBy, assemble
from fsdp_optim.state.local import LocalParam, Optimizers
from fsdp_optim.state.packed import LocalId
from fsdp_optim.state.picture import Param, Picture
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.callers import Callers
from fsdp_optim.transport.collective import Failure, Item, exchange
from fsdp_optim.verbs.asked import Asked, check_one_of, check_rank
from fsdp_optim.verbs.call import Local, Options, calling, log_summary, meet, read_local
from fsdp_optim.verbs.opaque import gather_opaque

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class GatherOptions(Asked):
    """What gather and iterate are asked for."""

    call: Options
    recipient_rank: int | None = 0
    key_by: KeyBy = "id"

    def validate(self) -> None:
        super().validate()
        check_one_of("key_by", self.key_by, ("id", "name"))
        if self.recipient_rank is not None:
            check_rank("recipient_rank", self.recipient_rank)


@dataclass(frozen=True)
class Gathering:
    """A gather that all ranks have agreed on, not yet begun."""

    callers: Callers
    local: Local
    picture: Picture
    recipients: tuple[int, ...]

    @property
    def receives(self) -> bool:
        return self.callers.rank in self.recipients


def begin(reader: ModelReader, callers: Callers, optim: Optimizers, options: GatherOptions) -> Gathering:
    """Meet the other ranks and find out what there is to gather."""
    recipient_rank = options.recipient_rank
    alone = not reader.is_wrapped and len(callers.ranks) == 1

    def read() -> Local:
        local = read_local(
            reader, optim, options.call, callers.ranks
        )  # says more where the model is part of a wrapped one
        if recipient_rank is not None and recipient_rank not in callers.ranks:
            if alone and _is_rank(recipient_rank):
                raise RankError(
                    f"recipient_rank is {recipient_rank}, and nothing in this model tells that rank {recipient_rank} shares "
                    f"it, so the state of rank {callers.rank} would be dropped: give process_group=, the ranks that share the "
                    "model, or recipient_rank=None, which gives each rank its own state"
                )
            raise RankError(
                f"recipient_rank {recipient_rank} is not one of the ranks {list(callers.ranks)} that share this model; give "
                "one of these, or None for all of them"
            )
        return local

    mismatch = options.call.on_replica_mismatch
    local, picture = meet(callers, read, options, with_state=True, on_replica_mismatch=mismatch)
    recipients = callers.ranks if recipient_rank is None else (recipient_rank,)
    if options.key_by == "id":
        _check_ids(picture, recipients)
    return Gathering(callers, local, picture, recipients)


def _check_ids(picture: Picture, recipients: Sequence[int]) -> None:
    """Refuse ids where no order can be right; the same on all ranks."""
    each = recipients if any(param.variants for param in picture.params.values()) else recipients[:1]
    for rank in each:
        reason = picture.as_seen_by(rank).unknown_order
        if reason:
            raise StateError(f"{reason}, and ids would name other parameters' state: give key_by='name'")


def _is_rank(rank: int | None) -> bool:
    return rank is not None and dist.is_initialized() and 0 <= rank < dist.get_world_size()


def gather(model: nn.Module, optim: Optimizers, options: GatherOptions) -> FullDict | None:
    """The full dict on recipients, None elsewhere."""
    with calling("gather_full_optim_state_dict", [model], options, options.call) as ((reader,), callers):
        gathering = begin(reader, callers, optim, options)
        failure = Failure()
        values = move(gathering, tuple(gathering.picture.params.values()), failure)
        full = None
        if gathering.receives and failure.error is None:
            full = assemble(gathering.picture, values, gathering.local.optim, callers.rank, options.key_by)
        if failure.error is None:
            log_summary("gathered", {f: p.summary for f, p in gathering.picture.params.items()}, values)
        agree(callers, "gathered", failure.error, fatal=failure.fatal)
    return full


def move(gathering: Gathering, params: Sequence[Param], failure: Failure) -> dict[tuple[str, str], Any]:
    """Move the state of some parameters to the recipients: there the values, by (FQN, name), elsewhere nothing.

    All but scalars, which everyone knows already.
    """
    parts = [part for param in params for part in _parts(param, gathering.recipients)]
    return _move_parts(gathering, parts, failure)


Needs = Callable[[str], tuple[tuple[int, ...], Mapping[int, tuple[int, ...]]]]
"""FQN -> the ranks that need its values, and by shard those that need the opaque values of that shard, where not all do."""


def move_odd(gathering: Gathering, needs: Needs, failure: Failure) -> dict[tuple[str, str], Any]:
    """As `move`, of all parameters, but only values that are not cut like their parameter, to the ranks that need them."""
    parts = [
        replace(part, targets=targets, needs=by_shard)
        for fqn, param in gathering.picture.params.items()
        for targets, by_shard in [needs(fqn)]
        for part in _parts(param, gathering.recipients)
        if targets
    ]
    odd = [part if part.odd else replace(part, dtypes={}) for part in parts if part.odd or part.opaque]
    return _move_parts(gathering, odd, failure) if odd else {}


def _move_parts(gathering: Gathering, parts: Sequence[Part], failure: Failure) -> dict[tuple[str, str], Any]:
    rank = gathering.callers.rank
    copies = _copies(parts, rank)
    sources = Sources(gathering.local)
    values: dict[tuple[str, str], Any] = {}
    items = []
    for part, mine in zip(parts, copies, strict=True):
        filled = sum(copy.numel for copy in mine if copy.target_rank == rank)
        if rank in part.targets and filled != part.placement.numel:  # memory comes uninitialised
            raise StateError(
                f"{part.fqn}: {filled} of its {counted_noun(part.placement.numel, 'element')} were planned for rank {rank}"
            )
        for name, dtype in part.dtypes.items():
            source = target = None
            try:
                if rank in part.targets:
                    whole = empty(part.placement.shape, dtype, _CPU)
                    values[part.fqn, name] = whole
                    target = whole.view(-1)
                if any(copy.source_rank == rank for copy in mine):
                    source = sources.flat(part.fqn, name)
            except Exception as error:
                failure.note(error)
            items.append(Item(mine, dtype, source, target))
    exchange(gathering.callers, items, failure)
    if any(part.opaque for part in parts):
        values.update(gather_opaque(gathering.callers, gathering.local, parts, failure))
    return values


@dataclass(frozen=True)
class Part:
    """State values of one parameter that share a placement, on their way to some recipients."""

    fqn: str
    placement: Placement
    dtypes: Mapping[str, torch.dtype]
    targets: tuple[int, ...]
    opaque: tuple[str, ...] = ()
    odd: bool = False  # the placement is the value's own, not the parameter's
    needs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by shard, which targets need its opaque values


def _parts(param: Param, recipients: tuple[int, ...]) -> list[Part]:
    seen = [(param.as_seen_by(rank), (rank,)) for rank in recipients] if param.variants else [(param, recipients)]
    parts = []
    for one, targets in seen:
        if one is None or one.summary is None or not targets:
            continue
        opaque = tuple(name for name, _ in one.summary.opaque)
        parts.append(Part(one.fqn, one.placement, one.summary.dtypes, targets, opaque))
        for name, (dtype, placement) in one.summary.placed:
            parts.append(Part(one.fqn, placement, {name: dtype_named(dtype)}, targets, odd=True))
    return parts


def _copies(parts: Sequence[Part], rank: int) -> list[list[Copy]]:
    """This rank's copies of every part, planned together for parts that go to the same recipients.

    Parts that lie alike, as those of equal layers do, share one plan; where there are replicas to choose from, each has its own.
    """
    found: list[list[Copy]] = [[] for _ in parts]
    for targets, indices in _by_targets(parts).items():
        alike: dict[Placement, list[int]] = {}
        for index in indices:
            alike.setdefault(parts[index].placement, []).append(index)
        source = Layout(
            {
                str(index): placement
                for placement, same in alike.items()
                for index in (same[:1] if _has_one_holder(placement) else same)
            }
        )
        for copy in plan(source, source.whole_on(targets), rank=rank):
            found[int(copy.fqn)].append(copy)
        for placement, same in alike.items():
            if _has_one_holder(placement):
                for index in same[1:]:
                    found[index] = found[same[0]]
    return found


def _by_targets(parts: Sequence[Part]) -> dict[tuple[int, ...], list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for index, part in enumerate(parts):
        found.setdefault(part.targets, []).append(index)
    return found


def _has_one_holder(placement: Placement) -> bool:
    """Whether no shard has replicas, so that nothing beside it decides who sends."""
    return not placement.num_shards or len(placement.holders(0)) == 1


class Sources:
    """This rank's local tensors, flattened once per live parameter and value, not once per original."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._flat: dict[tuple[LocalId, str], torch.Tensor] = {}

    def flat(self, fqn: str, name: str) -> torch.Tensor:
        param: LocalParam = self._local.by_fqn[fqn]
        key = (param.local_id, name)
        if key not in self._flat:
            if param.state is None:
                raise RankError(f"{fqn}: its state went away while it was gathered")
            flat = param.handle.local(param.state[name])
            self._flat[key] = flat if flat is not None else param.handle.placed_local(param.state[name])
        return self._flat[key]
