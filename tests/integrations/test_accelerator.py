"""`save_state` and `load_state` of a real Accelerator by this library, against a run that never stopped."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.accelerate_loop import Loop, load_and_go_on
from kit.cases import expand
from kit.compare import check_same, error_text, refused
from kit.forked import TRAINING, run
from kit.hugging_face import enabled, on_cpu
from kit.pretrained import CUT_VIEWS, cut, transformers
from parameterized import parameterized
from safetensors.torch import load_file
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, LoadOptions, SaveOptions
from fsdp_optim.integrations import accelerate as plugin
from fsdp_optim.integrations.common.needed import version_of
from fsdp_optim.storage.posix import FolderWriter
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)


def run_through(kind: str, folder: str, settings: Any, scaler: bool) -> dict[str, Any]:
    """Five steps; the state after the third was saved, which nothing after it depends on."""
    with on_cpu(kind), enabled(settings):
        loop = Loop(kind, scaler=scaler)
        losses = [loop.step() for _ in range(3)]
        third, rest = loop.state, loop.rest
        if settings is not None:
            loop.accelerator.save_state(folder)
        losses += [loop.step() for _ in range(2)]
        return {"third": third, "rest of third": rest, "losses": losses, "end": loop.state, "rest": loop.rest}


def several(kind: str, folder: str, shared: bool) -> None:
    """Two models, with an optimizer each or one for both."""
    import accelerate

    def made(seed: int) -> tuple[Any, list[Any], list[Any]]:
        torch.manual_seed(seed)
        accelerator = accelerate.Accelerator(cpu=True)
        models = [nn.Linear(5, 3), nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1))]
        groups = [[p for m in models for p in m.parameters()]] if shared else [[*m.parameters()] for m in models]
        optims = [torch.optim.AdamW(params, lr=0.1) for params in groups]
        prepared = accelerator.prepare(*models, *optims)
        return accelerator, list(prepared[:2]), list(prepared[2:])

    with on_cpu(kind), enabled({}):
        accelerator, models, optims = made(0)
        accelerator.backward(models[1](models[0](torch.ones(2, 5))).sum())
        for optim in optims:
            optim.step()
        accelerator.save_state(folder)
        before = [[*m.state_dict().values()] for m in models], [dict(o.state_dict()["state"]) for o in optims]
        other, models, optims = made(1)
        other._models, other._optimizers = other._models[-2:], other._optimizers[-len(optims) :]
        other.load_state(folder)
        after = [[*m.state_dict().values()] for m in models], [dict(o.state_dict()["state"]) for o in optims]
        check_same("several models", after, before)


def named_by_number(folder: str, background: bool, limit: int) -> list[list[str]]:
    from accelerate.utils import ProjectConfiguration

    seen = []
    with on_cpu("FSDP2"), enabled({"background": background}):
        naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=limit)
        loop = Loop("FSDP2", project_config=naming)
        for _ in range(3):
            loop.step()
            loop.accelerator.save_state()
            dist.barrier()
            seen.append(sorted(os.listdir(f"{folder}/checkpoints")))
            dist.barrier()
        wanted = loop.state
        other = Loop("FSDP2", seed=1, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
        other.accelerator.load_state()
        check_same("the newest", other.state, wanted)
        naming.iteration = 2
        refused(loop.accelerator.save_state, CheckpointError, "checkpoint_2: already exists", "iteration")
    return seen


def with_hooks(kind: str, folder: str) -> None:
    """A hook that saves the models by itself takes them off the list, as Accelerate says. With FSDP it gets no weights."""
    with on_cpu(kind), enabled({}):
        loop = Loop(kind)
        loop.step()

        def hook(models: list[Any], weights: list[Any], path: str) -> None:
            while weights:
                weights.pop()
            Path(path, f"mine-{dist.get_rank()}").touch()

        loop.accelerator.register_save_state_pre_hook(hook)
        loop.accelerator.save_state(folder)


def failed_in_the_background(folder: str) -> tuple[str, str]:
    with on_cpu("FSDP2"), enabled({"background": True}):
        loop = Loop("FSDP2")
        loop.step()
        ended: list[Any] = []
        loop.accelerator.state.destroy_process_group = lambda group=None: ended.append(
            group
        )  # the pool of ranks does that
        full = mock.patch.object(FolderWriter, "write", side_effect=OSError(28, "No space left on device"))
        with full if dist.get_rank() == 1 else mock.MagicMock():
            loop.accelerator.save_state(f"{folder}/first")
            message = ": ".join(error_text(lambda: loop.accelerator.save_state(f"{folder}/second")))
            loop.accelerator.save_state(f"{folder}/third")
            at_the_end = ": ".join(error_text(loop.accelerator.end_training))
        loop.accelerator.save_state(f"{folder}/fourth")
        loop.accelerator.end_training()
        check_same("the process group ends after an error too", len(ended), 2)
        return message, at_the_end


def slow_write(self: FolderWriter, *args: Any) -> None:
    time.sleep(0.2)
    write(self, *args)


write = FolderWriter.write


def load_what_is_under_way(folder: str) -> None:
    """A load waits for the save that is still written, also where it must find the newest folder."""
    from accelerate.utils import ProjectConfiguration

    naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    with on_cpu("DDP"), enabled({"background": True}), mock.patch.object(FolderWriter, "write", slow_write):
        loop = Loop("DDP", project_config=naming)
        wanted = loop.state
        loop.accelerator.save_state()
        loop.step()
        loop.accelerator.load_state()
        check_same("loaded", loop.state["weights"], wanted["weights"])


class Grown(nn.Linear):
    """A model that has got a parameter since it was saved."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.more = nn.Parameter(torch.full((2,), 5.0))


