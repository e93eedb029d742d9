"""All ranks agree, or all ranks raise the same error. No rank hangs: one that does not come is named.

The ranks meet by the `Control` of their world (`base.py`). What ranks tell each other is there when a meeting ends, so that
reading it waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from fsdp_optim import errors
from fsdp_optim.errors import FsdpOptimError, RankError, RankTimeoutError
from fsdp_optim.memory import Budget
from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.turns import Turn, refusal
from fsdp_optim.transport.verdict import Reason, Statement


def agree(group: RankGroup, step: str, error: Exception | None = None, *, fatal: bool = False) -> None:
    """Meet the other ranks at one step of a call, or tell them `error`. All ranks go on, or all raise.

    Called by all ranks of `group`, the same number of times on each.

    Args:
        step: what this rank has done. Ranks that are at different steps, or in different calls, all raise RankError.
        fatal: this rank's `error` broke the connection to another rank, which may never come: tell the others now.

    Raises:
        The error of the ranks that gave one, on all ranks alike: with its own class where that is one of this
        library's and all failed ranks agree on it, else RankError. The message names the ranks and their reasons.
        RankTimeoutError: a rank did not come within the timeout; the message names it.
    """
    tell(group, step, b"", error=error, fatal=fatal)


def compare(group: RankGroup, step: str, said: bytes, error: Exception | None = None) -> bool:
    """As `agree`; returns whether all ranks said the same, the same answer on all of them."""
    return tell(group, step, b"", said, error).alike


@dataclass(frozen=True)
class Told:
    """What ranks told in a meeting. To be read before this rank comes to the next one.

    `alike`: whether all ranks said the same.
    """

    alike: bool
    _content_of: Callable[[int], bytes]

    def by(self, rank: int) -> bytes:
        """What `rank` told: it is there already, so nobody waits for anybody."""
        return self._content_of(rank)


def tell(
    group: RankGroup,
    step: str,
    content: bytes,
    said: bytes = b"",
    error: Exception | None = None,
    *,
    fatal: bool = False,
) -> Told:
    """As `agree`, and every rank can read the `content` of every other afterwards. It need not be alike, nor need `said`."""
    error = error or group.turn.spoilt
    if len(group.ranks) == 1:
        if error is not None:
            raise error
        return Told(True, lambda rank: content)
    verdict = group.world.control.meet(group, Statement(f"{group.turn.call}: {step}", said, content, error, fatal))
    if group.rank in verdict.missing:
        raise _told(RankTimeoutError(f"rank {group.rank} came too late: {verdict.text}"))
    if verdict.missing:
        raise _told(RankError(verdict.text) if verdict.is_deadlock else RankTimeoutError(verdict.text))
    if verdict.reasons:
        common = _the_error(verdict.reasons, len(group.ranks))
        raise _told(common) from (None if type(error) is type(common) and str(error) == str(common) else error)
    return Told(verdict.alike, verdict.content_of)


def exchange(group: RankGroup, items: Iterable[Item], failure: Failure, budget: Budget) -> None:
    """Move every item. Called by all ranks of `group`; the ranks must agree afterwards whether all went well.

    Everything that needs memory is done first, and the ranks agree that all of them are ready: an error in `failure`, or one
    met here, is raised on all ranks before data moves. From then on nothing that one rank alone can see is raised: it is
    put into `failure`, and this rank goes on sending and receiving, so that its peers finish.

    Holds at most `budget`, which is the same on all ranks, beyond the items' own tensors.
    """
    send = group.world.transport.prepare(group, items, failure, budget)
    agree(group, "ready to move", failure.error)
    send(failure)


@contextmanager
def all_hear(group: RankGroup) -> Iterator[None]:
    """An exception on this rank, between two meetings, is told in the next one; the others come to it anyway."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, FsdpOptimError) or not error.on_all_ranks:
            agree(group, "failed", error)
        raise


@contextmanager
def in_turn(group: RankGroup) -> Iterator[None]:
    """A call in flight. Raises RankError at once where another one is, whose messages would mix with those of this one.

    The ranks of that other call hear of it too: some of them may take part in the one call, some in the other.
    """
    turn = group.turn
    if len(group.ranks) == 1:
        yield
        return
    other = group.world.turns.enter(turn)
    if other is not None:
        error = _told(refusal(turn, other, group.rank))
        _end(other, group, error)
        raise error
    try:
        yield
    finally:
        group.world.turns.leave(turn)


def _end(other: Turn, group: RankGroup, error: FsdpOptimError) -> None:
    """Tell the ranks of a call in flight that it is over: in its next meeting, or now, where its next is nobody knows when."""
    other.spoilt = other.spoilt or RankError(str(error))
    if not other.running.acquire(blocking=False):
        return
    try:
        if other.over is None:
            theirs = replace(group, ranks=other.ranks, process_group=other.process_group, turn=other)
            with suppress(FsdpOptimError):
                agree(theirs, "ended", other.spoilt, fatal=True)
            other.over = _told(RankError(str(error)))
    finally:
        other.running.release()


def _told(error: FsdpOptimError) -> FsdpOptimError:
    error.on_all_ranks = True
    return error


def _the_error(reasons: tuple[Reason, ...], num_ranks: int) -> FsdpOptimError:
    """One error that is the same on all ranks, from what each failed rank said."""
    names = {name for _, name, _ in reasons}
    known = getattr(errors, next(iter(names)), None) if len(names) == 1 else None
    ours = isinstance(known, type) and issubclass(known, FsdpOptimError)
    kind: type[FsdpOptimError] = known if ours and known is not None else RankError
    by_reason: dict[str, list[int]] = {}
    for rank, name, message in reasons:
        by_reason.setdefault(message if ours else f"{name}: {message}", []).append(rank)
    if ours and len(by_reason) == 1 and len(reasons) == num_ranks:
        return kind(next(iter(by_reason)))
    return kind(
        "\n".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {reason}"
            for reason, ranks in by_reason.items()
        )
    )
