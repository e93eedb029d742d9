"""The public function for models in which a parameter of a rank is a part of a larger parameter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_optim.adapters import slices
from fsdp_optim.boundary.tracebacks import public


@public
def declare_slice(module: nn.Module, name: str, *, global_shape: Sequence[int], offset: Sequence[int]) -> None:
    """Declare that a parameter of a module on this rank is a slice of a larger parameter, which all ranks together hold.

    Every call then reads, saves and loads the complete parameter under its FQN, which is the same on all ranks. Ranks that hold
    the same slice are replicas. The declaration is kept in the module, so it may come before or after wrapping: the parameter
    may be plain, or sharded by fully_shard or another wrapper over the ranks that share the slice. All ranks of the job make
    the calls about such a model, or all ranks of `process_group`.

        experts = Experts(num=8)  # of 64, on the rank with the experts 8 to 15
        fsdp_optim.declare_slice(experts, "up", global_shape=(64, *experts.up.shape[1:]), offset=(8, 0, 0))

    Args:
        module, name: the module that owns the parameter, and the parameter's name in it.
        global_shape: the shape of the complete parameter.
        offset: the index in the complete parameter of the first element of this rank's slice, one number for each dimension.

    Raises:
        WrapperError: the arguments are no module, name, shape and index, or the slice does not fit into the shape. Where the
            slices of the ranks overlap or leave a gap, the calls raise StateError.
    """
    slices.declare(module, name, global_shape, offset)
