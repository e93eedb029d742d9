"""The tree in which ranks meet: what a meeting costs for many ranks, and failing, missing and lost ranks at each position.

Costs are counted in a store in simulated time (`kit.simulated_store`). Failures are tried on threads that share a store in
memory, in trees with one, two and three ranks below each rank, so that a few ranks have a root, inner positions and leaves.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any
from unittest import mock

from kit.simulated_store import Costs, Simulation, StoreWorld
from parameterized import parameterized
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fsdp_optim.transport import long_wait, meeting
from fsdp_optim.transport.agree import agree, all_equal, all_gather_bytes
from fsdp_optim.transport.stored_verdict import TreeSummary, joined, ranks_in, runs_of
from fsdp_optim.transport.tree import Tree

SIZES = (2, 8, 64, 512, 4096)
FANOUT = meeting._FANOUT
LONG = 60.0  # seconds; reached by nothing but a failure
TREES = [(fanout, size) for fanout in (1, 2, 3) for size in (1, 2, 3, 5, 8)]


def levels(size: int) -> int:
    """The number of levels of a tree."""
    return 1 + math.ceil(math.log(size * (FANOUT - 1) + 1, FANOUT))


class CostsTest(unittest.TestCase):
    """No clock: messages and bytes are counted, and simulated time is the same in each run."""

    def test_messages_and_bytes_of_a_rank_grow_with_the_logarithm_of_the_ranks(self) -> None:
        for size in SIZES:
            simulation = Simulation(size, Costs().times(2))
            simulation.run(lambda world: agree(world.all(), "the first"))
            report = simulation.run(lambda world: agree(world.all(), "a step"))
            with self.subTest(size=size):
                self.assertLessEqual(max(usage.num_messages for usage in report.usage), 5 * levels(size))
                self.assertLessEqual(max(usage.sent_nbytes for usage in report.usage), 8000 * levels(size))
                self.assertLessEqual(max(usage.received_nbytes for usage in report.usage), 8000 * levels(size))
                leaf = report.usage[-1]
                self.assertEqual(dict(leaf.messages), {"multi_set": 1, "wait": 1, "compare_set": 1})
                self.assertLessEqual(sum(usage.num_messages for usage in report.usage), 3.2 * size + 8)
                if size == SIZES[-1]:
                    self.assertLess(report.seconds, 0.5)

    def test_what_all_ranks_tell_alike_or_as_flags_costs_as_much_as_nothing(self) -> None:
        for program in (
            lambda world: all_gather_bytes(world.all(), "alike", b"the same on all" * 10).content_of(world.size - 1),
            lambda world: all_gather_bytes(world.all(), "flags", b"", flags=2 if world.rank % 2 else 0).flags,
            lambda world: all_equal(world.all(), "differing", b"%d" % world.rank),
            lambda world: all_gather_bytes(world.all(), "of one", b"next" * (not world.rank)).content_of(0),
        ):
            costs = []
            for size in (64, 512):
                simulation = Simulation(size)
                simulation.run(lambda world: agree(world.all(), "the first"))
                costs.append(simulation.run(program).usage[-1])
            self.assertEqual(costs[0].messages, costs[1].messages)
            self.assertLess(costs[1].received_nbytes, costs[0].received_nbytes + 40)

    def test_contents_of_all_ranks_take_a_message_for_each_part_of_the_tree(self) -> None:
        size = 512
        simulation = Simulation(size)
        simulation.run(lambda world: agree(world.all(), "the first"))

        def told(world: Any) -> list[bytes]:
            result = all_gather_bytes(world.all(), "told", b"%d " % world.rank * 200)
            return [result.content_of(rank) for rank in range(size)] if world.rank == 0 else []

        report = simulation.run(told)
        self.assertEqual(report.results[0], [b"%d " % rank * 200 for rank in range(size)])
        self.assertLess(report.usage[0].num_messages, 60)

    def test_many_meetings_leave_as_many_keys_as_a_few(self) -> None:
        simulation = Simulation(70)

        def several(world: Any) -> None:
            for index in range(3):
                agree(world.all(), "one")
                all_gather_bytes(world.all(), "two", bytes([world.rank]) * 20_000 * index)
            for _ in range(2):  # what a meeting has left, the next one takes away
                agree(world.all(), "last")

        reports = [simulation.run(several) for _ in range(3)]
        self.assertLessEqual(len({report.num_keys for report in reports[1:]}), 1)


class ShapeTest(unittest.TestCase):
    @parameterized.expand([(1, 7), (2, 1), (2, 2), (2, 3), (2, 9), (3, 4), (3, 14), (64, 65), (64, 66), (64, 4096)])
    def test_each_position_has_one_above(self, fanout: int, size: int) -> None:
        tree = Tree(size, fanout)
        above = {below: position for position in range(size) for below in tree.below(position)}
        self.assertEqual(above, {position: tree.above(position) for position in range(1, size)})
        self.assertEqual(list(tree.inner), [position for position in range(size) if tree.below(position)])
        self.assertLessEqual(max(len(tree.below(position)) for position in range(size)), fanout)

    @parameterized.expand([([],), ([3],), ([0, 1, 2],), ([5, 1, 2, 9, 8],)])
    def test_runs_are_the_ranks(self, ranks: list[int]) -> None:
        self.assertEqual(list(ranks_in(runs_of(ranks))), sorted(ranks))
        halves = [runs_of(ranks[::2]), runs_of(ranks[1::2])]
        self.assertEqual(joined(halves), runs_of(ranks))


Result = tuple[str, str]


def told(call: Callable[[], object]) -> Result:
    """The class and the text of the error that a call raises, or of its result."""
    try:
        return "", repr(call())
    except Exception as error:
        return type(error).__name__, str(error)


class OnThreads(unittest.TestCase):
    """Programs on ranks that are threads, in a tree with few ranks below each."""

    def on(self, fanout: int, size: int, program: Callable[[StoreWorld], Any], quiet: float = 5.0) -> list[Any]:
        shared = HashStore()
        worlds = [StoreWorld(lambda: shared, rank, size) for rank in range(size)]
        ranks: list[Future[Any]] = [Future() for _ in worlds]

        def body(world: StoreWorld) -> None:
            try:
                ranks[world.rank].set_result(program(world))
            except Exception as error:
                ranks[world.rank].set_exception(error)

        with (
            mock.patch.object(meeting, "_FANOUT", fanout),
            mock.patch.object(meeting, "_QUIET", quiet),
            mock.patch.object(long_wait, "_ASK_EVERY", 0.02),
        ):
            for world in worlds:
                threading.Thread(target=body, args=(world,), daemon=True).start()
            wait(ranks, 2 * LONG, FIRST_EXCEPTION)
            failed = [rank for rank in ranks if rank.done() and rank.exception()]
            self.assertTrue(failed or all(rank.done() for rank in ranks), "a rank hangs")
            return [rank.result() for rank in failed or ranks]  # raises the error of a rank that failed

    def check_alike(self, results: Sequence[Result], kind: str, *words: str) -> None:
        self.assertEqual({name for name, _ in results}, {kind}, results)
        self.assertEqual(len({text for _, text in results}), 1, results)
        for word in words:
            self.assertIn(word, results[0][1])


class AgreeingTest(OnThreads):
    @parameterized.expand(TREES)
    def test_all_ranks_read_what_all_have_brought(self, fanout: int, size: int) -> None:
        def program(world: StoreWorld) -> list[Any]:
            seen: list[Any] = []
            for nbytes in (0, 3, 9_000, 40_000):
                content = bytes([world.rank + 1]) * nbytes
                result = all_gather_bytes(world.all(), "told", content, b"%d" % nbytes, flags=1 << world.rank)
                wanted = [bytes([rank + 1]) * nbytes for rank in range(world.size)]
                seen += [result.all_equal, result.flags, [result.content_of(r) for r in range(world.size)] == wanted]
            seen.append(all_equal(world.all(), "compared", b"odd" if world.rank == world.size - 1 else b"same"))
            return seen

        seen = self.on(fanout, size, program)
        self.assertEqual(seen, [[True, 2**size - 1, True] * 4 + [size == 1]] * size)

    @parameterized.expand([(fanout, size) for fanout, size in TREES if size > 1])
    def test_whichever_rank_is_the_slowest(self, fanout: int, size: int) -> None:
        came: list[int] = []

        def program(world: StoreWorld) -> bool:
            waited = True
            for slowest in range(size):
                if world.rank == slowest:
                    time.sleep(0.05)
                    came.append(slowest)
                agree(world.all(), f"round {slowest}")
                waited = waited and slowest in came
            return waited

        self.assertEqual(self.on(fanout, size, program), [True] * size)


class FailingTest(OnThreads):
    @parameterized.expand([(fanout, size) for fanout, size in TREES if size > 1])
    def test_a_failing_rank_at_each_position(self, fanout: int, size: int) -> None:
        def program(world: StoreWorld) -> list[Result]:
            seen = []
            for bad in range(size):
                error = OSError("no space left") if world.rank == bad else None
                seen.append(told(lambda: agree(world.all(), "failing", error)))  # noqa: B023
                agree(world.all(), "afterwards")
            return seen

        by_rank = self.on(fanout, size, program)
        for bad in range(size):
            self.check_alike([seen[bad] for seen in by_rank], "RankError", f"rank {bad}: OSError: no space left")

    @parameterized.expand([(fanout, size) for fanout, size in TREES if size > 1])
    def test_a_rank_at_another_step_at_each_position(self, fanout: int, size: int) -> None:
        def program(world: StoreWorld) -> list[Result]:
            seen = []
            for odd in range(size):
                step = "other" if world.rank == odd else "usual"
                seen.append(told(lambda: agree(world.all(), step)))  # noqa: B023
                agree(world.all(), "afterwards")
            return seen

        by_rank = self.on(fanout, size, program)
        for odd in range(size):
            self.check_alike([seen[odd] for seen in by_rank], "RankError", "a call: other", "a call: usual")

    @parameterized.expand([(1, 4), (2, 7), (3, 6)])
    def test_a_broken_connection_at_each_position_is_heard_of_at_once(self, fanout: int, size: int) -> None:
        """Each other rank in turn comes when all have raised, without an error of its own."""

        def program(world: StoreWorld) -> list[Result]:
            seen = []
            for bad in range(size):
                for late in range(size):
                    if late == bad:
                        continue
                    if world.rank == late:
                        while len(raised[bad, late]) < size - 1:
                            time.sleep(0.001)
                    error = OSError("broken") if world.rank == bad else None
                    seen.append(told(lambda: agree(world.all(), "fatal", error, fatal=error is not None)))  # noqa: B023
                    raised[bad, late].append(world.rank)
                    agree(world.all(), "afterwards")
            return seen

        raised: dict[tuple[int, int], list[int]] = {(bad, late): [] for bad in range(size) for late in range(size)}
        by_rank = self.on(fanout, size, program, quiet=LONG)
        cases = [(bad, late) for bad in range(size) for late in range(size) if bad != late]
        for index, (bad, _) in enumerate(cases):
            self.check_alike([seen[index] for seen in by_rank], "RankError", f"rank {bad}: OSError: broken")


class MissingTest(OnThreads):
    def setUp(self) -> None:
        self.last: dict[int, int] = {}  # by rank, the number of the last meeting to which it has come
        publish = meeting.Meeting._publish

        def noted(entered: meeting.Meeting, statement: meeting.Statement) -> TreeSummary:
            summary = publish(entered, statement)
            self.last[entered.group.rank] = entered.number
            return summary

        patched = mock.patch.object(meeting.Meeting, "_publish", noted)
        patched.start()
        self.addCleanup(patched.stop)

    def wait_until_next(self, raised: dict[int, int], num_ranks: int) -> None:
        """Wait until as many ranks have raised, and all of these have come to a meeting after the one in which they have.

        `raised`: by rank, the number of the meeting in which it has raised.
        """
        while len(raised) < num_ranks or any(self.last[rank] == number for rank, number in list(raised.items())):
            time.sleep(0.001)

    @parameterized.expand([(fanout, size) for fanout, size in TREES if size > 1])
    def test_a_missing_rank_at_each_position_is_named_and_can_join(self, fanout: int, size: int) -> None:
        def program(world: StoreWorld) -> list[Result]:
            seen = []
            for absent in range(size):
                if world.rank == absent:
                    self.wait_until_next(raised[absent], size - 1)
                else:
                    seen.append(told(lambda: agree(world.all(0.5), "alone")))
                    raised[absent][world.rank] = self.last[world.rank]
                agree(world.all(), "together")
                agree(world.all(), "still")
            return seen

        raised: list[dict[int, int]] = [{} for _ in range(size)]
        by_rank = self.on(fanout, size, program)
        for absent in range(size):
            seen = [results[absent - (absent > rank)] for rank, results in enumerate(by_rank) if rank != absent]
            words = f"rank {absent} did not arrive within 0.5 s; {size - 1} of the ranks {list(range(size))} did"
            self.check_alike(seen, "RankTimeoutError", words)

    @parameterized.expand([(1, 4), (2, 7)])
    def test_all_but_one_are_missing(self, fanout: int, size: int) -> None:
        def program(world: StoreWorld) -> list[Result]:
            seen = []
            for only in range(size):
                if world.rank == only:
                    seen.append(told(lambda: agree(world.all(0.6), "alone")))
                    raised[only][only] = self.last[only]
                else:
                    self.wait_until_next(raised[only], 1)
                agree(world.all(), "together")
            return seen

        raised: list[dict[int, int]] = [{} for _ in range(size)]
        for only, [(kind, text)] in enumerate(self.on(fanout, size, program)):
            self.assertEqual(kind, "RankTimeoutError")
            for rank in range(size):
                self.assertEqual(f"rank {rank}," in text or f"rank {rank} did" in text, rank != only, text)

    @parameterized.expand([(1, 3), (2, 7)])
    def test_a_rank_that_is_warned_about_at_each_position_is_welcome(self, fanout: int, size: int) -> None:
        def program(world: StoreWorld) -> None:
            for late in range(size):
                agree(world.all(), "before")
                begun = time.monotonic()
                while world.rank == late and len(warnings_of(late)) < size - 1 and time.monotonic() < begun + LONG:
                    time.sleep(0.001)
                agree(world.all(), f"with {late}")

        def warnings_of(late: int) -> list[str]:
            """Those that name the rank; other ranks too if these took long to come to the meeting."""
            return [
                line for line in logs.output if re.search(rf"with {late}: .*\brank {late}\b.* did not arrive", line)
            ]

        with mock.patch.object(long_wait, "_WARN_AFTER", 0.2), self.assertLogs("fsdp_optim", "WARNING") as logs:
            self.on(fanout, size, program, quiet=0.05)
        for late in range(size):
            self.assertEqual(len(warnings_of(late)), size - 1, logs.output)


class LostTest(OnThreads):
    """A rank whose process has ended: before it has come, or when it has come and has told nothing."""

    def setUp(self) -> None:
        program = "from fsdp_optim.machine import identity_of_process as name; print(name())"
        self.ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

    @parameterized.expand([(1, 3), (2, 7), (3, 4)])
    def test_at_each_position(self, fanout: int, size: int) -> None:
        for lost in range(size):
            for comes in (False, True):
                with self.subTest(lost=lost, comes=comes):
                    results = self.on(fanout, size, self.program(lost, comes=comes), quiet=0.1)
                    seen = [result for rank, result in enumerate(results) if rank != lost]
                    if comes and lost and not Tree(size, fanout).below(lost):  # a leaf tells all when it comes
                        self.assertEqual(seen, [("", "None")] * (size - 1))
                    else:
                        self.check_alike(seen, "RankError", f"rank {lost}: its process has ended")

    @parameterized.expand([(1, 3), (2, 7)])
    def test_a_rank_that_was_taken_for_lost_raises_what_the_others_have_raised(self, fanout: int, size: int) -> None:
        def program(world: StoreWorld) -> Result:
            is_lost = world.rank == lost
            result = self.program(lost, comes=False)(world)
            if is_lost:
                while len(raised) < size - 1:
                    time.sleep(0.001)
                result = told(lambda: agree(world.all(), "after"))
            raised.append(world.rank)
            return result

        for lost in range(size):
            raised: list[int] = []
            self.check_alike(
                self.on(fanout, size, program, quiet=0.1), "RankError", f"rank {lost}: its process has ended"
            )

    def program(self, lost: int, *, comes: bool) -> Callable[[StoreWorld], Result]:
        def program(world: StoreWorld) -> Result:
            agree(world.all(), "before")
            if world.rank != lost:
                return told(lambda: agree(world.all(), "after"))
            if comes:
                entered = meeting.Meeting.enter(world.all(), world.calls)
                entered._publish(meeting.Statement("a call: after"))
            world.board.set(f"pulse/{lost}", f"2 {self.ended.stdout.strip()}")
            return "", ""

        return program


if __name__ == "__main__":
    unittest.main()
