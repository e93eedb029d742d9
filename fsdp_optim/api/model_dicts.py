"""The calls that move the weights and buffers of a model to a dict in memory, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint import model_dict
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.options import CallArguments, CallOptions, GatherArguments, Model, Rename, WhichWeights, fields_of
from fsdp_optim.results.calls import Incompatible
from fsdp_optim.tensors.memory import ordinary_tensors

_CALL = CallOptions()


@overload
def gather_full_model_state_dict(
    model: Model, recipient_rank: None, *, weights: WhichWeights = "all", options: CallOptions = _CALL
) -> dict[str, Any]: ...


@overload
def gather_full_model_state_dict(
    model: Model, recipient_rank: int | None = 0, *, weights: WhichWeights = "all", options: CallOptions = _CALL
) -> dict[str, Any] | None: ...


@public
@ordinary_tensors()
def gather_full_model_state_dict(
    model: Model,
    recipient_rank: int | None = 0,
    *,
    weights: WhichWeights = "all",
    options: CallOptions = _CALL,
) -> dict[str, Any] | None:
    """Return the weights and buffers of the complete model, as the `state_dict()` of the unwrapped model.

    Called by all ranks of the model.

    Changes nothing, and needs no forward pass before. Memory beyond the training's own: on a recipient the model and
    `bucket_nbytes`, on other ranks `bucket_nbytes`.

    Args:
        model, recipient_rank, options: as for `gather_full_optim_state_dict`.
        weights: "all", or "trainable": the parameters that require gradients (adapters, say), with all buffers and values of
            modules, as for `save`.

    Returns:
        On recipients a dict of CPU tensors by FQN, in their original shapes and dtypes; on other ranks None. Tied weights are
        one tensor under all their names. The extra state of modules (`get_extra_state`) is under its names; buffers that are
        not persistent are left out. The versions of the code of modules are beside the entries, as torch has them: its
        `load_state_dict()` gives them to the modules, and so does `scatter_full_model_state_dict`.

    Raises (the same on all ranks): WrapperError, StateError, RankError and RankTimeoutError, as `gather_full_optim_state_dict`.
    """
    arguments = GatherArguments(CallArguments.of(options), recipient_rank, "name", weights)
    return model_dict.gather_model(model, arguments)


@public
@ordinary_tensors()
def scatter_full_model_state_dict(
    model: Model,
    full: Mapping[str, Any] | None,
    source_rank: int = 0,
    *,
    strict: bool = True,
    cast: bool = False,
    rename: Rename | None = None,
    options: CallOptions = _CALL,
) -> Incompatible:
    """Load a full model dict of global rank `source_rank` into the model of all ranks; other ranks may give None.

    Called by all ranks of the model. Every rank gets only its part. Nothing is changed before all ranks have received theirs.
    Memory beyond the training's own: one copy of this rank's shard, and `bucket_nbytes`, in bytes.

    Args:
        model: the root of the model, in any wrapper or none, or a list of the pipeline stages that this rank has.
        full: the `state_dict()` of an unwrapped model, or the result of `gather_full_model_state_dict`: full tensors on any
            device. It is not changed.
        strict: as for `load`.
        cast, rename: as in `LoadOptions`.
        source_rank: the global rank that has `full`.
        options: a `CallOptions`.

    Returns:
        The differences that `strict=False` has passed over: `missing_keys` and `unexpected_keys`.

    Raises (the same on all ranks, before anything is changed):
        StateError: names, shapes, dtypes or two tensors of one tied parameter differ, and the message lists the differences; or
            `full` has no full tensors.
        WrapperError, RankError, RankTimeoutError: as `gather_full_optim_state_dict`.
    """
    arguments = LoadArguments(**fields_of(CallOptions, options), strict=strict, cast=cast, rename=rename)
    return model_dict.scatter_model(model, full, source_rank, arguments)
