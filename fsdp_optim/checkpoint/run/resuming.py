"""resume: loads the newest checkpoint of a folder. All ranks agree on which one that is, and nothing is passed by in silence."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_optim.checkpoint.catalog.listing import ListedCheckpoint, newest_first
from fsdp_optim.checkpoint.catalog.listing import listed as all_listed
from fsdp_optim.checkpoint.catalog.roots import begin_anew
from fsdp_optim.checkpoint.common.formats import listed_formats
from fsdp_optim.checkpoint.common.pending import pending
from fsdp_optim.checkpoint.common.seen_by_all import check_shared
from fsdp_optim.checkpoint.common.stores import shelf_at, store_at
from fsdp_optim.checkpoint.load.restore import restore
from fsdp_optim.checkpoint.load.restored import Restored
from fsdp_optim.errors import CheckpointError
from fsdp_optim.options import Model, OnDamage, ResumeOptions
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.verbs.call import collective_call
from fsdp_optim.verbs.load_state import LoadableOptimizer

Root = str | os.PathLike[str]

log = logging.getLogger("fsdp_optim")


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that a resume may load. `damage`: why the listing shows already that it cannot be loaded; else empty."""

    where: str
    damage: str = ""

    @classmethod
    def of(cls, one: ListedCheckpoint) -> Candidate:
        status = one.status
        return cls(one.where, "" if status.is_complete else status.reason or "it is not complete")


def resume(
    root: Root,
    model: Model,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
    options: ResumeOptions,
) -> Restored | None:
    """Load the newest checkpoint of a folder. Called by all ranks of the model."""

    def listed() -> list[Candidate]:
        directories = [shelf_at(root, options.storage_options, format) for format in listed_formats()]
        found = [Candidate.of(one) for one in newest_first(all_listed(directories))]
        if not found:
            begin_anew(root, options.storage_options)
        return found

    with collective_call("resume", [model], options, options.call, all_of_plain=True) as (_, group):
        pending.settle()
        found = candidates_on_all(group, f"{str(root)!r}, {options.compared_text()}", listed)
        if not found:  # what is not in the folder of the lowest rank may be in that of another one
            inside = store_at(f"{root}/_", options=options.storage_options)
            check_shared(group, inside, str(root))
    return load_newest(str(root), found, options.on_damage, lambda where: restore(where, model, optim, options))


def candidates_on_all(group: RankGroup, about: str, listed: Callable[[], list[Candidate]]) -> list[Candidate]:
    """The checkpoints that the lowest rank has listed, on all ranks. `about`: a description of the call, which ranks compare."""
    content = b""
    if group.rank == group.ranks[0]:
        content = json.dumps([[one.where, one.damage] for one in listed()]).encode()
    result = all_gather_bytes(group, f"newest of {about}", content)
    return [Candidate(where, damage) for where, damage in json.loads(result.content_of(group.ranks[0]))]


def load_newest(
    root: str, found: Sequence[Candidate], on_damage: OnDamage, load: Callable[[str | Path], Restored]
) -> Restored | None:
    """Load the first of these checkpoints or, with on_damage="previous", the first that can be loaded; None if there are none.

    Raises CheckpointError that names the newest one, if it cannot be loaded.
    """
    first: CheckpointError | None = None
    for place, one in enumerate(found):
        try:
            if one.damage:
                raise CheckpointError(one.damage)
            return load(one.where)
        except CheckpointError as error:
            if first is None:
                first = _refusal(root, one, found[place + 1 :], error)
            if on_damage == "error":
                raise first from error
            log.warning("%s cannot be loaded, and the one before it is taken: %s", one.where, error)
    if first is not None:
        raise first
    return None


def _refusal(root: str, one: Candidate, before: Sequence[Candidate], error: CheckpointError) -> CheckpointError:
    whole = next((other for other in before if not other.damage), None)
    way_out = (
        f'on_damage="previous" takes the one before it, {whole.where}'
        if whole is not None
        else f"{root} has no other checkpoint that is complete"
    )
    refusal = CheckpointError(f"{one.where}, the newest checkpoint, cannot be loaded: {error}\n{way_out}")
    refusal.on_all_ranks = True
    return refusal
