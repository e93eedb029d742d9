"""The calls that move optimizer state in memory: between a live optimizer and a dict, and between two live optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from torch import nn

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.options import CallArguments, CallOptions, GatherArguments, KeyBy, Model, ParamGroups, ScatterArguments
from fsdp_optim.results.calls import Incompatible
from fsdp_optim.state.dicts.full import FullDict
from fsdp_optim.state.live.local import OptimizerLike, Optimizers
from fsdp_optim.state.live.local_dict import Shard
from fsdp_optim.tensors.memory import ordinary_tensors
from fsdp_optim.verbs import gather, iterate, rekey, scatter, shard, transfer
from fsdp_optim.verbs import load_state as loading
from fsdp_optim.verbs.load_state import LoadableOptimizer

_CALL = CallOptions()


@overload
def gather_full_optim_state_dict(
    model: Model, optim: Optimizers, recipient_rank: None, key_by: KeyBy = "id", *, options: CallOptions = _CALL
) -> FullDict: ...


@overload
def gather_full_optim_state_dict(
    model: Model,
    optim: Optimizers,
    recipient_rank: int | None = 0,
    key_by: KeyBy = "id",
    *,
    options: CallOptions = _CALL,
) -> FullDict | None: ...


@public
@ordinary_tensors()
def gather_full_optim_state_dict(
    model: Model,
    optim: Optimizers,
    recipient_rank: int | None = 0,
    key_by: KeyBy = "id",
    *,
    options: CallOptions = _CALL,
) -> FullDict | None:
    """Return the full optimizer state per original parameter, as if the model had no wrapper. Called by all ranks of the model.

    Changes no step, gradient, parameter, group or state. An optimizer whose replicas differ between steps, and that has the
    method `synchronize_for_checkpoint()` (as Dion), first makes the replicas equal; save, iterate and transfer ask for this too.
    Memory beyond the training's own: on a recipient the full state and `bucket_nbytes`, on other ranks `bucket_nbytes`.

    Args:
        model: the root that `optim` was built from: fairscale FSDP, torch FSDP, DistributedDataParallel, a plain module, or a
            mix. Or a list of the pipeline stages that this rank has, which have the FQNs of the complete model; then all ranks of
            the job, or of `process_group`, make the call.
        optim: an optimizer, or a list of optimizers (one for each pipeline stage, say): any object with `state_dict()` and
            `param_groups`.
        recipient_rank: the global rank that gets the dict; None: every rank gets the dict.
        key_by: "id" counts parameters as the optimizer does: group after group, and inside a group in the optimizer's own order,
            with the originals of a flat parameter in its place. A group in the order of the wrapped model's parameters() is
            counted in the order of the unwrapped model's parameters(). "name" uses clean FQNs, in the same order.
        options: a `CallOptions`, as in `options=CallOptions(timeout=60)`.

    Returns:
        On recipients the full dict, on other ranks None. Its tensors are on the CPU, each with its own storage, in the shape of
        the original parameter (or 0-dim, for `step`) and in the dtype of the state. A plain optimizer on the unwrapped model
        loads the dict by `load_state_dict(full)`. Besides `state` and `param_groups` (with `param_names`), the dict has
        `optimizer_class` (the name of the innermost optimizer's class), `param_id_map` (id -> this rank's local id, or None
        without state), `num_padded` (for each flat parameter, the padding of each group rank, in elements), `kinds` (how each
        value relates to its parameter), `uncollected_local_ids`, and the other keys of the optimizer's own dict. With
        `key_by="name"`, a dict whose parameters ids cannot count has `unknown_order`, the reason.

    Raises (the same on all ranks):
        WrapperError: the model or the optimizer cannot be read, or they do not belong together.
        StateError: the ranks have different models or states; or `key_by` is "id", and no order of ids can be right (with a
            module that torch FSDP wrapped in part, by `ignored_states`, or with stages that no rank has together).
        RankError: a rank failed (the message has its reason) or made another call; or nothing in the model shows that the
            recipient shares it (pipeline stages without a wrapper), and `process_group` is not given.
        RankTimeoutError: a rank, which the message names, did not come in time.
    """
    call = CallArguments.of(options)
    return gather.gather(model, optim, GatherArguments(call, recipient_rank, key_by))


@public
def iter_full_optim_state(
    model: Model,
    optim: Optimizers,
    recipient_rank: int | None = 0,
    *,
    options: CallOptions = _CALL,
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Gather as `gather_full_optim_state_dict`, but one parameter at a time, so that no rank ever holds the complete state.

    Yields (FQN, state) on every rank. The state is a dict of CPU tensors and other values on recipients ({} for a parameter
    without state), and None on other ranks. The order is the order of ids of gather: with one group the order of the unwrapped
    model, unless the optimizer lists its parameters in another order. If no order of ids is known, the order is the same on all
    ranks. Every rank of the model must exhaust the iterator. A recipient holds at most `bucket_nbytes` of state (or one larger
    parameter), and as much again while the elements move.

    Args:
        model, optim, recipient_rank, options: as for `gather_full_optim_state_dict`.
    """
    call = CallArguments.of(options)
    return iterate.iterate(model, optim, GatherArguments(call, recipient_rank, "name"))


