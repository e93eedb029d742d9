"""Counts the round trips of this library to the rendezvous store of the job: how often a rank waits for an answer of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fsdp_optim.transport import Meeting
from fsdp_optim.transport.job import JobStore

OF_OPERATION = {
    "set": 0,  # torch's client waits for no answer
    "append": 0,
    "multi_set": 0,
    "get": 2,  # it waits for the key first
    "multi_get": 2,
    "check": 1,
    "add": 1,
    "compare_set": 1,
    "delete_key": 1,
    "wait": 1,
}
"""Round trips of each operation of torch's client for a TCPStore; `hosts/test_far.py` measures them."""
CONNECTING = 3  # torch's client connects in two, and one asks for the name under which the ranks meet


class RoundTrips:
    """Round trips of one rank since this object was made.

    Attributes:
        of_call: those of the main thread. A rank that comes last to a meeting is counted as if it had waited for the others,
            which takes one more, so that the number is the same whoever comes last.
        in_background: those of other threads, but not those that only look whether something has come.
    """

    def __init__(self) -> None:
        self._main = threading.current_thread()
        self.of_call = self.in_background = 0

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        """Count an operation of this thread. The wait for a verdict, in a thread of its own, is counted by `note_meeting`."""
        if name == "wait":
            return
        if threading.current_thread() is self._main:
            self.of_call += OF_OPERATION[name]
        elif not _only_looks(name, args):
            self.in_background += OF_OPERATION[name]

    def note_connection(self) -> None:
        """Count a connection, which the main thread makes in all calls."""
        self.of_call += CONNECTING

    def note_meeting(self) -> None:
        """Count the wait for the verdict of a meeting."""
        self.of_call += 1


def _only_looks(name: str, args: tuple[Any, ...]) -> bool:
    if name == "multi_get":
        return str(args[0][0]).startswith("pulse/")  # signs of life
    is_read = name == "compare_set" and args[1] == args[2]
    return is_read or name == "check" or (name == "add" and not args[1])


class _Counted:
    """A store of torch's, whose operations are counted."""

    def __init__(self, store: Any, trips: RoundTrips) -> None:
        self._store, self._trips = store, trips

    def __getattr__(self, name: str) -> Any:
        operation: Callable[..., Any] = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self._trips.note(name, args)
            return operation(*args)

        return counted


@contextlib.contextmanager
def counted() -> Iterator[RoundTrips]:
    """Count in this process, on the connections that are made inside the context."""
    trips, connect, conclude = RoundTrips(), JobStore._connect, Meeting.conclude

    def connecting(store: JobStore) -> Any:
        trips.note_connection()
        return _Counted(connect(store), trips)

    def concluding(meeting: Meeting, statement: Any) -> Any:
        trips.note_meeting()
        return conclude(meeting, statement)

    with (
        mock.patch.object(JobStore, "_connect", connecting),
        mock.patch.object(Meeting, "conclude", concluding),
    ):
        yield trips
