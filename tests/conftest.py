"""What pytest has to know about this suite: which tests need GPUs, and how hypothesis searches."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# No deadline: the ranks of another test may have the cores. In CI the same examples are tried every time,
# but where many times more are asked for.
settings.register_profile(
    "fsdp_optim", deadline=None, derandomize="CI" in os.environ and "EXAMPLES" not in os.environ, print_blob=True
)
settings.load_profile("fsdp_optim")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for_gpus = [item for item in items if item.get_closest_marker("nccl")]
    if not for_gpus:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in for_gpus:
        item.add_marker(pytest.mark.skip(reason="nccl: needs a GPU, and torch sees none"))
