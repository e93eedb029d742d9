"""The checkpointers of OLMo: train, save as each of them does, resume elsewhere, and unshard in one process.

Full files, and ShardedTensors of each rank, are written by torch's own calls, the others by writers that follow OLMo's source. A
folder of torch.distributed.checkpoint in a bucket is in test_workflows.py. The oracle is the run that never stopped.
"""

from __future__ import annotations

import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from kit import dcp as dcp_layouts
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.language_model import LanguageModel, adamw, check_close, train, unbroken
from kit.rank_files import save_olmo_local, save_sharded
from kit.tables import each
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

BEFORE, AFTER, MEMORY = 3, 2, 16 << 20  # steps; bytes
CHECKPOINTERS = ("full", "remote", "legacy", "local")


def save_all(root: Path) -> None:
    """One training, saved as each checkpointer does."""
    model: Any = WRAPPERS["FSDP1 orig"](LanguageModel())
    optim = adamw(model.parameters())
    train(model, optim, range(BEFORE))
    dcp_layouts.olmo_core(SimpleNamespace(model=model, optim=optim), root / "remote")  # type: ignore[arg-type]
    for name in ("full", "legacy", "local"):
        (root / name).mkdir(exist_ok=True)
    save_sharded(str(root / "legacy"), model, optim)
    save_olmo_local(str(root / "local"), model, optim)
    whole = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)  # True gives shared memory on the CPU
    with TorchFSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
        weights, state = model.state_dict(), TorchFSDP.optim_state_dict(model, optim)
    if dist.get_rank() == 0:
        torch.save(weights, root / "full" / "model.pt")
        torch.save(state, root / "full" / "optim.pt")
        torch.save({"global_step": BEFORE}, root / "full" / "train.pt")


def resume(place: Path, wrapper: str) -> None:
    model: Any = WRAPPERS[wrapper](LanguageModel())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optim = adamw(model.parameters())
    fsdp_optim.load(place, model, optim, options=fsdp_optim.LoadOptions(compare=True, progress=False))
    check_close(
        f"{place.name}, {wrapper}",
        train(model, optim, range(BEFORE, BEFORE + AFTER)),
        unbroken(BEFORE + AFTER)[BEFORE:],
    )


class OlmoWorkflowTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(save_all, 2, cls.root)

    @parameterized.expand([(3, "FSDP2"), (2, "FSDP1 orig"), (1, "plain")])
    def test_every_checkpointer_resumes_elsewhere(self, size: int, wrapper: str) -> None:
        run_on_ranks(each, size, resume, [(self.root / name, wrapper) for name in CHECKPOINTERS])

    def test_unsharded_in_one_process(self) -> None:
        """Without a process group and in little memory: the same weights and state from each, in one file of each half."""
        unsharded = {}
        for name in CHECKPOINTERS:
            self.assertFalse(dist.is_initialized())
            target = self.root / f"{name}-unsharded"
            fsdp_optim.convert(
                self.root / name,
                target,
                options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, progress=False, durable=False),
            )
            model = LanguageModel()
            optim = adamw(model.parameters())
            fsdp_optim.load(target, model, optim, options=fsdp_optim.LoadOptions(compare=True))
            unsharded[name] = (dict(model.state_dict()), optim.state_dict()["state"])
        for name in CHECKPOINTERS[1:]:
            check_same(name, unsharded[name], unsharded[CHECKPOINTERS[0]])


if __name__ == "__main__":
    unittest.main()
