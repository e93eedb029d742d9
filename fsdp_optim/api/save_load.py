"""The calls that write one checkpoint from a live model and load it into one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint.catalog.mistaken import of_one_checkpoint
from fsdp_optim.checkpoint.common.arguments import LoadArguments, SaveArguments
from fsdp_optim.checkpoint.common.pending import SaveHandle
from fsdp_optim.checkpoint.load import restore
from fsdp_optim.checkpoint.save import background
from fsdp_optim.checkpoint.save import foreground as saving
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.options import (
    LoadOptions,
    Model,
    SaveOptions,
    WhichWeights,
)
from fsdp_optim.results.calls import LoadResult, SaveResult
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.storage.posix.files import checkpoint_errors
from fsdp_optim.tensors.memory import ordinary_tensors
from fsdp_optim.verbs.load_state import LoadableOptimizers
from fsdp_optim.verbs.named_models import named_models

_SAVE, _LOAD = SaveOptions(), LoadOptions()


@public
@ordinary_tensors()
def save(
    path: str | os.PathLike[str],
    model: Model | Mapping[str, Model],
    optim: Optimizers | Mapping[str, Optimizers] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    overwrite: bool = False,
    weights: WhichWeights = "all",
    format: str | Format = "safetensors",
    options: SaveOptions = _SAVE,
) -> SaveResult:
    """Write a full checkpoint: a folder of safetensors files, into which all ranks write at the same time, each its own bytes.

    Called by all ranks of the model. Gathers nothing and changes nothing. Memory beyond the training's own: `bucket_nbytes`.
    Values of modules besides parameters and buffers (`get_extra_state`) are saved too; state-dict hooks are not run, except on
    numbers for `views="hooks"`. The folder gets its name only when it is complete, so a save that is killed leaves the earlier
    checkpoint.

    Args:
        path: the folder to make, on a file system that all ranks share. A relative path counts from the working directory of
            the lowest rank; `~` is the home folder. Or a URL: `s3://bucket/run/step-1000` needs boto3; every other scheme
            (`gs://`, `az://`, `file://`) needs fsspec and the package that fsspec names.
        model: as for `gather_full_optim_state_dict`. Or several models by their names, each in any wrapper, as in
            `{"actor": actor, "critic": critic}`: one checkpoint, in which each has a folder of its name (`actor/`), as one model
            alone has it. No two may share a parameter.
        optim: as for `gather_full_optim_state_dict`; a list of several may not be empty. None: weights and buffers only. Of
            several models their optimizers by the same names; a model that is left out has none.
        state: what the trainer needs besides, by name: objects with `state_dict()` and `load_state_dict()`, such as schedulers,
            scalers, EMA models, data loaders; or trees of values: dicts, lists and tuples of JSON values, tensors, DTensors and
            numpy arrays. All ranks write the tensors, each its own bytes, one full tensor for each; replicas must be equal. Dicts
            of ranks are joined by their keys. Of all other values those of the lowest rank are saved; `per_rank(value)` marks
            what each rank has for itself.
        step: the step of the trainer. It is recorded, and `result.step` of a load returns it.
        overwrite: replace the checkpoint that is at `path` when the save begins. Files that a user has put there are carried
            over.
        weights: "all": all parameters and buffers, and the values of modules. "trainable": the parameters that require
            gradients (adapters, say), and all buffers and values of modules, because training changes these too. "none": the
            optimizer alone, beside model files that the trainer has elsewhere. The checkpoint records the choice; `load` has an
            argument of the same name.
        format: the form of the files: a name, or a format of `fsdp_optim.plugins` with options of its own. "safetensors": this
            library's own. "dcp": a folder of torch.distributed.checkpoint, which
            a job without this library resumes by `dcp.load({"model": ..., "optimizer": ...})` and `set_state_dict`;
            "torchtitan": the same with the weights at the top level. These two have no checksums, and
            `state` is flattened as torch flattens dicts: keys become str for other readers, and come back in `load`.
        options: a `SaveOptions`, as in `options=SaveOptions(durable=False, timeout=60)`.

    Raises (the same on all ranks):
        CheckpointError: the path is taken, or cannot be written, or other ranks of the job save to it. The message names the
            file.
        WrapperError, StateError, RankError, RankTimeoutError: as `gather_full_optim_state_dict`.
    """
    with checkpoint_errors(path):
        named = named_models(model, optim)
        arguments = SaveArguments.of(
            options, state, named, step=step, overwrite=overwrite, weights=weights, format=format
        )
        return saving.save(path, named.model, named.optim, arguments)


@public
@ordinary_tensors()
def async_save(
    path: str | os.PathLike[str],
    model: Model | Mapping[str, Model],
    optim: Optimizers | Mapping[str, Optimizers] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    overwrite: bool = False,
    weights: WhichWeights = "all",
    format: str | Format = "safetensors",
    options: SaveOptions = _SAVE,
) -> SaveHandle:
    """Save as `save`, but return when the state is copied to host memory, so that training may continue and change the state.

    Called by all ranks of the model. One thread of each rank writes the copy, without collective calls. `handle.wait()` and the
    next save or async_save of this process wait for this save, and raise its error; the exit of the process waits too. Memory:
    one copy of the part that this rank writes (its shard, or its share of replicated values), until that part is written.

    Args:
        path, model, optim, state, step, overwrite, weights, format, options: as for `save`.

    Returns:
        A `SaveHandle` for this save.
    """
    with checkpoint_errors(path):
        named = named_models(model, optim)
        arguments = SaveArguments.of(
            options, state, named, step=step, overwrite=overwrite, weights=weights, format=format
        )
        return background.async_save(path, named.model, named.optim, arguments)


@public
@ordinary_tensors()
def load(
    path: str | os.PathLike[str],
    model: Model | Mapping[str, Model] | None = None,
    optim: LoadableOptimizers | Mapping[str, LoadableOptimizers] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    strict: bool = True,
    weights: WhichWeights = "all",
    options: LoadOptions = _LOAD,
) -> LoadResult:
    """Load a checkpoint into a live model and optimizer, at any world size, in any wrapper or none.

    Called by all ranks of the model. Each rank reads and verifies the bytes that it needs; elements that several ranks need are
    read once and sent. Nothing is changed before all ranks have read all elements. Memory beyond the training's own: one copy
    of this rank's shard, and `bucket_nbytes`.

    Args:
        path: as for `save`. If another save replaces the checkpoint meanwhile, all loaded values are from one of the two.
        model: as for `save`. Of several models by their names those of the checkpoint are loaded that are named, and the others
            are not read. None, with `optim` None: the values of `state` only, on this process alone (the index of this
            process in `process_group` then selects its values of `per_rank`). Buffers with persistent=False are in no
            checkpoint: after `to_empty()` compute them anew; a warning names buffers that evidently nothing has filled.
        optim: as for `save`. None: weights and buffers only.
        state: the names that the checkpoint must have, and no others. Objects with `load_state_dict()` get their state, together
            with the model and the optimizer on all ranks or on none, with tensors that are cut as those of their state_dict()
            now. The tensors of trees are filled in place, as weights are; a tree without tensors only gives its name. None: no
            name is asked for. Everything that was saved is in `result.state`, whatever this says; values with more than 64 MiB
            of tensors that have no place in `state` are read when they are accessed.
        strict: True: refuse parameters that only one side has, names in `state` that only one side has, and state of another
            optimizer class; of a checkpoint of `save(weights="trainable")` also parameters that are frozen now. False: these
            stay as they are, and the result lists them.
        weights: the weights that this load must fill, of any checkpoint that has them. "all": all of the model. "trainable":
            the parameters that require gradients now, and buffers and values of modules; frozen parameters stay as they are.
            "none": no weights, the optimizer alone. A checkpoint of `save(weights="none")` is an error with any other value.
        options: a `LoadOptions`, as in `options=LoadOptions(cast=True)`.

    Returns:
        A `LoadResult`: the saved `state` by name, the `step`, `missing_keys`, `unexpected_keys`, and facts about the load.

    Raises (the same on all ranks, before anything is changed):
        CheckpointError: the checkpoint is incomplete or damaged. The message names the file and the tensor.
        StateError: the model or the optimizer differs, and the message lists the differences; or the optimizer's own
            `load_state_dict`, or the `load_state_dict` of an object in `state`, refuses the state.
    """
    with of_one_checkpoint(path, options), checkpoint_errors(path):
        named = named_models(model, optim)
        arguments = LoadArguments.of(options, state, named, strict=strict, weights=weights)
        return restore.restore(path, named.model, named.optim, arguments)
