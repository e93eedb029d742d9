"""Files of each rank with ShardedTensors or DTensors: `torch.save` of a sharded state dict of FSDP1, or a state dict of FSDP2.

A name that means different parameters on different ranks (experts on groups of ranks, which every rank counts from 0) becomes
`name@rank`, with the lowest rank that has the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdp_optim.errors import CheckpointError, FsdpOptimError
from fsdp_optim.foreign.archive.torch_archive import is_torch_archive, read_archive
from fsdp_optim.foreign.per_rank.local_optim import with_keys
from fsdp_optim.foreign.per_rank.rank_files import (
    RankFiles,
    UnreadableOptimError,
    by_rank,
    complete,
    unreadable,
)
from fsdp_optim.foreign.per_rank.rank_halves import RankHalf, ValuesByRank, first_shards, in_order, numbers_in
from fsdp_optim.foreign.per_rank.torch_shards import DTensorFields, Fields, ShardedTensorFields, shards_of, stand_ins
from fsdp_optim.foreign.reader import ForeignFormat, ForeignReader
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.unread import unread_in
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.model_dict import is_extra_state

_NAME = re.compile(r"(?P<before>[^/]*?)(?P<rank>\d{1,7})(?P<after>\.(pt|pth|bin|ckpt))")
_OF_VERL = re.compile(r"(?P<half>model|optim|extra_state)_world_size_(?P<num>\d{1,7})_rank_")
"""What verl and SkyRL call a rank's files, up to its number: the model, the optimizer, and the trainer's values."""
_MODELS = frozenset({"model", "state_dict", "model_state_dict", "module", "model_state"})
_LOOKS = 4  # at files that cannot be read


class RankTensors(ForeignFormat):
    """One file of each rank, with ShardedTensors or DTensors."""

    name = "sharded tensors of each rank"

    def recognises(self, opened: Opened) -> bool:
        try:
            return any(_is_sharded(opened, file_of_rank) for file_of_rank in _families(opened).values())
        except FsdpOptimError:
            return False

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        families = {
            key: file_of_rank for key, file_of_rank in _families(opened).items() if _is_sharded(opened, file_of_rank)
        }
        read = [_RankContents.of(opened, file_of_rank) for file_of_rank in families.values()]
        models = [contents for contents in read if contents.model is not None]
        optims = [contents for contents in read if contents.optim is not None]
        if len(models) > 1 or len(optims) > 1:
            names = ", ".join(before + "<rank>" + after for before, after in families)
            raise CheckpointError(
                f"{opened.where}: has the files of several checkpoints, {names}: give the path of one file"
            )
        with as_checkpoint_error(opened.where):
            merged = _Merged(models[0] if models else None, optims[0] if optims else None)
            main = read[0]
            but = frozenset(key for key in (main.model_key, main.optim_key) if key is not None)
            has_others = main.model_key != "" and main.optim_key != ""
            beside = main.files if has_others else _extras_of_verl(opened, families)
            extras = beside.extras(but if has_others else frozenset()) if beside is not None else []
            extras = extras if beside is not None and any(extras) else []
            return ForeignReader(
                opened,
                self.name,
                merged.model(),
                merged.optim() if optims else _flat_optim_of_verl(opened, families),
                {name: source for contents in read for name, source in contents.files.sources.items()},
                extra_values=extras[0] if extras else None,
                module_values=merged.module_values(),
                rank_extras=beside.rank_extras(extras) if beside is not None else [],
                pickled=partial(beside.pickled, extras[0]) if beside is not None and extras else None,
                world_size=main.files.num,
                files=[name for contents in read for name in contents.files.names],
                metadata_digest=" ".join(contents.files.digest for contents in read),
            )


RANK_TENSORS = RankTensors()


def _families(opened: Opened) -> dict[tuple[str, str], dict[int, str]]:
    """Return the families of files whose names differ in a number only, by the text around it; of a selected file, its own."""
    matches = [match for name in opened.names() if (match := _NAME.fullmatch(name))]
    asked = _NAME.fullmatch(opened.selected)
    families: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for match in matches:
        families.setdefault((match["before"], match["after"]), []).append((int(match["rank"]), match.string))
    return {
        key: by_rank(opened.where, numbered)
        for key, numbered in families.items()
        if (not opened.selected or (asked is not None and _is_of_one((asked["before"], asked["after"]), key)))
    }


def _is_of_one(asked: tuple[str, str], key: tuple[str, str]) -> bool:
    """Return whether two families of files are of one checkpoint: the same, or two of verl by equally many ranks."""
    first, second = (_OF_VERL.fullmatch(before) for before, _ in (asked, key))
    return asked == key or (first is not None and second is not None and first["num"] == second["num"])


def _flat_optim_of_verl(opened: Opened, families: Iterable[tuple[str, str]]) -> Mapping[str, Any] | None:
    """Return an optimizer that is refused when it is loaded, where verl's files of it have no sharded tensors."""
    for key, file_of_rank in _families(opened).items():
        match = _OF_VERL.fullmatch(key[0])
        if match is not None and match["half"] == "optim" and any(_is_of_one(key, other) for other in families):
            return unreadable(
                UnreadableOptimError(
                    f"{opened.named(file_of_rank[min(file_of_rank)])}: has FSDP1's flat shards under ids, which do not say "
                    "whose elements they are: load the weights without optim=; to convert them, move these files away"
                )
            )
    return None


