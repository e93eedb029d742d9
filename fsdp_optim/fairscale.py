"""fairscale's own: its FullyShardedDataParallel with two methods of this library, and calls that only its models need.

It needs the extra `fairscale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from fsdp_optim import api
from fsdp_optim.errors import missing
from fsdp_optim.options import CallArguments, CallOptions, Collect, GatherArguments, KeyBy, Model, NameOf
from fsdp_optim.state.dicts.full import FullDict
from fsdp_optim.state.live.local import OptimizerLike, Optimizers
from fsdp_optim.tensors.memory import ordinary_tensors
from fsdp_optim.verbs import gather, iterate, rekey

try:
    from fairscale.nn.data_parallel import FullyShardedDataParallel as _FairscaleFSDP
except ModuleNotFoundError as error:
    if error.name != "fairscale":  # fairscale is installed, but a package that it imports is not
        raise
    raise missing("fsdp_optim.fairscale", "fairscale") from None

__all__ = ["FullyShardedDataParallel", "for_fairscale", "gather_full_optim_state_dict", "iter_full_optim_state"]

_CALL = CallOptions()


class FullyShardedDataParallel(_FairscaleFSDP):  # type: ignore[misc]  # fairscale has no types
    """Drop-in for `fairscale.nn.data_parallel.FullyShardedDataParallel`: same arguments, usable as `wrapper_cls`.

    Only the two methods below differ from fairscale's. Call them on the root, from which the optimizer was built.
    """

    def gather_full_optim_state_dict(
        self,
        optim: OptimizerLike,
        recipient_rank: int | None = 0,
        key_by: KeyBy = "id",
        *,
        collect: Collect = "wrapper",
        name_of: NameOf | None = None,
        timeout: float | timedelta | None = None,
    ) -> FullDict | None:
        """Return the full optimizer state per original parameter, as if the model had no wrapper.

        Called by all ranks of the model. The same as `fsdp_optim.gather_full_optim_state_dict(self, optim, ...)`.

        Args:
            optim, recipient_rank, key_by: as for `fsdp_optim.gather_full_optim_state_dict`.
            collect: as for `fsdp_optim.fairscale.gather_full_optim_state_dict`.
            name_of, timeout: as in `fsdp_optim.CallOptions`.
        """
        options = CallOptions(name_of=name_of, timeout=timeout)
        return gather_full_optim_state_dict(self, optim, recipient_rank, key_by, collect=collect, options=options)

    def get_shard_from_optim_state_dict(
        self,
        full_optim_state_dict: Mapping[str, Any],
        optim: OptimizerLike | None = None,
        *,
        name_of: NameOf | None = None,
    ) -> dict[str, Any]:
        """Return this rank's part of a full dict, at any world size, ready for the optimizer. No communication.

        Args:
            full_optim_state_dict: the full dict, needed on this rank. It stays unchanged (fairscale's own method changes it).
            optim: the optimizer that will load the result. None: an optimizer built like the saved optimizer, group after group;
                inside a group in the saved order if the units are the same, else in the order of this model's `parameters()`.
            name_of: the function that was given to gather.

        Raises:
            StateError: as `fsdp_optim.get_shard_from_optim_state_dict`, and for a flat parameter with originals of two groups.
        """
        options = CallOptions(name_of=name_of)
        if optim is None:
            return api.get_shard_without_optimizer(self, full_optim_state_dict, options)
        return api.get_shard_from_optim_state_dict(self, optim, full_optim_state_dict, options=options)


@ordinary_tensors()
def gather_full_optim_state_dict(
    model: Model,
    optim: Optimizers,
    recipient_rank: int | None = 0,
    key_by: KeyBy = "id",
    *,
    collect: Collect = "wrapper",
    options: CallOptions = _CALL,
) -> FullDict | None:
    """Gather as `fsdp_optim.gather_full_optim_state_dict`, with a choice for units that have `no_broadcast_optim_state`.

    Args:
        model, optim, recipient_rank, key_by, options: as for `fsdp_optim.gather_full_optim_state_dict`.
        collect: "wrapper" treats units with fairscale's `no_broadcast_optim_state` as fairscale does: the dict has the
            recipient's own state of these units, and `uncollected_local_ids` lists them. "all" gathers these units too.
    """
    call = CallArguments.of(options, collect=collect)
    return gather.gather(model, optim, GatherArguments(call, recipient_rank, key_by))


def iter_full_optim_state(
    model: Model,
    optim: Optimizers,
    recipient_rank: int | None = 0,
    *,
    collect: Collect = "wrapper",
    options: CallOptions = _CALL,
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Iterate as `fsdp_optim.iter_full_optim_state`, with a choice for units that have `no_broadcast_optim_state`.

    Args:
        model, optim, recipient_rank, options: as for `fsdp_optim.iter_full_optim_state`.
        collect: as for `gather_full_optim_state_dict`.
    """
    call = CallArguments.of(options, collect=collect)
    return iterate.iterate(model, optim, GatherArguments(call, recipient_rank, "name"))


@ordinary_tensors()
def for_fairscale(full: Mapping[str, Any]) -> FullDict:
    """Return a gathered dict (by id) in the form that fairscale's own `get_shard_from_optim_state_dict` reads.

    The conversion is explicit, because fairscale needs `step` and other 0-dim tensors in a form that torch.optim does not
    read. The result shares its tensors with `full`, which neither this function nor fairscale's reader changes.

    Args:
        full: the result of `gather_full_optim_state_dict` with `key_by="id"`.
    """
    return rekey.for_fairscale(full)
