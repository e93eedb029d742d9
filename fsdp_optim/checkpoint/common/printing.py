"""Fingerprints of the values of all ranks: each rank adds its own elements, and sums travel, some bytes for a value."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Number
from typing import Any

import numpy
import torch

from fsdp_optim.checkpoint.common.contents import TREE, SavedHalf, SavedValue
from fsdp_optim.checkpoint.common.files import offset_in_storage, stored_on
from fsdp_optim.errors import StateError
from fsdp_optim.layout import STORAGE, Placement
from fsdp_optim.move import End, Key, Slice, StateValue
from fsdp_optim.plan import Copy, Plans, clip_to_source
from fsdp_optim.prints import LocalSums, RowsOfValues, RowSums
from fsdp_optim.results.fingerprints import Fingerprint, ValueFingerprint
from fsdp_optim.state.values.same import Incomparable, fingerprint_of, key_of
from fsdp_optim.tensors.memory import Budget, dtype_name, flatten, is_plain
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure

Place = tuple[str, str, str]
"""(half, FQN or key, name) of a value in a fingerprint; the name is empty for weights and trees."""


def place_of(value: StateValue) -> Place:
    """Return the place of a tensor in a fingerprint."""
    if value.is_state:
        return "optim", value.fqn, str(value.name)
    if isinstance(value, SavedValue) and value.of_optim is not None:
        return "optim", *value.of_optim
    return ("state", value.fqn.removeprefix("state."), "") if value.name == TREE else ("weights", value.fqn, "")


@dataclass
class PrintEnd(End):
    """The target of a fingerprint: adds the elements that this rank holds, where they are. Of replicas, one rank adds a part."""

    values: Sequence[StateValue]
    rank: int
    budget: Budget
    plans: Plans
    num_projections: int = 0
    _index: dict[Key, int] = field(default_factory=dict)
    _by_device: dict[torch.device, tuple[RowSums, RowsOfValues]] = field(default_factory=dict)
    _planned: dict[tuple[int, int, int], tuple[Placement, list[tuple[int, Copy]]]] = field(default_factory=dict)

    is_stored = True

    def __post_init__(self) -> None:
        self._index.update({value.key: index for index, value in enumerate(self.values)})

    def drain(self, parts: Sequence[Slice]) -> None:
        for part in parts:
            if part.flat is None:
                continue
            copies = [
                _moved(piece, base)
                for base, copy in self._copies(part.value, part.cut)
                for piece in clip_to_source(copy, part.start, part.start + part.flat.numel())
            ]
            if copies:
                self._rows_on(part.flat.device).add(copies, part.flat, self._index[part.value.key])

    def sums(self) -> LocalSums:
        """Return the sums over the elements of this rank, in the order of the values. Nothing is added afterwards."""
        total = LocalSums.zeros(len(self.values), self.num_projections)
        for sums, rows in self._by_device.values():
            rows.flush()
            total += sums.local()
        return total

    def _rows_on(self, device: torch.device) -> RowsOfValues:
        if device not in self._by_device:
            half, share = self.budget.share(2, "numbers in rows, and products"), self.budget.share(8, "rows with zeros")
            sums = RowSums(len(self.values), device, self.num_projections, half.nbytes)
            self._by_device[device] = sums, RowsOfValues(sums, device, share.nbytes)
        return self._by_device[device][1]

    def _copies(self, value: StateValue, cut: Placement) -> list[tuple[int, Copy]]:
        """Return the copies from this rank's part of a value to the unsharded value, each with the element where it begins."""
        shard = cut.shard_of(self.rank)
        run = cut.run(shard) if shard is not None and cut.num_replicas == 1 and not cut.overlapping else None
        if run is not None:  # nearly always, and quicker than a plan
            return [(0, Copy(self.rank, STORAGE, (run.stop - run.start,), run.offset, (1,), run.start, (1,)))]
        replica, stored = value.replica_among(cut), stored_on(cut, value.nbytes)
        key = id(cut), replica, stored.num_shards
        known = self._planned.get(key)
        if known is None:
            planned = self.plans.of(cut, stored, self.rank, replica)
            copies = [(offset_in_storage(stored, c.target_rank), c) for c in planned if c.source_rank == self.rank]
            known = self._planned[key] = cut, copies  # a reference that keeps the id unique
        return known[1]


def _moved(copy: Copy, base: int) -> Copy:
    if not base:
        return copy
    return Copy(
        copy.source_rank,
        copy.target_rank,
        copy.sizes,
        copy.source_offset,
        copy.source_strides,
        base + copy.target_offset,
        copy.target_strides,
    )


def print_of(where: str, value: Any, num_projections: int = 0) -> ValueFingerprint:
    """Return the fingerprint of a value that a rank has alone: of the elements of a tensor, else of a digest of its parts.

    Raises StateError for a value that is equal only to itself. `where`: its name, for messages.
    """
    if isinstance(value, torch.Tensor) and is_plain(value) and value.layout is torch.strided and not value.is_meta:
        return _print_of_tensor(value, num_projections)
    try:
        is_short = value is None or isinstance(value, (str, Number))
        bits = fingerprint_of(key_of(value)) if is_short else fingerprint_of(value)
    except Incomparable as error:
        raise StateError(
            f"{where}: {error}, so it has no fingerprint: store plain values or tensors in its place"
        ) from None
    size = abs(value) if isinstance(value, (int, float, complex, numpy.number)) else 0.0
    is_finite = size < inf
    return ValueFingerprint(
        int(bits, 16), type(value).__name__, (), float(size) if is_finite else 0.0, int(not is_finite)
    )