def _extras_of_verl(opened: Opened, families: Iterable[tuple[str, str]]) -> RankFiles | None:
    """Return the files with the trainer's values of each rank beside those of the model and the optimizer, if there are any."""
    for key, file_of_rank in _families(opened).items():
        match = _OF_VERL.fullmatch(key[0])
        if match is not None and match["half"] == "extra_state" and any(_is_of_one(key, other) for other in families):
            files = RankFiles.read(opened, complete(opened.where, file_of_rank, int(match["num"])), stand_ins())
            files.dicts([archive.value for archive in files.archives], "the file")
            return files
    return None


def _is_sharded(opened: Opened, file_of_rank: Mapping[int, str]) -> bool:
    """Return whether one of the first files has sharded tensors, or the only file is of a single rank and has none."""
    for name in [file_of_rank[rank] for rank in sorted(file_of_rank)][:_LOOKS]:
        if not is_torch_archive(opened, name):
            continue
        try:
            value = read_archive(opened, name, stand_ins=stand_ins()).value
            alone = list(file_of_rank) == [0] and name.endswith("rank0.pt") and isinstance(value, Mapping)
            if first_shards(value) is not None or (alone and any(map(_is_half, value.values()))):
                return True
        except CheckpointError:
            continue  # opening the format names the damage of this file, if it belongs to the others
    return False


# ------------------------------------------------------------------------------------------- what the files have


@dataclass(frozen=True)
class _RankContents:
    """The files of all ranks. `model_key`, `optim_key`: the keys of the halves; "": the file is the half; None: there is none."""

    files: RankFiles
    model_key: Any
    optim_key: Any

    @classmethod
    def of(cls, opened: Opened, file_of_rank: Mapping[int, str]) -> _RankContents:
        first = min(file_of_rank)
        probe = RankFiles.read(opened, [file_of_rank[first]], stand_ins())
        with as_checkpoint_error(opened.named(file_of_rank[first])):
            fields = first_shards(probe.archives[0].value)
            world_size = 0
            if fields is not None:
                shards = shards_of(fields, _rank_in(fields, first), partial(numbers_in, probe, 0))
                world_size = max((shards.world_size, *(rank + 1 for rank in shards.ranks)))
        files = RankFiles.read(
            opened, complete(opened.where, file_of_rank, max(world_size, max(file_of_rank) + 1)), stand_ins()
        )
        values = files.dicts([archive.value for archive in files.archives], "the file")
        others = {rank: list(value) for rank, value in enumerate(values) if not _is_half(value)}
        if others:
            files.agreed(others, "the list of its values")
        return cls(files, *_halves(files, values))

    def _half(self, key: Any) -> ValuesByRank | None:
        if key is None:
            return None
        values = [archive.value if key == "" else archive.value[key] for archive in self.files.archives]
        return dict(enumerate(self.files.dicts(values, str(key) or "the file")))

    @property
    def model(self) -> ValuesByRank | None:
        return self._half(self.model_key)

    @property
    def optim(self) -> ValuesByRank | None:
        return self._half(self.optim_key)


