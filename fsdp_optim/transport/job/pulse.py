"""Signs of life: while a rank makes a call, or saves in the background, it beats in the rendezvous store; others look.

A rank that no longer beats was killed or stopped, or is on a host that is lost or cut off. A process of the same machine is seen
to be gone at once. A rank that is in no call does not beat, and is never taken for lost.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from fsdp_optim.errors import StoreLostError, shortened
from fsdp_optim.machine import identity_of_process, is_gone
from fsdp_optim.transport.job.job_store import JobStore
from fsdp_optim.transport.job.leaving import pulse_key

LOST_AFTER = 20.0
"""Seconds without a beat, as a rank that looks has seen them, after which a rank counts as lost."""

_LAST_MOMENT = 3.0  # seconds for a beat that is under way when the interpreter ends
_BEAT_EVERY = 1.0  # seconds; a shorter call needs no beat
_RANKS_PER_SECOND = 1000  # ranks that beat within a second; in a larger job each rank beats less often
_MOST_SEEN = 2.0  # seconds between two looks that count: a rank that was stopped itself has not looked meanwhile


class Pulse:
    """The beats of this rank. `num_ranks`: of the job, for the time between beats."""

    def __init__(self, store: JobStore, rank: int, num_ranks: int) -> None:
        self.store = store
        self._key = pulse_key(rank)
        self._every = max(_BEAT_EVERY, num_ranks / _RANKS_PER_SECOND)
        self._changed = threading.Condition()
        self._num_holders = self._number = 0
        self._thread: threading.Thread | None = None
        self._is_introduced = self._is_over = False
        self._at_exit: weakref.finalize[..., JobStore] | None = None

    def introduce(self) -> None:
        """Publish once which process this rank is. Called before the rank's first meeting. Raises StoreLostError."""
        if not self._is_introduced:
            self._beat()
            self._is_introduced = True

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Beat while the context is open. Several contexts may be open, in any threads."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def hold(self) -> None:
        """Begin to beat, until `let_go` was called as often."""
        with self._changed:
            self._num_holders += 1
            if self._thread is None and not self._is_over:
                if self._at_exit is None:
                    self._at_exit = weakref.finalize(self.store, _stop, weakref.ref(self))
                self._thread = threading.Thread(target=self._run, name="fsdp_optim: pulse", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop beating: the interpreter is about to end, and a thread that it ends inside a call of torch would abort it."""
        with self._changed:
            self._is_over, thread = True, self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(_LAST_MOMENT)

    def let_go(self) -> None:
        """Undo one `hold`."""
        with self._changed:
            self._num_holders -= 1
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_holders or self._is_over, self._every)
                if not self._num_holders:  # short calls that follow each other do not each start a thread
                    self._changed.wait_for(lambda: self._num_holders or self._is_over, self._every / 4)
                if not self._num_holders or self._is_over:
                    self._thread = None
                    return
            with contextlib.suppress(StoreLostError):  # ranks that look notice it; the next beat may come through
                self._beat()

    def _beat(self) -> None:
        self._number += 1
        self.store.set(self._key, f"{self._number} {identity_of_process()}")


def _stop(pulse: weakref.ref[Pulse]) -> None:
    """Stop a pulse at the end of the interpreter, if it is still there."""
    alive = pulse()
    if alive is not None:
        alive.stop()


class Watch:
    """Looks at the signs of life of other ranks.

    Args:
        ranks: the ranks to look at.
        beats: whether all of them are in a call, and so must beat. False: only processes that have ended count as lost.
    """

    def __init__(self, store: JobStore, ranks: Sequence[int], *, beats: bool) -> None:
        self._store, self._ranks, self._beats = store, list(ranks), beats
        self._last: dict[int, bytes] = {}
        self._silent: dict[int, float] = {}
        self._looked_at = time.monotonic()

    def look(self) -> dict[int, str]:
        """Return the ranks that are lost, each with how that shows. Called again and again. Raises StoreLostError."""
        now = time.monotonic()
        seen, self._looked_at = min(now - self._looked_at, _MOST_SEEN), now
        values = self._values()
        for rank, value in values.items():
            is_same = self._last.get(rank) == value
            self._silent[rank] = self._silent.get(rank, 0.0) + seen if is_same else 0.0
            self._last[rank] = value
        is_silent = self._beats and any(self._silent[rank] >= LOST_AFTER for rank in values)
        limit = LOST_AFTER - _MOST_SEEN if is_silent else math.inf  # ranks of one host do not fall silent at once
        lost = {}
        for rank, value in values.items():
            if is_gone(value.decode().partition(" ")[2]):
                lost[rank] = "its process has ended"
            elif self._silent[rank] >= limit:
                lost[rank] = (
                    f"no sign of life for {LOST_AFTER:g} s: its host is lost or cut off, or the process is stopped"
                )
        return lost

    def _values(self) -> dict[int, bytes]:
        """Return the last beats of the ranks, without the ranks that have never introduced themselves."""
        ranks = self._ranks
        if len(ranks) == 1:
            value = self._store.read(pulse_key(ranks[0]))
            return {} if value is None else {ranks[0]: value}
        if not self._store.check([pulse_key(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if self._store.check([pulse_key(rank)])]
        return (
            dict(zip(ranks, self._store.multi_get([pulse_key(rank) for rank in ranks]), strict=True)) if ranks else {}
        )


def lost_ranks(lost: dict[int, str]) -> str:
    """Return lost ranks as text: `rank 2: its process has ended; ranks 4, 5: ...`."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(lost.items()):
        by_reason.setdefault(reason, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {shortened(ranks, 64)}: {reason}" for reason, ranks in by_reason.items()
    )
