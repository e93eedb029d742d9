"""Checkpoints of a real Trainer by this library: against runs that never stopped, at other world sizes, in other wrappers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shutil
import tempfile
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from kit.cases import expand, some, those
from kit.compare import Differs, check_same
from kit.hugging_face import KINDS, QUIET, enabled, on_cpu, state_of, tiny_llama, train, trainer_of
from kit.pretrained import transformers

import fsdp_optim
from fsdp_optim.checkpoint.save import background
from fsdp_optim.integrations.accelerate import FsdpOptimTrainerMixin, Settings
from fsdp_optim.storage.posix import FolderStaging, FolderWriter
from fsdp_optim.testing import RanksFailed, run_on_ranks

LOADED = ("kit.loaded.hugging_face",)


def mixed(package: Any) -> Any:
    """A Trainer with the mixin."""

    class Mixed(FsdpOptimTrainerMixin, package.Trainer):  # type: ignore[misc, name-defined]
        fsdp_optim_settings = Settings(save_options=QUIET)

    return Mixed


def begun_from(kind: str, folder: str, checkpoint: str) -> dict[str, Any]:
    """The state of a run that begins from a checkpoint, in a Trainer whose weights were others."""
    return train(kind, folder, {}, checkpoint, seed=1, save_strategy="no", max_steps=3)["begun"]


def opened(folder: str) -> dict[str, Any]:
    """The weights that `from_pretrained` finds in a folder."""
    return dict(transformers().AutoModelForCausalLM.from_pretrained(folder).state_dict())


class ResumeTest(unittest.TestCase):
    """One run without the plug-in for each wrapper is the oracle of all."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.root = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.oracles: dict[str, list[dict[str, Any]]] = {}

    def run_of(self, kind: str) -> tuple[str, list[dict[str, Any]]]:
        """A folder with checkpoints of steps 2 and 4 by the plug-in, and the run that saved nothing."""
        folder = f"{self.root}/{kind}"
        if kind not in self.oracles:
            self.oracles[kind] = run_on_ranks(train, 2, kind, f"{folder}-oracle", None, save_strategy="no")
            saved = run_on_ranks(train, 2, kind, folder, {})
            check_same(f"{kind}: a run that saves", saved[0]["losses"], self.oracles[kind][0]["losses"])
            check_same(f"{kind}: a run that saves", saved[0]["end"], self.oracles[kind][0]["end"])
        return folder, self.oracles[kind]

    def check_resumed(self, what: str, resumed: list[dict[str, Any]], oracle: list[dict[str, Any]]) -> None:
        for rank, run_of_rank in enumerate(resumed):
            check_same(f"{what}, begun", run_of_rank["begun"], oracle[rank]["second"])
            for step in (3, 4):
                check_same(f"{what}, loss", run_of_rank["losses"][step], oracle[rank]["losses"][step])
            check_same(f"{what}, end", run_of_rank["end"], oracle[rank]["end"])

    @expand(*those([(kind,) for kind in KINDS], lambda kind: kind != "DDP"))
    def test_a_run_that_stopped_goes_on_bit_for_bit(self, kind: str) -> None:
        folder, oracle = self.run_of(kind)
        resumed = run_on_ranks(train, 2, kind, folder, {}, f"{folder}/checkpoint-2", 1, save_strategy="no")
        self.check_resumed(kind, resumed, oracle)

    @expand(*some([("FSDP2", 3, "FSDP1"), ("FSDP1", 2, "DDP"), ("FSDP2", 1, "none"), ("DDP", 3, "FSDP2")], every=2))
    def test_resume_at_another_world_size_in_another_wrapper(self, kind: str, world_size: int, other: str) -> None:
        folder, oracle = self.run_of(kind)
        for begun in run_on_ranks(begun_from, world_size, other, f"{self.root}/other", f"{folder}/checkpoint-2"):
            check_same(f"{kind} on 2 ranks in {other} on {world_size}", begun, oracle[0]["second"])

    def test_the_folder_is_one_of_from_pretrained(self) -> None:
        folder, oracle = self.run_of("FSDP2")
        names = set(os.listdir(f"{folder}/checkpoint-4"))
        wanted = {"config.json", "model.safetensors", "optim.safetensors", "scheduler.pt", "trainer_state.json"}
        self.assertLessEqual(wanted | {"rng_state_0.pth", "rng_state_1.pth", "generation_config.json"}, names)
        self.assertFalse([name for name in names if name.startswith(("pytorch_model", "optimizer_"))])
        check_same("opened", opened(f"{folder}/checkpoint-4"), oracle[0]["end"]["weights"])
        config = json.loads(Path(folder, "checkpoint-4", "config.json").read_text())
        self.assertEqual(config["architectures"], ["LlamaForCausalLM"])
        self.assertEqual(sorted(os.listdir(folder)), ["checkpoint-2", "checkpoint-4"])  # nothing is left of the saves

    @expand(*some([("FSDP2", "SHARDED_STATE_DICT"), ("FSDP2", "FULL_STATE_DICT"), ("DDP", "")], every=2))
    def test_checkpoints_of_the_trainer_itself_load_as_before(self, kind: str, kept: str) -> None:
        _, oracle = self.run_of(kind)
        folder = f"{self.root}/old-{kind}-{kept}"
        options = {"state_dict_type": kept} if kept else {}
        run_on_ranks(train, 2, kind, folder, None, **options)
        self.assertNotIn("fsdp_optim.json", os.listdir(f"{folder}/checkpoint-2"))
        begun = [state["begun"] for state in run_on_ranks(go_on_from_old, 2, kind, folder, options)]
        check_same(f"{kind}, {kept}", begun[0]["weights"], oracle[0]["second"]["weights"])
        # In a sharded folder, which is one of torch.distributed.checkpoint, the values of a parameter are sorted.
        check_same(
            f"{kind}, {kept}", begun[0]["state"], oracle[0]["second"]["state"], in_order=kept != "SHARDED_STATE_DICT"
        )
        names = os.listdir(f"{folder}/checkpoint-4")  # which the plug-in has replaced
        self.assertIn("fsdp_optim.json", names)
        self.assertFalse([name for name in names if name.startswith(("pytorch_model", "optimizer_"))])
        check_same(f"{kind}, {kept}", opened(f"{folder}/checkpoint-4"), oracle[0]["end"]["weights"])

    @expand(*some([("FSDP2",), ("DDP",)], every=2))
    def test_adapters_alone_are_saved_and_loaded(self, kind: str) -> None:
        import peft

        folder = f"{self.root}/adapters-{kind}"
        oracle = run_on_ranks(with_adapters, 2, kind, f"{folder}-oracle", None, save_strategy="no")
        run_on_ranks(with_adapters, 2, kind, folder, {"background": True})
        path = f"{folder}/checkpoint-2"
        resumed = run_on_ranks(with_adapters, 2, kind, folder, {}, path, 1, save_strategy="no")
        self.check_resumed(f"adapters, {kind}", resumed, oracle)
        saved = safetensors.torch.load_file(f"{path}/model.safetensors")
        check_same("saved", saved, oracle[0]["second"]["weights"])
        model = peft.PeftModel.from_pretrained(tiny_llama(), path)
        check_same("opened", {name: value for name, value in model.state_dict().items() if "lora" in name}, saved)

    def test_a_mixin_does_the_same_without_enable(self) -> None:
        _, oracle = self.run_of("FSDP2")
        folder = f"{self.root}/mixed"
        run_on_ranks(train, 2, "FSDP2", folder, None, base=mixed, save_total_limit=1)
        self.assertEqual(os.listdir(folder), ["checkpoint-4"])
        check_same("opened", opened(f"{folder}/checkpoint-4"), oracle[0]["end"]["weights"])
        checkpoint = f"{self.run_of('FSDP2')[0]}/checkpoint-2"
        resumed = run_on_ranks(train, 2, "FSDP2", folder, None, checkpoint, 1, base=mixed, save_strategy="no")
        self.check_resumed("mixin", resumed, oracle)

    def test_damage_is_named_on_all_ranks(self) -> None:
        folder, _ = self.run_of("FSDP2")
        shutil.copytree(f"{folder}/checkpoint-2", f"{self.root}/damaged/checkpoint-2")
        path = Path(self.root, "damaged", "checkpoint-2", "optim.safetensors")
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
        with self.assertRaises(RanksFailed) as caught:
            run_on_ranks(train, 2, "FSDP2", f"{self.root}/damaged", {}, True, 1, save_strategy="no")
        self.assertEqual(set(caught.exception.errors), {0, 1})
        for error in caught.exception.errors.values():
            self.assertIsInstance(error, fsdp_optim.CheckpointError)
            self.assertIn("optim.safetensors", str(error))

    def test_resume_true_passes_over_a_folder_that_is_not_complete(self) -> None:
        folder, oracle = self.run_of("FSDP2")
        there = f"{self.root}/incomplete"
        shutil.copytree(f"{folder}/checkpoint-2", f"{there}/checkpoint-2")
        os.mkdir(f"{there}/checkpoint-3")
        Path(there, "checkpoint-3", "notes").touch()
        resumed = run_on_ranks(train, 2, "FSDP2", there, {}, True, 1, save_strategy="no")
        self.check_resumed("after an incomplete one", resumed, oracle)


