"""A model and an optimizer all of whose values are one number, so that a mixture of two saves shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.options import as_options
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsdp_optim

QUIET: dict[str, Any] = {"progress": False, "timeout": float(os.environ.get("TIMEOUT", "120"))}
_WIDTH, _DEPTH = 64, 4


class Numbered:
    """A sharded model with AdamW. Save number 3 has the value 3 everywhere, in each rank's own small file too."""

    def __init__(self, number: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optim.step()
        self.optim.zero_grad(set_to_none=True)
        self.set(number)

    def _values(self) -> list[Tensor]:
        states = (value for state in self.optim.state.values() for value in state.values())
        return [*(parameter.detach() for parameter in self.model.parameters()), *states]

    def set(self, number: int) -> None:
        """Give all values a number."""
        with torch.no_grad():
            for value in self._values():
                _local(value).fill_(number)

    def numbers(self) -> list[int]:
        """The numbers of which this rank has values."""
        return sorted({int(number) for value in self._values() for number in _local(value).unique().tolist()})

    def arguments(self, number: int) -> dict[str, Any]:
        """What each save gets besides its path."""
        self.set(number)
        return {
            "model": self.model,
            "optim": self.optim,
            "step": number,
            "extra": {"number": number},
            "per_rank_extra": {"own number": number, "rank": dist.get_rank()},
            **QUIET,
        }

    def load(self, path: Path | str) -> int:
        """Load a checkpoint into other values; its number. Raises `AssertionError` for a mixture of several."""
        self.set(-1)
        restored = fsdp_optim.load(path, self.model, self.optim, **as_options(fsdp_optim.LoadOptions, **QUIET))
        # Fewer ranks saved, such as those that a lost host left: a new one has no number of its own.
        is_new = dist.get_rank() >= restored.world_size
        own_number = restored.state["number" if is_new else "own number"]
        numbers = {*self.numbers(), restored.state["number"], own_number, restored.step}
        if len(numbers) > 1:
            raise AssertionError(f"{path} is a mixture of {numbers}")
        return int(restored.state["number"])


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, torch.distributed.tensor.DTensor) else value
