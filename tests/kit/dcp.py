"""Checkpoints of torch.distributed.checkpoint in the layouts of several trainers, written by torch and by code of these."""

from __future__ import annotations

import contextlib
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

from kit.trained import Trained

TRAIN_STATE = {"losses": [0.5, 0.25], "step": 17, "tokens": torch.tensor(2**40)}


def model_dict(trained: Trained) -> dict[str, Any]:
    return get_model_state_dict(trained.model)


def optim_dict(trained: Trained, *, flattened: bool = False) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    return get_optimizer_state_dict(trained.model, trained.optim, options=options)


def _save(state: Mapping[str, Any], path: Path, **kwargs: Any) -> None:
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path, sync_files=False, **kwargs))


def nested(trained: Trained, path: Path) -> None:
    _save({"model": model_dict(trained), "optimizer": optim_dict(trained), "train_state": TRAIN_STATE}, path)


def flattened(trained: Trained, path: Path) -> None:
    """With one file for each tensor, in one folder."""
    saved = {"model": model_dict(trained), "optim": optim_dict(trained, flattened=True), "train_state": TRAIN_STATE}
    _save(saved, path, single_file_per_rank=False)


class TitanOptimizers:
    """torchtitan's OptimizersContainer: a stateful object whose dict is flattened."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def state_dict(self) -> dict[str, Any]:
        return optim_dict(self._trained, flattened=True)

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError


def torchtitan(trained: Trained, path: Path) -> None:
    """The model's names at the top level, beside the other objects."""
    others = {"lr_scheduler": {"last_epoch": 3, "_last_lr": [0.01]}, "dataloader": {"dp_rank_0": b"state"}}
    _save({**model_dict(trained), "optimizer": TitanOptimizers(trained), **others, "train_state": TRAIN_STATE}, path)


class AppState:
    """The object of PyTorch's tutorial about DCP."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def state_dict(self) -> dict[str, Any]:
        return {"model": model_dict(self._trained), "optim": optim_dict(self._trained)}

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError


def app(trained: Trained, path: Path) -> None:
    _save({"app": AppState(trained), "train_state": TRAIN_STATE}, path)


def two_threads(trained: Trained, path: Path) -> None:
    """As torchtitan, with two files for each rank."""
    _save(
        {**model_dict(trained), "optimizer": TitanOptimizers(trained), "train_state": TRAIN_STATE}, path, thread_count=2
    )


def of_own_calls(trained: Trained, path: Path) -> None:
    """The dicts that model and optimizer give themselves, with ids, as many scripts save them of replicas."""
    _save(
        {"model": trained.model.state_dict(), "optimizer": trained.optim.state_dict(), "train_state": TRAIN_STATE}, path
    )


@contextlib.contextmanager
def sharded_dicts(model: nn.Module) -> Iterator[None]:
    configs = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        yield


def fsdp1(trained: Trained, path: Path) -> None:
    """FSDP1's sharded state dicts, by its own calls."""
    with sharded_dicts(trained.model):
        saved = {"model": trained.model.state_dict(), "optim": FSDP.optim_state_dict(trained.model, trained.optim)}
    _save({**saved, "train_state": TRAIN_STATE}, path)


def accelerate(trained: Trained, path: Path) -> None:
    """By Accelerate's own functions: a folder for the model, and one for the optimizer."""
    from accelerate.utils import fsdp_utils

    is_fsdp1 = isinstance(trained.model, FSDP)
    plugin = SimpleNamespace(
        fsdp_version=1 if is_fsdp1 else 2,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=ShardedStateDictConfig(offload_to_cpu=True),
        optim_state_dict_config=ShardedOptimStateDictConfig(offload_to_cpu=True),
    )
    accelerator = SimpleNamespace(
        process_index=dist.get_rank(),
        num_processes=dist.get_world_size(),
        is_fsdp2=not is_fsdp1,
        wait_for_everyone=dist.barrier,
    )
    with mock.patch.object(fsdp_utils, "logger"):  # which wants a state of Accelerate's own
        fsdp_utils.save_fsdp_model(plugin, accelerator, trained.model, str(path))
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, trained.optim, trained.model, str(path))