def alone(folder: str) -> None:
    """In one process: what `strict=False` leaves as it is, a save on each node, and an Accelerator without models."""
    import accelerate
    from accelerate.utils import ProjectConfiguration

    def made(model: nn.Module | None, **options: Any) -> Any:
        accelerator = accelerate.Accelerator(cpu=True, **options)
        if model is not None:
            accelerator.prepare(model)
        return accelerator

    with on_cpu("none"), enabled({"load_options": LoadOptions(cast=True)}):
        saved, grown = nn.Linear(3, 2), Grown().double()
        made(saved).save_state(f"{folder}/step")
        refused(lambda: made(grown).load_state(f"{folder}/step"), fsdp_optim.StateError, "more")
        made(grown).load_state(f"{folder}/step", strict=False)
        check_same("loaded, and cast", grown.weight.detach(), saved.weight.detach().double())
        check_same("left", grown.more.tolist(), [5.0, 5.0])
        made(saved, project_config=ProjectConfiguration(save_on_each_node=True)).save_state(f"{folder}/nodes")
        made(None).save_state(f"{folder}/empty")
        for name in ("nodes", "empty"):
            check_same(name, "fsdp_optim.json" in os.listdir(f"{folder}/{name}"), False)


class StateTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.root = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.root)

    @expand(soon=[("FSDP2", True), ("FSDP1", False)], later=[("DDP", False)])
    def test_a_run_that_stopped_goes_on_bit_for_bit(self, kind: str, scaler: bool) -> None:
        folder = f"{self.root}/{kind}"
        oracle = run_on_ranks(run_through, 2, kind, folder, None, scaler)
        saved = run_on_ranks(run_through, 2, kind, folder, {}, scaler)
        resumed = run_on_ranks(load_and_go_on, 2, kind, folder, {}, scaler)
        for rank in range(2):
            check_same(f"{kind}: a run that saves", saved[rank], oracle[rank])
            losses = oracle[rank]["losses"]
            check_same(f"{kind}: a run that resumes", resumed[rank], {**oracle[rank], "losses": losses[3:]})
        names = os.listdir(folder)
        self.assertIn("model.safetensors", names)
        self.assertFalse([name for name in names if name.startswith(("pytorch_model", "optimizer_"))])
        self.assertIn("generation_config.json", names)
        config = json.loads(Path(folder, "config.json").read_text())
        self.assertEqual(config["architectures"], ["LlamaForCausalLM"])  # FSDP2 makes a class of another name
        opened = transformers().AutoModelForCausalLM.from_pretrained(folder).state_dict()
        check_same("from_pretrained", dict(opened), oracle[0]["third"]["weights"])
        other = {"DDP": ("FSDP2", 3), "FSDP2": ("none", 1), "FSDP1": ("FSDP2", 1)}[kind]
        for moved in run_on_ranks(load_and_go_on, other[1], other[0], folder, {}, scaler, 0):
            check_same(f"{kind} in {other}", moved["third"], oracle[0]["third"])
            check_same(f"{kind} in {other}", moved["rest of third"], oracle[0]["rest of third"])

    @parameterized.expand([("DDP",)])
    def test_folders_of_accelerate_itself_load_as_before(self, kind: str) -> None:
        """Those of SHARDED_STATE_DICT are in test_accelerate_sharded.py."""
        folder = f"{self.root}/old-{kind}"
        with_its_own = run_on_ranks(saved_by_accelerate, 2, kind, folder)
        resumed = run_on_ranks(load_and_go_on, 2, kind, folder, {}, False)
        check_same(f"{kind}", resumed[0]["third"], with_its_own[0])
        check_same(f"{kind}", resumed[0]["end"]["state"].keys(), with_its_own[0]["state"].keys())

    @expand(soon=[(True,)], later=[(False,)])
    def test_several_models(self, shared: bool) -> None:
        run_on_ranks(several, 2, "DDP", f"{self.root}/several-{shared}", shared)

    @expand(soon=[(True, 2)], later=[(False, 1)])
    def test_checkpoints_that_accelerate_names(self, background: bool, limit: int) -> None:
        seen = run_on_ranks(named_by_number, 2, f"{self.root}/named-{background}", background, limit)[0]
        self.assertEqual(seen, [[f"checkpoint_{n}" for n in range(max(0, at - limit + 1), at + 1)] for at in range(3)])

    @parameterized.expand(
        [("DDP", "optimizer.bin", "fsdp_optim.json"), ("FSDP2", "fsdp_optim.json", "pytorch_model_fsdp_0")]
    )
    def test_hooks_that_save_the_models_go_on_to_do_so(self, kind: str, there: str, not_there: str) -> None:
        folder = f"{self.root}/hooks-{kind}"
        run_on_ranks(with_hooks, 2, kind, folder)
        names = os.listdir(folder)
        self.assertLessEqual({"mine-0", "mine-1", there}, set(names))
        self.assertNotIn(not_there, names)

    def test_a_load_waits_for_the_save_in_the_background(self) -> None:
        run_on_ranks(load_what_is_under_way, 2, f"{self.root}/under-way")

    def test_strict_and_cast_and_what_is_left_to_accelerate(self) -> None:
        run_on_ranks(alone, 1, f"{self.root}/alone")

    def test_a_failure_in_the_background_is_raised_by_the_next_save(self) -> None:
        folder = f"{self.root}/failed"
        for messages in run_on_ranks(failed_in_the_background, 2, folder):
            for message in messages:
                self.assertIn("CheckpointError: ", message)
                self.assertIn("rank 1", message)
                self.assertIn("No space left on device", message)
        self.assertEqual(os.listdir(folder), ["fourth"])
        fsdp_optim.verify(f"{folder}/fourth")


