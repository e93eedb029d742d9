"""The programs in examples/ train, save and continue, on ranks that are there already.

torchrun itself starts all of them in `make test-long`, and the program of README.md in `make test-all` (test_readme.py).
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import unittest
from pathlib import Path

import pytest
import safetensors.torch
import torch
from kit.folders import InFolder
from kit.forked import launch, run_program
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

ROOT = Path(__file__).parents[2]
HUGGING_FACE = ("kit.loaded.hugging_face",)


def torchrun(num_ranks: int, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example on CPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(ROOT / "examples" / example), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def on_rank(example: str, *arguments: str) -> int:
    """The main function of an example on a rank that is there already."""
    return int(runpy.run_path(str(ROOT / "examples" / example))["main"](list(arguments)))


FOLDER, FILE = ("--every", "2", "--root"), ("--file",)
BY_TORCHRUN: list[tuple[str, int, tuple[str, ...], str]] = [
    ("fsdp2_manager.py", 2, FOLDER, "trained from step 0 to step 2"),
    ("pipeline.py", 2, FOLDER, "trained from step 0 to step 2 in 4 stages"),
    ("moe_experts.py", 4, FOLDER, "trained from step 0 to step 2 with 4 experts a group"),
    ("fairscale_fsdp.py", 2, FILE, "trained from step 0 to step 2"),
    ("hf_trainer.py", 2, FOLDER, "trained from step 0 to step 2"),
    ("fsdp2_lora.py", 2, FOLDER, "trained from step 0 to step 2"),
]


@pytest.mark.slow
class TorchrunTest(InFolder):
    @parameterized.expand(BY_TORCHRUN)
    def test_train(self, program: str, num_ranks: int, arguments: tuple[str, ...], words: str) -> None:
        place = self.root / "saved"
        done = torchrun(num_ranks, program, "--last", "2", *arguments, str(place))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(words, done.stdout)
        self.assertTrue(place.exists())


class ManagerTest(InFolder):
    def test_train_and_go_on_with_fewer_ranks(self) -> None:
        arguments = ("--root", str(self.root), "--every", "2", "--last")
        self.assertEqual(run_on_ranks(on_rank, 2, "fsdp2_manager.py", *arguments, "6"), [6, 6])
        self.assertEqual([checkpoint.world_size for checkpoint in fsdp_optim.checkpoints(self.root)][:1], [2])
        self.assertEqual(run_on_ranks(on_rank, 1, "fsdp2_manager.py", *arguments, "9"), [9])
        listed = fsdp_optim.checkpoints(self.root)
        self.assertEqual([checkpoint.step for checkpoint in listed][:2], [9, 8])
        self.assertEqual([checkpoint.world_size for checkpoint in listed][:2], [1, 1])
        self.assertTrue(all(checkpoint.complete for checkpoint in listed))


class TrainerTest(InFolder):
    @pytest.mark.slow  # tests/integrations/test_hf_trainer.py calls its main function on ranks that have transformers
    def test_train_and_go_on_with_fewer_ranks(self) -> None:
        program, arguments = "examples/hf_trainer.py", ("--root", str(self.root), "--every", "2", "--last")
        done = launch(2, program, *arguments, "4", preload=HUGGING_FACE)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("trained from step 0 to step 4", done.stdout)
        done = run_program(program, *arguments, "6", preload=HUGGING_FACE)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("trained from step 4 to step 6", done.stdout)
        self.assertEqual(sorted(path.name for path in self.root.iterdir()), ["checkpoint-4", "checkpoint-6"])
        self.assertEqual([checkpoint.world_size for checkpoint in fsdp_optim.checkpoints(self.root)], [1, 2])


class PipelineTest(InFolder):
    def test_train_and_go_on_in_another_pipeline(self) -> None:
        arguments = ("--root", str(self.root), "--every", "2", "--last")
        self.assertEqual(run_on_ranks(on_rank, 2, "pipeline.py", *arguments, "2"), [0] * 2)
        self.assertEqual(run_on_ranks(on_rank, 4, "pipeline.py", *arguments, "4"), [2] * 4)
        self.assertEqual(run_on_ranks(on_rank, 1, "pipeline.py", *arguments, "5"), [4])
        self.assertEqual([checkpoint.world_size for checkpoint in fsdp_optim.checkpoints(self.root)], [1, 4])
        weights = safetensors.torch.load_file(self.root / "step-00000004" / "model.safetensors")
        self.assertEqual(len(weights), 8 * 6 + 4)


class ExpertsTest(InFolder):
    def test_train_and_go_on_with_other_experts_on_each_rank(self) -> None:
        arguments = ("--root", str(self.root), "--every", "2", "--last")
        self.assertEqual(run_on_ranks(on_rank, 4, "moe_experts.py", *arguments, "2"), [0] * 4)
        self.assertEqual(run_on_ranks(on_rank, 2, "moe_experts.py", *arguments, "4"), [2, 2])
        self.assertEqual(run_on_ranks(on_rank, 1, "moe_experts.py", *arguments, "5"), [4])
        weights = safetensors.torch.load_file(self.root / "step-00000004" / "model.safetensors")
        self.assertEqual(list(weights["experts.up"].shape), [8, 16, 32])

    def test_groups_of_experts_train_as_one_rank_does(self) -> None:
        weights = []
        for world_size in (1, 2):
            run_on_ranks(
                on_rank, world_size, "moe_experts.py", "--root", str(self.root / str(world_size)), "--last", "3"
            )
            weights.append(
                safetensors.torch.load_file(self.root / str(world_size) / "step-00000003" / "model.safetensors")
            )
        for name, weight in weights[
            0
        ].items():  # sums over ranks add up in another order, and Adam divides by small numbers
            torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=1e-4, msg=name)


class ProveTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("an honest job", (), 0, ["bit-identical", "within rounding", "within rounding"]),
            ("a job with a fault", ("--fault", "scheduler"), 3, ["the param groups: lr"] * 3),
        ]
    )
    def test_prove_resume(self, _: str, arguments: tuple[str, ...], num_wrong: int, verdicts: list[str]) -> None:
        program = [
            sys.executable,
            str(ROOT / "examples" / "prove_resume.py"),
            "--worlds",
            "2",
            "1",
            "--wrappers",
            "fsdp2",
            "plain",
        ]
        done = subprocess.run(
            [*program, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.assertEqual(done.returncode, num_wrong, done.stderr)
        for line, verdict in zip(done.stdout.splitlines()[1:], verdicts, strict=True):
            self.assertIn(verdict, line)


class FairscaleTest(InFolder):
    def test_one_file_goes_on_at_another_world_size_and_without_fairscale(self) -> None:
        file = self.root / "full.pt"
        run_on_ranks(on_rank, 2, "fairscale_fsdp.py", "--file", str(file), "--last", "3")
        run_on_ranks(on_rank, 3, "fairscale_fsdp.py", "--file", str(file), "--last", "5")
        saved = torch.load(file)
        self.assertEqual(saved["step"], 5)
        plain = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        plain.load_state_dict(saved["model"])
        optim = torch.optim.AdamW(plain.parameters())
        optim.load_state_dict(saved["optim"])
        self.assertEqual([float(optim.state[param]["step"]) for param in plain.parameters()], [5.0] * 6)
        self.assertEqual(
            [optim.state[param]["exp_avg"].shape for param in plain.parameters()],
            [param.shape for param in plain.parameters()],
        )

    def test_checkpoints_go_on_at_another_world_size(self) -> None:
        for num_ranks, last in ((2, "10"), (1, "20")):
            run_on_ranks(on_rank, num_ranks, "fairscale_fsdp.py", "--root", str(self.root), "--last", last)
        listed = fsdp_optim.checkpoints(self.root)
        self.assertEqual([(checkpoint.step, checkpoint.world_size) for checkpoint in listed], [(20, 1), (10, 2)])


if __name__ == "__main__":
    unittest.main()
