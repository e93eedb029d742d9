"""The one retry of a reader whose checkpoint is replaced by another save while it is read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from fsdp_optim.errors import ReplacedError

ResultT = TypeVar("ResultT")

ATTEMPTS = 5
"""A path that is replaced this often during one call does not come to rest: then the call raises."""

log = logging.getLogger("fsdp_optim")


def retry_if_replaced(read: Callable[[], ResultT]) -> ResultT:
    """Return what `read` returns. Call it again where it raises ReplacedError, at most `ATTEMPTS` times in all.

    Nest no two of these, which would multiply the attempts. Where ranks read together, `read` must raise the error on all of
    them, so that all read the new checkpoint: a rank that retried alone would come to a meeting that the others do not make.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return read()
        except ReplacedError as error:
            log.info("reading again: %s", error)
    return read()
