"""Plans are kept from call to call: nothing is planned twice, and whatever changes between two calls has plans of its own."""

from __future__ import annotations

import contextlib
import tempfile
import unittest
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, those
from kit.checkpoints import scramble
from kit.compare import Differs, check_same
from kit.models import Net, freeze_stem
from kit.optimizers import OfModel, adam, without_stem
from kit.tables import Table
from kit.trained import STEPS, Oracle, Trained, known_oracle
from kit.wrapping import check_full
from kit.wraps import WRAPPERS, in_fsdp2
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_optim
from fsdp_optim.layout import FlatChunks, Whole
from fsdp_optim.plan import Plans, RankPlan, Request, copies_of
from fsdp_optim.testing import fairscale_on_cpu
from fsdp_optim.transport import world_here

SIZE = 3
FEW = ["FSDP2", "FSDP1 flat", "FSDP1 orig", "fairscale flat"]
EVERY = [*FEW, "fairscale non-flat", "HSDP", "FSDP2 x TP", "DDP"]


class Wider(Net):
    """The same names with other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block[0] = nn.Linear(5, 8), nn.Linear(8, 3)


class Deeper(Net):
    """The same parameters with wrappers inside the units."""

    units = ("stem", "block.0", "block.1", "block", "head", "")


@contextlib.contextmanager
def common_folder() -> Iterator[Path]:
    """A new folder for all ranks, until all of them are through with it."""
    with tempfile.TemporaryDirectory() as own_folder:
        folders: list[Any] = [own_folder]
        dist.broadcast_object_list(folders)
        yield Path(folders[0])
        dist.barrier()


def check_calls(what: str, trained: Trained, wanted: Oracle, target: Trained) -> None:
    """Raise unless a gather, and a save that is loaded into `target`, have the oracle's state."""
    check_full(f"{what}: gathered", trained.gather(None), wanted.full())
    with common_folder() as folder:
        fsdp_optim.save(folder / "one", trained.model, trained.optim, options=fsdp_optim.SaveOptions(progress=False))
        fsdp_optim.load(folder / "one", target.model, target.optim, options=fsdp_optim.LoadOptions(progress=False))
    check_full(f"{what}: saved and loaded", target.gather(None), wanted.full())


def kept(wrapper: str) -> None:
    """The second round of calls, after more steps, plans nothing."""
    plans = world_here().plans
    with fairscale_on_cpu():
        trained, target = (Trained(wrapper) for _ in range(2))
        plans.clear()
        before = plans.num_made
        check_calls("first", trained, known_oracle(adam, STEPS), target)
        made = plans.num_made
        trained.step(range(STEPS, STEPS + 2))
        check_calls("again", trained, known_oracle(adam, STEPS + 2), target)
    if plans.num_made != made or made == before:
        raise Differs(f"{plans.num_made - made} plans were made again, after {made - before}")


# ------------------------------------------------------------------------------------------ what may change between two calls


def unfrozen(wrapper: str) -> Iterator[tuple[Trained, Oracle]]:
    """Parameters of the optimizer that get gradients from now on."""
    trained, oracle = Trained(wrapper, prepare=freeze_stem), Oracle(prepare=freeze_stem)
    yield trained, oracle
    for model in (trained.model, oracle.model):
        for param in model.parameters():
            param.requires_grad_(True)
    for run in (trained, oracle):
        run.step(range(STEPS, STEPS + 2))
    yield trained, oracle


def group_added(wrapper: str) -> Iterator[tuple[Trained, Oracle]]:
    """Parameters that the optimizer gets in another group."""
    make = OfModel(without_stem)
    trained, oracle = Trained(wrapper, make), Oracle(make)
    yield trained, oracle
    for run in (trained, oracle):
        known = {id(param) for param in run.optim.param_groups[0]["params"]}
        new = [param for param in run.model.parameters() if id(param) not in known]
        run.optim.add_param_group({"params": new, "lr": 0.5})
        run.step(range(STEPS, STEPS + 2))
    yield trained, oracle


def other_shapes(wrapper: str) -> Iterator[tuple[Trained, Oracle]]:
    """Another model, whose parameters have the same names and other shapes."""
    yield Trained(wrapper), known_oracle(adam, STEPS)
    yield Trained(wrapper, model=Wider), known_oracle(adam, STEPS, Wider)
    yield Trained(wrapper), known_oracle(adam, STEPS)


def wrapped_inside(wrapper: str) -> Iterator[tuple[Trained, Oracle]]:
    """The same parameters in other units."""
    yield Trained(wrapper), known_oracle(adam, STEPS)
    yield Trained(wrapper, model=Deeper), known_oracle(adam, STEPS)


