"""Files of fairscale's shards, one of each rank, as fairseq and metaseq write them: `<name>-shard<rank>.pt`.

`model` is from `FSDP.local_state_dict()`, `shard_metadata` (fairseq: `fsdp_metadata`) from `FSDP.local_metadata_dict()`, and
`last_optimizer_state` is the state dict of the rank's optimizer, whose parameters are flat shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from msgspec import structs

from fsdp_optim.errors import CheckpointError, LayoutError, shortened
from fsdp_optim.foreign.per_rank.fairscale_units import FairscaleCut
from fsdp_optim.foreign.per_rank.id_order import live_of_ids
from fsdp_optim.foreign.per_rank.local_optim import RankOriginal, RankParam, groups_of, joined
from fsdp_optim.foreign.per_rank.rank_files import (
    RankFiles,
    UnreadableOptimError,
    by_rank,
    complete,
    unreadable,
)
from fsdp_optim.foreign.reader import ForeignFormat, ForeignReader
from fsdp_optim.foreign.torch.folder import checked_summary
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.layout import Shape
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.model_dict import is_extra_state

_NAME = re.compile(r"(?P<stem>[^/]+)-shard(?P<rank>\d{1,7})\.pt")
_METADATA = ("shard_metadata", "fsdp_metadata")
_OPTIM = "last_optimizer_state"
_NOT_EXTRA = frozenset({"model", _OPTIM, *_METADATA})


class FairscaleShardFiles(ForeignFormat):
    """One file of each rank, with fairscale's flat shards and their description."""

    name = "fairscale shards"

    def recognises(self, opened: Opened) -> bool:
        if opened.selected:
            return _NAME.fullmatch(opened.selected) is not None or bool(_of_stem(opened, opened.selected))
        try:
            return any(_NAME.fullmatch(name) for name in opened.names())
        except CheckpointError:
            return False

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        checked_summary(opened)
        files = RankFiles.read(opened, _names(opened))
        with as_checkpoint_error(opened.where):
            values = files.dicts([archive.value for archive in files.archives], "the file")
            shards = _Shards.of(files, values)
            model, aliases = shards.model()
            extras = files.extras(_NOT_EXTRA)
            return ForeignReader(
                opened,
                self.name,
                model,
                shards.optim(),
                files.sources,
                aliases,
                extra_values=extras[0],
                module_values=files.module_values(shards.weights[0]),
                rank_extras=files.rank_extras(extras),
                pickled=partial(files.pickled, extras[0]),
                world_size=files.num,
                step=_step(values[0]),
                metadata_digest=files.digest,
                cut=shards.cut(),
                files=files.names,
            )


FAIRSCALE_SHARDS = FairscaleShardFiles()


def _of_stem(opened: Opened, selected: str) -> list[re.Match[str]]:
    stem = selected.removesuffix(".pt")
    try:
        matches = [match for name in opened.names() if (match := _NAME.fullmatch(name))]
    except CheckpointError:
        return []
    return [match for match in matches if match["stem"] == stem]


def _names(opened: Opened) -> tuple[str, ...]:
    """Return the files of one save, in the order of their ranks."""
    selected = _NAME.fullmatch(opened.selected)
    if selected is not None:
        matches = _of_stem(opened, selected["stem"])
    elif opened.selected:
        matches = _of_stem(opened, opened.selected)
    else:
        matches = [match for name in opened.names() if (match := _NAME.fullmatch(name))]
    stems = sorted({match["stem"] for match in matches})
    if len(stems) > 1:
        raise CheckpointError(
            f"{opened.where}: has the files of several checkpoints, {shortened(f'{stem}.pt' for stem in stems)}: give "
            "the path of one of them"
        )
    file_of_rank = by_rank(opened.where, ((int(match["rank"]), match.string) for match in matches))
    return complete(opened.where, file_of_rank)


def _step(value: Mapping[str, Any]) -> int | None:
    history = value.get("optimizer_history")
    last = history[-1] if isinstance(history, list) and history else None
    step = last.get("num_updates") if isinstance(last, Mapping) else None
    return step if type(step) is int else None


