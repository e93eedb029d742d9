"""What a checkpoint says of an optimizer: everything but the elements of tensors. Written as JSON and read from it here.

`written` and `read` are inverse, and so are `encoded` and `decoded`, which go on to JSON and to the tensors beside it: a
hyperparameter may be a tensor, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from fsdp_optim.formats.codec import Decoder, Encoder
from fsdp_optim.formats.distrust import distrusted

TENSOR = "tensor"
"""A value whose elements are stored, shaped like the parameter and cut like it."""

SCALAR_TENSOR = "scalar tensor"
"""A stored tensor without dimensions."""

PLACED = "placed"
"""A stored tensor that was cut in a way of its own; what follows the word says how, where that is known."""

SCALAR, OPAQUE = "scalar", "opaque"
"""A value that is in the description itself: a number or a word; anything else."""


@dataclass(frozen=True)
class ParamDescription:
    """The state of one parameter.

    `values`: of each its name, what it is (one of the words above), and its key among the stored tensors, or the value itself.
    """

    shape: tuple[int, ...]
    values: tuple[tuple[Any, str, Any], ...]
    has_state: bool


@dataclass(frozen=True)
class GroupDescription:
    """One param group: its hyperparameters and the names of its parameters."""

    hyperparameters: tuple[tuple[str, Any], ...]
    params: tuple[str, ...]


@dataclass(frozen=True)
class OptimDescription:
    """An optimizer.

    Attributes:
        groups: its groups, each with its parameters in the order in which the optimizer counts them.
        extra: other keys of its state_dict().
        params: what there is of each parameter.
        optimizer_class: the name of its class, or one for each group where they differ; None where it is not known.
    """

    groups: tuple[GroupDescription, ...]
    extra: dict[str, Any]
    params: dict[str, ParamDescription]
    optimizer_class: str | list[str] | None = field(default=None)


def written(description: OptimDescription) -> dict[str, Any]:
    """The description as dicts and lists, with values as they are."""
    return {
        "optimizer_class": description.optimizer_class,
        "groups": [
            {"hyperparameters": [list(pair) for pair in group.hyperparameters], "params": list(group.params)}
            for group in description.groups
        ],
        "extra": description.extra,
        "params": {
            fqn: {
                "shape": list(param.shape),
                "values": [list(value) for value in param.values],
                "has_state": param.has_state,
            }
            for fqn, param in description.params.items()
        },
    }


def read(where: str, plain: Any) -> OptimDescription:
    """The inverse of `written`. Raises CheckpointError where something is of another type."""
    with distrusted(where):
        found = msgspec.convert(plain, OptimDescription)
        for param in found.params.values():
            hash(tuple(name for name, _, _ in param.values))  # names may be numbers and tuples, too
        return found


def encoded(
    where: str, description: OptimDescription, *, allow_pickle: bool, records: Mapping[str, type]
) -> tuple[Any, list[torch.Tensor]]:
    """The description as JSON values, and the tensors in it. Raises CheckpointError that names what cannot be saved."""
    encoder = Encoder(allow_pickle=allow_pickle, records=records)
    return encoder.encode(where, written(description)), encoder.tensors


def decoded(
    where: str, values: Any, tensors: Sequence[torch.Tensor], *, allow_pickle: bool, records: Mapping[str, type]
) -> OptimDescription:
    """The inverse of `encoded`. Raises CheckpointError for what it does not write, and for a pickle that is not allowed."""
    return read(where, Decoder(where, tensors, allow_pickle=allow_pickle, records=records).decode(values))
