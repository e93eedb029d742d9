"""convert(format="torch_file"): one file of torch.save with everything, for stock torch and for this library's reader."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.optimizers import adam, adamw_tensor_lr
from kit.options import state_for
from kit.rank_files import Buffered
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.options import KeyBy
from fsdp_optim.plugins import TorchFiles
from fsdp_optim.testing import run_on_ranks

MAKES = {"fairscale flat": adam, "FSDP2": adamw_tensor_lr}
EXTRA = {"step": 3, "lrs": [0.1, 0.2], "seen": torch.arange(3)}


class Noted(nn.Linear):
    """A module that adds a value of its own to its state dict, beside its tensors."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.seen = [1.0, 2.5]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seen"] = list(self.seen)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.seen = state.pop(prefix + "seen")
        super()._load_from_state_dict(state, prefix, *args)


def save_all(root: Path) -> None:
    for wrapper, make in MAKES.items():
        with cpu():
            trained = Trained(wrapper, make, model=Buffered)
            fsdp_optim.save(
                root / wrapper,
                trained.model,
                trained.optim,
                state={**EXTRA, "rng": fsdp_optim.per_rank(dist.get_rank())},
                options=fsdp_optim.SaveOptions(durable=False, process_group=trained.process_group),
            )


def check_resumed_by_ranks(path: Path) -> None:
    """This library's reader takes the file into FSDP2 on other ranks, which train on as the run that never stopped."""
    with cpu():
        target, wanted = Trained("FSDP2", adam, 0, model=Buffered), Oracle(adam, STEPS + 2, model=Buffered)
        restored = fsdp_optim.load(path, target.model, target.optim)
        check_same("extra", {key: restored.state[key] for key in EXTRA}, EXTRA)
        check_same("of ranks", restored.all_ranks, ({"rng": 0}, {"rng": 1}))
        is_new = dist.get_rank() > 1
        check_same("of this rank", restored.state.get("rng"), None if is_new else dist.get_rank())
        target.step(range(STEPS, STEPS + 2))
        full = target.gather(None, "name")
        state = {fqn: {key: full["state"][fqn][key] for key in values} for fqn, values in wanted.by_name().items()}
        check_same("state", state, wanted.by_name())


class TorchFileWriterTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(save_all, 2, cls.root)

    def converted(self, name: str, key_by: KeyBy = "id") -> Path:
        target = self.root / f"{name} {key_by}.d"
        format = TorchFiles(key_by, one_file=True)
        fsdp_optim.convert(
            self.root / name, target, format=format, options=fsdp_optim.ConvertOptions(durable=False), overwrite=True
        )
        check_same(
            "files",
            sorted(path.name for path in target.iterdir() if path.is_file()),
            ["checkpoint.pt", "torch_files.json"],
        )
        return target / "checkpoint.pt"

    @parameterized.expand(list(MAKES))
    def test_stock_torch_goes_on(self, wrapper: str) -> None:
        """By the two lines that everybody writes, strictly, and then as in the run that never stopped; also mapped."""
        path, make = self.converted(wrapper), MAKES[wrapper]
        resumed, wanted = Oracle(make, 0, model=Buffered), Oracle(make, STEPS, model=Buffered)
        file = torch.load(path, weights_only=True)
        check_same("mapped", torch.load(path, weights_only=True, mmap=True), file)
        check_same("keys", list(file), ["model", "optimizer", *EXTRA, "per_rank_extra"], in_order=False)
        resumed.model.load_state_dict(file["model"])
        resumed.optim.load_state_dict(copy.deepcopy(file["optimizer"]))
        for more in ((), range(STEPS, STEPS + 2)):
            resumed.step(more)
            wanted.step(more)
            check_same("weights", dict(resumed.model.state_dict()), dict(wanted.model.state_dict()), in_order=False)
            check_same("state", resumed.by_name(), wanted.by_name())
        check_same("extra", {key: file[key] for key in EXTRA}, EXTRA)
        check_same("of ranks", file["per_rank_extra"], {0: {"rng": 0}, 1: {"rng": 1}})

    def test_read_by_ranks(self) -> None:
        run_on_ranks(check_resumed_by_ranks, 3, self.converted("fairscale flat"))

    def test_there_and_back(self) -> None:
        """By file and by folder, by id and by name: the same tensors as in the source; `verify` and `inspect` read it."""
        from safetensors.torch import load_file

        for key_by in ("id", "name"):
            path = self.converted("FSDP2", key_by=key_by)
            for source in (path, path.parent):
                back = self.root / "back"
                fsdp_optim.convert(source, back, options=fsdp_optim.ConvertOptions(durable=False), overwrite=True)
                for name in ("model.safetensors", "optim.safetensors"):
                    check_same(name, load_file(back / name), load_file(self.root / "FSDP2" / name), in_order=False)
                self.assertEqual(fsdp_optim.verify(source).format, "torch")
                self.assertEqual(fsdp_optim.inspect(source).model.keys(), fsdp_optim.inspect(back).model.keys())

    @parameterized.expand([("torch",), ("torch_file",)])
    def test_values_of_modules_are_in_the_models_dict(self, format: str) -> None:
        """`load_state_dict` finds them there, and so does this library's reader; before, they were in a file beside it."""
        model, target = nn.Sequential(Noted(), Buffered().head), self.root / f"modules {format}"
        fsdp_optim.save(self.root / "modules", model, options=fsdp_optim.SaveOptions(durable=False), overwrite=True)
        fsdp_optim.convert(
            self.root / "modules", target, format=format, options=fsdp_optim.ConvertOptions(durable=False)
        )
        file = torch.load(next(target.glob("*.pt")), weights_only=True)
        for load in (
            lambda module: module.load_state_dict(file["model"] if format == "torch_file" else file),
            lambda module: fsdp_optim.load(target, module),
        ):
            other = nn.Sequential(Noted(), Buffered().head)
            other[0].seen = []
            load(other)
            check_same("values", dict(other.state_dict()), dict(model.state_dict()))

    def test_refused(self) -> None:
        """A trainer's value with the name of a part, and values that `weights_only` does not read."""
        model = nn.Linear(2, 2)
        for extra, words in (({"model": 1}, "'model' has the name of a part"), ({"at": Path("x")}, "pickle")):
            fsdp_optim.save(
                self.root / "named",
                model,
                state=state_for(extra),
                options=fsdp_optim.SaveOptions(durable=False, allow_pickle=True),
                overwrite=True,
            )
            with self.assertRaisesRegex(CheckpointError, words):
                fsdp_optim.convert(
                    self.root / "named",
                    self.root / "x",
                    format="torch_file",
                    options=fsdp_optim.ConvertOptions(durable=False),
                )
            self.assertFalse((self.root / "x").exists())
