"""What somebody else wrote may be anything: whatever goes wrong in reading it is an error of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from fsdp_optim.errors import CheckpointError, FsdpOptimError


@contextmanager
def distrusted(where: str) -> Iterator[None]:
    """Make a CheckpointError of every exception that wrong types, numbers and names can cause."""
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
