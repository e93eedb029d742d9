"""A call that may never return, such as a connection to a stopped host: made in a thread, and waited for with a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Attempt(Generic[T]):
    """A call in a thread of its own, which begins at once.

    Args:
        patience: seconds from now on, after which `result` does not wait any more.
    """

    def __init__(self, call: Callable[[], T], patience: float) -> None:
        self._call = call
        self._until = time.monotonic() + patience
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="fsdp_optim: connecting", daemon=True).start()

    def _run(self) -> None:
        try:
            self._made.append(self._call())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether the call has returned or raised."""
        return self._ended.is_set()

    def result(self) -> T:
        """Return the result of the call. Raises its error, or TimeoutError where it has not ended in time; the call continues."""
        if not self._ended.wait(max(self._until - time.monotonic(), 0.0)):
            raise TimeoutError("no answer yet")
        if self._error is not None:
            raise self._error
        return self._made[0]
