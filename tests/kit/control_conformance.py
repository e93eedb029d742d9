"""A test class for every Control; `fsdp_optim.transport.base` has the protocol.

    class TestMyControl(ControlConformance, unittest.TestCase):
        def run_on(self, fn, world_size, *args):       # a module-level function, on ranks of a world with the control
            return run_on_ranks(in_my_world, world_size, fn, *args)

`fn` asks `fsdp_optim.transport.world.world_here()` for its rank and its control.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fsdp_optim import RankError, StateError
from fsdp_optim.testing.mix_in import MixIn
from fsdp_optim.transport import RankGroup, world_here
from fsdp_optim.transport.agree import agree, all_equal, all_gather_bytes
from kit.compare import error_text

Error = tuple[str, str]
"""The (class, message) of an error; ("", "") if none was raised."""

WORLD = 3
_LONG = 60.0  # seconds; a rank that waits for it hangs
_SHORT = 1.0
_PAUSE = 0.8  # seconds; long enough for another rank to come to the meeting that it is going to
_PLACE = "rank {} has raised"
_LARGE = 5_000_000  # bytes of what a rank tells


def _group(call: str = "a call", ranks: Sequence[int] | None = None, timeout: float = _LONG) -> RankGroup:
    world = world_here()
    return world.group(call, range(world.size) if ranks is None else ranks, timeout=timeout)


def _waits_for_all() -> list[bool]:
    """Whether the slowest rank had arrived when this rank continued, with each rank in turn as the slowest."""
    world, waited = world_here(), []
    for slowest in range(world.size):
        if world.rank == slowest:
            time.sleep(0.1)
            world.control.claim("the slowest", f"came {slowest}")
        agree(_group(), f"round {slowest}")
        waited.append(world.control.claim("another", f"came {slowest}") == "the slowest")
        agree(_group(), "seen")
    if world.rank == 0:
        world.control.release("the slowest", f"came {slowest}")
    return waited


def _compares() -> list[bool]:
    """Compare equal contents; then contents that differ on each rank in turn."""
    world = world_here()
    contents = [[b"same"] * world.size, [b""] * world.size]
    contents += [[b"other" if rank == odd else b"same" for rank in range(world.size)] for odd in range(world.size)]
    return [all_equal(_group(), "contents", of_ranks[world.rank]) for of_ranks in contents]


def _tells() -> list[list[bytes]]:
    """The contents that this rank reads of every rank, for several lengths."""
    world, contents = world_here(), []
    for nbytes in (0, 1, 1000, _LARGE):
        content = bytes([world.rank + 1]) * (nbytes * (world.rank + 1) // world.size)
        result = all_gather_bytes(_group(), "contents", content, compared=b"%d" % world.rank)
        contents.append([result.content_of(rank) for rank in range(world.size)])
    return contents


def _fails_on(ranks: Sequence[int], kinds: Sequence[type[Exception]], texts: Sequence[str], fatal: bool) -> Error:
    """Some ranks come with an error."""
    world = world_here()
    failure = dict(zip(ranks, zip(kinds, texts, strict=True), strict=True)).get(world.rank)
    error = failure[0](failure[1]) if failure is not None else None
    result = error_text(lambda: agree(_group(), "failing", error, fatal=fatal and error is not None))
    agree(_group(), "afterwards")
    return result


def _each_rank_fails() -> list[Error]:
    return [_fails_on([rank], [OSError], ["no space left"], False) for rank in range(world_here().size)]


def _several_fail() -> list[Error]:
    size = world_here().size
    return [
        _fails_on([0, 2], [StateError, StateError], ["bad state", "bad state"], False),
        _fails_on([0, 1], [StateError, OSError], ["bad state", "no space left"], False),
        _fails_on(range(size), [StateError] * size, ["bad state"] * size, False),
    ]


def _fails_fatally() -> list[Error]:
    """The last rank breaks its connection, and the first one never comes to that meeting."""
    world = world_here()
    if world.rank == 0:
        time.sleep(0.5)
        return [error_text(lambda: agree(_group(), "fatal"))]
    error = RankError("lost the connection") if world.rank == world.size - 1 else None
    return [error_text(lambda: agree(_group(timeout=_LONG), "fatal", error, fatal=error is not None))]


def _one_does_not_come(absent: int) -> list[Error]:
    """One rank skips a meeting; then it comes to that one, while the others are in the next."""
    world = world_here()
    errors = [("", "")]
    if world.rank != absent:
        errors = [error_text(lambda: agree(_group(timeout=_SHORT), "alone"))]
        _tell_that_it_has_raised()
    else:
        _wait_until_raised(rank for rank in range(world.size) if rank != absent)
        time.sleep(2 * _PAUSE)
    errors += [error_text(lambda: agree(_group(), "together")), error_text(lambda: agree(_group(), "still"))]
    _tell_nothing()
    return errors


def _comes_too_late() -> list[Error]:
    """The last rank comes when the others have given up, and have gone nowhere else."""
    world = world_here()
    last = world.size - 1
    agree(_group(), "all are here")
    if world.rank == last:
        _wait_until_raised(range(last))
    error = error_text(lambda: agree(_group(timeout=_SHORT), "alone"))
    _tell_that_it_has_raised()
    _wait_until_raised([last])
    agree(_group(), "afterwards")
    _tell_nothing()
    return [error]


def _elsewhere() -> list[Error]:
    """Each rank in turn is at another step; then in another call."""
    world, errors = world_here(), []
    for odd in range(world.size):
        step = "other" if world.rank == odd else "one"
        errors.append(error_text(lambda: agree(_group(), step)))  # noqa: B023
        call = "load" if world.rank == odd else "save"
        errors.append(error_text(lambda: agree(_group(call), "begun")))  # noqa: B023
        agree(_group(), "afterwards")
    return errors


def _wait_for_each_other(last: int) -> Error:
    """Ranks 0 and 1 come to a meeting of all, rank 2 to one of ranks 0 and 2; rank `last` comes after the others."""
    world = world_here()
    ranks = (0, 2) if world.rank == 2 else range(world.size)
    time.sleep(0.1 if world.rank == last else 0.0)
    error = error_text(lambda: agree(_group("gather", ranks), "read"))
    agree(_group(), "afterwards")
    return error


def _comes_after_a_deadlock() -> Error:
    """Ranks 0 and 1 wait for each other in two meetings; rank 2 comes to that of all ranks when they have raised."""
    world = world_here()
    if world.rank == 2:
        _wait_until_raised([0])
    ranks = (0, 1) if world.rank == 1 else range(world.size)
    error = error_text(lambda: agree(_group("gather", ranks), "read"))
    _tell_that_it_has_raised()
    _wait_until_raised([2])
    agree(_group(), "afterwards")
    _tell_nothing()
    return error


# Outside of any meeting, a rank tells by a place that it holds that it has raised.


def _tell_that_it_has_raised() -> None:
    _claim_until_it_is_held(f"rank {world_here().rank}", world_here().rank)


def _tell_nothing() -> None:
    world = world_here()
    world.control.release(f"rank {world.rank}", _PLACE.format(world.rank))


def _wait_until_raised(ranks: Iterable[int]) -> None:
    for rank in ranks:
        _claim_until_it_is_held(f"waits {world_here().rank}", rank)


def _claim_until_it_is_held(who: str, rank: int) -> None:
    """Claim the place of a rank again and again, until that rank holds it; ranks that wait give it back at once."""
    control, place = world_here().control, _PLACE.format(rank)
    while (holder := control.claim(who, place)) != f"rank {rank}":
        if holder == who:
            control.release(who, place)
        time.sleep(0.01)


def _some_of_the_ranks() -> list[list[bytes]]:
    """Groups that overlap, one after the other, and two apart at the same time."""
    world, contents = world_here(), []
    for ranks in ((0, 1), (1, 2), (0, 2), (0,), (1,), (2,), (0, 1, 2)):
        if world.rank in ranks:
            result = all_gather_bytes(_group(ranks=ranks), "some", b"%d" % world.rank)
            contents.append([result.content_of(rank) for rank in ranks])
    return contents


def _claims() -> list[str]:
    """The owner of each place, after each step of one rank."""
    world = world_here()
    control, owners = world.control, []
    for rank, who, place in (
        (0, "0", "a"),
        (1, "1", "a"),
        (1, "1", "b"),
        (0, "0", "a"),
        (0, "0", "c"),
        (1, "1", "a"),
        (2, "2", "b"),
    ):
        agree(_group(), "one after the other")
        if world.rank == rank:
            owners.append(control.claim(who, place))
    agree(_group(), "claimed")
    if world.rank in (0, 1):
        control.release(str(world.rank), "c" if world.rank == 0 else "a")
    agree(_group(), "released")
    if world.rank == 2:
        owners += [control.claim("2", "a"), control.claim("2", "c")]
        control.release("2", "c")
    return owners


def _leaves(left: Callable[[], int], rounds: Sequence[int]) -> list[int]:
    """The leftovers of a few rounds of meetings of all kinds, and of more rounds."""
    world, counts = world_here(), []
    for number in rounds:
        for index in range(number):
            agree(_group(), "one")
            all_gather_bytes(_group(), "two", b"content" * index, compared=b"%d" % world.rank)
            for num in (10_000, 40_000):  # too long for a verdict: of all ranks together, and of each
                all_gather_bytes(_group(), f"{num} bytes", b"%d" % world.rank * num)
            error_text(lambda: agree(_group(), "three", OSError("no") if world.rank == 1 else None))
            error_text(lambda: agree(_group(), "four" if world.rank else "five"))
        for _ in range(2):  # whatever a meeting has left, the next one takes away
            agree(_group(), "last")
        if world.rank == 0:
            time.sleep(_PAUSE)  # the others wait in the next meeting by then
            counts.append(left())
        agree(_group(), "counted")
    return counts


def no_things() -> int:
    """Return 0, for a control that cannot count leftovers of meetings."""
    return 0


class ControlConformance(MixIn):
    """A mix-in for a `unittest.TestCase`: the promises of a Control, one per test.

    `left` is a module-level function that counts what meetings have left: keys in a store, say.
    """

    left: Callable[[], int] = staticmethod(no_things)

    def run_on(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Run a function on ranks of a new world with the control; the results by rank."""
        raise NotImplementedError

    def _check_alike(self, errors: Sequence[Error], kind: str, *words: str) -> None:
        self._case.assertEqual({name for name, _ in errors}, {kind}, errors)
        self._case.assertEqual(len({text for _, text in errors}), 1, errors)
        for word in words:
            self._case.assertIn(word, errors[0][1])

    def test_nobody_goes_on_before_all_have_come(self) -> None:
        """No rank continues before the slowest one has come, whichever rank that is."""
        for waited in self.run_on(_waits_for_all, WORLD):
            self._case.assertEqual(waited, [True] * WORLD)

    def test_whether_all_say_the_same(self) -> None:
        """All ranks get the same answer, whichever rank differs."""
        for answers in self.run_on(_compares, WORLD):
            self._case.assertEqual(answers, [True, True] + [False] * WORLD)

    def test_everyone_reads_what_everyone_told(self) -> None:
        """Every rank reads the contents of every rank, of all lengths."""
        wanted = [
            [bytes([rank + 1]) * (nbytes * (rank + 1) // WORLD) for rank in range(WORLD)]
            for nbytes in (0, 1, 1000, _LARGE)
        ]
        for contents in self.run_on(_tells, WORLD):
            self._case.assertTrue(contents == wanted, "a rank read something else")

    def test_a_failure_on_each_rank_in_turn(self) -> None:
        """An error is raised on all ranks alike, and names its rank; the next meeting works."""
        by_rank = self.run_on(_each_rank_fails, WORLD)
        for rank in range(WORLD):
            self._check_alike([errors[rank] for errors in by_rank], "RankError", f"rank {rank}: OSError: no space left")

    def test_failures_on_several_ranks(self) -> None:
        """The error names every reason once, and keeps its class where all failed ranks raised the same class of this library."""
        by_rank = self.run_on(_several_fail, WORLD)
        wanted = [
            ("StateError", "ranks 0, 2: bad state"),
            ("RankError", "rank 0: StateError: bad state\nrank 1: OSError: no space left"),
            ("StateError", "bad state"),
        ]
        for errors in by_rank:
            self._case.assertEqual(errors, wanted)

    def test_a_broken_connection_is_heard_of_at_once(self) -> None:
        """An error is raised on the others without waiting for an unreachable rank."""
        for errors in self.run_on(_fails_fatally, WORLD)[1:]:
            self._check_alike(errors, "RankError", f"rank {WORLD - 1}: lost the connection")

    def test_a_rank_that_does_not_come(self) -> None:
        """A missing rank is named on all others, and can join their next meeting."""
        for absent in range(WORLD):
            by_rank = self.run_on(_one_does_not_come, WORLD, absent)
            came = [errors[0] for rank, errors in enumerate(by_rank) if rank != absent]
            words = (f"rank {absent} did not arrive within {_SHORT:g} s", f"2 of the ranks {list(range(WORLD))} did")
            self._check_alike(came, "RankTimeoutError", "a call: alone", *words)
            for errors in by_rank:
                self._case.assertEqual(errors[1:], [("", ""), ("", "")])

    def test_a_rank_that_comes_too_late(self) -> None:
        """A late rank gets an error, and the next meeting works."""
        by_rank = self.run_on(_comes_too_late, WORLD)
        self._check_alike(
            [errors[0] for errors in by_rank[:-1]], "RankTimeoutError", f"rank {WORLD - 1} did not arrive"
        )
        self._check_alike(
            by_rank[-1], "RankTimeoutError", f"rank {WORLD - 1} came too late", f"did not arrive within {_SHORT:g} s"
        )

    def test_ranks_in_other_calls(self) -> None:
        """Ranks in other calls, or at other steps of one call, all raise an error that names both."""
        by_rank = self.run_on(_elsewhere, WORLD)
        for number in range(2 * WORLD):
            names = ("'a call: one'", "'a call: other'") if number % 2 == 0 else ("'save: begun'", "'load: begun'")
            self._check_alike(
                [errors[number] for errors in by_rank], "RankError", *names, "same calls in the same order"
            )

    def test_ranks_that_wait_for_each_other(self) -> None:
        """Ranks that wait for each other in different meetings all raise, long before the timeout."""
        for last in (0, 2):  # the first of them that looks for the other tells it, and the lower rank comes first
            by_rank = self.run_on(_wait_for_each_other, WORLD, last)
            self._check_alike(by_rank, "RankError", "they wait for each other", "ranks [0, 1, 2]", "ranks [0, 2]")
            self._case.assertRegex(by_rank[0][1], "rank 0 is at .*; rank 2 is at ")

    def test_a_rank_that_comes_when_others_waited_for_each_other(self) -> None:
        """A rank for which no other waits any more gets their error: it was not late, and a longer timeout is no fix."""
        words = "they wait for each other", "ranks [0, 1, 2]", "ranks [0, 1]"
        self._check_alike(self.run_on(_comes_after_a_deadlock, WORLD), "RankError", *words)

    def test_groups_of_some_ranks(self) -> None:
        """Meetings of some ranks work: of one rank, of overlapping groups, and of two groups at the same time."""
        for rank, contents in enumerate(self.run_on(_some_of_the_ranks, WORLD)):
            groups = [g for g in ((0, 1), (1, 2), (0, 2), (0,), (1,), (2,), (0, 1, 2)) if rank in g]
            self._case.assertEqual(contents, [[b"%d" % member for member in group] for group in groups])

    def test_places(self) -> None:
        """A claim holds a place until its rank claims another one or releases it; no rank has two."""
        by_rank = self.run_on(_claims, WORLD)
        self._case.assertEqual(by_rank, [["0", "0", "0"], ["0", "1", "1"], ["2", "2", "2"]])

    def test_nothing_is_left(self) -> None:
        """Many meetings leave as much as a few, and no threads."""
        before = threading.active_count()
        counts = self.run_on(_leaves, WORLD, type(self).left, (1, 4))[0]
        self._case.assertEqual(counts[0], counts[1])
        self._case.assertLessEqual(threading.active_count(), before)
