"""Checkpoints of the plug-ins, resumed by the trainers themselves: no run begins its optimizer anew without a word."""

from __future__ import annotations

import os
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from kit.accelerate_loop import Loop
from kit.compare import check_same
from kit.hugging_face import enabled, on_cpu, tiny_llama, train
from kit.lightning_runs import WRAPPERS, loader, module, quiet, strategy, trainer
from kit.pretrained import transformers
from parameterized import parameterized
from torch import nn
from torch.distributed.checkpoint import CheckpointException

import fsdp_optim
from fsdp_optim import SaveOptions
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
WORDS = ("fsdp_optim.integrations.accelerate.enable()", "optim.safetensors", "nothing is damaged")


def error_of(kind: str, folder: str, **options: Any) -> str:
    """The error of a Trainer without the plug-in that resumes."""
    try:
        train(kind, folder, None, f"{folder}/checkpoint-2", 1, save_strategy="no", **options)
    except (Exception, CheckpointException) as error:  # that one is a BaseException
        return f"{type(error).__name__}: {error}"
    return "resumed"


def saved_state(kind: str, folder: str) -> None:
    with on_cpu(kind), enabled({}):
        loop = Loop(kind)
        loop.step()
        loop.accelerator.save_state(folder)


def error_of_accelerate(kind: str, folder: str) -> str:
    with on_cpu(kind), enabled(None):
        loop = Loop(kind, seed=1)
        try:
            loop.accelerator.load_state(folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "resumed"


def without_optimizer(folder: str) -> list[str]:
    """An Accelerator with a model alone, which its own functions save and load."""
    import accelerate

    with on_cpu("none"):
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(3, 2))
        with enabled({}):
            accelerator.save_state(folder)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            model.weight.zero_()
        accelerator.load_state(folder)
        check_same("weights", dict(model.state_dict()), wanted)
    return os.listdir(folder)


def lightning_saves(root: str) -> None:
    with quiet():
        for wrapper in WRAPPERS:
            lightning_trainer = trainer(strategy(wrapper))
            lightning_trainer.fit(module(), loader())
            lightning_trainer.save_checkpoint(f"{root}/{wrapper}.ckpt")
            lightning_trainer.strategy.teardown()


def lightning_errors(root: str) -> list[str]:
    """The errors of Lightning's own strategies."""
    errors = []
    with quiet():
        for wrapper in WRAPPERS:
            try:
                trainer(strategy(wrapper, stock=True)).fit(module(), loader(), ckpt_path=f"{root}/{wrapper}.ckpt")
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            else:
                errors.append("resumed")
    return errors


