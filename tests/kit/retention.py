"""Saves that remove older ones, as a CheckpointManager makes them, of any model and with any options of a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_optim.checkpoint.catalog.retention import KeepRules, KnownSaves, ManagedSave, is_own, name_of_step
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.checkpoint.save.background import async_save
from fsdp_optim.formats.base.summary import ManagerRecord
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.options import Options, SaveOptions

LIMIT = 600.0


def path_of_step(root: Any, step: int) -> Any:
    """The place that a manager gives to a step."""
    return f"{root}/{name_of_step(step)}" if isinstance(root, str) else Path(root) / name_of_step(step)


def save_managed(
    root: Any, step: int, model: Any, optim: Any = None, *, keep_last: int, call: Options | None = None, **options: Any
) -> None:
    """Save a step as a manager does that knows all checkpoints in `root`, and wait for the end. Called by all ranks."""
    place = path_of_step(root, step)
    listed = store_at(place, OURS, options.get("storage_options")).directory().listed()
    known = KnownSaves()
    known.see(one for one in listed if is_own(one))
    steps = [one.summary.step or 0 for one in listed if is_own(one) and one.summary is not None]
    record = ManagerRecord(max((before for before in steps if before < step), default=-1), None)
    given = SaveOptions(call or Options(), step=step, **{"durable": False, "progress": False, **options})
    async_save(place, model, optim, given, managed=ManagedSave(record, KeepRules(keep_last), known)).wait(LIMIT)
