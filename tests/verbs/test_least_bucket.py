"""The least `bucket_nbytes`: fewer bytes are refused by every call that takes the argument, before anything is done."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit import LEAST_OF_USERS
from kit.compare import check_refused, error_text, refused
from kit.options import as_options
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_threads

QUIET: dict[str, Any] = {"durable": False, "progress": False}
WORDS = "bucket_nbytes must be at least 4096 bytes, an integer, not "


NAMES = [
    *(
        "save",
        "async_save",
        "load",
        "resume",
        "manager",
        "gather",
        "gather weights",
        "iterate",
        "scatter",
        "scatter weights",
    ),
    "transfer",
]


def calls(root: Path, nbytes: int) -> dict[str, Callable[[], Any]]:
    model = nn.Linear(40, 70)
    for param in model.parameters():
        nn.init.constant_(param, 0.5)  # equal on all ranks
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model(torch.ones(1, 40)).sum().backward()
    optim.step()
    both, bucket = (model, optim), {"bucket_nbytes": nbytes}
    full = fsdp_optim.gather_full_optim_state_dict(*both, None)
    weights = fsdp_optim.gather_full_model_state_dict(model, None)
    fsdp_optim.save(root / "there" / "step-1", *both, overwrite=True, **as_options(fsdp_optim.SaveOptions, **QUIET))
    return {
        "save": lambda: fsdp_optim.save(
            root / "new",
            *both,
            overwrite=True,
            **as_options(fsdp_optim.SaveOptions, **QUIET, **bucket),
        ),
        "async_save": lambda: fsdp_optim.async_save(
            root / "new",
            *both,
            overwrite=True,
            **as_options(fsdp_optim.SaveOptions, **QUIET, **bucket),
        ).wait(),
        "load": lambda: fsdp_optim.load(
            root / "there" / "step-1", *both, **as_options(fsdp_optim.LoadOptions, **bucket)
        ),
        "resume": lambda: fsdp_optim.resume(root / "there", *both, **as_options(fsdp_optim.LoadOptions, **bucket)),
        "manager": lambda: fsdp_optim.CheckpointManager(
            root / "managed", *both, every=1, **as_options(fsdp_optim.ManagerOptions, **bucket)
        ).close(),
        "gather": lambda: fsdp_optim.gather_full_optim_state_dict(
            *both, None, **as_options(fsdp_optim.CallOptions, **bucket)
        ),
        "gather weights": lambda: fsdp_optim.gather_full_model_state_dict(
            model, None, **as_options(fsdp_optim.CallOptions, **bucket)
        ),
        "iterate": lambda: list(
            fsdp_optim.iter_full_optim_state(*both, None, **as_options(fsdp_optim.CallOptions, **bucket))
        ),
        "scatter": lambda: fsdp_optim.scatter_full_optim_state_dict(
            *both, full, **as_options(fsdp_optim.CallOptions, **bucket)
        ),
        "scatter weights": lambda: fsdp_optim.scatter_full_model_state_dict(
            model, weights, **as_options(fsdp_optim.CallOptions, **bucket)
        ),
        "transfer": lambda: fsdp_optim.transfer_optim_state(
            *both, *both, **as_options(fsdp_optim.CallOptions, **bucket)
        ),
    }


def on_ranks(root: str) -> list[tuple[str, str]]:
    return [error_text(call) for call in calls(Path(root), 4095).values()]


class LeastBucketTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fsdp_optim_bucket_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    @parameterized.expand(NAMES)
    def test_on_one_process(self, name: str) -> None:
        with mock.patch("fsdp_optim.options.LEAST_BUCKET_NBYTES", LEAST_OF_USERS):
            for nbytes in (1, 4095):
                refused(calls(self.root, nbytes)[name], fsdp_optim.StateError, WORDS + str(nbytes))
                self.assertFalse((self.root / "new").exists())
            calls(self.root, 4096)[name]()

    def test_on_ranks(self) -> None:
        with mock.patch("fsdp_optim.options.LEAST_BUCKET_NBYTES", LEAST_OF_USERS):
            by_rank = run_on_threads(on_ranks, 2, str(self.root))
        for errors in zip(*by_rank, strict=True):
            check_refused("4095 bytes", errors, "StateError", WORDS + "4095")
