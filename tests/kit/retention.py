"""Saves that remove older ones, as a CheckpointManager makes them, of any model and with any options of a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_optim import SaveOptions
from fsdp_optim.checkpoint.catalog.retention import KeepRules, KnownSaves, ManagedSave, is_own
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.checkpoint.save.background import async_save
from fsdp_optim.formats.own import OURS
from fsdp_optim.plugins import ManagerRecord
from kit.options import as_options

LIMIT = 600.0


def name_of_step(step: int) -> str:
    """The name of the folder of a step in that of a manager, as the docs say."""
    return f"step-{step:08}"


def path_of_step(root: Any, step: int) -> Any:
    """The place that a manager gives to a step."""
    return f"{root}/{name_of_step(step)}" if isinstance(root, str) else Path(root) / name_of_step(step)


def save_managed(
    root: Any,
    step: int,
    model: Any,
    optim: Any = None,
    *,
    keep_last: int,
    known: KnownSaves | None = None,
    **options: Any,
) -> None:
    """Save a step as a manager does, and wait for the end. Called by all ranks.

    `known`: what the run knows, from one save of every step to the next; None: all checkpoints that are listed in `root`.
    """
    place, after = path_of_step(root, step), step - 1
    if known is None:
        known = KnownSaves()
        listed = store_at(place, OURS, options.get("storage_options")).directory().listed()
        known.see(entry for entry in listed if is_own(entry))
        steps = [entry.summary.step or 0 for entry in listed if is_own(entry) and entry.summary is not None]
        after = max((before for before in steps if before < step), default=-1)
    managed = ManagedSave(ManagerRecord(after, None), KeepRules(keep_last), known)
    arguments = as_options(SaveOptions, **{"durable": False, "progress": False, **options})
    made, state = arguments.pop("options"), arguments.pop("state", None)
    given = SaveArguments.of(made, state, step=step, **arguments)
    async_save(place, model, optim, given, managed=managed).wait(LIMIT)
