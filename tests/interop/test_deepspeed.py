"""`load` takes what DeepSpeed's ZeRO 1, 2 and 3 have written, and its universal checkpoints.

The files in tests/data/deepspeed were written by DeepSpeed itself; see the README there.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import Differs, check_same, error_text, sorted_state
from kit.options import as_options
from kit.wrapping import WRAPPERS, cpu
from kit.zero_files import write_zero
from kit.zero_runs import FROZEN, STEPS, TIED, Model, exact, optimizer
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim.buckets.objects.memory import MemoryBucket
from fsdp_optim.buckets.objects.store import ObjectStore
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.load import restore
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.foreign.archive.torch_archive import read_archive
from fsdp_optim.foreign.deepspeed.reader import DEEPSPEED
from fsdp_optim.foreign.reader import NO_JUDGE, ForeignReader
from fsdp_optim.storage.posix.store import Folder
from fsdp_optim.testing import ReaderConformance, WrittenSample, run_on_ranks
from fsdp_optim.testing.foreign_readers import read_elements

DATA = Path(__file__).parents[1] / "data" / "deepspeed" / "checkpoints.tar.xz"
TAG = f"global_step{STEPS}"
RUNS = (
    *("z1-w1-fp32", "z1-w2-bf16", "z1-w3-fp16", "z1-w4-bf16"),
    *("z2-w1-bf16", "z2-w2-fp32", "z2-w3-aligned", "z2-w4-fp16", "z2-w2-elastic"),
    *("z3-w1-bf16", "z3-w2-groups", "z3-w3-fp32", "z3-w4-fp16"),
    *("z1-w2-bf16-universal", "z1-w4-bf16-universal", "z2-w3-aligned-universal", "z3-w3-fp32-universal"),
    "z0-w2-fp32",
)
WRAPPERS_AT = {1: ("plain", "FSDP2"), 2: ("FSDP2", "FSDP1 orig"), 3: ("FSDP1 orig", "fairscale non-flat", "FSDP2")}
BUFFERS = {"body.1.running": torch.arange(3.0) / 4, "body.1.count": torch.tensor(2**40 + 3)}


def unpacked(folder: Path, run: str = "") -> dict[str, Tensor]:
    """Unpack the checkpoints, or one run's, and return the oracle: the same training without DeepSpeed."""
    with tarfile.open(DATA) as archive:
        wanted = [
            file for file in archive if PurePath(file.name).parts[:1] in ((run,), ("oracle.safetensors",)) or not run
        ]
        archive.extractall(folder, wanted, filter="data")
    return load_file(folder / "oracle.safetensors")


