"""Prove that a training resumes as it would have continued: in every world size and wrapper, and with a fault that is found.

    python examples/prove_resume.py                       # local processes, on CPUs
    python examples/prove_resume.py --fault scheduler     # a resume that forgets the schedule: the table names it
    torchrun --nproc-per-node 2 examples/prove_resume.py  # rank 0 does the work

The same `make_job` runs under pytest: see docs/testing.md.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.testing import ResumeDiffers, ResumeJob, prove_resume


def make_job(wrap: Callable[[nn.Module], nn.Module], fault: str | None = None) -> ResumeJob:
    """Make the model, its optimizer and one training step, on each rank. `wrap` wraps the model."""
    torch.manual_seed(0)  # the same weights on all ranks
    model = wrap(nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 64)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)

    def step(number: int) -> Mapping[str, Any]:
        # The same 24 samples at every world size, each rank its part.
        tokens = torch.randint(64, (24, 9), generator=torch.Generator().manual_seed(number))
        tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        scheduler.step()
        return {"loss": loss, "grad_norm": norm}

    if fault == "scheduler":  # a trainer that does not save it, and sets the learning rate when it begins
        return ResumeJob(model, optim, _with_first_rate(optim, step))
    return ResumeJob(model, optim, step, state={"scheduler": scheduler})


def _with_first_rate(
    optim: torch.optim.Optimizer, step: Callable[[int], Mapping[str, Any]]
) -> Callable[[int], Mapping[str, Any]]:
    has_begun = False

    def first_sets_rate(number: int) -> Mapping[str, Any]:
        nonlocal has_begun
        if not has_begun:
            for group in optim.param_groups:
                group["lr"] = 1e-2
        has_begun = True
        return step(number)

    return first_sets_rate


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Returns how many resumes were not proven."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--worlds", type=int, nargs="+", default=[4, 2, 1], help="numbers of ranks; the first one saves"
    )
    parser.add_argument("--wrappers", nargs="+", default=["fsdp2", "ddp"], help="fsdp2, fsdp1, ddp, plain")
    parser.add_argument("--fault", choices=["scheduler"], help="a fault that the proof must find")
    asked = parser.parse_args(arguments)
    job = functools.partial(make_job, fault=asked.fault)
    try:
        prove_resume(job, worlds=asked.worlds, wrappers=asked.wrappers)
    except ResumeDiffers as error:
        return sum(not result.is_proven for result in error.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
