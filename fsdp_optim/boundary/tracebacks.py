"""The boundary between the library and its users: tracebacks of its own errors end at the call that the user made."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from fsdp_optim.boundary.collector import fewer_collections
from fsdp_optim.boundary.heap import LONG_S, give_back
from fsdp_optim.errors import FsdpOptimError

P = ParamSpec("P")
R = TypeVar("R")

FULL = "FSDP_OPTIM_FULL_TRACEBACK"
"""The environment variable that, set to 1, keeps complete tracebacks."""

_HERE = f"{Path(__file__).parents[1]}/"
_NOT_USERS = re.compile(
    "|".join(
        [
            re.escape(_HERE),
            re.escape(f"{sysconfig.get_path('stdlib')}/"),
            ".*/(site|dist)-packages/",
            "<frozen ",
        ]
    )
)
"""Begins the names of files with the code of this library, of Python's, and of installed packages."""


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that users call: it raises the library's errors without its own frames, collects garbage less often, and
    gives memory back to the system that a long call no longer needs.

    The text of an error says what is wrong, and on which rank.

    Every other error is a mistake of the library or of the program, and keeps its complete traceback.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        begun = time.monotonic()
        try:
            with fewer_collections():
                return function(*args, **kwargs)
        except FsdpOptimError as error:
            if os.environ.get(FULL, "0") not in ("", "0"):
                raise
            _shorten(error)
            raise error.with_traceback(None)  # noqa: B904  # the same error, with its own cause
        finally:
            if time.monotonic() - begun > LONG_S:
                give_back()

    return call


def _shorten(error: BaseException) -> None:
    """Cut the library's frames from the causes of an error, and drop causes that say nothing more."""
    shown, seen = error, {id(error)}
    cause = _next(error)
    while cause is not None and id(cause) not in seen:  # errors that were raised again may form a circle
        seen.add(id(cause))
        further = _next(cause)
        if _says_more(cause, str(error)):
            _link(shown, cause)
            shown = cause.with_traceback(_without_own(cause.__traceback__))
        cause = further
    _link(shown, None)


def _next(error: BaseException) -> BaseException | None:
    """Return the error that a traceback shows before this one."""
    return error.__cause__ if error.__cause__ is not None or error.__suppress_context__ else error.__context__


def _link(error: BaseException, cause: BaseException | None) -> None:
    if _next(error) is not cause:
        error.__cause__ = cause  # which hides the context


def _says_more(cause: BaseException, text: str) -> bool:
    """Return whether a cause has words that the error has not, or comes from the code of a user."""
    reason = str(cause.strerror or cause) if isinstance(cause, OSError) else str(cause)
    if reason and reason not in text:
        return True
    return any(not _NOT_USERS.match(file) for file in map(_file_of, _frames(cause.__traceback__)))


def _without_own(at: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame outside of the library on."""
    return next((frame for frame in _frames(at) if not _file_of(frame).startswith(_HERE)), None)


def _frames(at: TracebackType | None) -> Iterator[TracebackType]:
    while at is not None:
        yield at
        at = at.tb_next


def _file_of(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename
