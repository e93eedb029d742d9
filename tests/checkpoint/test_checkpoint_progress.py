"""How far a save or a load is: a bar on a terminal, lines in the log elsewhere, on the lowest rank; nothing where it is short.

The terminal is a real one (a pseudo-terminal), and takes all that a rank writes to its standard output and error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import itertools
import logging
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import threading
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.cases import case_name
from kit.checkpoints import before_writes
from kit.compare import Differs, check_same, error_text
from kit.options import as_options
from kit.wraps import in_fsdp2
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.checkpoint.common import progress as progress_of
from fsdp_optim.testing import run_on_ranks

BUCKET = 8 << 10  # bytes: one tensor on a rank
NUM_LAYERS = 8
LINE = re.compile(r"(\d+) of (\d+) bytes")


class Screen:
    """Where this process's standard output and error go inside the context: a terminal, or a file. `text` afterwards."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._read = bytearray()
        self.text = ""

    def __enter__(self) -> Screen:
        if self._is_terminal:
            self._end, screen_fd = pty.openpty()
            fcntl.ioctl(screen_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
            self._reader = threading.Thread(target=self._take)
            self._reader.start()
        else:
            screen_fd, name = tempfile.mkstemp()
            self._end = os.open(name, os.O_RDONLY)
            os.unlink(name)
        self._before = [os.dup(fd) for fd in (1, 2)]
        self._flush()
        for fd in (1, 2):
            os.dup2(screen_fd, fd)
        os.close(screen_fd)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._flush()
        for fd, before in zip((1, 2), self._before, strict=True):
            os.dup2(before, fd)
            os.close(before)
        if self._is_terminal:
            self._reader.join()  # nobody has the other end open
        else:
            self._take()
        os.close(self._end)
        self.text = self._read.decode()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # a terminal's end, of which the other one is closed
            while some := os.read(self._end, 1 << 16):
                self._read += some

    @staticmethod
    def _flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The messages of the library's logger."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fsdp_optim")
    level, propagates = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False  # the worker may have a handler that writes, from another test
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
        log.setLevel(level)


@contextlib.contextmanager
def as_if_long(is_long: bool = True) -> Iterator[None]:
    """Every save is a large one, and takes its time: a second passes whenever the bar looks, and a line is always due."""
    if not is_long:
        yield
        return
    with (
        mock.patch.multiple(progress_of, _BAR_FROM=0, _LINE_EVERY=-1.0),
        mock.patch("tqdm.std.time", side_effect=itertools.count(0.0)),
    ):
        yield


@dataclasses.dataclass(frozen=True)
class Call:
    verb: str
    place: str
    length: str
    progress: bool | None

    @property
    def has_bar(self) -> bool:
        return self.progress is True or (self.progress is None and self.is_long and self.is_terminal)

    @property
    def has_lines(self) -> bool:
        return self.progress is None and self.is_long and not self.is_terminal

    @property
    def is_terminal(self) -> bool:
        return self.place == "terminal"

    @property
    def is_long(self) -> bool:
        return self.length == "long"


@dataclasses.dataclass(frozen=True)
class Shown:
    """The text that one rank has printed, and the progress in each line of the log that reports progress, in percent."""

    text: str
    lines: tuple[float, ...]

    @property
    def percents(self) -> list[int]:
        """Of the bar."""
        return [int(number) for number in re.findall(r"(\d+)%", self.text)]


ALL = [
    Call(verb, place, length, progress)
    for verb, place, length, progress in itertools.product(
        ("save", "load", "async_save"), ("terminal", "file"), ("long", "short"), (None, True, False)
    )
    # Whether training that continues wants a bar across its own output is not documented: only for those who ask for one.
    if not (verb == "async_save" and length == "long" and progress is None)
]


def subject() -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(NUM_LAYERS)))
    model.units = (*map(str, range(NUM_LAYERS)), "")  # type: ignore[assignment]
    wrapped = in_fsdp2(model)
    optim = torch.optim.Adam(wrapped.parameters(), foreach=False)
    for param in wrapped.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    return wrapped, optim


def show(call: Call, path: Path, model: nn.Module, optim: torch.optim.Optimizer | None, **options: Any) -> Shown:
    """Make one call on this rank."""
    options |= {"progress": call.progress, "bucket_nbytes": BUCKET}
    if call.verb != "load":
        options |= {"overwrite": True, "durable": False}
    with as_if_long(call.is_long), logged() as messages, Screen(call.is_terminal) as screen:
        kind = fsdp_optim.LoadOptions if call.verb == "load" else fsdp_optim.SaveOptions
        result: Any = getattr(fsdp_optim, call.verb)(path, model, optim, **as_options(kind, **options))
        if call.verb == "async_save":
            result.wait()
    matches = [LINE.search(message) for message in messages]
    return Shown(screen.text, tuple(100 * int(match[1]) / int(match[2]) for match in matches if match is not None))


def show_all(root: Path) -> dict[Call, Shown]:
    """On one rank."""
    model, optim = subject()
    fsdp_optim.save(root / "now", model, optim, options=fsdp_optim.SaveOptions(progress=False))
    by_call = {}
    for call in ALL:
        dist.barrier()
        by_call[call] = show(call, root / "now", model, optim)
    return by_call


