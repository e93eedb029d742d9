"""What the library logs in a block."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_texts(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """The messages of the library in the block, of at least this level."""
    texts: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fsdp_optim")
    log.addHandler(handler)
    try:
        yield texts
    finally:
        log.removeHandler(handler)


@contextmanager
def lines_said() -> Iterator[list[str]]:
    """The messages of the library in the block from the level INFO on, which its logger lets through for that."""
    log = logging.getLogger("fsdp_optim")
    level = log.level
    log.setLevel(logging.INFO)
    try:
        with log_texts(logging.INFO) as texts:
            yield texts
    finally:
        log.setLevel(level)