def other_wrappers(wrapper: str) -> Iterator[tuple[Trained, Oracle]]:
    """The same parameters in all other wrappers, and in this one again."""
    for name in (wrapper, *(other for other in WRAPPERS if other != wrapper), wrapper):
        yield Trained(name), known_oracle(adam, STEPS)


def other_ranks(wrapper: str) -> Iterator[tuple[Trained, Oracle]]:
    """The same cut with other ranks for the shards, or with shards on fewer ranks."""
    for order in ([0, 1, 2], [2, 0, 1], [1, 0, 2]):
        yield Trained(lambda model, order=order: in_fsdp2(model, DeviceMesh("cpu", order))), known_oracle(adam, STEPS)
    for shape in ([[0], [1], [2]], [[2, 1, 0]]):
        mesh = DeviceMesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        yield Trained(lambda model, mesh=mesh: in_fsdp2(model, mesh)), known_oracle(adam, STEPS)


Change = Callable[[str], Iterator[tuple[Trained, Oracle]]]
CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (unfrozen, group_added, other_shapes, wrapped_inside, other_wrappers, other_ranks)
}


def changed(name: str, wrapper: str) -> None:
    """Every state of a change has a true gather, save and load, while the plans of the states before it are kept."""
    with fairscale_on_cpu():
        for number, (trained, oracle) in enumerate(CHANGES[name](wrapper)):
            what = f"{name}, state {number}"
            wanted = oracle.full()
            wanted["state"] = dict(sorted(wanted["state"].items()))  # unfrozen parameters come last in the oracle's
            check_full(what, trained.gather(None), wanted)
            with common_folder() as folder:
                fsdp_optim.save(
                    folder / "one", trained.model, trained.optim, options=fsdp_optim.SaveOptions(progress=False)
                )
                scramble(trained, forget=False)
                fsdp_optim.load(
                    folder / "one", trained.model, trained.optim, options=fsdp_optim.LoadOptions(progress=False)
                )
            check_full(f"{what}, saved and loaded", trained.gather(None), wanted)


def replaced(wrapper: str) -> None:
    """A module that is replaced in a live model, by one of another shape: as without the plans of the calls before it."""
    plans = world_here().plans
    with fairscale_on_cpu():
        trained = Trained(wrapper)
        trained.gather(None)
        path = next(name for name, module in trained.model.named_modules() if name.split(".")[-1] == "stem")
        parent = trained.model.get_submodule(path.rpartition(".")[0])
        parent.stem = WRAPPERS[wrapper](nn.Linear(5, 9))
        optim = adam(trained.model.parameters())
        for param in trained.model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        here = fsdp_optim.gather_full_optim_state_dict(trained.model, optim, recipient_rank=None)
        plans.clear()
        again = fsdp_optim.gather_full_optim_state_dict(trained.model, optim, recipient_rank=None)
    check_same("gathered without kept plans", here, again)
    shapes = {
        name: list(here["state"][i]["exp_avg"].shape) for i, name in enumerate(here["param_groups"][0]["param_names"])
    }
    check_same("shapes", (shapes["stem.weight"], shapes["stem.bias"]), ([9, 5], [9]))


def options(wrapper: str) -> None:
    """Calls with other recipients, buckets and dtypes of the state, over plans that are kept."""
    with fairscale_on_cpu():
        trained, oracle = Trained(wrapper), known_oracle(adam, STEPS)
        for recipient, bucket_nbytes in ((0, 1 << 20), (1, 64), (2, 1 << 20), (0, 16), (None, 100), (1, 1 << 20)):
            full = trained.gather(recipient, bucket_nbytes=bucket_nbytes)
            if recipient in (None, dist.get_rank()):
                check_full(f"to rank {recipient}, {bucket_nbytes} bytes", full, oracle.full())
            elif full is not None:
                raise Differs(f"rank {dist.get_rank()} got a dict meant for rank {recipient}")


KEPT = Table(
    kept,
    *those(
        [(SIZE, wrapper) for wrapper in EVERY],
        lambda _, wrapper: wrapper not in ("FSDP1 orig", "fairscale non-flat", "DDP"),
    ),
)
CHANGED = Table(
    changed,
    [
        *((SIZE, name, "FSDP2") for name in CHANGES if name != "other_wrappers"),
        *((SIZE, "wrapped_inside", wrapper) for wrapper in ("FSDP1 flat", "fairscale flat")),
    ],
    [(SIZE, name, wrapper) for name in CHANGES if name != "other_ranks" for wrapper in FEW],
)
REPLACED = Table(replaced, [(SIZE, wrapper) for wrapper in FEW if wrapper != "FSDP1 orig"])
OPTIONS = Table(options, [(SIZE, wrapper) for wrapper in FEW])


