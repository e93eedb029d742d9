"""The rules by which a CheckpointManager keeps checkpoints, against what they say, in one process."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import unittest
from typing import Any
from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st
from kit.cases import examples
from kit.compare import check_refused, error_text
from parameterized import parameterized

from fsdp_optim.checkpoint.catalog.retention import (
    KeepRules,
    ManagedCheckpoint,
    left_behind,
    metric_of,
    name_of_step,
    superfluous,
)
from fsdp_optim.checkpoint.run import managed_run
from fsdp_optim.checkpoint.run.managed_run import MeetingInterval
from fsdp_optim.checkpoint.run.preemption import Signals

COUNTS = st.one_of(st.none(), st.integers(1, 4))
METRICS = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.5, -1.0]))
ENTRIES = st.lists(st.tuples(st.integers(0, 12), METRICS), max_size=8, unique_by=lambda pair: pair[0]).map(
    lambda pairs: [
        ManagedCheckpoint(name_of_step(step), step, (place + 1, step, 0, ""), -1, metric)
        for place, (step, metric) in enumerate(pairs)
    ]
)

FOUR = [ManagedCheckpoint(name_of_step(step), step, (step, step, 0, ""), step - 1) for step in range(1, 5)]


class RulesTest(unittest.TestCase):
    @examples(300)
    @given(ENTRIES, COUNTS, COUNTS, COUNTS, st.sampled_from(["min", "max"]))
    def test_a_checkpoint_stays_if_a_rule_keeps_it(
        self, entries: list[ManagedCheckpoint], last: int | None, every: int | None, best: int | None, which: Any
    ) -> None:
        kept = KeepRules(last, every, best, which).kept(entries)
        for entry in entries:
            num_newer = sum(other.order > entry.order for other in entries)
            by_last = num_newer < (last or 1)
            by_every = every is not None and entry.step % every == 0
            better = [
                other
                for other in entries
                if entry.metric is not None
                and other.metric is not None
                and (
                    (other.metric < entry.metric if which == "min" else other.metric > entry.metric)
                    or (other.metric == entry.metric and other.order > entry.order)
                )
            ]
            by_best = best is not None and entry.metric is not None and len(better) < best
            no_rule = (last, every, best) == (None, None, None)
            self.assertEqual(entry.name in kept, by_last or by_every or by_best or no_rule, (entry, entries))

    @examples(300)
    @given(ENTRIES, st.integers(1, 4), st.sets(st.integers(0, 12)))
    @example(FOUR, 3, {3})
    @example(FOUR, 2, {3, 4})
    def test_a_damaged_checkpoint_takes_the_place_of_no_good_one(
        self, entries: list[ManagedCheckpoint], last: int, damaged: set[int]
    ) -> None:
        """Those go that have `last` good ones after them, the new one among these; damaged ones before that stay."""
        new = ManagedCheckpoint(name_of_step(99), 99, (99, 99, 0, ""), -1, None)
        gone, num_good = set(), 1
        for entry in sorted(entries, key=lambda entry: entry.order, reverse=True):
            if num_good >= last:
                gone.add(entry.name)
            elif entry.step not in damaged:
                num_good += 1
        bad = {name_of_step(step) for step in damaged}
        removed = superfluous(KeepRules(last, None, None, "min"), entries, lambda name: name not in bad, new)
        self.assertEqual(removed, gone, (entries, last, damaged))

    @examples(300)
    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=14))
    def test_what_a_run_has_taken_back_is_left_behind(self, events: list[tuple[bool, int]]) -> None:
        """A run saves, and goes back to a checkpoint now and then. `line`: the steps that it has not taken back."""
        on_disk: dict[int, ManagedCheckpoint] = {}
        line: list[int] = []
        sequence, at = 0, -1
        for goes_back, number in events:
            if goes_back and line:
                at = line[number % len(line)]
                continue
            step, sequence = at + 1 + number % 4, sequence + 1
            on_disk[step] = ManagedCheckpoint(
                name_of_step(step), step, (sequence, step, 0, ""), at
            )  # replaces one of this step
            line = [saved_step for saved_step in line if saved_step <= at] + [step]
            at = step
            self.assertEqual(
                {name_of_step(saved_step) for saved_step in on_disk if saved_step not in line},
                left_behind(on_disk.values()),
                events,
            )

    @examples(300)
    @given(
        st.lists(st.tuples(st.booleans(), st.integers(0, 30)), min_size=8, max_size=14),
        st.one_of(st.just([]), st.lists(st.booleans(), max_size=14)),
    )
    def test_no_ancestor_is_left_behind_whatever_is_not_there(
        self, events: list[tuple[bool, int]], there: list[bool]
    ) -> None:
        """Branches stay, as where jobs are killed before they remove them, and any checkpoint may be unreadable for a moment."""
        history: list[ManagedCheckpoint] = []
        line: list[int] = []
        lines: dict[int, list[int]] = {}
        at = -1
        for goes_back, number in events:
            if goes_back and history:
                at = history[number % len(history)].step  # also to what had been left behind
                line = lines[at]
                continue
            used = {entry.step for entry in history}
            step = next(step for step in itertools.count(at + 1 + number % 4) if step not in used)
            history.append(ManagedCheckpoint(name_of_step(step), step, (len(history) + 1, step, 0, ""), at))
            line, at = [*line, step], step
            lines[step] = line
        readable = [entry for entry, can in zip(history, [*there, *([True] * len(history))], strict=False) if can]
        if not readable:
            return
        ancestors = {name_of_step(step) for step in lines[max(readable, key=lambda entry: entry.order).step]}
        behind = left_behind(readable)
        self.assertEqual(behind & ancestors, set(), (events, there))
        if len(readable) == len(history):
            self.assertEqual(behind, {entry.name for entry in history} - ancestors, events)

    def test_a_branch_that_a_kill_has_left_takes_nothing_with_it(self) -> None:
        """10, 20, 30, 40; back to 10; 15, killed; 15 cannot be read for a moment, so the run continues from 40 and saves 50."""
        afters = {10: -1, 20: 10, 30: 20, 40: 30, 15: 10, 50: 40}
        entries = [
            ManagedCheckpoint(name_of_step(step), step, (place, step, 0, ""), after)
            for place, (step, after) in enumerate(afters.items(), 1)
        ]
        self.assertEqual(left_behind(entries), {name_of_step(15)})
        without_40 = [entry for entry in entries if entry.step != 40]
        self.assertEqual(left_behind(without_40), set(), "30 or 15 may be where the run came from")

    @examples(100)
    @given(ENTRIES)
    def test_the_newest_stays_and_all_stay_without_a_rule(self, entries: list[ManagedCheckpoint]) -> None:
        self.assertEqual(KeepRules().kept(entries), {entry.name for entry in entries})
        newest = max(entries, key=lambda entry: entry.order, default=None)
        for rules in (KeepRules(1), KeepRules(None, 5), KeepRules(None, None, 2)):
            self.assertIn(newest.name if newest is not None else None, {*rules.kept(entries), None})

    @parameterized.expand(
        [
            (None, None),
            (3, 3.0),
            (float("nan"), None),
            (float("inf"), None),
            (True, 1.0),
            (10**400, None),
            (-(10**400), None),
            (__import__("numpy").float32(0.5), 0.5),
        ]
    )
    def test_a_metric(self, given: Any, wanted: float | None) -> None:
        self.assertEqual(metric_of(given), wanted)

    @parameterized.expand([("word", "high"), ("list", [1.0])])
    def test_a_metric_that_is_none(self, _: str, given: Any) -> None:
        check_refused("metric", [error_text(lambda: metric_of(given))], "StateError", "metric must be a number")

    def test_names_sort_as_steps(self) -> None:
        steps = [0, 5, 10, 999, 12345678]
        names = [name_of_step(step) for step in steps]
        self.assertEqual(names, sorted(names))
        self.assertEqual(names[1], "step-00000005")


class RhythmTest(unittest.TestCase):
    def seconds_between(self, num_ranks: int, seconds_per_step: float, num_steps: int = 100_000) -> tuple[float, int]:
        """How far meetings are apart in the end, and how many steps the first three of them are apart in all."""
        clock, step, gaps = itertools.count(), 0, []
        rhythm = MeetingInterval(num_ranks, None)
        with mock.patch.object(managed_run.time, "monotonic", side_effect=lambda: step * seconds_per_step):
            while step < num_steps and next(clock) < 200:
                gaps.append(rhythm.steps_to_next(step))
                step += gaps[-1]
        return gaps[-1] * seconds_per_step, sum(gaps[:3])

    @parameterized.expand(
        [(2, 0.001, 1.0), (2, 0.3, 0.9), (2, 60.0, 60.0), (64, 0.01, 3.2), (1024, 0.01, 10.0), (4096, 0.1, 10.0)]
    )
    def test_how_often_ranks_meet(self, num_ranks: int, seconds_per_step: float, wanted: float) -> None:
        seconds, first = self.seconds_between(num_ranks, seconds_per_step)
        self.assertAlmostEqual(seconds, wanted, delta=0.02)
        self.assertLessEqual(first, 1 + 2 + 4)

    def test_a_number_that_was_given_stays(self) -> None:
        rhythm = MeetingInterval(4, 7)
        self.assertEqual([rhythm.steps_to_next(step) for step in (1, 8, 15)], [7, 7, 7])
        self.assertEqual(MeetingInterval(1, 7).steps_to_next(1), 1, "one rank asks nobody")

    def test_a_clock_that_stands_still(self) -> None:
        rhythm = MeetingInterval(2, None)
        with mock.patch.object(managed_run.time, "monotonic", return_value=5.0):
            gaps = [rhythm.steps_to_next(step) for step in range(40)]
        self.assertEqual(gaps[:4], [1, 2, 4, 8])
        self.assertLessEqual(max(gaps), 1_000_000)


class SignalsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.calls: list[str] = []
        before = signal.signal(signal.SIGUSR1, lambda number, frame: self.calls.append("theirs"))
        self.addCleanup(signal.signal, signal.SIGUSR1, before)
        self.theirs = signal.getsignal(signal.SIGUSR1)

    def test_it_is_noted_and_the_previous_handler_is_called(self) -> None:
        signals = Signals([signal.SIGUSR1])
        self.assertFalse(signals.received)
        signal.raise_signal(signal.SIGUSR1)
        self.assertTrue(signals.received)
        self.assertEqual(self.calls, ["theirs"])
        signals.put_back()
        self.assertIs(signal.getsignal(signal.SIGUSR1), self.theirs)

    def test_a_signal_that_is_given_twice(self) -> None:
        signals = Signals([signal.SIGUSR1, int(signal.SIGUSR1)])
        signal.raise_signal(signal.SIGUSR1)
        self.assertEqual((signals.received, self.calls), (True, ["theirs"]))
        signals.put_back()
        self.assertIs(signal.getsignal(signal.SIGUSR1), self.theirs)

    def test_two_managers_closed_in_either_order(self) -> None:
        for first in (0, 1):
            both = [Signals([signal.SIGUSR1]), Signals([signal.SIGUSR1])]
            signal.raise_signal(signal.SIGUSR1)
            self.assertEqual([signals.received for signals in both], [True, True])
            both[first].put_back()
            both[0].received = both[1].received = False
            self.calls.clear()
            signal.raise_signal(signal.SIGUSR1)
            self.assertEqual([signals.received for signals in both], [first == 1, first == 0])
            self.assertEqual(self.calls, ["theirs"])
            both[1 - first].put_back()
            both[0].received = both[1].received = False
            signal.raise_signal(signal.SIGUSR1)
            self.assertEqual([signals.received for signals in both], [False, False])
            signal.signal(signal.SIGUSR1, self.theirs)

    def test_an_interrupt_is_noted_instead_of_raised(self) -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            signals = Signals([signal.SIGINT])
            signal.raise_signal(signal.SIGINT)
            self.assertTrue(signals.received)
            signals.put_back()
            self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)
        finally:
            signal.signal(signal.SIGINT, before)

    def test_a_forked_process_does_as_before(self) -> None:
        """A worker of a data loader is ended by SIGTERM: a handler that only notes it would let the loader wait for ever."""
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            signals = Signals([signal.SIGTERM])
            self.assertEqual(_exit_code_of_fork(signal.SIGTERM), -signal.SIGTERM)
            signals.put_back()
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_a_closed_manager_below_another_one(self) -> None:
        """The first one was closed first, so that its handler stayed below; the third one notes the signal for both."""
        for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            before = signal.signal(number, default)
            try:
                first, second = Signals([number]), Signals([number])
                first.put_back()
                second.put_back()
                third = Signals([number])
                signal.raise_signal(number)
                self.assertEqual([signals.received for signals in (first, second, third)], [False, False, True])
                third.put_back()
                self.assertEqual(_exit_code_of_fork(number), -number if default is signal.SIG_DFL else 3)
            finally:
                signal.signal(number, before)

    def test_a_fork_below_two_managers(self) -> None:
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            both = [Signals([signal.SIGTERM]), Signals([signal.SIGTERM])]
            self.assertEqual(_exit_code_of_fork(signal.SIGTERM), -signal.SIGTERM)
            for signals in reversed(both):
                signals.put_back()
            self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_a_handler_of_others_decides_about_the_default(self) -> None:
        """A handler that was installed on top, and calls the one before, gets no more than without a manager: no death."""
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            signals = Signals([signal.SIGTERM])
            below = signal.getsignal(signal.SIGTERM)
            assert callable(below)
            signal.signal(signal.SIGTERM, lambda number, frame: (self.calls.append("theirs"), below(number, frame)))
            signals.put_back()
            signal.raise_signal(signal.SIGTERM)
            self.assertEqual((self.calls, signals.received), (["theirs"], False))
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_another_thread_has_no_handlers(self) -> None:
        def make() -> None:
            with self.assertLogs("fsdp_optim", "WARNING") as logs:
                Signals([signal.SIGUSR1])
            self.calls.extend(logs.output)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        self.assertIn("SIGUSR1 will not be noticed: only the main thread", self.calls[0])
        self.assertIs(signal.getsignal(signal.SIGUSR1), self.theirs)


def _exit_code_of_fork(number: int) -> int:
    """The exit code of a forked process that gets a signal; 3 after a KeyboardInterrupt, 0 if nothing happens."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    unittest.main()
