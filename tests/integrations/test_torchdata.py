"""torchdata's StatefulDataLoader at changing numbers of ranks: every sample once in an epoch, from any step on.

Ranks are threads, which save and resume by a manager and by `load`; their loaders are used in turn, because workers are forked.
"""

from __future__ import annotations

import tempfile
import unittest
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from kit.cases import examples
from kit.compare import check_refused, check_same, error_text
from kit.described import training_here
from kit.imports import import_without
from kit.optimizers import adam
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import fsdp_optim
from fsdp_optim import per_rank
from fsdp_optim.integrations.torchdata import ReshardableLoader, ReshardableSampler
from fsdp_optim.testing import run_on_ranks, run_on_threads, thread_rank

QUIET: dict[str, Any] = {"durable": False, "progress": False}


@dataclass(frozen=True)
class Data:
    """The data of a run. `drop_batches`: the loader's drop_last."""

    length: int
    batch_size: int | None = 2
    shuffle: bool = True
    seed: int = 3
    drop_last: bool = False
    pad: bool = False
    drop_batches: bool = False
    num_workers: int = 0
    snapshot_every: int = 1

    def loaders(self, world_size: int) -> list[Any]:
        return [self.loader(rank, world_size) for rank in range(world_size)]

    def loader(self, rank: int, world_size: int, **options: Any) -> Any:
        sampler = ReshardableSampler(
            range(self.length),
            rank=rank,
            world_size=world_size,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
            pad=self.pad,
        )
        return StatefulDataLoader(
            Numbers(self.length),
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            drop_last=self.drop_batches,
            snapshot_every_n_steps=self.snapshot_every,
            **options,
        )

    def order(self, epoch: int) -> list[int]:
        sampler: Any = DistributedSampler(range(self.length), 1, 0, self.shuffle, self.seed)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        return list(sampler)

    def batches(self, left: Sequence[int], rank: int, world_size: int) -> list[list[int]]:
        """The oracle: the batches of a rank, of the samples that are left, one sample at a time."""
        dealt: list[list[int]] = [[] for _ in range(world_size)]
        for turn, sample in enumerate(left):
            dealt[turn % world_size].append(sample)
        most, fewest = max(map(len, dealt)), min(map(len, dealt))
        got = dealt[rank]
        if self.drop_last:
            got = got[:fewest]
        elif self.pad and len(got) < most:
            got = [*got, left[(most * world_size - world_size + rank - len(left)) % len(left)]]
        size = self.batch_size or 1
        batches = [got[at : at + size] for at in range(0, len(got), size)]
        return batches[:-1] if batches and self.drop_batches and len(batches[-1]) < size else batches


