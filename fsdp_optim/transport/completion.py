"""How ranks that save in the background learn how the save ends: through the rendezvous store, without a collective call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_optim.errors import CheckpointError, RankTimeoutError, StoreLostError
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.job.pulse import Watch, lost_ranks
from fsdp_optim.wire import decode, encode

_PART_NBYTES = 4 << 20  # bytes of a report in one value of the store
_TOGETHER = 64  # values that are read at once
_MOST_REASONS = 64  # failed ranks that an error names
_LOOK_EVERY, _PER_RANK = 0.02, 0.0001  # seconds between looks; more with many ranks, which ask one store
_LOOK_FOR_LIFE_EVERY, _LOOK_FOR_LIFE_AT_LEAST = 0.5, 2.0  # seconds; less often with many ranks,
_LOOKS_PER_SECOND = 2000  # of all of them together
_GRACE = 10.0  # seconds in which the other ranks can read the outcome
_FAILED = 1 << 20  # one number counts both the ranks that are done and the ranks that have failed
_COMMITTING, _SAVED, _NOT_SAVED = "committing", "saved", "not saved: "
_HAS_KEYS = "+"
_UNTOLD = "its save ended without a word: look at the log of that rank"


class _Failed(NamedTuple):
    rank: int
    why: str


@dataclass(eq=False)
class Completion:
    """The part of one rank in the end of a background save. The lowest rank leads.

    completion = Completion.join(group, name, what)   # every rank, at the same point of a call, before its last meeting
    completion.done(report)                           # or completion.failed(why)
    reports = completion.wait_for_all()               # the leader; then it writes what is left
    completion.commit()                               # the leader, before the checkpoint gets its name
    completion.saved()                                # the leader; or completion.not_saved(why)
    completion.wait_for_end()                         # the others
    completion.close()

    Any thread may make the calls, one at a time. While it is open, this rank beats (`Pulse`). When all ranks but the dead have
    read the outcome, nothing is left in the store. Every method raises StoreLostError where the store of the job is gone.

    Attributes:
        name: a string that no other save of the job has, the same on all ranks.
        what: the save, for errors.
    """

    group: RankGroup
    name: str
    what: str
    _watch: Watch | None = field(default=None, repr=False)
    _look_for_life_at: float = field(default=0.0, repr=False)
    _is_open: bool = field(default=True, repr=False)
    _has_reported: bool = field(default=False, repr=False)
    _has_ended: bool = field(default=False, repr=False)
    _own_keys: list[str] = field(default_factory=list, repr=False)
    _reports: list[bytes] = field(default_factory=list, repr=False)

    @classmethod
    def join(cls, group: RankGroup, name: str, what: str) -> Completion:
        """Begin to take part."""
        completion = cls(group, name, what)
        if not completion._is_alone:
            group.world.pulse.introduce()
            group.world.pulse.hold()
        return completion

    @property
    def _is_alone(self) -> bool:
        return len(self.group.ranks) == 1

    @property
    def _leads(self) -> bool:
        return self.group.rank == self.group.ranks[0]

    @property
    def _leader(self) -> int:
        return self.group.ranks[0]

    def _key(self, name: str) -> str:
        return f"saves/{self.name}/{name}"

    def _report_key(self, rank: int, part: int) -> str:
        return self._key(f"report/{rank}/{part}")

    def done(self, report: bytes) -> None:
        """Announce that this rank has written its part. The leader gets the report."""
        if self._is_alone:
            self._reports = [report]
            self._has_reported = True
            return
        store, rank, num_parts = self.group.world.board, self.group.rank, -(-len(report) // _PART_NBYTES)
        for part in range(num_parts):
            self._own_keys.append(self._report_key(rank, part))
            store.set(self._own_keys[-1], report[part * _PART_NBYTES : (part + 1) * _PART_NBYTES])
        self._own_keys.append(self._key(f"parts/{rank}"))
        store.set(self._own_keys[-1], str(num_parts))
        store.add(self._key("ended"), 1)
        self._has_reported = True

    def failed(self, why: str) -> None:
        """Announce that this rank cannot write its part. Raises nothing."""
        self._has_reported = True
        if self._is_alone:
            return
        with contextlib.suppress(StoreLostError):  # the other ranks notice the lost store too
            store = self.group.world.board
            index = store.add(self._key("failures"), 1)
            if index <= _MOST_REASONS:
                store.set(self._key(f"failure/{index}"), encode(_Failed(self.group.rank, why)))
            store.add(self._key("ended"), _FAILED)

    def wait_for_all(self) -> list[bytes]:
        """Wait for all ranks, on the leader; return their reports in the order of the ranks.

        Raises CheckpointError with the reasons of the failed ranks, or with the lost ranks; RankTimeoutError with a rank that
        announced nothing in time.
        """
        if self._is_alone:
            return self._reports
        store, ranks = self.group.world.board, self.group.ranks

        def look() -> list[bytes] | None:
            ended = store.add(self._key("ended"), 0)
            if text := (store.read(self._key("outcome")) or b"").decode():
                raise CheckpointError(text.removeprefix(_NOT_SAVED))  # the others have given this rank up
            if ended >= _FAILED:
                raise CheckpointError(self._failures())
            if ended == len(ranks):
                try:
                    return self._read_reports()
                except StoreLostError:  # the reports are gone, if the others have just given this rank up
                    if not store.check([self._key("outcome")]):
                        raise
                    return None
            # A lost rank counts only if no rank has reported since `ended` was read: a report may have come after the last beat.
            lost = {rank: how for rank, how in self._lost(ranks[1:]).items() if not self._is_done(rank)}
            if lost and store.add(self._key("ended"), 0) == ended:
                raise CheckpointError(f"{self.what}: lost before their parts were written: {lost_ranks(lost)}")
            return None

        def late() -> str:
            rank = next(rank for rank in ranks if not self._is_done(rank))
            return f"{self.what}: rank {rank} did not finish its part within {self.group.timeout:g} s"

        return self._poll(look, late, self.group.timeout)

    def commit(self) -> None:
        """Decide that the save ends well, on the leader, before it gives the checkpoint its name.

        Raises CheckpointError where the other ranks have given this rank up: it was stopped, or cut off, for too long.
        """
        if self._is_alone:
            return
        # compare_set makes one decision of two: the leader commits, or the others have given it up, never both.
        outcome = self.group.world.board.compare_set(self._key("outcome"), "", _COMMITTING).decode()
        if outcome != _COMMITTING:
            raise CheckpointError(outcome.removeprefix(_NOT_SAVED))

    def saved(self) -> None:
        """Announce that the checkpoint is there; return when the others know it, or after some seconds. Raises nothing."""
        with contextlib.suppress(StoreLostError):  # the checkpoint is there
            self._announce(_SAVED)

    def not_saved(self, why: str) -> bool:
        """Announce that the save has failed; return when the others know it, or after some seconds. Raises nothing.

        Returns whether all of them know it or have ended, so that none of them writes any more.
        """
        with contextlib.suppress(StoreLostError):
            return self._announce(f"{_NOT_SAVED}{why}")
        return False

    def _announce(self, outcome: str) -> bool:
        self._has_ended = True
        if self._is_alone:
            return True
        store, others = self.group.world.board, set(self.group.ranks[1:])
        store.set(self._key("outcome"), outcome)
        deadline, dead, silent = time.monotonic() + _GRACE, set[int](), set[int]()
        while (waits_for := others - self._left().keys() - dead - silent) and time.monotonic() < deadline:
            lost = self._lost(self.group.ranks[1:])
            dead |= {rank for rank, how in lost.items() if how.endswith("ended")}
            silent |= set(lost)  # waiting for these ranks is useless, though they may come back
            if waits_for - silent:
                time.sleep(self._pause)
        if others - self._left().keys() - dead:  # a rank that is cut off may still come back and read the outcome
            store.set(self._key("late"), "")
        all_know = not others - self._left().keys() - dead
        self._forget(dead, with_outcome=all_know)
        return all_know

    def wait_for_end(self) -> None:
        """Return when the checkpoint is there, on a rank that does not lead.

        Raises CheckpointError when the save has failed, or the leader is lost; RankTimeoutError if it does not end in time.
        """
        store = self.group.world.board

        def look() -> bool | None:
            text = (store.read(self._key("outcome")) or b"").decode()
            if text not in ("", _COMMITTING):
                return self._read_outcome(text)
            lost = self._lost((self._leader,))
            if lost:
                why = f"{self.what}: {lost_ranks(lost)}; that rank finishes the checkpoint: look at its log"
                outcome = store.compare_set(self._key("outcome"), "", f"{_NOT_SAVED}{why}").decode()
                if outcome == _COMMITTING:
                    raise CheckpointError(f"{why}. It may have finished it: fsdp_optim.latest shows that")
                return self._read_outcome(outcome)
            return None

        def late() -> str:
            return f"{self.what}: rank {self._leader} did not finish the checkpoint within {self.group.timeout:g} s"

        self._poll(look, late, 2 * self.group.timeout + _GRACE)  # the leader gives up first

    def _read_outcome(self, text: str) -> bool:
        self._has_ended = True
        for key in self._own_keys:
            self.group.world.board.delete_key(key)
        self._own_keys = []
        self._leave()
        if text.startswith(_NOT_SAVED):
            raise CheckpointError(text.removeprefix(_NOT_SAVED))
        return True

    def close(self) -> None:
        """Stop beating. A rank that has announced nothing yet fails the save. Raises nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._is_alone:
            return
        with contextlib.suppress(StoreLostError):
            if not self._has_reported and not self._has_ended:
                self.failed(f"{self.what}: {_UNTOLD}")
            if not self._has_ended:
                self._has_ended = True
                self._leave()
        self.group.world.pulse.let_go()

    def _leave(self) -> None:
        """Note that this rank no longer uses this save. The last rank deletes the remaining keys, if the leader has gone."""
        store = self.group.world.board
        if self._leads:
            why = f"{_NOT_SAVED}{self.what}: rank {self._leader}: {_UNTOLD}"
            store.compare_set(self._key("outcome"), "", why)
            store.set(self._key("late"), "")
        else:
            store.append(self._key("left"), f"{self.group.rank}{_HAS_KEYS if self._own_keys else ''},")
        # Only where the leader has gone each rank reads who has left, which takes as many bytes as there are ranks.
        if store.read(self._key("late")) is not None and set(self.group.ranks[1:]) <= self._left().keys():
            self._forget(set(), with_outcome=True)

    def _left(self) -> dict[int, bool]:
        """Return the ranks that no longer use this save; True: their reports are still there."""
        words = (self.group.world.board.read(self._key("left")) or b"").decode().split(",")
        return {int(word.removesuffix(_HAS_KEYS)): word.endswith(_HAS_KEYS) for word in words if word}

    # -------------------------------------------------------------------------------------------- inside

    @property
    def _pause(self) -> float:
        return max(_LOOK_EVERY, _PER_RANK * len(self.group.ranks))

    def _poll(
        self, look: Callable[[], list[bytes] | bool | None], late: Callable[[], str], seconds: float
    ) -> list[bytes]:
        """Return the first result of `look` that is not None. Raises RankTimeoutError with `late` after some seconds."""
        deadline = time.monotonic() + seconds
        while True:
            result = look()
            if result is not None:
                return result if isinstance(result, list) else []
            if time.monotonic() > deadline:
                raise RankTimeoutError(late())
            time.sleep(self._pause)

    def _lost(self, ranks: tuple[int, ...]) -> dict[int, str]:
        """Return which of these ranks are lost, twice a second or less often; nothing in between."""
        if time.monotonic() < self._look_for_life_at or not ranks:
            return {}
        if self._watch is None:
            self._watch = Watch(self.group.world.board, ranks, beats=True)
        pause = max(_LOOK_FOR_LIFE_EVERY, len(self.group.ranks) / _LOOKS_PER_SECOND)
        self._look_for_life_at = time.monotonic() + min(pause, _LOOK_FOR_LIFE_AT_LEAST)
        return self._watch.look()

    def _is_done(self, rank: int) -> bool:
        return self.group.world.board.check([self._key(f"parts/{rank}")])

    def _failures(self) -> str:
        store = self.group.world.board
        number = min(store.add(self._key("failures"), 0), _MOST_REASONS)
        written = (store.read(self._key(f"failure/{index + 1}")) for index in range(number))
        reasons = sorted(decode(_Failed, text) for text in written if text is not None)
        missing = number - len(reasons)  # ranks that died before they had written their reason
        lines = [f"rank {rank}: {why}" for rank, why in reasons]
        return "\n".join([*lines, *(["a rank failed, and could not say why: look at the logs"] * bool(missing))])

    def _read_reports(self) -> list[bytes]:
        ranks = self.group.ranks
        nums = [int(num) for num in self._many([self._key(f"parts/{rank}") for rank in ranks])]
        keys = [self._report_key(rank, part) for rank, num in zip(ranks, nums, strict=True) for part in range(num)]
        parts = iter(self._many(keys))
        return [b"".join(next(parts) for _ in range(num)) for num in nums]

    def _many(self, keys: list[str]) -> list[bytes]:
        store = self.group.world.board
        batches = (keys[first : first + _TOGETHER] for first in range(0, len(keys), _TOGETHER))
        return [value for batch in batches for value in store.multi_get(batch)]

    def _forget(self, dead: set[int], *, with_outcome: bool) -> None:
        """Delete the keys of this save. `with_outcome`: no rank will read the outcome any more. `dead`: ranks that have ended."""
        store = self.group.world.board
        num_failures = min(store.add(self._key("failures"), 0), _MOST_REASONS)
        names = ["ended", "failures", *(f"failure/{index + 1}" for index in range(num_failures))]
        left = self._left()
        for rank in sorted(
            {rank for rank, has_keys in left.items() if has_keys} | (dead - left.keys()) | {self._leader}
        ):
            num_parts = int(store.read(self._key(f"parts/{rank}")) or 0)
            names += [f"parts/{rank}", *(f"report/{rank}/{part}" for part in range(num_parts))]
        names += ["left", "late", "outcome"] if with_outcome else []
        for name in names:
            store.delete_key(self._key(name))
