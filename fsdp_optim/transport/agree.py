"""All ranks agree, or all ranks raise the same error. No rank hangs: the error names the ranks that did not come.

The ranks meet through the `Control` of their world (`base.py`). The contents that the ranks bring to a meeting are available
when the meeting ends, so no rank waits to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from msgspec import Struct

from fsdp_optim import errors
from fsdp_optim.errors import FsdpOptimError, RankError, RankTimeoutError, StoreLostError
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.transport.base import Item, RankGroup
from fsdp_optim.transport.failure import INTERRUPTS, RANK_ERRORS, Failure, is_interrupt
from fsdp_optim.transport.turns import Turn, refusal
from fsdp_optim.transport.verdict import Reason, Statement

_LENGTH = 8  # bytes of a report's length


def agree(group: RankGroup, step: str, error: BaseException | None = None, *, fatal: bool = False) -> None:
    """Meet the other ranks at one step of a call, or report `error` to them. All ranks continue, or all ranks raise.

    Called by all ranks of `group`, the same number of times on each rank.

    Args:
        step: the step that this rank has reached. Ranks that meet at different steps, or in different calls, raise RankError.
        fatal: this rank's `error` broke the connection to another rank, which may never come, so the others must not wait.

    Raises:
        The error that ranks have brought, the same on all ranks. Where the errors of the failed ranks have one class of this
        library, it has that class too, else RankError. The message names the failed ranks and their reasons.
        KeyboardInterrupt, SystemExit: `error` is an interrupt, on this rank only; the others raise RankError.
        RankTimeoutError: some ranks did not come within the timeout; the message names these ranks.
    """
    all_gather_bytes(group, step, b"", error=error, fatal=fatal)


def all_equal(group: RankGroup, step: str, compared: bytes, error: BaseException | None = None) -> bool:
    """Agree as `agree` does, and return whether `compared` is equal on all ranks: the same answer on each."""
    return all_gather_bytes(group, step, b"", compared, error).all_equal


class MeetingResult(Struct, frozen=True):
    """The contents that ranks brought to a meeting. Read them before this rank comes to its next meeting.

    `all_equal`: whether `compared` was equal on all ranks. `flags`: those of all ranks, joined by a bitwise "or".
    """

    all_equal: bool
    _content_of: Callable[[int], bytes]
    flags: int = 0

    def content_of(self, rank: int) -> bytes:
        """Return the content of `rank`, which is available without waiting."""
        return self._content_of(rank)


def all_gather_bytes(
    group: RankGroup,
    step: str,
    content: bytes,
    compared: bytes = b"",
    error: BaseException | None = None,
    *,
    fatal: bool = False,
    flags: int = 0,
) -> MeetingResult:
    """Agree as `agree` does; afterwards every rank can read the `content` of every other rank.

    `content`, `compared` and `flags` may differ between ranks. What ranks must know of all others as a few bits is best told by
    `flags`: these cost as much for many ranks as for two, and all contents that each rank reads cost as much as there are ranks.
    """
    error = error or group.turn.conflict
    if len(group.ranks) == 1:
        if error is not None:
            raise error
        return MeetingResult(True, lambda rank: content, flags)
    statement = Statement(f"{group.turn.call}: {step}", compared, content, error, fatal, flags)
    try:
        verdict = group.world.control.meet(group, statement)
    except StoreLostError as lost:  # there is no way to tell the others
        raise _on_all_ranks(StoreLostError(f"rank {group.rank}: {group.turn.call}: {lost}")) from lost
    has_failed = bool(verdict.missing or verdict.reasons)
    group.turn.num_met += not has_failed
    interrupt = error if is_interrupt(error) else verdict.interrupt
    if interrupt is not None:  # after a failed meeting no other rank waits for this rank
        interrupt.on_all_ranks = has_failed  # type: ignore[attr-defined]
        raise interrupt
    if verdict.missing and verdict.is_early:  # the ranks that come afterwards are not late, and raise the same error
        raise _on_all_ranks(RankError(verdict.text))
    if verdict.missing:
        late = f"rank {group.rank} came too late: " if group.rank in verdict.missing else ""
        raise _on_all_ranks(RankTimeoutError(late + verdict.text))
    if verdict.reasons:
        common = _common_error(verdict.reasons, len(group.ranks))
        says_the_same = type(error) is type(common) and str(error) == str(common)
        if error is not None and says_the_same:
            # What has caused it says whether a file is damaged, or cannot be read just now.
            common.__context__ = error.__cause__ or error.__context__
        raise _on_all_ranks(common) from (None if says_the_same else error)
    group.turn.has_met = True
    return MeetingResult(verdict.all_equal, verdict.content_of, verdict.flags)


def exchange(group: RankGroup, items: Iterable[Item], failure: Failure, budget: Budget) -> None:
    """Move every item. Called by all ranks of `group`; the ranks must agree afterwards whether all of them succeeded.

    First every rank allocates its memory, and the ranks agree that all of them are ready: an error in `failure`, or an error
    of the preparation, is raised on all ranks before data moves. After that an error of this rank alone is not raised but
    noted in `failure`, and this rank continues to send and receive, so that its peers finish.

    Holds at most `budget`, which is equal on all ranks, beyond the items' own tensors.
    """
    send = group.world.transport.prepare(group, items, failure, budget)
    # The ranks agree before the first message, because a peer of a rank that cannot send would wait until the timeout.
    num_met = group.turn.num_met
    try:
        agree(group, "ready to move", failure.error)
    except INTERRUPTS as interrupt:
        if group.turn.num_met == num_met:
            raise
        failure.note(interrupt)  # the others are about to wait for this rank's messages
    send(failure)


@contextmanager
def all_hear(group: RankGroup) -> Iterator[None]:
    """Report an exception that this rank raises between two meetings: all other ranks learn of it in their next meeting.

    A rank with an interrupt does not wait for them: it must end, and the others may have made this call to its end.
    """
    try:
        yield
    except RANK_ERRORS as error:
        if not getattr(error, "on_all_ranks", False):
            agree(group, "failed", error, fatal=is_interrupt(error))
        raise


@contextmanager
def in_turn(group: RankGroup) -> Iterator[None]:
    """Mark a call as in flight. Raises RankError at once where another call is in flight whose messages would mix with it.

    The ranks of the other call raise the error too: some of them may take part in the first call, some in the second.
    """
    turn = group.turn
    if len(group.ranks) == 1:
        yield
        return
    other = group.world.turns.enter(turn)
    if other is not None:
        error = _on_all_ranks(refusal(turn, other, group.rank))
        _end(other, group, error)
        raise error
    try:
        with group.world.pulse.beating():
            yield
    finally:
        try:
            group.world.turns.leave(turn)
        except INTERRUPTS:  # a call that seemed to be in flight would refuse all later calls
            group.world.turns.leave(turn)
            raise


def _end(other: Turn, group: RankGroup, error: FsdpOptimError) -> None:
    """End a call in flight on all its ranks: in the call's next meeting, or at once where the call is suspended."""
    other.conflict = other.conflict or RankError(str(error))
    if not other.running.acquire(blocking=False):
        return
    try:
        if other.ended_by is None:
            others_group = replace(group, ranks=other.ranks, process_group=other.process_group, turn=other)
            with suppress(FsdpOptimError):
                agree(others_group, "ended", other.conflict, fatal=True)
            other.ended_by = _on_all_ranks(RankError(str(error)))
    finally:
        other.running.release()


