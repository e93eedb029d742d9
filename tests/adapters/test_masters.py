"""All verbs and checkpoints, bit for bit, of a wrapper whose optimizer holds masters that are not parameters of the model."""

from __future__ import annotations

import contextlib
import tempfile
import unittest
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.checkpoints import load, save
from kit.compare import check_refused, check_same, error_text
from kit.masters import MasterOptimizer, Mixed, MixedAdapter, WithoutMasters
from kit.optimizers import OfModel
from kit.tables import Table
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import check_full, snapshot
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import WrapperError
from fsdp_optim.adapters import Adapter, ModelReader, ModuleTree, use_adapters
from fsdp_optim.adapters.masters import with_masters
from fsdp_optim.adapters.naming import Naming
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.view import NamedHandle


def trained(steps: int = STEPS, optim: type[MasterOptimizer] = MasterOptimizer) -> Trained:
    return Trained(Mixed, OfModel(optim), steps)


def oracle(steps: int) -> Oracle:
    """Adam on fp32 parameters, with gradients rounded to bf16."""
    plain = Oracle(steps=0)
    exact = plain.numbers.gradients
    plain.numbers.gradients = lambda step: exact(step).bfloat16().float()  # type: ignore[method-assign]
    plain.step(range(steps))
    return plain


def wanted(plain: Oracle) -> dict[str, Any]:
    """The expected result of a gather: the state of the plain optimizer, and its parameters as masters."""
    full = plain.full()
    params = dict(plain.model.named_parameters())
    for index, name in enumerate(plain.names):
        full["state"][index]["fp32"] = params[name].detach()
    return full


def check_weights(training: Trained, plain: Oracle) -> None:
    """Raise unless the model has the masters' values in bf16."""
    for param, right in zip(training.params, plain.model.parameters(), strict=True):
        check_same("a weight", param.detach(), right.detach().bfloat16())


def gather_and_load() -> None:
    with use_adapters([MixedAdapter()]):
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        training = trained()
        before = snapshot_of(training)
        full, named = training.gather(None), training.gather(last, "name")
        listed = dict(fsdp_optim.iter_full_optim_state(training.model, training.optim, last))
        check_same("after gathering", snapshot_of(training), before)
        check_full("gathered", full, wanted(oracle(STEPS)))
        if rank == last:
            check_same("by name", list(named["state"].values()), list(full["state"].values()))
            check_same("iterated", listed, named["state"])
        for way in ("shard", "scatter"):
            target = trained(0)
            shard = target.shard(full) if way == "shard" else target.scatter(named, last)
            fsdp_optim.load_optim_state_dict(target.optim, shard)
            check_same("the master", target.optim.master.detach(), training.optim.master.detach())
            target.step(range(STEPS, STEPS + 2))
            check_full(f"{way}, trained on", target.gather(None), wanted(oracle(STEPS + 2)))
            check_weights(target, oracle(STEPS + 2))
        target = trained(0)
        fsdp_optim.transfer_optim_state(training.model, training.optim, target.model, target.optim)
        check_full("transferred", target.gather(None), wanted(oracle(STEPS)))


def snapshot_of(training: Trained) -> list[Any]:
    return [snapshot(training), training.optim.master.detach().clone()]


def save_to(path: Path) -> None:
    with use_adapters([MixedAdapter()]):
        training = trained()
        before = snapshot_of(training)
        save(path, training)
        check_same("after saving", snapshot_of(training), before)


def load_from(path: Path) -> None:
    with use_adapters([MixedAdapter()]):
        target = trained(1)
        restored = load(path, target, compare=True)
        check_same("nothing is missing", [*restored.missing_keys, *restored.unexpected_keys], [])
        check_full("loaded", target.gather(None), wanted(oracle(STEPS)))
        check_weights(target, oracle(STEPS))
        target.step(range(STEPS, STEPS + 2))
        check_full("trained on", target.gather(None), wanted(oracle(STEPS + 2)))
        check_weights(target, oracle(STEPS + 2))