class Numbers(torch.utils.data.Dataset[int]):
    """Each sample is its own index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def drawn(iterators: Sequence[Iterator[Any]], num_batches: Sequence[int]) -> list[list[list[int]]]:
    """Up to this many batches of each rank, in lockstep."""
    got: list[list[list[int]]] = [[] for _ in iterators]
    for number in range(max(num_batches)):
        for rank, iterator in enumerate(iterators):
            batch = next(iterator, None) if number < num_batches[rank] else None
            if batch is not None:
                got[rank].append(batch.tolist() if isinstance(batch, torch.Tensor) else [batch])
    return got


class Managed:
    """A run of some ranks, with a manager each, from its resume to its save."""

    def __init__(self, root: Path, loaders: Sequence[Any]) -> None:
        self._managers: list[Any] = [None] * len(loaders)

        def resume() -> int:
            with training_here() as run:
                state = {"loader": per_rank(ReshardableLoader(loaders[thread_rank()]))}
                options = fsdp_optim.ManagerOptions(rng=False, signals=(), **QUIET)
                manager = fsdp_optim.CheckpointManager(root, run.model, run.optim, state=state, options=options)
                self._managers[thread_rank()] = manager
                step = manager.resume()
                assert manager.restored is None or manager.restored.missing_keys == (), manager.restored
                return step

        self.steps = run_on_threads(resume, len(loaders))

    def save(self, step: int) -> None:
        def save() -> None:
            with training_here():
                manager = self._managers[thread_rank()]
                manager.save(step)
                manager.close()

        run_on_threads(save, len(self._managers))


def saved_and_loaded(path: Path, before: Sequence[Any], after: Sequence[Any], wrap: Any = ReshardableLoader) -> Any:
    """Save the loaders of some ranks, and load those of others; returns the errors of the ranks that load."""

    def save() -> None:
        with training_here() as run:
            state = {"loader": per_rank(wrap(before[thread_rank()]))}
            fsdp_optim.save(path, run.model, run.optim, state=state, options=fsdp_optim.SaveOptions(**QUIET))

    def load() -> tuple[str, str]:
        with training_here() as run:
            state = {"loader": per_rank(wrap(after[thread_rank()]))}
            return error_text(lambda: fsdp_optim.load(path, run.model, run.optim, state=state))

    run_on_threads(save, len(before))
    return run_on_threads(load, len(after))


def check_epochs(data: Data, epoch: int, stages: Sequence[tuple[int, int]]) -> None:
    """Train for some batches on each of several numbers of ranks, to the end of the epoch on the last, and one epoch more.

    A stage that asks for more batches than there are ends its epoch.
    """
    left, seen, wanted = data.order(epoch), Counter[int](), list[list[list[int]]]()
    sizes = [world_size for world_size, _ in stages]
    with tempfile.TemporaryDirectory() as folder:
        for number, (world_size, num_batches) in enumerate(stages):
            loaders = data.loaders(world_size)
            run = Managed(Path(folder) / "run", loaders)
            check_same("the step", run.steps, [number] * world_size)
            if number == 0:
                for loader in loaders:
                    loader.sampler.set_epoch(epoch)
            check_same("the epoch", [loader.sampler.epoch for loader in loaders], [epoch] * world_size)
            if world_size != sizes[number - 1] or not number:
                wanted = [data.batches(left, rank, world_size) for rank in range(world_size)]
                check_same("lengths", [len(loader) for loader in loaders], [len(batches) for batches in wanted])
            is_last, most = number == len(stages) - 1, max(map(len, wanted))
            num_batches = data.length + 1 if is_last else num_batches
            asked = [num_batches] * world_size
            if num_batches <= most and (is_last or data.drop_batches or sizes[number + 1] == world_size):
                asked = [min(num_batches, len(batches)) for batches in wanted]  # no rank sees its end before the others
            got = drawn([*map(iter, loaders)], asked)
            check_same("batches", got, [batches[:num_batches] for batches in wanted])
            wanted = [batches[num_batches:] for batches in wanted]
            flat = [sample for batches in got for batch in batches for sample in batch]
            seen.update(flat)
            left = [sample for sample in left if sample not in {*flat}]
            run.save(number + 1)
            if num_batches > most:
                check_once(data, seen, world_size)
                epoch, seen = epoch + 1, Counter()
                left = data.order(epoch)
                wanted = [data.batches(left, rank, world_size) for rank in range(world_size)]
        full = [data.batches(left, rank, world_size) for rank in range(world_size)]
        check_same("the next epoch", drawn([*map(iter, loaders)], [data.length + 1] * world_size), full)


def check_once(data: Data, seen: Counter[int], world_size: int) -> None:
    """Every sample came once; what `drop_last` and `pad` change is fewer than a batch of each rank."""
    missing, more = data.length - len(seen), sum(seen.values()) - len(seen)
    drops = data.drop_last or data.drop_batches
    assert set(seen) <= set(range(data.length)), seen
    assert missing <= (world_size * (data.batch_size or 1) - 1 if drops else 0), (missing, data)
    assert more <= (3 if data.pad and not data.drop_last else 0), (more, data)


numbers_of_ranks = st.integers(1, 4)
stages_of_runs = st.lists(st.tuples(numbers_of_ranks, st.integers(0, 3)), min_size=2, max_size=4)


def data_of(num_workers: int) -> st.SearchStrategy[Data]:
    return st.builds(
        Data,
        length=st.integers(1, 30),
        batch_size=st.integers(1, 3),
        shuffle=st.booleans(),
        drop_last=st.booleans(),
        pad=st.booleans(),
        drop_batches=st.booleans(),
        num_workers=st.just(num_workers),
        snapshot_every=st.integers(1, 3),
    )


class EverySampleOnceTest(unittest.TestCase):
    @examples(60)
    @given(data_of(0), st.integers(0, 2), stages_of_runs)
    def test_any_numbers_of_ranks_and_any_step(self, data: Data, epoch: int, stages: Sequence[tuple[int, int]]) -> None:
        check_epochs(data, epoch, stages)

    @examples(8)
    @given(data_of(2), st.integers(0, 2), stages_of_runs)
    def test_with_workers(self, data: Data, epoch: int, stages: Sequence[tuple[int, int]]) -> None:
        check_epochs(data, epoch, stages)


class SamplerTest(unittest.TestCase):
    def test_from_the_begin_of_an_epoch_it_is_torchs_distributed_sampler(self) -> None:
        for length in (1, 2, 5, 16, 17):
            for world_size in (1, 2, 3, 4, 7):
                for shuffle, drop_last in ((True, False), (True, True), (False, False), (False, True)):
                    for rank in range(world_size):
                        data: Any = range(length)
                        wanted: Any = DistributedSampler(data, world_size, rank, shuffle, 5, drop_last)
                        sampler = ReshardableSampler(
                            data, rank=rank, world_size=world_size, shuffle=shuffle, seed=5, drop_last=drop_last
                        )
                        for epoch in (0, 3):
                            wanted.set_epoch(epoch)
                            sampler.set_epoch(epoch)
                            self.assertEqual(len(sampler), len(wanted))
                            self.assertEqual(list(sampler), list(wanted))

    def test_the_end_of_a_pass_is_the_next_epoch(self) -> None:
        sampler = ReshardableSampler(range(9), seed=2)
        passes = [list(sampler) for _ in range(3)]
        self.assertEqual(passes, [Data(9, seed=2).order(epoch) for epoch in range(3)])
        self.assertEqual(sampler.epoch, 3)
        sampler.set_epoch(1)
        self.assertEqual(list(sampler), passes[1])

    def test_what_it_refuses(self) -> None:
        endless: Any = iter(())
        for make, words in (
            (lambda: ReshardableSampler(range(3), rank=2, world_size=2), "rank=2 is not one of world_size=2 ranks"),
            (lambda: ReshardableSampler(range(3), world_size=0), "world_size=0"),
            (lambda: ReshardableSampler(endless), "has no length"),
        ):
            kind, text = error_text(make)  # type: ignore[arg-type]
            self.assertEqual(kind, "StateError")
            self.assertIn(words, text)


class OtherLoadersTest(unittest.TestCase):
    """What else may change with the number of ranks, and what is refused."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "step"

    def change(self, before: Sequence[Any], after: Sequence[Any], num_batches: int = 2, **options: Any) -> list[int]:
        """Train before, and on the changed ranks to the end of the epoch; returns all samples, sorted."""
        got = drawn([*map(iter, before)], [num_batches] * len(before))
        errors = saved_and_loaded(self.path, before, after, **options)
        self.assertEqual({*errors}, {("", "")})
        got += drawn([*map(iter, after)], [100] * len(after))
        return sorted(sample for batches in got for batch in batches for sample in batch)

    def refused(self, before: Sequence[Any], after: Sequence[Any], *words: str, **options: Any) -> None:
        check_refused(
            "load", saved_and_loaded(self.path, before, after, **options), "StateError", "state['loader']", *words
        )

    @parameterized.expand(
        [
            ("without batches", {"batch_size": None}, {"batch_size": None}),
            ("another size of batches", {"batch_size": 4}, {"batch_size": 3}),
            ("workers then", {}, {"num_workers": 2}),
            ("workers before", {"num_workers": 2, "snapshot_every": 3}, {"num_workers": 1}),
        ]
    )
    def test_other_batches_and_workers(self, _: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        first, then = Data(29, **before).loaders(3), Data(29, **after).loaders(2)
        self.assertEqual(self.change(first, then), [*range(29)])

    def test_ranks_that_share_their_samples_count_as_one(self) -> None:
        """As in tensor parallelism: four ranks with two parts of the data become six with three."""
        data = Data(25)
        before = [data.loader(rank // 2, 2) for rank in range(4)]
        after = [data.loader(rank // 2, 3) for rank in range(6)]
        samples = self.change(before, after)
        self.assertEqual(samples, sorted([*range(25)] * 2))

    def test_as_many_ranks_of_which_two_share_their_samples_now(self) -> None:
        data = Data(25)
        before, after = data.loaders(4), [data.loader(rank // 2, 2) for rank in range(4)]
        got = drawn([*map(iter, before)], [2] * 4)
        self.assertEqual({*saved_and_loaded(self.path, before, after)}, {("", "")})
        got += drawn([*map(iter, after)], [100] * 4)[::2]
        self.assertEqual(sorted(sample for batches in got for batch in batches for sample in batch), [*range(25)])

    def test_before_the_first_batch_and_again_and_again(self) -> None:
        data = Data(17, num_workers=2)
        loaders, seen = data.loaders(4), list[int]()
        for number, world_size in enumerate((3, 2, 2, 1)):
            after = data.loaders(world_size)
            self.assertEqual({*saved_and_loaded(self.path / f"{number}", loaders, after)}, {("", "")})
            loaders = after
            if number == 1:
                got = drawn([*map(iter, loaders)], [2, 2])
                seen += [sample for batches in got for batch in batches for sample in batch]
        [batches] = drawn([iter(loaders[0])], [100])
        self.assertEqual(sorted([*seen, *(sample for batch in batches for sample in batch)]), [*range(17)])

    def test_ranks_of_which_some_have_ended(self) -> None:
        data = Data(7, batch_size=1)  # ranks 0 to 2 have two samples, rank 3 has one
        before, after = data.loaders(4), data.loaders(2)
        got = drawn([*map(iter, before)], [1, 1, 1, 2])
        self.assertEqual({*saved_and_loaded(self.path, before, after)}, {("", "")})
        got += drawn([*map(iter, after)], [9, 9])
        self.assertEqual(sorted(sample for batches in got for [sample] in batches), [*range(7)])

    def test_plain_loaders_are_not_handed_the_state_of_another_rank(self) -> None:
        data = Data(12)
        before = data.loaders(4)
        drawn([*map(iter, before)], [1] * 4)
        self.refused(
            before,
            data.loaders(2),
            "was saved by 4 ranks, and 2 ranks load it, but a StatefulDataLoader does not have reshard(states, world_size)",
            wrap=lambda loader: loader,
        )

    def test_the_state_of_another_rank_of_the_same_number(self) -> None:
        data = Data(12)
        before = data.loaders(2)
        drawn([*map(iter, before)], [1, 1])
        errors = saved_and_loaded(self.path, before, data.loaders(2)[::-1])
        self.assertEqual([kind for kind, _ in errors], ["StateError"] * 2)
        self.assertIn("the saved sampler has rank=0, and the sampler here rank=1", errors[0][1])

    @parameterized.expand([("length", Data(13)), ("seed", Data(12, seed=4)), ("shuffle", Data(12, shuffle=False))])
    def test_other_samples(self, name: str, other: Data) -> None:
        before = Data(12).loaders(3)
        drawn([*map(iter, before)], [1] * 3)
        self.refused(before, other.loaders(2), f"the saved sampler has {name}=")

    def test_ranks_that_are_not_at_the_same_epoch(self) -> None:
        before = Data(12).loaders(2)
        before[1].sampler.set_epoch(1)
        drawn([*map(iter, before)], [1, 1])
        self.refused(before, Data(12).loaders(1), "ranks 0 and 1 were at different epochs")

    def test_a_part_that_no_rank_had(self) -> None:
        before = Data(12).loaders(3)[:2]
        drawn([*map(iter, before)], [1, 1])
        self.refused(before, Data(12).loaders(1), "divided among 3 ranks, and no state is that of rank 2")

    def test_a_data_set_with_a_state(self) -> None:
        class Stateful(Numbers):
            def state_dict(self) -> dict[str, Any]:
                return {"n": 1}

            def load_state_dict(self, state: Mapping[str, Any]) -> None:
                pass

        with mock.patch(f"{__name__}.Numbers", Stateful):
            before, after = Data(12).loaders(2), Data(12).loaders(1)
        drawn([*map(iter, before)], [1, 1])
        self.refused(before, after, "a Stateful, has a state of its own for each rank")

    def test_batches_in_any_order(self) -> None:
        before, after = Data(12).loaders(2), [Data(12, num_workers=2).loader(0, 1, in_order=False)]
        self.refused(before, after, "with in_order=False it is not known which samples have been taken")

    def test_a_state_without_what_is_needed(self) -> None:
        """A plain loader's, whose workers send their states not with every batch; and that of another sampler."""
        data = Data(12, num_workers=2, snapshot_every=2)
        before = data.loaders(2)
        drawn([*map(iter, before)], [1, 1])
        plain = [loader.state_dict() for loader in before]
        adapter = ReshardableLoader(data.loader(0, 1))
        self.assertIn("the batch size is not known", error_text(lambda: adapter.reshard(plain, 1))[1])
        other = StatefulDataLoader(Numbers(12), batch_size=2)
        drawn([iter(other)], [1])
        kind, text = error_text(lambda: adapter.reshard([other.state_dict()] * 2, 1))
        self.assertEqual(kind, "StateError")
        self.assertIn("not that of a StatefulDataLoader (torchdata 0.11.0) with a ReshardableSampler", text)

    def test_loaders_that_cannot_follow_are_refused_at_once(self) -> None:
        numbers: Any = Numbers(12)
        plain: Any = torch.utils.data.DataLoader(numbers, sampler=ReshardableSampler(numbers))
        for loader, words in (
            (plain, "a DataLoader is not a StatefulDataLoader of torchdata"),
            (StatefulDataLoader(numbers), "has a SequentialSampler as its sampler"),
            (
                StatefulDataLoader(numbers, sampler=StatefulDistributedSampler(numbers, 2, 0)),
                "a StatefulDistributedSampler",
            ),
            (StatefulDataLoader(Endless()), "has a _InfiniteConstantSampler as its sampler"),
        ):
            kind, text = error_text(lambda loader=loader: ReshardableLoader(loader))  # type: ignore[misc]
            self.assertEqual(kind, "StateError")
            self.assertIn(words, text)

    def test_a_version_without_a_name_is_refused(self) -> None:
        text = import_without(
            "fsdp_optim.integrations.torchdata", "torchdata.stateful_dataloader", "StatefulDataLoader"
        )
        self.assertIn("torchdata 0.11.0 does not have torchdata.stateful_dataloader.StatefulDataLoader", text)


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


# ------------------------------------------------------------------------------------------ processes


def trained_here(root: Path, wrapper: str, num_batches: int) -> tuple[int, int, list[int]]:
    """A job as users write it: the sampler asks torch.distributed for its rank, and each step is given to the manager."""
    with cpu():
        run, numbers = Trained(wrapper, adam, 1), Numbers(26)
        sampler = ReshardableSampler(numbers, seed=9, pad=False)
        loader: Any = StatefulDataLoader(numbers, batch_size=2, sampler=sampler)
        options = fsdp_optim.ManagerOptions(signals=(), **QUIET)
        state = {"loader": per_rank(ReshardableLoader(loader))}
        seen: list[int] = []
        with fsdp_optim.CheckpointManager(root, run.model, run.optim, state=state, every=1, options=options) as manager:
            first = step = manager.resume()
            assert (sampler.rank, sampler.world_size) == (dist.get_rank(), dist.get_world_size())
            for batch in loader:
                seen += batch.tolist()
                step += 1
                manager.step(step)
                if step == first + num_batches:
                    break
        return first, step, seen


class JobTest(unittest.TestCase):
    def test_processes_with_wrappers_and_a_manager(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root, seen, step = Path(folder) / "run", list[int](), 0
            for wrapper, size, num_batches in (("FSDP2", 3, 2), ("FSDP1 flat", 2, 2), ("DDP", 1, 9)):
                by_rank = run_on_ranks(trained_here, size, root, wrapper, num_batches)
                self.assertEqual({first for first, _, _ in by_rank}, {step})
                [step] = {last for _, last, _ in by_rank}
                seen += [sample for _, _, samples in by_rank for sample in samples]
            self.assertEqual(sorted(seen), [*range(26)])
            self.assertEqual(step, 2 + 2 + 3)