def lightning_fsdp(trained: Trained, path: Path) -> None:
    """By the FSDP strategy of Lightning Fabric."""
    from lightning.fabric.strategies.fsdp import FSDPStrategy

    strategy = FSDPStrategy(state_dict_type="sharded")
    with mock.patch.object(FSDPStrategy, "global_rank", property(lambda self: dist.get_rank())):
        strategy.save_checkpoint(
            path, {"model": trained.model, "optimizer_0": trained.optim, "train_state": TRAIN_STATE}
        )


def lightning_parallel(trained: Trained, path: Path) -> None:
    """By the model-parallel strategy of Lightning Fabric, under the names that the Trainer gives."""
    from lightning.fabric.strategies.model_parallel import _save_checkpoint

    state = {"state_dict": trained.model, "optimizer_0": trained.optim, "train_state": TRAIN_STATE}
    _save_checkpoint(path, state, full_state_dict=False, rank=dist.get_rank())


OLMO = "olmo_core.distributed.checkpoint.filesystem"


@dataclass
class _StorageInfo:
    """OLMo-core's own class of this name."""

    relative_path: str
    offset: int
    length: int


@contextlib.contextmanager
def _of_olmo_core() -> Iterator[None]:
    """Pickle `_StorageInfo` under the name of OLMo-core's class."""
    names = ["olmo_core", "olmo_core.distributed", "olmo_core.distributed.checkpoint", OLMO]
    with mock.patch.dict(sys.modules, {name: types.ModuleType(name) for name in names}):
        sys.modules[OLMO]._StorageInfo = _StorageInfo  # type: ignore[attr-defined]
        with mock.patch.object(_StorageInfo, "__module__", OLMO):
            yield


class OlmoWriter(dcp.FileSystemWriter):
    """Lists the files with OLMo-core's own class, and clones tensors before they are written, as OLMo-core does."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        for result in (write for of_rank in results for write in of_rank):
            info = result.storage_data
            result.__dict__["storage_data"] = _StorageInfo(info.relative_path, info.offset, info.length)
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        with _of_olmo_core():
            (Path(self.path) / ".metadata").write_bytes(pickle.dumps(metadata))


def olmo_core(trained: Trained, path: Path) -> None:
    """An independent writer that follows OLMo-core's source: its folder, its keys, its planner's options, its classes."""
    folder = path / "model_and_optim"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (path / "train").mkdir()
        torch.save({"global_step": 3}, path / "train" / "rank0.pt")
        (path / ".metadata.json").write_text("{}")
    dist.barrier()
    dcp.save(
        {"model": model_dict(trained), "optim": optim_dict(trained, flattened=True)},
        storage_writer=OlmoWriter(folder, sync_files=False),
        planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    )


def without_ranks(trained: Trained, path: Path) -> None:
    """Every rank by itself: a metadata file of each rank."""
    saved = {"model": model_dict(trained), "optimizer": optim_dict(trained), "train_state": TRAIN_STATE}
    dcp.save(saved, checkpoint_id=path, use_collectives=False)


LAYOUTS: dict[str, Callable[[Trained, Path], None]] = {
    "nested": nested,
    "flattened": flattened,
    "torchtitan": torchtitan,
    "two threads": two_threads,
    "app": app,
    "own calls": of_own_calls,
    "FSDP1": fsdp1,
    "accelerate": accelerate,
    "lightning FSDP": lightning_fsdp,
    "lightning parallel": lightning_parallel,
    "OLMo-core": olmo_core,
    "without ranks": without_ranks,
}

HAVE_TRAIN_STATE = frozenset(LAYOUTS) - {"accelerate", "OLMo-core"}

__all__ = ["HAVE_TRAIN_STATE", "LAYOUTS", "TRAIN_STATE"]
