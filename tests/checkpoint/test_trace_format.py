"""The timeline of a save against the Trace Event Format, by a validator that knows nothing of the writer; and slow ranks.

The format is that of "Trace Event Format" (Chromium): complete events (`X`) with `ts` and `dur` in microseconds, metadata
events (`M`), and on one track (pid, tid) slices that are one after the other or one inside of the other.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import unittest
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kit.checkpoints import before_writes
from kit.optimizers import adam
from kit.trained import Trained
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

WORLD, SLOW = 3, 1
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
"""The metadata events that viewers know, and the argument that each of them needs."""


def faults_of(text: str) -> Iterator[str]:
    """Yield everything in a file that the Trace Event Format does not allow, or that a viewer would not show."""
    trace = json.loads(text)
    events = trace["traceEvents"]
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        yield "displayTimeUnit"
    tracks: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    named: set[tuple[Any, ...]] = set()
    for event in events:
        if not isinstance(event.get("name"), str) or not isinstance(event.get("pid"), int):
            yield f"no name or pid: {event}"
        elif event["ph"] == "M":
            wanted: Any = METADATA.get(event["name"])
            kind = int if wanted == "sort_index" else str
            if wanted is None or not isinstance(event.get("args", {}).get(wanted), kind):
                yield f"metadata: {event}"
            named.add((event["name"], event["pid"], event.get("tid")))
        elif event["ph"] == "X":
            place = [event.get(key) for key in ("ts", "dur", "tid")]
            if any(not isinstance(number, int) or number < 0 for number in place):
                yield f"ts, dur and tid: {event}"
            else:
                begin, duration, track = place
                tracks.setdefault((event["pid"], track), []).append((begin, begin + duration, event["name"]))
        else:
            yield f"ph: {event}"
    for (pid, tid), slices in tracks.items():
        if ("process_name", pid, None) not in named or ("thread_name", pid, tid) not in named:
            yield f"the track {pid}, {tid} has no name"
        yield from overlaps(slices)


def overlaps(slices: Sequence[tuple[int, int, str]]) -> Iterator[str]:
    """Yield the slices of one track that begin inside of another one and end after it."""
    for number, (begin, end, name) in enumerate(slices):
        for other_begin, other_end, other in slices[number + 1 :]:
            if begin < other_begin < end < other_end or other_begin < begin < other_end < end:
                yield f"{name} [{begin}, {end}) and {other} [{other_begin}, {other_end})"


def save(folder: str, verb: str, slow: bool = False) -> list[str]:
    """Save with a timeline. Returns the lines of this rank's log."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fsdp_optim")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    slept: list[float] = []

    def hold_up(file: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        if slow and dist.get_rank() == SLOW and len(slept) < 3 and path.endswith(".safetensors"):
            slept.append(0.8)  # the first are heads of its files
            time.sleep(slept[0])

    try:
        trained = Trained("FSDP2", adam, 1)
        options = fsdp_optim.SaveOptions(durable=False, strategy="per_rank_files", trace=f"{folder}/{verb}.json")
        with before_writes(hold_up):
            for place in range(2):  # the second save has kept plans
                path = f"{folder}/{verb}-{place}"
                if verb == "save":
                    fsdp_optim.save(path, trained.model, trained.optim, options=options)
                else:
                    fsdp_optim.async_save(path, trained.model, trained.optim, options=options).wait()
                if place == 0 and slow:
                    break
        dist.barrier()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return lines


class TraceFormatTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def trace(self, verb: str) -> str:
        return Path(self.folder, f"{verb}.json").read_text()

    @parameterized.expand([("save",), ("async_save",)])
    def test_the_file_is_what_viewers_read(self, verb: str) -> None:
        run_on_ranks(save, WORLD, self.folder, verb)
        self.assertEqual(list(faults_of(self.trace(verb))), [])

    def test_the_validator_finds_faults(self) -> None:
        run_on_ranks(save, WORLD, self.folder, "save")
        events = json.loads(self.trace("save"))["traceEvents"]
        [plan] = [event for event in events if event["name"] == "plan" and event["pid"] == 0]
        over = {**plan, "ts": plan["ts"] + max(plan["dur"] // 2, 1), "dur": plan["dur"] * 10 + 10}
        wrong: list[Mapping[str, Any]] = [
            {**plan, "ph": "B"},
            {**plan, "dur": -1},
            {**plan, "ts": "0"},
            {**plan, "tid": 7},
            {**plan, "pid": "rank 0"},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {}},
            over,
        ]
        for event in wrong:
            with self.subTest(event):
                self.assertNotEqual(list(faults_of(json.dumps({"traceEvents": [*events, event]}))), [])

    def test_a_slow_rank_is_named_in_the_log_and_is_seen_in_the_timeline(self) -> None:
        first, *others = run_on_ranks(save, WORLD, self.folder, "save", True)
        self.assertEqual([line for lines in others for line in lines if line.startswith("saved")], [])
        [line] = [line for line in first if line.startswith("saved")]
        self.assertRegex(line, rf"; rank {SLOW} wrote for [\d.]+ s, the median rank for [\d.]+ s$")
        times = dict.fromkeys(range(WORLD), 0)
        for event in json.loads(self.trace("save"))["traceEvents"]:
            if event["name"] in ("create", "write", "flush"):
                times[event["pid"]] += event["dur"]
        self.assertGreaterEqual(times[SLOW], 2_400_000)
        self.assertLess(max(times[rank] for rank in range(WORLD) if rank != SLOW), times[SLOW])


if __name__ == "__main__":
    unittest.main()
