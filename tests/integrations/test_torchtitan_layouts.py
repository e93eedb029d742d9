"""torchtitan's Trainer with pipeline and with tensor parallel: stopped and resumed, and loaded in another layout.

As in test_torchtitan.py, where a pipeline stops and continues, it runs on CPU with the stand-ins of `kit.torchtitan_cpu`.
"""

from __future__ import annotations

import sys
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kit.compare import check_same
from kit.torchtitan_cpu import everything, trained, trainer_of, without
from parameterized import parameterized

from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.torchtitan",)

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_degree": 2},
    "virtual stages": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "module_fqns_per_model_part": [
            [
                "tok_embeddings",
                "layers.0",
            ],  # each with a norm: torchtitan refuses a group of parameters that a part does not have
            *(["layers.1"], ["layers.2"]),
            ["layers.3", "norm", "lm_head"],
        ],
    },
    "tensor parallel": {"tensor_parallel_degree": 2},
    "FSDP2": {},
}
SAME = ("model", "state", "scheduler", "step")
"""What must be the same in all layouts."""


def options_of(layout: str) -> dict[str, Any]:
    return {"alike": True, "spec": {"num_layers": 4, "parallelism": LAYOUTS[layout]}}


def stop_and_resume(folder: Path, layout: str) -> dict[str, Any]:
    """Returns what the checkpoint of step 4 has."""
    options = options_of(layout)
    whole = trained(folder / "whole", 6, enable=False, **options)
    saved = trained(folder / "run", 4, **options)
    with trainer_of(folder / "run", 6, load_only=True, **options) as trainer:
        trainer.train()
        check_same("a run that stopped and continued", without(everything(trainer), "random"), without(whole, "random"))
    return {name: saved[name] for name in SAME}


def loaded(folder: Path, layout: str) -> dict[str, Any]:
    with trainer_of(folder / "run", 6, load_only=True, **options_of(layout)) as trainer:
        trainer.checkpointer.load()
        return {name: everything(trainer)[name] for name in SAME}


@unittest.skipUnless(sys.version_info >= (3, 11), "torchtitan needs Python 3.11")
class TestLayouts(unittest.TestCase):
    @parameterized.expand(
        [
            ("virtual stages", {"FSDP2": 3, "pipeline": 2}),
            ("pipeline", {"FSDP2": 1, "virtual stages": 4}),
            ("tensor parallel", {"FSDP2": 2, "pipeline": 4}),
            ("FSDP2", {"tensor parallel": 4, "virtual stages": 2}),
        ]
    )
    @pytest.mark.slow
    def test_a_run_goes_on_and_is_loaded_in_other_layouts(self, layout: str, others: Mapping[str, int]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            wanted = run_on_ranks(stop_and_resume, 2, Path(folder), layout)[0]
            for other, world_size in others.items():
                for got in run_on_ranks(loaded, world_size, Path(folder), other):
                    check_same(f"{layout} in {other} on {world_size} ranks", got, wanted, in_order=False)
