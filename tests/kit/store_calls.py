"""Saves and loads in a store that a test has made, by the public calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdp_optim.plugins import Store, use_stores
from kit import checkpoints
from kit.trained import Trained


@contextmanager
def url_of(store: Store) -> Iterator[str]:
    """The URL of a store, for public calls inside the block."""
    with use_stores({"given": lambda *_: store}):
        yield "given://store"


def save_to(store: Store, trained: Trained, **options: Any) -> Any:
    with url_of(store) as url:
        return checkpoints.save(url, trained, **options)


def save_in_background(store: Store, trained: Trained, **options: Any) -> Any:
    with url_of(store) as url:
        return checkpoints.async_save(url, trained, **options)


def load_from(store: Store, trained: Trained, **options: Any) -> Any:
    with url_of(store) as url:
        return checkpoints.load(url, trained, **options)
