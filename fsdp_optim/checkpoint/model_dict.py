"""The full model dict: gathered from a live model to whole tensors, and loaded from one rank into a live model."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.common import module_values
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.contents import LEFT_OUT, WEIGHT, check_not_empty, checked_weights_of
from fsdp_optim.checkpoint.common.local_extents import bytes_of
from fsdp_optim.checkpoint.load.cast_range import check_weights
from fsdp_optim.checkpoint.load.installing import install_all
from fsdp_optim.checkpoint.load.reading import FlatsEnd, stored_value
from fsdp_optim.checkpoint.load.shared_memory import check_shared
from fsdp_optim.checkpoint.load.targets import Weights
from fsdp_optim.errors import RankError, StateError
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.index import CheckpointIndex, Facts, KnownExtra
from fsdp_optim.formats.base.protocols import (
    MODULES,
    StoredTensor,
)
from fsdp_optim.layout import Whole, whole_on
from fsdp_optim.move import End, StateValue, move
from fsdp_optim.options import CallArguments, GatherArguments, Model
from fsdp_optim.results.calls import Incompatible
from fsdp_optim.state.merged.global_state import GlobalState
from fsdp_optim.state.merged.replicas import ELEMENTS
from fsdp_optim.tensors.memory import detached_copy, dtype_name, flatten, is_plain
from fsdp_optim.tensors.model_dict import (
    is_extra_state,
    module_path,
    plain_version,
    versions_beside,
    with_versions,
)
from fsdp_optim.transport.agree import agree, all_equal, all_gather_bytes, exchange_reports
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local, agree_on_state, collective_call
from fsdp_optim.verbs.gather import Gathering, move_state
from fsdp_optim.verbs.replicas import compare_shards

_FIRST = 1
"""The version of the code of a module that says nothing else (`torch.nn.Module._version`)."""


def gather_model(model: Model, options: GatherArguments) -> dict[str, Any] | None:
    """The full model dict, or the part of it that `options.weights` names, on recipients; None elsewhere."""
    with collective_call("gather_full_model_state_dict", [model], options, options.call) as ((reader,), group):
        recipient = options.recipient_rank
        if recipient is not None and recipient not in group.ranks:
            raise RankError(
                f"recipient_rank {recipient} is not one of the ranks {list(group.ranks)} that share this model; give one of "
                "these, or None for all of them"
            )
        mismatch = options.call.on_replica_mismatch
        local, global_state = agree_on_state(
            group,
            lambda: checked_weights_of(reader, group.ranks, options.call, options.weights),
            options,
            options.weights,
            with_state=True,
            on_replica_mismatch=mismatch,
            what=ELEMENTS,
        )
        check_not_empty(global_state, reader)
        global_state = compare_shards(group, local, global_state, mismatch, ELEMENTS)
        recipients = group.ranks if recipient is None else (recipient,)
        gathering = Gathering(group, local, global_state, recipients)
        failure = Failure()
        wanted = {fqn: param for fqn, param in global_state.params.items() if param.group_index != LEFT_OUT}
        tensors = move_state(gathering, tuple(wanted.values()), failure)
        agree(group, "gathered", failure.error, fatal=failure.fatal)
        values = _copied(
            group, module_values.collect(group, local.module_values, global_state, recipients), global_state
        )
        versions = _versions(group, reader, local)
        if group.rank not in recipients:
            return None
        full = {fqn: tensors[fqn, WEIGHT] for fqn in wanted}
        full |= {alias: full[fqn] for alias, fqn in local.view.aliases.items() if fqn in full}
        values |= {alias: values[fqn] for alias, fqn in local.module_values.aliases.items() if fqn in values}
        full |= values
        # Modules of other ranks have the first version where these told no other one.
        others = () if local.view.given_names else _modules_of(full)
        return with_versions(full, {path: versions.get(path, _FIRST) for path in (*versions, *others)})


def _versions(group: RankGroup, reader: ModelReader, local: Local) -> dict[str, Any]:
    """Return the versions of the code of modules by path: all on this rank, and on other ranks those that are not the first one.

    Called by all ranks. Where `name_of` gives names, only modules with parameters or values of their own are known by theirs.
    """
    own, given_names = reader.versions(), local.view.given_names
    if given_names:
        paths = {module_path(fqn): module_path(name) for fqn, name in given_names.items()}
        own = {paths[path]: version for path, version in own.items() if path in paths}
        values = local.module_values.values.items()
        own |= {module_path(name): getattr(live.module, "_version", None) for name, live in values}
    told = {path: plain_version(version) for path, version in own.items() if version != _FIRST}
    content, of_others = json.dumps(told).encode(), dict[str, Any]()
    for report in () if all_equal(group, "versions", content) else exchange_reports(group, content):
        of_others = {**json.loads(report), **of_others}  # that of the lowest rank counts
    return own | {path: version for path, version in of_others.items() if path not in own}


def _modules_of(names: Iterable[str]) -> set[str]:
    """Return the paths of all modules around some tensors and other entries."""
    paths, inner = set[str](), {*map(module_path, names)}
    while inner:
        paths |= inner
        inner = {*map(module_path, inner)} - paths
    return paths


def _copied(group: RankGroup, values: Mapping[str, Any], global_state: GlobalState) -> dict[str, Any]:
    """Return copies of the values of modules, without versions: the modules change their own. Called by all ranks.

    Raises StateError, the same on all ranks, for a value that cannot be copied.
    """
    failure, copies = Failure(), dict[str, Any]()
    with failure:
        for fqn, (_, value) in values.items():
            try:
                copies[fqn] = detached_copy(value)
            except Exception as error:
                raise StateError(
                    f"{fqn}: is a {type(value).__name__} that cannot be copied: {type(error).__name__}: {error}: let "
                    "get_extra_state() return tensors and plain values"
                ) from error
    if global_state.module_values:  # the same on all ranks
        agree(group, "copied", failure.error)
    return copies


def scatter_model(
    model: Model, full: Mapping[str, Any] | None, source_rank: int, options: LoadArguments
) -> Incompatible:
    """Load a full model dict that only one rank has into the model of all ranks."""
    with collective_call("scatter_full_model_state_dict", [model], options, options.call, all_of_plain=True) as (
        (reader,),
        group,
    ):
        given = _send_described(group, full, source_rank, _names_of_values(reader, group, options.call))
        about = f"a full model dict of rank {source_rank}"
        weights = Weights.agree_on_state(reader, group, given, options, about, readers=(source_rank,))
        failure = Failure()
        move(list(weights.stored_values()), _GivenEnd(given, source_rank), FlatsEnd(), group, group.budget, failure)
        with failure:
            if failure.error is None:
                check_weights(weights)
                if options.call.strict:
                    check_shared(weights, None, (), group.rank)
        agree(group, "received", failure.error, fatal=failure.fatal)
        install_all(group, weights, reader, None, shard=None, keep=(), objects=None)
    return Incompatible(weights.missing, weights.unexpected)


@dataclass(frozen=True)
class _GivenDict:
    """A full model dict. `tensors`: the tensors themselves, on the source rank only."""

    index: CheckpointIndex
    tensors: Mapping[str, torch.Tensor] = field(repr=False)

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        for name, ranges in extents.items():
            data = bytes_of(flatten(self.tensors[name].detach()).cpu())
            for extent in ranges:
                extent.memory[:] = data[extent.start : extent.stop]


@dataclass(frozen=True)
class _GivenEnd(End):
    """The tensors of a full model dict, whole on the source rank."""

    given: _GivenDict
    source_rank: int

    def placement(self, value: StateValue) -> Whole:
        return whole_on(value.placement.shape, (self.source_rank,))

    def memory(self, value: StateValue) -> torch.Tensor | None:
        held = self.given.tensors.get(stored_value(value).stored.key)
        return flatten(held.detach()) if held is not None else None


def _names_of_values(reader: ModelReader, group: RankGroup, options: CallArguments) -> frozenset[str]:
    """Return the names of the values of modules on all ranks, which may be tensors. Called by all ranks."""
    failure, names = Failure(), list[str]()
    with failure:
        view = reader.read(group.ranks, options.name_of)
        values = reader.module_values(view, options.name_of, runs_hooks=options.views == "hooks")
        names = [*values.values, *values.aliases]
    of_ranks = exchange_reports(group, json.dumps(names).encode(), failure.error)
    return frozenset(name for listed in of_ranks for name in json.loads(listed))


def _send_described(
    group: RankGroup, full: Mapping[str, Any] | None, source_rank: int, of_modules: Collection[str]
) -> _GivenDict:
    """A full model dict on its source rank; a description of it on the others. Called by all ranks.

    `of_modules`: the names of the values of modules.
    """
    if source_rank not in group.ranks:
        raise RankError(
            f"source_rank {source_rank} is not one of the ranks {list(group.ranks)} that share this model: give one of them"
        )
    where, content, tensors = f"the full model dict of rank {source_rank}", b"", dict[str, torch.Tensor]()
    if group.rank == source_rank:
        tensors, values = _checked(full, source_rank, of_modules)
        shared = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
        content = pickle.dumps((shared, values))
    shared, values = pickle.loads(all_gather_bytes(group, "described", content).content_of(source_rank))
    model = {name: StoredTensor(name, dtype, shape, name, 0) for name, (dtype, shape) in shared.items()}
    extras = {MODULES: KnownExtra(values)} if values else {}
    return _GivenDict(CheckpointIndex(where, model, Facts("a dict"), extras=extras), tensors)


def _checked(
    full: Mapping[str, Any] | None, rank: int, of_modules: Collection[str]
) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """The tensors of a full model dict, and its other values, each with the version of its module's code.

    Raises StateError for values that no full model dict has.
    """
    if not isinstance(full, Mapping):
        raise StateError(
            f"rank {rank} is the source rank, but its full is {type(full).__name__}: give the full model dict there, or another "
            "source_rank"
        )
    tensors, values = dict[str, torch.Tensor](), dict[str, list[Any]]()
    versions = versions_beside(full)
    for name, value in full.items():
        if not isinstance(name, str):
            raise StateError(f"{name!r}: the names in a full model dict must be str, not {type(name).__name__}")
        if is_extra_state(name) or name in of_modules or not isinstance(value, torch.Tensor):
            values[name] = [versions.get(module_path(name)), value]
        elif not is_plain(value):
            raise StateError(
                f"{name}: is a {type(value).__name__} on rank {rank}, which may have a part only: give full tensors, as "
                "gather_full_model_state_dict returns them"
            )
        elif value.is_meta:
            raise StateError(f"{name}: is a tensor on the meta device of rank {rank}, without elements")
        else:
            tensors[name] = value
    return tensors, values
