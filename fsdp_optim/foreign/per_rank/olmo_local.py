"""OLMo's local checkpoints: each rank's flat parameters of torch FSDP1, and its optimizer's state dict, as they are.

`model/rank<rank>.pt` has the flat parameters and where the original parameters lie in this rank's shard of them,
`optim/rank<rank>.pt` the optimizer's state dict with `param_names` in its groups, `train/rank<rank>.pt` the trainer's values, and
`metadata.yaml` the world size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from fsdp_optim.errors import CheckpointError, LayoutError
from fsdp_optim.foreign.per_rank.local_optim import RankOriginal, RankParam, groups_of, joined
from fsdp_optim.foreign.per_rank.rank_files import RankFiles, UnreadableOptimError, by_rank, complete, unreadable
from fsdp_optim.foreign.reader import ForeignFormat, ForeignReader
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.layout import Shape
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.model_dict import unwrapped_path

_NAME = re.compile(r"(?P<half>model|optim|train)/rank(?P<rank>\d{1,7})\.pt")
_METADATA, _MOST_METADATA_NBYTES = "metadata.yaml", 1 << 16
_WORLD_SIZE = re.compile(rb"^world_size:\s*(\d{1,7})\s*$", re.MULTILINE)
_FLAT = "_flat_param"
_OF_FLAT = "flat_param."


def _shard_info(in_shard: Any, *numbers: Any) -> tuple[Any, ...]:
    """torch's _ShardParamInfo: (in_shard, offset_in_shard, numel_in_shard, first and last index inside of the parameter)."""
    return (in_shard, *numbers)


_STAND_INS = {
    f"torch.distributed.fsdp.{module}._ShardParamInfo": _shard_info for module in ("flat_param", "_flat_param")
}


class OlmoLocal(ForeignFormat):
    """OLMo's local checkpoints."""

    name = "OLMo local"

    def recognises(self, opened: Opened) -> bool:
        try:
            return not opened.selected and any(_half_of(name) == "model" for name in opened.names())
        except CheckpointError:
            return False

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        files = RankFiles.read(opened, _files(opened, "model"), _STAND_INS)
        parts = [files, *(_read(opened, half) for half in ("optim", "train") if _has(opened, half))]
        of_half = dict(zip(("model", *(half for half in ("optim", "train") if _has(opened, half))), parts, strict=True))
        with as_checkpoint_error(opened.where):
            params = _Params.of(files)
            train = of_half.get("train")
            extras = train.extras(frozenset()) if train is not None else []
            return ForeignReader(
                opened,
                self.name,
                params.model(),
                params.optim(of_half["optim"]) if "optim" in of_half else None,
                {name: source for part in parts for name, source in part.sources.items()},
                extra_values=extras[0] if extras else None,
                rank_extras=train.rank_extras(extras) if train is not None else (),
                pickled=partial(train.pickled, extras[0]) if train is not None else None,
                world_size=files.num,
                metadata_digest=" ".join(part.digest for part in parts),
                files=[name for part in parts for name in part.names],
            )


OLMO_LOCAL = OlmoLocal()


def _half_of(name: str) -> str:
    match = _NAME.fullmatch(name)
    return match["half"] if match is not None else ""


def _has(opened: Opened, half: str) -> bool:
    return any(_half_of(name) == half for name in opened.names())


def _read(opened: Opened, half: str) -> RankFiles:
    return RankFiles.read(opened, _files(opened, half))


def _files(opened: Opened, half: str) -> tuple[str, ...]:
    matches = [match for name in opened.names() if (match := _NAME.fullmatch(name)) and match["half"] == half]
    file_of_rank = by_rank(opened.where, ((int(match["rank"]), match.string) for match in matches))
    return complete(f"{opened.where}/{half}", file_of_rank, _world_size(opened))


def _world_size(opened: Opened) -> int:
    """Return the number of ranks that saved; 0 if no file says it."""
    if not opened.has(_METADATA):
        return 0
    match = _WORLD_SIZE.search(opened.read_whole(_METADATA, most_nbytes=_MOST_METADATA_NBYTES))
    if match is None or not int(match[1]):
        raise CheckpointError(f"{opened.named(_METADATA)}: has no world_size")
    return int(match[1])


@dataclass(frozen=True)
class _Handle:
    """One flat parameter. `data`: by rank, its shard; `originals`: with runs inside of these shards."""

    prefix: str
    data: tuple[StoredTensor, ...]
    originals: tuple[RankOriginal, ...] = field(repr=False)


