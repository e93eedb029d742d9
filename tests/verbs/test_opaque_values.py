"""Opaque values that stand for themselves, those that go to the ranks that need them only, and how many copies there are."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import Differs, check_same, error_text
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import StateError
from fsdp_optim.layout import FlatChunks
from fsdp_optim.state.values import OpaqueShards, depends_on_cut, same
from fsdp_optim.tensors import memory
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import collective


class Short(nn.Module):
    """A matrix, and vectors that lie on one rank or on several."""

    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(3, 4))
        self.vector = nn.Parameter(torch.empty(5))


class Keeps(torch.optim.SGD):
    """Keeps what `make(param, rank)` gives."""

    def __init__(self, params: Any, make: Any = None) -> None:
        super().__init__(params, lr=0.1)
        self._make = make

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param] = self._make(param, dist.get_rank())


def kept(make: Any) -> Any:
    return lambda params: Keeps(params, make)


def history(param: Any, rank: int) -> dict[str, Any]:
    return {"history": {"at": [1, 2], "values": torch.arange(7.0)}, "word": ["signed"]}


def weights_of_one(param: Any, rank: int) -> dict[str, Any]:
    return {"names": ["a", 0.5], "nested": {"weight": torch.tensor([0.25])}}


def of_one_rank(wrap: str) -> Any:
    """One rank has all: what was gathered, and what comes back on the same layout."""
    with cpu():
        trained, target = (Trained(wrap, kept(history), steps, Short) for steps in (1, 0))
        full = trained.gather(None, "name")
        for shard in (target.shard(full), target.scatter(full)):
            fsdp_optim.load_optim_state_dict(target.optim, shard)
            _check_back(trained, target)
        return full


def _check_back(trained: Trained, target: Trained) -> None:
    for param, target_param in zip(trained.params, target.params, strict=True):
        if not same(dict(trained.optim.state.get(param, {})), dict(target.optim.state.get(target_param, {}))):
            raise Differs(f"{target.optim.state[target_param]}, not {trained.optim.state[param]}")


def equal_on_all(wrap: str) -> Any:
    """All shards have an equal value, of a few numbers and words."""
    with cpu():
        trained, target = (Trained(wrap, kept(weights_of_one), steps, Short) for steps in (1, 0))
        full = trained.gather(None, "name")
        fsdp_optim.load_optim_state_dict(target.optim, target.shard(full))
        _check_back(trained, target)
        return full


def loads(wrap: str, full: Any, make: Any) -> tuple[list[Any], tuple[str, str]]:
    with cpu():
        target = Trained(wrap, kept(make), 0, Short)
        told = error_text(lambda: fsdp_optim.load_optim_state_dict(target.optim, target.shard(full)))
        return [dict(target.optim.state.get(param, {})) for param in target.params], told


class StandsForItselfTest(unittest.TestCase):
    @parameterized.expand([("FSDP2",), ("fairscale non-flat",), ("FSDP1 orig",), ("DDP",), ("plain",)])
    def test_one_rank_has_all_of_the_parameter(self, wrap: str) -> None:
        full = run_on_ranks(of_one_rank, 1, wrap)[0]
        wanted = history(None, 0)
        for name in ("matrix", "vector"):
            self.assertTrue(same(full["state"][name], wanted), full["state"][name])
        for target in ("plain", "FSDP2", "fairscale non-flat"):
            states, told = run_on_ranks(loads, 1, target, full, history)[0]
            self.assertEqual(told, ("", ""))
            self.assertTrue(same(states, [wanted] * 2), states)

    def test_one_of_several_ranks_has_all_of_the_parameter(self) -> None:
        """FSDP1 with original parameters: the vector lies on the last rank."""
        full = run_on_ranks(of_one_rank, 2, "FSDP1 orig")[0]
        self.assertTrue(same(full["state"]["vector"], history(None, 0)), full["state"]["vector"])
        self.assertIsInstance(full["state"]["matrix"]["history"], OpaqueShards)
        states, (kind, text) = run_on_ranks(loads, 1, "plain", full, history)[0]
        self.assertEqual(kind, "StateError")
        self.assertIn("matrix: history", text)
        self.assertEqual(states, [{}, {}])

    def test_a_local_tensor_beside_dtensors_stays_one(self) -> None:
        run_on_ranks(local_tensor, 1)

    @parameterized.expand([("FSDP2",), ("FSDP1 orig",), ("fairscale non-flat",)])
    def test_all_shards_have_an_equal_value(self, wrap: str) -> None:
        full = run_on_ranks(equal_on_all, 2, wrap)[0]
        wanted = weights_of_one(None, 0)
        for name in ("matrix", "vector"):
            self.assertTrue(same(full["state"][name], wanted), full["state"][name])
        for target, size in (("plain", 1), ("FSDP2", 3), ("FSDP1 orig", 2)):
            for states, told in run_on_ranks(loads, size, target, full, weights_of_one):
                self.assertEqual(told, ("", ""))
                self.assertTrue(all(same(values, wanted) for values in states if values), states)

    def test_equal_values_that_depend_on_the_cut_are_kept_per_shard(self) -> None:
        full = run_on_ranks(of_one_rank, 2, "FSDP2")[0]
        self.assertIsInstance(full["state"]["matrix"]["history"], OpaqueShards)
        self.assertEqual(full["state"]["matrix"]["word"], ["signed"])

    def test_what_depends_on_the_cut(self) -> None:
        for value in (None, 1, "a", [1.0, {"b": (True,)}], torch.tensor(1), torch.ones(1), []):
            self.assertFalse(depends_on_cut(value), value)
        for value in (torch.ones(2), [torch.ones(2)], {"a": object()}, {1, 2}, b"bytes"):
            self.assertTrue(depends_on_cut(value), value)

    def test_shards_can_be_compared(self) -> None:
        cuts = (FlatChunks((4,), 0, 2, (range(2),)),)
        shards, equal, other = (OpaqueShards(cuts, {0: torch.ones(3), 1: [torch.tensor([x])]}) for x in (1.0, 1.0, 2.0))
        self.assertEqual(shards, equal)
        self.assertNotEqual(shards, other)
        self.assertNotEqual(shards, OpaqueShards((), shards.by_shard))
        self.assertNotEqual(shards, 7)


def local_tensor() -> None:
    make = kept(lambda param, rank: {"local": torch.arange(2.0)})
    trained, target = (Trained("FSDP2", make, steps, Short) for steps in (1, 0))
    full = trained.gather(None, "name")
    fsdp_optim.load_optim_state_dict(target.optim, target.shard(full))
    _check_back(trained, target)
    plain = Trained("plain", make, 0, Short)
    for shard in (plain.shard(full), plain.scatter(full)):
        fsdp_optim.load_optim_state_dict(plain.optim, shard)
        for param in plain.params:
            check_same("whole", plain.optim.state[param], {"local": torch.arange(2.0)})


# ------------------------------------------------------------------------------------------ where they go

NUMEL = 200_000


def of_rank(param: Any, rank: int) -> dict[str, Any]:
    return {"codes": (torch.arange(NUMEL) + rank).to(torch.uint8), "detached_copy": ["of", rank]}


def transferred(src: str, dst: str) -> int:
    """How many bytes this rank put into messages."""
    world_size = dist.get_world_size()
    with cpu():
        trained, target = (Trained(wrap, kept(of_rank), steps, Short) for wrap, steps in ((src, 1), (dst, 0)))
        nbytes = 0
        pack = collective._pack

        def counted(postings: Any) -> None:
            nonlocal nbytes
            nbytes += sum(posting.message.nbytes for posting in postings if not posting.received)
            pack(postings)

        with mock.patch.object(collective, "_pack", counted):
            fsdp_optim.transfer_optim_state(
                trained.model,
                trained.optim,
                target.model,
                target.optim,
                options=fsdp_optim.CallOptions(process_group=dist.group.WORLD),
            )
        if world_size > 1:
            _check_back(trained, target)
        return nbytes


def copies(wrap: str) -> int:
    """How often a large tensor is copied on this rank in a scatter."""
    with cpu():
        trained, target = (Trained(wrap, kept(of_rank), steps, Short) for steps in (1, 0))
        full = trained.gather(0)
        count = 0
        original = memory.detached_copy

        def counted(value: Any) -> Any:
            nonlocal count
            count += isinstance(value, torch.Tensor) and value.numel() == NUMEL
            return original(value)

        with mock.patch("fsdp_optim.state.live.local_dict.detached_copy", counted):
            shard = target.scatter(full)
        fsdp_optim.load_optim_state_dict(target.optim, shard)
        _check_back(trained, target)
        if full is not None:  # the source's own dict shares no memory with what it got
            for values in target.optim.state.values():
                values["codes"].zero_()
            if not any(bool(v["codes"].by_shard[0].any()) for v in full["state"].values()):
                raise Differs("the full dict was changed")
        return count


class MovesTest(unittest.TestCase):
    @parameterized.expand([("FSDP2", "FSDP2"), ("fairscale flat", "fairscale flat")])
    def test_a_transfer_sends_to_nobody_who_needs_nothing(self, src: str, dst: str) -> None:
        """Both models are cut alike: every rank has its own values already."""
        for nbytes in run_on_ranks(transferred, 3, src, dst):
            self.assertLess(nbytes, NUMEL // 10)

    def test_a_scatter_copies_only_what_belongs_to_the_caller(self) -> None:
        self.assertEqual(run_on_ranks(copies, 2, "FSDP2"), [2, 0])

    def test_a_shard_shares_nothing_with_the_full_dict(self) -> None:
        model = Short()
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for param in model.parameters():
            optim.state[param] = {"codes": [torch.arange(1, 8)], "table": torch.ones(3, 5)}
        full = fsdp_optim.gather_full_optim_state_dict(model, optim)
        shard = fsdp_optim.get_shard_from_optim_state_dict(model, optim, full)
        for values in shard["state"].values():
            values["codes"][0].zero_()
            values["table"].zero_()
        for values in full["state"].values():
            self.assertEqual((int(values["codes"][0].sum()), float(values["table"].sum())), (28, 15.0))
        self.assertEqual(len(full["state"]), len([*model.parameters()]))


class RefusedTest(unittest.TestCase):
    def test_what_an_optimizers_own_load_raises_is_an_error_of_the_library(self) -> None:
        class Strict(torch.optim.SGD):
            def load_state_dict(self, state_dict: Any) -> None:
                super().load_state_dict({**state_dict, "state": {}})
                raise KeyError("mask")

        model = Short()
        optim = Strict(model.parameters(), lr=0.1, momentum=0.9)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        shard = fsdp_optim.get_shard_from_optim_state_dict(
            model, optim, fsdp_optim.gather_full_optim_state_dict(model, optim)
        )
        before = {param: dict(values) for param, values in optim.state.items()}
        with self.assertRaisesRegex(StateError, "Strict's own load_state_dict.*KeyError: 'mask'; nothing was loaded"):
            fsdp_optim.load_optim_state_dict(optim, shard)
        self.assertEqual(len(optim.state), 2)
        for param, values in before.items():
            self.assertEqual([*optim.state[param]], ["momentum_buffer"])
            self.assertIs(optim.state[param]["momentum_buffer"], values["momentum_buffer"])
