"""The statements of ranks in a meeting, and its verdict, in the forms in which the rendezvous store has them.

Sets of ranks are written as runs of ranks that follow each other, and values that ranks have in common are written once: what all
ranks say alike takes as many bytes for 4,096 ranks as for two.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from fsdp_optim.errors import RankError, class_name
from fsdp_optim.transport.verdict import Reason, Statement, at_another_step

MOST_REASONS = 64
"""Failed ranks whose reasons the error names."""

Runs = tuple[tuple[int, int], ...]
"""Ranks in ascending order, as (first, last) of those that follow each other."""


def runs_of(ranks: Iterable[int]) -> Runs:
    """Return ranks as runs."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return tuple(runs)


def ranks_in(runs: Runs) -> Iterator[int]:
    """Yield the ranks of runs."""
    for first, last in runs:
        yield from range(first, last + 1)


def joined(several: Sequence[Runs]) -> Runs:
    """Return the runs of all ranks that are in any of the given runs, which have no rank in common."""
    if len(several) == 1:
        return several[0]
    runs: list[tuple[int, int]] = []
    for first, last in sorted(run for each in several for run in each):
        if runs and first == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], last
        else:
            runs.append((first, last))
    return tuple(runs)


class StatedStep(Struct, array_like=True, frozen=True):
    """A step that ranks without an error have reached. `digest`: of their compared bytes; "" where these differ."""

    step: str
    digest: str
    runs: Runs


class StatedContent(Struct, array_like=True, frozen=True):
    """A content that ranks have brought. `base64`: the content."""

    base64: str
    runs: Runs


class LongContents(Struct, array_like=True, frozen=True):
    """Ranks that have put their own content into the store, each in a number of parts."""

    num_parts: int
    runs: Runs


class Blob(Struct, array_like=True, frozen=True):
    """The contents of the ranks of `runs`, which the rank `writer` has put into the store, in a number of parts."""

    writer: int
    num_parts: int
    runs: Runs


class TreeSummary(Struct, array_like=True, frozen=True):
    """What the ranks of a part of the tree state: those at a position and below it.

    Attributes:
        steps: the steps of the ranks without an error, that of the lowest rank first.
        reasons: the errors of failed ranks, at most `MOST_REASONS`.
        flags: the flags of all ranks, joined by a bitwise "or".
        contents, long_contents, blobs: the contents, in here or in keys of their own.
    """

    steps: tuple[StatedStep, ...] = ()
    reasons: tuple[Reason, ...] = ()
    flags: int = 0
    contents: tuple[StatedContent, ...] = ()
    long_contents: tuple[LongContents, ...] = ()
    blobs: tuple[Blob, ...] = ()

    @classmethod
    def of(cls, rank: int, statement: Statement) -> TreeSummary:
        """Return the summary of one rank."""
        here = ((rank, rank),)
        error = statement.error
        if error is not None:
            return cls(reasons=(Reason(rank, class_name(error), str(error)),), flags=statement.flags)
        digest = hashlib.blake2b(statement.compared, digest_size=16).hexdigest()
        content = base64.b64encode(statement.content).decode()
        return cls(
            steps=(StatedStep(statement.step, digest, here),),
            flags=statement.flags,
            contents=(StatedContent(content, here),) if content else (),
        )

    @classmethod
    def merged(cls, summaries: Sequence[TreeSummary]) -> TreeSummary:
        """Return one summary of several, which have no rank in common."""
        if len(summaries) == 1:
            return summaries[0]
        digests: dict[str, set[str]] = {}
        runs: dict[str, list[Runs]] = {}
        contents: dict[str, list[Runs]] = {}
        long_contents: dict[int, list[Runs]] = {}
        flags = 0
        for summary in summaries:
            flags |= summary.flags
            for stated in summary.steps:
                digests.setdefault(stated.step, set()).add(stated.digest)
                runs.setdefault(stated.step, []).append(stated.runs)
            for content in summary.contents:
                contents.setdefault(content.base64, []).append(content.runs)
            for own in summary.long_contents:
                long_contents.setdefault(own.num_parts, []).append(own.runs)
        steps = (
            StatedStep(step, next(iter(several)) if len(several) == 1 else "", joined(runs[step]))
            for step, several in digests.items()
        )
        return cls(
            steps=tuple(sorted(steps, key=lambda stated: stated.runs)),
            reasons=tuple(sorted(reason for summary in summaries for reason in summary.reasons))[:MOST_REASONS],
            flags=flags,
            contents=tuple(StatedContent(content, joined(several)) for content, several in contents.items()),
            long_contents=tuple(LongContents(number, joined(several)) for number, several in long_contents.items()),
            blobs=tuple(blob for summary in summaries for blob in summary.blobs),
        )

    @property
    def content_nbytes(self) -> int:
        """The bytes of the contents in here."""
        return sum(len(content.base64) for content in self.contents)

    def at_other_steps(self) -> list[Reason]:
        """Return the errors of the ranks that are at another step than the lowest rank that came without an error."""
        return [
            Reason(rank, RankError.__name__, at_another_step(stated.step, self.steps[0].runs[0][0], self.steps[0].step))
            for stated in self.steps[1:]
            for rank in ranks_in(stated.runs)
        ]

    @property
    def are_all_equal(self) -> bool:
        """Whether all ranks are at one step without an error, and their compared bytes are equal."""
        return not self.reasons and len(self.steps) == 1 and bool(self.steps[0].digest)


class WaitingPlace(Struct, array_like=True, frozen=True):
    """Where a rank waits for others: a meeting, the ranks of it, the step, and the error that the rank has brought to it.

    `is_alone`: as in `RankGroup`.
    """

    prefix: str
    number: int
    runs: Runs
    step: str
    reason: str
    is_alone: bool


class StoredVerdict(Struct, array_like=True, frozen=True):
    """A verdict in the form that is put into the store.

    Attributes:
        all_equal, reasons, missing, text, is_early, flags: as in `Verdict`.
        is_complete: all ranks had come when the verdict was made.
        contents, long_contents, blobs: the contents that ranks have brought, as in `TreeSummary`.
    """

    all_equal: bool = False
    is_complete: bool = False
    reasons: tuple[Reason, ...] = ()
    missing: tuple[int, ...] = ()
    text: str = ""
    is_early: bool = False
    flags: int = 0
    contents: tuple[StatedContent, ...] = ()
    long_contents: tuple[LongContents, ...] = ()
    blobs: tuple[Blob, ...] = ()

    @classmethod
    def of(cls, summary: TreeSummary) -> StoredVerdict:
        """Return the verdict of a meeting to which all ranks have come."""
        reasons = (*summary.reasons, *summary.at_other_steps())[:MOST_REASONS]
        return cls(
            all_equal=summary.are_all_equal,
            is_complete=True,
            reasons=tuple(sorted(reasons)),
            flags=summary.flags,
            contents=summary.contents,
            long_contents=summary.long_contents,
            blobs=summary.blobs,
        )
