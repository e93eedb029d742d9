"""When the ranks of a CheckpointManager agree. That costs all ranks time, so they do not do it at every step."""

from __future__ import annotations

import time

_SECONDS, _SECONDS_PER_RANK, _MOST_SECONDS = 1.0, 0.05, 10.0
_MOST_STEPS = 1_000_000


class MeetingInterval:
    """The number of steps to the next meeting of the ranks, which the lowest rank chooses by its clock and sends to the others.

    A meeting takes about half a millisecond for each rank, because all ranks talk to one rendezvous store. So they meet about
    once a second or, with more than 20 ranks, about every 50 ms for each rank, at most every 10 s: about 1 % of the time.
    """

    def __init__(self, num_ranks: int, fixed: int | None) -> None:
        self._goal = min(max(_SECONDS, _SECONDS_PER_RANK * num_ranks), _MOST_SECONDS)
        self._fixed = 1 if num_ranks == 1 else fixed
        self._num_steps = 1
        self._last: tuple[int, float] | None = None

    def steps_to_next(self, step: int) -> int:
        """Return how many steps after this one the ranks meet again.

        The number at most doubles, because steps differ in length.
        """
        if self._fixed is not None:
            return self._fixed
        now = time.monotonic()
        last, self._last = self._last, (step, now)
        if last is not None and step > last[0]:
            seconds_per_step = max((now - last[1]) / (step - last[0]), self._goal / _MOST_STEPS)
            self._num_steps = max(1, min(int(self._goal / seconds_per_step), 2 * self._num_steps))
        return self._num_steps
