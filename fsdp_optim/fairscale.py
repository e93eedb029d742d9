"""fairscale's FullyShardedDataParallel with the two optimizer-state methods of this library. It needs the extra `fairscale`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fsdp_optim import api
from fsdp_optim.errors import missing
from fsdp_optim.options import Collect, KeyBy, NameOf
from fsdp_optim.state.dicts.full import FullDict
from fsdp_optim.state.live.local import OptimizerLike

try:
    from fairscale.nn.data_parallel import FullyShardedDataParallel as _FairscaleFSDP
except ModuleNotFoundError as error:
    if error.name != "fairscale":  # fairscale is there, and something that it imports is not
        raise
    raise missing("fsdp_optim.FullyShardedDataParallel", "fairscale") from None


class FullyShardedDataParallel(_FairscaleFSDP):  # type: ignore[misc]  # fairscale has no types
    """Drop-in for `fairscale.nn.data_parallel.FullyShardedDataParallel`: same arguments, usable as `wrapper_cls`.

    Only the two methods below differ from those of fairscale. Call them on the root, from which the optimizer was built.
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
        """The full optimizer state per original parameter, as if the model had no wrapper. Called by all ranks of the model.

        The same as `fsdp_optim.gather_full_optim_state_dict(self, optim, ...)`.

        Args:
            optim, recipient_rank, key_by, collect, name_of, timeout: as for `fsdp_optim.gather_full_optim_state_dict`.
        """
        return api.gather_full_optim_state_dict(
            self, optim, recipient_rank, key_by, collect=collect, name_of=name_of, timeout=timeout
        )

    def get_shard_from_optim_state_dict(
        self,
        full_optim_state_dict: Mapping[str, Any],
        optim: OptimizerLike | None = None,
        *,
        name_of: NameOf | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a full dict, at any world size, ready for the optimizer. No communication.

        Args:
            full_optim_state_dict: the full dict, needed on this rank. It stays unchanged (fairscale's own method changes it).
            optim: the optimizer that will load the result. None: an optimizer built like the saved one, group after group;
                inside a group in the saved order if the units are the same, else in the order of this model's `parameters()`.
            name_of: the function that was given to gather.

        Raises:
            StateError: as `fsdp_optim.get_shard_from_optim_state_dict`, and for a flat parameter with originals of two groups.
        """
        if optim is None:
            return api.get_shard_without_optimizer(self, full_optim_state_dict, name_of=name_of)
        return api.get_shard_from_optim_state_dict(self, optim, full_optim_state_dict, name_of=name_of)
