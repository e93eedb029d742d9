"""KeyboardInterrupt and SystemExit on one rank: it raises its own, and the others hear of it at once."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from kit.compare import check_same
from kit.optimizers import adam
from kit.trained import Trained

import fsdp_optim
from fsdp_optim import RankError
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import agree, collective, meeting
from fsdp_optim.verbs import call as calls

WORLD, TIMEOUT = 2, 60.0
PATIENCE = 60.0
LIBRARY = f"{Path(fsdp_optim.__file__).parent}{os.sep}"
UNSEEN = ("transport/failure.py", "transport/job/pulse.py", "transport/turns.py", "machine.py", "collector.py")
PLACES: dict[str, tuple[Any, str]] = {
    "arguments": (calls, "check_model"),
    "reading": (calls, "read_optimizer"),
    "moving": (collective, "_pack"),
    "before a meeting": (meeting.Meeting, "_publish"),
    "deciding": (meeting.Meeting, "_made"),
    "after a meeting": (agree, "MeetingResult"),
}


def interrupted(folder: Path) -> None:
    """Each place in turn, on each rank, in a gather; afterwards the same ranks gather again."""
    trained = Trained("FSDP2", adam, 1)
    wanted = trained.gather(None)
    for place, (owner, name) in PLACES.items():
        for bad in range(WORLD):
            for kind in (KeyboardInterrupt, SystemExit):
                dist.barrier()
                begun = time.monotonic()
                real, thrown = getattr(owner, name), []

                def once(*args: Any, **kwargs: Any) -> Any:
                    if dist.get_rank() == bad and not thrown:  # noqa: B023
                        thrown.append(kind("by hand"))  # noqa: B023
                        raise thrown[0]  # noqa: B023
                    return real(*args, **kwargs)  # noqa: B023

                with mock.patch.object(owner, name, once):
                    error = _raised(lambda: trained.gather(None, timeout=TIMEOUT))
                everyone: list[Any] = [None] * WORLD
                dist.all_gather_object(everyone, (bool(thrown), type(error).__name__, str(error)))
                if everyone[bad][0]:  # else this rank was not the one that decides
                    check_same(f"{place}, rank {bad} itself", everyone[bad][1], kind.__name__)
                    for rank in set(range(WORLD)) - {bad}:
                        check_same(f"{place}, rank {rank}", everyone[rank][1], RankError.__name__)
                        for words in (f"rank {bad}", f"{kind.__name__}: by hand"):
                            assert words in everyone[rank][2], (place, words, everyone[rank])
                assert time.monotonic() - begun < TIMEOUT / 2, place
                check_same(f"after {place}", trained.gather(None), wanted)


def interrupted_when_all_are_ready(folder: Path) -> None:
    """An interrupt comes when this rank knows that all are ready to move: the others get its messages, and then hear of it."""
    trained = Trained("FSDP2", adam, 1)
    wanted, real = trained.gather(None), agree.agree
    for bad in range(WORLD):
        thrown: list[bool] = []

        def late(group: Any, step: str, *args: Any, **kwargs: Any) -> None:
            real(group, step, *args, **kwargs)
            if step == "ready to move" and dist.get_rank() == bad and not thrown:  # noqa: B023
                thrown.append(True)  # noqa: B023
                raise KeyboardInterrupt("by hand")

        begun = time.monotonic()
        with mock.patch.object(agree, "agree", late):
            error = _raised(lambda: trained.gather(None, timeout=TIMEOUT))
        check_same("kind", type(error), KeyboardInterrupt if dist.get_rank() == bad else RankError)
        words = "by hand" if thrown else f"rank {bad}: KeyboardInterrupt: by hand"
        assert words in str(error), error
        assert time.monotonic() - begun < TIMEOUT / 2, "it has waited for a message"
        check_same("afterwards", trained.gather(None), wanted)


@contextmanager
def signals() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, and SIGTERM SystemExit, as in a program of a user."""

    def leave(number: int, frame: object) -> None:
        sys.exit("by hand")

    before = {
        number: signal.signal(number, handler)
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, leave))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signalled_while_it_waits(folder: Path) -> None:
    """A rank waits for a late one, and a signal comes: it raises at once, and the late rank when it comes."""
    trained = Trained("FSDP2", adam, 1)
    wanted = trained.gather(None)
    for delay in (0.5, 6.0):  # before and after it has begun to look for the late rank
        for bad in range(WORLD):
            for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
                said = folder / f"{delay}-{bad}-{number}"
                dist.barrier()
                if dist.get_rank() == bad:
                    timer = threading.Timer(delay, os.kill, (os.getpid(), number))
                    timer.start()
                    with signals():
                        check_same("itself", type(_raised(lambda: trained.gather(None, timeout=TIMEOUT))), kind)
                    said.touch()
                else:
                    begun = time.monotonic()
                    while not said.exists():
                        assert time.monotonic() - begun < TIMEOUT / 2, "the other rank has not raised"
                        time.sleep(0.01)
                    error = _raised(lambda: trained.gather(None, timeout=TIMEOUT))
                    assert isinstance(error, RankError), error
                    assert f"rank {bad}: {kind.__name__}" in str(error), error
                check_same("afterwards", trained.gather(None), wanted)


