"""Optimizers and comparisons that several files about save and load share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kit.checkpoints import (
    header_of,
)
from kit.wrapping import (
    STEPS,
    Oracle,
    adam,
    check_same,
    sgd,
)

FURTHER = STEPS + 2


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    stem = [param for name, param in named if "stem" in name.split(".")]
    rest = [param for name, param in named if "stem" not in name.split(".")]
    return [adam(stem), sgd(rest)]


def check_groups(folder: Path, oracle: Oracle) -> None:
    name_of = {id(param): name for name, param in oracle.model.named_parameters()}
    wanted = [
        {**{k: group[k] for k in sorted(group)}, "params": [name_of[id(p)] for p in group["params"]]}
        for group in oracle.optim.param_groups
    ]
    got = [{k: group[k] for k in sorted(group)} for group in json.loads(header_of(folder, "optim")["param_groups"])]
    check_same("param_groups", got, json.loads(json.dumps(wanted)))


def in_order(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """With the values of each parameter by the order of their names."""
    return {name: {key: values[key] for key in sorted(values)} for name, values in state.items()}
