"""Signs of life: who beats, and when a rank that looks takes another one for lost. Time is a number that the tests set."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

from kit.compare import refused
from kit.forked import LIBRARY, start
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from fsdp_optim.errors import StoreLostError
from fsdp_optim.machine import identity_of_process
from fsdp_optim.transport.job import JobStore, Pulse, Watch, lost_ranks, pulse
from fsdp_optim.transport.job.pulse import LOST_AFTER

LIMIT = 60.0  # seconds; reached by nothing but a failure
SOON = 10.0  # seconds in which a process that was killed is noticed, on a busy machine


class Clock:
    """The monotonic clock of a rank that looks."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def elsewhere(number: int) -> str:
    """A beat of a process on another machine."""
    return f"{number} other-boot 1 {os.getpid()} 1"


def wait_until(is_so: Any) -> None:
    """Return when something is so."""
    deadline = time.monotonic() + LIMIT
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError("it never is")
        time.sleep(0.01)


class InStore(unittest.TestCase):
    def setUp(self) -> None:
        memory = HashStore()
        self.store = JobStore(lambda: memory)

    @contextlib.contextmanager
    def every(self, seconds: float) -> Iterator[None]:
        with mock.patch.object(pulse, "_BEAT_EVERY", seconds):
            yield

    def pulse(self, rank: int = 1, seconds: float = 0.01, num_ranks: int = 4) -> Pulse:
        with self.every(seconds):
            made = Pulse(self.store, rank, num_ranks)
        self.addCleanup(self.end, made)
        return made

    @staticmethod
    def end(ending: Pulse) -> None:
        """End the thread of a pulse, which waits a while for further calls."""
        ending._every, number = 0.0, ending._number
        with ending.beating():
            with ending._changed:
                ending._changed.notify_all()
            wait_until(lambda: ending._number > number)
        wait_until(lambda: ending._thread is None)

    def beat_of(self, rank: int) -> bytes:
        return self.store.get(f"pulse/{rank}") if self.store.check([f"pulse/{rank}"]) else b""


