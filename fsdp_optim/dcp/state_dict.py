"""The functions of torch.distributed.checkpoint.state_dict, with torch's signatures."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.dcp.dicts import model_state, optim_state
from fsdp_optim.dcp.dicts.options import read_options
from fsdp_optim.tensors.memory import ordinary_tensors

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@public
@ordinary_tensors()
def get_model_state_dict(
    model: nn.Module, *, submodules: Collection[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """Return the weights, buffers and extra state of a model by clean name, as `model.state_dict()` has them.

    Nothing moves between ranks, unless `full_state_dict` is set or the model has flat parameters (FSDP1): then all ranks of the
    model make the call. Values that need no change share the memory of the model, as torch's do.

    Args:
        model: in any wrapper of torch, or none.
        submodules: only the entries of these modules (deprecated in torch).
        options: torch's `StateDictOptions`.

    Returns:
        A dict of DTensors (of FSDP2, HSDP and tensor parallel models, and of FSDP1 with a mesh), ShardedTensors (of FSDP1 without
        a mesh) and tensors. With `full_state_dict`, all are full tensors on the devices of the parameters; with `cpu_offload`
        too, they are on the CPU of rank 0, and other ranks get an empty dict.

    Raises:
        StateError: an option is unknown. WrapperError: the model cannot be read. RankError, RankTimeoutError: on all ranks.
    """
    _warn_of(submodules)
    return model_state.get(model, submodules, read_options(options))


@public
@ordinary_tensors()
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: Collection[nn.Module] | None = None,
    options: Any = None,
) -> dict[str, Any]:
    """Return the state and groups of optimizers by clean name, in torch's form.

    No optimizer steps, and none gets state: for one without state the dict has the values before the first step (zeros, in the
    form of the parameters), to load into, which belong to no live optimizer. Who calls, and what is returned: as for
    `get_model_state_dict`.

    Args:
        model: the model that the optimizers were built from.
        optimizers: one, or several; their groups follow each other.
        submodules: accepted as torch accepts it, which returns the same with and without (deprecated).
        options: torch's `StateDictOptions`.

    Raises:
        StateError: an optimizer without state is of a class whose values only its first step shows. Others: as
            `get_model_state_dict`.
    """
    _warn_of(submodules)
    return optim_state.get(model, _as_list(optimizers), read_options(options))


@public
@ordinary_tensors()
def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: Collection[nn.Module] | None = None,
    options: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of `get_model_state_dict` and `get_optimizer_state_dict`."""
    _warn_of(submodules)
    given, several = read_options(options), _as_list(optimizers)
    weights = model_state.get(model, submodules, given)
    return weights, optim_state.get(model, several, given) if several else {}


@public
@ordinary_tensors()
def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Any = None) -> Any:
    """Load the dict of a model, of this library or of torch: full tensors, or values with any cut, at any world size of the mesh.

    All names, shapes and dtypes are compared, and all values brought to this rank, before the model changes. Nothing is cast.
    All ranks of the model make the call, unless the values are full on every rank or cut as the model is.

    Args:
        model: in any wrapper of torch, or none. Parameters on the meta device get memory.
        model_state_dict: a dict by clean name. It is not changed. With `broadcast_from_rank0`, other ranks may give {}.
        options: torch's `StateDictOptions`.

    Returns:
        torch's named tuple of `missing_keys` and `unexpected_keys`, which only `strict=False` allows.

    Raises:
        StateKeysError (a RuntimeError): names are missing or unexpected. StateError: a shape or dtype differs, or an option is
        unknown. WrapperError, RankError, RankTimeoutError: as `get_model_state_dict`.
    """
    return model_state.prepare(model, model_state_dict, read_options(options))()


@public
@ordinary_tensors()
def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: Mapping[str, Any], *, options: Any = None
) -> None:
    """Load the dict of optimizers, of this library or of torch: nested, flattened, full or with any cut, at any world size.

    No optimizer steps. State that the dict does not have stays as it is; a parameter whose group the dict has, without state,
    has none after the load. Every value keeps its dtype. What the dict has of other optimizers is passed over. If an optimizer
    refuses, all get back their previous state. All ranks of the model make the call where values are cut, or broadcast.

    Args:
        model, options: as for `set_model_state_dict`.
        optimizers: one, or several.
        optim_state_dict: a dict by clean name, or a plain optimizer's own for one optimizer. It is not changed.

    Raises:
        StateKeysError (a RuntimeError): the dict is empty, or lacks parameters. StateError: state, shapes or groups do not fit.
        Others: as `set_model_state_dict`.
    """
    optim_state.prepare(model, _as_list(optimizers), optim_state_dict, read_options(options))()


@public
@ordinary_tensors()
def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: Any = None,
) -> Any:
    """Load both dicts as `set_model_state_dict` and `set_optimizer_state_dict`; nothing changes before both are found to fit.

    An empty `model_state_dict` leaves the model as it is. Returns the result of `set_model_state_dict`.
    """
    given, several = read_options(options), _as_list(optimizers)
    needs_model = bool(model_state_dict) or given.broadcast
    load_model = model_state.prepare(model, model_state_dict, given if needs_model else replace(given, strict=False))
    load_optim = optim_state.prepare(model, several, optim_state_dict, given) if several else None
    if load_optim is not None:
        load_optim()
    return load_model()


def _as_list(optimizers: Optimizers) -> list[Any]:
    """Return the optimizers of a call. An object with groups is one, whatever its class."""
    if hasattr(optimizers, "param_groups"):
        return [optimizers]
    return list(optimizers)


def _warn_of(submodules: Collection[nn.Module] | None) -> None:
    if submodules:
        warnings.warn(
            "Getting submodules only model/optim state_dict is deprecated in torch: take the entries that you need of the result",
            FutureWarning,
            stacklevel=5,
        )
