"""Ranks of their own for each file here, because trainers' packages change each other when one process imports several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.forked import own_ranks


# verl asks `isinstance(model, ABC)`: where Lightning is imported, this is true of every module, because every module has a `to`.
@pytest.fixture(autouse=True, scope="module")
def ranks_of_this_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """New processes for the calls of `run_on_ranks` in this file, in which the modules of its `LOADED` are imported."""
    with own_ranks(getattr(request.module, "LOADED", ())):
        yield
