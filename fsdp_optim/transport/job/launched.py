"""The ranks that a launcher (torchrun) has started, for programs that do not initialize torch.distributed themselves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def launched_ranks() -> Iterator[int]:
    """Yield this process's rank. Processes that a launcher has started are the default group inside the context."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if dist.is_initialized() or not launched.isdecimal() or int(launched) <= 1:
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
