"""Values for files of torch.save that `torch.load(weights_only=True)` and a load of this library read, and no others."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.read_back import check_read_back


def check_safe(name: str, value: Any, *, allow_pickle: bool) -> None:
    """Refuse a value that `torch.load(weights_only=True)` or a load of this library does not read, by its place under `name`."""
    try:
        _check_safe(name, value, allow_pickle=allow_pickle)
    except CheckpointError:
        for key, item in value.items() if isinstance(value, dict) else ():
            check_safe(f"{name}[{key!r}]", item, allow_pickle=allow_pickle)  # which is nearer to what is wrong
        raise


def _check_safe(name: str, value: Any, *, allow_pickle: bool) -> None:
    data = saved_by_torch(value)
    unsafe = None if allow_pickle else _unsafe_name_in(data)
    if unsafe:
        raise CheckpointError(
            f"{name}: has a {unsafe}, which torch.load(weights_only=True) does not read: give allow_pickle=True, or save plain "
            "values"
        )
    check_read_back(name, type(value).__name__, data, allow_pickle=allow_pickle)


def _unsafe_name_in(data: bytes) -> str | None:
    """Return the class of an item in a file that `torch.load(weights_only=True)` does not read; None if there is nothing."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except pickle.UnpicklingError:
        return "number or object that takes another operation of pickle"
    return names[0] if names else None


def saved_by_torch(value: Any) -> bytes:
    """Return the bytes of a file of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
