"""Short values that travel together to the rank that writes each, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kit.short_values import OnOneRank, elements, local, moved, values_of

from fsdp_optim import RankError
from fsdp_optim.layout import Block, Box, Boxes, FlatChunks, MeshBoxes, Placement
from fsdp_optim.move import CompleteValues, End, Parts, Slice, StateValue
from fsdp_optim.move import short as short_module
from fsdp_optim.tensors.memory import Budget
from fsdp_optim.testing import RanksFailed, run_on_threads
from fsdp_optim.transport import Failure, world_here


@dataclass
class Live(End):
    strided: bool = False
    fails_on: int | None = None
    asked: list[str] = field(default_factory=list)

    def memory(self, value: StateValue) -> torch.Tensor | None:
        rank = world_here().rank
        if self.fails_on == rank:
            raise OSError("the memory is gone")
        self.asked.append(value.fqn)
        return local(value, rank, strided=self.strided)


@dataclass
class Files(OnOneRank):
    """Each value is needed by one rank, which the value's number gives; what arrives is kept by FQN."""

    as_slices: bool = False
    fails_on: int | None = None
    written: dict[str, bytes] = field(default_factory=dict)
    num_packed: int = 0
    most_nbytes: int = 0

    def drain(self, parts: Sequence[Slice]) -> None:
        for part in parts:
            if part.flat is None:
                continue
            self.note(part.value, bytes(part.flat.contiguous().view(torch.uint8).numpy()))

    def drain_parts(self, parts: Parts) -> None:
        self.drain(parts.slices(range(len(parts.values))))

    def drain_complete(self, complete: CompleteValues) -> None:
        if self.fails_on == world_here().rank:
            raise OSError("no space")
        self.num_packed += 1
        self.most_nbytes = max(self.most_nbytes, complete.memory.nbytes)
        if self.as_slices:
            super().drain_complete(complete)
            return
        data = bytes(complete.memory.numpy())
        for value, start, nbytes in zip(
            complete.values, complete.places.tolist(), complete.nbytes.tolist(), strict=True
        ):
            self.note(value, data[start : start + nbytes])

    def note(self, value: StateValue, data: bytes) -> None:
        assert self.rank_of(value) == world_here().rank
        self.written[value.fqn] = self.written.get(value.fqn, b"") + data  # windows of it, where nothing is sent