def with_adapters(
    kind: str, folder: str, settings: Any, resume: Any = None, seed: int = 0, **options: Any
) -> dict[str, Any]:
    """As `train`, with a frozen base and adapters of other values for each seed; only the weights of adapters are compared."""
    import peft

    torch.manual_seed(20 + seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(), config)
    done = train(kind, folder, settings, resume, model=model, **options)
    for state in (done["end"], done["begun"], done["second"]):
        if state is not None:
            state["weights"] = {name: value for name, value in state["weights"].items() if "lora" in name}
    return done


def go_on_from_old(kind: str, folder: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return train(kind, folder, {}, f"{folder}/checkpoint-2", 1, max_steps=4, **options)


def end_of(kind: str, folder: str, settings: Any, **options: Any) -> dict[str, Any]:
    """The results of a run: the checkpoints after each save and at the end, the best, and the weights."""
    seen: list[list[str]] = []

    class Watch(transformers().TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            dist.barrier()  # the rank that removes checkpoints is through
            seen.append(sorted(name for name in os.listdir(folder) if "." not in name) if state.global_step > 1 else [])

    done = train(kind, folder, settings, callbacks=[Watch()], **options)
    return {**done, "seen": seen}


def read_on_save(folder: str, reads: bool) -> tuple[int, list[list[str]]]:
    """The number of saves in the background, and what a callback with `on_save` finds."""
    seen: list[list[str]] = []

    class Reads(transformers().TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(os.listdir(f"{folder}/checkpoint-{state.global_step}"))

    reader = Reads()
    with mock.patch.object(background, "async_save", wraps=background.async_save) as saves:
        train("DDP", folder, {"background": True}, callbacks=[reader] if reads and dist.get_rank() == 1 else [])
    return saves.call_count, seen


def fails_on(rank: int, what: str) -> contextlib.AbstractContextManager[Any]:
    """A full disk on one rank, when it writes a file whose name begins so, in a checkpoint of a step after 2."""
    if dist.get_rank() != rank:
        return contextlib.nullcontext()
    write, write_small = FolderWriter.write, torch.save

    def full(self: Any, name: str, pieces: Any, offset: int) -> None:
        if name.startswith(what) and "checkpoint-2" not in str(self._folder):
            raise fsdp_optim.CheckpointError(f"{self._folder}/{name}: cannot be written: No space left on device")
        write(self, name, pieces, offset)

    def full_small(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).rpartition("/")[2].startswith(what) and "checkpoint-2" not in str(path):
            raise OSError(28, "No space left on device")
        write_small(value, path, *args, **kwargs)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(FolderWriter, "write", full))
    stack.enter_context(mock.patch.object(torch, "save", full_small))
    return stack


def failing(kind: str, folder: str, settings: Any, rank: int, what: str, options: Mapping[str, Any]) -> str:
    with fails_on(rank, what):
        try:
            train(kind, folder, settings, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    raise Differs("the run did not fail")


def saved_alone(folder: str, kept: str) -> None:
    with on_cpu("FSDP2"), enabled({}):
        trainer = trainer_of("FSDP2", f"{folder}/run", state_dict_type=kept, max_steps=1, save_strategy="no")
        trainer.train()
        trainer.save_model(f"{folder}/final-{kept}")
        weights = state_of(trainer.model_wrapped, trainer.optimizer.optimizer)["weights"]
        check_same(kept, opened(f"{folder}/final-{kept}"), weights)


class SaveTest(unittest.TestCase):
    def setUp(self) -> None:
        self.root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.root)

    @expand(soon=[(True,)], later=[(False,)])
    def test_save_total_limit_keeps_a_complete_checkpoint_at_all_times(self, background: bool) -> None:
        settings, options = {"background": background}, {"save_total_limit": 1, "save_steps": 1}
        done = run_on_ranks(end_of, 2, "FSDP2", self.root, settings, **options)[0]
        self.assertTrue(all(names for names in done["seen"][1:]), done["seen"])
        self.assertEqual(os.listdir(self.root), ["checkpoint-4"])
        check_same("opened", opened(f"{self.root}/checkpoint-4"), done["end"]["weights"])
        if background:  # older ones go when the next save begins, and the one that it writes may be there already
            self.assertLessEqual(max(map(len, done["seen"])), 2, done["seen"])
        else:
            self.assertEqual(done["seen"][1:], [["checkpoint-1"], ["checkpoint-2"], ["checkpoint-3"]])

    @expand(
        *some(
            [
                ("optim", 1, True),
                ("model", 0, False),
                ("optim", 1, False),
                ("rng_state_1", 1, False),
                ("scheduler", 0, True),
            ],
            every=2,
        )
    )
    def test_a_full_disk_on_one_rank_is_raised_on_all(self, what: str, rank: int, background: bool) -> None:
        """The only checkpoint stays, although save_total_limit=1, and nothing else is left."""
        options = {"save_total_limit": 1, "save_steps": 2, "max_steps": 5}
        errors = run_on_ranks(failing, 2, "FSDP2", self.root, {"background": background}, rank, what, options)
        for error in errors:
            self.assertIn("No space left on device", error)
            self.assertIn("CheckpointError", error)
            self.assertIn(f"rank {rank}", error)
        self.assertEqual(os.listdir(self.root), ["checkpoint-2"])
        fsdp_optim.verify(f"{self.root}/checkpoint-2")

    def test_callbacks_that_read_a_checkpoint_find_it_complete(self) -> None:
        """Also where only one rank has the callback. Without one, saves are in the background."""
        for reads, num_in_background in ((True, 0), (False, 2)):
            by_rank = run_on_ranks(read_on_save, 2, f"{self.root}/{reads}", reads)
            self.assertEqual([num for num, _ in by_rank], [num_in_background] * 2)
            self.assertEqual(len(by_rank[1][1]), 2 if reads else 0)
            self.assertTrue(all("fsdp_optim.json" in names for names in by_rank[1][1]))

    def test_the_best_model_is_loaded_at_the_end(self) -> None:
        best = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
        best |= {"save_total_limit": 1, "metric_for_best_model": "loss", "learning_rate": 0.5}
        for settings in ({"background": True}, {}):
            folder = f"{self.root}/{bool(settings)}"
            done = run_on_ranks(train, 2, "FSDP2", folder, settings, **best)
            self.assertEqual(Path(done[0]["best"]).parent, Path(folder))
            check_same("best", done[0]["end"]["weights"], opened(done[0]["best"]))
            self.assertEqual(os.listdir(folder), [Path(done[0]["best"]).name])
            state = json.loads(Path(done[0]["best"], "trainer_state.json").read_text())
            self.assertEqual(state["best_model_checkpoint"], done[0]["best"])

    def test_save_only_model(self) -> None:
        options = {"save_only_model": True, "max_steps": 2}
        done = run_on_ranks(train, 2, "DDP", self.root, {}, **options)[0]
        self.assertNotIn("optim.safetensors", os.listdir(f"{self.root}/checkpoint-2"))
        self.assertNotIn("scheduler.pt", os.listdir(f"{self.root}/checkpoint-2"))
        check_same("opened", opened(f"{self.root}/checkpoint-2"), done["end"]["weights"])
        begun = run_on_ranks(begun_from, 2, "FSDP2", f"{self.root}/next", f"{self.root}/checkpoint-2")[0]
        check_same("weights", begun["weights"], done["end"]["weights"])
        self.assertEqual([values for values in begun["state"].values() if values], [])

    @expand(soon=[("SHARDED_STATE_DICT",)], later=[("FULL_STATE_DICT",)])
    def test_save_model_at_the_end_writes_the_weights(self, kept: str) -> None:
        run_on_ranks(saved_alone, 2, self.root, kept)

    def test_a_save_on_each_node_is_left_to_the_trainer(self) -> None:
        run_on_ranks(train, 1, "none", self.root, {}, max_steps=2, save_on_each_node=True)
        names = os.listdir(f"{self.root}/checkpoint-2")
        self.assertIn("optimizer.pt", names)
        self.assertNotIn("fsdp_optim.json", names)

    def test_a_step_that_is_saved_again_replaces_its_checkpoint(self) -> None:
        run_on_ranks(train, 2, "FSDP2", self.root, {}, max_steps=2)
        Path(self.root, "checkpoint-2", "notes.txt").write_text("of the user")
        done = run_on_ranks(train, 1, "none", self.root, {}, seed=1, max_steps=2)[0]
        names = os.listdir(f"{self.root}/checkpoint-2")
        self.assertIn("notes.txt", names)
        self.assertNotIn("rng_state_1.pth", names)  # of the two ranks before
        check_same("opened", opened(f"{self.root}/checkpoint-2"), done["end"]["weights"])


def train_until_killed(point: str, folder: str, background: bool) -> None:
    """Kill this process, without an error, during the save of step 4. The process cannot be used afterwards."""

    def dies(owner: Any, name: str, when: Callable[[Any], bool]) -> None:
        original = getattr(owner, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if "checkpoint-4" in str(getattr(self, "_folder", None) or self.folder) and when(args):
                os._exit(9)
            return original(self, *args, **kwargs)

        setattr(owner, name, method)

    def take_place(self: Any, durable: bool) -> None:
        self.filling.carry_into(self.folder, self.probe, durable=True)
        if "checkpoint-4" in str(self.folder):
            os._exit(9)
        self.folder.rename(self.path)

    if point == "between model and optimizer":
        dies(FolderWriter, "write", lambda args: args[0].startswith("optim"))
    elif point == "before the files get their name":
        dies(FolderStaging, "_put_in_place", lambda args: True)
    elif point == "with the files in the folder":
        FolderStaging.take_place = take_place  # type: ignore[method-assign]
    train("none", folder, {"background": background}, save_total_limit=1)


class KillTest(unittest.TestCase):
    @expand(
        *some(
            [
                ("between model and optimizer", False),
                ("before the files get their name", True),
                ("with the files in the folder", False),
            ],
            every=3,
        )
    )
    def test_a_kill_in_a_save_loses_no_checkpoint(self, point: str, background: bool) -> None:
        root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, root)
        with self.assertRaises(RanksFailed) as caught:
            run_on_ranks(train_until_killed, 1, point, root, background)
        self.assertEqual([getattr(error, "exit_code", error) for error in caught.exception.errors.values()], [9])
        newest = transformers().trainer_utils.get_last_checkpoint(root)  # of transformers itself
        self.assertEqual(newest, f"{root}/checkpoint-2")
        fsdp_optim.verify(newest)
        resumed = run_on_ranks(train, 1, "none", root, {}, True, 1, save_total_limit=1)[0]
        self.assertEqual(sorted(resumed["losses"]), [1, 2, 3, 4])
        self.assertEqual(os.listdir(root), ["checkpoint-4"])  # and what the killed save has left is gone
        check_same("opened", opened(f"{root}/checkpoint-4"), resumed["end"]["weights"])


def example_on_rank(kind: str, *arguments: str) -> tuple[int, str]:
    """The last step of examples/hf_trainer.py, and what it and the library print on this rank."""
    printed = io.StringIO()
    with on_cpu(kind), enabled(None), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hf_trainer.py"))["main"]
        return main(list(arguments)), printed.getvalue()


class ExampleTest(unittest.TestCase):
    def test_train_and_go_on_with_fewer_ranks(self) -> None:
        """By a launcher: in tests/interop/test_examples.py."""
        with tempfile.TemporaryDirectory() as root:
            arguments = ("--root", root, "--every", "2", "--last")
            (step, printed), (other, _) = run_on_ranks(example_on_rank, 2, "DDP", *arguments, "4")
            self.assertEqual((step, other), (4, 4))
            self.assertIn("trained from step 0 to step 4", printed)
            [(step, printed)] = run_on_ranks(example_on_rank, 1, "none", *arguments, "6")
            self.assertEqual(step, 6)
            self.assertIn("trained from step 4 to step 6", printed)
            receipts = [line for line in printed.splitlines() if line.startswith(("loaded", "resumed"))]
            self.assertEqual(len(receipts), 1, receipts)  # the Trainer loads the weights and the optimizer by two calls
            summary = fsdp_optim.inspect(f"{root}/checkpoint-4")
            tensors = [*summary.model.values(), *(v for values in summary.state.values() for v in values.values())]
            num = sum(isinstance(tensor, fsdp_optim.TensorInfo) for tensor in tensors)
            self.assertRegex(
                receipts[0],
                rf"^resumed {root}/checkpoint-4: 2 -> 1 rank, .*, {num} tensors verified, scheduler restored$",
            )
            self.assertEqual(sorted(os.listdir(root)), ["checkpoint-4", "checkpoint-6"])
            self.assertEqual([checkpoint.world_size for checkpoint in fsdp_optim.checkpoints(root)], [1, 2])


if __name__ == "__main__":
    unittest.main()
