"""Ranks with packages imported for the files here that say so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from kit.forked import own_ranks


@pytest.fixture(autouse=True, scope="module")
def ranks_of_this_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a file has a list `LOADED`: new processes for its calls of `run_on_ranks`, in which these modules are imported."""
    loaded = getattr(request.module, "LOADED", None)
    with own_ranks(loaded) if loaded else contextlib.nullcontext():
        yield
