"""Every trainer's plug-in passes `prove` on: the step after a checkpoint is recorded, and a run that resumes compares its own."""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from kit.accelerate_loop import Loop
from kit.cases import expand
from kit.folders import SharedFolder
from kit.hugging_face import enabled, on_cpu, train, trainer_of
from kit.lightning_runs import loader, module, quiet, strategy, trainer
from kit.torchtitan_cpu import torchtitan_on_cpu
from kit.torchtitan_cpu import trainer_of as torchtitan_trainer
from kit.verl_cpu import engine_of, small_llama_folder, verl_on_cpu

from fsdp_optim import ResumeProof
from fsdp_optim.testing import run_on_ranks


def outcome(proof: ResumeProof | None) -> tuple[str, str]:
    return (proof.outcome, proof.cause or proof.reason) if proof is not None else ("none", "")


# ------------------------------------------------------------------------------------------ Accelerate


def accelerated(kind: str, folder: str, resumes: bool, broken: bool = False) -> tuple[str, str]:
    with on_cpu(kind), enabled({"prove": True}):
        loop = Loop(kind)
        if resumes:
            loop.accelerator.load_state(folder)
            if broken:
                loop.optim.param_groups[0]["lr"] *= 2
        else:
            loop.step()
            loop.accelerator.save_state(folder)
        loop.step()
        return outcome(vars(loop.accelerator)["_fsdp_optim_prover"].proof)


class AccelerateTest(unittest.TestCase):
    @expand(soon=[("FSDP2",)], later=[("DDP",), ("FSDP1",)])
    def test_save_state_and_load_state(self, kind: str) -> None:
        with tempfile.TemporaryDirectory() as root:
            folder = f"{root}/checkpoint-7"
            run_on_ranks(accelerated, 2, kind, folder, False)
            self.assertTrue(Path(folder, "proof.json").exists())
            self.assertEqual(run_on_ranks(accelerated, 2, kind, folder, True)[1], ("identical", ""))
            verdict, cause = run_on_ranks(accelerated, 2, kind, folder, True, broken=True)[0]
            self.assertEqual((verdict, cause), ("different", "the param groups"))


# ------------------------------------------------------------------------------------------ the Trainer


def resumed_by_the_trainer(folder: str, checkpoint: str) -> tuple[str, str]:
    with on_cpu("FSDP2"), enabled({"prove": True}):
        run = trainer_of("FSDP2", folder, save_strategy="no")
        run.train(resume_from_checkpoint=checkpoint)
        return outcome(vars(run)["_fsdp_optim_prover"].proof)


class TrainerTest(unittest.TestCase):
    def test_the_trainer_resumes(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            run_on_ranks(train, 2, "FSDP2", root, {"prove": True, "background": True})
            self.assertTrue(Path(root, "checkpoint-2/proof.json").exists())
            self.assertFalse(Path(root, "checkpoint-4/proof.json").exists())  # no step came after it
            verdicts = run_on_ranks(resumed_by_the_trainer, 2, f"{root}/again", f"{root}/checkpoint-2")
            self.assertEqual(verdicts, [("identical", "")] * 2)


# ------------------------------------------------------------------------------------------ Lightning


def lightning_run(wrapper: str, root: str, path: str | None = None) -> tuple[str, str]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    with quiet():
        points = [ModelCheckpoint(dirpath=root, filename="{step}", save_top_k=-1, every_n_epochs=1)] if not path else []
        run = trainer(strategy(wrapper, prove=True), callbacks=points, max_epochs=2)
        run.fit(module(), loader(), ckpt_path=path)
        return outcome(run.strategy.prover.proof)


class LightningTest(unittest.TestCase):
    @expand(soon=[("FSDP2",)], later=[("DDP",), ("FSDP1",)])
    def test_fit_resumes(self, wrapper: str) -> None:
        with tempfile.TemporaryDirectory() as root:
            run_on_ranks(lightning_run, 2, wrapper, root)
            path = f"{root}/step=4.ckpt"
            self.assertTrue(Path(path, "proof.json").exists())
            self.assertEqual(run_on_ranks(lightning_run, 2, wrapper, f"{root}/again", path)[0], ("identical", ""))


# ------------------------------------------------------------------------------------------ torchtitan


def titan_saves(folder: Path) -> None:
    with torchtitan_on_cpu(), torchtitan_trainer(folder, 3, prove="yes") as run:
        run.train()


def titan_resumes(folder: Path) -> tuple[str, str]:
    with torchtitan_on_cpu(), torchtitan_trainer(folder, 3, prove="yes", load_only=True, load_step=2) as run:
        run.train()
        return outcome(run.checkpointer._manager.proof)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan needs Python 3.11")
class TorchtitanTest(SharedFolder):
    def test_the_trainer_resumes(self) -> None:
        run_on_ranks(titan_saves, 2, self.root)
        self.assertEqual([path.parent.name for path in self.root.rglob("proof.json")], ["step-00000002"])
        verdict, cause = run_on_ranks(titan_resumes, 2, self.root)[0]
        self.assertIn((verdict, cause), [("identical", ""), ("different", "the random states")])


# ------------------------------------------------------------------------------------------ verl


def verl_run(folder: Path, resumes: bool) -> tuple[str, str]:
    with verl_on_cpu(), mock.patch.dict(os.environ, {"FSDP_OPTIM_PROVE": "1"}):
        engine = engine_of(folder / "model", "fsdp2", {})

        def step(number: int) -> None:
            tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(number))
            engine.optimizer_zero_grad()
            engine.module(input_ids=tokens).logits.float().square().mean().backward()
            engine.optimizer_step()
            engine.lr_scheduler_step()

        if resumes:
            engine.load_checkpoint(str(folder / "global_step_1/actor"))
        else:
            step(1)
            engine.save_checkpoint(str(folder / "global_step_1/actor"), global_step=1)
        step(2)
        return outcome(engine.checkpoint_manager.prover.proof)


class VerlTest(SharedFolder):
    def test_an_engine_resumes(self) -> None:
        small_llama_folder(self.root / "model")
        run_on_ranks(verl_run, 2, self.root, False)
        self.assertEqual(run_on_ranks(verl_run, 2, self.root, True)[0], ("identical", ""))
