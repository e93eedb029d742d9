"""Lightning's Trainer with the strategies of `fsdp_optim.integrations.lightning`, on ranks of the CPU."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import check_same
from kit.lightning_runs import BATCHES, EPOCHS, WRAPPERS, loader, module, never_stopped, quiet, strategy, trainer
from parameterized import parameterized
from safetensors.torch import load_file

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.lightning",)


def checkpoints(root: Any, **options: Any) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(dirpath=root, **options)


def save_last(root: str, wrappers: list[str], stock: bool = False, **given: Any) -> None:
    """Train for one epoch under each wrapper, and save at its end as `<root>/<wrapper>/last.ckpt`."""
    with quiet():
        for wrapper in wrappers:
            options: dict[str, Any] = {"state_dict_type": "sharded"} if stock and wrapper == "FSDP1" else given
            callback = checkpoints(f"{root}/{wrapper}", save_last=True, save_top_k=0)
            lightning_trainer = trainer(strategy(wrapper, stock=stock, **options), callbacks=[callback])
            lightning_trainer.fit(module(), loader())


def resumed(pairs: list[tuple[str, str]], **options: Any) -> None:
    """Resume each checkpoint under a wrapper, train to the end, and compare with the training that never stopped."""
    model, optim = never_stopped()
    with quiet():
        for path, wrapper in pairs:
            lightning_trainer, resumed = trainer(strategy(wrapper, **options), max_epochs=EPOCHS), module()
            lightning_trainer.fit(resumed, loader(), ckpt_path=path)
            live = lightning_trainer.strategy.model
            group = dist.group.WORLD
            weights = fsdp_optim.gather_full_model_state_dict(
                live, None, options=fsdp_optim.CallOptions(process_group=group)
            )
            full = fsdp_optim.gather_full_optim_state_dict(
                live, lightning_trainer.optimizers[0], None, options=fsdp_optim.CallOptions(process_group=group)
            )
            check_same(f"weights, {path} under {wrapper}", weights, model)
            check_same(f"state, {path} under {wrapper}", full["state"], optim["state"], in_order=False)
            if full["param_groups"][0]["lr"] != optim["param_groups"][0]["lr"]:
                raise AssertionError(f"lr {full['param_groups'][0]['lr']}, not {optim['param_groups'][0]['lr']}")
            if (lightning_trainer.global_step, lightning_trainer.current_epoch) != (BATCHES * EPOCHS, EPOCHS):
                raise AssertionError(
                    f"{path} under {wrapper} ended at {lightning_trainer.global_step}, "
                    f"{lightning_trainer.current_epoch}"
                )
            check_same("of the module", resumed.seen, {"steps": BATCHES, "mean": torch.ones(2), 3: "an int"})


class TestResume(unittest.TestCase):
    """A checkpoint of each strategy, written by 2 ranks."""

    folder: tempfile.TemporaryDirectory[str]

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        run_on_ranks(save_last, 2, cls.folder.name, list(WRAPPERS))

    @classmethod
    def tearDownClass(cls) -> None:
        cls.folder.cleanup()

    def pairs(self, shift: int) -> list[tuple[str, str]]:
        """Each checkpoint, with the wrapper that is `shift` further in the list."""
        to = [*WRAPPERS[shift:], *WRAPPERS[:shift]]
        return [(f"{self.folder.name}/{wrapper}/last.ckpt", other) for wrapper, other in zip(WRAPPERS, to, strict=True)]

    @expand(soon=[(2, 1), (1, 2)], later=[(2, 0)])
    def test_resumes_as_if_it_had_never_stopped(self, world_size: int, shift: int) -> None:
        """In the same strategy, in another of the three, and in another at another world size."""
        run_on_ranks(resumed, world_size, self.pairs(shift))

    def test_the_folder_is_a_checkpoint_of_this_library(self) -> None:
        model, optim = never_stopped(epochs=1)
        for wrapper in WRAPPERS:
            with quiet():
                resumed = module()
            plain = torch.optim.AdamW(resumed.parameters())
            restored = fsdp_optim.load(f"{self.folder.name}/{wrapper}/last.ckpt", resumed, plain)
            check_same("weights", dict(resumed.state_dict()), model)
            check_same("state", plain.state_dict()["state"], optim["state"])
            self.assertEqual((restored.state["global_step"], restored.step), (BATCHES, BATCHES))
            self.assertEqual(restored.state["hyper_parameters"], {"width": 7})


class TestViews(unittest.TestCase):
    def test_views_of_the_options_name_what_is_saved(self) -> None:
        views = [fsdp_optim.View("net.{i}.weight", "o c", {"net.{i}.kernel": "c o"})]
        root = self.enterContext(tempfile.TemporaryDirectory())
        run_on_ranks(save_last, 2, root, ["FSDP2"], save_options=fsdp_optim.SaveOptions(views=views))
        weights, _ = never_stopped(epochs=1)
        saved = load_file(f"{root}/FSDP2/last.ckpt/model.safetensors")
        check_same("transposed", saved["net.2.kernel"], weights["net.2.weight"].T.contiguous())
        self.assertEqual(sorted(saved), ["net.0.bias", "net.0.kernel", "net.2.bias", "net.2.kernel"])
        pairs = [(f"{root}/FSDP2/last.ckpt", wrapper) for wrapper in ("FSDP1", "DDP")]
        run_on_ranks(resumed, 2, pairs, load_options=fsdp_optim.LoadOptions(views=views))


def steps_of(root: str) -> list[int]:
    return sorted(checkpoint.step for checkpoint in fsdp_optim.checkpoints(root) if checkpoint.complete)


def keeps_and_removes(root: str) -> list[tuple[str, list[int]]]:
    """Save each step and keep the best two and the last. Returns what was complete at each removal."""
    from fsdp_optim.integrations import lightning as plugin

    removed, remove = [], plugin._remove

    def noted(path: str, options: Any) -> None:
        removed.append((Path(path).name, steps_of(root)))
        remove(path, options)

    with quiet(), mock.patch.object(plugin, "_remove", noted):
        callback = checkpoints(
            root, filename="{step}", monitor="step", mode="max", save_top_k=2, save_last="link", every_n_train_steps=1
        )
        lightning_trainer = trainer(strategy("FSDP2"), callbacks=[callback], max_epochs=2)
        lightning_trainer.fit(module(), loader())
        lightning_trainer.test(module(), loader(), ckpt_path="best")
    return removed


def save_in_background(root: str) -> None:
    """The end of a save is held back until the trainer has gone on."""
    from fsdp_optim.checkpoint.save import background

    goes_on, finish = threading.Event(), background.finish

    def held(*args: Any) -> Any:
        if not goes_on.wait(30):
            raise AssertionError("save_checkpoint has waited for the end of the save")
        return finish(*args)

    with quiet(), mock.patch.object(background, "finish", held):
        lightning_trainer = trainer(strategy("FSDP1"))
        lightning_trainer.fit(module(), loader())
        lightning_trainer.save_checkpoint(f"{root}/first")
        if Path(root, "first").exists():
            raise AssertionError("the save is complete")
        goes_on.set()
        lightning_trainer.save_checkpoint(f"{root}/second", weights_only=True)
        if not Path(root, "first").exists():
            raise AssertionError("the second save has not waited for the first")
        lightning_trainer.strategy.teardown()
    with quiet():
        once = trainer(strategy("DDP", async_save=False))
        once.fit(module(), loader())
        once.save_checkpoint(f"{root}/third")  # after the training, when the model has no wrapper
        if not Path(root, "third").exists():
            raise AssertionError("a save with async_save=False has returned before its end")
        once.save_checkpoint(Path(root, "hpc_ckpt_1.ckpt"))


def fails_in_background(root: str) -> str:
    """The second save fails on rank 0. Returns the error of this rank."""
    from fsdp_optim.checkpoint.save import background

    finish, num = background.finish, [0]

    def broken(*args: Any) -> Any:
        num[0] += 1
        if num[0] == 2:
            raise fsdp_optim.CheckpointError("the disk is full")
        return finish(*args)

    with quiet(), mock.patch.object(background, "finish", broken):
        lightning_trainer = trainer(strategy("FSDP2"), callbacks=[checkpoints(root, save_top_k=1)], max_epochs=2)
        try:
            lightning_trainer.fit(module(), loader())
        except fsdp_optim.CheckpointError as error:
            return str(error)
    raise AssertionError("the failure was not raised")


class Logged(logging.Handler):
    """The lines of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def dies(root: str) -> list[str]:
    """The training ends by an error of its own while a save fails in the background. Returns the log."""
    from fsdp_optim.checkpoint.save import background

    def broken(*args: Any) -> Any:
        raise fsdp_optim.CheckpointError("the disk is full")

    log, handler = logging.getLogger("fsdp_optim"), Logged()
    log.addHandler(handler)
    try:
        with quiet(), mock.patch.object(background, "finish", broken):
            lightning_trainer, resumed = trainer(strategy("FSDP2")), module()

            def on_train_batch_end(*args: Any) -> None:
                lightning_trainer.save_checkpoint(f"{root}/first")
                raise ZeroDivisionError("of the training")

            resumed.on_train_batch_end = on_train_batch_end
            lightning_trainer.fit(resumed, loader())
    except ZeroDivisionError:
        return handler.lines
    finally:
        log.removeHandler(handler)
    raise AssertionError("the error of the training was not raised")


