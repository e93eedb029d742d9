"""The ways of optimizer state from one model to another: calls of a model, its optimizer, the new ones, and a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_optim


def by_scatter(model: Any, optim: Any, new: Any, new_optim: Any, path: Path) -> None:
    full = fsdp_optim.gather_full_optim_state_dict(model, optim)
    fsdp_optim.load_optim_state_dict(new_optim, fsdp_optim.scatter_full_optim_state_dict(new, new_optim, full))


def by_transfer(model: Any, optim: Any, new: Any, new_optim: Any, path: Path) -> None:
    fsdp_optim.transfer_optim_state(model, optim, new, new_optim)


def by_file(model: Any, optim: Any, new: Any, new_optim: Any, path: Path) -> None:
    fsdp_optim.save(path, model, optim)
    fsdp_optim.load(path, new, new_optim)
