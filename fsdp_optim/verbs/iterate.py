"""Iterate: gather one parameter after the other, so that no rank ever holds the complete state."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from math import prod
from typing import Any

import torch
from msgspec import Struct

from fsdp_optim.errors import RankError, StateError
from fsdp_optim.options import GatherArguments, Model
from fsdp_optim.state.live.local import LocalParam, Optimizers
from fsdp_optim.state.merged.gathered import values_of
from fsdp_optim.state.merged.global_state import GlobalState, Param
from fsdp_optim.tensors.memory import dtype_named, in_batches, ordinary_tensors, tensors_in
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here
from fsdp_optim.verbs.call import Local, collective_call
from fsdp_optim.verbs.gather import Gathering, begin, move_state

FullParam = tuple[str, dict[str, Any] | None]


def iterate(model: Model, optim: Optimizers, options: GatherArguments) -> Iterator[FullParam]:
    """Yield (FQN, state) for one parameter after the other: the state on recipients, None elsewhere."""
    if world_here().size == 1:
        options.validate()  # raised at once, because no other rank must raise the error too
    return _each_ordinary(_iterate(model, optim, options))


def _each_ordinary(items: Generator[FullParam, None, None]) -> Iterator[FullParam]:
    """Yield the items, which are made in the mode of ordinary tensors; between items the caller's mode applies."""
    with closing(items):
        while True:
            with ordinary_tensors():
                item = next(items, None)
            if item is None:
                return
            yield item


def _iterate(model: Model, optim: Optimizers, options: GatherArguments) -> Generator[FullParam, None, None]:
    with collective_call("iter_full_optim_state", [model], options, options.call) as ((reader,), group):
        gathering = begin(reader, group, optim, options)
        unchanged = _Unchanged(gathering.local)
        batches = list(_batches(gathering.global_state, group.bucket_nbytes))
        for number, batch in enumerate(batches, start=1):
            failure = Failure()
            with failure:
                unchanged.check()
            values = move_state(gathering, batch, failure)
            ready = [(param.fqn, _state_of(param, values, gathering)) for param in batch if failure.error is None]
            agree(group, "moved", failure.error, fatal=failure.fatal)
            while ready:
                unchanged.check(ready[0][0])
                at_end = number == len(batches) and len(ready) == 1
                with _reports_early_stop(group, at_end=at_end), group.turn.suspended():
                    yield ready.pop(0)
        agree(group, "end")  # raises the error of a rank that stopped early, before the next call


@contextmanager
def _reports_early_stop(group: RankGroup, *, at_end: bool) -> Iterator[None]:
    """Inform the other ranks if this rank leaves the loop early, because they would wait for it.

    No error is raised if all ranks leave the loop after the last item.
    """
    try:
        yield
    except GeneratorExit:
        stopped = RankError(f"rank {group.rank} stopped iterating early; every rank must exhaust the iterator")
        with suppress(Exception):  # the other ranks raise it; on this rank the caller chose to stop
            if group.turn.ended_by is not None:
                pass  # the other ranks know that the call is over
            elif at_end:  # the caller got all items, and did not ask for another
                agree(group, "end")
            else:
                agree(group, "stopped", stopped, fatal=True)
        raise


def _state_of(param: Param, tensors: dict[tuple[str, str], Any], gathering: Gathering) -> dict[str, Any] | None:
    if not gathering.receives:
        return None
    seen = param.as_seen_by(gathering.group.rank)
    return values_of(seen, tensors) if seen is not None else {}


def _batches(global_state: GlobalState, nbytes: int) -> Iterator[tuple[Param, ...]]:
    """Return batches of parameters in the order of ids, each of at most `nbytes` bytes or of one parameter."""
    params = (global_state.params[fqn] for fqn in global_state.ids())
    return map(tuple, in_batches(params, _nbytes_of, nbytes))


def _nbytes_of(param: Param) -> int:
    """Return the bytes of a parameter's state on a recipient, without objects, whose sizes are not in the ranks' reports."""
    summary, num_shards = param.summary, max(param.placement.num_shards, 1)
    if summary is None:
        return 0
    sharded = sum(dtype.itemsize for dtype in summary.dtypes.values()) * param.placement.numel
    placed = sum(dtype_named(dtype).itemsize * place.numel for _, (dtype, place) in summary.placed)
    opaque = sum(dtype_named(kind.dtype).itemsize * prod(kind.shape) for _, kind in summary.opaque if kind.dtype)
    return sharded + placed + opaque * num_shards


class _Unchanged:
    """A check that the state has not changed since the iteration began, because a step would mix old and new values."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._seen = {param.local_id: _versions(param) for param in local.optim.params}

    def check(self, fqn: str | None = None) -> None:
        """Raise StateError if a value of one parameter, or of any, has changed."""
        only = self._local.by_fqn.get(fqn) if fqn is not None else None
        for param in self._local.optim.params if fqn is None else (only,) if only is not None else ():
            seen, now = self._seen[param.local_id], _versions(param)
            names = [name for name in {**seen, **now} if not _is_same(seen.get(name), now.get(name))]
            if names:
                raise StateError(
                    f"{param.named.fqns[0]}: {names[0]} on rank {self._local.view.rank} was changed while "
                    "iter_full_optim_state was under way, so the remaining items would not fit the earlier ones: exhaust the "
                    "iterator before the next optimizer step or load"
                )


class _Version(Struct, frozen=True):
    """A value, and its counter of in-place writes (None if it has none)."""

    value: Any
    version: Any


def _versions(param: LocalParam) -> Mapping[str, _Version]:
    with torch.no_grad():
        return {name: _Version(value, _version_of(value)) for name, value in (param.state or {}).items()}


def _version_of(value: Any) -> Any:
    """Return the counters of a tensor and, for a subclass, of its parts: some operations count in one, some in the other."""
    if not isinstance(value, torch.Tensor):
        return None
    shards = tensors_in(value)
    if not any(shard is value for shard in shards):
        return tuple(map(_version_of, shards))
    parts = [value.to_local()] if hasattr(value, "to_local") else []
    if hasattr(value, "__tensor_flatten__"):
        parts += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    own = None if value.is_inference() else value._version
    return (own, *(_version_of(part) for part in parts if part is not value))


def _is_same(seen: _Version | None, now: _Version | None) -> bool:
    if seen is None or now is None or seen.version != now.version:
        return False
    if seen.value is now.value:
        return True
    return isinstance(now.value, (bool, int, float, complex, str)) and bool(seen.value == now.value)
