"""Writing fairscale's shards as fairseq and metaseq do: `checkpoint_last-shard<rank>.pt`, for a stock job of so many ranks.

# file of rank 1 | head | flat shard: end of weight 0, weight 1, beginning of weight 2 | zeros | its exp_avg: the same cuts | ...

A shard of a flat parameter is one tensor of the file. Its elements are slices of several tensors of the source, of the
model's half or of the optimizer's, and its padding is a frame. With `flatten_parameters=False` every parameter is cut by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import torch

from fsdp_optim.arguments import check_at_least
from fsdp_optim.errors import CheckpointError, StateError, counted_noun, shortened
from fsdp_optim.foreign.archive.torch_zip import ArchiveFrames, TensorStub
from fsdp_optim.foreign.per_rank.fairscale_shards import FAIRSCALE_SHARDS
from fsdp_optim.foreign.per_rank.fairscale_units import FlatUnit, Units, cut_of, units_of
from fsdp_optim.foreign.torch.checked_values import check_safe
from fsdp_optim.foreign.torch.folder import TorchFilesProbe, sequence_of
from fsdp_optim.foreign.torch.writer import (
    SmallTensors,
    as_dict,
    manifest_of,
    values_of_modules,
    with_values_of_modules,
)
from fsdp_optim.formats.base.description import SCALAR, SCALAR_TENSOR, TENSOR, OptimDescription, ParamDescription
from fsdp_optim.formats.base.frames import joined
from fsdp_optim.formats.base.index import CheckpointIndex, StoredOptim
from fsdp_optim.formats.base.protocols import (
    COMMON,
    MODULES,
    CheckpointContents,
    Format,
    Half,
    PlannedFile,
    PlannedTensor,
    Prepared,
    Reader,
    Stamp,
    Writer,
    WrittenFiles,
)
from fsdp_optim.formats.base.saved_optim import contents_of, extras_in
from fsdp_optim.layout import Shape
from fsdp_optim.storage.base import CheckpointProbe, Opened
from fsdp_optim.tensors.memory import dtype_named

log = logging.getLogger("fsdp_optim")

STEM = "checkpoint_last"
_RESERVED = ("model", "shard_metadata", "fsdp_metadata", "last_optimizer_state")


class FairscaleFilesProbe(TorchFilesProbe):
    """The `CheckpointProbe` of folders of fairscale's shards."""

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        return lambda name: name == self.manifest or (name.startswith(f"{STEM}-shard") and name.endswith(".pt"))


@dataclass(frozen=True)
class FairscaleShards(Format):
    """A file for each rank, as fairseq and metaseq write it, for fairscale's own `load_local_state_dict` and each optimizer.

    Attributes:
        world_size: the number of ranks that will load the files.
        units: the FQNs that each FSDP unit flattens, in the order of the wrapped model's parameters(), by the path of the module
            that is wrapped, such as `{"": ["stem.weight"], "block.0": ["block.0.weight", "block.0.bias"]}`. None: as the source
            says, if that is of this format.
        flatten_parameters: FSDP's argument of this name. False: `units` has the parameters that each FSDP module wraps, and each
            is cut by itself. None: as in the source, if that is of this format; else True.
    """

    world_size: int
    units: Units | None = field(default=None, hash=False)
    flatten_parameters: bool | None = None

    name: ClassVar[str] = "fairscale_shards"
    needs_names: ClassVar[bool] = True
    saves: ClassVar[bool] = False
    probe: ClassVar[CheckpointProbe[Any]] = FairscaleFilesProbe()

    def __post_init__(self) -> None:
        check_at_least("world_size", self.world_size, 1, error=CheckpointError)
        units = self.units if self.units is None or isinstance(self.units, Mapping) else {None: None}
        for path, fqns in (units or {}).items():
            is_list = isinstance(fqns, (list, tuple)) and all(isinstance(fqn, str) for fqn in fqns)
            if not isinstance(path, str) or not is_list:
                raise StateError(f"units must be a dict from paths of modules to lists of FQNs, not {self.units!r}")

    def recognises(self, opened: Opened) -> bool:
        return opened.has(self.probe.manifest) and opened.has(f"{STEM}-shard0.pt")

    def open(self, opened: Opened, *, verify: bool) -> Reader:
        return FAIRSCALE_SHARDS.open(opened, verify=verify)

    def writer(self) -> Writer:
        return FairscaleShardsWriter(self.world_size, self.units, self.flatten_parameters)

    def sequence_in(self, opened: Opened) -> int:
        return sequence_of(opened)