class KeptPlansTest(unittest.TestCase):
    @expand(*KEPT.soon_and_later)
    def test_nothing_is_planned_twice(self, *case: Any) -> None:
        KEPT(*case)

    @expand(*CHANGED.soon_and_later)
    def test_what_changes_is_planned_anew(self, *case: Any) -> None:
        CHANGED(*case)

    @parameterized.expand(REPLACED.cases)
    def test_a_module_is_replaced(self, *case: Any) -> None:
        REPLACED(*case)

    @parameterized.expand(OPTIONS.cases)
    def test_calls_with_other_options(self, *case: Any) -> None:
        OPTIONS(*case)


class BoundedTest(unittest.TestCase):
    CUT = [FlatChunks((12, size), 0, size, (range(12),)) for size in range(1, 9)]

    def plan(self, plans: Plans, cut: FlatChunks) -> RankPlan:
        return plans.of(cut, Whole(cut.shape, (0,)), 0)

    def test_a_plan_is_made_once(self) -> None:
        plans = Plans()
        twin = FlatChunks((12, 3), 0, 3, (tuple(range(12)),))
        self.assertIs(self.plan(plans, self.CUT[2]), self.plan(plans, twin))
        self.assertEqual(plans.num_made, 1)
        self.assertEqual(list(self.plan(plans, twin)), list(copies_of(twin, Whole((12, 3), (0,)), rank=0)))

    def test_everything_that_a_plan_depends_on_is_told_apart(self) -> None:
        plans, source, target = Plans(), FlatChunks((6, 4), 0, 6, ((0, 1), (2, 3))), Whole((6, 4), (4, 5))
        asked = [
            (source, target, 0, 0, True),
            (source, target, 1, 0, True),
            (source, target, 0, 1, True),
            (source, target, 0, 0, False),
            (source, Whole((6, 4), (4,)), 0, 0, True),
            (FlatChunks((6, 4), 0, 6, ((0, 1), (3, 2))), target, 0, 0, True),
            (FlatChunks((6, 4), 2, 8, ((0, 1), (2, 3))), target, 0, 0, True),
            (FlatChunks((4, 6), 0, 6, ((0, 1), (2, 3))), Whole((4, 6), (4, 5)), 0, 0, True),
        ]
        for _ in range(2):
            for source_of, target_of, rank, replica, sends in asked:
                plan = plans.of(source_of, target_of, rank, replica, sends=sends)
                wanted = RankPlan.of(source_of, target_of, rank, replica, sends=sends)
                self.assertEqual(
                    (list(plan), plan.receives, plan.num_wanted), (list(wanted), wanted.receives, wanted.num_wanted)
                )
        self.assertEqual(plans.num_made, len(asked))

    def test_plans_that_are_asked_for_together_are_made_once_and_kept(self) -> None:
        plans = Plans()
        kept = self.plan(plans, self.CUT[2])
        requests = [Request(cut, Whole(cut.shape, (0,)), 0) for cut in (*self.CUT, *self.CUT[::-1])]
        asked_plans = list(plans.each(requests))
        self.assertEqual(
            [plan.num_filled for plan in asked_plans], [12 * size for size in (*range(1, 9), *range(8, 0, -1))]
        )
        self.assertEqual(plans.num_made, 8)
        self.assertIs(asked_plans[2], kept)
        self.assertTrue(all(a is b for a, b in zip(asked_plans, asked_plans[::-1], strict=True)))
        self.assertTrue(all(a is b for a, b in zip(asked_plans, plans.each(iter(requests)), strict=True)))
        self.assertEqual(plans.num_made, 8)

    def test_the_memory_of_kept_plans_is_bounded(self) -> None:
        """The plans that were used last are kept."""
        room = Plans(most_nbytes=2 * 2048 + 2 * 12 * 512)
        for cut in self.CUT:
            self.plan(room, cut)
        self.assertEqual(room.num_made, 8)
        self.plan(room, self.CUT[6])
        self.plan(room, self.CUT[0])  # takes the place of the last one
        self.plan(room, self.CUT[6])
        self.assertEqual(room.num_made, 9)
        self.plan(room, self.CUT[7])
        self.assertEqual(room.num_made, 10)

    def test_a_plan_that_is_too_large_is_not_kept(self) -> None:
        tiny = Plans(most_nbytes=100)
        for _ in range(2):
            self.assertEqual(self.plan(tiny, self.CUT[0]).num_filled, 12)
        self.assertEqual(tiny.num_made, 2)

    def test_threads_share_plans(self) -> None:
        plans = Plans(most_nbytes=3 * 2048 + 3 * 12 * 512)  # eight plans do not fit
        with ThreadPoolExecutor(8) as pool:
            counts = list(pool.map(lambda number: self.plan(plans, self.CUT[number % 8]).num_filled, range(400)))
        self.assertEqual(counts, [12 * (number % 8 + 1) for number in range(400)])
