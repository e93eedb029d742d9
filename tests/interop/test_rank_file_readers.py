"""Formats of several ranks pass `ReaderConformance`: their files are read in one process, whole, in parts, damaged."""

from __future__ import annotations

import functools
import shutil
import tempfile
import unittest
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.dcp import olmo_core
from kit.optimizers import adam
from kit.rank_files import save_fairscale, save_olmo_local, save_sharded, weights_of
from kit.trained import STEPS, Oracle, Trained
from kit.verified import VerifiedConformance
from kit.wrapping import cpu
from torch import nn

from fsdp_optim.foreign.dcp.reader import DCP
from fsdp_optim.foreign.per_rank.fairscale_shards import FAIRSCALE_SHARDS
from fsdp_optim.foreign.per_rank.olmo_local import OLMO_LOCAL
from fsdp_optim.foreign.per_rank.rank_tensors import RANK_TENSORS
from fsdp_optim.formats.base.index import stored_in
from fsdp_optim.formats.own import PROBE
from fsdp_optim.plugins import Format
from fsdp_optim.storage.base import Opened
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing import WrittenSample, run_on_ranks


class Tiny(nn.Module):
    """Two parameters that two ranks cut unevenly."""

    units = ("",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)


SAVES: dict[str, tuple[str, Any]] = {
    "fairscale": ("fairscale flat", functools.partial(save_fairscale, stem="last")),
    "ShardedTensor": ("FSDP1 flat", save_sharded),
    "DTensor": ("FSDP2", functools.partial(save_sharded, kind="names")),
    "OLMo": ("FSDP1 orig", save_olmo_local),
}


def write_tiny(root: str) -> None:
    with cpu():
        for name, (wrap, save) in SAVES.items():
            folder = Path(root, name)
            folder.mkdir(exist_ok=True)
            trained = Trained(wrap, adam, STEPS, Tiny)
            trained.forget_gradients()
            save(str(folder), model=trained.model, optim=trained.optim)
        folder = Path(root, "OLMo-core")
        if not dist.get_rank():
            folder.mkdir(exist_ok=True)
        dist.barrier()
        olmo_core(Trained("FSDP2", adam, STEPS, Tiny), folder)


@functools.lru_cache(maxsize=1)
def tiny() -> tempfile.TemporaryDirectory[str]:
    root = tempfile.TemporaryDirectory()
    run_on_ranks(write_tiny, 2, root.name)
    return root


class RankFilesConformance(VerifiedConformance):
    kind = ""

    def open_any(self, folder: Path) -> Opened:
        return Folder(folder, PROBE).open_any()

    def write(self, folder: Path) -> WrittenSample:
        shutil.copytree(Path(tiny().name, self.kind), folder, dirs_exist_ok=True)
        oracle = Oracle(adam, STEPS, Tiny)
        values = {
            **{f"state.{fqn}.{name}": value for fqn, s in oracle.by_name().items() for name, value in s.items()},
            "step": torch.tensor(float(STEPS)),
        }
        with closing(self.make_format().open(self.open_any(folder), verify=True)) as reader:
            keys = [stored.key for stored in stored_in(reader.full_dict)]
        listed = [values["step" if key.endswith(".step") else key.removeprefix("optim.")] for key in keys]
        return WrittenSample(weights_of(oracle.model), listed)

    @pytest.mark.slow
    def test_damage_is_an_error_and_no_crash(self) -> None:
        super().test_damage_is_an_error_and_no_crash()


class FairscaleShardsTest(RankFilesConformance, unittest.TestCase):
    kind = "fairscale"

    def make_format(self) -> Format:
        return FAIRSCALE_SHARDS


class ShardedTensorTest(RankFilesConformance, unittest.TestCase):
    kind = "ShardedTensor"

    def make_format(self) -> Format:
        return RANK_TENSORS


class DTensorTest(RankFilesConformance, unittest.TestCase):
    kind = "DTensor"

    def make_format(self) -> Format:
        return RANK_TENSORS


class OlmoLocalTest(RankFilesConformance, unittest.TestCase):
    kind = "OLMo"
    unread = ("config.yaml",)

    def make_format(self) -> Format:
        return OLMO_LOCAL


class OlmoCoreTest(RankFilesConformance, unittest.TestCase):
    kind = "OLMo-core"
    unread = ("train/rank0.pt",)

    def make_format(self) -> Format:
        return DCP


if __name__ == "__main__":
    unittest.main()
