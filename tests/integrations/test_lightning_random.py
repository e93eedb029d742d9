"""Lightning's Trainer resumes with the random states of each rank: with dropout, as the run that was never stopped."""

from __future__ import annotations

import logging
import random
import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from kit.compare import Differs, check_same
from kit.lightning_runs import data, module, quiet, strategy, trainer
from parameterized import parameterized
from torch import Tensor
from torch.utils.data import DataLoader

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.lightning",)
EPOCHS, BATCHES = 3, 4
POINTS = {
    "end of epoch": {"every_n_epochs": 1},
    "mid-epoch": {"every_n_train_steps": 6},
    "last batch": {"every_n_train_steps": 4},
}


def seed(number: int) -> None:
    """Each rank has its own states."""
    random.seed(number + dist.get_rank())
    np.random.seed(number + dist.get_rank())
    torch.manual_seed(number + dist.get_rank())


def noisy() -> Any:
    """A module whose losses depend on the draws of every generator, and that notes them."""
    made = module()

    class Noisy(type(made)):  # type: ignore[misc]
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            hidden = torch.nn.functional.dropout(batch, 0.3)
            noise = random.random() + float(np.random.random())
            self.draws.append((self.global_step, noise, hidden.clone()))
            return self.net(hidden + noise).square().mean()

    made.__class__, made.draws = Noisy, []
    return made


def shuffled(shuffle: bool) -> DataLoader[Tensor]:
    return DataLoader(data(), batch_size=2, shuffle=shuffle)


def run(wrapper: str, shuffle: bool, callbacks: Any = (), path: str | None = None, begin: int = 1) -> tuple[Any, Any]:
    """The draws of each step, and the weights and the state at the end."""
    seed(begin)
    lightning_trainer, resumed = trainer(strategy(wrapper), callbacks=callbacks, max_epochs=EPOCHS), noisy()
    lightning_trainer.fit(resumed, shuffled(shuffle), ckpt_path=path)
    live, group = lightning_trainer.strategy.model, dist.group.WORLD
    weights = fsdp_optim.gather_full_model_state_dict(live, None, options=fsdp_optim.CallOptions(process_group=group))
    state = fsdp_optim.gather_full_optim_state_dict(
        live, lightning_trainer.optimizers[0], None, options=fsdp_optim.CallOptions(process_group=group)
    )["state"]
    return resumed.draws, (weights, state)


def checkpoints(root: str, point: str) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(dirpath=root, filename="{step}", save_top_k=-1, **POINTS[point])


def resume_each(root: str, wrapper: str, point: str, shuffle: bool) -> None:
    with quiet():
        run(wrapper, shuffle)  # the first run in a process imports modules that draw numbers
        oracle, end = run(wrapper, shuffle)
        saving, same_end = run(wrapper, shuffle, [checkpoints(root, point)])
        check_same("a save changes no random state", (saving, same_end), (oracle, end))
        paths = {int(path.stem.partition("=")[2]): str(path) for path in Path(root).glob("step=*.ckpt")}
        steps = sorted(step for step in paths if step < EPOCHS * BATCHES)
        check_same("saved at", steps, [6] if point == "mid-epoch" else [4, 8])
        for step in steps:
            draws, its_end = run(wrapper, shuffle, path=paths[step], begin=77)
            if step % BATCHES == 0:  # Lightning begins an epoch that was under way with the loader's first batch
                check_same(f"draws after {step}", draws, oracle[step:])
                check_same(f"end after {step}", its_end, end)
            else:
                check_same(
                    f"noise after {step}",
                    [(at, noise) for at, noise, _ in draws],
                    [(at, noise) for at, noise, _ in oracle[step:]],
                )
                zeros = [
                    (hidden == 0, there == 0)
                    for (_, _, hidden), (_, _, there) in zip(draws, oracle[step:], strict=True)
                ]
                check_same("dropout", *map(list, zip(*zeros, strict=True)))


class Lines(logging.Handler):
    """The warnings of the library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def at_another_size(root: str) -> tuple[list[str], float]:
    """What a rank draws after the resume, and the warnings."""
    log, handler = logging.getLogger("fsdp_optim"), Lines()
    log.addHandler(handler)
    try:
        with quiet():
            (path,) = Path(root).glob("step=4.ckpt")
            draws, _ = run("FSDP2", False, path=str(path), begin=77)
    finally:
        log.removeHandler(handler)
    return handler.lines, draws[0][1]


def save_only(root: str) -> None:
    with quiet():
        run("FSDP2", False, [checkpoints(root, "end of epoch")])


def without_fit(root: str) -> None:
    """Neither a test from a checkpoint nor a checkpoint of weights alone changes a random state."""
    with quiet():
        seed(1)
        lightning_trainer = trainer(strategy("DDP"), max_epochs=1)
        lightning_trainer.fit(module(), shuffled(False))
        lightning_trainer.save_checkpoint(f"{root}/all.ckpt")
        lightning_trainer.save_checkpoint(f"{root}/weights.ckpt", weights_only=True)
        lightning_trainer.strategy.teardown()
        if "of_this_rank" in fsdp_optim.load(f"{root}/weights.ckpt").state:
            raise Differs("a checkpoint of weights alone has random states")
        seed(5)
        torch.rand(3)
        before = torch.get_rng_state()
        trainer(strategy("DDP")).test(module(), shuffled(False), ckpt_path=f"{root}/all.ckpt", verbose=False)
        random.seed(5 + dist.get_rank())
        wanted = random.random()
        random.seed(5 + dist.get_rank())
        trainer(strategy("DDP")).test(module(), shuffled(False), ckpt_path=f"{root}/all.ckpt", verbose=False)
        check_same("python", random.random(), wanted)
        if torch.equal(before, fsdp_optim.load(f"{root}/all.ckpt").state["of_this_rank"]["random"]["torch"]):
            raise Differs("the case shows nothing")


class RandomTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name

    @parameterized.expand(
        [
            ("DDP", 1, "end of epoch", True),
            ("DDP", 2, "end of epoch", False),
            ("FSDP2", 2, "end of epoch", True),
            ("FSDP1", 2, "last batch", True),
            ("FSDP2", 2, "mid-epoch", False),
            ("DDP", 1, "mid-epoch", False),
        ]
    )
    def test_a_resume_draws_what_the_run_would_have_drawn(
        self, wrapper: str, size: int, point: str, shuffle: bool
    ) -> None:
        run_on_ranks(resume_each, size, self.root, wrapper, point, shuffle)

    def test_a_new_rank_keeps_its_own_states(self) -> None:
        run_on_ranks(save_only, 2, self.root)
        ranks = run_on_ranks(at_another_size, 3, self.root)
        told = [[line for line in lines if "is new" in line] for lines, _ in ranks]
        self.assertEqual([len(lines) for lines in told], [1, 0, 0], told)
        self.assertIn("was saved by 2 ranks, so rank 2 is new: it keeps its own ", told[0][0])
        self.assertEqual(len({drawn for _, drawn in ranks}), 3)

    def test_tests_and_weights_alone_leave_them_as_they_are(self) -> None:
        run_on_ranks(without_fit, 1, self.root)


if __name__ == "__main__":
    unittest.main()
