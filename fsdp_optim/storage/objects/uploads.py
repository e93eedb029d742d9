"""Parts on their way to a bucket: several at the same time, in bounded memory."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from fsdp_optim.storage.objects.base import Bucket

_MOST_AT_ONCE = 16


@dataclass
class Uploads:
    """The uploads of one process.

    `budget_nbytes`: of parts that wait or are sent; one is held in any case. `only_if`: the condition for whole objects.
    """

    bucket: Bucket
    budget_nbytes: int
    only_if: str | None = None
    _held: int = 0
    _freed: threading.Condition = field(default_factory=threading.Condition)
    _futures: list[Future[str]] = field(default_factory=list)
    _pool: ThreadPoolExecutor | None = None

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> Future[str]:
        """Send a part in the background, as soon as the budget allows; its result is the receipt. Raises an earlier failure.

        `upload` empty: the part is a whole object.
        """
        with self._freed:
            while self._held and self._held + len(data) > self.budget_nbytes:
                self._freed.wait()
            self._held += len(data)
        self._raise_failure()
        if self._pool is None:
            threads = _MOST_AT_ONCE if self.bucket.can.parts_by_many else 1  # else parts have to come in order
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fsdp_optim: upload")
        future = self._pool.submit(self._send, key, upload, number, data)
        self._futures.append(future)
        return future

    def _send(self, key: str, upload: str, number: int, data: memoryview) -> str:
        try:
            if not upload:
                return self.bucket.put(key, bytes(data), only_if=self.only_if)
            return self.bucket.put_part(key, upload, number, data)
        finally:
            with self._freed:
                self._held -= len(data)
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
        """Cancel what has not begun, and wait for the rest. Raises nothing."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._futures = []
