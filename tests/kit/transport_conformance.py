"""A test class for every Transport; `fsdp_optim.transport.base` has the protocol.

    class TestMyTransport(TransportConformance, unittest.TestCase):
        def run_on(self, fn, world_size, *args):       # a module-level function, on ranks of a world with the transport
            return run_on_ranks(in_my_world, world_size, fn, *args)

`fn` asks `fsdp_optim.transport.world.world_here()` for its rank and its transport.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_optim.layout import FlatChunks, MeshBoxes, Placement, Whole
from fsdp_optim.plan import copies_of
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.testing.mix_in import MixIn
from fsdp_optim.transport import Failure, Item, RankGroup, world_here
from fsdp_optim.transport.agree import agree, exchange
from kit.compare import error_text
from kit.control_conformance import Error, no_things

WORLD = 3
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn),
)
BUDGETS = (1, 100, 1000, 64 << 20)
_CPU = torch.device("cpu")
_UNTOUCHED = 0xA5

Case = tuple[Placement, Placement, torch.dtype]
"""The source placement, the target placement, and the dtype of a value."""


def _group(timeout: float = 60.0) -> RankGroup:
    world = world_here()
    return world.group("a call", range(world.size), timeout=timeout)


def _ranks() -> tuple[int, ...]:
    return tuple(range(world_here().size))


def _elements(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Elements with any bits, including NaN, equal on all ranks. A bool has one of two bytes."""
    generator = torch.Generator().manual_seed(seed)
    size = numel * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def _local(whole: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor | None:
    """A rank's local 1-D tensor with its elements of `whole`, and unset padding; None if it has none."""
    shard = placement.shard_of(rank)
    if shard is None:
        return None
    blocks = placement.blocks(shard)
    numel = max((block.offset + block.box.numel for block in blocks), default=0)
    local = torch.empty(numel, dtype=whole.dtype)
    local.view(torch.uint8).fill_(_UNTOUCHED)
    for block in blocks:
        index = tuple(slice(o, o + n) for o, n in zip(block.box.offsets, block.box.sizes, strict=True))
        local[block.offset : block.offset + block.box.numel] = whole[index].reshape(-1)
    return local


class _Moves:
    """The values of an exchange on one rank: sources, targets, and the expected targets."""

    def __init__(self, cases: Sequence[Case]) -> None:
        world = world_here()
        self.items, self.wanted = list[Item](), list[Any]()
        for seed, (source, target, dtype) in enumerate(cases):
            shape = source.shape
            whole = _elements(source.numel, dtype, seed).view(shape)
            part = _local(whole, source, world.rank)
            wanted = _local(whole, target, world.rank)
            room = None
            if wanted is not None:
                room = world.transport.empty(tuple(wanted.shape), dtype, _CPU)
                room.view(torch.uint8).fill_(_UNTOUCHED)
            self.items.append(Item(copies_of(source, target, rank=world.rank), dtype, part, room))
            self.wanted.append(wanted)

    def check(self) -> None:
        """Raise unless everything has arrived, and nothing else was touched."""
        for number, (item, wanted) in enumerate(zip(self.items, self.wanted, strict=True)):
            if wanted is not None and (item.target is None or not _same(item.target, wanted)):
                raise AssertionError(f"item {number}, {item.dtype}: other bytes have arrived")

    def check_untouched(self) -> None:
        """Raise if anything has arrived that another rank has sent."""
        for number, item in enumerate(self.items):
            if item.target is not None and not bool((item.target.view(torch.uint8) == _UNTOUCHED).all()):
                raise AssertionError(f"item {number}: something has arrived")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _move(items: Iterator[Item] | Sequence[Item], nbytes: int, group: RankGroup | None = None) -> None:
    """Run one whole exchange."""
    group, failure = group or _group(), Failure()
    exchange(group, items, failure, Budget(nbytes))
    agree(group, "moved", failure.error, fatal=failure.fatal)


def placements(shape: tuple[int, ...], ranks: Sequence[int]) -> list[Placement]:
    """Placements of a value: whole, even and uneven flat chunks, rows, columns, and one rank only."""
    numel, size = max(1, _numel(shape)), len(ranks)
    each = (tuple(ranks),)
    ways: list[Placement] = [
        *(Whole(shape, (rank,)) for rank in (ranks[0], ranks[-1])),
        Whole(shape, tuple(ranks)),
        FlatChunks(shape, 0, -(-numel // size), each),
        FlatChunks(shape, 2, -(-(numel + 2) // size) + 1, each),
    ]
    for dim in range(len(shape)):
        ways.append(MeshBoxes(shape, (size,), ((0, dim),), (tuple(ranks),)))
    return ways


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _moves_every_dtype() -> None:
    ranks = _ranks()
    rows = FlatChunks((5, 7), 0, -(-35 // len(ranks)), (ranks,))
    columns = MeshBoxes((5, 7), (len(ranks),), ((0, 1),), (ranks,))
    for nbytes in BUDGETS:
        moves = _Moves([(rows, columns, dtype) for dtype in DTYPES])
        _move(moves.items, nbytes)
        moves.check()


def _moves_every_cut(shape: tuple[int, ...]) -> None:
    ranks = _ranks()
    ways = placements(shape, ranks)
    cases = [(a, b, DTYPES[n % len(DTYPES)]) for a in ways for n, b in enumerate(ways)]
    for nbytes in BUDGETS:
        moves = _Moves(cases)
        _move(moves.items, nbytes)
        moves.check()


def _moves_more_than_the_budget() -> None:
    """Exchange long runs, which can be sent without copies, and large blocks of short rows, which cannot."""
    ranks, shape = _ranks(), (300, 200)
    runs = FlatChunks(shape, 0, -(-_numel(shape) // len(ranks)), (ranks,))
    columns = MeshBoxes(shape, (len(ranks),), ((0, 1),), (ranks,))
    whole = Whole(shape, (ranks[-1],))
    for nbytes in (4000, 100_000):
        moves = _Moves([(a, b, torch.float32) for a, b in ((runs, whole), (columns, whole), (columns, runs))])
        _move(moves.items, nbytes)
        moves.check()


class _Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Measure the peak bytes of the storages that are created inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not any(isinstance(argument, torch.Tensor) for argument in args):
            storage = result.untyped_storage()
            self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}  # type: ignore[no-untyped-call]
            self.most = max(self.most, sum(nbytes for _, nbytes in self._live.values()))
        return result


def _allocates() -> list[tuple[int, int]]:
    """The budget, and the bytes that an exchange allocates besides the tensors of its items."""
    ranks, shape, measured = _ranks(), (100, 61), []
    columns = MeshBoxes(shape, (len(ranks),), ((0, 1),), (ranks,))
    rows = MeshBoxes(shape, (len(ranks),), ((0, 0),), (ranks,))
    for nbytes in (200, 4000, 20_000):
        moves = _Moves([(columns, rows, torch.float32), (rows, Whole(shape, ranks), torch.int16)])
        with _Allocated() as allocated:
            _move(moves.items, nbytes)
        moves.check()
        measured.append((nbytes, allocated.most))
    return measured


def _drops_elements() -> None:
    """A target of None receives and drops its elements, and other ranks get theirs."""
    ranks = _ranks()
    whole, chunks = Whole((40,), (0,)), FlatChunks((40,), 0, 14, (ranks,))
    for dropping in ranks:
        moves = _Moves([(whole, chunks, torch.float32), (chunks, whole, torch.int64)])
        if world_here().rank == dropping:
            moves.items[0] = Item(moves.items[0].copies, torch.float32, moves.items[0].source, None)
            moves.wanted[0] = None
        _move(moves.items, 64)
        moves.check()


def _fails_in_turn(how: str) -> list[Error]:
    """Each rank fails before it is ready. Nothing may arrive anywhere, and the next exchange goes as usual."""
    world, ranks, errors = world_here(), _ranks(), []
    columns = MeshBoxes((8, 9), (len(ranks),), ((0, 1),), (ranks,))
    elsewhere = MeshBoxes((8, 9), (len(ranks),), ((0, 1),), ((*ranks[1:], ranks[0]),))  # nothing stays on its rank
    for failing in ranks:
        moves = _Moves([(columns, elsewhere, torch.float32)])
        items: Any = moves.items
        failure, group = Failure(), _group()
        if world.rank == failing and how == "before":
            failure.note(OSError("before it began"))
        elif world.rank == failing and how == "in the items":
            items = _broken(moves.items)
        elif world.rank == failing:
            items = [Item(moves.items[0].copies, torch.float32, torch.zeros(1), None)]

        def call() -> None:
            exchange(group, items, failure, Budget(100))  # noqa: B023
            raise AssertionError("the ranks were ready")

        errors.append(error_text(call))
        moves.check_untouched()
        again = _Moves([(columns, elsewhere, torch.float32)])
        _move(again.items, 100)
        again.check()
    return errors


def _broken(items: Sequence[Item]) -> Iterator[Item]:
    yield from items
    raise OSError("an item cannot be had")


def _does_not_send(absent: int) -> tuple[Error, Error]:
    """One rank is ready, and then does nothing: the error that this rank notes, and the one that all raise."""
    world, ranks = world_here(), _ranks()
    chunks = FlatChunks((90,), 0, 30, (ranks,))
    moves = _Moves([(chunks, Whole((90,), ranks), torch.float32)])
    group, failure = _group(timeout=1.0), Failure()
    send = world.transport.prepare(group, moves.items, failure, Budget(1000))
    agree(_group(), "ready", failure.error)
    if world.rank != absent:
        send(failure)
    noted = failure.error
    if noted is not None and not failure.fatal:
        raise AssertionError(f"{noted!r} is not fatal")
    text = (type(noted).__name__, str(noted)) if noted is not None else ("", "")
    return text, error_text(lambda: agree(_group(), "moved", failure.error, fatal=failure.fatal))


def _begins_late() -> None:
    """Exchange with each rank in turn arriving late."""
    world, ranks = world_here(), _ranks()
    ways = placements((6, 5), ranks)
    for slow in ranks:
        moves = _Moves([(a, b, torch.float32) for a in ways for b in ways])
        failure, group = Failure(), _group()
        send = world.transport.prepare(group, moves.items, failure, Budget(200))
        agree(group, "ready", failure.error)
        time.sleep(0.2 if world.rank == slow else 0.0)
        send(failure)
        agree(group, "moved", failure.error)
        moves.check()


def _keeps_what_it_sends() -> None:
    ranks = _ranks()
    ways = placements((6, 5), ranks)
    moves = _Moves([(a, b, torch.int64) for a in ways for b in ways])
    before = [item.source.clone() if item.source is not None else None for item in moves.items]
    _move(moves.items, 300)
    for item, was in zip(moves.items, before, strict=True):
        if was is not None and (item.source is None or not torch.equal(item.source, was)):
            raise AssertionError("what was sent has changed")


def _leaves(left: Callable[[], int]) -> list[int]:
    counts, ranks = [], _ranks()
    ways = placements((6, 5), ranks)
    for rounds in (1, 5):
        for _ in range(rounds):
            _move(_Moves([(a, b, torch.int64) for a in ways for b in ways]).items, 300)
        if world_here().rank == 0:
            time.sleep(0.3)  # the others wait in the next meeting by then
            counts.append(left())
        agree(_group(), "counted")
    return counts


class TransportConformance(MixIn):
    """A mix-in for a `unittest.TestCase`: the promises of a Transport, one per test.

    `left` is a module-level function that counts what exchanges have left: keys in a store, say.
    """

    left: Callable[[], int] = staticmethod(no_things)

    def run_on(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Run a function on ranks of a new world with the transport; the results by rank."""
        raise NotImplementedError

    def test_every_dtype_arrives_bit_by_bit(self) -> None:
        """Every dtype arrives bit by bit, with budgets from one byte on."""
        self.run_on(_moves_every_dtype, WORLD)

    def test_every_cut_into_every_other(self) -> None:
        """Every placement reaches every other: uneven, empty and strided ones, also on one rank alone."""
        for shape in ((7, 5), (2, 3, 4), (1,), (), (0, 3)):
            self.run_on(_moves_every_cut, WORLD, shape)
        self.run_on(_moves_every_cut, 1, (7, 5))
        self.run_on(_moves_every_cut, 2, (7, 5))

    def test_more_than_the_budget(self) -> None:
        """Long runs and short rows arrive that are many times larger than the budget."""
        self.run_on(_moves_more_than_the_budget, WORLD)

    def test_the_budget_is_kept(self) -> None:
        """An exchange allocates at most its budget, or one element for each peer."""
        for measured in self.run_on(_allocates, WORLD):
            for nbytes, allocated in measured:
                self._case.assertLessEqual(allocated, max(nbytes, 16 * 8))

    def test_elements_that_nobody_wants(self) -> None:
        """Elements with a target of None are dropped."""
        self.run_on(_drops_elements, WORLD)

    def test_a_failure_on_each_rank_in_turn(self) -> None:
        """A failure is raised on all ranks alike before any element arrives, and the next exchange works."""
        for how, words in (("before", "before it began"), ("in the items", "cannot be had"), ("in a tensor", "")):
            by_rank = self.run_on(_fails_in_turn, WORLD, how)
            for rank in range(WORLD):
                errors = [errors_of_rank[rank] for errors_of_rank in by_rank]
                self._case.assertEqual({name for name, _ in errors}, {"RankError"}, errors)
                self._case.assertEqual(len({text for _, text in errors}), 1, errors)
                self._case.assertIn(f"rank {rank}: ", errors[0][1])
                self._case.assertIn(words, errors[0][1])

    def test_a_rank_that_does_not_send(self) -> None:
        """The peers of a silent rank name it within the timeout, and all ranks raise."""
        for absent in range(WORLD):
            by_rank = self.run_on(_does_not_send, WORLD, absent)
            for rank, (noted, raised) in enumerate(by_rank):
                self._case.assertEqual(raised[0], "RankError", by_rank)
                if rank != absent:
                    self._case.assertEqual(noted[0], "RankError", by_rank)
            texts = " ".join(noted[1] for noted, _ in by_rank)
            self._case.assertIn(f"lost the connection to rank {absent}", texts)
            self._case.assertEqual(len({raised for _, raised in by_rank}), 1, by_rank)

    def test_ranks_that_are_late(self) -> None:
        """Ranks that are late in an exchange are waited for."""
        self.run_on(_begins_late, WORLD)

    def test_what_is_sent_stays_as_it_is(self) -> None:
        """An exchange does not change its sources."""
        self.run_on(_keeps_what_it_sends, WORLD)

    def test_nothing_is_left(self) -> None:
        """Many exchanges leave as much as a few, and no threads."""
        before = threading.active_count()
        few, many = self.run_on(_leaves, WORLD, type(self).left)[0]
        self._case.assertEqual(few, many)
        self._case.assertLessEqual(threading.active_count(), before)