def cannot_put_a_file_aside(root: str) -> str:
    """Rank 0 cannot rename the file whose name the checkpoint is to get. Returns the error of this rank."""
    from fsdp_optim.integrations import lightning as plugin

    broken = OSError(13, "Permission denied") if dist.get_rank() == 0 else None
    with quiet(), mock.patch.object(plugin, "_put_file_aside", side_effect=broken, return_value=None):
        lightning_trainer = trainer(strategy("DDP"))
        lightning_trainer.fit(module(), loader())
        try:
            lightning_trainer.save_checkpoint(f"{root}/first")
        except fsdp_optim.CheckpointError as error:
            return str(error)
    raise AssertionError("the error was not raised")


def puts_weights(root: str) -> str:
    with quiet():
        lightning_trainer, resumed = trainer(strategy("DDP")), module()
        lightning_trainer.fit(resumed, loader())
        resumed.on_save_checkpoint = lambda checkpoint: checkpoint.update(state_dict={"net.0.bias": torch.zeros(7)})
        try:
            lightning_trainer.save_checkpoint(f"{root}/first")
        except fsdp_optim.StateError as error:
            return str(error)
    raise AssertionError("the weights were accepted")


class TestSaves(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name

    def test_model_checkpoint_removes_through_the_strategy(self) -> None:
        """A removed checkpoint stays until the checkpoint that replaces it is complete; two and the link are left."""
        removed = run_on_ranks(keeps_and_removes, 2, self.root)
        self.assertEqual(removed[1], [])  # rank 0 removes
        self.assertEqual([name for name, _ in removed[0]], [f"step={step}.ckpt" for step in range(1, 7)])
        for step, (_, complete) in enumerate(removed[0], 1):
            self.assertEqual(complete[-1] >= step + 2, True, removed)
        self.assertEqual(sorted(os.listdir(self.root)), ["last.ckpt", "step=7.ckpt", "step=8.ckpt"])
        self.assertEqual(Path(self.root, "last.ckpt").resolve().name, "step=8.ckpt")

    def test_saves_in_the_background(self) -> None:
        run_on_ranks(save_in_background, 2, self.root)
        self.assertEqual(sorted(os.listdir(self.root)), ["first", "hpc_ckpt_1.ckpt", "second", "third"])
        has_optim = {name: fsdp_optim.inspect(f"{self.root}/{name}").has_optim for name in os.listdir(self.root)}
        self.assertEqual(has_optim, {"first": True, "second": False, "third": True, "hpc_ckpt_1.ckpt": True})

    def test_a_failed_save_is_raised_on_all_ranks_and_the_one_before_it_stays(self) -> None:
        errors = run_on_ranks(fails_in_background, 2, self.root)
        for error in errors:
            self.assertIn("the disk is full", error)
        self.assertEqual(os.listdir(self.root), [f"epoch=0-step={BATCHES}.ckpt"])

    def test_an_error_of_the_training_is_not_hidden_by_one_of_a_save(self) -> None:
        lines = run_on_ranks(dies, 2, self.root)[0]
        self.assertTrue(any("the disk is full" in line for line in lines), lines)

    def test_an_error_of_rank_0_before_the_save_is_raised_on_all_ranks(self) -> None:
        for error in run_on_ranks(cannot_put_a_file_aside, 2, self.root):
            self.assertIn("rank 0", error)
            self.assertIn("Permission denied", error)
        self.assertEqual(os.listdir(self.root), [])

    def test_weights_of_a_hook_are_refused(self) -> None:
        for error in run_on_ranks(puts_weights, 2, self.root):
            self.assertIn("on_save_checkpoint", error)
        self.assertEqual(os.listdir(self.root), [])


def migrated(root: str) -> None:
    """Resume what Lightning's own strategies have saved, and save to the same name."""
    resumed(
        [
            (f"{root}/{wrapper}/last.ckpt", other)
            for wrapper, other in zip(WRAPPERS, (*WRAPPERS[1:], WRAPPERS[0]), strict=True)
        ]
    )
    with quiet():
        callback = checkpoints(f"{root}/DDP", save_last=True, save_top_k=0)
        lightning_trainer = trainer(strategy("FSDP2"), callbacks=[callback], max_epochs=EPOCHS)
        lightning_trainer.fit(module(), loader(), ckpt_path="last")


class TestMigration(unittest.TestCase):
    def test_resumes_from_lightnings_own_checkpoints(self) -> None:
        """A file of DDP, and the folders of FSDP1 and FSDP2; the file stays under another name."""
        with tempfile.TemporaryDirectory() as root:
            run_on_ranks(save_last, 2, root, list(WRAPPERS), stock=True)
            self.assertTrue(Path(root, "DDP", "last.ckpt").is_file())
            run_on_ranks(migrated, 2, root)
            self.assertEqual(sorted(os.listdir(f"{root}/DDP")), ["last.ckpt", "last.ckpt.file"])
            self.assertEqual(steps_of(f"{root}/DDP"), [BATCHES * EPOCHS])


def import_without(path: str, name: str) -> str:
    """The error of the plug-in's import where Lightning does not have a name."""
    owner, plug_in = pkgutil.resolve_name(path), "fsdp_optim.integrations.lightning"
    kept = vars(owner)[name]
    delattr(owner, name)
    try:
        with mock.patch.dict(sys.modules):
            sys.modules.pop(plug_in, None)
            importlib.import_module(plug_in)
    except ImportError as error:
        return str(error)
    finally:
        setattr(owner, name, kept)
    raise AssertionError("the plug-in was imported")


class TestRefused(unittest.TestCase):
    @parameterized.expand(
        [
            ("a class", "lightning.pytorch.strategies", "ModelParallelStrategy"),
            ("a method", "lightning.pytorch.strategies.Strategy", "remove_checkpoint"),
        ]
    )
    def test_a_version_without_a_name_is_refused(self, _: str, path: str, name: str) -> None:
        [text] = run_on_ranks(import_without, 1, path, name)
        self.assertNotIn("\n", text)
        self.assertIn("install lightning 2.6.0, which was tested", text)
        self.assertIn(name, text)

    def test_arguments_that_the_strategy_gives_are_refused(self) -> None:
        for options in (
            {"save_options": {"durable": False}},
            {"load_options": fsdp_optim.SaveOptions()},
            {"save_options": fsdp_optim.SaveOptions(process_group=cast("dist.ProcessGroup", object()))},
        ):
            with self.assertRaisesRegex(fsdp_optim.StateError, "must be a|which is the strategy's own"):
                strategy("DDP", **options)
