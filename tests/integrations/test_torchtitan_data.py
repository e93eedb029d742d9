"""torchtitan's loader at other numbers of ranks: taken over at the same data-parallel degree, else divided anew or refused.

The loaders are torchtitan's own class, on ranks that are threads of one process; the last class has torchtitan's Trainer.
"""

from __future__ import annotations

import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_refused, check_same, error_text
from kit.described import training_here
from kit.torchtitan_cpu import import_torchtitan, trainer_of

import fsdp_optim
from fsdp_optim import per_rank
from fsdp_optim.testing import run_on_ranks, run_on_threads, thread_rank

LOADED = ("kit.loaded.torchtitan",)

Make = Callable[[int, int], Any]
"""(data-parallel rank, data-parallel degree) -> a loader"""


class Part(torch.utils.data.IterableDataset[int]):
    """Numbers of one data-parallel rank, with a state, as torchtitan's text data sets are cut."""

    def __init__(self, dp_rank: int, degree: int) -> None:
        self._dp_rank, self._degree, self.num_drawn = dp_rank, degree, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.num_drawn += 1
            yield self._dp_rank + self._degree * (self.num_drawn - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_drawn = state["num_drawn"]


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 31

    def __getitem__(self, index: int) -> int:
        return index


def cut(dp_rank: int, degree: int) -> Any:
    from torchtitan.components.dataloader import ParallelAwareDataloader

    return ParallelAwareDataloader(Part(dp_rank, degree), dp_rank, degree, batch_size=2)  # type: ignore[arg-type]


def divided(dp_rank: int, degree: int) -> Any:
    from torchtitan.components.dataloader import ParallelAwareDataloader

    from fsdp_optim.integrations.torchdata import ReshardableSampler

    sampler = ReshardableSampler(Numbers(), rank=dp_rank, world_size=degree, pad=False)
    return ParallelAwareDataloader(Numbers(), dp_rank, degree, batch_size=2, sampler=sampler)  # type: ignore[arg-type]


class OwnLoader:
    """A loader of the user with `reshard`."""

    def __init__(self, dp_rank: int, degree: int) -> None:
        self.number = dp_rank

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]

    def reshard(self, states: list[Any], world_size: int) -> list[Any]:
        return [{"number": 10 * world_size + len(states)}] * world_size


class WithoutReshard(OwnLoader):
    reshard = None  # type: ignore[assignment]


def batches_of(loaders: Sequence[Any], num: int) -> list[list[int]]:
    iterators = [iter(loader) for loader in loaders]
    return [[n for _ in range(num) for n in next(iterator, torch.tensor([])).tolist()] for iterator in iterators]


def changed(path: Path, before: Sequence[Any], after: Sequence[Any]) -> list[tuple[str, str]]:
    """Save loaders, and load those of other ranks, as the manager's plug-in gives them; returns the errors."""
    from fsdp_optim.integrations.torchtitan_state import loader_state

    def save() -> None:
        with training_here() as run:
            state = {"dataloader": per_rank(loader_state(before[thread_rank()]))}
            fsdp_optim.save(path, run.model, run.optim, state=state, options=fsdp_optim.SaveOptions(durable=False))

    def load() -> tuple[str, str]:
        with training_here() as run:
            state = {"dataloader": per_rank(loader_state(after[thread_rank()]))}
            return error_text(lambda: fsdp_optim.load(path, run.model, run.optim, state=state))

    run_on_threads(save, len(before))
    return run_on_threads(load, len(after))