def signalled_between_messages(folder: Path) -> None:
    """A signal comes while a rank waits for the messages of another, which is slow: the messages come, and both raise."""
    trained = Trained("FSDP2", adam, 1)
    wanted = trained.gather(None)
    pack, send = collective._pack, collective._post
    for bad in range(WORLD):
        for small in (256, 1 << 20):  # many messages, and one
            slept: list[bool] = []

            def slow(*args: Any) -> None:
                if dist.get_rank() != bad and not slept:  # noqa: B023
                    slept.append(True)  # noqa: B023
                    time.sleep(1.0)
                pack(*args)

            def post(*args: Any) -> None:
                if dist.get_rank() == bad:  # noqa: B023
                    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
                send(*args)

            begun = time.monotonic()
            with mock.patch.object(collective, "_pack", slow), mock.patch.object(collective, "_post", post), signals():
                error = _raised(lambda: trained.gather(None, timeout=TIMEOUT, bucket_nbytes=small))  # noqa: B023
            check_same("kind", type(error), KeyboardInterrupt if dist.get_rank() == bad else RankError)
            assert time.monotonic() - begun < TIMEOUT / 2, "it has waited for a message"
            check_same("afterwards", trained.gather(None), wanted)


class Tracer:
    """Counts the calls and returns of functions of the library in this thread, and throws an interrupt at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.where, self.places = at, "", list[str]()
        self._begun = False

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(LIBRARY) or code.co_filename[len(LIBRARY) :] in UNSEEN:
            return None
        if code.co_name.startswith("<"):  # where a generator is closed, Python ignores what comes
            return None
        if event in ("call", "return"):
            self._begun = self._begun or code.co_name == "agree_on_state"
            if self._begun:
                self.places.append(f"{event} of {code.co_filename[len(LIBRARY) :]}:{code.co_name}")
                if self.at == len(self.places):
                    self.where = self.places[-1]
                    raise KeyboardInterrupt("by hand")
        frame.f_trace_lines = False  # nothing is counted by the line
        return self


def interrupted_anywhere(folder: Path, num_trials: int) -> list[str]:
    """An interrupt at many places of a call, on one rank after the other: nobody waits for long, and the ranks continue."""
    trained = Trained("FSDP2", adam, 1)
    both, wanted = (trained.model, trained.optim), trained.gather(None)
    calls: list[Callable[[], Any]] = [
        lambda: trained.gather(None, timeout=PATIENCE),
        lambda: fsdp_optim.save(
            folder / "saved", *both, overwrite=True, options=fsdp_optim.SaveOptions(durable=False, timeout=PATIENCE)
        ),
        lambda: fsdp_optim.load(folder / "saved", *both, options=fsdp_optim.LoadOptions(timeout=PATIENCE)),
    ]
    wrong: list[str] = []
    for call in calls:
        call()
        tracer = Tracer()
        _traced(tracer, call)
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, len(tracer.places))
        for trial in range(num_trials):
            bad = trial % WORLD
            tracer = Tracer(1 + trial * everyone[bad] // num_trials if dist.get_rank() == bad else None)
            dist.barrier()
            begun = time.monotonic()
            error = _raised(lambda: _traced(tracer, call))  # noqa: B023
            took = time.monotonic() - begun
            told: list[Any] = [None] * WORLD
            dist.all_gather_object(told, (tracer.where, type(error).__name__, str(error), took))
            if told[bad][0] and (
                told[bad][1] != "KeyboardInterrupt" or max(answer[3] for answer in told) > PATIENCE / 2
            ):
                wrong.append(f"rank {bad}, trial {trial}: {told}")
            if len(wrong) > 9:
                return wrong
            again = _raised(call)
            if f"rank {bad}: KeyboardInterrupt" in str(again):  # it came when this rank had ended the call
                again = _raised(call)
            dist.all_gather_object(told, repr(again))
            if any(answer != "None" for answer in told):
                return [*wrong, f"rank {bad}, trial {trial}, {tracer.where}: afterwards {told}"]
        check_same("afterwards", trained.gather(None), wanted)
    return wrong


def _traced(tracer: Tracer, call: Callable[[], Any]) -> Any:
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        return call()
    finally:
        sys.settrace(before)


def interrupted_in_a_load_and_a_save(folder: Path) -> None:
    trained = Trained("FSDP2", adam, 1)
    both = trained.model, trained.optim
    fsdp_optim.save(folder / "saved", *both, options=fsdp_optim.SaveOptions(durable=False))
    for number, call in enumerate((fsdp_optim.save, fsdp_optim.async_save, fsdp_optim.load)):
        kind: Any = fsdp_optim.LoadOptions if call is fsdp_optim.load else fsdp_optim.SaveOptions
        options = kind(timeout=TIMEOUT)
        for bad in range(WORLD):
            from fsdp_optim.checkpoint.load import restore

            def stop(*args: Any, **kwargs: Any) -> None:
                raise KeyboardInterrupt("by hand")

            owner, name = (restore, "move") if call is fsdp_optim.load else (calls, "read_optimizer")
            path = folder / ("saved" if call is fsdp_optim.load else f"new-{number}-{bad}")
            with mock.patch.object(owner, name, stop if dist.get_rank() == bad else getattr(owner, name)):
                if dist.get_rank() == bad:
                    check_same("itself", type(_raised(lambda: call(path, *both, options=options))), KeyboardInterrupt)  # type: ignore[operator] # noqa: B023
                else:
                    error = _raised(lambda: call(path, *both, options=options))  # type: ignore[operator] # noqa: B023
                    assert isinstance(error, RankError), error
                    assert f"rank {bad}: KeyboardInterrupt: by hand" in str(error), error


def _raised(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return error
    return None


class InterruptsTest(unittest.TestCase):
    def setUp(self) -> None:
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.folder = Path(held.name)

    def test_in_a_gather(self) -> None:
        run_on_ranks(interrupted, WORLD, self.folder)

    def test_a_signal_while_a_rank_waits_for_another(self) -> None:
        run_on_ranks(signalled_while_it_waits, WORLD, self.folder)

    def test_a_signal_between_messages(self) -> None:
        run_on_ranks(signalled_between_messages, WORLD, self.folder)

    def test_when_all_are_ready_to_move(self) -> None:
        run_on_ranks(interrupted_when_all_are_ready, WORLD, self.folder, timeout=TIMEOUT)

    def test_anywhere_in_a_call(self) -> None:
        for wrong in run_on_ranks(interrupted_anywhere, WORLD, self.folder, 40):
            self.assertEqual(wrong, [])

    @pytest.mark.slow
    def test_at_most_places_of_a_call(self) -> None:
        for wrong in run_on_ranks(interrupted_anywhere, WORLD, self.folder, 600, timeout=1500.0):
            self.assertEqual(wrong, [])

    def test_in_a_load_and_a_save(self) -> None:
        run_on_ranks(interrupted_in_a_load_and_a_save, WORLD, self.folder)


if __name__ == "__main__":
    unittest.main()
