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

    Only the main thread can install handlers. In a forked process (a worker of a data loader) a signal has its earlier effect.
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
        self._respond(number, frame, is_noted=False)

    def _respond(self, number: int, frame: FrameType | None, is_noted: bool) -> None:
        """Note the signal, and call the earlier handler. `is_noted`: whether an instance installed later has noted it.

        A signal that any instance notes neither ends the process nor raises KeyboardInterrupt, also where a closed instance,
        which could not be taken out of the chain, has the default action below it.
        """
        if self._is_active and os.getpid() == self._process:
            self.received = is_noted = True
        previous = self._previous.get(number)
        if below := _instance_of(previous):
            below._respond(number, frame, is_noted)
        elif callable(previous) and not (is_noted and previous is signal.default_int_handler):
            previous(number, frame)
        elif previous == signal.SIG_DFL and not is_noted and _instance_of(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def put_back(self) -> None:
        """Restore the previous handlers. Where another handler was installed later, this instance stays and passes signals on."""
        self._is_active = False
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self._process:
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)


def _instance_of(handler: object) -> Signals | None:
    """Return the instance whose method a handler is."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Signals) else None
