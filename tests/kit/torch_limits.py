"""The limits of the oldest torch: a reason by which a test is skipped, or "" where this torch can."""

from __future__ import annotations

import inspect
import unittest

import torch
from torch.distributed.fsdp import fully_shard

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

NO_FORWARD = (
    ""
    if hasattr(torch.cpu.Stream(), "record_event")
    else "FSDP2 of this torch has no forward pass on CPU (record_event)"
)
NO_UNEVEN_TP = "" if _VERSION >= (2, 7) else "FSDP2 of this torch refuses uneven shards over tensor parallel"
NO_IGNORED = (
    "" if "ignored_params" in inspect.signature(fully_shard).parameters else "fully_shard has no ignored_params"
)


def cannot_make(wrapper: str) -> str:
    """Why a wrapper of `kit.wraps` cannot be made of models with sizes that do not divide."""
    return NO_UNEVEN_TP if wrapper.startswith("FSDP2 x TP") else ""


def cannot_run(wrapper: str) -> str:
    """Why a wrapper of `kit.wraps` has no forward pass."""
    return NO_FORWARD if wrapper.startswith(("FSDP2", "HSDP")) else ""


def skip_if(test: unittest.TestCase, reason: str) -> None:
    """Skip a test for this reason; "" is none."""
    if reason:
        test.skipTest(reason)
