"""`load` with the arguments of torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fsdp_optim.boundary import public
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.checkpoint.common.trees import is_tree_tensor
from fsdp_optim.checkpoint.load import restore
from fsdp_optim.dcp.meta_values import with_memory
from fsdp_optim.dcp.reader import Reader
from fsdp_optim.dcp.saving import place_of
from fsdp_optim.dcp.state_tree import StateTree, called, is_stateful
from fsdp_optim.foreign.dcp.reader import DCP_TREES
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.formats.own.manifest import manifest_in
from fsdp_optim.memory import ordinary_tensors
from fsdp_optim.options import LoadOptions
from fsdp_optim.storage.posix.files import checkpoint_errors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader

_OPTIONS = LoadOptions()


@public
@ordinary_tensors()
def load(
    state_dict: dict[str, Any],
    storage_reader: StorageReader | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    options: LoadOptions = _OPTIONS,
) -> None:
    """Load into a tree as torch.distributed.checkpoint.load does: in place. Called by all ranks of `process_group`.

    Folders of this library are read, and torch's own. Tensors are filled in place, on any mesh and at any world size; each rank
    reads the bytes that it needs. Plain values of `state_dict` are replaced by the saved ones, and tensors on the meta device by
    tensors that have memory. A Stateful object gets what its
    state_dict() gave, filled, in load_state_dict(). Nothing is changed before all ranks have read all elements. The checkpoint
    may have more than `state_dict`; what it lacks is refused.

    Args:
        state_dict: as for `save`.
        checkpoint_id: the path, or a URL.
        storage_reader, planner: torch's own `load` makes the call, with this planner, and with this reader or else with a
            `Reader` of the path. `options` are not for it.
        process_group: the ranks that load together; None: all of the job.
        no_dist: this rank loads by itself.
        options: as for `fsdp_optim.load`: `LoadOptions(cast=True)` converts floating dtypes, which are refused otherwise.

    Raises (the same on all ranks, before anything is changed):
        CheckpointError: the checkpoint is incomplete or damaged.
        StateError: a name is missing in it, or has another shape or dtype there. The message lists them.
    """
    if storage_reader is not None or planner is not None:
        from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch

        if storage_reader is None:
            place = StateTree.of(called(state_dict)).place
            storage_reader = Reader(place_of(checkpoint_id), model=".".join(place))
            checkpoint_id = None
        asked: dict[str, Any] = {"checkpoint_id": checkpoint_id, "process_group": process_group, "no_dist": no_dist}
        load_by_torch(state_dict, storage_reader=storage_reader, planner=planner, **asked)
        return
    path = place_of(checkpoint_id)
    with checkpoint_errors(path):
        states = called(state_dict)
        # An object on the meta device is refused, because its load_state_dict() would pass over the values.
        ready = {name: state if is_stateful(state_dict[name]) else with_memory(state) for name, state in states.items()}
        tree = StateTree.of(ready)
        with closing(store_at(path, options=options.storage_options).open_any()) as opened:
            format = None if OURS.recognises(opened) else DCP_TREES
            if format is not None or manifest_in(opened).model.weights == "none":
                tree = StateTree({}, (), ready)
        saved = _load(path, tree, process_group, options, format, alone=no_dist)
    for name, state in sorted(
        states.items(), key=itemgetter(0)
    ):  # as torch: a load_state_dict() may be a collective call
        filled = _filled(state, saved[name]) if name in saved else state
        if is_stateful(state_dict[name]):
            state_dict[name].load_state_dict(filled)
        else:
            state_dict[name] = filled


def _load(
    path: str | os.PathLike[str],
    tree: StateTree,
    process_group: Any,
    options: LoadOptions,
    format: Format | None,
    *,
    alone: bool,
) -> Mapping[str, Any]:
    """Load the tensors in place. Returns the tree with the saved values."""
    arguments = LoadArguments.of(
        options if process_group is None else replace(options, process_group=process_group),
        dict(tree.rest),
        allow_unexpected=True,
        weights="all" if tree.weights else "none",
    )
    result = restore.restore(path, tree.module, None, arguments, format, alone=alone)
    return tree.joined({name: result.state[name] for name in tree.rest})


def _filled(live: Any, saved: Any) -> Any:
    """Return a live tree with the plain values of the saved one. Its dicts and lists stay the objects that they are."""
    if is_tree_tensor(live) and is_tree_tensor(saved) and not live.is_meta:
        return live
    if isinstance(live, dict) and isinstance(saved, Mapping):
        for key in live:
            live[key] = _filled(live[key], saved[key])
        return live
    if type(live) is list and isinstance(saved, list) and len(live) == len(saved):
        live[:] = [_filled(item, other) for item, other in zip(live, saved, strict=True)]
        return live
    if type(live) is tuple and isinstance(saved, tuple) and len(live) == len(saved):
        return tuple(_filled(item, other) for item, other in zip(live, saved, strict=True))
    return saved
