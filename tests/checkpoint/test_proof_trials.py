"""Proven steps of trainings that do something unusual: compiled, recomputed, evaluated between, resumed twice, killed."""

from __future__ import annotations

import tempfile
import unittest
from functools import cache
from pathlib import Path
from typing import Any

import torch
from kit.proof_trials import ALONE, IDENTICAL, Trial, halved, results, resumed, sequences, trained
from kit.torch_limits import NO_FORWARD, skip_if
from parameterized import parameterized

from fsdp_optim import CheckpointManager, ManagerOptions
from fsdp_optim.testing import run_on_ranks

_FOLDER = tempfile.TemporaryDirectory(prefix="proof-trials-")
_NUM_RANKS = {**dict.fromkeys(IDENTICAL, 2), **dict.fromkeys(ALONE, 1)}


@cache
def _results(num_ranks: int) -> dict[str, Any]:
    names = [name for name, number in _NUM_RANKS.items() if number == num_ranks]
    return run_on_ranks(results, num_ranks, Path(_FOLDER.name) / str(num_ranks), names, timeout=300.0)[0]


@cache
def _sequences() -> dict[str, Any]:
    return run_on_ranks(sequences, 2, Path(_FOLDER.name) / "sequences", timeout=300.0)[0]


class TestTrials(unittest.TestCase):
    def setUp(self) -> None:
        skip_if(self, NO_FORWARD)

    @parameterized.expand([(name,) for name in _NUM_RANKS])
    def test_resume(self, name: str) -> None:
        honest, faulty = _results(_NUM_RANKS[name])[name]
        assert getattr(honest, "outcome", honest) == "identical", honest
        assert (faulty.outcome, faulty.cause) == ("different", "the loaded state"), faulty
        assert faulty.reason.startswith(("head.weight: had the norm", "0.head.weight", "1.head.weight")), faulty

    def outcomes(self, name: str) -> list[Any]:
        proofs = _sequences()[name]
        assert isinstance(proofs, list), proofs
        return [getattr(proof, "outcome", proof) for proof in proofs]

    def test_nothing_is_changed(self) -> None:
        assert self.outcomes("untouched") == [True] * 5

    def test_every_step_and_rollback(self) -> None:
        assert self.outcomes("every_step") == [3, "unknown", "identical", "identical"]
        assert "this run has now" in _sequences()["every_step"][1].reason

    def test_no_step_or_another(self) -> None:
        assert self.outcomes("no_step") == [None, "unknown", "identical"]
        assert "recorded step 3" in _sequences()["no_step"][1].reason

    def test_two_managers(self) -> None:
        assert self.outcomes("two_managers") == ["identical", "identical"]

    def test_observed(self) -> None:
        assert self.outcomes("observed_digests") == ["different", "different"]
        assert [proof.cause for proof in _sequences()["observed_digests"]] == ["observed values", "observed numbers"]

    def test_killed_before_the_record(self) -> None:
        """A record that is missing, of another checkpoint, or damaged proves nothing, and is no fault."""
        assert self.outcomes("killed_before_the_record") == ["unknown", "unknown", "unknown", "identical"]


class TestAlone(unittest.TestCase):
    def test_in_an_object_store(self) -> None:
        trained("memory://proofs", Trial0(0))
        assert resumed("memory://proofs", Trial0(1)).outcome == "identical"  # type: ignore[union-attr]
        assert resumed("memory://proofs", Trial0(1), halved).cause == "the loaded state"  # type: ignore[union-attr]

    def test_off(self) -> None:
        """Without prove there are no hooks, and no record."""
        trial = Trial0(0)
        with (
            tempfile.TemporaryDirectory() as root,
            CheckpointManager(
                root,
                trial.model,
                trial.optim,
                every=2,
                options=ManagerOptions(durable=False, signals=(), progress=False),
            ) as manager,
        ):
            for number in (1, 2, 3):
                trial.step(number)
                manager.step(number)
                assert not trial.model._forward_pre_hooks
            manager.wait()
            assert not list(Path(root).rglob("proof.json"))
            assert manager.proof is None


class Trial0(Trial):
    """Without torch.distributed."""

    wrapper = "plain"

    def step(self, number: int) -> None:
        self.optim.zero_grad()
        self.call(torch.ones(2, 4) * number).square().mean().backward()
        self.optim.step()
