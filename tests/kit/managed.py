"""A training with all that a CheckpointManager saves: dropout, a scheduler, a scaler, an average, a loader, random noise."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_optim
from kit.checkpoints import before_writes
from kit.options import as_options
from kit.wraps import WRAPPERS


class Loader:
    """Stands for a stateful data loader: batches by a generator of its own."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.num_drawn = 0

    def __next__(self) -> Tensor:
        self.num_drawn += 1
        return torch.randn(4, 5, generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_drawn = state["num_drawn"]
        self._generator.set_state(state["generator"])

    def reshard(self, states: list[Any], world_size: int) -> list[Any]:
        """A rank has random numbers of its own, and a new rank keeps its own."""
        return [states[rank] if rank < len(states) else None for rank in range(world_size)]


class Run:
    """A model in a wrapper, trained with a forward pass on every rank, and its manager.

    `alike`: all ranks have the same batches and no random numbers, so that losses do not depend on the number of ranks.
    """

    def __init__(self, root: Any, wrapper: str, *, alike: bool = False, **options: Any) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(0)
        self._alike = alike
        dropout = nn.Identity() if alike else nn.Dropout(0.4)
        self.model: Any = WRAPPERS[wrapper](nn.Sequential(nn.Linear(5, 7), dropout, nn.Linear(7, 3)))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optim, 0.1, total_steps=50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.scaler.scale(torch.ones(()))  # makes its state
        self.average = nn.ModuleDict({"average": nn.Linear(2, 2)})
        self.loader = Loader(7 if alike else 100 + self.rank)
        seed = 0 if alike else 50 + self.rank
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        self.losses: dict[int, float] = {}
        if "state" not in options:
            shared = {"scheduler": self.scheduler, "scaler": self.scaler, "average": self.average}
            options["state"] = {**shared, "loader": self.loader if alike else fsdp_optim.per_rank(self.loader)}
        options.setdefault("every", 2)
        options.setdefault("progress", False)
        options.setdefault("durable", False)
        if wrapper == "plain" and dist.is_initialized():
            options.setdefault("process_group", dist.group.WORLD)
        self.manager = fsdp_optim.CheckpointManager(
            root, self.model, self.optim, **as_options(fsdp_optim.ManagerOptions, **options)
        )

    def train(self, step: int) -> None:
        """One training step, without the manager."""
        batch = next(self.loader)
        if not self._alike:
            batch = batch + random.random() + numpy.random.rand() + torch.rand(())
        self.optim.zero_grad()
        loss = self.model(batch).square().mean() * self.scaler.get_scale()
        loss.backward()
        self.optim.step()
        self.scheduler.step()
        self.scaler.update(2.0 ** (step % 5))
        with torch.no_grad():
            self.average["average"].weight.mul_(0.9).add_(step)  # type: ignore[union-attr, operator]
        self.losses[step] = loss.item()

    def steps(self, steps: Sequence[int], metric: Callable[[int], float | None] = lambda step: None) -> None:
        """Training steps with the manager, until a signal has come."""
        for step in steps:
            self.train(step)
            self.manager.step(step, metric=metric(step))
            if self.manager.should_stop:
                return

    def everything(self) -> dict[str, Any]:
        """All that two runs must have in common."""
        return {
            "optim": {
                name: [value.to_local() if hasattr(value, "to_local") else value for value in values.values()]
                for name, values in enumerate(self.optim.state.values())
            },
            "params": [
                (param.to_local() if hasattr(param, "to_local") else param).detach().clone()
                for param in self.model.parameters()
            ],
            "lr": [group["lr"] for group in self.optim.param_groups],
            "scheduler": self.scheduler.last_epoch,
            "scaler": self.scaler.get_scale(),
            "average": self.average["average"].weight.detach().clone(),  # type: ignore[union-attr, operator]
            "loader": self.loader.num_drawn,
            "random": [random.random(), float(numpy.random.rand()), torch.rand(3)],
        }


def steps_in(root: Any) -> list[int | None]:
    """The steps of the complete checkpoints in a folder, the newest first."""
    return [checkpoint.step for checkpoint in fsdp_optim.checkpoints(root) if checkpoint.complete]


def names_in(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


@contextmanager
def closing_all(*runs: Run) -> Iterator[None]:
    """Close the managers, so that a test that fails leaves no signal handler."""
    try:
        yield
    finally:
        for run in runs:
            run.manager.__exit__(ValueError, None, None)


@contextlib.contextmanager
def full_disk(is_full: bool = True) -> Iterator[None]:
    """Writes of files with tensors fail in the background."""

    def fail(file: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        if is_full and path.endswith(".safetensors") and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with before_writes(fail):
        yield