@functools.cache
def shown() -> list[dict[Call, Shown]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_on_ranks(show_all, 2, Path(folder))


def check_bar(shown: Shown) -> None:
    """Raise unless this is one bar from 0 to 100 %, and nothing else, and whoever writes next begins on a line of its own."""
    check_same("percents", shown.percents, sorted(shown.percents))
    check_same("first and last", shown.percents[:1] + shown.percents[-1:], [0, 100])
    lines = shown.text.replace("\r\n", "\n").split("\n")
    check_same("ends of lines", [bool(line) for line in lines], [True, False])


def show_on_some(root: Path) -> Shown | None:
    """On ranks 1 and 2 of three; None on the other."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    call = Call("save", "terminal", "long", None)
    return show(call, root / "now", nn.Linear(8, 8), None, process_group=group)


def show_failure(root: Path, verb: str) -> tuple[str, Shown]:
    """The class of the error, and what is shown of a save to a disk that is full soon, or of a load of a damaged file."""
    model, optim = subject()
    fsdp_optim.save(root / "now", model, optim, options=fsdp_optim.SaveOptions(progress=False))
    damaged = root / "now" / "optim.safetensors"
    if dist.get_rank() == 0:
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    writes = itertools.count()

    def fail(file: Any) -> None:
        if isinstance(file, int) and "optim" in os.readlink(f"/proc/self/fd/{file}") and next(writes) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        as_if_long(),
        logged(),
        Screen(True) as screen,
        before_writes(fail) if verb == "save" else contextlib.nullcontext(),
    ):
        options = {"bucket_nbytes": BUCKET, **({"overwrite": True} if verb == "save" else {})}
        of_verb = fsdp_optim.LoadOptions if verb == "load" else fsdp_optim.SaveOptions
        kind, _ = error_text(
            lambda: getattr(fsdp_optim, verb)(root / "now", model, optim, **as_options(of_verb, **options))
        )
    return kind, Shown(screen.text, ())


class ProgressTest(unittest.TestCase):
    @parameterized.expand([dataclasses.astuple(call) for call in ALL], name_func=case_name)
    def test_what_is_shown(self, verb: str, place: str, length: str, progress: bool | None) -> None:
        call = Call(verb, place, length, progress)
        first, second = (by_call[call] for by_call in shown())
        check_same("rank 1", second, Shown("", ()))
        if call.has_bar:
            check_bar(first)
        else:
            check_same("written", first.text, "")
        check_same("lines in the log", bool(first.lines), call.has_lines)
        check_same("lines in the log", first.lines, tuple(sorted(first.lines)))

    @parameterized.expand(list(itertools.product(("save", "load"), ("terminal", "file"))), name_func=case_name)
    def test_it_goes_on_bucket_by_bucket(self, verb: str, place: str) -> None:
        """A checkpoint of 24 buckets on each rank: whoever waits for it sees more than where it begins and ends."""
        first = shown()[0][Call(verb, place, "long", None)]
        steps = {step for step in first.percents or first.lines if 0 < step < 100}
        if len(steps) < 8:
            raise Differs(f"on the way only {sorted(steps)} %")

    def test_the_lowest_rank_of_a_model_that_lives_on_some(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            _, first, second = run_on_ranks(show_on_some, 3, Path(folder))
        assert first is not None
        check_bar(first)
        check_same("rank 2", second, Shown("", ()))

    @parameterized.expand(("save", "load"))
    def test_a_failure_is_not_shown_as_done(self, verb: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (kind, first), (_, second) = run_on_ranks(show_failure, 2, Path(folder), verb)
        self.assertEqual(kind, "CheckpointError")
        check_same("rank 1", second.text, "")
        self.assertTrue(first.percents, first.text)
        self.assertNotIn(100, first.percents)
        self.assertTrue(first.text.endswith("\n"), first.text)


class SpeedTest(unittest.TestCase):
    def test_the_log_says_how_long_a_save_and_a_load_took(self) -> None:
        """One line each, with seconds and MB/s, also where a bar would be too short to read."""
        model = nn.Linear(3, 2)
        with tempfile.TemporaryDirectory() as folder:
            for what, call in (
                (
                    "saved",
                    lambda: fsdp_optim.save(Path(folder, "a"), model, options=fsdp_optim.SaveOptions(durable=False)),
                ),
                (
                    "saved",
                    lambda: fsdp_optim.async_save(
                        Path(folder, "b"), model, options=fsdp_optim.SaveOptions(durable=False)
                    ).wait(),
                ),
                ("loaded", lambda: fsdp_optim.load(Path(folder, "a"), model)),
            ):
                with self.assertLogs("fsdp_optim", logging.INFO) as logged:
                    call()
                lines = [record.getMessage() for record in logged.records if record.getMessage().startswith(what)]
                self.assertEqual(len(lines), 1, logged.output)
                self.assertRegex(
                    lines[0],
                    r", 32 B in \d+\.\d+ s \([\d.]+ \w?B/s\), 2 tensors"
                    if what == "loaded"
                    else r": 32 B in \d+\.\d+ s \([\d.]+ \w?B/s\), 2 tensors, 1 rank",
                )
