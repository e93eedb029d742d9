"""Honest resumes, in all wrappers, worlds, optimizers and precisions: no false alarm, and equal bits where all is cut alike."""

from __future__ import annotations

import tempfile
import unittest
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kit.proof_jobs import OPTIMIZERS, Job, Kind
from kit.torch_limits import NO_FORWARD, skip_if
from parameterized import parameterized

from fsdp_optim import ResumeProof
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

_FOLDER = tempfile.TemporaryDirectory(prefix="proof-honest-")
_SHARDED = ("fairscale flat", "fairscale non-flat", "FSDP1 flat", "FSDP1 orig", "FSDP2", "HSDP", "FSDP2 x TP", "DDP")
_ALL = (
    *(Kind(wrapper) for wrapper in _SHARDED),
    *(Kind(optim=optim) for optim in OPTIMIZERS if optim != "adamw"),
    *(Kind(wrapper, precision="mixed") for wrapper in ("FSDP2", "DDP")),
    *(Kind(wrapper, precision="bf16") for wrapper in ("FSDP2", "DDP", "HSDP")),
    Kind(optim="lion", precision="bf16"),
    Kind(optim="sgd", precision="mixed"),
    Kind(dropout=0.2),
    Kind("FSDP1 orig", dropout=0.2),
    Kind(batch_norm=True),
    Kind("DDP", batch_norm=True),
)
_PLACE = {kind: str(number) for number, kind in enumerate(_ALL)}
_CROSSED = tuple(Kind(wrapper, has_average=False) for wrapper in ("FSDP2", "DDP", "FSDP1 orig", "HSDP", "FSDP2 x TP"))
_PLACE |= {kind: f"crossed-{number}" for number, kind in enumerate(_CROSSED)}


def save_all(root: Path, kinds: list[Kind]) -> None:
    """Runs on every rank: train, save the third step, and make one more."""
    with fairscale_on_cpu():
        for kind in kinds:
            job = Job(root / _PLACE[kind], kind)
            with job.manager:
                job.run(1, 3)
                job.manager.save(3)
                job.run(4, 4)


def resume_all(root: Path, kinds: list[tuple[Kind, Kind]]) -> list[ResumeProof | None]:
    """Runs on every rank: resume the checkpoint of the first kind as the second, make a step, and return the verdicts."""
    proofs = []
    with fairscale_on_cpu():
        for saved, kind in kinds:
            job = Job(root / _PLACE[saved], kind, seed=5)
            with job.manager:
                number = job.manager.resume() + 1
                job.run(number, number)
                proofs.append(job.manager.proof)
    return proofs


@cache
def _saved(world: int) -> Path:
    root = Path(_FOLDER.name) / str(world)
    run_on_ranks(save_all, world, root, [*_ALL, *_CROSSED], timeout=600.0)
    return root


@cache
def _proofs(saved_by: int, world: int) -> dict[Kind, Any]:
    return dict(
        zip(
            _ALL,
            run_on_ranks(resume_all, world, _saved(saved_by), [(k, k) for k in _ALL], timeout=600.0)[0],
            strict=True,
        )
    )


@cache
def _crossed(saved_by: int, world: int) -> dict[tuple[Kind, Kind], Any]:
    pairs = [(a, b) for a in _CROSSED for b in _CROSSED if a != b]
    return dict(zip(pairs, run_on_ranks(resume_all, world, _saved(saved_by), pairs, timeout=600.0)[0], strict=True))


def _check(proof: ResumeProof, kind: Kind, is_same: bool, *, repeats: bool = True) -> None:
    assert proof.outcome == "identical" if is_same and repeats else proof.outcome in ("rounding", "identical"), (
        f"{kind}: {proof}"
    )
    is_random = not is_same and (kind.dropout or kind.batch_norm)
    assert bool(proof.not_compared) == bool(is_random), f"{kind}: {proof}"
    assert is_random or proof.num_values > 80


class TestHonest(unittest.TestCase):
    def setUp(self) -> None:
        skip_if(self, NO_FORWARD)

    @parameterized.expand([(f"{kind}, {world}", kind, world) for world in (2, 1, 3) for kind in _ALL])
    def test_resume(self, _: str, kind: Kind, world: int) -> None:
        _check(_proofs(2, world)[kind], kind, world == 2)

    @parameterized.expand([(f"{a.wrapper} as {b.wrapper}", a, b) for a in _CROSSED for b in _CROSSED if a != b])
    def test_in_another_wrapper(self, _: str, saved: Kind, kind: Kind) -> None:
        _check(_crossed(2, 2)[saved, kind], kind, False)


@pytest.mark.slow
class TestHonestInLargerWorlds(unittest.TestCase):
    def setUp(self) -> None:
        skip_if(self, NO_FORWARD)

    @parameterized.expand([(f"{kind}, 4 to {world}", kind, world) for world in (4, 3, 1) for kind in _ALL])
    def test_resume(self, _: str, kind: Kind, world: int) -> None:
        # gloo adds the gradients of DDP's four ranks in an order that may vary, so that the step is not bit-repeatable.
        _check(_proofs(4, world)[kind], kind, world == 4, repeats=kind.wrapper != "DDP")

    @parameterized.expand([(f"{a.wrapper} as {b.wrapper}", a, b) for a in _CROSSED for b in _CROSSED if a != b])
    def test_in_another_wrapper(self, _: str, saved: Kind, kind: Kind) -> None:
        _check(_crossed(4, 3)[saved, kind], replace(kind), False)
