"""The units of the kit's net as fairscale wraps it, and optimizers of one group and of two, for files that fairscale loads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kit.wrapping import adam

UNITS = {
    "": ["scale", "mix", "head.weight", "head.bias"],
    "stem": ["stem.weight", "stem.bias"],
    "block": ["block.1.weight", "block.1.bias", "block.2.weight"],
    "block.0": ["block.0.weight", "block.0.bias"],
}
"""The units of the kit's net, in the order of the wrapped model's parameters."""


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    stem = [param for name, param in named if "stem" in name.split(".")]
    rest = [param for name, param in named if "stem" not in name.split(".")]
    return torch.optim.AdamW([{"params": stem, "lr": 0.5}, {"params": rest}], lr=0.125, weight_decay=0.25)


class TwoGroups:
    """An optimizer of the whole model, as `kit.trained.OfModel`, which pickles."""

    of_model = staticmethod(two_groups)


MAKES: dict[str, Any] = {"one group": adam, "two groups": TwoGroups}
