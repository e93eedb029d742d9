"""Tensors of many parts: a rank puts the beginning of one, with the end of the one before, and its own elements later."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import torch.distributed as dist
from kit.checkpoints import mine, scramble
from kit.compare import Differs, check_same
from kit.optimizers import adam
from kit.options import as_options
from kit.servers import Options, new_bucket, shared
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.checkpoint.save import part_ranges as parts
from fsdp_optim.layout import FlatRuns
from fsdp_optim.testing import run_on_ranks


class Layers(nn.Module):
    """Tensors of some 16 KiB, which do not end where parts do."""

    units = ("layers.0", "layers.1", "layers.2", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(61, 67) for _ in range(3))


def save_and_load(wrapper: str, url: str, options: Options) -> int:
    """Save, and load bitwise; returns how many values have a rank that puts two stretches of them."""
    are_split = list[bool]()
    cuts_of = parts.cuts_of

    def noted(files: Any) -> Any:
        cuts = cuts_of(files)
        are_split.extend(isinstance(cut, FlatRuns) and not cut.in_runs for cut in cuts.values())
        return cuts

    with cpu():
        trained, other = Trained(wrapper, adam, 1, Layers), Trained(wrapper, adam, 0, Layers)
        scramble(other)
        given: Any = {"storage_options": options, "progress": False, "bucket_nbytes": 64 << 10}
        with mock.patch("fsdp_optim.checkpoint.save.file_plan.cuts_of", noted):
            fsdp_optim.save(url, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **given))
        fsdp_optim.load(url, other.model, other.optim, **as_options(fsdp_optim.LoadOptions, **given, compare=True))
        check_same("loaded", mine(other), mine(trained))
        dist.barrier()
    return sum(are_split)


class LongTensorsTest(unittest.TestCase):
    @parameterized.expand([("FSDP2", 2), ("FSDP2", 3), ("fairscale flat", 3)])
    def test_save_and_load(self, wrapper: str, num_ranks: int) -> None:
        options = {**shared("rclone"), "part_nbytes": 700}
        url = f"s3://{new_bucket(options)}/run/step-1"
        counts = run_on_ranks(save_and_load, num_ranks, wrapper, url, options)
        if not all(counts):
            raise Differs("no rank puts two stretches of a value")


if __name__ == "__main__":
    unittest.main()