@dataclass(frozen=True)
class _Unit:
    """One parameter of one FSDP unit, as the metadata describe it: the original parameters in it, end to end."""

    path: str
    key: str
    fqns: tuple[str, ...]
    shapes: tuple[Shape, ...]
    numels: tuple[int, ...]
    padding: tuple[int, ...]
    is_own: bool

    @property
    def numel(self) -> int:
        return sum(self.numels)


@dataclass(frozen=True)
class _Shards:
    """The shards of a save. `units`: in the order of the model's parameters; `owners`: by key, the ranks that share a unit."""

    files: RankFiles
    values: Sequence[Mapping[str, Any]]
    weights: Sequence[Mapping[str, Any]]
    units: Sequence[_Unit]
    shared: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, files: RankFiles, values: Sequence[Mapping[str, Any]]) -> _Shards:
        key = next((key for key in _METADATA if key in values[0]), None)
        if key is None or "model" not in values[0]:
            raise files.damaged(
                0, "has no model or no shard_metadata, so it is not a file of fairscale's local_state_dict"
            )
        metadata = files.dicts([value.get(key) for value in values], key)
        weights = files.dicts([value.get("model") for value in values], "model")
        files.agreed({rank: list(of_rank) for rank, of_rank in enumerate(weights)}, "the list of names in model")
        described = [_without_padding(of_rank) for of_rank in metadata]
        files.agreed(dict(enumerate(described)), key)
        files.agreed({rank: _step(value) for rank, value in enumerate(values)}, "num_updates")
        units = {unit.key: unit for unit in _units(metadata)}
        missing = [key for key in units if key not in weights[0]]
        if missing:
            raise files.damaged(0, f"model does not have {missing[0]}, which {key} describes")
        # The keys of a state_dict come in the order of the parameters; the metadata go from unit to unit.
        in_order = [units[key] for key in weights[0] if key in units]
        return cls(files, values, weights, in_order, _shared(metadata[0]))

    def model(self) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        """Return the weights and buffers by name, and other names of them."""
        model: dict[str, StoredTensor] = {}
        for unit in self.units:
            for live, tensors in self._of_ranks(unit):
                keys = [original.fqn for original in live.originals]
                try:
                    model.update(zip(keys, live.stored(keys, tensors), strict=True))
                except LayoutError as error:
                    raise self.files.damaged(min(tensors), str(error)) from error
        units = {self._place(self.weights[0][unit.key]): unit for unit in self.units}
        aliases = {alias: fqn for fqn, alias in self.shared if fqn in model}
        for key, value in self.weights[0].items():
            if not isinstance(value, StoredTensor) or is_extra_state(str(key)):
                continue  # see module_values
            tied = units.get(self._place(value))
            if tied is None:
                model[key] = structs.replace(value, key=key)  # a buffer: the first rank's counts
            elif key != tied.key and len(tied.fqns) == 1:
                aliases[key] = tied.fqns[0]
        return model, aliases

    def cut(self) -> FairscaleCut | None:
        """How the parameters are flattened, for a writer of such files; None if no such writer can do the same."""
        alone = self.cut_alone()
        units = self.flattened() or alone
        return FairscaleCut(units, flattens=alone is None) if units is not None else None

    def flattened(self) -> dict[str, tuple[str, ...]] | None:
        """Return the FQNs of each unit by its path; None if a unit is not one flat parameter."""
        fqns_of = {unit.path: unit.fqns for unit in self.units}
        is_flat = all(unit.key.rpartition(".")[2].startswith("flat_param_") for unit in self.units)
        return (
            fqns_of if is_flat and len(fqns_of) == len(self.units) and not any(u.is_own for u in self.units) else None
        )

    def cut_alone(self) -> dict[str, tuple[str, ...]] | None:
        """Return the FQNs of each wrapped module by its path, if every parameter is cut by itself; else None."""
        metadata = next(self.values[0][key] for key in _METADATA if key in self.values[0])
        fqns_of: dict[str, tuple[str, ...]] = {str(unit["fsdp_path"]): () for unit in metadata["param_metadata"]}
        for unit in self.units:
            if unit.fqns != (unit.key,) or unit.is_own:
                return None
            fqns_of[unit.path] = (*fqns_of.get(unit.path, ()), unit.key)
        return fqns_of

    def _place(self, stored: StoredTensor) -> tuple[object, ...]:
        return stored.file, stored.start, stored.shape, stored.key

    def _of_ranks(self, unit: _Unit) -> Iterator[tuple[RankParam, dict[int, StoredTensor]]]:
        """Yield the live parameters of a unit's parameter, one of all ranks or one of each, with their weights by rank."""
        tensors = {rank: weights[unit.key] for rank, weights in enumerate(self.weights)}
        for rank, stored in tensors.items():
            if not isinstance(stored, StoredTensor):
                raise self.files.damaged(rank, f"{unit.key} is a {type(stored).__name__}, not a tensor")
        self.files.agreed(tensors, f"the shape of {unit.key}")
        for live in self._live(unit):
            yield live, {rank: tensors[rank] for rank in live.local_shapes}

    def _live(self, unit: _Unit) -> list[RankParam]:
        num, chunk = self.files.num, prod(self.weights[0][unit.key].shape)
        each = -(-unit.numel // num)
        padding = tuple(each - min(max(unit.numel - rank * each, 0), each) for rank in range(num))
        if chunk == each and unit.padding == padding:
            return [self._cut(unit, range(num), "")]
        if chunk == unit.numel and not any(unit.padding):
            if unit.is_own:
                return [self._cut(unit, range(rank, rank + 1), f"@{rank}") for rank in range(num)]
            raise CheckpointError(
                f"{self.files.opened.where}: {unit.fqns[0]} is whole in the files of all {num} ranks, and the files do not say "
                "whether these are copies or parameters of their own: gather it with the model that saved it"
            )
        if sum(num * chunk - pad for pad in unit.padding[:1]) < unit.numel:
            raise CheckpointError(
                f"{self.files.opened.where}: {unit.fqns[0]}: the files of {num} ranks have {chunk} elements each, of "
                f"{unit.numel}: the files of more ranks belong to this save, or the unit was on a process group of its own"
            )
        rank = next((rank for rank in range(num) if unit.padding[rank] != padding[rank]), 0)
        raise self.files.damaged(
            rank,
            f"{unit.fqns[0]} has {chunk} elements, {unit.padding[rank]} of them padding, and {unit.numel} elements "
            f"on {num} ranks make {each}, {padding[rank]} of them padding: the file was "
            "renamed, or the unit was on a process group of its own, and the files do not say on which ranks",
        )

    def _cut(self, unit: _Unit, ranks: range, suffix: str) -> RankParam:
        """Return a parameter cut into equal chunks over these ranks."""
        shape = self.weights[0][unit.key].shape
        chunk, start = prod(shape), 0
        originals = []
        for fqn, of, numel in zip(unit.fqns, unit.shapes, unit.numels, strict=True):
            runs = []
            for index in range(start // chunk if chunk else 0, len(ranks)):
                low, high = max(start, index * chunk), min(start + numel, (index + 1) * chunk)
                if low >= high:
                    break
                runs.append((ranks[index], low - start, high - start, low - index * chunk))
            originals.append(RankOriginal(f"{fqn}{suffix}", of, tuple(runs)))
            start += numel
        return RankParam(f"{unit.key}{suffix}", tuple(originals), dict.fromkeys(ranks, shape))

    def optim(self) -> Mapping[str, Any] | None:
        """Return the optimizer's full dict by name; None if the files have none."""
        dicts = [value.get(_OPTIM) for value in self.values]
        if all(not optim for optim in dicts):
            return None
        checked = self.files.dicts(dicts, _OPTIM)
        try:
            groups = [group["params"] for group in groups_of(self.files, checked, _OPTIM)]
            places = live_of_ids(groups, len(self.units), partial(self._fits, checked[0]))
            if places is None:
                raise UnreadableOptimError(self._why_unknown(groups))
            return self._joined(checked, places)
        except UnreadableOptimError as reason:
            return unreadable(reason)

    def _joined(self, dicts: Sequence[Mapping[str, Any]], places: Mapping[Any, int]) -> Mapping[str, Any]:
        owned = {key: self._live(self.units[place]) for key, place in places.items()}
        if all(len(live) == 1 for live in owned.values()):
            return joined(self.files, dicts, {key: live[0] for key, live in owned.items()}, _OPTIM)
        # Ids of parameters that each rank has for itself become keys of their own.
        by_key = {(key, param.name): param for key, live in owned.items() for param in live}
        return joined(self.files, [_with_keys(optim, rank, owned) for rank, optim in enumerate(dicts)], by_key, _OPTIM)

    def _fits(self, optim: Mapping[str, Any], key: Any, place: int) -> bool:
        """Return whether the values of an id on the first rank may belong to a unit."""
        state = optim.get("state")
        values = state.get(key, {}) if isinstance(state, Mapping) else {}
        shapes = {value.shape for value in values.values() if isinstance(value, StoredTensor) and value.shape}
        return not shapes or self.weights[0][self.units[place].key].shape in shapes

    def _why_unknown(self, groups: Sequence[Sequence[Any]]) -> str:
        return (
            f"{self.files.opened.where}: the optimizer has {' + '.join(str(len(group)) for group in groups)} parameters, the "
            f"model {len(self.units)} flat ones, and their sizes do not tell which is which (the files have no names): load the "
            "weights alone, or resume once with the wrapped model that saved, and save with this library"
        )


def _with_keys(optim: Mapping[str, Any], rank: int, owned: Mapping[Any, Sequence[RankParam]]) -> dict[str, Any]:
    """Return the dict of one rank with keys (id, name of the live parameter)."""
    state = optim.get("state")
    groups = optim["param_groups"]
    return {
        **optim,
        "state": {
            (key, owned[key][rank if len(owned[key]) > 1 else 0].name if key in owned else ""): values
            for key, values in (state.items() if isinstance(state, Mapping) else ())
        },
        "param_groups": [
            {**group, "params": [(key, param.name) for key in group["params"] for param in owned[key]]}
            for group in groups
        ],
    }


def _units(metadata: Sequence[Mapping[str, Any]]) -> Iterator[_Unit]:
    for index, unit in enumerate(metadata[0]["param_metadata"]):
        path = unit["fsdp_path"]
        for backing, param in unit["params"].items():
            shapes = tuple(tuple(int(size) for size in shape) for shape in param["shapes"])
            numels = tuple(int(numel) for numel in param["numels"])
            if [prod(shape) for shape in shapes] != list(numels) or min((0, *numels)) < 0:
                raise ValueError(f"the shapes of {_joined_name(path, backing)} do not have its numbers of elements")
            yield _Unit(
                path=path,
                key=_joined_name(path, backing),
                fqns=tuple(_joined_name(path, name) for name in param["names"]),
                shapes=shapes,
                numels=numels,
                padding=tuple(int(entry["param_metadata"][index]["params"][backing]["padding"]) for entry in metadata),
                is_own=bool(unit["no_broadcast_optim_state"]),
            )


def _shared(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs (name, other name) of tied parameters inside of flat parameters."""
    return [
        (_joined_name(unit["fsdp_path"], source), _joined_name(unit["fsdp_path"], other))
        for unit in metadata["param_metadata"]
        for source, other in unit.get("shared_param_info", ())
    ]


def _without_padding(metadata: Mapping[str, Any]) -> Any:
    """Return the metadata of one rank without the entries that differ between ranks."""
    return [
        {
            **unit,
            "params": {
                key: {name: value for name, value in param.items() if name != "padding"}
                for key, param in unit["params"].items()
            },
        }
        for unit in metadata["param_metadata"]
    ]


def _joined_name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else str(name)
