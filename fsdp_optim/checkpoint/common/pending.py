"""The background save of this process. The next save and the exit of the process wait for it."""

from __future__ import annotations

import atexit
import importlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.errors import CheckpointError, RankTimeoutError, StateError
from fsdp_optim.results.calls import SaveResult

_LOGGED_WAIT = 0.01  # seconds

log = logging.getLogger("fsdp_optim")


class SaveHandle:
    """A save that is being written in the background, as `async_save` returns it.

    Attributes:
        path: the path of the checkpoint.
    """

    def __init__(
        self, path: Path | str, write: Callable[[], SaveResult], *, logs_waits: bool = False, owner: object = None
    ) -> None:
        """`logs_waits`: log how long this process waits for the save; True on one rank. `owner`: a manager, or None."""
        self.owner = owner
        self.path = path
        self._logs_waits = logs_waits
        self._write: Callable[[], SaveResult] | None = write
        self._saved: SaveResult | None = None
        self._error: BaseException | None = None
        self.is_reported = False  # whether the caller has seen the error
        # A daemon thread, because the interpreter joins other threads before it runs `settle` at exit, which reports errors.
        self._thread = threading.Thread(target=self._run, name=f"fsdp_optim: {path}", daemon=True)

    def __repr__(self) -> str:
        state = "failed" if self.has_failed else "saved" if self.done() and self._saved is not None else "saving"
        return f"SaveHandle(path={str(self.path)!r}, state={state!r})"

    def done(self) -> bool:
        """Return whether the save is over, successfully or not."""
        return not self._thread.is_alive()

    @public
    def wait(self, timeout: float | None = None) -> SaveResult:
        """Wait until the checkpoint is there. Raises the error of any rank.

        Args:
            timeout: seconds, at most; None: without limit.

        Raises:
            RankTimeoutError: the save did not end in time; it continues.
        """
        self.join(timeout)
        self.is_reported = True
        if self._error is not None:
            raise self._error
        if self._saved is None:
            raise CheckpointError(f"{self.path}: the save ended without a result")
        return self._saved

    @public
    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the save, successful or not.

        Args:
            timeout: seconds, at most; None: without limit.

        Raises:
            RankTimeoutError: the save did not end in time; it continues.
        """
        self._join(_seconds(timeout))
        if self._thread.is_alive():
            raise RankTimeoutError(f"{self.path}: the save did not end within {timeout:g} s; it continues: wait again")

    @property
    def has_failed(self) -> bool:
        """Whether the save is over and has failed, also if the caller has seen the error."""
        return self.done() and self._error is not None

    def error(self) -> BaseException | None:
        """Wait for the end of the save; return its error if the caller has not seen the error yet."""
        self._join(None)
        is_reported, self.is_reported = self.is_reported, True
        return None if is_reported else self._error

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    def _join(self, timeout: float | None) -> None:
        begun = time.monotonic()
        self._thread.join(timeout)
        seconds = time.monotonic() - begun
        if self._logs_waits and seconds >= _LOGGED_WAIT:
            log.info("waited %.2f s for the save of %s", seconds, self.path)

    def _run(self) -> None:
        try:
            if self._write is not None:
                self._saved = self._write()
        except BaseException as error:
            self._error = error
        finally:
            self._write = None  # frees the copy of the state


def _seconds(timeout: object) -> float | None:
    """Return a timeout that threading accepts; None: wait without limit."""
    if timeout is None:
        return None
    if isinstance(timeout, (int, float)) and timeout >= 0:
        return min(timeout, threading.TIMEOUT_MAX)
    raise StateError(f"timeout must be a number of seconds that is not negative, or None, not {timeout!r}")


def _call_before_pools_end(call: Callable[[], None]) -> None:
    """Call a function when the interpreter ends, while pools of threads, with which stores are written, still take work.

    Handlers of `atexit` are called later.
    """
    importlib.import_module("concurrent.futures.thread")  # the function that is registered last is called first
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(call)


class Pending:
    """The slot for one background save, and the failed saves whose errors their owners have not seen."""

    def __init__(self) -> None:
        self._handle: SaveHandle | None = None
        self._unheard: list[SaveHandle] = []
        self._waits_at_exit = False

    def begin(self, handle: SaveHandle) -> None:
        """Start a save. The caller has settled the previous one."""
        if not self._waits_at_exit:
            atexit.register(self.raise_all)
            _call_before_pools_end(self._join)
            self._waits_at_exit = True
        handle.start()
        self._handle = handle

    def _join(self) -> None:
        if self._handle is not None:
            self._handle.join(None)

    def wait(self, timeout: float | None) -> None:
        """Settle the saves of all owners. Raises RankTimeoutError if the save does not end within `timeout` seconds."""
        handle = self._handle
        if handle is not None:
            handle.join(timeout)
        self.raise_all()

    def settle(self, owner: object = None) -> None:
        """Wait for the save under way, and raise the error of a save of this owner, if the owner has not seen the error yet.

        Another owner's error stays for a call of that owner: the save that is requested now must not fail for it.
        """
        self._collect()
        self._raise([save for save in self._unheard if save.owner is owner])

    def raise_all(self) -> None:
        """Settle the saves of all owners."""
        self._collect()
        self._raise(self._unheard)

    def _collect(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.join(None)
            self._unheard.append(handle)
        self._unheard = [save for save in self._unheard if save.has_failed and not save.is_reported]

    def _raise(self, handles: list[SaveHandle]) -> None:
        for handle in handles:
            error = handle.error()
            if error is not None:
                raise error


pending = Pending()
"""The slot of this process. There is one per process, because threads and the exit belong to the process, not to a model."""
