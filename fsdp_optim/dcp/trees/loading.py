"""`load` with the arguments of torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fsdp_optim.adapters import module_of
from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.common.trees import is_opened, is_tree_tensor
from fsdp_optim.checkpoint.load import restore
from fsdp_optim.dcp.storage.reader import reader_for
from fsdp_optim.dcp.trees.meta_values import with_memory
from fsdp_optim.dcp.trees.saving import place_of
from fsdp_optim.dcp.trees.seen_tree import TreeViews
from fsdp_optim.dcp.trees.state_tree import StateTree, called, is_stateful
from fsdp_optim.dcp.trees.tree_view import Places, TreeFormat
from fsdp_optim.formats.base.protocols import SeenAs
from fsdp_optim.options import LoadOptions
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.tensors.elements import is_on_meta
from fsdp_optim.tensors.memory import ordinary_tensors

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
        options: as for `fsdp_optim.load`: `LoadOptions(cast=True)` converts floating dtypes, which are refused otherwise. Through
            `views` the checkpoint is seen with the names that the model's dict here has: what is fused there as its parts, and
            parts as what is fused here, in the optimizers' dicts too.

    Raises (the same on all ranks, before anything is changed):
        CheckpointError: the checkpoint is incomplete or damaged.
        StateError: a name is missing in it, or has another shape or dtype there. The message lists them.
    """
    states = called(state_dict)
    if storage_reader is not None or planner is not None:
        _load_by_torch(states, checkpoint_id, storage_reader, planner, process_group, no_dist=no_dist)
        loaded = states
    else:
        # An object on the meta device is refused, because its load_state_dict() would pass over the values.
        ready = {name: state if is_stateful(state_dict[name]) else with_memory(state) for name, state in states.items()}
        saved = _load(place_of(checkpoint_id), ready, process_group, options, alone=no_dist)
        loaded = {name: _filled(state, saved[name]) if name in saved else state for name, state in states.items()}
    for name, state in sorted(
        loaded.items(), key=itemgetter(0)
    ):  # as torch: a load_state_dict() may be a collective call
        if is_stateful(state_dict[name]):
            state_dict[name].load_state_dict(state)
        else:
            state_dict[name] = state


def _load_by_torch(
    states: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    storage_reader: StorageReader | None,
    planner: LoadPlanner | None,
    process_group: Any,
    *,
    no_dist: bool,
) -> None:
    """Let torch load into a dict of states."""
    from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch

    if storage_reader is None:
        places = Places.in_tree(states)
        optims = [".".join(face.place) for face in places.optims]
        optim = optims[0] if len(optims) == 1 else None
        storage_reader = reader_for(place_of(checkpoint_id), places.models, optim)
        checkpoint_id = None
    asked: dict[str, Any] = {"checkpoint_id": checkpoint_id, "process_group": process_group, "no_dist": no_dist}
    load_by_torch(states, storage_reader=storage_reader, planner=planner, **asked)


def _load(
    path: str | os.PathLike[str],
    states: Mapping[str, Any],
    process_group: Any,
    options: LoadOptions,
    *,
    alone: bool,
) -> Mapping[str, Any]:
    """Load the tensors in place. Returns the states with the saved values."""
    live, views = StateTree.of(states), None
    if isinstance(options, LoadOptions) and options.views != ():
        views = TreeViews(options.views, frozenset(live.weights), live.place if live.weights else None)
        options = replace(options, views=())  # nothing that is loaded is a live parameter
    arguments = LoadArguments.of(
        options if process_group is None else replace(options, process_group=process_group),
        dict(states),
        allow_unexpected=True,
        weights="none",
    )
    places = Places.in_tree(states, options.rename)
    with checkpoint_errors(path):
        seen = SeenAs(lambda format: TreeFormat(format, places, views))
        return restore.restore(path, module_of({}, {}), None, arguments, seen, alone=alone).state


def _filled(live: Any, saved: Any) -> Any:
    """Return a live tree with the plain values of the saved one. Its dicts and lists stay the objects that they are."""
    if is_tree_tensor(live) and is_tree_tensor(saved) and not is_on_meta(live):
        return live
    if isinstance(live, dict) and isinstance(saved, Mapping):
        for key in live.keys() & saved.keys():  # torch saves nothing of an empty dict, which stays
            live[key] = _filled(live[key], saved[key])
        return live
    is_list = type(live) is list and isinstance(saved, list)
    # Of a list with dicts or tensors torch saves and loads each item by itself, and an empty dict at its end not at all.
    if is_list and (len(live) == len(saved) or is_opened(live)):
        live[: len(saved)] = [_filled(item, other) for item, other in zip(live, saved, strict=False)]
        return live
    if type(live) is tuple and isinstance(saved, tuple) and len(live) == len(saved):
        return tuple(_filled(item, other) for item, other in zip(live, saved, strict=True))
    return saved