def of_zeros() -> Model:
    model = Model()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def state_of(oracle: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in oracle.items():
        if key.startswith("state."):
            fqn, _, name = key.removeprefix("state.").rpartition(".")
            found.setdefault(fqn, {})[name] = tensor
    return found


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
    found = load_file(folder / "model.safetensors")
    check_same("weights", dict(sorted(found.items())), dict(sorted({**weights, **BUFFERS}.items())))
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
                check_same(
                    "the rest", (restored.state["epoch"], restored.missing_keys, restored.unexpected_keys), (4, (), ())
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


def opened(path: Path) -> ForeignReader:
    return DEEPSPEED.open(Folder(path, NO_JUDGE).open_any(), verify=True)


def elements(reader: ForeignReader, fqn: str, name: str = "") -> Tensor:
    stored = reader.full_dict["state"][fqn][name] if name else reader.model[fqn]
    data = bytearray(read_elements(reader, stored, 0, stored.placement.numel))
    return torch.frombuffer(data, dtype=getattr(torch, stored.dtype)).reshape(stored.shape)


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
            store = ObjectStore(bucket, f"runs/{name}", NO_JUDGE)
            restore.restore(store, model, optim, LoadArguments(cast=True))
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
        found = [(group["lr"], group["weight_decay"], group["betas"]) for group in optim.param_groups]
        check_same("groups", found, [(0.0625, 0.125, (0.5, 0.75)), (0.25, 0.0, (0.5, 0.75))])
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
        for name, theirs in torch.load(self.root / "theirs.pt").items():
            with closing(opened(self.root / name)) as reader:
                for fqn in self.weights():
                    if fqn == FROZEN and name[1] == "1":
                        continue  # it gives no frozen weights of ZeRO 1
                    check_same(f"{name}: {fqn}", elements(reader, fqn).float(), theirs[fqn].float())


class Evil:
    """An object whose pickle makes a folder when it is loaded by pickle."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def set_step(path: Path, tree: str, step: float) -> None:
    """Write another step into the file of a rank."""
    with Folder(path.parent, NO_JUDGE).open_any() as files:
        stored = read_archive(files, path.name).value["optimizer_state_dict"][tree]["state"][1]["step"]
    data = bytearray(path.read_bytes())
    data[stored.start : stored.start + 4] = torch.tensor(step).numpy().tobytes()
    path.write_bytes(data)


# ------------------------------------------------------------------------------------------- any shapes, any number of ranks


class Counting(nn.Module):
    """A module that keeps a value besides parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3, bias=False)
        self.count: Any = 0

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def some_groups(rng: random.Random, num: int) -> list[dict[str, Tensor]]:
    groups: list[dict[str, Tensor]] = [{} for _ in range(num)]
    for index in range(rng.randint(num, 9)):
        shape = tuple(rng.choice((1, 1, 2, 3, 5, 8)) for _ in range(rng.randint(0, 3)))
        group = groups[index] if index < num else rng.choice(groups)
        group[f"layer.{index}.weight"] = torch.randn(shape)
    return groups


class TestLayouts(unittest.TestCase):
    """Files of the independent writer: every element of every value is found, and padding is not."""

    @parameterized.expand([(stage, world_size) for stage in (1, 3) for world_size in (1, 2, 3, 5, 8)])
    def test_every_element_is_found(self, stage: int, world_size: int) -> None:
        rng = random.Random(100 * stage + world_size)
        for number in range(6):
            with tempfile.TemporaryDirectory() as folder:
                groups = some_groups(rng, rng.randint(1, 3))
                state = {
                    name: [{fqn: torch.randn(w.shape) for fqn, w in group.items()} for group in groups]
                    for name in ("exp_avg", "buf")
                }
                options: dict[str, Any] = [
                    {"step": torch.tensor(3.0)},
                    {"group_step": 4},
                    {"step": 5, "is_lean": False},
                ][number % 3]
                alignment = rng.choice((1, 1, 4, 8)) if stage == 1 else 1
                write_zero(Path(folder), stage, world_size, groups, state, alignment=alignment, **options)
                with closing(opened(Path(folder))) as reader:
                    full: Any = reader.full_dict
                    for index, group in enumerate(groups):
                        for fqn, weight in group.items():
                            check_same(fqn, elements(reader, fqn), weight)
                            for name, of_groups in state.items():
                                check_same(f"{fqn}.{name}", elements(reader, fqn, name), of_groups[index][fqn])
                            step = full["state"][fqn]["step"]
                            check_same(
                                fqn,
                                step if type(step) is int else step.shape,
                                options.get("group_step", options.get("step")) if type(step) is int else (),
                            )
                        check_same("group", full["param_groups"][index], {"lr": 0.5 + index, "params": list(group)})

    def test_a_state_that_is_cut_otherwise_is_refused(self) -> None:
        """Such as the error feedback of 1-bit Adam: no value is left out silently."""
        with tempfile.TemporaryDirectory() as folder:
            weights = [{"weight": torch.ones(3, 2)}]
            write_zero(Path(folder), 2, 2, weights, {"exp_avg": weights}, step=torch.ones(7))
            with self.assertRaisesRegex(CheckpointError, "the state value step of group 0"):
                opened(Path(folder)).close()

    def test_values_of_modules(self) -> None:
        """The result of `get_extra_state`, an object or a tensor, goes back into the module."""
        with tempfile.TemporaryDirectory() as folder:
            write_zero(Path(folder), 2, 2, [{"inner.weight": torch.ones(3, 2)}], {})
            path = Path(folder) / "mp_rank_00_model_states.pt"
            saved = torch.load(path)
            for one in (3, torch.tensor([4])):
                torch.save({**saved, "module": {**saved["module"], "_extra_state": one}}, path)
                fresh = Counting()
                fsdp_optim.load(folder, fresh)
                check_same("count", fresh.count, one)
                check_same("weight", fresh.inner.weight.detach(), torch.ones(3, 2))

    def test_parts_that_are_too_short(self) -> None:
        for stage in (1, 3):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                weights = [{"a": torch.ones(3, 2), "b": torch.ones(9)}]
                write_zero(folder, stage, 2, weights, {"exp_avg": weights})
                path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
                saved = torch.load(path)
                key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
                saved["optimizer_state_dict"][key][0] = saved["optimizer_state_dict"][key][0][:-1].clone()
                torch.save(saved, path)
                with self.assertRaisesRegex(CheckpointError, f"{path.name}: has .* elements of the flat group 0"):
                    opened(folder).close()


# ------------------------------------------------------------------------------------------- the promises of a reader


class OfRun(ReaderConformance):
    run_name = ""
    order: tuple[str, ...] = ()

    def make_format(self) -> Any:
        return DEEPSPEED

    def open_any(self, folder: Path) -> Any:
        return Folder(folder, NO_JUDGE).open_any()

    def write(self, folder: Path) -> WrittenSample:
        with tempfile.TemporaryDirectory() as place:
            oracle = unpacked(Path(place), self.run_name)
            shutil.copytree(Path(place) / self.run_name / TAG, folder, dirs_exist_ok=True)
        weights = {fqn: tensor for fqn, tensor in oracle.items() if not fqn.startswith("state.")}
        weights[FROZEN] = exact((4, 3), len("weight") + 7).bfloat16()
        state = state_of(oracle)
        optim = [state[fqn][name] for fqn in self.order for name in ("step", "exp_avg", "exp_avg_sq")]
        return WrittenSample({**weights, **BUFFERS}, optim)

    @pytest.mark.slow
    def test_damage_is_an_error_and_no_crash(self) -> None:
        super().test_damage_is_an_error_and_no_crash()

    def test_some_damage_is_an_error_and_no_crash(self) -> None:
        folder, _ = self._written()
        rng = random.Random(5)
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            for _ in range(5):
                at, bit = rng.randrange(len(data)), rng.randrange(8)
                flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
                self._check_damaged(folder, path, flipped, f"bit {bit} of byte {at}")
                self._check_damaged(folder, path, data[:at], f"cut at byte {at}")


class TestStage2(OfRun, unittest.TestCase):
    run_name = "z2-w3-aligned"
    order = (  # of round robin gradients on three ranks
        *("emb.weight", "body.2.weight", "body.0.weight", "body.3.weight", "body.1.weight"),
        *("body.0.bias", "body.2.bias", "body.1.bias", "body.3.bias", "body.1.gain"),
    )


class TestStage3(OfRun, unittest.TestCase):
    run_name = "z3-w2-groups"
    order = (
        *("emb.weight", "body.0.weight", "body.1.weight", "body.2.weight", "body.3.weight"),
        *("body.0.bias", "body.1.bias", "body.1.gain", "body.2.bias", "body.3.bias"),
    )


if __name__ == "__main__":
    unittest.main()
