"""Tracebacks of the library's errors: they end at the user's call, and causes that say the same are gone."""

from __future__ import annotations

import inspect
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_optim as F
from fsdp_optim import api
from fsdp_optim.boundary.tracebacks import FULL, public
from fsdp_optim.errors import StateError

MOST_LINES = 12
PACKAGE = f"{Path(F.__file__).parent}{os.sep}"
BOUNDARY = f"{PACKAGE}boundary/tracebacks.py"


class Refuses:
    """An object of a trainer with a mistake of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("a mistake of mine")


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        F.save(f"{name}/a", model(), state={"mine": Refuses()}, options=F.SaveOptions(durable=False))
        yield name


def model(width: int = 2) -> nn.Linear:
    return nn.Linear(width, 1)


def trace_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception:
        return traceback.format_exc()
    raise AssertionError("no error")


MISTAKES: dict[str, Callable[[str], Any]] = {
    "a path that is taken": lambda at: F.save(f"{at}/a", model()),
    "a value of no known kind": lambda at: F.save(f"{at}/b", model(), state={"x": Path("a")}),
    "another model": lambda at: F.load(f"{at}/a", model(3)),
    "nothing there": lambda at: F.load(f"{at}/missing", model()),
    "arguments in another order": lambda at: F.save(at, torch.optim.SGD(model().parameters())),  # type: ignore[arg-type]
    "a manager's argument": lambda at: F.CheckpointManager(at, model(), every=0),
    "a manager's step": lambda at: F.CheckpointManager(at, model(), every=1).step(-1),
    "a wrong path for verify": lambda at: F.verify(f"{at}/missing"),
    "a wrong path for inspect": lambda at: F.inspect(f"{at}/missing"),
    "a wrong path for convert": lambda at: F.convert(f"{at}/missing", f"{at}/new"),
    "no shard": lambda at: F.load_optim_state_dict(torch.optim.SGD(model().parameters()), {"state": {}}),
    "a parent that is a file": lambda at: (Path(at, "f").touch(), F.save(f"{at}/f/new", model())),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_dozen_lines_and_no_frame_of_the_library(folder: str, mistake: str) -> None:
    text = trace_of(lambda: MISTAKES[mistake](folder))
    own = [line for line in text.splitlines() if PACKAGE in line and 'File "' in line]
    assert len(own) == 1, text
    assert BOUNDARY in own[0], text
    assert "Traceback" not in text.partition("Traceback")[2], text  # no cause that says the same once more
    # Two frames, of the lambda and of trace_of, are this test's; a message may have several lines.
    lines = [line for line in text.splitlines() if line.strip(" ^")]
    assert len(lines) <= MOST_LINES, text


def test_a_cause_in_the_code_of_the_user_stays(folder: str) -> None:
    text = trace_of(lambda: F.load(f"{folder}/a", model(), state={"mine": Refuses()}))
    assert 'raise KeyError("a mistake of mine")' in text
    assert text.count("Traceback") == 2
    assert [line for line in text.splitlines() if 'File "' in line and PACKAGE in line and BOUNDARY not in line] == []


@pytest.mark.parametrize(("value", "is_complete"), [("1", True), ("0", False), ("", False)])
def test_a_variable_keeps_all_frames(
    folder: str, monkeypatch: pytest.MonkeyPatch, value: str, is_complete: bool
) -> None:
    monkeypatch.setenv(FULL, value)
    text = trace_of(lambda: F.load(f"{folder}/a", model(3)))
    assert (f"{PACKAGE}checkpoint" in text) == is_complete


def test_other_errors_keep_their_frames() -> None:
    @public
    def broken() -> None:
        inner()

    def inner() -> None:
        raise RuntimeError("a mistake of the library")

    assert "in inner" in trace_of(broken)


def test_causes_that_say_more_stay() -> None:
    """Of a chain of three, the middle one says what the last one says."""

    @public
    def chain() -> None:
        try:
            try:
                raise OSError(5, "the disk is on fire")
            except OSError as error:
                raise StateError("it failed") from error
        except StateError as error:
            raise StateError("all ranks: it failed") from error

    with pytest.raises(StateError, match="all ranks") as caught:
        chain()
    causes = []
    cause = caught.value.__cause__
    while cause is not None:
        causes.append(str(cause))
        cause = cause.__cause__
    assert causes == ["it failed", "[Errno 5] the disk is on fire"]  # both raised in this file, the code of a user


def test_causes_in_a_circle() -> None:
    """As where an error is raised again while another one of the chain is handled."""

    @public
    def circle() -> None:
        first, second, last = StateError("first"), StateError("second"), StateError("last")
        first.__cause__, second.__cause__, last.__cause__ = second, first, second
        raise last

    with pytest.raises(StateError, match="last"):
        circle()


def test_an_error_keeps_its_class_and_what_it_knows(folder: str) -> None:
    with pytest.raises(F.StateError) as caught:
        F.load(f"{folder}/a", model(3))
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert type(caught.value) is F.StateError


@pytest.mark.parametrize("name", [name for name in F.__all__ if inspect.isfunction(getattr(F, name))])
def test_every_public_call_is_at_the_boundary(name: str) -> None:
    call = getattr(api, name)
    if name in ("per_rank",):  # which cannot fail
        return
    assert call.__code__.co_filename == BOUNDARY
    assert call.__doc__
    assert next(iter(inspect.signature(call).parameters), "none") not in ("args", "kwargs")


METHODS = ["resume", "rollback", "step", "save", "wait", "close", "__init__", "__exit__"]


@pytest.mark.parametrize(("of", "name"), [(F.CheckpointManager, name) for name in METHODS] + [(F.SaveHandle, "wait")])
def test_every_method_is_too(of: type, name: str) -> None:
    assert getattr(of, name).__code__.co_filename == BOUNDARY
