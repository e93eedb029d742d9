"""The executor in one process: every pair of ends, tiny budgets, compared one element at a time."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from parameterized import parameterized

from fsdp_optim import FsdpOptimError, RankError, StateError
from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Block, Box, Boxes, FlatChunks, MeshBoxes, Placement, Whole
from fsdp_optim.move import End, Slice, StateValue, executor, move
from fsdp_optim.move.routes import Route, RoutePlans
from fsdp_optim.plan import Plans, copies_of, rank_plan
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.transport import Failure, alone

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "empty": (0, 3),
    "one": (1,),
    "row": (7,),
    "matrix": (5, 4),
    "large": (3, 2, 11),
}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64)
VALUES = [
    StateValue(fqn, "exp_avg", dtype, Whole(shape, (0,)))
    for (fqn, shape), dtype in zip(SHAPES.items(), itertools.cycle(DTYPES), strict=False)
]


def elements(value: StateValue) -> torch.Tensor:
    """Elements that differ between any two places of any two values."""
    first = 1 + 13 * [listed.fqn for listed in VALUES].index(value.fqn)
    return torch.arange(first, first + value.placement.numel).to(value.dtype).view(value.placement.shape)


@dataclass
class Live(End):
    """Live tensors by FQN, with any strides."""

    tensors: dict[str, torch.Tensor]

    def memory(self, value: StateValue) -> torch.Tensor | None:
        return self.tensors.get(value.fqn)


@dataclass
class Stored(End):
    """A store that keeps every value as one 1-D tensor, and records the most bytes that a call gave it.

    `cut`: the cut in which it reads and writes; None: the cut of the other end.
    """

    tensors: dict[str, torch.Tensor]
    cut: str | None = None
    most_nbytes: int = 0
    log: list[str] = field(default_factory=list)

    is_stored = True

    def io_placement(self, value: StateValue, other: Placement) -> Placement:
        return FlatChunks(other.shape, 0, max(other.numel, 1), ((0,),)) if self.cut == "runs" else other

    def fill(self, parts: Sequence[Slice]) -> None:
        self._note("fill", parts)
        for part in parts:
            if part.flat is not None:
                stored = self.tensors[part.value.fqn]
                for copy in copies_of(Whole((len(stored),), (-1,)), Whole((len(stored),), (0,))):
                    assert copy.is_run
                part.flat.copy_(stored[part.start : part.start + len(part.flat)])

    def drain(self, parts: Sequence[Slice]) -> None:
        self._note("drain", parts)
        for part in parts:
            if part.flat is not None:
                self.tensors[part.value.fqn][part.start : part.start + len(part.flat)] = part.flat

    def _note(self, what: str, parts: Sequence[Slice]) -> None:
        self.log += [f"{what} {part.value.fqn} {part.start}" for part in parts]
        own = sum(part.flat.nbytes for part in parts if part.flat is not None and part.is_own)
        self.most_nbytes = max(self.most_nbytes, own)


def live(*, filled: bool, contiguous: bool = True) -> Live:
    tensors = {}
    for value in VALUES:
        tensor = elements(value) if filled else torch.zeros(value.placement.shape, dtype=value.dtype)
        if not contiguous and tensor.dim() > 1:
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        tensors[value.fqn] = tensor
    return Live(tensors)


def stored(*, filled: bool, cut: str | None = None) -> Stored:
    tensors = {value.fqn: elements(value).reshape(-1) for value in VALUES}
    return Stored(tensors if filled else {fqn: torch.zeros_like(tensor) for fqn, tensor in tensors.items()}, cut)


def run(source: End, target: End, nbytes: int, values: Sequence[StateValue] = VALUES) -> None:
    failure = Failure()
    move(values, source, target, alone("a test"), Budget(nbytes), failure)
    if failure.error is not None:
        raise failure.error


def check(target: Live | Stored) -> None:
    for value in VALUES:
        wanted, arrived = elements(value).reshape(-1), target.tensors[value.fqn].reshape(-1)
        assert torch.equal(wanted, arrived), f"{value.fqn}: {arrived.tolist()}, not {wanted.tolist()}"


BUDGETS = [(1,), (16,), (40,), (100,), (1 << 20,)]


class MoveTest(unittest.TestCase):
    @parameterized.expand(BUDGETS)
    def test_every_pair_of_ends(self, nbytes: int) -> None:
        self.check_every_pair(nbytes)

    def check_every_pair(self, nbytes: int) -> None:
        for cut in (None, "runs"):
            for contiguous in (True, False):
                target: Live | Stored = stored(filled=False, cut=cut)
                run(live(filled=True, contiguous=contiguous), target, nbytes)
                check(target)
            target = live(filled=False)
            target.tensors = {fqn: tensor.view(-1) for fqn, tensor in target.tensors.items()}
            run(stored(filled=True, cut=cut), target, nbytes)
            check(target)
            target = stored(filled=False)
            run(stored(filled=True, cut=cut), target, nbytes)
            check(target)
        target = live(filled=False)
        target.tensors = {fqn: tensor.view(-1) for fqn, tensor in target.tensors.items()}
        run(live(filled=True, contiguous=False), target, nbytes)
        check(target)

    @parameterized.expand([(1,), (2,), (5,)])
    def test_some_values_at_a_time(self, most: int) -> None:
        with mock.patch.object(executor, "_MOST_ROUTES", most):
            self.check_every_pair(1 << 20)
            at_once: list[int] = []

            class Counts(Stored):
                def drain(self, parts: Sequence[Slice]) -> None:
                    at_once.append(len(parts))
                    super().drain(parts)

            run(live(filled=True), Counts(stored(filled=False).tensors), 1 << 20)
            self.assertEqual((sum(at_once), max(at_once)), (len(VALUES), most))

    def test_nothing_is_written_after_an_error(self) -> None:
        class Full(Stored):
            def drain(self, parts: Sequence[Slice]) -> None:
                super().drain(parts)
                raise OSError("no space")

        target = Full(stored(filled=False).tensors)
        with mock.patch.object(executor, "_MOST_ROUTES", 2), self.assertRaisesRegex(OSError, "no space"):
            run(live(filled=True), target, 1 << 20)
        self.assertEqual(len(target.log), 2)

    @parameterized.expand(BUDGETS)
    def test_memory_that_is_made_stays_in_the_budget(self, nbytes: int) -> None:
        for source, target in (
            (stored(filled=True), stored(filled=False)),
            (live(filled=True, contiguous=False), stored(filled=False)),
            (live(filled=True), stored(filled=False, cut="runs")),
        ):
            run(source, target, nbytes)
            widest = max(value.dtype.itemsize for value in VALUES)
            self.assertLessEqual(target.most_nbytes, max(nbytes, widest))

    @parameterized.expand(BUDGETS)
    def test_half_of_the_budget_is_left(self, nbytes: int) -> None:
        """To the messages where elements are staged, and to what the target makes of a window of a large value."""
        most = max(nbytes // 2, *(value.dtype.itemsize for value in VALUES))
        staged, read, copied = (
            stored(filled=False, cut="runs"),
            stored(filled=True, cut="runs"),
            stored(filled=False),
        )
        run(live(filled=True), staged, nbytes)
        run(read, Live({fqn: tensor.view(-1) for fqn, tensor in live(filled=False).tensors.items()}), nbytes)
        for value in VALUES:
            run(stored(filled=True), copied, nbytes, [value])
        for end in (staged, read, copied):
            self.assertLessEqual(end.most_nbytes, most)

    @parameterized.expand(BUDGETS)
    def test_copies_of_live_memory_stay_in_the_budget(self, nbytes: int) -> None:
        """Of elements that are not contiguous, which no view has in a row."""
        source, most = live(filled=True, contiguous=False), max(nbytes, 8)
        held = {tensor.untyped_storage().data_ptr() for tensor in source.tensors.values()}
        at_once: list[int] = []

        class Measures(Stored):
            def drain(self, parts: Sequence[Slice]) -> None:
                flats = [part.flat for part in parts if part.flat is not None]
                at_once.append(sum(flat.nbytes for flat in flats if flat.untyped_storage().data_ptr() not in held))
                super().drain(parts)

        target = Measures(stored(filled=False).tensors)
        run(source, target, nbytes)
        check(target)
        self.assertLessEqual(max(at_once), most)
        self.assertGreater(max(at_once), 0)

    def test_contiguous_memory_is_not_copied(self) -> None:
        source, target = live(filled=True), stored(filled=False)
        with mock.patch.object(executor, "empty", side_effect=AssertionError("memory was made")):
            run(source, target, 1)
        self.assertEqual(target.most_nbytes, 0)

    def test_what_several_originals_share_is_taken_from_its_place(self) -> None:
        """Two originals in one local tensor behind padding, as in a flat parameter."""
        flat = torch.tensor([99.0, 99.0, 1.0, 2.0, 3.0, 4.0, 5.0, 99.0])
        values = [
            StateValue("a", "x", torch.float32, Whole((3,), (0,), 2)),
            StateValue("b", "x", torch.float32, Whole((2, 1), (0,), 5)),
        ]

        class Flat(End):
            def memory(self, value: StateValue) -> torch.Tensor:
                return flat

        for nbytes in (1, 8, 1 << 20):
            into: dict[str, list[tuple[int, list[float]]]] = {"a": [], "b": []}

            class Takes(Stored):
                def drain(self, parts: Sequence[Slice]) -> None:
                    for part in parts:
                        if part.flat is not None:
                            into[part.value.fqn].append((part.start, part.flat.tolist()))  # noqa: B023

            run(Flat(), Takes({}), nbytes, values)
            self.assertEqual(into["a"], [(2, [1.0, 2.0, 3.0])])
            self.assertEqual(into["b"], [(5, [4.0, 5.0])])

    def test_a_failure_before_keeps_everything_as_it_is(self) -> None:
        for source, target in ((live(filled=True), stored(filled=False)), (stored(filled=True), live(filled=False))):
            failure = Failure()
            failure.note(ValueError("before"))
            move(VALUES, source, target, alone("a test"), Budget(100), failure)
            self.assertTrue(all(not bool(tensor.any()) for tensor in target.tensors.values()))

    def test_a_failure_at_an_end_is_noted(self) -> None:
        class Full(Stored):
            def drain(self, parts: Sequence[Slice]) -> None:
                raise OSError("no space left")

        for cut in (None, "runs"):
            failure = Failure()
            with self.subTest(cut):
                try:
                    full = Full(stored(filled=False).tensors, cut)
                    move(VALUES, live(filled=True), full, alone("a test"), Budget(8), failure)
                except OSError as error:  # where messages are needed, all ranks raise the error in the next window
                    self.assertIs(error, failure.error)
                self.assertIsInstance(failure.error, OSError)

    def test_nothing_is_read_or_written_after_an_error_in_a_window(self) -> None:
        class Gone(Live):
            def memory(self, value: StateValue) -> torch.Tensor:
                raise OSError("the memory is gone")

        read = stored(filled=True, cut="runs")
        with self.assertRaisesRegex(OSError, "the memory is gone"):
            run(read, Gone({}), 1 << 20)
        self.assertEqual(read.log, [])

        def lose(group: object, items: object, failure: Failure, budget: Budget) -> None:
            failure.note(RankError("lost the connection"), fatal=True)

        written = stored(filled=False, cut="runs")
        with mock.patch.object(executor, "exchange", lose):
            with self.assertRaisesRegex(RankError, "lost the connection"):
                run(live(filled=True), written, 1 << 20)
            self.assertEqual(written.log, [])
            read, value = stored(filled=True, cut="runs"), next(listed for listed in VALUES if listed.fqn == "matrix")
            with self.assertRaisesRegex(RankError, "lost the connection"):
                run(read, Live({"matrix": torch.zeros(20, dtype=value.dtype)}), 2 * value.nbytes // 5, [value])
        self.assertEqual(read.log, ["fill matrix 0"])  # of five windows

    def test_the_sender_of_a_value_follows_from_its_name(self) -> None:
        """Of two replicas, also where the values share their placements, and each replica sends some of the values."""
        source, target = Whole((4,), (0, 1)), Whole((4,), (2,))
        group: Any = SimpleNamespace(rank=2, ranks=(0, 1, 2), world=SimpleNamespace(plans=Plans()))
        values = [StateValue(f"layer{number}.weight", "exp_avg", torch.float32, source) for number in range(16)]
        senders = []
        for listed in (values, values[::-1]):
            planned = RoutePlans(group).of([Route(value, source, target) for value in listed])
            senders.append({route.value.fqn: tuple(copy.source_rank for copy in plan) for route, plan in planned})
        self.assertEqual(senders[0], senders[1])
        self.assertEqual(set(senders[0].values()), {(0,), (1,)})

    def test_memory_that_would_not_be_filled_is_refused(self) -> None:
        half = Boxes((4,), ((0, (Block(Box((0,), (2,)), 0),)),))
        value = StateValue("layer.weight", "exp_avg", torch.float32, Whole((4,), (0,)))

        class Half(Live):
            def placement(self, value: StateValue) -> Placement:
                return half

        with self.assertRaisesRegex(LayoutError, r"layer\.weight: elements \[2, 4\) of exp_avg are held by no rank"):
            run(Half({"layer.weight": torch.ones(2)}), Live({"layer.weight": torch.zeros(4)}), 100, [value])
        for source in (Live({"layer.weight": torch.ones(4)}), Stored({"layer.weight": torch.ones(4)}, "runs")):
            with (
                mock.patch.object(rank_plan, "copies_of_parts", return_value=[()]),
                self.assertRaisesRegex(
                    StateError, "layer.weight: exp_avg: rank 0 needs 4 elements, and the plan brings 0"
                ),
            ):
                run(source, Live({"layer.weight": torch.zeros(4)}), 100, [value])

    def test_errors_are_the_librarys(self) -> None:
        self.assertTrue(issubclass(LayoutError, FsdpOptimError))


class BudgetTest(unittest.TestCase):
    def test_shares_never_vanish(self) -> None:
        self.assertEqual(Budget(100).share(3, "windows").nbytes, 33)
        self.assertEqual(Budget(1).share(7, "windows").nbytes, 1)
        self.assertEqual(Budget(100).share(2, "windows"), Budget(50, "windows"))


class PlacementTest(unittest.TestCase):
    @parameterized.expand(
        [
            (Whole((3, 2), (0, 4), 5),),
            (FlatChunks((5,), 3, 4, ((0, 1), (2, 3))),),
            (FlatChunks((5,), 3, 4, ((0, 1),), own_tensor=True),),
            (FlatChunks((0,), 0, 1, ((0, 1),)),),
            (MeshBoxes((5, 3), (3, 2), ((0, 0),), ((0, 1, 2, 3, 4, 5),)),),
            (MeshBoxes((5, 3), (2, 2), ((0, 1), (1, 0)), ((0, 1, 2, 3),)),),
            (MeshBoxes((1,), (4,), ((0, 0),), ((0, 1, 2, 3),)),),
            (Boxes((4, 4), ((1, (Block(Box((0, 0), (2, 4)), 3),)), (2, (Block(Box((2, 0), (2, 4)), 0),)))),),
        ]
    )
    def test_what_a_rank_holds(self, placement: Placement) -> None:
        """`most_numel`, `num_replicas` and `local_range`, from the Blocks."""
        for rank in (*placement.ranks, 77):
            shard = placement.shard_of(rank)
            blocks = placement.blocks(shard) if shard is not None else ()
            start, stop = placement.local_range(rank)
            self.assertEqual(stop - start, sum(block.box.numel for block in blocks))
            self.assertLessEqual(placement.numel_on(rank), placement.most_numel)
            if blocks:
                self.assertEqual(start, min(block.offset for block in blocks))
        most = max((len(placement.holders(shard)) for shard in range(placement.num_shards)), default=1)
        self.assertEqual(placement.num_replicas, most)
