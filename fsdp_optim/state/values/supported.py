"""The checks that refuse optimizers and state values which cannot be gathered, with an error that names the fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch

from fsdp_optim.errors import WrapperError
from fsdp_optim.tensors.dtensors import as_local, is_usual_dtensor
from fsdp_optim.tensors.elements import check_elements, is_usual
from fsdp_optim.tensors.memory import is_plain, tensors_in


def check_supported(optim: object) -> None:
    """Refuse an optimizer of a class whose state does not belong to single parameters of this rank.

    Raises WrapperError that names the class and the fix.
    """
    name = type(optim).__name__
    if any(base.__name__ == "LBFGS" for base in type(optim).__mro__):
        raise WrapperError(
            f"{name} keeps one history for all parameters together, in the state of the first parameter, so its state cannot be "
            "gathered by parameter: use another optimizer"
        )
    if hasattr(optim, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer, fairscale's OSS
        raise WrapperError(
            f"{name} distributes its state over the ranks itself, in whole parameters: call consolidate_state_dict() and save "
            f"the state_dict() of {name}, which is that of the unwrapped optimizer, or shard the model with FSDP and use an "
            "ordinary optimizer"
        )


def check_values(fqn: str, state: Mapping[str, object], *, inner: bool) -> None:
    """Refuse state values whose elements cannot be gathered: partial sums, sparse tensors, and tensors on the meta device.

    `inner`: also refuse DTensors inside containers of which this rank has only a part. A DTensor that is a value by itself is
    gathered by its own cut; a DTensor in a dict or list is part of an opaque value, of which every rank with the parameter must
    have all, unless the parameter is a DTensor itself.

    Raises WrapperError that names the parameter, the value and the fix.
    """
    for name, value in state.items():
        if is_usual(value) or is_usual_dtensor(value):
            continue  # nearly every value, and there are many
        check_elements(f"{fqn}: {name}", value, WrapperError)
        if inner and not isinstance(value, torch.Tensor):
            as_local(f"{fqn}: {name}", value)
        if is_sparse(value):
            raise WrapperError(sparse(fqn, name, value))
        for tensor in _tensors(value):
            if any(part.is_meta for part in tensors_in(tensor)):
                raise WrapperError(
                    f"{fqn}: {name} is on the meta device and has no elements: materialize the model and the optimizer first"
                )
            placements = getattr(tensor, "placements", ())
            if any(placement.is_partial() for placement in placements):
                raise WrapperError(
                    f"{fqn}: {name} is a DTensor with placements {tuple(placements)}: each rank holds only its part of a "
                    "reduction (as in the norm of a DTensor); store .full_tensor() of the DTensor in the optimizer's state, or "
                    ".redistribute() it to Replicate or Shard"
                )


def copyable(where: str, value: Any) -> Any:
    """Return a value of a param group, or of no parameter, without DTensors. Raises StateError where it cannot be copied."""
    check_elements(where, value)
    return as_local(where, value)


def is_sparse(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a state value is a tensor without memory for every element, such as the momentum of sparse gradients."""
    return is_plain(value) and isinstance(value, torch.Tensor) and value.layout is not torch.strided


def sparse(fqn: str, name: object, value: torch.Tensor) -> str:
    """Return the error message for a sparse value."""
    return (
        f"{fqn}: {name} is a sparse tensor ({value.layout}), which cannot be cut into shards: store .to_dense() of the tensor in "
        "the optimizer's state, or make dense gradients (torch.nn.Embedding with sparse=False)"
    )


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