class PulseTest(InStore):
    def setUp(self) -> None:
        super().setUp()
        self.before = self.all_threads()  # of other tests, whose pulses wait a while for further calls

    @staticmethod
    def all_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "fsdp_optim: pulse"}

    def threads(self) -> int:
        return len(self.all_threads() - self.before)

    def beats(self, rank: int) -> bool:
        """Whether a rank gives two more signs of life; False where it has no thread that could."""
        deadline, before = time.monotonic() + LIMIT, self.number_of(rank)
        while time.monotonic() < deadline and self.threads():
            if self.number_of(rank) > before + 1:
                return True
            time.sleep(0.005)
        return False

    def number_of(self, rank: int) -> int:
        return int((self.beat_of(rank) or b"0").split()[0])

    def test_it_introduces_itself_once(self) -> None:
        own_pulse = self.pulse()
        self.assertEqual(self.beat_of(1), b"")
        own_pulse.introduce()
        first = self.beat_of(1)
        self.assertEqual(first.decode().partition(" ")[2], identity_of_process())
        own_pulse.introduce()
        self.assertEqual(self.beat_of(1), first)

    def test_who_could_not_introduce_itself_does_it_again(self) -> None:
        own_pulse = self.pulse()
        with mock.patch.object(JobStore, "set", side_effect=StoreLostError("gone")):
            refused(own_pulse.introduce, StoreLostError, "gone")
        own_pulse.introduce()
        self.assertTrue(self.beat_of(1))

    def test_it_beats_while_it_is_held(self) -> None:
        own_pulse = self.pulse()
        self.assertFalse(self.beats(1))
        own_pulse.hold()
        with own_pulse.beating():
            self.assertTrue(self.beats(1))
        self.assertTrue(self.beats(1), "it was let go once, and held twice")
        own_pulse.let_go()
        wait_until(lambda: not self.threads())
        self.assertFalse(self.beats(1))
        with own_pulse.beating():
            self.assertTrue(self.beats(1))
        wait_until(lambda: not self.threads())

    def test_an_error_inside_lets_go(self) -> None:
        own_pulse = self.pulse()
        with contextlib.suppress(ZeroDivisionError), own_pulse.beating():
            1 / 0  # noqa: B018
        wait_until(lambda: not self.threads())

    def test_a_short_call_needs_no_beat(self) -> None:
        own_pulse = self.pulse(seconds=1000.0)
        for _ in range(3):
            with own_pulse.beating():
                self.assertEqual(self.threads(), 1)
        self.assertEqual(self.threads(), 1, "each call has started a thread")
        self.assertEqual(self.beat_of(1), b"")

    def test_calls_of_many_threads(self) -> None:
        own_pulse = self.pulse()

        def call() -> None:
            for _ in range(50):
                with own_pulse.beating():
                    pass

        threads = [threading.Thread(target=call) for _ in range(8)]
        with own_pulse.beating():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT)
            self.assertEqual(self.threads(), 1)
            self.assertTrue(self.beats(1))
        wait_until(lambda: not self.threads())

    def test_it_goes_on_when_the_store_is_there_again(self) -> None:
        own_pulse, fails = self.pulse(), threading.Event()
        real = JobStore.set

        def failing(store: JobStore, key: str, value: Any) -> None:
            if fails.is_set():
                failed.append(True)
                raise StoreLostError("gone")
            real(store, key, value)

        failed: list[bool] = []
        with mock.patch.object(JobStore, "set", failing), own_pulse.beating():
            self.assertTrue(self.beats(1))
            fails.set()
            wait_until(lambda: len(failed) > 1)
            fails.clear()
            self.assertTrue(self.beats(1))
        wait_until(lambda: not self.threads())

    def test_many_ranks_beat_less_often(self) -> None:
        self.assertEqual(Pulse(self.store, 0, 4)._every, Pulse(self.store, 0, 100)._every)
        self.assertGreater(Pulse(self.store, 0, 10_000)._every, Pulse(self.store, 0, 100)._every)
        self.assertLess(Pulse(self.store, 0, 10_000)._every, LOST_AFTER / 1.9)


