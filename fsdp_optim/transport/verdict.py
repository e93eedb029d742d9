"""The statement that a rank brings to a meeting, and the verdict of the meeting: the same for every `Control`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from fsdp_optim.errors import only_differing, shortened

_MOST_NAMED = 64  # ranks that an error names


class Reason(NamedTuple):
    """The error of one rank. `name`: the name of its class."""

    rank: int
    name: str
    message: str


class Statement(NamedTuple):
    """The statement of one rank in a meeting.

    Attributes:
        step: the call and the step that the rank has reached; it must be equal on all ranks.
        compared: bytes that the ranks compare: the verdict tells whether they are equal on all ranks.
        content: bytes that every rank can read afterwards.
        error: the error of this rank.
        fatal: the error broke the connection to another rank, which may never come, so the meeting ends at once.
        flags: bits, which the verdict has joined by a bitwise "or" over all ranks.
    """

    step: str
    compared: bytes = b""
    content: bytes = b""
    error: BaseException | None = None
    fatal: bool = False
    flags: int = 0


def _nothing(rank: int) -> bytes:
    return b""


class Verdict(Struct, frozen=True):
    """The result of a meeting, equal on all ranks: all ranks came, or some ranks failed, or some ranks did not come.

    Attributes:
        all_equal: all ranks came without an error, and their `compared` bytes are equal.
        reasons: the errors of the failed ranks, sorted.
        missing: the ranks that did not come.
        text: the error message about the missing ranks, which the ranks that came raise.
        is_early: the verdict came before the timeout, because the missing ranks cannot come: they wait in another meeting, or
            are lost.
        content_of: the content of a rank's statement, which can be read until this rank comes to its next meeting.
        flags: the flags of all ranks, joined by a bitwise "or".
        interrupt: an interrupt of this rank alone, which came too late for the others to learn of it in this meeting.
    """

    all_equal: bool = False
    reasons: tuple[Reason, ...] = ()
    missing: tuple[int, ...] = ()
    text: str = ""
    is_early: bool = False
    content_of: Callable[[int], bytes] = _nothing
    interrupt: BaseException | None = None
    flags: int = 0


def at_another_step(step: str, rank: int, other: str) -> str:
    """Return the error message of a rank that comes to a meeting at another step than the first rank."""
    step, other = only_differing([step, other])
    return (
        f"at {step!r}, where rank {rank} is at {other!r}: every rank must make the same calls in the same order, one after "
        "the other"
    )


def absence(step: str, ranks: tuple[int, ...], missing: tuple[int, ...], seconds: float) -> str:
    """Return the message about missing ranks, in the same words as a warning and as an error."""
    names = shortened([f"rank {rank}" for rank in missing], _MOST_NAMED) or "a rank"
    return (
        f"{step}: {names} did not arrive within {seconds:g} s; {len(ranks) - len(missing)} of the ranks "
        f"[{shortened(ranks, _MOST_NAMED)}] did. Every one of these ranks must make this call: look there for an error or a "
        "branch that skips it, or give a longer timeout="
    )


def loss(step: str, lost: str) -> str:
    """Return the message about ranks that are lost. `lost`: these ranks as `lost_ranks` names them."""
    return f"{step}: {lost}. The other ranks cannot continue: look at the logs of the lost ones"


class Waiting(NamedTuple):
    """A rank that waits for others: the ranks of the meeting, the step, and the error that the rank brought as text."""

    rank: int
    ranks: tuple[int, ...]
    step: str
    reason: str = ""


def deadlock(first: Waiting, second: Waiting) -> str:
    """Return the error message of two ranks that wait for each other in two meetings."""
    text = "; ".join(
        f"rank {rank} is at {step!r} with the ranks [{shortened(ranks, _MOST_NAMED)}]"
        + (f" ({reason})" if reason else "")
        for rank, ranks, step, reason in sorted((first, second))
    )
    return f"{text}: they wait for each other; every rank must make the same call, with the same process_group="


def reason_of(error: BaseException | None) -> str:
    """Return the error of a rank as text, for the other ranks."""
    return f"{type(error).__name__}: {error}" if error is not None else ""
