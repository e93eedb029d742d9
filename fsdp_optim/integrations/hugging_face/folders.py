"""The checkpoint folders of Accelerate and of the Trainer: the names of their files, what a folder is, and which ones go."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from fsdp_optim.integrations.hugging_face.settings import Settings
from fsdp_optim.plugins import (
    by_lowest,
    folders_by_number,
    has_checkpoint,
    has_file,
    remove_folders,
    see_files,
    sizes_in,
)

_OF_THE_RUN = re.compile(
    r"(scheduler|sampler|dl_state_dict)(_\d+)?\.(bin|pt)|scaler\.pt"
    r"|rng_state(_\d+)?\.pth|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|trainer_state\.json"
)
"""The files for the state of a run."""

_OF_ONE_RANK = re.compile(r"(?:rng_state|random_states)_(\d+)\.(?:pth|pkl)")
"""The files that only the rank of this number reads."""

_OUTDATED = re.compile(
    r"(adapter_)?(pytorch_)?model(_fsdp)?(_\d+)?(_rank\d+)?(-\d{5}-of-\d{5})?(\.bin|\.safetensors)?(\.index\.json)?"
    rf"|optimizer(_\d+)?(_rank\d+)?(\.bin|\.pt)?|{_OF_THE_RUN.pattern}"
)
"""The files for the weights, the optimizer and the state of a run. In a folder that is saved again they are old."""

_SHARDED_MODEL, SHARDED_OPTIM = "pytorch_model_fsdp_{}", "optimizer_0"
"""Folders of torch.distributed.checkpoint that Accelerate writes with SHARDED_STATE_DICT."""

Kind = Literal["ours", "sharded", "other"]
"""A checkpoint of this library, one of `is_sharded_by_accelerate`, or anything else."""


@dataclass(frozen=True)
class FoundFolder:
    """What rank 0 has found in a folder of a trainer, the same on all ranks.

    Attributes:
        files: the names of the files for the state of the run, which all ranks that read them see by now.
    """

    kind: Kind
    files: frozenset[str]


def look_at(path: str, settings: Settings, *, with_optim: bool) -> FoundFolder:
    """Look at a folder that is to be loaded. Called by all ranks.

    Raises CheckpointError, on all ranks, where rank 0 cannot tell what is there, and where a rank does not see in time what it is
    to read. `with_optim`: as for `is_sharded_by_accelerate`.
    """

    def look() -> tuple[Kind, dict[str, int]]:
        kind: Kind = "ours" if has_checkpoint(path) else "other"
        if kind == "other" and is_sharded_by_accelerate(path, with_optim=with_optim):
            kind = "sharded"
        return kind, sizes_in(path, is_of_the_run) if kind != "other" else {}

    kind, sizes = by_lowest(f"look at {Path(path).name}", look, settings.saving())
    if kind != "other":
        see_files(path, {name: nbytes for name, nbytes in sizes.items() if _is_read_here(name)}, settings.saving())
    return FoundFolder(kind, frozenset(sizes))


def is_sharded_by_accelerate(path: str, *, with_optim: bool) -> bool:
    """Whether a folder has the parts that Accelerate writes with SHARDED_STATE_DICT: those of one model, and of its optimizer.

    Accelerate itself loads such an optimizer into FSDP1 only where the new run's optimizer has a state already.
    """
    wanted = [_SHARDED_MODEL.format(0), *([SHARDED_OPTIM] if with_optim else [])]
    return all(has_file(f"{path}/{name}", ".metadata") for name in wanted) and not has_file(
        f"{path}/{_SHARDED_MODEL.format(1)}", ".metadata"
    )


def is_of_the_run(name: str) -> bool:
    """Whether this is the name of a file for the state of a run."""
    return _OF_THE_RUN.fullmatch(name) is not None


def is_outdated(name: str) -> bool:
    """Whether a file of this name is old, in a folder that is saved again."""
    return _OUTDATED.fullmatch(name) is not None


def remove_older(newest: Path, named: re.Pattern[str], limit: int, reason: str, kept: Collection[Path] = ()) -> None:
    """Remove the folders of the lowest numbers beside `newest` until `limit` are left. `newest` and those in `kept` stay."""
    folders = [path for _, path in folders_by_number(newest.parent, named)]
    stay = {newest, *kept}
    others = [path for path in folders if path not in stay]
    num_gone = len(others) - max(limit - len(stay & set(folders)), 0)
    remove_folders(others[: max(num_gone, 0)], reason)


def optimizer_inside(optim: Any) -> Any:
    """The optimizer in the wrapper that Accelerate puts around it."""
    while type(optim).__name__ == "AcceleratedOptimizer":
        optim = optim.optimizer
    return optim


def optimizers_inside(optims: Sequence[Any]) -> Any:
    """One optimizer, a list of several, or None."""
    inside = [optimizer_inside(optim) for optim in optims]
    return inside if len(inside) > 1 else inside[0] if inside else None


def _is_read_here(name: str) -> bool:
    of_one = _OF_ONE_RANK.fullmatch(name)
    return of_one is None or int(of_one[1]) == (dist.get_rank() if dist.is_initialized() else 0)
