"""`save` and `async_save` with the arguments of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.pending import SaveHandle
from fsdp_optim.checkpoint.common.run_state import ModelTree
from fsdp_optim.checkpoint.save import background, foreground
from fsdp_optim.dcp.dicts.options import not_of_dicts
from fsdp_optim.dcp.storage.writer import Writer
from fsdp_optim.dcp.trees.state_tree import StateTree, called
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.layout.views import View
from fsdp_optim.options import SaveOptions
from fsdp_optim.results.calls import SaveResult
from fsdp_optim.state.dicts.torch_trees import OptimFace
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.tensors.memory import ordinary_tensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import StorageWriter

_OPTIONS = SaveOptions(on_replica_mismatch="lowest_rank")


def place_of(checkpoint_id: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Return the path of a call. Raises StateError without one."""
    if checkpoint_id is None:
        raise StateError("give checkpoint_id=, the path of the checkpoint, or storage_writer= or storage_reader=")
    return checkpoint_id


@public
@ordinary_tensors()
def save(
    state_dict: Any,
    storage_writer: StorageWriter | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    format: str | Format = "safetensors",
    options: SaveOptions = _OPTIONS,
) -> SaveResult | Metadata:
    """Save a tree as torch.distributed.checkpoint.save does. Called by all ranks of `process_group`.

    The files are this library's: one full safetensors copy of each tensor, with checksums, complete or absent, in the place of
    what is at the path. The model's dict (`{"model": ...}`, `{"app": {"model": ...}}`, or tensors at the top level) becomes
    `model.safetensors`, which other tools open; all other tensors are in `state.safetensors` under their flattened names.

    Args:
        state_dict: names to values: trees of tensors, DTensors and plain values, and Stateful objects, whose state_dict() is
            called. Tensors that several ranks have whole are those of the lowest rank; a warning says where they differ.
        checkpoint_id: the path, or a URL.
        storage_writer, planner: torch's own `save` makes the call, with this planner, and with this writer or else with a
            `Writer` of the path. `format` and `options` are not for it.
        process_group: the ranks that save together; None: all of the job.
        no_dist: this rank saves by itself.
        format: "safetensors", or "dcp" for torch's own files, to which "torchtitan" is the same here.
        options: as for `fsdp_optim.save`.

    Returns:
        A `SaveResult`; torch's Metadata where torch makes the call.

    Raises (the same on all ranks):
        CheckpointError, StateError, WrapperError, RankError: as `fsdp_optim.save`.
    """
    if storage_writer is not None or planner is not None:
        from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

        asked = _storage_of(storage_writer, checkpoint_id) | {"process_group": process_group, "no_dist": no_dist}
        metadata: Metadata = save_by_torch(state_dict, planner=planner, **asked)
        return metadata
    path = place_of(checkpoint_id)
    with checkpoint_errors(path):
        tree = _split(called(state_dict), format)
        return foreground.save(path, tree.module, None, _arguments(tree, process_group, format, options), alone=no_dist)


@public
@ordinary_tensors()
def async_save(
    state_dict: Any,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    format: str | Format = "safetensors",
    options: SaveOptions = _OPTIONS,
) -> Future[Any]:
    """Save as `save`, but return when the tensors are copied to host memory. Called by all ranks.

    Args:
        state_dict, checkpoint_id, process_group, no_dist, format, options: as for `save`.
        storage_writer, planner, async_stager: torch's own `async_save` makes the call, with these.
        async_checkpointer_type: for torch's call; this library writes in a thread.

    Returns:
        A future of the `SaveResult`; what torch's call gives where torch makes it. Its error is that of any rank.

    Raises:
        StateError: `async_checkpointer_type` asks this library for a process. Others: as `save`.
    """
    if storage_writer is not None or planner is not None or async_stager is not None:
        from torch.distributed.checkpoint.state_dict_saver import async_save as save_by_torch

        newer = {
            "async_checkpointer_type": async_checkpointer_type,
            "async_stager": async_stager,
            "no_dist": no_dist or None,
        }
        asked = _storage_of(storage_writer, checkpoint_id) | {
            key: value for key, value in newer.items() if value is not None
        }
        saving: Any = save_by_torch(state_dict, planner=planner, process_group=process_group, **asked)
        return cast("Future[Any]", saving)
    if getattr(async_checkpointer_type, "value", "thread") != "thread":
        raise StateError(
            f"async_checkpointer_type={async_checkpointer_type}: fsdp_optim.dcp.async_save writes in a thread: leave it out, or "
            "give storage_writer=fsdp_optim.dcp.Writer(path), with which torch's own async_save makes the call"
        )
    path = place_of(checkpoint_id)
    with checkpoint_errors(path):
        tree = _split(called(state_dict), format)
        arguments = _arguments(tree, process_group, format, options)
        return future_of(background.async_save(path, tree.module, None, arguments, alone=no_dist))


def _storage_of(writer: StorageWriter | None, checkpoint_id: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the storage for torch's call: a `Writer` of the path where no other one is given."""
    if writer is None:
        return {"storage_writer": Writer(place_of(checkpoint_id))}
    return {"storage_writer": writer, "checkpoint_id": checkpoint_id}


def future_of(handle: SaveHandle) -> Future[SaveResult]:
    """Return a future that ends with a background save."""
    future: Future[SaveResult] = Future()
    future.set_running_or_notify_cancel()

    def wait() -> None:
        try:
            future.set_result(handle.wait())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=wait, name=f"fsdp_optim: the future of {handle.path}", daemon=True).start()
    return future


def _split(states: Mapping[str, Any], format: str | Format) -> StateTree:
    """Return the parts of a state dict. In torch's own files all values keep their places, so none is the model."""
    name = format if isinstance(format, str) else format.name
    return StateTree({}, (), states) if name in ("dcp", "torchtitan") else StateTree.of(states)


def _arguments(tree: StateTree, process_group: Any, format: str | Format, options: SaveOptions) -> SaveArguments:
    arguments = SaveArguments.of(
        options if process_group is None else replace(options, process_group=process_group),
        dict(tree.rest),
        overwrite=True,
        tree=ModelTree(tree.place) if tree.weights else None,
        weights="all" if tree.weights else "none",
        format=format,
    )
    return replace(arguments, wrong_options=arguments.wrong_options or _why_not_seen(tree, options))


def _why_not_seen(tree: StateTree, options: object) -> str:
    """Say why Views cannot see a state dict: weights would get other names than the optimizer's dict has. Else ""."""
    if isinstance(options, SaveOptions) and isinstance(options.views, str):
        return not_of_dicts(options.views)
    views = options.views if isinstance(options, SaveOptions) and isinstance(options.views, (list, tuple)) else ()
    names = (name for name in tree.weights for view in views if isinstance(view, View) and view.matches(name))
    fused = next(names, None)
    optims = OptimFace.all_in(tree.rest) if fused is not None else ()
    if not optims:
        return ""
    return (
        f"{fused}: a View takes it apart, and the optimizer's dict {'.'.join(optims[0].place)!r} would keep its name: save the "
        "live model and optimizer by fsdp_optim.save, whose views= are for both, or save without views= and load through them"
    )