class WatchTest(InStore):
    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        patch = mock.patch.object(pulse, "time", self.clock)
        patch.start()
        self.addCleanup(patch.stop)

    def set(self, rank: int, text: str) -> None:
        self.store.set(f"pulse/{rank}", text)

    def after(self, watch: Watch, seconds: float, every: float = 0.5) -> dict[int, str]:
        """What a rank finds at the end that has looked again and again for some seconds."""
        lost: dict[int, str] = {}
        for _ in range(int(seconds / every)):
            self.clock.now += every
            lost = watch.look()
        return lost

    def test_silence(self) -> None:
        self.set(1, elsewhere(1))
        self.set(2, elsewhere(1))
        watch = Watch(self.store, [1, 2], beats=True)
        self.assertEqual(watch.look(), {})
        for number in range(2, 40):
            self.set(2, elsewhere(number))
            lost = self.after(watch, 0.5)
            self.assertEqual(lost, {})
        lost = self.after(watch, LOST_AFTER - 19.0 + 0.5)
        self.assertEqual(list(lost), [1])
        self.assertIn("no sign of life for 20 s", lost[1])

    def test_a_beat_ends_the_silence(self) -> None:
        self.set(1, elsewhere(1))
        watch = Watch(self.store, [1], beats=True)
        self.assertEqual(self.after(watch, LOST_AFTER - 1), {})
        self.set(1, elsewhere(2))
        self.assertEqual(self.after(watch, LOST_AFTER), {})
        self.assertEqual(list(self.after(watch, 1.0)), [1])
        self.set(1, elsewhere(3))
        self.assertEqual(self.after(watch, 0.5), {}, "it is alive, whatever was thought of it")

    def test_a_watcher_that_was_stopped_itself(self) -> None:
        """It has not looked meanwhile, so that it has seen nobody be silent."""
        self.set(1, elsewhere(1))
        watch = Watch(self.store, [1], beats=True)
        self.assertEqual(self.after(watch, 1.0), {})
        for _ in range(4):
            self.clock.now += 3600.0
            self.assertEqual(watch.look(), {})

    def test_who_is_in_no_call_does_not_beat(self) -> None:
        self.set(1, elsewhere(1))
        watch = Watch(self.store, [1], beats=False)
        self.assertEqual(self.after(watch, 100 * LOST_AFTER, every=2.0), {})

    def test_who_was_never_there_is_not_lost(self) -> None:
        """It starts later; others are seen all the same."""
        self.set(2, elsewhere(1))
        watch = Watch(self.store, [1, 2, 3], beats=True)
        self.assertEqual(list(self.after(watch, 2 * LOST_AFTER)), [2])
        self.assertEqual(Watch(self.store, [7], beats=True).look(), {})
        self.assertEqual(Watch(self.store, [], beats=True).look(), {})

    def test_a_process_that_has_ended_is_seen_at_once(self) -> None:
        words = identity_of_process().split()
        ended = " ".join([*words[:3], "1"])
        for beats in (True, False):
            self.set(1, f"1 {ended}")
            self.assertEqual(Watch(self.store, [1], beats=beats).look(), {1: "its process has ended"})
        self.set(1, f"1 {' '.join(words)}")
        self.assertEqual(Watch(self.store, [1], beats=True).look(), {})

    def test_on_a_system_without_proc(self) -> None:
        self.set(1, "1 ")
        watch = Watch(self.store, [1], beats=True)
        self.assertEqual(self.after(watch, LOST_AFTER - 1), {})
        self.assertEqual(list(self.after(watch, 2.0)), [1])

    def test_a_store_that_is_gone(self) -> None:
        self.set(1, elsewhere(1))
        watch = Watch(self.store, [1], beats=True)
        with mock.patch.object(JobStore, "_call", side_effect=StoreLostError("gone")):
            refused(watch.look, StoreLostError, "gone")
        self.assertEqual(watch.look(), {})


BEATING = """
import signal, sys
from datetime import timedelta
from torch.distributed import TCPStore
from fsdp_optim.transport.job import JobStore
from fsdp_optim.transport.job import Pulse
pulse = Pulse(JobStore(lambda: TCPStore("127.0.0.1", {port}, is_master=False, wait_for_workers=False)), 1, 2)
pulse.introduce()
with pulse.beating():
    signal.pause()
"""


class KilledTest(unittest.TestCase):
    def test_a_killed_process_is_noticed_within_seconds(self) -> None:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = JobStore(lambda: server)
        process = start(BEATING.format(port=server.port), preload=LIBRARY)
        try:
            wait_until(lambda: store.check(["pulse/1"]))
            watch = Watch(store, [1], beats=True)
            self.assertEqual(watch.look(), {})
            os.kill(process.pid, signal.SIGKILL)
            begun = time.monotonic()
            while not watch.look():
                self.assertLess(time.monotonic() - begun, SOON)
                time.sleep(0.02)
            self.assertEqual(watch.look(), {1: "its process has ended"})
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait(LIMIT)


class TextTest(unittest.TestCase):
    def test_lost_ranks_as_text(self) -> None:
        self.assertEqual(lost_ranks({2: "a"}), "rank 2: a")
        self.assertEqual(lost_ranks({5: "b", 2: "a", 4: "b"}), "rank 2: a; ranks 4, 5: b")
        many = lost_ranks(dict.fromkeys(range(1000), "a"))
        self.assertTrue(many.startswith("ranks 0, 1, 2"))
        self.assertTrue(many.endswith("and 936 more: a"), many)


if __name__ == "__main__":
    unittest.main()