def saved_by_accelerate(kind: str, folder: str) -> dict[str, Any]:
    with on_cpu(kind), enabled(None):
        loop = Loop(kind)
        for _ in range(3):
            loop.step()
        loop.accelerator.save_state(folder)
        return loop.state


def names_replaced() -> dict[str, Any]:
    """Everything that could be replaced, as it is now."""
    import accelerate
    import accelerate.accelerator
    import accelerate.checkpointing
    import accelerate.utils
    import transformers.trainer
    import transformers.trainer_utils

    owners = [accelerate.accelerator, accelerate.checkpointing, accelerate.utils, accelerate.Accelerator]
    owners += [transformers.trainer, transformers.trainer_utils, transformers.Trainer]
    return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}


WRONG: list[dict[str, Any]] = [
    {"background": 1},
    {"prove": "yes"},
    {"save_options": SaveOptions(max_file_size=0)},
    {"save_options": SaveOptions(strategy="fast")},  # type: ignore[arg-type]
    {"save_options": SaveOptions(rename={"": "model."})},
    {"save_options": LoadOptions()},
    {"load_options": LoadOptions(timeout=-1)},
    {"load_options": LoadOptions(rename={"": "model."})},
    {"load_options": {"cast": True}},
]


class ViewsTest(unittest.TestCase):
    def test_views_of_the_options_name_what_is_saved(self) -> None:
        settings = {
            "save_options": SaveOptions(durable=False, progress=False, views=CUT_VIEWS),
            "load_options": LoadOptions(views=CUT_VIEWS),
            "prove": "raise",
        }
        folder = self.enterContext(tempfile.TemporaryDirectory())
        saved = run_on_ranks(run_through, 2, "FSDP2", folder, settings, False)[0]
        stored = dict(sorted(load_file(Path(folder, "model.safetensors")).items()))
        check_same("the file", stored, cut(saved["third"]["weights"]))
        for kind, num_ranks, num_steps in (("FSDP2", 2, 2), ("DDP", 3, 0)):  # three ranks have other batches
            for resumed in run_on_ranks(load_and_go_on, num_ranks, kind, folder, settings, False, num_steps):
                check_same(kind, resumed["third"], saved["third"])


