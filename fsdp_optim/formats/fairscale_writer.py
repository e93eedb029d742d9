"""Writing fairscale's shards as fairseq and metaseq do: `checkpoint_last-shard<rank>.pt`, for a stock job of so many ranks.

# file of rank 1 | head | flat shard: end of weight 0, weight 1, beginning of weight 2 | zeros | its exp_avg: the same cuts | ...

A shard of a flat parameter is one tensor of the file. Its elements are slices of several tensors of the source, of the
model's half or of the optimizer's, and its padding is a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base import (
    COMMON,
    MODULES,
    CheckpointContents,
    Format,
    FormatReader,
    FormatWriter,
    Half,
    PlannedFile,
    PlannedTensor,
    Prepared,
    Stamp,
    WrittenFiles,
)
from fsdp_optim.formats.description import OPAQUE, SCALAR, TENSOR, ParamDescription
from fsdp_optim.formats.fairscale_shards import FAIRSCALE_SHARDS
from fsdp_optim.formats.frames import joined
from fsdp_optim.formats.torch_writer import SmallTensors, TorchFilesJudge, check_safe, manifest_of, sequence_of
from fsdp_optim.formats.torch_zip import ArchiveFrames, TensorStub
from fsdp_optim.layout import Shape
from fsdp_optim.memory import dtype_named
from fsdp_optim.storage.base import Judge, Opened

STEM = "checkpoint_last"
_RESERVED = ("model", "shard_metadata", "fsdp_metadata", "last_optimizer_state")
_FLAT = "flat_param_0"
_WAY_OUT = (
    'give units={"": [...], "layers.0": [...]}: for each module that FSDP wraps, its path and the FQNs of the parameters that it '
    "flattens, both in the order of the wrapped model's parameters()"
)

Units = Mapping[str, Sequence[str]]
"""The FQNs in each flat parameter, in order, by the path of the module that FSDP wraps."""


class FairscaleFilesJudge(TorchFilesJudge):
    """The `Judge` of folders of fairscale's shards."""

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        return lambda name: name == self.manifest or (name.startswith(f"{STEM}-shard") and name.endswith(".pt"))


@dataclass(frozen=True)
class WrittenFairscaleShards(Format):
    """Files of fairscale's shards for `world_size` ranks. `units`: None if the source says them."""

    world_size: int
    units: Units | None = field(default=None, hash=False)
    name: str = "fairscale_shards"
    judge: Judge[Any] = FairscaleFilesJudge()  # noqa: RUF009  # it has no state
    needs_names: bool = True

    def recognises(self, opened: Opened) -> bool:
        return FAIRSCALE_SHARDS.recognises(opened)

    def open(self, opened: Opened, *, verify: bool) -> FormatReader:
        return FAIRSCALE_SHARDS.open(opened, verify=verify)

    def writer(self) -> FormatWriter:
        return FairscaleShardsWriter(self.world_size, self.units)

    def sequence_in(self, opened: Opened) -> int:
        return sequence_of(opened)