@overload
def get_shard_from_optim_state_dict(
    model: Model,
    optim: OptimizerLike,
    full: Mapping[str, Any],
    *,
    strict: bool = True,
    param_groups: ParamGroups = "saved",
    options: CallOptions = _CALL,
) -> Shard: ...


@overload
def get_shard_from_optim_state_dict(
    model: Model,
    optim: Sequence[OptimizerLike],
    full: Mapping[str, Any],
    *,
    strict: bool = True,
    param_groups: ParamGroups = "saved",
    options: CallOptions = _CALL,
) -> list[Shard]: ...


@public
@ordinary_tensors()
def get_shard_from_optim_state_dict(
    model: Model,
    optim: Optimizers,
    full: Mapping[str, Any],
    *,
    strict: bool = True,
    param_groups: ParamGroups = "saved",
    options: CallOptions = _CALL,
) -> Shard | list[Shard]:
    """Return this rank's part of a full dict, ready for `load_optim_state_dict(optim, shard)`. No communication.

    Args:
        model, optim: as for `gather_full_optim_state_dict`, at any world size, but no list of pipeline stages.
        full: the full dict, needed on this rank. It stays unchanged and shares no memory with the result. Accepted are the
            result of `gather_full_optim_state_dict`, by id or by name; a full dict of fairscale or torch; and the state_dict()
            of a plain optimizer on the unwrapped model.
        strict: True: refuse parameters that only one side has, and state of another optimizer class. False: use the parameters,
            hyperparameters and state values that both sides have; the result lists the rest.
        param_groups: "saved": the optimizer has the saved groups, and gets their hyperparameters. "live": the groups and
            hyperparameters of the optimizer stay, and the state of every parameter is found by name.
        options: a `CallOptions`, of which `name_of` counts: the function that was given to `gather_full_optim_state_dict`.

    Returns:
        The optimizer's own dict: local ids, the saved hyperparameters, and state tensors in the local shapes, on the devices of
        the parameters, in the saved dtypes. For a list of optimizers, a list of dicts. If `strict=False` has left out anything,
        the entry "incompatible" lists it; `load_optim_state_dict` removes and returns that entry.

    Raises:
        StateError: the dict does not belong to this model and optimizer. The message names the parameter and both numbers, or the
            two optimizer classes and the names that only one of them has. Or the dict is sharded, or the model is a list of
            pipeline stages: `reshard_optim_state_dict` takes these. Nothing was changed.
    """
    arguments = CallArguments.of(options, strict=strict, param_groups=param_groups)
    return shard.shard(model, optim, full, arguments)


@overload
def reshard_optim_state_dict(
    model: Model,
    optim: OptimizerLike,
    sharded: Mapping[str, Any],
    *,
    strict: bool = True,
    param_groups: ParamGroups = "saved",
    options: CallOptions = _CALL,
) -> Shard: ...


@overload
def reshard_optim_state_dict(
    model: Model,
    optim: Sequence[OptimizerLike],
    sharded: Mapping[str, Any],
    *,
    strict: bool = True,
    param_groups: ParamGroups = "saved",
    options: CallOptions = _CALL,
) -> list[Shard]: ...


@public
@ordinary_tensors()
def reshard_optim_state_dict(
    model: Model,
    optim: Optimizers,
    sharded: Mapping[str, Any],
    *,
    strict: bool = True,
    param_groups: ParamGroups = "saved",
    options: CallOptions = _CALL,
) -> Shard | list[Shard]:
    """Cut a dict as `get_shard_from_optim_state_dict`, where that needs the other ranks. Called by all ranks of the model.

    Args:
        model, optim: as for `gather_full_optim_state_dict`, also a list of the pipeline stages that this rank has.
        sharded: a dict whose values are spread over ranks (DTensor, ShardedTensor), as torch's sharded state dicts have them:
            every rank gives its part, at the same or another world size of the values' mesh, and elements move between ranks.
            Or a full dict, which every rank has: for pipeline stages, which only together can tell whether it fits.
        strict, param_groups: as for `get_shard_from_optim_state_dict`.
        options: a `CallOptions`.

    Returns:
        As `get_shard_from_optim_state_dict`.

    Raises (the same on all ranks): as `get_shard_from_optim_state_dict` and `gather_full_optim_state_dict`.
    """
    arguments = CallArguments.of(options, strict=strict, param_groups=param_groups)
    return shard.reshard(model, optim, sharded, arguments)


