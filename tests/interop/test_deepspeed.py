"""`load` takes what DeepSpeed's ZeRO 1, 2 and 3 have written."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import Differs, check_same, error_text, sorted_state
from kit.options import as_options
from kit.rank_files import values_of_others
from kit.store_calls import url_of
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from kit.zero_checkpoints import BUFFERS, TAG, elements, opened, state_of, unpacked
from kit.zero_files import write_zero
from kit.zero_runs import FROZEN, STEPS, TIED, Model, optimizer
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.foreign.archive.torch_archive import read_archive
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing import run_on_ranks

RUNS = (
    *("z1-w1-fp32", "z1-w2-bf16", "z1-w3-fp16", "z1-w4-bf16"),
    *("z2-w1-bf16", "z2-w2-fp32", "z2-w3-aligned", "z2-w4-fp16", "z2-w2-elastic"),
    *("z3-w1-bf16", "z3-w2-groups", "z3-w3-fp32", "z3-w4-fp16"),
    *("z1-w2-bf16-universal", "z1-w4-bf16-universal", "z2-w3-aligned-universal", "z3-w3-fp32-universal"),
    "z0-w2-fp32",
)
WRAPPERS_AT = {1: ("plain", "FSDP2"), 2: ("FSDP2", "FSDP1 orig"), 3: ("FSDP1 orig", "fairscale non-flat", "FSDP2")}


def of_zeros() -> Model:
    model = Model()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def check_loaded(model: nn.Module, optim: Any, oracle: Mapping[str, Tensor], folder: Path) -> None:
    """The live weights, buffers and state are those of the training without DeepSpeed, bit for bit."""
    everyone = {"process_group": dist.group.WORLD} if dist.is_initialized() else {}
    full = fsdp_optim.gather_full_optim_state_dict(
        model, optim, recipient_rank=None, key_by="name", **as_options(fsdp_optim.CallOptions, **everyone)
    )
    check_same("state", sorted_state(full["state"]), sorted_state(state_of(oracle)))
    fsdp_optim.save(
        folder, model, overwrite=True, **as_options(fsdp_optim.SaveOptions, **everyone, durable=False, progress=False)
    )
    weights = {fqn: tensor for fqn, tensor in oracle.items() if not fqn.startswith("state.")}
    saved = load_file(folder / "model.safetensors")
    check_same("weights", dict(sorted(saved.items())), dict(sorted({**weights, **BUFFERS}.items())))
    if dist.is_initialized():
        dist.barrier()  # before another case saves to the same place


def load_runs(root: Path, wrappers: tuple[str, ...], numbers: list[int]) -> None:
    """These runs of DeepSpeed, each into a wrapper that the number of the run chooses."""
    oracle = load_file(root / "oracle.safetensors")
    for number in numbers:
        name = RUNS[number]
        wrapper = wrappers[number % len(wrappers)]
        with cpu():
            model = of_zeros() if wrapper == "plain" else WRAPPERS[wrapper](of_zeros())
            optim = optimizer(model)
            check = number % 3 == 0
            groups = "live" if name == "z2-w2-elastic" else "saved"  # it has no hyperparameters
            everyone = {"process_group": dist.group.WORLD} if wrapper == "plain" and dist.is_initialized() else {}
            try:
                restored = fsdp_optim.load(
                    root / name,
                    model,
                    optim,
                    **as_options(
                        fsdp_optim.LoadOptions,
                        **everyone,
                        param_groups=groups,
                        cast=True,
                        compare=check,
                        progress=False,
                    ),
                )
                check_loaded(model, optim, oracle, root / f"live {len(wrappers)}")
                missing = values_of_others(restored)
                check_same(
                    "the rest",
                    (restored.state["epoch"], restored.missing_keys, restored.unexpected_keys),
                    (4, missing, ()),
                )
                check_same("the step", restored.step, STEPS)
                check_same("ranks", restored.world_size, int(name[4]))
            except BaseException as error:
                raise Differs(f"{name} into {wrapper}: {type(error).__name__}: {error}") from error


def refuse_all(root: Path, cases: list[tuple[str, str]]) -> None:
    """Each damaged checkpoint is an error on all ranks that names the file, and changes nothing."""
    model = WRAPPERS["FSDP2"](of_zeros())  # one for all, because nothing may change it
    optim = optimizer(model)
    for name, wanted in cases:
        kind, text = error_text(
            lambda: fsdp_optim.load(
                root / name,  # noqa: B023
                model,
                optim,
                options=fsdp_optim.LoadOptions(cast=True, progress=False),
            )
        )
        if wanted not in text or kind != "CheckpointError":
            raise Differs(f"{name}: {kind}: {text}, and not {wanted}")
        if optim.state or any(bool((param.to_local() != 0).any()) for param in model.parameters()):
            raise Differs(f"{name}: was loaded in part")


class TestRuns(unittest.TestCase):
    root: Path
    oracle: dict[str, Tensor]

    @classmethod
    def setUpClass(cls) -> None:
        cls.root = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.oracle = unpacked(cls.root)

    def copied(self, name: str, of: str) -> Path:
        """A copy of a run, without the folder of the tag."""
        folder = self.root / name
        shutil.copytree(self.root / of / TAG, folder)
        self.addCleanup(shutil.rmtree, folder)
        return folder

    # ------------------------------------------------------------------------------------------- every run

    @expand(*some(sorted(WRAPPERS_AT), every=2))
    def test_every_run_is_loaded_as_it_was_saved(self, world_size: int) -> None:
        """Each run at one world size."""
        numbers = [number for number in range(len(RUNS)) if number // 3 % 3 == world_size - 1]
        run_on_ranks(load_runs, world_size, self.root, WRAPPERS_AT[world_size], numbers)

    @parameterized.expand(sorted(WRAPPERS_AT))
    @pytest.mark.slow
    def test_every_run_is_loaded_at_every_world_size(self, world_size: int) -> None:
        run_on_ranks(load_runs, world_size, self.root, WRAPPERS_AT[world_size], list(range(len(RUNS))))

    def test_without_ranks(self) -> None:
        """One process and no process group; the parent by `latest`, the folder of the tag, and a parent without `latest`."""
        (self.root / "z3-w2-groups" / "latest").rename(self.root / "latest of another place")
        for name in ("z2-w3-aligned", f"z2-w3-aligned/{TAG}", "z3-w2-groups", f"z3-w3-fp32-universal/{TAG}_universal"):
            model = of_zeros()
            optim = optimizer(model)
            fsdp_optim.load(self.root / name, model, optim, options=fsdp_optim.LoadOptions(cast=True))
            check_loaded(model, optim, self.oracle, self.root / "live")
        (self.root / "latest of another place").rename(self.root / "z3-w2-groups" / "latest")

    def test_from_a_bucket(self) -> None:
        for name in ("z2-w4-fp16", "z3-w2-groups", "z2-w3-aligned-universal"):
            bucket = MemoryBucket()
            for file in (self.root / name).rglob("*"):
                if file.is_file():
                    bucket.put(f"runs/{name}/{file.relative_to(self.root / name)}", file.read_bytes())
            model = of_zeros()
            optim = optimizer(model)
            with url_of(ObjectStore(bucket, f"runs/{name}", PROBE)) as url:
                fsdp_optim.load(url, model, optim, options=fsdp_optim.LoadOptions(cast=True))
            check_loaded(model, optim, self.oracle, self.root / "live")

    def test_converted(self) -> None:
        """Without ranks, into a checkpoint of this library; objects of other classes are left out without allow_pickle."""
        for name in ("z2-w3-aligned", "z3-w2-groups", "z3-w3-fp32-universal"):
            place = self.root / "converted" / name
            with self.assertLogs("fsdp_optim", "WARNING") as logged:
                fsdp_optim.convert(self.root / name, place, options=fsdp_optim.ConvertOptions(progress=False))
            self.assertRegex(
                "".join(logged.output), "left out of the new checkpoint: .*args has an object of the class"
            )
            self.assertNotIn("args", fsdp_optim.load(place).state)
            fsdp_optim.convert(
                self.root / name,
                place,
                options=fsdp_optim.ConvertOptions(allow_pickle=True, progress=False),
                overwrite=True,
            )
            model = of_zeros()
            optim = optimizer(model)
            restored = fsdp_optim.load(place, model, optim, options=fsdp_optim.LoadOptions(cast=True))
            check_loaded(model, optim, self.oracle, self.root / "live")
            check_same("the rest", (restored.state["epoch"], restored.step), (4, STEPS))

    def test_the_fp32_weights_are_the_weights(self) -> None:
        """Frozen ones and buffers are given as they are, and the module's own where there is no optimizer."""
        for name in RUNS[:-1]:
            with closing(opened(self.root / name)) as reader:
                dtypes = {fqn: stored.dtype for fqn, stored in reader.model.items() if fqn not in (FROZEN, *BUFFERS)}
                check_same(name, dtypes, dict.fromkeys(dtypes, "float32"))
                check_same(name, sorted(reader.model), sorted({*self.weights(), *BUFFERS}))
                check_same(name, dict(reader.aliases), TIED)
        folder = self.copied("without optimizer", "z2-w3-aligned")
        for file in folder.glob("*optim_states.pt"):
            file.unlink()
        model = of_zeros().to(torch.bfloat16)
        for buffer in ("running", "count"):
            setattr(model.body[1], buffer, torch.zeros_like(BUFFERS[f"body.1.{buffer}"]))
        fsdp_optim.load(folder, model)
        for fqn, param in model.named_parameters():
            check_same(fqn, param.detach(), self.oracle[fqn].bfloat16())
        with self.assertRaisesRegex(StateError, "was saved without an optimizer"):
            fsdp_optim.load(folder, model, optimizer(model))

    def weights(self) -> list[str]:
        return [fqn for fqn in self.oracle if not fqn.startswith("state.")]

    def test_weights_of_16_bits_need_cast(self) -> None:
        """fp32 weights into a model of 16 bits, and frozen ones of 16 bits into one of fp32, only if the caller asks."""
        model = of_zeros()
        with self.assertRaisesRegex(StateError, FROZEN.replace(".", r"\.")):
            fsdp_optim.load(self.root / "z3-w4-fp16", model, optimizer(model))
        small = of_zeros().half()
        fsdp_optim.load(self.root / "z3-w4-fp16", small, options=fsdp_optim.LoadOptions(cast=True))
        for fqn, param in small.named_parameters():
            check_same(fqn, param.detach(), self.oracle[fqn].half())

    def test_hyperparameters_and_steps(self) -> None:
        model = of_zeros()
        optim = optimizer(model)
        for group in optim.param_groups:
            group.update(lr=7.0, weight_decay=7.0)
        fsdp_optim.load(self.root / "z3-w4-fp16", model, optim, options=fsdp_optim.LoadOptions(cast=True))
        hyperparameters = [(group["lr"], group["weight_decay"], group["betas"]) for group in optim.param_groups]
        check_same("groups", hyperparameters, [(0.0625, 0.125, (0.5, 0.75)), (0.25, 0.0, (0.5, 0.75))])
        check_same("step", optim.state[model.emb.weight]["step"], torch.tensor(float(STEPS)))
        optim.param_groups[0]["lr"] = 7.0
        with self.assertRaisesRegex(
            StateError, "has no hyperparameters, the optimizer has .*lr, .*: give param_groups='live'"
        ):
            fsdp_optim.load(self.root / "z2-w2-elastic", model, optim, options=fsdp_optim.LoadOptions(cast=True))
        fsdp_optim.load(
            self.root / "z2-w2-elastic", model, optim, options=fsdp_optim.LoadOptions(cast=True, param_groups="live")
        )
        check_same("the live ones", (optim.param_groups[0]["lr"], optim.param_groups[1]["lr"]), (7.0, 0.25))

    def test_values_of_the_trainer(self) -> None:
        for name, scale in (("z2-w4-fp16", 16), ("z1-w3-fp16", 8.0), ("z3-w4-fp16", 16)):
            restored = fsdp_optim.load(self.root / name, of_zeros(), options=fsdp_optim.LoadOptions(cast=True))
            check_same(name, (restored.state["epoch"], restored.state["global_steps"]), (4, STEPS))
            check_same(name, restored.state["lr_scheduler"]["last_epoch"], STEPS)
            check_same(name, restored.state["loss_scaler"]["cur_scale"], scale)
            check_same(name, restored.state["ds_config"]["train_batch_size"], int(name[4]))
            with self.assertRaisesRegex(CheckpointError, r"args has an object of the class argparse\.Namespace"):
                restored.state["args"]
            pickled = fsdp_optim.load(
                self.root / name, of_zeros(), options=fsdp_optim.LoadOptions(cast=True, allow_pickle=True)
            )
            check_same(name, pickled.state["args"].seed, 1)
            if name.startswith("z3"):
                check_same(name, restored.state["per_rank_extra"]["epoch"], 4)
                check_same(name, [values["args"].seed for values in pickled.all_ranks], [1] * 4)
                folder = self.copied("another rank's values", name)
                path = self.root / "z3-w3-fp32" / TAG / "zero_pp_rank_2_mp_rank_00_model_states.pt"
                for data in (path.read_bytes(), b""):
                    (folder / path.name).write_bytes(data)
                    with self.assertRaisesRegex(CheckpointError, path.name):
                        fsdp_optim.load(folder, of_zeros(), options=fsdp_optim.LoadOptions(cast=True))

    def test_values_that_only_a_later_rank_gave(self) -> None:
        """In ZeRO 3 the first rank's file does not say what is in those of the others: each is read, verified and converted."""
        folder, target = self.root / "of rank 1", self.root / "of rank 1 converted"
        weights = {"weight": torch.ones(3, 2)}
        write_zero(folder, 3, 2, [weights], {"exp_avg": [weights]}, step=1)
        model = nn.Linear(2, 3, bias=False)
        with self.assertNoLogs("fsdp_optim", "WARNING"):
            restored = fsdp_optim.load(folder, model)
        check_same("none gave any", ("per_rank_extra" in restored.state, restored.all_ranks), (False, ()))
        path = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
        torch.save({**torch.load(path, weights_only=True), "seen": 7}, path)
        fsdp_optim.convert(folder, target, options=fsdp_optim.ConvertOptions(durable=False, progress=False))
        for place in (folder, target):
            check_same("one gave some", fsdp_optim.load(place, model).all_ranks, ({}, {"seen": 7}))
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with self.assertRaisesRegex(CheckpointError, path.name):
            fsdp_optim.verify(folder, progress=False)

    # ------------------------------------------------------------------------------------------- what is refused

    def test_files_that_do_not_belong_together(self) -> None:
        cases = []

        def refused(name: str, of: str, wanted: str) -> Path:
            cases.append((name, wanted))
            return self.copied(name, of)

        for rank in (0, 2, 3):
            file = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            (refused(f"no optim {rank}", "z2-w4-fp16", f"{file}: is missing") / file).unlink()
        for rank in (0, 1, 3):
            file = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            (refused(f"no model {rank}", "z3-w4-fp16", f"{file}: is missing") / file).unlink()
        folder = refused("no model", "z2-w4-fp16", "has no *_model_states.pt")
        (folder / "mp_rank_00_model_states.pt").unlink()
        folder = refused("no optim of stage 3", "z3-w3-fp32", "a checkpoint of ZeRO 3 has no weights without them")
        for path in folder.glob("*optim_states.pt"):
            path.unlink()
        path = self.root / "z1-w3-fp16" / TAG / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
        folder = refused("one too many", "z1-w1-fp32", "zero_pp_rank_2_mp_rank_00_optim_states.pt: is left over")
        shutil.copy(path, folder)
        folder = refused("two stages", "z2-w4-fp16", f"{path.name}: is of 3 ranks, but files of 4")
        shutil.copy(path, folder)
        folder = refused("two dtypes", "z2-w3-aligned", "are both of rank 2")
        shutil.copy(path, folder)
        folder = refused("another model", "z2-w3-aligned", "")
        for number in range(3):
            source = self.root / "z1-w3-fp16" / TAG / f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt"
            target = folder / f"bf16_zero_pp_rank_{number}_mp_rank_00_optim_states.pt"
            if number:
                shutil.copy(source, target)
        cases[-1] = ("another model", "differs in ")
        folder = refused(
            "another step", "z2-w4-fp16", "rank_3_mp_rank_00_optim_states.pt: differs in numbers of the state"
        )
        set_step(folder / "zero_pp_rank_3_mp_rank_00_optim_states.pt", "base_optimizer_state", 2.0)
        folder = refused(
            "another step of 3", "z3-w3-fp32", "rank_1_mp_rank_00_optim_states.pt: differs in numbers of the state"
        )
        set_step(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt", "optimizer_state_dict", 2.0)
        (
            refused("tensor parallel", "z1-w1-fp32", "mp_rank_01_model_states.pt: a checkpoint of several tensor")
            / "mp_rank_01_model_states.pt"
        ).write_bytes(b"")
        (
            refused("pipeline", "z1-w1-fp32", "layer_00-model_00-model_states.pt: a checkpoint with pipeline stages")
            / "layer_00-model_00-model_states.pt"
        ).write_bytes(b"")
        (
            refused("experts", "z1-w1-fp32", "expp_rank_0_mp_rank_00_optim_states.pt: a checkpoint with")
            / "expp_rank_0_mp_rank_00_optim_states.pt"
        ).write_bytes(b"")
        refused("without names", "z0-w1-bf16", "fp32 weights without names")
        cases.append(("z2-w2-fp32-universal", "mixes up the parameters of a run with round_robin_gradients"))
        for name, of, file in (
            ("cut model", "z2-w4-fp16", "mp_rank_00_model_states.pt"),
            ("cut optim", "z2-w4-fp16", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
            ("cut optim of stage 3", "z3-w4-fp16", "zero_pp_rank_3_mp_rank_00_optim_states.pt"),
        ):
            path = refused(name, of, file) / file
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        for rank in (0, 1):
            name, file = f"no model {rank} of a universal one", f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            shutil.copytree(self.root / "z3-w3-fp32-universal" / f"{TAG}_universal", self.root / name)
            (self.root / name / file).unlink()
            cases.append((name, f"{file}: is missing"))
        universal = self.root / "z2-w3-aligned-universal" / f"{TAG}_universal" / "zero"
        for name, file, wanted in (
            ("no weight", "emb.weight/fp32.pt", "zero/emb.weight/fp32.pt: is missing"),
            ("no groups", "optimizer_state.pt", "zero/optimizer_state.pt: is missing"),
            ("cut moment", "emb.weight/exp_avg.pt", "zero/emb.weight/exp_avg.pt"),
            ("moment of another", "emb.weight/exp_avg.pt", "zero/emb.weight/exp_avg.pt: has the shape [5, 5]"),
        ):
            shutil.copytree(universal.parent, self.root / name)
            path = self.root / name / "zero" / file
            if name.startswith("no "):
                path.unlink()
            elif name == "cut moment":
                path.write_bytes(path.read_bytes()[:-40])
            else:
                shutil.copy(universal / "body.0.weight" / "exp_avg.pt", path)
            cases.append((name, wanted))
        run_on_ranks(refuse_all, 2, self.root, cases)

    def test_tags(self) -> None:
        place = self.root / "tags"
        place.mkdir()
        self.addCleanup(shutil.rmtree, place)
        for name in ("z2-w2-fp32", "z3-w3-fp32"):
            shutil.copytree(self.root / name / TAG, place / name)
        with self.assertRaisesRegex(
            CheckpointError, "several tags: give the path of one of them: z2-w2-fp32, z3-w3-fp32"
        ):
            fsdp_optim.load(place, of_zeros())
        for tag, wanted in (
            ("global_step9", "names the tag 'global_step9'"),
            ("../runs", "is not inside"),
            ("", "names the"),
        ):
            (place / "latest").write_text(tag)
            with self.assertRaisesRegex(CheckpointError, wanted):
                fsdp_optim.load(place, of_zeros())
        (place / "latest").write_bytes(b"\xff" * 5000)
        with self.assertRaisesRegex(CheckpointError, "latest"):
            fsdp_optim.load(place, of_zeros())
        save_file(
            {"weight": torch.ones(2)}, place / "model.safetensors"
        )  # as Hugging Face's Trainer writes it, beside the tag
        for tag in ("z2-w2-fp32", "z3-w3-fp32\n"):
            (place / "latest").write_text(tag)
            self.assertEqual(
                fsdp_optim.load(place, of_zeros()).state["ds_config"]["zero_optimization"]["stage"], int(tag[1])
            )

    def test_nothing_of_a_file_is_executed(self) -> None:
        folder, witness = self.root / "evil", self.root / "executed"
        weights = [{"weight": torch.ones(3, 2)}]
        write_zero(folder, 2, 2, weights, {}, client={"evil": Evil(str(witness)), "epoch": 3})
        for where in ("module", "param_shapes"):
            model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
            shutil.rmtree(witness)
            torch.save({**model, where: Evil(str(witness)), "evil": None}, folder / "mp_rank_00_model_states.pt")
            with self.assertRaises(CheckpointError):
                fsdp_optim.load(folder, nn.Linear(2, 3, bias=False))
            self.assertFalse(witness.exists(), where)
            torch.save({**model, "evil": Evil(str(witness))}, folder / "mp_rank_00_model_states.pt")
            restored = fsdp_optim.load(folder, nn.Linear(2, 3, bias=False))
            self.assertFalse(witness.exists(), where)
            check_same("the rest", restored.state["epoch"], 3)
            with self.assertRaisesRegex(CheckpointError, "evil has an object of the class posix.mkdir"):
                restored.state["evil"]

    @unittest.skipUnless(importlib.util.find_spec("deepspeed"), "deepspeed is not installed")
    def test_zero_to_fp32_reads_the_same_weights(self) -> None:
        """DeepSpeed's own converter of weights; it reads no universal checkpoints, and not what BF16_Optimizer writes."""
        names = [name for name in RUNS if name[1] != "0" and not name.endswith("universal") and name != "z1-w2-bf16"]
        script = (
            "import torch\nfrom deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read\n"
            f"torch.save({{name: read(f'{self.root}/{{name}}') for name in {names}}}, '{self.root}/theirs.pt')\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        for name, by_fqn in torch.load(self.root / "theirs.pt").items():
            with closing(opened(self.root / name)) as reader:
                for fqn in self.weights():
                    if fqn == FROZEN and name[1] == "1":
                        continue  # it gives no frozen weights of ZeRO 1
                    check_same(f"{name}: {fqn}", elements(reader, fqn).float(), by_fqn[fqn].float())


class Evil:
    """An object whose pickle makes a folder when it is loaded by pickle."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def set_step(path: Path, tree: str, step: float) -> None:
    """Write another step into the file of a rank."""
    with Folder(path.parent, PROBE).open_any() as files:
        stored = read_archive(files, path.name).value["optimizer_state_dict"][tree]["state"][1]["step"]
    data = bytearray(path.read_bytes())
    data[stored.start : stored.start + 4] = torch.tensor(step).numpy().tobytes()
    path.write_bytes(data)


if __name__ == "__main__":
    unittest.main()
