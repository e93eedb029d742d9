"""Short values that travel together from the rank that reads each to the live memory of all, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kit.short_values import OnOneRank, elements, local, moved, values_of

from fsdp_optim import RankError
from fsdp_optim.layout import FlatChunks, MeshBoxes, Placement, Whole
from fsdp_optim.move import End, Slice, StateValue, short_scatter
from fsdp_optim.move import short as short_module
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.tensors.side_by_side import empty_side_by_side
from fsdp_optim.testing import RanksFailed, run_on_threads
from fsdp_optim.transport import Failure, world_here

PADDING = 77


class OnDevice(torch.Tensor):
    """Memory that is not on the host, for those who ask."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]


@dataclass
class Files(OnOneRank):
    """Each value is read by one rank, which the value's number gives. `filled`: the FQNs that each call of `fill` reads."""

    fails_on: int | None = None
    filled: list[list[str]] = field(default_factory=list)
    most_nbytes: int = 0

    def fill(self, slices: Sequence[Slice]) -> None:
        if self.fails_on == world_here().rank:
            raise OSError("a damaged file")
        here = [part for part in slices if part.flat is not None and part.cut.numel_on(world_here().rank)]
        self.filled += [[part.value.fqn for part in here]] if here else []
        self.most_nbytes = max(self.most_nbytes, sum(part.flat.nbytes for part in here if part.flat is not None))
        for part in here:
            assert self.rank_of(part.value) == world_here().rank
            assert part.flat is not None
            assert part.flat.dtype == part.value.dtype
            part.flat.copy_(elements(part.value)[part.start : part.start + part.flat.numel()])


@dataclass
class Live(End):
    """Memory full of padding, which a move must leave alone."""

    fails_on: int | None = None
    lacks: str = ""
    on_device: bool = False
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def memory(self, value: StateValue) -> torch.Tensor | None:
        rank = world_here().rank
        if self.fails_on == rank:
            raise OSError("the memory is gone")
        if value.placement.shard_of(rank) is None or value.fqn == self.lacks:
            return None
        wanted = local(value, rank, strided=False)
        assert wanted is not None
        if value.fqn not in self.held:
            self.held[value.fqn] = torch.full((wanted.nbytes,), PADDING, dtype=torch.uint8).view(value.dtype)
        memory = self.held[value.fqn]
        return memory.as_subclass(OnDevice) if self.on_device else memory


def check(ends: Sequence[Live], values: Sequence[StateValue]) -> None:
    """Every rank has its elements of every value, and its padding."""
    for value in values:
        for rank, end in enumerate(ends):
            wanted = local(value, rank, strided=False)
            if wanted is None or not wanted.numel():
                continue
            got, mask = end.held.get(value.fqn), local_mask(value, rank)
            about = f"{value.fqn} of {value.placement} on rank {rank}"
            if got is None:
                assert not mask.any(), about
                continue
            wanted_bytes = torch.where(mask, wanted.view(torch.uint8), PADDING)
            assert torch.equal(got.view(torch.uint8), wanted_bytes), about


def local_mask(value: StateValue, rank: int) -> torch.Tensor:
    """For each byte of a rank's local tensor, whether it is one of an element of the value."""
    in_bytes = StateValue(value.fqn, value.name, torch.uint8, value.placement)
    start, stop = in_bytes.placement.local_range(rank)
    made = local(in_bytes, rank, strided=False)
    assert made is not None
    mask = torch.zeros(made.numel(), dtype=torch.bool)
    shard = value.placement.shard_of(rank)
    run = value.placement.run(shard) if shard is not None else None
    if run is not None:
        mask[start:stop] = True
    elif shard is not None:
        for block in value.placement.blocks(shard):
            mask[block.offset : block.end] = True
    return mask.repeat_interleave(value.dtype.itemsize)


