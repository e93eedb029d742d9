"""What a rank comes with to a meeting, and how the meeting ends: the same for every `Control`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

Reason = tuple[int, str, str]
"""(rank, class of its error, message)"""


class Statement(NamedTuple):
    """What a rank comes with.

    Attributes:
        step: where it is in which call; this has to be the same on all ranks.
        said: what ranks compare: the verdict says whether it is the same on all of them.
        content: what every rank can read afterwards.
        error: what went wrong on this rank.
        fatal: the error broke the connection to another rank, which may never come: the others hear of it now.
    """

    step: str
    said: bytes = b""
    content: bytes = b""
    error: Exception | None = None
    fatal: bool = False


def _nothing(rank: int) -> bytes:
    return b""


@dataclass(frozen=True)
class Verdict:
    """How a meeting ended, the same on all ranks: all came, or ranks failed, or ranks were waited for in vain.

    Attributes:
        alike: all ranks came without an error, and said the same.
        reasons: the errors that ranks came with, sorted.
        missing: ranks that did not come; then `text` says so, and `text` is the whole error of those that came.
        is_deadlock: the missing ranks were found waiting for these ones elsewhere, long before the timeout.
        content_of: the content of a rank's statement, which can be read until this rank comes to its next meeting.
    """

    alike: bool = False
    reasons: tuple[Reason, ...] = ()
    missing: tuple[int, ...] = ()
    text: str = ""
    is_deadlock: bool = False
    content_of: Callable[[int], bytes] = _nothing


def at_another_step(step: str, rank: int, other: str) -> str:
    """What a rank says that comes to a meeting at another step than the first one."""
    return (
        f"at {step!r}, where rank {rank} is at {other!r}: every rank has to make the same calls in the same order, one after "
        "the other"
    )


def absence(step: str, ranks: tuple[int, ...], missing: tuple[int, ...], seconds: float) -> str:
    """Who did not come, in the same words while they are waited for and when they are given up."""
    names = ", ".join(f"rank {rank}" for rank in missing) or "a rank"
    return (
        f"{step}: {names} did not arrive within {seconds:g} s; {len(ranks) - len(missing)} of the ranks {list(ranks)} did. Every "
        "one of these ranks has to make this call: look there for an error or a branch that skips it, or give a longer timeout="
    )


class Waiting(NamedTuple):
    """A rank that waits for others: which ranks it waits for, at which step, and the error that it came with."""

    rank: int
    ranks: tuple[int, ...]
    step: str
    reason: str = ""


def deadlock(one: Waiting, other: Waiting) -> str:
    """What two ranks raise that wait for each other in two meetings."""
    text = "; ".join(
        f"rank {rank} is at {step!r} with the ranks {list(ranks)}" + (f" ({reason})" if reason else "")
        for rank, ranks, step, reason in sorted((one, other))
    )
    return f"{text}: they wait for each other; every rank has to make the same call, with the same process_group="


def reason_of(error: Exception | None) -> str:
    """The error that a rank came with, for the others to read."""
    return f"{type(error).__name__}: {error}" if error is not None else ""
