"""The description of the optimizer's state, made from the live state at a save."""

from __future__ import annotations

from typing import Any

from fsdp_optim.checkpoint.common.contents import SavedHalf
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.description import (
    OPAQUE,
    SCALAR,
    GroupDescription,
    OptimDescription,
    ParamDescription,
)
from fsdp_optim.formats.base.saved_optim import WORD_OF
from fsdp_optim.state.values.classes import class_names_written


def describe(state: SavedHalf) -> OptimDescription:
    """The description of the state to save. Raises CheckpointError for a value that no reader accepts."""
    for index, hyper in enumerate(state.local.optim.groups):
        for name in hyper:
            if not isinstance(name, str):
                raise CheckpointError(
                    f"param group {index}: the name of a hyperparameter is {name!r}, but must be a str"
                )
    keys = {(tensor.fqn, tensor.name): tensor.stored_name for tensor in state.tensors}
    params = {}
    for fqn, param in state.global_state.params.items():
        values: list[tuple[Any, str, Any]] = []
        summary = param.summary
        scalars = dict(summary.scalars) if summary is not None else {}
        for name, kind in summary.kinds if summary is not None else ():
            if (fqn, name) in keys:
                values.append((name, WORD_OF.get(kind, kind), keys[fqn, name]))
            elif name in scalars:
                values.append((name, SCALAR, scalars[name].value))
            elif (fqn, name) in state.opaque:
                values.append((name, OPAQUE, state.opaque[fqn, name]))
        params[fqn] = ParamDescription(param.placement.shape, tuple(values), summary is not None)
    return OptimDescription(
        groups=tuple(
            GroupDescription(tuple(hyper.items()), state.global_state.group_fqns(index))
            for index, hyper in enumerate(state.local.optim.groups)
        ),
        other_keys=dict(state.local.optim.other_keys),
        params=params,
        optimizer_class=class_names_written([known.name for known in state.local.optim.classes]),
    )
