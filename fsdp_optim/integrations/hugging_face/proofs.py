"""The proof of resumes in runs of Accelerate and the Trainer."""

from __future__ import annotations

import re
from typing import Any

from fsdp_optim.integrations.hugging_face.settings import Settings
from fsdp_optim.plugins import ResumeProver

_PROVER = "_fsdp_optim_prover"


def prover_of(run: Any, settings: Settings) -> ResumeProver:
    """Return the prover of an Accelerator or a Trainer, which lives as long as that."""
    prover: ResumeProver | None = vars(run).get(_PROVER)
    if prover is None:
        prover = settings.prover()
        setattr(run, _PROVER, prover)
    return prover


def number_of(path: Any) -> int:
    """Return the number at the end of a folder's name, such as `checkpoint-500`, as the step of the checkpoint; else 0."""
    match = re.search(r"(\d+)$", str(path).rstrip("/"))
    return int(match.group(1)) if match is not None else 0