def _print_of_tensor(value: torch.Tensor, num_projections: int) -> ValueFingerprint:
    flat = flatten(value)
    sums = RowSums(1, flat.device, num_projections)
    rows = RowsOfValues(sums, flat.device, 1 << 20)
    rows.add([Copy(0, 0, (len(flat),), 0, (1,), 0, (1,))], flat, 0)
    rows.flush()
    return _value_of(sums.local(), 0, dtype_name(value.dtype), tuple(value.shape))


def _value_of(sums: LocalSums, index: int, dtype: str, shape: tuple[int, ...]) -> ValueFingerprint:
    return ValueFingerprint(
        sums.bits_of(index),
        dtype,
        shape,
        float(sums.squares[index]) ** 0.5,
        int(sums.num_nonfinite[index]),
        tuple(map(float, sums.projections[index])),
    )


def scalars_of(half: SavedHalf) -> dict[Place, ValueFingerprint]:
    """Return the fingerprints of the numbers and words of an optimizer's state, which all ranks know."""
    prints, known = dict[Place, ValueFingerprint](), dict[str, ValueFingerprint]()
    for fqn, param in half.global_state.params.items():
        for name, scalar in param.summary.scalars if param.summary is not None else ():
            if not isinstance(scalar.value, torch.Tensor):
                if scalar.key not in known:
                    known[scalar.key] = print_of(f"{fqn}: {name}", scalar.value)
                prints["optim", fqn, str(name)] = known[scalar.key]
    return prints


def objects_of(weights: SavedHalf, state: SavedHalf | None, num_projections: int) -> dict[Place, ValueFingerprint]:
    """Return the fingerprints of opaque values, and of entries of modules, which only the lowest rank has."""
    prints: dict[Place, ValueFingerprint] = {}
    for (fqn, name), value in state.opaque.items() if state is not None else ():
        prints["optim", fqn, str(name)] = print_of(f"{fqn}: {name}", value, num_projections)
    for fqn, (_, value) in weights.module_values.items():
        prints["weights", fqn, ""] = print_of(fqn, value, num_projections)
    return prints


def merged(
    group: RankGroup, end: PrintEnd, own: Mapping[Place, ValueFingerprint], failure: Failure
) -> dict[Place, ValueFingerprint]:
    """Add the sums of all ranks, and join their own fingerprints. Called by all ranks; an error of any is raised on all."""
    content = b""
    with failure:
        content = pickle.dumps((end.sums().to_bytes(), dict(own)))
    report = all_gather_bytes(group, "sums", content, error=failure.error, fatal=failure.fatal)
    joined, size = b"", (len(end.values), end.num_projections)
    leader = group.ranks[0]
    if group.rank == leader:
        with failure:
            total, others = LocalSums.zeros(*size), dict[Place, ValueFingerprint]()
            for rank in group.ranks:  # in this order, so that the sums of floats are the same in every call
                data, of_rank = pickle.loads(report.content_of(rank))
                total += LocalSums.from_bytes(data, *size)
                others |= of_rank
            joined = pickle.dumps((total.to_bytes(), others))
    data, others = pickle.loads(all_gather_bytes(group, "all sums", joined, error=failure.error).content_of(leader))
    return {**prints_in(LocalSums.from_bytes(data, *size), end.values), **others}


def prints_in(total: LocalSums, values: Sequence[StateValue]) -> dict[Place, ValueFingerprint]:
    """Return the fingerprints of values from the sums of all ranks."""
    return {
        place_of(value): _value_of(total, index, dtype_name(value.dtype), tuple(value.placement.shape))
        for index, value in enumerate(values)
    }


def fingerprint_from(prints: Mapping[Place, ValueFingerprint], order: Iterable[str]) -> Fingerprint:
    """Return fingerprints by half, FQN and name. `order`: the FQNs of the model, in its order."""
    place = {fqn: index for index, fqn in enumerate(order)}
    weights, optim, state = dict[str, Any](), dict[str, dict[str, Any]](), dict[str, Any]()
    for half, fqn, name in sorted(prints, key=lambda key: (place.get(key[1], len(place)), key[1])):
        print_of_value = prints[half, fqn, name]
        if half == "optim":
            optim.setdefault(fqn, {})[name] = print_of_value
        else:
            (weights if half == "weights" else state)[fqn] = print_of_value
    return Fingerprint(weights, optim, state)


def prints_by_key(saved: Fingerprint) -> dict[tuple[str, str], ValueFingerprint]:
    """Return fingerprints by half and the key of the tensor in its file; none where two values would have one key."""
    by_key = {(half, fqn): value for half in ("weights", "state") for (fqn, _), value in saved.values_of(half).items()}
    twice = set()
    for (fqn, name), value in saved.values_of("optim").items():
        key = "optim", f"state.{fqn}.{name}"
        twice |= {key} & by_key.keys()
        by_key[key] = value
    return {key: value for key, value in by_key.items() if key not in twice}
