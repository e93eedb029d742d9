"""One training run: sharded over the ranks of this world, or without FSDP; from the start, or resumed."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import fsdp_optim
from demo.data import Text
from demo.model import Transformer, make_optimizer, shard
from fsdp_optim.fairscale import FullyShardedDataParallel
from fsdp_optim.testing import fairscale_on_cpu

CONTEXT = 64
BATCH_SIZE = 12  # divisible by 1, 2, 3 and 4: the mean gradient is then the same at each of these world sizes


@dataclass(frozen=True)
class Plan:
    """Train `steps` steps; save the run on the way, after `save_after` of them, in `checkpoint`."""

    steps: int
    save_after: int
    checkpoint: Path


@dataclass
class Run:
    """The result of one run, from rank 0."""

    first_step: int
    losses: list[float]
    state_at_start: dict[str, Any] | None  # full optimizer state, gathered again right after it was loaded
    state_at_end: dict[str, Any]
    weights_at_end: dict[str, torch.Tensor]
    seconds: float


def train_sharded(plan: Plan, resume: bool) -> Run | None:
    """The function that each rank runs. Rank 0 returns the run, the others None."""
    start = time.perf_counter()
    hush_fairscale()
    text = Text(CONTEXT, BATCH_SIZE)
    with fairscale_on_cpu():  # not needed where there are GPUs
        torch.manual_seed(0)
        model = shard(Transformer(text.vocabulary_size, CONTEXT))
        optim = make_optimizer(model)
        first_step, state_at_start = 0, None
        if resume:
            first_step = load_sharded(plan.checkpoint, model, optim)
            state_at_start = model.gather_full_optim_state_dict(optim, recipient_rank=0)
        label = f"{dist.get_world_size()} ranks" + (" resumed" if resume else "")
        with tqdm(total=plan.steps, initial=first_step, desc=f"{label:18}", disable=dist.get_rank() != 0) as bar:
            losses = []
            if not resume:
                losses = train(model, optim, text, range(plan.save_after), bar)
                save_sharded(plan.checkpoint, model, optim, step=plan.save_after)
            losses += train(model, optim, text, range(plan.save_after, plan.steps), bar)
        state_at_end = model.gather_full_optim_state_dict(optim, recipient_rank=0)
        weights_at_end = model.state_dict()
    if state_at_end is None:
        return None
    return Run(first_step, losses, state_at_start, state_at_end, weights_at_end, time.perf_counter() - start)


def resume_plain(plan: Plan) -> Run:
    """The same run resumed without FSDP and without ranks: the full state is what a plain optimizer loads."""
    start = time.perf_counter()
    text = Text(CONTEXT, BATCH_SIZE)
    model = Transformer(text.vocabulary_size, CONTEXT)
    optim = make_optimizer(model)
    checkpoint = torch.load(plan.checkpoint, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optim.load_state_dict(checkpoint["optim"])
    state_at_start = fsdp_optim.gather_full_optim_state_dict(model, optim)
    with tqdm(total=plan.steps, initial=checkpoint["step"], desc=f"{'no FSDP resumed':18}") as bar:
        losses = train(model, optim, text, range(checkpoint["step"], plan.steps), bar)
    state_at_end = fsdp_optim.gather_full_optim_state_dict(model, optim)
    assert state_at_end is not None  # there is one process, and it is the recipient
    seconds = time.perf_counter() - start
    return Run(checkpoint["step"], losses, state_at_start, state_at_end, model.state_dict(), seconds)


def save_sharded(path: Path, model: FullyShardedDataParallel, optim: torch.optim.Optimizer, step: int) -> None:
    """One file with the full weights and the full optimizer state, written by rank 0."""
    weights = model.state_dict()  # both lines are collective: all ranks, same order
    full = model.gather_full_optim_state_dict(optim, recipient_rank=0)
    if full is not None:
        torch.save({"step": step, "model": weights, "optim": full}, path)
    dist.barrier()


def load_sharded(path: Path, model: FullyShardedDataParallel, optim: torch.optim.Optimizer) -> int:
    """Load this rank's shard from the one file, at any world size; return the step at which the run continues."""
    checkpoint = torch.load(path, mmap=True, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    fsdp_optim.load_optim_state_dict(optim, model.get_shard_from_optim_state_dict(checkpoint["optim"]))
    return int(checkpoint["step"])


def train(model: nn.Module, optim: torch.optim.Optimizer, text: Text, steps: range, bar: Any) -> list[float]:
    """Plain steps, one loss each: the mean over the global batch."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        characters, following = text.batch(step, rank, world_size)
        optim.zero_grad()
        loss = F.cross_entropy(model(characters).flatten(0, 1), following.flatten())
        loss.backward()
        optim.step()
        mean = loss.detach() / world_size
        if world_size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        bar.update()
    return losses


def hush_fairscale() -> None:
    """Silence warnings of newer torch about old names that fairscale 0.4.13 uses, and that still work."""
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    warnings.filterwarnings("ignore", message=".*_base` is a private function", category=FutureWarning)
