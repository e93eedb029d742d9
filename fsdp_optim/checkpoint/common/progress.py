"""The progress of a save or a load: a bar on a terminal, or lines in the log."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

from fsdp_optim.saying import speed_of

_BAR_FROM = 256 << 20  # bytes; smaller calls end before a bar can be read
_LINE_EVERY = 30.0  # seconds

log = logging.getLogger("fsdp_optim")


class Progress:
    """The progress of work on `total` bytes, shown if `shown` is True. `requested` None: only for long work.

    `alone`: whether nothing else prints meanwhile. During training there is a bar only if `requested` is True.
    """

    def __init__(self, requested: bool | None, label: str, total: int, *, shown: bool, alone: bool = True) -> None:
        on_terminal = alone and sys.stderr.isatty()
        visible = shown and requested is not False and (requested is True or total >= _BAR_FROM)
        self._label, self._total = label, total
        self._bar = (
            tqdm(total=total, desc=label, unit="B", unit_scale=True) if visible and (on_terminal or requested) else None
        )
        self._logs = visible and self._bar is None
        self._last_line = self._begin = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def up_to(self, nbytes: int) -> None:
        """Show that `nbytes` bytes are done, at most 99 %. Only `done` shows 100 %, because damage may be found at the end."""
        self._show(min(nbytes, self._total * 99 // 100))

    def _show(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif self._logs and time.monotonic() - self._last_line > _LINE_EVERY:
            self._last_line = time.monotonic()
            log.info("%s: %d of %d bytes, %s", self._label, done, self._total, speed_of(done, self._begin))

    def done(self) -> None:
        """Show that all work has succeeded."""
        self._show(self._total)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