@public
@ordinary_tensors()
def get_shard_without_optimizer(model: nn.Module, full: Mapping[str, Any], options: CallOptions = _CALL) -> Shard:
    """Cut a full dict for an optimizer that is built like the saved optimizer: the drop-in method without `optim`."""
    own = shard.shard(model, None, full, CallArguments.of(options))
    return own if isinstance(own, dict) else own[0]


@public
@ordinary_tensors()
def scatter_full_optim_state_dict(
    model: Model,
    optim: Optimizers,
    full: Mapping[str, Any] | None,
    source_rank: int = 0,
    *,
    strict: bool = True,
    param_groups: ParamGroups = "saved",
    options: CallOptions = _CALL,
) -> Shard | list[Shard]:
    """Send a full dict from global rank `source_rank` to all ranks; return this rank's part, ready to load.

    As `get_shard_from_optim_state_dict`, but only `source_rank` needs `full`. Called by all ranks of the model. Memory beyond
    the result: `bucket_nbytes`, in bytes.

    Args:
        model, optim, strict, param_groups: as for `reshard_optim_state_dict`.
        full: the full dict, on rank `source_rank`; other ranks may give None.
        source_rank: the global rank that has `full`.
        options: a `CallOptions`.

    Raises (the same on all ranks): as `get_shard_from_optim_state_dict` and `gather_full_optim_state_dict`.
    """
    call = CallArguments.of(options, strict=strict, param_groups=param_groups)
    return scatter.scatter(model, optim, full, ScatterArguments(call, source_rank))


@public
@ordinary_tensors()
def load_optim_state_dict(
    optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    shard: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    keep_hyperparameters: Sequence[str] = (),
) -> Incompatible:
    """Load a shard as `optim.load_state_dict(shard)`, but every value keeps its saved dtype. No communication.

    As with torch, the optimizer may keep the tensors of the shard without copies. torch's own method casts floating state to the
    dtype of the parameter, which loses the precision of fp32 moments of a bf16 parameter. Changes of hyperparameters are logged
    (INFO).

    Args:
        optim, shard: an optimizer and the result of `get_shard_from_optim_state_dict` for it, or a list of each.
        keep_hyperparameters: the hyperparameters whose current values stay, such as `("lr",)`.

    Returns:
        The differences that `strict=False` has passed over, all empty without any: `missing_keys` and `unexpected_keys`
        (FQNs of parameters), `unmatched_hyperparameters` and `unmatched_values` (names that only one of two optimizer classes
        has).

    Raises:
        StateError: the shard is a full dict, or does not fit this optimizer. Nothing was changed.
    """
    return loading.load_shard(optim, shard, keep_hyperparameters)


@public
@ordinary_tensors()
def transfer_optim_state(
    src_model: Model,
    src_optim: Optimizers,
    dst_model: Model,
    dst_optim: LoadableOptimizer | Sequence[LoadableOptimizer],
    *,
    strict: bool = True,
    param_groups: ParamGroups = "saved",
    options: CallOptions = _CALL,
) -> Incompatible:
    """Load the state of one live optimizer into another in the same job, whatever wraps their models.

    Called by all ranks of both models. Each byte moves once, directly to the rank that needs it, so a rank holds no more than
    its own shards and `bucket_nbytes`. The source stays unchanged.

    Args:
        src_model, src_optim: the model and the optimizer with the state, as for `gather_full_optim_state_dict`.
        dst_model, dst_optim: the model and the optimizer that get the state.
        strict, param_groups: as for `get_shard_from_optim_state_dict`.
        options: a `CallOptions`.

    Returns:
        As `load_optim_state_dict`.

    Raises (the same on all ranks): as `gather_full_optim_state_dict` and `scatter_full_optim_state_dict`.
    """
    arguments = CallArguments.of(options, strict=strict, param_groups=param_groups)
    return transfer.transfer(src_model, src_optim, dst_model, dst_optim, arguments)


@public
@ordinary_tensors()
def rekey_optim_state_dict(
    full: Mapping[str, Any], model: Model, key_by: KeyBy, *, optim: Optimizers | None = None
) -> FullDict:
    """Return a full dict keyed by "id" or by "name". No communication.

    The result shares its tensors with `full`, which stays unchanged.

    Args:
        full: a full dict, by id or by name, as for `get_shard_from_optim_state_dict`.
        key_by: the keys of the result.
        model: the model, wrapped or not; for a dict of fairscale itself, wrapped as at the save.
        optim: an optimizer of `model` with the same parameters in the same groups. It is needed if the dict has ids without names
            and several groups, or an order of parameters of its own; ids then count as this optimizer does. Without `optim`,
            the ids of a dict without names count the parameters of the model.

    Raises:
        StateError: the dict does not belong to this model; or ids are read or requested, and neither the dict nor the model shows
            their order.
    """
    return rekey.rekey(full, model, key_by, optim)