class EnableTest(unittest.TestCase):
    def setUp(self) -> None:
        transformers()
        self.addCleanup(plugin.disable)

    def test_disable_puts_all_back(self) -> None:
        before = names_replaced()
        plugin.enable()
        plugin.enable(background=True)
        changed = {name for name, value in names_replaced().items() if value is not before.get(name)}
        self.assertIn("transformers.trainer.get_last_checkpoint", changed)
        self.assertIn("Accelerator.save_state", changed)
        self.assertIn("Trainer._save_checkpoint", changed)
        plugin.disable()
        after = names_replaced()
        self.assertEqual([name for name in before if before[name] is not after.get(name)], [])
        plugin.disable()

    @parameterized.expand(
        [
            ("accelerate.accelerator", "save_accelerator_state", "accelerate"),
            ("accelerate.accelerator.Accelerator", "load_state", "accelerate"),
            ("transformers.trainer", "rotate_checkpoints", "transformers"),
            ("transformers.trainer.Trainer", "_finalize_training", "transformers"),
        ]
    )
    def test_a_missing_name_is_refused_in_one_line_and_nothing_is_replaced(
        self, path: str, name: str, package: str
    ) -> None:
        import pkgutil

        owner, before = pkgutil.resolve_name(path), names_replaced()
        kept = vars(owner)[name]
        delattr(owner, name)
        try:
            error, message = error_text(plugin.enable)
        finally:
            setattr(owner, name, kept)
        self.assertEqual(error, "MissingNameError")
        self.assertIn(f"{package} {version_of(package)} does not have", message)
        self.assertIn(name, message)
        self.assertIn(plugin.TESTED[package], message)
        self.assertNotIn("\n", message)
        self.assertEqual([key for key, value in names_replaced().items() if value is not before[key]], [])

    def test_wrong_arguments_are_refused(self) -> None:
        for arguments in WRONG:
            with self.subTest(arguments), self.assertRaises(fsdp_optim.FsdpOptimError):
                plugin.enable(**arguments)
        self.assertFalse(plugin.is_replaced(transformers().Trainer, "_save_checkpoint"))

    def test_the_versions_that_are_installed_are_those_that_were_tested(self) -> None:
        pinned = Path(__file__).parents[2].joinpath("requirements-dev.txt").read_text()
        for package, version in plugin.TESTED.items():
            self.assertEqual(version_of(package), version)
            self.assertIn(f"{package}=={version}\n", pinned)

    def test_the_plug_in_alone_imports_neither_package(self) -> None:
        code = "import sys\nimport fsdp_optim.integrations.accelerate\n"
        code += "assert not {'accelerate', 'transformers'} & set(sys.modules)\n"
        done = run(code, preload=TRAINING)
        self.assertEqual(done.returncode, 0, done.stderr)

    @pytest.mark.slow
    def test_enable_does_not_import_the_trainer(self) -> None:
        """A Trainer that is imported afterwards is replaced then."""
        code = "import sys\nimport fsdp_optim.integrations.accelerate as plugin\n"
        code += "plugin.enable()\nassert 'accelerate' in sys.modules and 'transformers.trainer' not in sys.modules\n"
        code += "import transformers.trainer, accelerate\naccelerate.Accelerator(cpu=True)\n"
        code += "assert plugin.is_replaced(transformers.Trainer, '_save_checkpoint')\n"
        done = run(code, timeout=300, preload=TRAINING)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