@dataclass
class FairscaleShardsWriter(FormatWriter):
    """The `FormatWriter` of fairscale's shards."""

    world_size: int
    given: Units | None = None
    needs_scalars: bool = True
    _contents: CheckpointContents | None = None
    _units: tuple[_Unit, ...] = ()
    _extras: dict[str, Any] = field(default_factory=dict)

    def prepare(self, contents: CheckpointContents, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        self._contents, self._units = contents, tuple(_units_of(contents, self.given))
        return Prepared(contents.content, "", {}, None, contents)

    def copied(self, reader: FormatReader) -> Prepared | None:
        return None

    def keeps_extra(self, name: str, value: Any, *, allow_pickle: bool) -> bool:
        kept = {fqn: one for fqn, (_, one) in value.items()} if name == MODULES else value
        check_safe(name, kept, allow_pickle=allow_pickle)
        if name == COMMON and not isinstance(kept, dict):
            kept = {"extra": kept}
        taken = [key for key in kept if key in _RESERVED] if name == COMMON else []
        if taken:
            raise CheckpointError(f"the trainer's value {taken[0]!r} has the name of a part of fairscale's files")
        self._extras[name] = kept
        return True

    def extra(self, name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
        raise CheckpointError("files of fairscale's shards are written by convert")

    def files(
        self, half: Half, tensors: Sequence[PlannedTensor], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        raise CheckpointError("files of fairscale's shards are written by convert")

    def all_files(
        self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """Plan one file for each rank, however large."""
        if self._contents is None:
            raise CheckpointError(
                "files of fairscale's shards are written by convert, whose ranks all prepare what they write"
            )
        by_key = {(half, one.key): one for half, its in tensors.items() for one in its}
        return [_RankFile(self, self._contents, by_key, rank).planned() for rank in range(self.world_size)]

    def info_of(self, data: bytes) -> Any:
        return len(data)

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: WrittenFiles, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        yield manifest_of(prepared.content, prepared.document, self.world_size, files, written, stamp)


@dataclass(frozen=True)
class _Unit:
    """A flat parameter: the FQNs in it, their shapes, and what their state has in common (None without state)."""

    path: str
    fqns: tuple[str, ...]
    shapes: tuple[Shape, ...]
    state: ParamDescription | None
    aliases: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        return f"{self.path}.{_FLAT}" if self.path else _FLAT

    @property
    def numel(self) -> int:
        return sum(map(prod, self.shapes))

    def inside(self, fqn: str) -> str:
        return fqn[len(self.path) + 1 :] if self.path else fqn

    def shard(self, rank: int, world_size: int) -> tuple[int, int, int]:
        """The first element of a rank's shard, one past its last, and the number of elements of all shards, padding included."""
        each = -(-self.numel // world_size)
        start = min(rank * each, self.numel)
        return start, min(start + each, self.numel), each

    def slices(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """The slices of parameters in a range of elements of the flat parameter."""
        at = 0
        for fqn, shape in zip(self.fqns, self.shapes, strict=True):
            first, last = max(start - at, 0), min(stop - at, prod(shape))
            if first < last:
                yield fqn, first, last
            at += prod(shape)


def _units_of(contents: CheckpointContents, given: Units | None) -> Iterator[_Unit]:
    """The units, checked against the weights and the state."""
    units = given if given is not None else contents.units
    if units is None:
        raise StateError(f"the checkpoint does not say how fairscale flattens its parameters: {_WAY_OUT}")
    optim = contents.optim
    seen: set[str] = set()
    for path, fqns in units.items():
        for fqn in fqns:
            if fqn not in contents.params:
                raise StateError(f"units has {fqn}, which the checkpoint does not have: {_WAY_OUT}")
            if fqn in seen:
                raise StateError(f"units has {fqn} twice: {_WAY_OUT}")
            if path and not fqn.startswith(f"{path}."):
                raise StateError(f"units has {fqn} in the module {path!r}, in which it is not: {_WAY_OUT}")
            seen.add(fqn)
        aliases = tuple((fqn, other) for other, fqn in contents.aliases.items() if fqn in fqns)
        for fqn, other in aliases:
            if path and not other.startswith(f"{path}."):
                raise StateError(
                    f"{fqn} is {other} too, outside of the module {path!r}: fairscale ties weights inside of one unit only"
                )
        state = _common_state(path, fqns, optim.params) if optim is not None and fqns else None
        yield _Unit(path, tuple(fqns), tuple(contents.params[fqn] for fqn in fqns), state, aliases)
    listed = [fqn for group in optim.groups for fqn in group.params] if optim is not None else []
    left = [fqn for fqn in listed if fqn not in seen]
    if left:
        raise StateError(f"units does not have {left[0]}, a parameter of the optimizer: {_WAY_OUT}")


def _common_state(path: str, fqns: Sequence[str], params: Mapping[str, ParamDescription]) -> ParamDescription | None:
    """What the parameters of a unit have in common in their state, as the values of the first; None if none of them has state."""
    first = params.get(fqns[0])
    for fqn in fqns:
        one = params.get(fqn)
        has, had = one is not None and one.has_state, first is not None and first.has_state
        if has != had:
            with_state, without = (fqn, fqns[0]) if has else (fqns[0], fqn)
            raise StateError(
                f"{with_state} has state and {without} has none: fairscale keeps one state for the unit {path!r}"
            )
        if one is None or first is None or not has:
            continue
        for name, kind, _ in one.values:
            if kind == OPAQUE or (kind not in (SCALAR, TENSOR)):
                raise CheckpointError(
                    f"{fqn}: {name!r} of its state is not cut like the parameter, so it has no place in a flat shard"
                )
        its, firsts = ({name: (kind, value) for name, kind, value in two.values} for two in (one, first))
        different = [name for name in its | firsts if not _are_alike(its.get(name), firsts.get(name))]
        if different:
            name = different[0]
            raise StateError(
                f"{fqns[0]} and {fqn} differ in {name!r} of their state ({_shown(firsts.get(name))} and "
                f"{_shown(its.get(name))}): fairscale keeps one state for the unit {path!r}"
            )
    return first if first is not None and first.has_state else None


def _are_alike(one: tuple[str, Any] | None, other: tuple[str, Any] | None) -> bool:
    if one is None or other is None or one[0] != other[0]:
        return False
    if one[0] == TENSOR:
        return True
    (_, a), (_, b) = one, other
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        )
    return type(a) is type(b) and bool(a == b)


def _shown(value: tuple[str, Any] | None) -> str:
    return "none" if value is None else "a tensor" if value[0] == TENSOR else repr(value[1])


@dataclass
class _Record:
    """A tensor of a file: its slices of tensors of the source, and the bytes of zeros after them."""

    dtype: str
    slices: list[tuple[PlannedTensor, int, int]]
    num_zeros: int = 0


@dataclass
class _RankFile:
    """The file of one rank, while it is planned."""

    writer: FairscaleShardsWriter
    contents: CheckpointContents
    tensors: Mapping[tuple[Half, str], PlannedTensor]
    rank: int
    records: list[_Record] = field(default_factory=list)

    def planned(self) -> PlannedFile:
        units = self.writer._units
        model: dict[str, Any] = {unit.key: self._flat(unit, lambda fqn: ("model", fqn)) for unit in units if unit.fqns}
        flat = {fqn for unit in units for fqn in unit.fqns}
        model |= {fqn: self._whole("model", fqn) for fqn in self.contents.params if fqn not in flat}
        model |= {alias: model[fqn] for alias, fqn in self.contents.aliases.items() if fqn in model}
        model |= self.writer._extras.get(MODULES, {})
        tree = {**self._extras(), "model": model, "shard_metadata": self._metadata(flat)}
        if self.contents.optim is not None:
            tree["last_optimizer_state"] = self._optim()
        return self._file(f"{STEM}-shard{self.rank}.pt", tree)

    def _extras(self) -> dict[str, Any]:
        """The trainer's values: those that all ranks have in common, and those of this rank."""
        own = self.writer._extras.get(f"rank-{self.rank:05}", {})
        return {**self.writer._extras.get(COMMON, {}), **(own if isinstance(own, dict) else {"extra": own})}

    def _flat(self, unit: _Unit, key_of: Callable[[str], tuple[Half, str]]) -> TensorStub:
        """This rank's shard of a tensor for each element of a unit."""
        start, stop, each = unit.shard(self.rank, self.writer.world_size)
        dtypes = {self.tensors[key_of(fqn)].dtype: fqn for fqn in unit.fqns}
        if len(dtypes) > 1:
            (one, fqn), (other, another) = list(dtypes.items())[:2]
            raise StateError(
                f"{fqn} is {one} and {another} is {other}: fairscale flattens parameters of one dtype only"
            )
        slices = [(self.tensors[key_of(fqn)], first, last) for fqn, first, last in unit.slices(start, stop)]
        (dtype,) = dtypes
        return self._record(_Record(dtype, slices, each - (stop - start)), (each,))

    def _whole(self, half: Half, key: str) -> TensorStub:
        tensor = self.tensors[half, key]
        return self._record(_Record(tensor.dtype, [(tensor, 0, prod(tensor.shape))]), tensor.shape)

    def _record(self, record: _Record, shape: Shape) -> TensorStub:
        self.records.append(record)
        return TensorStub(record.dtype, tuple(shape), len(self.records) - 1)

    def _metadata(self, flat: set[str]) -> dict[str, Any]:
        """What fairscale's `local_metadata_dict` says."""
        units = []
        for unit in self.writer._units:
            start, stop, each = unit.shard(self.rank, self.writer.world_size)
            flat_param = {
                "names": [unit.inside(fqn) for fqn in unit.fqns],
                "shapes": [torch.Size(shape) for shape in unit.shapes],
                "numels": [prod(shape) for shape in unit.shapes],
                "padding": each - (stop - start),
            }
            units.append(
                {
                    "fsdp_path": unit.path,
                    "params": {_FLAT: flat_param} if unit.fqns else {},
                    "no_broadcast_optim_state": False,
                    "shared_param_info": [tuple(map(unit.inside, pair)) for pair in unit.aliases],
                }
            )
        return {"param_metadata": units, "buffer_names": [fqn for fqn in self.contents.params if fqn not in flat]}

    def _optim(self) -> dict[str, Any]:
        """The state dict of this rank's optimizer, whose parameters are the flat parameters."""
        optim = self.contents.optim
        if optim is None:
            return {}
        ids: dict[str, int] = {}
        groups = []
        for number, group in enumerate(optim.groups):
            listed, params = list[int](), set(group.params)
            for unit in self.writer._units:  # an optimizer of the wrapped model lists its parameters in this order
                if params.isdisjoint(unit.fqns):
                    continue
                apart = [fqn for fqn in unit.fqns if fqn not in params]
                if apart:
                    raise StateError(
                        f"{apart[0]} is not in the param group {number} of {unit.fqns[0]}: fairscale keeps all parameters of "
                        f"the unit {unit.path!r} in one group"
                    )
                listed.append(ids.setdefault(unit.path, len(ids)))
            groups.append({**dict(group.hyperparameters), "params": listed})
        state = {ids[unit.path]: self._state(unit) for unit in self.writer._units if unit.state is not None}
        return {**optim.other_keys, "state": dict(sorted(state.items())), "param_groups": groups}

    def _state(self, unit: _Unit) -> dict[str, Any]:
        params = self.contents.optim.params if self.contents.optim is not None else {}
        keys = {fqn: {name: value for name, _, value in params[fqn].values} for fqn in unit.fqns}

        def shard(name: str) -> TensorStub:
            return self._flat(unit, lambda fqn: ("optim", keys[fqn][name]))

        values = unit.state.values if unit.state is not None else ()
        return {name: shard(name) if kind == TENSOR else value for name, kind, value in values}

    def _file(self, name: str, tree: Any) -> PlannedFile:
        """The file with these records. Those of large elements come first, so that all elements are aligned."""
        small, archive = SmallTensors(len(self.records)), ArchiveFrames()
        pending, frames, at = archive.first(small.without(tree)), list[tuple[int, bytes]](), 0
        tensors, starts, slices = list[PlannedTensor](), list[int](), list[tuple[int, int]]()
        sizes = [dtype_named(record.dtype).itemsize for record in self.records]
        for number in sorted(range(len(self.records)), key=lambda number: -sizes[number]):
            record, size = self.records[number], sizes[number]
            num = sum(last - first for _, first, last in record.slices)
            frames.append((at, pending + archive.tensor(number, (num + record.num_zeros) * size)))
            for tensor, first, last in record.slices:
                tensors.append(tensor)
                starts.append(at)
                slices.append((first, last))
                at += (last - first) * size
            pending = bytes(record.num_zeros * size)
        for number, content in small.contents.items():
            pending += archive.tensor(number, len(content)) + content
        head, between = joined([*frames, (at, pending + archive.end())])
        named = f"flat shards of rank {self.rank}"
        return PlannedFile(
            name, None, head, tuple(tensors), tuple(starts), at, 0, lambda *_: named, between, tuple(slices)
        )
