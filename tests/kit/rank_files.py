"""Files of each rank, as training programs write them with fairscale's and torch's own calls, and as OLMo writes them."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

import fsdp_optim
from kit.models import Net


class Remembering(nn.Linear):
    """A layer with extra state."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Buffered(Net):
    """`Net` with buffers in the root and in a unit, and with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.arange(6.0).reshape(2, 3) / 7)
        self.block[1].register_buffer("count", torch.tensor(2**40 + 1))
        self.head = Remembering(5, 2)


def values_of_others(loaded: fsdp_optim.LoadResult) -> tuple[str, ...]:
    """The missing keys of this rank: where fewer ranks saved, and each had values of its own, a new rank gets none."""
    if not dist.is_initialized() or dist.get_rank() < loaded.world_size:
        return ()
    try:
        each_had_some = any(loaded.all_ranks)
    except fsdp_optim.CheckpointError:  # pickles, which are not opened without allow_pickle
        each_had_some = True
    return ("state['per_rank_extra']",) if each_had_some else ()


def save_fairscale(
    folder: str, stem: str, model: Any, optim: Any, metadata: str = "shard_metadata", updates: int = 3
) -> None:
    """A rank's file in the way of metaseq (`shard_metadata`) or fairseq (`fsdp_metadata`), with `use_sharded_state`."""
    rank = dist.get_rank()
    state = {
        "cfg": {"optimizer": {"lr": [0.01]}},
        "model": model.local_state_dict(),
        "optimizer_history": [{"optimizer_name": "Adam", "num_updates": updates}],
        "extra_state": {"epoch": 2, "rng": torch.arange(3) + rank},
        "last_optimizer_state": optim.state_dict(),
        metadata: model.local_metadata_dict(),
    }
    if metadata == "fsdp_metadata":
        state["args"] = argparse.Namespace(arch=f"net of rank {rank}")
    torch.save(state, Path(folder) / f"{stem}-shard{rank}.pt")


def sharded_dicts(model: Any, optim: Any, kind: str = "") -> dict[str, Any]:
    """A rank's dicts of FSDP1 (SHARDED_STATE_DICT) or FSDP2. `kind`: for FSDP2, "ids", "names" or "flattened"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(model, TorchFSDP):
            TorchFSDP.set_state_dict_type(
                model,
                StateDictType.SHARDED_STATE_DICT,
                ShardedStateDictConfig(offload_to_cpu=True),
                ShardedOptimStateDictConfig(offload_to_cpu=True),
            )
            return {"model": model.state_dict(), "optim": TorchFSDP.optim_state_dict(model, optim)}
        options = StateDictOptions(flatten_optimizer_state_dict=kind == "flattened")
        by_torch = optim.state_dict() if kind == "ids" else get_optimizer_state_dict(model, optim, options=options)
        return {"model": model.state_dict(), "optim": by_torch}


def save_sharded(folder: str, model: Any, optim: Any, kind: str = "", **others: Any) -> None:
    torch.save({**sharded_dicts(model, optim, kind), **others}, Path(folder) / f"rank{dist.get_rank()}.pt")


_FLAT_KEYS = ("_fqns", "_numels", "_numels_with_padding", "_shapes", "_shard_numel_padded", "_shard_param_infos")


def save_olmo_local(folder: str, model: Any, optim: Any, *, before_2_1: bool = False, **trainer: Any) -> None:
    """The files of OLMo's LocalShardedCheckpointer: an independent writer, which follows its source.

    `before_2_1`: in the form of torch before 2.1, which laid parameters end to end, and described only those on the rank.
    """
    modules = []
    for name, module in model.named_modules():
        if not isinstance(module, TorchFSDP):
            continue
        handle = module._handle
        handles = [] if handle is None else [_old_form(handle.flat_param) if before_2_1 else _form(handle.flat_param)]
        modules.append({"handles": handles, "name": name})
    names = {id(param): name for name, param in model.named_parameters()}
    state = optim.state_dict()
    for packed, group in zip(state["param_groups"], optim.param_groups, strict=True):
        packed["param_names"] = [names[id(param)] for param in group["params"]]
    rank = dist.get_rank()
    for half, value in (("model", {"modules": modules}), ("optim", state), ("train", {"rank": rank, **trainer})):
        Path(folder, half).mkdir(exist_ok=True)
        torch.save(value, Path(folder, half, f"rank{rank}.pt"))
    if rank == 0:
        Path(folder, "metadata.yaml").write_text(f"world_size: {dist.get_world_size()}\n")
        Path(folder, "config.yaml").write_text("run_name: test\n")


def _form(flat: Any) -> dict[str, Any]:
    return {
        "flat_param.data": flat.detach(),
        **{f"flat_param.{key}": getattr(flat, key) for key in _FLAT_KEYS if hasattr(flat, key)},
    }


def _old_form(flat: Any) -> dict[str, Any]:
    held = [(index, info) for index, info in enumerate(flat._shard_param_infos) if info.in_shard]
    data = flat.detach()
    parts = [data[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard] for _, info in held]
    padding = data.new_zeros(2)
    return {
        "flat_param.data": torch.cat([*parts, padding]),
        "flat_param._fqns": flat._fqns,
        "flat_param._shapes": flat._shapes,
        "flat_param._numels": flat._numels,
        "flat_param._shard_param_offsets": tuple(
            (info.intra_param_start_idx, info.intra_param_end_idx) for _, info in held
        ),
        "flat_param._shard_indices": (held[0][0], held[-1][0]) if held else (0, 0),
        "flat_param._shard_numel_padded": 2,
    }


def weights_of(model: nn.Module) -> Mapping[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}
