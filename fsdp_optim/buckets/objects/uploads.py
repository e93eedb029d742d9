"""Parts on their way to a bucket: several at the same time, in bounded memory."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from fsdp_optim.buckets.objects.base import Bucket

_MOST_AT_ONCE = 16


@dataclass
class Uploads:
    """The uploads of one process.

    `budget_nbytes`: of parts that are filled, wait or are sent; one is held in any case. `only_if`: the condition for whole
    objects.
    """

    bucket: Bucket
    budget_nbytes: int
    only_if: str | None = None
    _held: int = 0  # bytes
    _num_sent: int = 0  # parts that wait or are sent
    _freed: threading.Condition = field(default_factory=threading.Condition)
    _futures: list[Future[str]] = field(default_factory=list)
    _pool: ThreadPoolExecutor | None = None

    def reserve(self, upload: str, nbytes: int) -> None:
        """Wait until the budget has room for a part that is about to be filled. Raises an earlier failure.

        Parts that are filled leave only when they are full, so that nobody waits for them. `upload` empty: as `put_part`.
        """
        with self._freed:
            while self._num_sent and self._held + _held_of(upload, nbytes) > self.budget_nbytes:
                self._freed.wait()
            self._held += _held_of(upload, nbytes)
        self._raise_failure()

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> Future[str]:
        """Send a part for which there is room in the background; its result is the receipt. Raises an earlier failure.

        `upload` empty: the part is a whole object.
        """
        self._raise_failure()
        if self._pool is None:
            threads = _MOST_AT_ONCE if self.bucket.can.parts_by_many else 1  # else parts must come in order
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fsdp_optim: upload")
        with self._freed:
            self._num_sent += 1
        future = self._pool.submit(self._send, key, upload, number, [data])
        self._futures.append(future)
        return future

    def _send(self, key: str, upload: str, number: int, only: list[memoryview]) -> str:
        """`only` holds the part alone: its memory is free before its share of the budget is."""
        data = only.pop()
        nbytes = len(data)
        try:
            if not upload:
                return self.bucket.put(key, bytes(data), only_if=self.only_if)
            return self.bucket.put_part(key, upload, number, data)
        finally:
            del data
            with self._freed:
                self._held -= _held_of(upload, nbytes)
                self._num_sent -= 1
                self._freed.notify()

    def _raise_failure(self) -> None:
        done = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if not future.done()]
        for future in done:
            future.result()

    def wait(self) -> None:
        """Return when everything was sent. Raises the first failure."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.result()

    def close(self) -> None:
        """Cancel the uploads that have not begun, and wait for the others. Raises nothing."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._futures = []


def _held_of(upload: str, nbytes: int) -> int:
    """Return the bytes that a part takes until it is sent: a whole object is copied once more."""
    return nbytes if upload else 2 * nbytes