class TrainerTest(unittest.TestCase):
    def setUp(self) -> None:
        self.root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.root)

    @parameterized.expand([("none", 1, 1), ("DDP", 2, 1), ("FSDP2", 2, 2), ("FSDP2", 1, 2)])
    def test_the_trainer_does_not_begin_the_optimizer_anew(self, kind: str, saved_on: int, resumed_on: int) -> None:
        run_on_ranks(train, saved_on, kind, self.root, {}, max_steps=2)
        other = "none" if resumed_on == 1 else "DDP"
        for text in run_on_ranks(error_of, resumed_on, other, self.root):
            for word in (*WORDS, "Trainer.train()"):
                self.assertIn(word, text)
        path = f"{self.root}/checkpoint-2"
        signs = {name: os.path.getsize(f"{path}/{name}") for name in ("optimizer.pt", "optimizer.bin")}
        self.assertLess(max(signs.values()), 2000)

    @parameterized.expand(
        [
            ("SHARDED_STATE_DICT", 4_000_000_000, "pytorch_model_fsdp_0"),
            ("FULL_STATE_DICT", 4_000_000_000, "pytorch_model_fsdp.bin"),
            ("FULL_STATE_DICT", 8_000, "DTensor"),  # the Trainer loads the weights, because they have an index
        ]
    )
    def test_fsdp_of_the_trainer_fails_too(self, kept: str, max_file_size: int, word: str) -> None:
        run_on_ranks(
            train,
            1,
            "FSDP2",
            self.root,
            {"save_options": SaveOptions(durable=False, progress=False, max_file_size=max_file_size)},
            max_steps=2,
        )
        for text in run_on_ranks(error_of, 1, "FSDP2", self.root, state_dict_type=kept):
            self.assertIn(word, text)

    def test_signs_disturb_nothing_else(self) -> None:
        run_on_ranks(train, 1, "none", self.root, {}, max_steps=2)
        path = f"{self.root}/checkpoint-2"
        fsdp_optim.verify(path)
        weights = fsdp_optim.load(path, tiny_llama(1))
        self.assertEqual(weights.step, 2)
        model = transformers().AutoModelForCausalLM.from_pretrained(path)
        optim = torch.optim.AdamW(model.parameters())
        fsdp_optim.load(path, model, optim, options=fsdp_optim.LoadOptions(param_groups="live"))
        self.assertEqual(len(optim.state), len(list(model.parameters())))
        fsdp_optim.convert(path, f"{self.root}/torch", format="torch")
        self.assertEqual(sorted(os.listdir(f"{self.root}/torch")), ["model.pt", "optim.pt", "torch_files.json"])
        pushed = f"{self.root}/pushed"
        shutil.copytree(path, pushed)  # as an upload to the Hub does
        fsdp_optim.verify(pushed)
        (text,) = run_on_ranks(error_of, 1, "none", self.root)
        self.assertIn(WORDS[0], text)

    def test_a_checkpoint_without_optimizer_has_no_sign(self) -> None:
        run_on_ranks(train, 1, "none", self.root, {}, max_steps=2, save_only_model=True)
        self.assertFalse([name for name in os.listdir(f"{self.root}/checkpoint-2") if name.startswith("optimizer")])
        self.assertEqual(run_on_ranks(error_of, 1, "none", self.root, save_only_model=True, max_steps=3), ["resumed"])

    def test_a_save_of_the_trainer_itself_replaces_the_signs(self) -> None:
        run_on_ranks(train, 1, "none", self.root, {}, max_steps=2)
        shutil.rmtree(f"{self.root}/checkpoint-2")
        run_on_ranks(train, 1, "none", self.root, None, max_steps=2)
        self.assertEqual(run_on_ranks(error_of, 1, "none", self.root, max_steps=3), ["resumed"])


class OthersTest(unittest.TestCase):
    def setUp(self) -> None:
        self.root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.root)

    @parameterized.expand([("none", 1, "none", 1), ("FSDP2", 2, "DDP", 2)])
    def test_accelerate_says_what_to_call(self, kind: str, saved_on: int, other: str, resumed_on: int) -> None:
        run_on_ranks(saved_state, saved_on, kind, f"{self.root}/it")
        for text in run_on_ranks(error_of_accelerate, resumed_on, other, f"{self.root}/it"):
            for word in (*WORDS, "accelerator.load_state()"):
                self.assertIn(word, text)

    def test_accelerate_without_an_optimizer_has_no_sign(self) -> None:
        (names,) = run_on_ranks(without_optimizer, 1, f"{self.root}/it")
        self.assertNotIn("optimizer.bin", names)

    def test_lightnings_own_strategies_resume_nothing(self) -> None:
        run_on_ranks(lightning_saves, 1, self.root)
        self.assertEqual(sorted(os.listdir(self.root)), [f"{wrapper}.ckpt" for wrapper in sorted(WRAPPERS)])
        (errors,) = run_on_ranks(lightning_errors, 1, self.root)
        self.assertNotIn("resumed", errors)
        for wrapper, error in zip(WRAPPERS, errors, strict=True):
            self.assertIn(str(Path(self.root, f"{wrapper}.ckpt")), error)


if __name__ == "__main__":
    unittest.main()
