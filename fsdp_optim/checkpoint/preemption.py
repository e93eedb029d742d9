"""Signals of a scheduler that is about to end the job. A handler only notes the signal; the save comes at the end of a step."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Collection
from types import FrameType
from typing import Any

log = logging.getLogger("fsdp_optim")


class Signals:
    """Handlers that note signals, and then call the handlers that were there before.

    Only the main thread can install handlers. In a forked process (a worker of a data loader) a signal does what it did before.
    """

    def __init__(self, signals: Collection[int]) -> None:
        self.received = False
        self._process = os.getpid()
        self._is_active = True
        self._previous: dict[int, Any] = {}
        for number in sorted({int(number) for number in signals}):  # a handler that was there twice would call itself
            self._install(number)

    def _install(self, number: int) -> None:
        name = signal.Signals(number).name
        if threading.current_thread() is not threading.main_thread():
            log.warning("%s will not be noticed: only the main thread can have a handler installed", name)
            return
        previous = signal.getsignal(number)
        if previous is None:
            log.warning("%s will not be noticed: it has a handler that Python did not install", name)
            return
        self._previous[number] = previous
        signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if not self._is_active or os.getpid() != self._process:
            if callable(previous):
                previous(number, frame)
            elif previous == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.received = True
        if callable(previous) and previous is not signal.default_int_handler:  # which raises KeyboardInterrupt
            previous(number, frame)

    def put_back(self) -> None:
        """Install the previous handlers again. Where another handler was installed on top of this one, this one passes on."""
        self._is_active = False
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self._process:
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
