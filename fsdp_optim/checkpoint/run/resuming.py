"""resume: load the newest checkpoint of a folder. All ranks agree on which one that is, and none is skipped in silence."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from fsdp_optim.checkpoint.catalog.listing import ListedCheckpoint, newest_first
from fsdp_optim.checkpoint.catalog.listing import listed as all_listed
from fsdp_optim.checkpoint.catalog.roots import begin_anew
from fsdp_optim.checkpoint.common.arguments import ResumeArguments
from fsdp_optim.checkpoint.common.formats import listed_formats
from fsdp_optim.checkpoint.common.pending import pending
from fsdp_optim.checkpoint.common.retry import ATTEMPTS
from fsdp_optim.checkpoint.common.seen_by_all import check_shared
from fsdp_optim.checkpoint.common.stores import directory_at, store_at
from fsdp_optim.checkpoint.load.restore import restore
from fsdp_optim.errors import CheckpointError
from fsdp_optim.options import Model, OnDamage
from fsdp_optim.results.calls import LoadResult
from fsdp_optim.storage.base import is_sure_that_not
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.verbs.call import collective_call
from fsdp_optim.verbs.load_state import LoadableOptimizer
from fsdp_optim.wire import decode, encode

Root = str | os.PathLike[str]

log = logging.getLogger("fsdp_optim")


class Candidate(Struct, array_like=True, frozen=True):
    """A checkpoint that a resume may load.

    Attributes:
        where, base: as in `CheckpointEntry`.
        damage: why the listing shows already that it cannot be loaded; else empty.
        token: of the save that wrote it; empty where that cannot be read.
    """

    where: str
    base: str
    damage: str = ""
    token: str = ""

    @classmethod
    def of(cls, checkpoint: ListedCheckpoint) -> Candidate:
        """Return the candidate that a listed checkpoint is."""
        status = checkpoint.status
        damage = "" if status.is_complete else status.reason or "it is not complete"
        summary = checkpoint.summary
        return cls(checkpoint.where, checkpoint.base, damage, summary.token if summary is not None else "")


class Newest(Struct, frozen=True):
    """What a resume has loaded.

    Attributes:
        result, where, base: of the checkpoint; None and empty where there was none.
        went_back: whether it is not the newest.
        unread: the places (`base`) of newer ones that may be intact, but could not be read here when they were to be loaded.
    """

    result: LoadResult | None = None
    where: str = ""
    base: str = ""
    went_back: bool = False
    unread: tuple[str, ...] = ()

    def unread_on_any(self, group: RankGroup, step: str) -> set[str]:
        """Agree as `agree` does; return what any rank could not read, on the lowest rank only."""
        result = all_gather_bytes(group, step, encode(self.unread).encode() if self.unread else b"")
        if not self.went_back or group.rank != group.ranks[0]:
            return set()
        contents = filter(None, map(result.content_of, group.ranks))
        return {place for content in contents for place in decode(list[str], content)}


def resume(
    root: Root,
    model: Model,
    optim: LoadableOptimizer | Sequence[LoadableOptimizer] | None,
    options: ResumeArguments,
) -> LoadResult | None:
    """Load the newest checkpoint of a folder. Called by all ranks of the model."""

    def listed(again: bool) -> list[Candidate]:
        directories = [directory_at(root, options.storage_options, format) for format in listed_formats()]
        checkpoints = newest_first(all_listed(directories))
        wanted = checkpoints if optim is None else without_thin(checkpoints)
        candidates = [Candidate.of(checkpoint) for checkpoint in wanted]
        if not candidates and not again:
            begin_anew(root, options.storage_options)
        return candidates

    def listed_on_all(again: bool) -> list[Candidate]:
        with collective_call("resume", [model], options, options.call, all_of_plain=True) as (_, group):
            pending.settle()
            about = f"{str(root)!r}, {options.compared_text()}"
            candidates = candidates_on_all(group, about, partial(listed, again))
            if not candidates and not again:  # what the lowest rank does not see may be in the folder of another rank
                inside = store_at(f"{root}/_", options=options.storage_options)
                check_shared(group, inside, str(root))
        return candidates

    def load(where: str | Path) -> LoadResult:
        return restore(where, model, optim, options, done="resumed")

    candidates = listed_on_all(again=False)
    return load_newest(str(root), candidates, options.on_damage, load, partial(listed_on_all, True)).result


def without_thin(checkpoints: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """Return checkpoints, the newest first, without those that were thinned; all of them where none has its optimizer.

    Where a thin one is the newest, one line says so.
    """
    thin = [entry for entry in checkpoints if entry.summary is not None and entry.summary.thinned_from is not None]
    rest = [entry for entry in checkpoints if entry not in thin]
    if not thin or not rest:
        return list(checkpoints)
    if checkpoints[0] in thin:
        log.warning(
            "%s was thinned and has no optimizer, so it is skipped: the run continues from %s",
            checkpoints[0].where,
            rest[0].where,
        )
    return rest


def candidates_on_all(group: RankGroup, about: str, listed: Callable[[], list[Candidate]]) -> list[Candidate]:
    """Return the checkpoints that the lowest rank has listed, on all ranks. `about`: the call, which ranks compare.

    Listings of their own could differ, because a file system shows a new folder to some machines first.
    """
    content = b""
    if group.rank == group.ranks[0]:
        content = encode(tuple(listed())).encode()
    result = all_gather_bytes(group, f"newest of {about}", content)
    return decode(list[Candidate], result.content_of(group.ranks[0]))


def load_newest(
    root: str,
    candidates: Sequence[Candidate],
    on_damage: OnDamage,
    load: Callable[[str | Path], LoadResult],
    listed_again: Callable[[], Sequence[Candidate]],
) -> Newest:
    """Load the first candidate or, with on_damage="previous", the first that can be loaded; nothing if there are no candidates.

    Another process may have saved a newer checkpoint, and removed a listed one, since the folder was listed. So where one cannot
    be loaded, all ranks list again, and a list that differs up to that one is tried from its beginning: `ATTEMPTS` lists at most.

    Raises CheckpointError that names the newest checkpoint, if it cannot be loaded.
    """
    position, num_lists = 0, 1
    first: CheckpointError | None = None
    unread: list[str] = []
    while position < len(candidates):
        candidate = candidates[position]
        try:
            if candidate.damage:
                raise CheckpointError(candidate.damage)
            return Newest(load(candidate.where), candidate.where, candidate.base, position > 0, tuple(unread))
        except CheckpointError as error:  # the same on all ranks, which all take the same next candidate
            others = _others(candidates[: position + 1], listed_again) if num_lists < ATTEMPTS else ()
            if others:
                candidates, num_lists = others, num_lists + 1
                position, first, unread = 0, None, []
                continue
            if first is None:
                first = _refusal(root, candidate, candidates[position + 1 :], error)
            if on_damage == "error":
                raise first from error
            log.warning("%s cannot be loaded, so the one before it is loaded: %s", candidate.where, error)
            if not is_sure_that_not(error):
                unread.append(candidate.base)
        position += 1
    if first is not None:
        raise first
    return Newest()


def _others(tried: Sequence[Candidate], listed_again: Callable[[], Sequence[Candidate]]) -> Sequence[Candidate]:
    """List the folder again after the last of the tried checkpoints could not be loaded. Called by all ranks.

    Returns the new list if it begins with other checkpoints than those that were tried; an empty list if it begins with the same
    ones, or if the folder has none or cannot be listed now.
    """
    try:
        again = listed_again()
    except CheckpointError:  # on all ranks; the error of the load says more
        return ()
    if list(again[: len(tried)]) == list(tried):
        return ()
    if again:
        log.info("%s cannot be loaded, and the folder has other checkpoints now: trying these", tried[-1].where)
    return again


def _refusal(root: str, newest: Candidate, older: Sequence[Candidate], error: CheckpointError) -> CheckpointError:
    complete = next((candidate for candidate in older if not candidate.damage), None)
    fix = (
        f'on_damage="previous" loads the one before it, {complete.where}'
        if complete is not None
        else f"{root} has no other checkpoint that is complete"
    )
    refusal = CheckpointError(f"{newest.where}, the newest checkpoint, cannot be loaded: {error}\n{fix}")
    refusal.on_all_ranks = True
    return refusal
