"""Lines that users see without logging: when they are written, when the application's logging has them, and who is named slow."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import statistics
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_optim.checkpoint.save.saved_line import slowest
from fsdp_optim.plugins import say
from fsdp_optim.saying import QUIET, counted, lasted, moved, sized

LOG = logging.getLogger("fsdp_optim")


@contextlib.contextmanager
def unconfigured(level: int = logging.NOTSET, **environment: str) -> Iterator[io.StringIO]:
    """A process whose application has set up no logging, and its stderr. pytest's own handlers are there during a test."""
    before, err = LOG.level, io.StringIO()
    with (
        mock.patch.object(logging.getLogger(), "handlers", []),
        mock.patch.object(LOG, "handlers", []),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stderr(err),
    ):
        if not environment:
            os.environ.pop(QUIET, None)
        LOG.setLevel(level)
        try:
            yield err
        finally:
            LOG.setLevel(before)


def test_a_line_is_written_where_nothing_is_configured() -> None:
    with unconfigured() as err:
        say("saved a: 100 % of it")
        handlers = [*LOG.handlers, *logging.getLogger().handlers]
    assert (err.getvalue(), handlers) == ("saved a: 100 % of it\n", [])


@pytest.mark.parametrize(
    ("level", "is_said"),
    [(logging.DEBUG, True), (logging.INFO, True), (logging.WARNING, False), (logging.ERROR, False)],
)
def test_a_level_turns_it_off(level: int, is_said: bool) -> None:
    with unconfigured(level) as err:
        say("line")
    assert err.getvalue() == ("line\n" if is_said else "")


def test_logging_that_is_disabled() -> None:
    logging.disable(logging.INFO)
    try:
        with unconfigured() as err:
            say("line")
    finally:
        logging.disable(logging.NOTSET)
    assert err.getvalue() == ""


@pytest.mark.parametrize(("value", "is_said"), [("1", False), ("yes", False), ("0", True), ("", True)])
def test_a_variable_turns_it_off(value: str, is_said: bool) -> None:
    with unconfigured(FSDP_OPTIM_QUIET=value) as err:
        say("line")
    assert err.getvalue() == ("line\n" if is_said else "")


@pytest.mark.parametrize("name", ["", "fsdp_optim"])
def test_the_application_s_handler_has_it_instead(name: str) -> None:
    out = io.StringIO()
    with unconfigured(logging.INFO) as err:
        logging.getLogger(name).addHandler(logging.StreamHandler(out))
        say("line")
    assert (out.getvalue(), err.getvalue()) == ("line\n", "")


def test_a_stderr_that_is_closed_or_missing() -> None:
    with unconfigured() as err:
        err.close()
        say("line")
        with mock.patch.object(sys, "stderr", None):
            say("line")


@given(st.lists(st.floats(0, 100), max_size=20))
def test_who_is_named_slow(seconds: list[float]) -> None:
    """A rank that wrote for twice as long as the median rank, and for a second longer; the rank itself does not count twice."""
    named = slowest(seconds)
    median = sorted(seconds)[(len(seconds) - 1) // 2] if seconds else 0.0
    stand_out = [s for s in seconds if s >= 2 * median and s >= median + 1] if len(seconds) > 1 else []
    assert (named is not None) == bool(stand_out)
    if named is not None:
        assert named == (seconds.index(max(seconds)), max(seconds), statistics.median_low(seconds))


def test_words() -> None:
    assert [sized(n) for n in (0, 999, 1000, 14_100_000_000, 123_456_789)] == [
        "0 B",
        "999 B",
        "1 kB",
        "14.1 GB",
        "123 MB",
    ]
    assert [lasted(s) for s in (0.004, 0.994, 0.996, 6.24, 75.3)] == ["0.00 s", "0.99 s", "1.0 s", "6.2 s", "75 s"]
    assert [counted(n, "tensor") for n in (1, 1163)] == ["1 tensor", "1,163 tensors"]
    assert moved(14_100_000_000, 6.2) == "14.1 GB in 6.2 s (2.27 GB/s)"