@dataclass
class FairscaleShardsWriter(Writer):
    """The `Writer` of fairscale's shards."""

    world_size: int
    given: Units | None = None
    flattens: bool | None = None
    _contents: CheckpointContents | None = None
    _units: tuple[FlatUnit, ...] = ()
    _extras: dict[str, Any] = field(default_factory=dict)

    def prepare(self, index: CheckpointIndex, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        contents = contents_of(index, allow_pickle=allow_pickle, records=records)
        if index.optim is not None and contents.optim is not None:
            contents = replace(contents, optim=_with_scalars(contents.optim, index.optim))
        cut = cut_of(contents)
        as_source = self.given is not None or cut is None or cut.flattens
        flattens = self.flattens if self.flattens is not None else as_source
        self._contents, self._units = contents, tuple(units_of(contents, self.given, flattens=flattens))
        for name, value in extras_in(index, allow_pickle=allow_pickle):
            self._keep(name, value, allow_pickle=allow_pickle)
        return Prepared(contents.content, "", {}, None, contents)

    def _keep(self, name: str, value: Any, *, allow_pickle: bool) -> None:
        """Take an extra into the planned files."""
        kept = value
        check_safe(name, values_of_modules(value) if name == MODULES else value, allow_pickle=allow_pickle)
        if name != MODULES:
            kept = as_dict(value)
            taken = [key for key in kept if key in _RESERVED]
            if taken:
                own = "" if name == COMMON else f" of rank {_rank_in(name)}"
                raise CheckpointError(
                    f"the trainer's value {taken[0]!r}{own} has the name of a part of fairscale's files: save it under "
                    "another name"
                )
        self._extras[name] = kept

    def small(self, name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
        raise CheckpointError("files of fairscale's shards are written by convert")

    def files(
        self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """Plan one file for each rank, however large."""
        if self._contents is None:
            raise CheckpointError(
                "files of fairscale's shards are written by convert, whose ranks all prepare what they write"
            )
        by_key = {(half, tensor.key): tensor for half, planned in tensors.items() for tensor in planned}
        return [_RankFile(self, self._contents, by_key, rank).planned() for rank in range(self.world_size)]

    def info_of(self, data: bytes) -> Any:
        return len(data)

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: WrittenFiles, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        left_out = [name for name in sorted(self._extras) if _rank_in(name) >= self.world_size]
        if left_out:
            keys = sorted({str(key) for name in left_out for key in as_dict(self._extras[name])})
            log.warning(
                "the files are for %s, so values of the trainer are not written: %s, of %s %s of the source",
                counted_noun(self.world_size, "rank"),
                shortened(keys),
                "rank" if len(left_out) == 1 else "ranks",
                shortened(map(_rank_in, left_out)),
            )
        yield manifest_of(prepared.content, prepared.document, self.world_size, files, written, stamp)


def _with_scalars(optim: OptimDescription, stored: StoredOptim) -> OptimDescription:
    """Return the description with the 0-dim tensors themselves, because the metadata in the files depend on their elements."""
    scalars = {key: tensor for key, tensor in stored.tensors.items() if not tensor.shape}
    tensors = dict(zip(scalars, stored.read_small(list(scalars.values())), strict=True)) if scalars else {}

    def described(param: ParamDescription) -> ParamDescription:
        values = (
            (name, SCALAR, tensors[value])
            if kind in (TENSOR, SCALAR_TENSOR) and value in tensors
            else (name, kind, value)
            for name, kind, value in param.values
        )
        return replace(param, values=tuple(values))

    return replace(optim, params={fqn: described(param) for fqn, param in optim.params.items()})


def _rank_in(name: str) -> int:
    """Return the rank whose values an extra has; -1 for the common values of all ranks."""
    return int(name.removeprefix("rank-")) if name.startswith("rank-") else -1


@dataclass
class _ShardRecord:
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
    records: list[_ShardRecord] = field(default_factory=list)

    def planned(self) -> PlannedFile:
        units = self.writer._units
        model: dict[str, Any] = {
            unit.key: self._flat(unit, lambda fqn: ("model", fqn)) for unit in self._in_order(units) if unit.fqns
        }
        flat = {fqn for unit in units for fqn in unit.fqns}
        model |= {fqn: self._whole("model", fqn) for fqn in self.contents.params if fqn not in flat}
        model |= {alias: model[fqn] for alias, fqn in self.contents.aliases.items() if fqn in model}
        model = with_values_of_modules(model, self.writer._extras.get(MODULES, {}), self.contents.aliases)
        tree = {**self._extras(), "model": model, "shard_metadata": self._metadata(flat)}
        if self.contents.optim is not None:
            tree["last_optimizer_state"] = self._optim()
        return self._file(f"{STEM}-shard{self.rank}.pt", tree)

    def _in_order(self, units: Sequence[FlatUnit]) -> list[FlatUnit]:
        """Return the units in the order of the wrapped model's parameters, by which ids count parameters that are cut alone."""
        optim = self.contents.optim
        if optim is None or all(unit.is_flat for unit in units):
            return list(units)
        listed = (fqn for group in optim.groups for fqn in group.params)
        order = listed if len(optim.groups) == 1 else iter(self.contents.params)
        place = {fqn: index for index, fqn in enumerate(order)}
        return sorted(units, key=lambda unit: place.get(unit.fqns[0], len(place)) if unit.fqns else len(place))

    def _extras(self) -> dict[str, Any]:
        """Return the trainer's values: the common values of all ranks, and this rank's own."""
        own = self.writer._extras.get(f"rank-{self.rank:05}", {})
        return {**self.writer._extras.get(COMMON, {}), **as_dict(own)}

    def _flat(self, unit: FlatUnit, key_of: Callable[[str], tuple[Half, str]]) -> TensorStub:
        """Return this rank's shard of a tensor for each element of a unit."""
        start, stop, each = unit.shard(self.rank, self.writer.world_size)
        dtypes = {self.tensors[key_of(fqn)].dtype: fqn for fqn in unit.fqns}
        if len(dtypes) > 1:
            (one_dtype, fqn), (other, another) = list(dtypes.items())[:2]
            raise StateError(
                f"{fqn} is {one_dtype} and {another} is {other}: fairscale flattens parameters of one dtype only"
            )
        slices = [(self.tensors[key_of(fqn)], first, last) for fqn, first, last in unit.slices(start, stop)]
        (dtype,) = dtypes
        return self._record(_ShardRecord(dtype, slices, each - (stop - start)), (each,))

    def _whole(self, half: Half, key: str) -> TensorStub:
        tensor = self.tensors[half, key]
        return self._record(_ShardRecord(tensor.dtype, [(tensor, 0, prod(tensor.shape))]), tensor.shape)

    def _record(self, record: _ShardRecord, shape: Shape) -> TensorStub:
        self.records.append(record)
        return TensorStub(record.dtype, tuple(shape), len(self.records) - 1)

    def _metadata(self, flat: set[str]) -> dict[str, Any]:
        """Return the content of fairscale's `local_metadata_dict`."""
        units: dict[str, dict[str, Any]] = {}
        for unit in self.writer._units:
            start, stop, each = unit.shard(self.rank, self.writer.world_size)
            flat_param = {
                "names": [unit.inside(fqn) for fqn in unit.fqns],
                "shapes": [torch.Size(shape) for shape in unit.shapes],
                "numels": [prod(shape) for shape in unit.shapes],
                "padding": each - (stop - start),
            }
            entry = units.setdefault(
                unit.path,
                {
                    "fsdp_path": unit.path,
                    "params": {},
                    "no_broadcast_optim_state": False,
                    "shared_param_info": [tuple(map(unit.inside, pair)) for pair in unit.aliases],
                },
            )
            entry["params"] |= {unit.name: flat_param} if unit.fqns else {}
        return {
            "param_metadata": list(units.values()),
            "buffer_names": [fqn for fqn in self.contents.params if fqn not in flat],
        }

    def _optim(self) -> dict[str, Any]:
        """Return the state dict of this rank's optimizer, whose parameters are the flat parameters."""
        optim = self.contents.optim
        if optim is None:
            return {}
        ids: dict[str, int] = {}
        groups = []
        for number, group in enumerate(optim.groups):
            listed, params = list[int](), set(group.params)
            place = {fqn: index for index, fqn in enumerate(group.params)}
            units = list(self.writer._units)  # an optimizer of the wrapped model lists its parameters in this order
            if not all(unit.is_flat for unit in units):
                units.sort(key=lambda unit: place.get(unit.fqns[0], 0) if unit.fqns else 0)
            for unit in units:
                if params.isdisjoint(unit.fqns):
                    continue
                apart = [fqn for fqn in unit.fqns if fqn not in params]
                if apart:
                    raise StateError(
                        f"{apart[0]} is not in the param group {number} of {unit.fqns[0]}: fairscale keeps all parameters of "
                        f"the unit {unit.path!r} in one group"
                    )
                listed.append(ids.setdefault(unit.key, len(ids)))
            groups.append({**dict(group.hyperparameters), "params": listed})
        state = {ids[unit.key]: self._state(unit) for unit in self.writer._units if unit.state is not None}
        return {**optim.other_keys, "state": dict(sorted(state.items())), "param_groups": groups}

    def _state(self, unit: FlatUnit) -> dict[str, Any]:
        params = self.contents.optim.params if self.contents.optim is not None else {}
        keys = {fqn: {name: value for name, _, value in params[fqn].values} for fqn in unit.fqns}

        def shard(name: str) -> TensorStub:
            return self._flat(unit, lambda fqn: ("optim", keys[fqn][name]))

        values = unit.state.values if unit.state is not None else ()
        return {name: shard(name) if kind == TENSOR else value for name, kind, value in values}

    def _file(self, name: str, tree: Any) -> PlannedFile:
        """Return the file with these records. Records of large elements come first, so that all elements are aligned."""
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
        pending += small.records(archive)
        head, between = joined([*frames, (at, pending + archive.end())])
        named = f"flat shards of rank {self.rank}"
        return PlannedFile(
            name=name,
            half=None,
            head=head,
            tensors=tuple(tensors),
            starts=tuple(starts),
            nbytes_of_data=at,
            segment_nbytes=0,
            tensors_in=lambda *_: named,
            between=between,
            slices=tuple(slices),
        )