@dataclass(frozen=True)
class _Params:
    """The flat parameters of all ranks."""

    files: RankFiles
    handles: Sequence[_Handle]

    @classmethod
    def of(cls, files: RankFiles) -> _Params:
        of_ranks = []
        for name, archive in zip(files.names, files.archives, strict=True):
            with as_checkpoint_error(files.opened.named(name)):
                of_ranks.append(
                    [
                        (str(module["name"]), handle)
                        for module in archive.value["modules"]
                        for handle in module["handles"]
                    ]
                )
        files.agreed(
            {rank: [name for name, _ in handles] for rank, handles in enumerate(of_ranks)}, "the list of modules"
        )
        return cls(files, [cls._handle(files, handles) for handles in zip(*of_ranks, strict=True)])

    @staticmethod
    def _handle(files: RankFiles, of_ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> _Handle:
        prefix = unwrapped_path(of_ranks[0][0])
        fqns = files.agreed(
            {r: list(handle[f"{_OF_FLAT}_fqns"]) for r, (_, handle) in enumerate(of_ranks)}, f"_fqns of {prefix}"
        )
        shapes = files.agreed(
            {r: [tuple(shape) for shape in handle[f"{_OF_FLAT}_shapes"]] for r, (_, handle) in enumerate(of_ranks)},
            f"_shapes of {prefix}",
        )
        runs: list[list[tuple[int, int, int, int]]] = [[] for _ in fqns]
        data = []
        for rank, (_, handle) in enumerate(of_ranks):
            with as_checkpoint_error(files.opened.named(files.names[rank])):
                data.append(_tensor(handle[f"{_OF_FLAT}data"]))
                for place, start, stop, offset in _runs(handle, len(fqns)):
                    runs[place].append((rank, start, stop, offset))
        names = [f"{prefix}.{fqn}" if prefix else str(fqn) for fqn in fqns]
        return _Handle(
            prefix,
            tuple(data),
            tuple(
                RankOriginal(unwrapped_path(name), _shape(shape), tuple(of))
                for name, shape, of in zip(names, shapes, runs, strict=True)
            ),
        )

    def model(self) -> dict[str, StoredTensor]:
        model: dict[str, StoredTensor] = {}
        for handle in self.handles:
            tensors = dict(enumerate(handle.data))
            live = RankParam(handle.prefix, handle.originals, {rank: tensor.shape for rank, tensor in tensors.items()})
            keys = [original.fqn for original in handle.originals]
            try:
                for key, stored in zip(keys, live.stored(keys, tensors), strict=True):
                    if model.setdefault(key, stored) is not stored:
                        raise LayoutError(f"{key}: is in two flat parameters")
            except LayoutError as error:
                raise self.files.damaged(0, str(error)) from error
        return model

    def optim(self, files: RankFiles) -> Mapping[str, Any]:
        dicts = files.dicts([archive.value for archive in files.archives], "the file")
        known = {live.name: live for live in self._live()}
        live: dict[Any, RankParam] = {}
        try:
            for group in groups_of(files, dicts, "the optimizer"):
                names = group.get("param_names")
                if names is None or len(names) != len(group["params"]):
                    raise UnreadableOptimError(
                        f"{files.opened.named(files.names[0])}: its param groups have no param_names, so whose the state is "
                        "cannot be known: load the weights alone"
                    )
                for key, name in zip(group["params"], names, strict=True):
                    if unwrapped_path(name) not in known:
                        raise files.damaged(0, f"names the parameter {name}, which the files of the model do not have")
                    live[key] = known[unwrapped_path(name)]
            return joined(files, dicts, live, "the optimizer")
        except UnreadableOptimError as reason:
            return unreadable(reason)

    def _live(self) -> Iterator[RankParam]:
        """Yield the parameters that an optimizer may have had: flat, or (use_orig_params) each rank's part of each original."""
        for handle in self.handles:
            flat = f"{handle.prefix}.{_FLAT}" if handle.prefix else _FLAT
            yield RankParam(flat, handle.originals, {rank: tensor.shape for rank, tensor in enumerate(handle.data)})
            for original in handle.originals:
                numel = prod(original.shape)
                held = {rank: stop - start for rank, start, stop, _ in original.runs}
                shapes = {
                    rank: original.shape if held.get(rank, 0) == numel else (held.get(rank, 0),)
                    for rank in range(self.files.num)
                }
                runs = tuple((rank, start, stop, 0) for rank, start, stop, _ in original.runs)
                yield RankParam(original.fqn, (RankOriginal(original.fqn, original.shape, runs),), shapes)


def _runs(handle: Mapping[str, Any], num: int) -> Iterator[tuple[int, int, int, int]]:
    """(index of the original, start, stop, offset in the rank's data) of each original that is on a rank."""
    if f"{_OF_FLAT}_shard_indices" in handle:  # before torch 2.1
        first, at = int(handle[f"{_OF_FLAT}_shard_indices"][0]), 0
        for index, (start, last) in enumerate(handle[f"{_OF_FLAT}_shard_param_offsets"], first):
            yield _index(index, num), int(start), int(last) + 1, at
            at += int(last) + 1 - int(start)
        return
    infos = handle[f"{_OF_FLAT}_shard_param_infos"]
    if len(infos) != num:
        raise ValueError(f"has {len(infos)} _shard_param_infos for {num} parameters")
    for index, (in_shard, offset, numel, start, last) in enumerate(infos):
        if in_shard:
            if int(last) + 1 - int(start) != int(numel):
                raise ValueError(f"the part of parameter {index} has {numel} elements, from {start} to {last}")
            yield index, int(start), int(last) + 1, int(offset)


def _index(index: int, num: int) -> int:
    if not 0 <= index < num:
        raise ValueError(f"has a part of parameter {index}, of {num}")
    return index


def _tensor(value: Any) -> StoredTensor:
    if not isinstance(value, StoredTensor):
        raise TypeError(f"the data of a flat parameter are a {type(value).__name__}")
    return value


def _shape(sizes: Any) -> Shape:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"a shape of {sizes!r:.100}")
    return tuple(sizes)
