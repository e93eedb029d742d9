"""`prove_resume`: honest jobs are proven in every world and wrapper, a broken one is named, and errors of jobs come out."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parameterized import parameterized
from torch import nn

from fsdp_optim import StateError
from fsdp_optim.testing import RanksFailed, ResumeDiffers, ResumeJob, prove_resume


class Net(nn.Module):
    """With an embedding that is tied to the head, and a layer that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.hidden = nn.Sequential(nn.Linear(8, 13), nn.GELU(), nn.Linear(13, 8))
        self.head = nn.Linear(8, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens)
        return self.head(embedded + self.hidden(embedded))  # type: ignore[no-any-return]


def job(wrap: Callable[[nn.Module], nn.Module], state_is_saved: bool = True) -> ResumeJob:
    torch.manual_seed(0)
    model = wrap(Net())
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)

    def step(number: int) -> Mapping[str, Any]:
        tokens = torch.randint(31, (12, 5), generator=torch.Generator().manual_seed(number))
        tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()
        return {"loss": loss}

    return ResumeJob(model, optim, step, {"scheduler": scheduler} if state_is_saved else None)


def resets_the_rate(wrap: Callable[[nn.Module], nn.Module]) -> ResumeJob:
    """A job whose trainer sets the learning rate in each first step of a process, as warmups do that nobody resumes."""
    made, steps = job(wrap), list[int]()

    def step(number: int) -> Mapping[str, Any] | None:
        if not steps and number > 1:
            made.optim.param_groups[0]["lr"] = 0.1
        steps.append(number)
        return made.step(number)

    return ResumeJob(made.model, made.optim, step, made.state)


def fails(wrap: Callable[[nn.Module], nn.Module]) -> ResumeJob:
    raise ValueError("this job has a bug")


class ProveResumeTest(unittest.TestCase):
    def test_an_honest_job_is_proven_everywhere(self) -> None:
        results = prove_resume(job, worlds=[3, 2], wrappers=["fsdp2", "fsdp1", "ddp", "plain"])
        shown = [(result.wrapper, result.world_size, result.proof.outcome) for result in results]
        self.assertEqual(shown[0], ("fsdp2", 3, "identical"))
        self.assertEqual(shown[1:], [(name, num, "rounding") for name, num, _ in shown[1:]])
        self.assertEqual([(name, num) for name, num, _ in shown[1::2]], [("fsdp2", 2), ("fsdp1", 2), ("ddp", 2)])
        self.assertEqual(shown[-1], ("plain", 1, "rounding"))

    def test_a_broken_job_is_named(self) -> None:
        with self.assertRaises(ResumeDiffers) as caught:
            prove_resume(resets_the_rate, worlds=[2, 1])
        self.assertIsInstance(caught.exception, AssertionError)
        self.assertEqual([result.proof.cause for result in caught.exception.results], ["the param groups"] * 2)
        self.assertIn("2 of 2 resumes are not proven", str(caught.exception))
        self.assertIn("lr of param group 0 was 0.005, and is 0.1", str(caught.exception))

    def test_an_error_of_a_job_comes_out(self) -> None:
        with self.assertRaisesRegex(RanksFailed, "this job has a bug"):
            prove_resume(fails, worlds=[2])

    @parameterized.expand([("no world", {"worlds": []}), ("a name", {"wrappers": ["fsdp3"]}), ("steps", {"steps": 0})])
    def test_wrong_arguments(self, _: str, wrong: dict[str, Any]) -> None:
        with self.assertRaises(StateError):
            prove_resume(functools.partial(job, state_is_saved=False), **wrong)

    def test_under_torchrun(self) -> None:
        """Rank 0 does the work, the other rank gets its results, and an error is one of both."""
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        root = Path(__file__).parents[2]
        env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        self.assertEqual(done.stdout.count("resume proven: step 4 is bit-identical"), 1)
        self.assertEqual(done.stdout.count("this rank has 1 results"), 2)
        self.assertEqual(done.stdout.count("this rank knows that 1 resume differs"), 2)


if __name__ == "__main__":
    print(f"this rank has {len(prove_resume(job, worlds=[2]))} results\n", end="", flush=True)
    try:
        prove_resume(resets_the_rate, worlds=[2])
    except ResumeDiffers as error:
        print(f"this rank knows that {len(error.results)} resume differs\n", end="", flush=True)
