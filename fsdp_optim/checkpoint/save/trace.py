"""The timeline of a save: what each rank did when, as a file that Perfetto and chrome://tracing open.

    rank 0  | plan | create | transfer [write] [write] | flush | wait     | commit |
    rank 1  | plan | create | transfer [write]    [write]      | flush | wait      |

Each rank records its spans; they reach the lowest rank in the report about its writes, which it makes in any case.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.posix.small_files import replace_text

log = logging.getLogger("fsdp_optim")

TRAINING, BACKGROUND = "training", "background"
"""The tracks of a rank: its main thread, and the thread of a save in the background."""

_MOST = 1_000  # spans of a rank, but for those that have no neighbour to be joined with
_TRACKS = (TRAINING, BACKGROUND)


class Span(NamedTuple):
    """A stretch of time of one rank: microseconds since 1970 by the clock of its host, and their number."""

    track: str
    name: str
    begin: int
    duration: int


class Trace:
    """The spans of one rank in one save, in the order of their ends. Records nothing if `path` is None.

    `path`: the file that the lowest rank writes.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = path
        self._zero = time.time() - time.monotonic()  # the clock of the host may be set during a save
        self.track = TRAINING
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the time that a block takes."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.add(name, begun)

    def add(self, name: str, begun: float) -> None:
        """Record the time from `begun`, of `time.monotonic`, until now."""
        if self._path is None:
            return
        begin, end = (round((self._zero + at) * 1e6) for at in (begun, time.monotonic()))
        if len(self.spans) >= _MOST and self.spans[-1][:2] == (self.track, name):
            begin = self.spans.pop().begin  # a rank of a large model writes some thousand times
        self.spans.append(Span(self.track, name, begin, end - begin))

    def write(self, ranks: Sequence[int], spans: Sequence[Sequence[Span]]) -> None:
        """Write the file, on the lowest rank. A failure is a warning, because the checkpoint is complete.

        Args:
            ranks: the ranks of the save, the lowest one first.
            spans: those in the report of each rank; empty on other ranks. The lowest rank adds what it did after its report.
        """
        if self._path is None or not spans:
            return
        reported = list(zip(ranks, spans, strict=True))
        (lowest, before), *others = reported
        commit = next((span.begin for span in self.spans[len(before) :] if span.name == "commit"), 0)
        events = [event for rank, done in ((lowest, self.spans), *others) for event in _events(rank, done)]
        for rank, done in reported:
            end = max((span.begin + span.duration for span in done), default=commit)
            if end < commit:
                events.append(_event(rank, Span(done[-1].track, "wait", end, commit - end)))
        path = os.fspath(self._path)
        try:
            replace_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except CheckpointError as error:
            log.warning("the timeline of a save was not written: %s", error)


def _events(rank: int, spans: Sequence[Span]) -> Iterator[Mapping[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for track in sorted({span.track for span in spans}, key=_TRACKS.index):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": _TRACKS.index(track), "args": {"name": track}}
    for span in spans:
        yield _event(rank, span)


def _event(rank: int, span: Span) -> Mapping[str, Any]:
    place = {"pid": rank, "tid": _TRACKS.index(span.track)}
    return {"ph": "X", "name": span.name, "ts": span.begin, "dur": span.duration, **place}
