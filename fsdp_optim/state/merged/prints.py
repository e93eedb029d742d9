"""The fingerprints of this rank's replicas, which its report has, so that ranks see where theirs differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy
import torch
import xxhash

from fsdp_optim.layout import Placement, RankSet
from fsdp_optim.state.live.local import LocalParam
from fsdp_optim.state.merged.replicas import is_cut_among_replicas, print_of_value, without_padding
from fsdp_optim.state.values.same import fingerprint_of
from fsdp_optim.tensors.memory import is_plain
from fsdp_optim.tensors.side_by_side import side_by_side
from fsdp_optim.view import Handle

_TOGETHER, _TOGETHER_NBYTES = 8192, 4 << 20  # small values, before their digests are made
_SMALL_NBYTES = 32 << 10
_SMALL_DTYPES = frozenset(
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ]
)
_Described: TypeAlias = "tuple[Any, torch.dtype, torch.Size] | tuple[Any, str]"
"""The name of a value with the dtype and shape of a small tensor, or with the fingerprint of any other."""

Placements: TypeAlias = "tuple[Placement, ...]"
"""Of the original parameters of a live one."""


class ReplicaPrints:
    """The fingerprints of parameters whose replicas no wrapper keeps equal."""

    def __init__(self, rank: int, ranks: tuple[int, ...], *, every_replica: bool) -> None:
        """`ranks`: all of the call. `every_replica`: also of replicas that a wrapper keeps equal."""
        self._rank, self._everyone = rank, RankSet(ranks)
        self._every_replica = every_replica
        self._kept_equal: dict[
            tuple[int, ...] | int, bool
        ] = {}  # by the ids of placements, which the Handles keep unique

    def of_each(self, params: Sequence[LocalParam], placements: Sequence[Placements]) -> Iterator[str]:
        """Yield the fingerprint of the state of each parameter; "" where replicas need none."""
        needed = [self._are_needed(param, where) for param, where in zip(params, placements, strict=True)]
        if not any(needed):
            return itertools.repeat("", len(needed))
        prints = prints_of_states(itertools.compress(params, needed), self._rank)
        return (next(prints) if is_needed else "" for is_needed in needed)

    def _are_needed(self, param: LocalParam, placements: Placements) -> bool:
        handle = param.handle
        return handle.collected and not (handle.synchronized and self._are_equal(handle, placements))

    def _are_equal(self, handle: Handle, placements: Placements) -> bool:
        key = tuple(map(id, placements)) if len(placements) > 1 else id(placements[0]) if placements else 0
        known = self._kept_equal.get(key)
        if known is None:
            # A wrapper keeps the shards of its own group consistent, but not those of another group with the same names.
            known = (not self._every_replica or handle.is_cut) and (
                bool(placements) and self._everyone.is_all_holders_of(placements[0])
            )
            self._kept_equal[key] = known
        return known


def prints_of_states(params: Iterable[LocalParam], rank: int) -> Iterator[str]:
    """Yield a fingerprint of this rank's state of each live parameter, without padding.

    Values that are cut among the ranks with the same shard of the parameter are left out, because they are not replicas. The
    order in which an optimizer made its values makes no difference. The bytes of small values are digested from memory that many
    parameters share.
    """
    batch = _Batch()
    for param in params:
        batch.add(param, rank)
        if batch.is_full:
            yield from batch.prints()
            batch = _Batch()
    yield from batch.prints()


class _Batch:
    """Parameters whose fingerprints are made together."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._parts: list[torch.Tensor] = []
        self._of_params: list[tuple[tuple[_Described, ...], int]] = []
        self._heads: dict[tuple[_Described, ...], bytes] = {}
        self._orders: dict[tuple[Any, ...], list[Any]] = {}

    @property
    def is_full(self) -> bool:
        return self._nbytes >= _TOGETHER_NBYTES or len(self._parts) >= _TOGETHER

    def add(self, param: LocalParam, rank: int) -> None:
        handle, state = param.handle, param.state or {}
        is_unchanged = _holds_values_unchanged(handle)
        names = tuple(state)
        order = self._orders.get(names)
        if order is None:
            order = self._orders[names] = sorted(names, key=repr)
        described = list[_Described]()
        for name in order:
            value = state[name]
            if not (is_unchanged and is_plain(value)) and isinstance(value, torch.Tensor):
                held = handle.held(value)
                if held is None and is_cut_among_replicas(handle, value, rank):
                    continue
                value = value if held is None else without_padding(handle, held, rank)
            if is_plain(value) and _is_small(value):
                described.append((name, value.dtype, value.shape))
                self._parts.append(value)
                self._nbytes += value.nbytes
            else:
                described.append((name, print_of_value(param, name, rank)))
        self._of_params.append((tuple(described), len(self._parts)))

    def prints(self) -> Iterator[str]:
        """Yield the fingerprint of each parameter, in order."""
        sizes = numpy.array([part.nbytes for part in self._parts], numpy.int64)
        memory, bases = side_by_side(self._parts, sizes)
        ranges, first = list(zip(bases.tolist(), (bases + sizes).tolist(), strict=True)), 0
        for described, last in self._of_params:
            head = self._heads.get(described)
            if head is None:
                head = self._heads[described] = _head_of(described)
            digest = xxhash.xxh3_128(head)
            for start, stop in ranges[first:last]:
                digest.update(memory[start:stop])
            first = last
            yield digest.hexdigest()


def _head_of(described: Sequence[_Described]) -> bytes:
    """Return what a fingerprint says of values before the bytes of the small ones."""
    shown = [(name, *(str(each) for each in about)) for name, *about in described]
    if all(type(name) is str for name, *_ in shown):
        return repr(shown).encode()  # nearly always
    return fingerprint_of(shown).encode()


def _is_small(value: torch.Tensor) -> bool:
    """Return whether a tensor of torch's own classes is small, and on the host: on all replicas alike."""
    is_usual = value.dtype in _SMALL_DTYPES and value.layout is torch.strided and not value.is_nested
    return is_usual and value.is_cpu and value.nbytes <= _SMALL_NBYTES


def _holds_values_unchanged(handle: Handle) -> bool:
    """Return whether the elements of a plain tensor on this rank are all of the tensor, whether it is cut or not."""
    cls = type(handle)
    return cls.held is Handle.held and cls.is_marked is Handle.is_marked and not any(handle.num_padded)