def _rank_in(fields: Fields, rank: int) -> int:
    """Return the rank that saved a DTensor, if its mesh says it."""
    mesh = fields.fields["_spec"]["mesh"].fields if isinstance(fields, DTensorFields) else {}
    own = mesh.get("_rank")
    return own if type(own) is int else rank


def _is_optim(value: Any) -> bool:
    return isinstance(value, Mapping) and (
        {"state", "param_groups"} <= set(value) or any(str(key).startswith("param_groups.") for key in value)
    )


def _is_model(value: Any) -> bool:
    return isinstance(value, Mapping) and any(
        isinstance(item, (ShardedTensorFields, DTensorFields, StoredTensor)) for item in value.values()
    )


def _is_half(value: Any) -> bool:
    return _is_optim(value) or _is_model(value)


def _halves(files: RankFiles, values: Sequence[Mapping[Any, Any]]) -> tuple[Any, Any]:
    """Return the keys of the model's and of the optimizer's dict."""
    if _is_optim(values[0]):
        return None, ""
    if _is_model(values[0]):
        return "", None
    optims = [key for key, value in values[0].items() if _is_optim(value)]
    models = [key for key, value in values[0].items() if _is_model(value) and not _is_optim(value)]
    models = [key for key in models if first_shards(values[0][key]) is not None or key in _MODELS]
    for what, keys in (("models", models), ("optimizers", optims)):
        if len(keys) > 1:
            raise files.damaged(0, f"has several {what}, {', '.join(map(str, keys))}, which is not supported")
    return next(iter(models), None), next(iter(optims), None)


# ------------------------------------------------------------------------------------------- one model of all files