@pytest.fixture
def any_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values travel together in a budget of any size, in many batches."""
    monkeypatch.setattr(short_module, "_LEAST_BUDGET", 0)


@pytest.mark.usefixtures("any_budget")
@pytest.mark.parametrize("nbytes", [1, 3000, 16 << 10, 64 << 20])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_every_rank_gets_its_elements_of_every_value(world: int, nbytes: int) -> None:
    for seed in range(3):
        values = values_of(world, 10 * world + seed)

        def on_rank(values: Sequence[StateValue] = values, seed: int = seed) -> tuple[Live, Files]:
            source, target = Files(world), Live(on_device=seed == 2)
            moved(values, source, target, nbytes)
            return target, source

        ends = run_on_threads(on_rank, world)
        check([target for target, _ in ends], values)
        read = [fqn for _, source in ends for fqns in source.filled for fqn in fqns]
        if nbytes > 3000:  # no value is longer than a window, and each is read once, on one rank
            assert len(read) == len(set(read))


def test_values_are_read_together_and_travel_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """To each rank one message from each reader; replicas get the same memory."""
    placement = MeshBoxes((8, 4), (2, 2), ((1, 0),), ((0, 1, 2, 3),))  # two shards, of two ranks each
    values = [StateValue(str(number), "exp_avg", torch.float32, placement) for number in range(200)]
    sent: dict[int, list[Any]] = {}
    exchange = short_module.exchange

    def spied(group: Any, items: Any, failure: Failure, budget: Budget) -> None:
        items = list(items)
        sent.setdefault(group.rank, []).append([item.source for item in items if item.source is not None])
        exchange(group, items, failure, budget)

    monkeypatch.setattr(short_module, "exchange", spied)

    def on_rank() -> tuple[Live, Files]:
        source, target = Files(4), Live()
        moved(values, source, target, 64 << 20)
        return target, source

    ends = run_on_threads(on_rank, 4)
    check([target for target, _ in ends], values)
    assert [len(source.filled) for _, source in ends] == [1] * 4
    for rank in range(4):
        (sources,) = sent[rank]
        assert len(sources) == 3  # to all ranks but itself
        assert len({source.data_ptr() for source in sources}) == 2  # one for each shard


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("where", ["source", "target"])
@pytest.mark.usefixtures("any_budget")
@pytest.mark.parametrize("nbytes", [3000, 16 << 10, 64 << 20])
def test_a_rank_that_fails_ends_the_move_of_all(where: str, rank: int, nbytes: int) -> None:
    values = [
        StateValue(str(number), "exp_avg", torch.float32, MeshBoxes((8, 8), (3,), ((0, 0),), ((0, 1, 2),)))
        for number in range(60)
    ]

    def on_rank() -> None:
        source = Files(3, fails_on=rank if where == "source" else None)
        moved(values, source, Live(fails_on=rank if where == "target" else None), nbytes)

    with pytest.raises(RanksFailed) as failed:
        run_on_threads(on_rank, 3, grace=30)
    assert set(failed.value.errors) == {0, 1, 2}
    for other, error in failed.value.errors.items():
        text = "a damaged file" if where == "source" else "the memory is gone"
        assert text in str(error), f"rank {other}: {error}"
        assert isinstance(error, RankError | OSError)


def test_nothing_is_put_in_memory_of_messages_that_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [StateValue(str(number), "exp_avg", torch.float32, Whole((4,), (0, 1))) for number in range(5)]
    targets = list[Live]()

    def lose(group: Any, items: Any, failure: Failure, budget: Budget) -> None:
        failure.note(RankError("lost the connection"), fatal=True)

    monkeypatch.setattr(short_module, "exchange", lose)

    def on_rank() -> None:
        targets.append(Live())
        moved(values, Files(2), targets[-1], 64 << 20)

    with pytest.raises(RanksFailed, match="lost the connection"):
        run_on_threads(on_rank, 2)
    assert len(targets) == 2
    assert not any(target.held for target in targets)


def test_a_value_that_a_rank_does_not_need_is_dropped() -> None:
    values = [StateValue(str(number), "exp_avg", torch.float32, Whole((4,), (0, 1))) for number in range(20)]

    def on_rank() -> Live:
        target = Live(lacks="7" if world_here().rank else "8")
        moved(values, Files(2), target, 64 << 20)
        return target

    ends = run_on_threads(on_rank, 2)
    assert {value.fqn for value in values} - set(ends[0].held) == {"8"}
    assert {value.fqn for value in values} - set(ends[1].held) == {"7"}
    check(ends, [value for value in values if value.fqn not in ("7", "8")])


def test_values_among_others_in_one_memory_leave_them_alone() -> None:
    """Values of one flat parameter, on ranks that find their own elements at other places of their memory."""
    values = [StateValue(str(n), "exp_avg", torch.float32, Whole((4,), (0, 1), 3)) for n in range(6)]
    values += [StateValue(str(n), "exp_avg", torch.float32, FlatChunks((9,), 3, 6, ((0, 1),))) for n in range(6, 20)]
    fused = {rank: torch.full((20 * 15,), float(PADDING)) for rank in (0, 1)}

    class InOneMemory(Live):
        def memory(self, value: StateValue) -> torch.Tensor | None:
            begin = 15 * int(value.fqn)
            return fused[world_here().rank][begin : begin + 15]

    run_on_threads(lambda: moved(values, Files(2), InOneMemory(), 64 << 20), 2)
    for rank, memory in fused.items():
        for value in values:
            wanted, (start, stop) = torch.full((15,), float(PADDING)), value.placement.local_range(rank)
            run = value.placement.run(value.placement.shard_of(rank) or 0)
            assert run is not None
            wanted[start:stop] = elements(value)[run.start : run.stop]
            got = memory.view(20, 15)[int(value.fqn)]
            assert torch.equal(got.view(torch.int32), wanted.view(torch.int32)), (rank, value.fqn)


@pytest.mark.parametrize(
    "memory",
    [torch.zeros(3), torch.zeros(8)[::2], torch.zeros(2, 2).t()],
    ids=["too short", "strided", "transposed"],
)
def test_memory_that_cannot_take_the_elements_is_refused(memory: torch.Tensor) -> None:
    """Bytes are written by address, so nothing else would notice."""
    values = [StateValue(str(number), "exp_avg", torch.float32, Whole((4,), (0, 1))) for number in range(5)]

    class Odd(Live):
        def memory(self, value: StateValue) -> torch.Tensor | None:
            return memory if world_here().rank and value.fqn == "3" else super().memory(value)

    with pytest.raises(
        RanksFailed, match="3: exp_avg: rank 1 needs contiguous memory for 4 elements, and has memory of"
    ):
        run_on_threads(lambda: moved(values, Files(2), Odd(), 64 << 20), 2)
    assert not memory.any()


def test_memory_stays_in_the_budget() -> None:
    """All copies of a batch, and its tables, have room in a half; the messages have the other."""
    placement = MeshBoxes((64, 64), (2,), ((0, 0),), ((0, 1),))
    values = [StateValue(str(number), "exp_avg", torch.float32, placement) for number in range(200)]
    nbytes, most = 8 << 20, (4 << 20) // short_module._COPIES

    def on_rank() -> tuple[Live, Files]:
        source, target = Files(2), Live()
        moved(values, source, target, nbytes)
        return target, source

    ends = run_on_threads(on_rank, 2)
    check([target for target, _ in ends], values)
    assert all(0 < source.most_nbytes <= most for _, source in ends)
    assert all(len(source.filled) > 1 for _, source in ends)


@pytest.mark.parametrize(
    ("placement", "travels"),
    [
        (Whole((short_module._MOST_NBYTES // 4,), (0, 1)), True),
        (Whole((short_module._MOST_NBYTES // 4 + 1,), (0, 1)), False),
        (MeshBoxes((16, 4), (2,), ((0, 1),), ((0, 1),)), True),
        (MeshBoxes((17, 4), (2,), ((0, 1),), ((0, 1),)), False),  # many rows of two elements
        (FlatChunks((40,), 3, 22, ((0, 1),)), True),
    ],
)
def test_long_values_and_those_of_many_runs_go_by_windows(
    monkeypatch: pytest.MonkeyPatch, placement: Placement, travels: bool
) -> None:
    values = [StateValue(str(number), "exp_avg", torch.float32, placement) for number in range(6)]
    met = list[int]()
    exchange = short_module.exchange

    def spied(group: Any, items: Any, failure: Failure, budget: Budget) -> None:
        met.append(group.rank)
        exchange(group, items, failure, budget)

    monkeypatch.setattr(short_module, "exchange", spied)

    def on_rank() -> Live:
        target = Live()
        moved(values, Files(2), target, 64 << 20)
        return target

    check(run_on_threads(on_rank, 2), values)
    assert bool(met) == travels


def test_memory_side_by_side_is_aligned_and_apart() -> None:
    dtypes = [torch.uint8, torch.complex128, torch.bfloat16, torch.float32, torch.uint8, torch.float64]
    memory, flats, bases = empty_side_by_side([3, 2, 5, 0, 1, 4], dtypes)
    memory.zero_()
    for number, (flat, base) in enumerate(zip(flats, bases.tolist(), strict=True), 1):
        assert flat.dtype == dtypes[number - 1]
        assert flat.data_ptr() == memory.data_ptr() + base or not flat.numel()
        flat.view(torch.uint8).add_(number)
    assert sorted(memory.tolist()) == [1] * 3 + [2] * 32 + [3] * 10 + [5] + [6] * 32


def test_values_of_a_source_that_reads_them_with_others_go_by_windows() -> None:
    """Where a request costs much, short values are read with the long ones beside them."""
    values = values_of(3, 5, num=40)
    long = StateValue("99", "exp_avg", torch.float32, Whole((short_module._MOST_NBYTES,), (0, 1, 2)))

    class WithOthers(Files):
        in_any_order = False

    def on_rank() -> tuple[Live, Files]:
        source, target = WithOthers(3), Live()
        moved([*values, long], source, target, 64 << 20)
        return target, source

    ends = run_on_threads(on_rank, 3)
    check([target for target, _ in ends], [*values, long])
    reader = ends[99 // 5 % 3][1]
    assert [len(fqns) > 1 for fqns in reader.filled if "99" in fqns] == [True]


def test_memory_that_a_plan_leaves_uninitialised_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [StateValue(str(number), "exp_avg", torch.float32, Whole((4,), (0, 1))) for number in range(5)]
    table = short_scatter.run_table
    monkeypatch.setattr(short_scatter, "run_table", lambda copies: table(copies)[:, 1:])

    def on_rank() -> None:
        moved(values, Files(2), Live(), 64 << 20)

    with pytest.raises(RanksFailed, match="0: exp_avg: rank 1 needs 4 elements, and the plan brings 0"):
        run_on_threads(on_rank, 2)