@pytest.fixture
def any_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values travel together in a budget of any size, in many batches."""
    monkeypatch.setattr(short_module, "_LEAST_BUDGET", 0)


@pytest.mark.usefixtures("any_budget")
@pytest.mark.parametrize("nbytes", [1, 3000, 16 << 10, 64 << 20])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_every_value_arrives_at_its_writer_alone(world: int, nbytes: int) -> None:
    for seed in range(3):
        values = values_of(world, 10 * world + seed)

        def on_rank(values: Sequence[StateValue] = values, seed: int = seed) -> Files:
            target = Files(world, as_slices=seed == 1)
            moved(values, Live(strided=seed == 2), target, nbytes)
            return target

        ends = run_on_threads(on_rank, world)
        written = {fqn: data for end in ends for fqn, data in end.written.items()}
        assert sum(len(end.written) for end in ends) == len(written)
        for value in values:
            wanted = bytes(elements(value).view(torch.uint8).numpy())
            assert written.get(value.fqn, b"") == wanted, f"{value.fqn} of {value.placement}"
        if world > 1:
            assert any(end.num_packed for end in ends)


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
        fails = {"fails_on": rank}
        source, target = Live(**(fails if where == "source" else {})), Files(3, **(fails if where == "target" else {}))
        moved(values, source, target, nbytes)

    with pytest.raises(RanksFailed) as failed:
        run_on_threads(on_rank, 3, grace=30)
    assert set(failed.value.errors) == {0, 1, 2}
    for other, error in failed.value.errors.items():
        text = "the memory is gone" if where == "source" else "no space"
        assert text in str(error), f"rank {other}: {error}"
        assert isinstance(error, RankError | OSError)


def test_elements_that_no_rank_holds_are_refused_on_all_ranks() -> None:
    half = Boxes((4,), ((0, (Block(Box((0,), (2,)), 0),)),))
    values = [StateValue("0", "exp_avg", torch.float32, half)]

    def on_rank() -> None:
        moved(values, Live(), Files(2), 1000)

    with pytest.raises(RanksFailed, match=r"0: elements \[2, 4\) of exp_avg are held by no rank") as failed:
        run_on_threads(on_rank, 2)
    assert set(failed.value.errors) == {0, 1}


@pytest.mark.usefixtures("any_budget")
def test_memory_that_a_rank_lacks_is_named() -> None:
    placement = MeshBoxes((4,), (2,), ((0, 0),), ((0, 1),))

    class Lacks(Live):
        def memory(self, value: StateValue) -> torch.Tensor | None:
            return None if world_here().rank == 1 and value.fqn == "3" else super().memory(value)

    def on_rank() -> None:
        moved([StateValue(str(n), "exp_avg", torch.float32, placement) for n in range(5)], Lacks(), Files(2), 1000)

    with pytest.raises(RanksFailed, match="3: exp_avg: rank 1 has no elements of this value, but must send some"):
        run_on_threads(on_rank, 2)


def test_only_the_ranks_that_send_are_asked_for_memory() -> None:
    """Of replicas one sends, and the writer uses what it has itself."""
    placement = MeshBoxes((4, 4), (2, 2), ((1, 0),), ((0, 1, 2, 3),))
    values = [StateValue(str(number), "exp_avg", torch.float32, placement) for number in range(40)]

    def on_rank() -> int:
        source = Live()
        moved(values, source, Files(4), 1 << 20)
        return len(source.asked)

    assert sum(run_on_threads(on_rank, 4)) == 2 * len(values)  # a shard each


def test_memory_stays_in_the_budget() -> None:
    """All copies of a batch, and its tables, have room in a half; the messages have the other."""
    placement = MeshBoxes((64, 64), (2,), ((0, 0),), ((0, 1),))
    values = [StateValue(str(number), "exp_avg", torch.float32, placement) for number in range(200)]
    nbytes, most = 8 << 20, (4 << 20) // short_module._COPIES

    def on_rank() -> Files:
        target = Files(2)
        moved(values, Live(), target, nbytes)
        return target

    ends = run_on_threads(on_rank, 2)
    assert all(0 < end.most_nbytes <= most for end in ends)
    assert all(end.num_packed > 1 for end in ends)


def test_large_values_do_not_travel_with_others() -> None:
    """What is larger than a short value goes by windows, as before."""
    numel = short_module._MOST_NBYTES // 4
    values = [
        StateValue(str(n), "exp_avg", torch.float32, MeshBoxes((size,), (2,), ((0, 0),), ((0, 1),)))
        for n, size in enumerate((numel, numel + 1))
    ]

    def on_rank() -> Files:
        target = Files(2)
        moved(values, Live(), target, 64 << 20)
        return target

    ends = run_on_threads(on_rank, 2)
    assert sum(end.num_packed for end in ends) == 2
    assert {fqn: len(data) for end in ends for fqn, data in end.written.items()} == {"0": numel * 4, "1": numel * 4 + 4}
    packed_nbytes = sum(end.most_nbytes for end in ends)
    assert packed_nbytes == numel * 4


def test_values_go_by_windows_where_a_batch_would_have_few() -> None:
    """With a small budget: the ranks would meet before each batch."""
    placement = MeshBoxes((64, 64), (2,), ((0, 0),), ((0, 1),))
    values = [StateValue(str(number), "exp_avg", torch.float32, placement) for number in range(4)]

    def on_rank() -> Files:
        target = Files(2)
        moved(values, Live(), target, short_module._LEAST_BUDGET - 1)
        return target

    ends = run_on_threads(on_rank, 2)
    assert not any(end.num_packed for end in ends)
    assert sum(len(data) for end in ends for data in end.written.values()) == 4 * values[0].nbytes


@pytest.mark.parametrize(
    ("placement", "travels"),
    [
        (MeshBoxes((16, 4), (2,), ((0, 1),), ((0, 1),)), True),
        (MeshBoxes((17, 4), (2,), ((0, 1),), ((0, 1),)), False),  # many rows of two elements
        (MeshBoxes((3, 4, 8), (2,), ((0, 2),), ((0, 1),)), True),
        (MeshBoxes((3, 8, 8), (2,), ((0, 2),), ((0, 1),)), False),
        (FlatChunks((40,), 0, 20, ((0, 1),)), True),
        (Boxes((4,), tuple((rank, (Block(Box((2 * rank,), (2,)), 0),)) for rank in (0, 1))), False),  # may have gaps
    ],
)
def test_values_of_many_runs_go_by_windows(placement: Placement, travels: bool) -> None:
    """A table of runs would take longer, and more memory, than the elements."""
    values = [StateValue(str(number), "exp_avg", torch.float32, placement) for number in range(6)]

    def on_rank() -> Files:
        target = Files(2)
        moved(values, Live(), target, 64 << 20)
        return target

    ends = run_on_threads(on_rank, 2)
    assert any(end.num_packed for end in ends) == travels
    written = {fqn: data for end in ends for fqn, data in end.written.items()}
    for value in values:
        assert written[value.fqn] == bytes(elements(value).view(torch.uint8).numpy()), value.fqn


def test_values_of_a_target_that_needs_their_order_go_by_windows() -> None:
    """A store that uploads parts of a file holds each until all its bytes have come."""
    values = values_of(3, 5, num=40)

    class InOrder(Files):
        in_any_order = False

    def on_rank() -> Files:
        target = InOrder(3)
        moved(values, Live(), target, 64 << 20)
        return target

    ends = run_on_threads(on_rank, 3)
    assert not any(end.num_packed for end in ends)
    written = {fqn: data for end in ends for fqn, data in end.written.items()}
    for value in values:
        assert written.get(value.fqn, b"") == bytes(elements(value).view(torch.uint8).numpy()), value.fqn


def test_each_dtype_of_a_shape_has_its_own_size() -> None:
    """Of values of one shape, for one rank, the wide ones are too large to travel with others."""
    numel = short_module._MOST_NBYTES // 4
    placement = MeshBoxes((numel,), (2,), ((0, 0),), ((0, 1),))
    for dtypes in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        values = [StateValue(str(number), "exp_avg", dtype, placement) for number, dtype in enumerate(dtypes)]

        def on_rank(values: Sequence[StateValue] = values) -> Files:
            target = Files(2)
            moved(values, Live(), target, 64 << 20)
            return target

        ends = run_on_threads(on_rank, 2)
        assert sum(end.most_nbytes for end in ends) == 4 * numel
        assert sum(len(data) for end in ends for data in end.written.values()) == 12 * numel


def test_nothing_is_written_of_messages_that_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    placement, targets = MeshBoxes((4,), (2,), ((0, 0),), ((0, 1),)), list[Files]()
    values = [StateValue(str(number), "exp_avg", torch.float32, placement) for number in range(5)]

    def lose(group: Any, items: Any, failure: Failure, budget: Budget) -> None:
        failure.note(RankError("lost the connection"), fatal=True)

    monkeypatch.setattr(short_module, "exchange", lose)

    def on_rank() -> None:
        target = Files(2)
        targets.append(target)
        moved(values, Live(), target, 64 << 20)

    with pytest.raises(RanksFailed, match="lost the connection"):
        run_on_threads(on_rank, 2)
    assert len(targets) == 2
    assert not any(target.num_packed for target in targets)