def loaders_change(folder: Path) -> None:
    """All in one process, which has torchtitan."""
    import_torchtitan()
    from fsdp_optim.integrations.torchtitan_state import loader_state

    fine = {("", "")}

    # the same degree, twice as many ranks: two for each part of the data
    before, after = [cut(rank, 2) for rank in range(2)], [cut(rank // 2, 2) for rank in range(4)]
    check_same("drawn", batches_of(before, 2), [[0, 2, 4, 6], [1, 3, 5, 7]])
    check_same("errors", {*changed(folder / "a", before, after)}, fine)
    check_same("continued", batches_of(after, 2), [[8, 10, 12, 14]] * 2 + [[9, 11, 13, 15]] * 2)
    # and back, where the two that have drawn the same count as one
    again = [cut(rank, 2) for rank in range(2)]
    check_same("errors", {*changed(folder / "b", after, again)}, fine)
    check_same("continued again", batches_of(again, 1), [[16, 18], [17, 19]])

    # another degree is refused by name
    words = (
        *(
            "state['dataloader']",
            "a ParallelAwareDataloader with a Part",
            "data-parallel degree 2, and this is degree 3",
        ),
        *("ReshardableSampler", 'exclude_from_loading=["dataloader"]'),
    )
    errors = changed(folder / "c", again, [cut(rank, 3) for rank in range(3)])
    check_refused("degree 3", errors, "StateError", *words)

    # where the number of ranks is the same, too
    errors = changed(folder / "d", again, [cut(0, 1), cut(0, 1)])
    check_refused("degree 1", errors, "StateError", "data-parallel degree 2, and this is degree 1")
    # where ranks have changed places, each takes the state of its data-parallel rank; torchtitan itself would take none
    others = [cut(1, 2), cut(0, 2)]
    check_same("errors", {*changed(folder / "e", again, others)}, fine)
    check_same("continued in other places", batches_of(others, 1), [[21, 23], [20, 22]])
    kind, told = error_text(lambda: loader_state(cut(1, 2)).load_state_dict(again[0].state_dict()))
    check_same("of another", (kind, "that of dp_rank_0, not of dp_rank_1" in told), ("StateError", True))

    # a map-style data set with a sampler that follows
    first, then = [divided(rank, 2) for rank in range(2)], [divided(rank, 3) for rank in range(3)]
    seen = batches_of(first, 3)
    check_same("errors", {*changed(folder / "f", first, then)}, fine)
    seen += batches_of(then, 20)
    check_same("every sample once", sorted(n for numbers in seen for n in numbers), [*range(31)])

    # a loader of the user's
    own = [OwnLoader(rank, 3) for rank in range(3)]
    check_same("errors", {*changed(folder / "g", [OwnLoader(0, 2)] * 2, own)}, fine)
    check_same("asked", [loader.number for loader in own], [32] * 3)
    without = [WithoutReshard(0, 2)] * 2
    errors = changed(folder / "h", without, [WithoutReshard(0, 3)] * 3)
    check_refused("without", errors, "StateError", "a WithoutReshard does not have reshard(states, world_size)")


def saved(folder: Path) -> int:
    with trainer_of(folder, 4) as trainer:
        trainer.train()
        return int(trainer.ntokens_seen)


def loaded(folder: Path, **options: Any) -> tuple[tuple[str, str], int, int, Any]:
    """The error of the load; the step, the tokens and the loader's state."""
    with trainer_of(folder, 6, load_only=True, **options) as trainer:
        error = error_text(trainer.checkpointer.load)
        return error, trainer.step, trainer.ntokens_seen, trainer.dataloader.next_iter_state


def taken_over(folder: Path, source: Path, **options: Any) -> tuple[tuple[str, str], int, int, Any]:
    """As `loaded`, from another folder."""
    return loaded(folder, initial_load_path=str(source), initial_load_model_only=False, **options)


@unittest.skipUnless(sys.version_info >= (3, 11), "torchtitan needs Python 3.11")
class TestLoaders(unittest.TestCase):
    def test_degrees(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(loaders_change, 1, Path(folder))

    def test_in_the_trainer(self) -> None:
        """Saved at degree 2: with tensor parallel on 4 ranks all continue; at degree 4 only without the loader."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tokens = sum(run_on_ranks(saved, 2, folder / "run"))
            place = folder / "run/checkpoint/step-00000004"
            tensor_parallel = {"parallelism": {"tensor_parallel_degree": 2}}
            for call, *more in ((loaded,), (taken_over, place)):
                at = folder / ("run" if call is loaded else "new")
                for error, step, _, state in (by_rank := run_on_ranks(call, 4, at, *more, spec=tensor_parallel)):
                    self.assertEqual((error, step, state is None), (("", ""), 4, False))
                self.assertEqual(sum(seen for _, _, seen, _ in by_rank), tokens)
                by_rank = run_on_ranks(call, 4, at, *more)
                check_refused(
                    "degree 4", [error for error, *_ in by_rank], "StateError", "data-parallel degree 2, and this is"
                )
            for error, step, seen, state in run_on_ranks(
                loaded, 4, folder / "run", exclude_from_loading=["dataloader"]
            ):
                self.assertEqual((error, step, seen, state), (("", ""), 4, tokens // 4, None))
