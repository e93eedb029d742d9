"""`fsdp-optim ls`: the checkpoints in a folder, or under a URL."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import click

from fsdp_optim.cli.options import PATH, json_option, storage_options
from fsdp_optim.cli.output import end_broken, plain, print_json, print_table
from fsdp_optim.cli.roots import name_of, reason_of
from fsdp_optim.cli.units import aged, sized
from fsdp_optim.errors import CheckpointError, wrong_use

if TYPE_CHECKING:
    from fsdp_optim.api import CheckpointInfo

_PROOFS = {"identical": ", proven", "rounding": ", proven within rounding", "recorded": ", not proven yet"}
_COLUMNS = ("name", "step", "age", "size", "ranks", "wrapper", "metric", "state")


@click.command("ls")
@click.argument("root", type=PATH)
@json_option
@storage_options
def command(root: str, as_json: bool, storage_options: dict[str, Any] | None) -> None:
    """List the checkpoints in the folder ROOT, the newest first, with damaged and unfinished ones.

    The state says whether all files are there in their sizes; `fsdp-optim verify ROOT` compares their bytes. In a folder it also
    says whether a run that resumed from the checkpoint was proven (`CheckpointManager(prove=True)`). The exit code is 1 if a
    checkpoint is damaged, or a save unfinished.
    """
    from fsdp_optim import api

    infos = api.checkpoints(root, storage_options=storage_options)
    unfinished = api.unfinished_saves(root, storage_options=storage_options)
    if not infos and not unfinished:
        raise wrong_use(f"{root}: has no checkpoints, or is not there")
    if as_json:
        listed = [{**plain(info), "state": _state(info)} for info in infos]
        print_json({"root": root, "checkpoints": listed, "unfinished": unfinished})
    else:
        now = time.time()
        rows = [[*_columns(info, now), _state(info)] for info in infos]
        rows += [[name, "", "", "", "", "", "", "unfinished: a save writes it, or died there"] for name in unfinished]
        print_table(_COLUMNS, rows, right=("step", "age", "size", "ranks", "metric"))
    if unfinished or not all(info.complete for info in infos):
        end_broken()


def _columns(info: CheckpointInfo, now: float) -> list[str]:
    return [
        name_of(info),
        str(info.step) if info.step is not None else "",
        aged(now - info.saved_at) if info.saved_at is not None else "",
        sized(info.nbytes) if info.nbytes else "",
        str(info.world_size or ""),
        info.wrapper,
        f"{info.metric:.6g}" if info.metric is not None else "",
    ]


def _state(info: CheckpointInfo) -> str:
    if info.complete:
        return ("ok, without optimizer (thinned)" if info.thinned else "ok") + _proof(info)
    return f"damaged: {reason_of(info)}"


def _proof(info: CheckpointInfo) -> str:
    """Return what is known about resumes, of a checkpoint in a folder: under a URL each look would be a request."""
    from fsdp_optim import api

    if isinstance(info.path, str):
        return ""
    with contextlib.suppress(CheckpointError):  # it was removed meanwhile
        return _PROOFS.get(api.proof_of(info.path), "")
    return ""
