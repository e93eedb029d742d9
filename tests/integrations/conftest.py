"""Ranks of their own for each file here, because trainers' packages change each other when one process imports several."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from fsdp_optim.testing import RankPool


# verl asks `isinstance(model, ABC)`: where Lightning is imported, this is true of every module, because every module has a `to`.
@pytest.fixture(autouse=True, scope="module")
def own_ranks() -> Iterator[None]:
    """New processes for the calls of `run_on_ranks` in this file; they end with it."""
    with RankPool() as pool, mock.patch("fsdp_optim.testing.ranks._shared_pool", return_value=pool):
        yield
