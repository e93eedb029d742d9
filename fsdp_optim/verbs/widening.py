"""State that is narrower than its parameter, because the run was in another precision: widened, which is exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fsdp_optim.errors import StateError, shortened
from fsdp_optim.state.values.classes import innermost, is_of_torch
from fsdp_optim.state.values.kinds import is_known_moment


def widened(
    optim: Any, shard: Mapping[str, Any], params: Mapping[Any, torch.Tensor]
) -> tuple[Mapping[str, Any], dict[str, None]]:
    """Cast every value of a shard that is narrower than its parameter to the parameter's dtype; return the shard and notes.

    torch's own optimizers make their state in the dtype of the parameter, and cannot step, or lose precision for good, with a
    narrower one. Optimizers of other classes may keep narrow state on purpose: it is widened only where they have live
    state of that name, and none of it is narrow. Wider state, as fp32 moments of bf16 parameters, stays as it is. The notes
    say in words what was widened.

    Raises StateError for state of a torch optimizer whose dtype is neither narrower nor wider (float16 and bfloat16).
    """
    follows = _Follows(optim)
    state: dict[Any, Any] = {}
    notes: dict[str, None] = {}
    for local_id, values in shard["state"].items():
        changed = {}
        if (param := params.get(local_id)) is None:
            state[local_id] = values  # belongs to no parameter, and can be anything
            continue
        dtype = param.dtype  # asked once: a DTensor answers slowly
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) or value.dtype == dtype:
                continue  # nearly always
            if not _differs_in_dtype(param, name, value) or not follows.parameter(name, value.dtype):
                continue
            if torch.promote_types(value.dtype, param.dtype) == value.dtype:
                continue  # wider
            if torch.promote_types(value.dtype, param.dtype) != param.dtype:
                raise StateError(
                    f"{name} of local parameter {local_id} is {_short(value.dtype)}, its parameter {_short(param.dtype)}, and "
                    f"neither holds all values of the other, so {type(innermost(optim)).__name__} cannot continue exactly: build "
                    "the model in the saved dtype, or in float32"
                )
            changed[name] = value.to(param.dtype)
            notes[f"{name} {_short(value.dtype)} -> {_short(param.dtype)}"] = None
        state[local_id] = {**values, **changed} if changed else values
    return ({**shard, "state": state} if notes else shard), notes


def in_words(notes: Mapping[str, None]) -> str:
    """Say in a log line what was widened."""
    return shortened(list(notes), 6)


_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


def _differs_in_dtype(param: torch.Tensor, name: object, value: torch.Tensor) -> bool:
    """Return whether a value of another dtype holds the same kind of numbers as its parameter. Step counts do not count."""
    if name == "step":
        return False
    if not value.dim() and not is_known_moment(str(name)):
        return False
    return any(value.dtype in kind and param.dtype in kind for kind in (_FLOATS, _COMPLEX))


class _Follows:
    """Whether an optimizer keeps a state value in the dtype of its parameter."""

    def __init__(self, optim: Any) -> None:
        self._of_torch = is_of_torch(optim)
        self._live: dict[str, set[torch.dtype]] = {}
        live = getattr(innermost(optim), "state", None) if not self._of_torch else None
        for values in live.values() if isinstance(live, Mapping) else ():
            for name, value in values.items() if isinstance(values, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    self._live.setdefault(str(name), set()).add(value.dtype)

    def parameter(self, name: object, dtype: torch.dtype) -> bool:
        live = self._live.get(str(name), set())
        return self._of_torch or bool(live and dtype not in live)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