class Unnamed(MixedAdapter):
    """An adapter that does not set Handle.master."""

    def masters(self, tree: Any, optims: Sequence[Any]) -> Any:
        for handle in super().masters(tree, optims):
            yield replace(handle, master=None)


def refused(adapter: Adapter, optim: type[MasterOptimizer]) -> tuple[str, str]:
    with use_adapters([adapter]):
        training = trained(1, optim)
        return error_text(lambda: training.gather(None))


GATHERS = Table(gather_and_load, [(1,), (2,), (3,)])


class TestMasters(unittest.TestCase):
    @parameterized.expand(GATHERS.cases)
    def test_gather_scatter_and_load(self, world_size: int) -> None:
        """The masters come back with bits that bf16 does not have, also from uneven shards with padding on the last rank."""
        GATHERS(world_size)

    def test_save_and_load(self) -> None:
        """A round trip at one rank and at two ranks, and between the two."""
        for saved in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                run_on_ranks(save_to, saved, Path(folder) / "step-1")
                for loaded in (1, 2):
                    with self.subTest(saved=saved, loaded=loaded):
                        run_on_ranks(load_from, loaded, Path(folder) / "step-1")

    def test_masters_that_the_optimizers_own_dict_loses(self) -> None:
        """Masters that a load would not restore are refused on all ranks."""
        errors = run_on_ranks(refused, 2, MixedAdapter(), WithoutMasters)
        check_refused("lost masters", errors, "WrapperError", "scale", "WithoutMasters", "'fp32'", "neither saved nor")

    def test_adapters_that_say_too_little(self) -> None:
        errors = run_on_ranks(refused, 2, Unnamed(), MasterOptimizer)
        check_refused("no name", errors, "WrapperError", "scale", "Handle.master")

    def test_without_the_adapter(self) -> None:
        """The masters are no parameters of the model, and the error says so."""
        training = trained(1)
        name, text = error_text(lambda: training.gather(None))
        self.assertEqual(name, "WrapperError")
        self.assertIn("is not in the model", text)


class TestView(unittest.TestCase):
    """The view of a model with masters, in one process."""

    def setUp(self) -> None:
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(use_adapters([MixedAdapter()]))
        self.one = trained(1)
        self.reader = ModelReader(self.one.model)
        self.view = self.reader.read()
        tree = ModuleTree(self.one.model, is_wrapper_child=MixedAdapter().is_wrapper_child)
        self.masters, self.naming = list(MixedAdapter().masters(tree, [self.one.optim])), Naming(tree, None)

    def test_each_parameter_is_there_once(self) -> None:
        """Masters are in the order of the model; an optimizer without masters gets the unchanged view."""
        masters_view = self.reader.read(optim=self.one.optim)
        self.assertEqual(masters_view.order, self.view.order)
        self.assertEqual([fqn for named in masters_view.handles for fqn in named.fqns], oracle(0).names)
        self.assertEqual([named.handle.master for named in masters_view.handles], ["fp32"])
        self.assertEqual([named.handle.master for named in self.view.handles], [None] * len(self.view.handles))
        self.assertIs(self.reader.read(optim=torch.optim.Adam(self.one.params)), self.view)

    def test_a_master_of_a_part_of_a_live_parameter(self) -> None:
        """The owner of each state would not be known."""
        first, second, *rest = self.view.handles
        both = NamedHandle(
            replace(first.handle, originals=(*first.handle.originals, *second.handle.originals)),
            (*first.fqns, *second.fqns),
        )
        of_first = replace(self.masters[0], originals=self.masters[0].originals[:1])
        with self.assertRaisesRegex(
            WrapperError, "^scale: the optimizer holds a master of this parameter and none of mix"
        ):
            with_masters(replace(self.view, handles=(both, *rest)), [of_first], self.naming)

    def test_a_master_of_no_parameter(self) -> None:
        known = replace(self.view, order=self.view.order[:-1], handles=self.view.handles[:-1])
        with self.assertRaisesRegex(WrapperError, "^head.bias: .* the model has no such parameter"):
            with_masters(known, self.masters, self.naming)


if __name__ == "__main__":
    unittest.main()