def _on_all_ranks(error: FsdpOptimError) -> FsdpOptimError:
    error.on_all_ranks = True
    return error


def _common_error(reasons: tuple[Reason, ...], num_ranks: int) -> FsdpOptimError:
    """Return one error, equal on all ranks, made of the reasons of the failed ranks."""
    names = {name for _, name, _ in reasons}
    known = getattr(errors, next(iter(names)), None) if len(names) == 1 else None
    is_own_class = isinstance(known, type) and issubclass(known, FsdpOptimError)
    cls: type[FsdpOptimError] = known if is_own_class and known is not None else RankError
    by_reason: dict[str, list[int]] = {}
    for rank, name, message in reasons:
        by_reason.setdefault(message if is_own_class else f"{name}: {message}".rstrip(": "), []).append(rank)
    if is_own_class and len(by_reason) == 1 and len(reasons) == num_ranks:
        return cls(next(iter(by_reason)))
    return cls(
        "\n".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {reason}"
            for reason, ranks in by_reason.items()
        )
    )


def exchange_reports(group: RankGroup, content: bytes, error: BaseException | None = None) -> list[bytes]:
    """Return the reports of all ranks, in the order of `group.ranks`. An `error` of any rank is raised on all ranks.

    The lowest rank joins the reports, so the bytes that are read grow with the number of ranks, not with its square.
    """
    result = all_gather_bytes(group, "report", content, error=error)
    joined, failure = b"", Failure()
    if group.rank == group.ranks[0]:
        with failure:
            joined = _join([result.content_of(rank) for rank in group.ranks])
    return _split(all_gather_bytes(group, "all reports", joined, error=failure.error).content_of(group.ranks[0]))


def _join(reports: list[bytes]) -> bytes:
    return b"".join(len(report).to_bytes(_LENGTH, "big") + report for report in reports)


def _split(joined: bytes) -> list[bytes]:
    reports, at = [], 0
    while at < len(joined):
        length = int.from_bytes(joined[at : at + _LENGTH], "big")
        reports.append(joined[at + _LENGTH : at + _LENGTH + length])
        at += _LENGTH + length
    return reports