class _Merged:
    """The model and the optimizer of all ranks, as if one rank had saved them."""

    def __init__(self, model: _RankContents | None, optim: _RankContents | None) -> None:
        self._model = RankHalf(model.files, model.model or {}) if model is not None else None
        self._optim = RankHalf(optim.files, _states(optim.optim or {})) if optim is not None else None
        self._groups: ValuesByRank = dict(optim.optim or {}) if optim is not None else {}
        halves = [half for half in (self._model, self._optim) if half is not None]
        for partition in sorted({partition for half in halves for partition in half.partitions}, key=in_order):
            differing = next((difference for half in halves if (difference := half.first_difference(partition))), "")
            if not differing:
                for half in halves:
                    half.keep_lowest(partition)
            elif all(half.partitions == {partition} for half in halves) and len(frozenset().union(*partition)) > 1:
                raise CheckpointError(
                    f"{halves[0].files.opened.where}: {differing}, and no parameter is on all ranks: the files are of several "
                    "models; put those of each into a folder of its own"
                )
        self._renames: dict[int, dict[str, str]] = {}
        for half in halves:
            for rank, renames in half.renames().items():
                self._renames.setdefault(rank, {}).update(renames)

        for rank, renames in self._model.renames_of_whole(self._stepped).items() if self._model is not None else ():
            self._renames.setdefault(rank, {}).update(renames)

    @property
    def _stepped(self) -> set[Any]:
        """The names of parameters with state."""
        return {name for values in (self._optim.values if self._optim is not None else {}).values() for name in values}

    def module_values(self) -> dict[str, Any]:
        """By name, what modules add to a state dict besides parameters and buffers."""
        half = self._model
        return half.files.module_values(half.values[min(half.values)]) if half is not None else {}

    def model(self) -> dict[str, StoredTensor]:
        if self._model is None:
            return {}
        stepped = set(self._stepped)
        stepped |= {new for renames in self._renames.values() for old, new in renames.items() if old in stepped}
        return {
            name: self._model.tensor(name, by, strictly=name in stepped)
            for name, by in self._model.renamed(self._renames).items()
            if any(isinstance(value, (Fields, StoredTensor)) for value in by.values()) and not is_extra_state(str(name))
        }

    def optim(self) -> Mapping[str, Any] | None:
        if self._optim is None:
            return None
        files, ranks = self._optim.files, list(self._optim.values)
        groups = {rank: self._groups[rank] for rank in ranks}
        try:
            unread = unread_in(list(groups.values()))
            if unread is not None:
                raise UnreadableOptimError(
                    f"{files.opened.where}: the optimizer has an object of the class {unread.what}, which is not read"
                )
            has_ids = any(isinstance(key, int) for values in self._optim.values.values() for key in values)
            if has_ids and (self._renames or self._optim.has_other_ids):
                raise UnreadableOptimError(
                    f"{files.opened.where}: ranks have different parameters, and the optimizer's dict has ids without names, "
                    "which do not tell them apart: save it with names, as FSDP.optim_state_dict does"
                )
            return self._merged_optim(self._optim, groups)
        except UnreadableOptimError as reason:
            return unreadable(reason)

    def _merged_optim(self, half: RankHalf, groups: ValuesByRank) -> dict[str, Any]:
        files = half.files
        state: dict[Any, Any] = {}
        for key, by in half.renamed(self._renames).items():
            names = dict.fromkeys(name for values in by.values() for name in values)
            state[key] = {
                name: half.value(f"state.{key}.{name}", {r: v[name] for r, v in by.items() if name in v})
                for name in names
            }
        if not all("param_groups" in value for value in groups.values()):  # one level of keys
            flat = {f"state.{key}.{name}": value for key, values in state.items() for name, value in values.items()}
            others: dict[str, dict[int, Any]] = {}
            for rank, value in groups.items():
                for key, item in value.items():
                    if not str(key).startswith("state."):
                        others.setdefault(self._renamed_key(rank, str(key)), {})[rank] = item
            return {**flat, **{key: with_keys(half.value(key, by), key) for key, by in others.items()}}
        made = []
        listed = {rank: value["param_groups"] for rank, value in groups.items()}
        files.agreed({rank: len(of_rank) for rank, of_rank in listed.items()}, "the number of param groups")
        for index in range(len(next(iter(listed.values())))):
            by_rank = {rank: of_rank[index] for rank, of_rank in listed.items()}
            hyper = {
                rank: {n: v for n, v in group.items() if n not in ("params", "param_names")}
                for rank, group in by_rank.items()
            }
            names = files.agreed({rank: list(group) for rank, group in hyper.items()}, f"param group {index}")
            common = {
                name: half.value(f"param_groups.{index}.{name}", {rank: group[name] for rank, group in hyper.items()})
                for name in names
            }
            made.append({**common, **self._listed(files, by_rank, index)})
        rest = {
            key: half.value(str(key), {rank: value[key] for rank, value in groups.items() if key in value})
            for key in next(iter(groups.values()))
            if key not in ("state", "param_groups")
        }
        return {**with_keys(rest, "other"), "state": state, "param_groups": made}

    def _listed(self, files: RankFiles, groups: ValuesByRank, index: int) -> dict[str, Any]:
        """Return the parameters that a group lists on all ranks, each once, and their names beside ids."""
        params = {rank: group["params"] for rank, group in groups.items()}
        if any(isinstance(key, int) for listed in params.values() for key in listed):
            entry = {"params": files.agreed(params, f"the list of parameters of param group {index}")}
            named = {rank: group["param_names"] for rank, group in groups.items() if "param_names" in group}
            return {**entry, **({"param_names": files.agreed(named, f"param_names of group {index}")} if named else {})}
        renamed = [self._renames.get(rank, {}).get(name, name) for rank, listed in params.items() for name in listed]
        return {"params": list(dict.fromkeys(renamed))}

    def _renamed_key(self, rank: int, key: str) -> str:
        """Return a flattened key, such as param_groups.<name>.lr, under the parameter's new name."""
        section, _, rest = key.partition(".")
        name, _, of = rest.rpartition(".")
        return f"{section}.{self._renames.get(rank, {}).get(name, name)}.{of}"


def _states(values: ValuesByRank) -> dict[int, dict[Any, Mapping[str, Any]]]:
    """Return the state in optimizer dicts, nested or with one level of keys."""
    made: dict[int, dict[Any, Any]] = {}
    for rank, value in values.items():
        if "state" in value:
            made[rank] = {key: entry for key, entry in value["state"].items() if isinstance(entry, Mapping)}
            continue
        nested: dict[Any, dict[str, Any]] = {}
        for key, entry in value.items():
            section, _, rest = str(key).partition(".")
            name, _, of = rest.rpartition(".")
            if section == "state":
                nested.setdefault(name, {})[of] = entry
        made[rank] = nested
    return made
