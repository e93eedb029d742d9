"""A guard around code that reads files of unknown origin: every failure becomes a CheckpointError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from fsdp_optim.errors import CheckpointError, FsdpOptimError


@contextmanager
def as_checkpoint_error(where: str) -> Iterator[None]:
    """Raise every exception that wrong types, numbers and names can cause as a CheckpointError that names `where`."""
    try:
        yield
    except FsdpOptimError:
        raise
    except (
        *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
        *(RuntimeError, RecursionError, MemoryError, msgspec.MsgspecError),
    ) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise CheckpointError(f"{where}: is not written as it should be: {reason}") from error
