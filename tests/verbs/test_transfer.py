"""Live transfer between wrappers, in one job: exact, each byte once, and the source stays as it is."""

from __future__ import annotations

import itertools
import traceback
import unittest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import Differs, check_same, error_text
from kit.local_parts import local_of
from kit.models import Net
from kit.optimizers import adam, sgd
from kit.trained import Oracle, Trained
from kit.wrapping import check_full, cpu, snapshot
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class BytesSent(TorchDispatchMode):
    """Counts the bytes that this rank hands to a process group: point to point, and what collectives are given."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.collective = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = str(func).split(".")[1]
            nbytes = sum(t.numel() * t.element_size() for t in _tensors(args))
            if name == "send":
                self.sent += nbytes
            elif not name.startswith("recv"):
                self.collective += nbytes
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


class Bigger(Net):
    """Its state is much larger than what ranks tell each other about it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(97, 301)
        self.block[0] = torch.nn.Linear(301, 103)


REPORTS = 80_000
"""Bytes that four ranks may need to tell each other what they have, whatever the size of the state."""


def held(trained: Trained) -> torch.Tensor:
    """The numbers of the elements that this rank holds, padding left out."""
    numbers = torch.cat(trained.index)
    return numbers[numbers >= min(trained.numbers.start.values())].unique()


def lacking(source: Trained, target: Trained) -> int:
    """How many elements this rank's target needs that this rank's source does not hold."""
    return int((~torch.isin(held(target), held(source))).sum())


def move(source_kind: str, make: Any, targets: tuple[str, ...]) -> dict[str, tuple[str, int, int, int]]:
    """By target: what was wrong, bytes sent, bytes in collectives, elements that had to come from elsewhere."""
    outcomes = {}
    with cpu():
        source = Trained(source_kind, make, model=Bigger)
        wanted = Oracle(make, model=Bigger).full()
        world = dist.group.WORLD
        for kind in targets:
            problem, sent, other, need = "", 0, 0, 0
            try:
                target = Trained(kind, make, steps=0, model=Bigger)
                before, params = snapshot(source), [local_of(p).detach().clone() for p in target.params]
                with BytesSent() as counter:
                    result = fsdp_optim.transfer_optim_state(
                        source.model,
                        source.optim,
                        target.model,
                        target.optim,
                        options=fsdp_optim.CallOptions(process_group=world),
                    )
                sent, other, need = counter.sent, counter.collective, lacking(source, target)
                again = target.gather(None, process_group=world)
                if result:
                    raise Differs(f"transfer_optim_state left something out: {result}")
                check_same("the source", snapshot(source), before)
                check_same("the target's parameters", [local_of(p).detach() for p in target.params], params)
                check_full("gathered from the target", again, wanted)
                _check_apart(source, target)
                target.step([7])
                check_same("the source, after the target's step", snapshot(source), before)
            except Exception:
                problem = traceback.format_exc()
            outcomes[kind] = (problem, sent, other, need)
    return outcomes


def _check_apart(source: Trained, target: Trained) -> None:
    """No memory is shared."""
    addresses = {_memory(v) for s in source.optim.state.values() for v in s.values() if isinstance(v, torch.Tensor)}
    for values in target.optim.state.values():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() and _memory(value) in addresses:
                raise Differs(f"{name} shares its memory with the source's state")


def _memory(value: torch.Tensor) -> int:
    return local_of(value).untyped_storage().data_ptr() or -id(value)


def targets_of(source: str) -> tuple[str, ...]:
    """The same wrapper, and two others; all the sources together move into every wrapper."""
    place = list(WRAPPERS).index(source)
    return tuple(kind for i, kind in enumerate(WRAPPERS) if (i - place) % 3 == 0)


class Transfers(unittest.TestCase):
    def check(self, source: str, world_size: int, targets: tuple[str, ...]) -> None:
        make, values = (adam, 2) if world_size == 2 else (sgd, 1)
        by_rank = run_on_ranks(move, world_size, source, make, targets)
        for kind in targets:
            for rank, outcomes in enumerate(by_rank):
                if outcomes[kind][0]:
                    raise Differs(f"{source} -> {kind}, rank {rank} of {world_size}:\n{outcomes[kind][0]}")
            sent = sum(outcomes[kind][1] for outcomes in by_rank)
            other = max(outcomes[kind][2] for outcomes in by_rank)
            needed = sum(outcomes[kind][3] for outcomes in by_rank) * values * 4
            if not needed <= sent <= needed + REPORTS:
                raise Differs(f"{source} -> {kind} on {world_size}: {sent} bytes sent, {needed} needed")
            if other > REPORTS:
                raise Differs(f"{source} -> {kind} on {world_size}: {other} bytes in collectives")


@pytest.mark.slow
class OtherTargetsTest(Transfers):
    @parameterized.expand(list(zip(WRAPPERS, itertools.cycle((2, 4)))))
    def test_to_every_wrapper(self, source: str, world_size: int) -> None:
        self.check(source, world_size, tuple(WRAPPERS))


class TransferTest(Transfers):
    @expand(*some(zip(WRAPPERS, itertools.cycle((4, 4, 2, 2))), every=4))
    def test_to_other_wrappers(self, source: str, world_size: int) -> None:
        self.check(source, world_size, targets_of(source))

    def test_what_has_to_move_is_more_than_what_is_told(self) -> None:
        """Otherwise the test above could not see that a byte is sent twice."""
        by_rank = run_on_ranks(move, 2, "FSDP2", adam, ("DDP", "FSDP2"))
        needed = sum(outcomes["DDP"][3] for outcomes in by_rank) * 2 * 4
        self.assertGreater(needed, REPORTS)
        self.assertEqual([outcomes["FSDP2"][3] for outcomes in by_rank], [0, 0])


class Another(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(5, 3)


def to_another_model() -> list[tuple[str, str]]:
    with cpu():
        source, target = Trained("FSDP2"), Trained("FSDP1 flat", model=Another)
        before = snapshot(source), snapshot(target)
        errors = [
            error_text(lambda: fsdp_optim.transfer_optim_state(source.model, source.optim, target.model, target.optim))
        ]
        check_same("after being refused", (snapshot(source), snapshot(target)), before)
        return errors


def refused_by_one_rank() -> tuple[str, str]:
    """The optimizer of the last rank refuses the state; the others have loaded theirs by then."""
    with cpu():
        source, target = Trained("FSDP2"), Trained("FSDP1 flat", steps=1)
        before = snapshot(source), snapshot(target)
        if dist.get_rank() == dist.get_world_size() - 1:
            refusing = target.optim.register_load_state_dict_pre_hook(_refuse)
        error = error_text(
            lambda: fsdp_optim.transfer_optim_state(source.model, source.optim, target.model, target.optim)
        )
        if dist.get_rank() == dist.get_world_size() - 1:
            refusing.remove()
        check_same("after being refused", (snapshot(source), snapshot(target)), before)
        return error


def _refuse(optim: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    raise ValueError("not this state")


class RefusedTest(unittest.TestCase):
    def test_one_rank_refuses_for_all(self) -> None:
        errors = run_on_ranks(refused_by_one_rank, 2)
        self.assertEqual(len(set(errors)), 1, errors)
        self.assertIn("rank 1", errors[0][1])
        self.assertIn("not this state", errors[0][1])

    def test_another_model_is_refused_by_name(self) -> None:
        for errors in run_on_ranks(to_another_model, 2):
            kind, text = errors[0]
            self.assertEqual(kind, "StateError", text)
            self.assertIn("head", text)
