"""Faults injected into a resume: the proof catches each and names its cause, at the same number of ranks and at another."""

from __future__ import annotations

import tempfile
import unittest
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kit.proof_faults import FAULTS, Fault, saved, verdicts
from kit.proof_jobs import Kind
from kit.torch_limits import NO_FORWARD, skip_if
from parameterized import parameterized

from fsdp_optim import ResumeProof
from fsdp_optim.testing import run_on_ranks

_KINDS = tuple(dict.fromkeys(replace(fault.kind, tied=True) for fault in FAULTS))
_FOLDER = tempfile.TemporaryDirectory(prefix="proof-faults-")


@cache
def _saved(kind: Kind, world: int) -> Path:
    root = Path(_FOLDER.name) / f"{_KINDS.index(kind)}-{world}"
    run_on_ranks(saved, world, root, kind)
    return root


@cache
def _verdicts(kind: Kind, saved_by: int, world: int) -> dict[str, tuple[ResumeProof, Any]]:
    """The verdicts about all faults of a kind, by name, and "" for an honest resume: in one world."""
    names = [fault.name for fault in FAULTS if replace(fault.kind, tied=True) == kind]
    by_rank = run_on_ranks(verdicts, world, _saved(kind, saved_by), ["", *names], timeout=600.0)
    assert all(
        {name: proof for name, (proof, _) in result.items()} == {n: p for n, (p, _) in by_rank[0].items()}
        for result in by_rank
    )
    return by_rank[0]


def _check(fault: Fault, saved_by: int, world: int) -> None:
    proof = _verdicts(replace(fault.kind, tied=True), saved_by, world)[fault.name][0]
    cause = fault.at_same if saved_by == world else fault.at_other
    # Replicas share the reading of what goes in, so of four of them the one apart may read another part of the weight.
    causes = {cause, fault.at_other} if fault.fewest > 1 and world > 2 else {cause}
    assert proof.cause in causes, f"{fault.name}, {saved_by} -> {world} ranks: {proof}"
    assert (proof.outcome == "different") == bool(cause), proof
    if saved_by == world and proof.cause == cause:
        assert fault.text in proof.reason, f"{fault.text!r} is not in: {proof}"


_NAMED = [(fault.name, fault) for fault in FAULTS]


class TestFaults(unittest.TestCase):
    def setUp(self) -> None:
        skip_if(self, NO_FORWARD)

    def test_there_are_many(self) -> None:
        assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60
        assert all(fault.why for fault in FAULTS if not fault.at_other)

    @parameterized.expand(_NAMED)
    def test_same_number_of_ranks(self, _: str, fault: Fault) -> None:
        _check(fault, 2, 2)

    @parameterized.expand([(name, fault) for name, fault in _NAMED if fault.fewest == 1])
    def test_another_number_of_ranks(self, _: str, fault: Fault) -> None:
        _check(fault, 2, 1)

    @parameterized.expand([(str(kind), kind) for kind in _KINDS])
    def test_no_fault(self, _: str, kind: Kind) -> None:
        assert _verdicts(kind, 2, 2)[""][0].outcome == "identical"
        assert _verdicts(kind, 2, 1)[""][0].outcome in ("rounding", "identical")


@pytest.mark.slow
class TestFaultsInLargerWorlds(unittest.TestCase):
    def setUp(self) -> None:
        skip_if(self, NO_FORWARD)

    @parameterized.expand(
        [(f"{name}, {a} to {b}", fault, a, b) for name, fault in _NAMED for a, b in ((4, 4), (4, 3), (2, 3))]
    )
    def test_fault(self, _: str, fault: Fault, saved_by: int, world: int) -> None:
        _check(fault, saved_by, world)
