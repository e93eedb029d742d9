"""Checkpoints of other libraries are converted into ours: by name, or by ids that param_names= or model= name."""

from __future__ import annotations

import tempfile
import unittest
import unittest.mock
from pathlib import Path
from typing import Any

import torch
from kit.checkpoint_format import check_folder, tensors_of
from kit.compare import check_same
from kit.options import as_options
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.plugins import FairscaleShards
from fsdp_optim.registry import format_names

Parts = Any  # a model and its optimizer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)


def build(*, stepped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with two groups, whose ids do not count its parameters in the model's order."""
    torch.manual_seed(3)
    model = Model()
    groups = [{"params": [*model.head.parameters()], "lr": 0.25}, {"params": [*model.stem.parameters()], "lr": 0.5}]
    groups[1]["params"] += model.norm.parameters()
    optim = torch.optim.AdamW(groups, amsgrad=True)
    if stepped:
        for index, param in enumerate(model.parameters()):
            if index != 1:  # which has no state
                param.grad = torch.randn_like(param)
        optim.step()
    return model, optim


IDS = ["head.weight", "head.bias", "stem.weight", "stem.bias", "norm.weight", "norm.bias"]


def names_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[int, str]:
    name_of = {param: name for name, param in model.named_parameters()}
    return dict(enumerate(name_of[param] for group in optim.param_groups for param in group["params"]))


def by_name(optim: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """As torch's own functions give it."""
    saved = optim.state_dict()
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[key]: values for key, values in saved["state"].items()}, "param_groups": groups}


class ConvertForeignTest(unittest.TestCase):
    root: Path

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.model, self.optim = build(stepped=True)
        self.target = self.root / "to"

    def check(self, *, extra: dict[str, Any] | None = None, has_optim: bool = True) -> None:
        """Raise unless our loader finds the same weights, state and groups in the result, bit for bit."""
        check_folder(self.target)
        check_same("weights", tensors_of(self.target, "model"), dict(sorted(self.model.state_dict().items())))
        model, optim = build(stepped=False)
        restored = fsdp_optim.load(
            self.target, model, optim if has_optim else None, options=fsdp_optim.LoadOptions(compare=True)
        )
        check_same("model", model.state_dict(), self.model.state_dict())
        check_same("extra", dict(restored.state), extra or {})
        if has_optim:
            check_same("optimizer", optim.state_dict(), self.optim.state_dict())

    def convert(self, source: Path, **options: Any) -> None:
        fsdp_optim.convert(source, self.target, **as_options(fsdp_optim.ConvertOptions, **options, durable=False))

    def test_weights_of_safetensors(self) -> None:
        save_file(self.model.state_dict(), self.root / "model.safetensors")
        self.convert(self.root / "model.safetensors")
        self.check(has_optim=False)

    @parameterized.expand([("",), ("module.",), ("_orig_mod.",)])
    def test_a_torch_file_by_name(self, prefix: str) -> None:
        """The prefixes and parts that wrappers add to names are not in the result."""
        full = by_name(self.optim, {key: f"{prefix}{name}" for key, name in names_of(self.model, self.optim).items()})
        weights = {f"{prefix}{name}": value for name, value in self.model.state_dict().items()}
        torch.save({"model": weights, "optimizer": full, "epoch": 3}, self.root / "full.pt")
        self.convert(self.root / "full.pt")
        self.check(extra={"epoch": 3})

    def test_ids_that_names_tell(self) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optim.state_dict()}, self.root / "full.pt")
        self.convert(self.root / "full.pt", param_names=IDS)
        self.check()

    def test_ids_that_a_model_tells(self) -> None:
        """The model may be on the meta device; its parameters are counted as a plain optimizer counts them."""
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.5)
        self.optim.step()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optim.state_dict()}, self.root / "full.pt")
        with torch.device("meta"):
            meta = Model()
        self.convert(self.root / "full.pt", model=meta)
        state = tensors_of(self.target, "optim")
        for name, param in self.model.named_parameters():
            for key, value in self.optim.state.get(param, {}).items():
                check_same(name, state[f"state.{name}.{key}"], value)

    def test_ids_without_names_are_asked_for(self) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optim.state_dict()}, self.root / "full.pt")
        with self.assertRaisesRegex(
            StateError, r"6 parameters by ids without names: give param_names=\[\.\.\.\].*or model="
        ):
            self.convert(self.root / "full.pt")
        with self.assertRaisesRegex(StateError, "has 6 parameters, and names has 2"):
            self.convert(self.root / "full.pt", param_names=IDS[:2])
        with self.assertRaisesRegex(StateError, "has 6 parameters, and the model has 2"):
            self.convert(self.root / "full.pt", model=nn.Linear(2, 2))
        self.assertFalse(self.target.exists())

    def test_ids_by_unit_of_fairscale_are_not_taken_for_others(self) -> None:
        full = {**self.optim.state_dict(), "param_id_map": {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1}}
        torch.save({"model": self.model.state_dict(), "optimizer": full}, self.root / "full.pt")
        with self.assertRaisesRegex(StateError, "count the parameters by FSDP unit.*give param_names="):
            self.convert(self.root / "full.pt", model=self.model)

    @parameterized.expand([("params", {"params": 3}), ("names", {"params": [0], "param_names": 3})])
    def test_groups_that_no_optimizer_has(self, _: str, group: dict[str, Any]) -> None:
        optim = {"state": {}, "param_groups": [group]}
        torch.save({"model": self.model.state_dict(), "optimizer": optim}, self.root / "full.pt")
        for call in (self.convert, fsdp_optim.inspect):
            with self.assertRaisesRegex(CheckpointError, "full.pt: is not written as it should be"):
                call(self.root / "full.pt")
        self.assertFalse(self.target.exists())

    def test_values_that_need_pickle(self) -> None:
        saved = {"model": self.model.state_dict(), "args": unittest.TestCase}
        torch.save(saved, self.root / "full.pt")
        with self.assertLogs("fsdp_optim", "WARNING") as logged:
            self.convert(self.root / "full.pt")
        self.assertRegex(
            "".join(logged.output), "left out of the new checkpoint: .*full.pt: args .*TestCase.*allow_pickle=True"
        )
        self.check(has_optim=False)

    def test_no_folder_is_left_empty(self) -> None:
        """Nor by a save."""
        save_file({"a": torch.ones(3)}, self.root / "model.safetensors")
        for name in format_names():
            if name == "deepspeed_universal":
                continue  # it has a folder for each parameter of the optimizer, and here is none
            format = FairscaleShards(2, {"": ["a"]}) if name == "fairscale_shards" else name
            fsdp_optim.convert(
                self.root / "model.safetensors",
                self.target / name,
                format=format,
                options=fsdp_optim.ConvertOptions(durable=False),
            )
        fsdp_optim.save(self.target / "saved", self.model, options=fsdp_optim.SaveOptions(durable=False))
        fsdp_optim.save(
            self.target / "with extra", self.model, state={"epoch": 3}, options=fsdp_optim.SaveOptions(durable=False)
        )
        folders = [path for path in self.target.rglob("*") if path.is_dir()]
        self.assertEqual([str(path) for path in folders if not any(path.iterdir())], [])
        self.assertTrue((self.target / "with extra" / "extra" / "common.safetensors").is_file())

    def test_every_dtype_of_the_field(self) -> None:
        """Dtypes of one byte, of which torch makes no tensor by itself, and numbers that begin at any byte."""
        words = ("float64", "complex64", "int64", "float32", "bfloat16", "float16", "int16", "bool", "uint8", "int8")
        words += ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")
        dtypes = [getattr(torch, word) for word in words if hasattr(torch, word)]
        tensors = {str(d): torch.randint(0, 2, (3, 5 * d.itemsize), dtype=torch.uint8).view(d) for d in dtypes}
        save_file(tensors, self.root / "all.safetensors")
        fsdp_optim.convert(self.root / "all.safetensors", self.target, options=fsdp_optim.ConvertOptions(durable=False))
        converted = load_file(self.target / "model.safetensors")
        for name, value in tensors.items():
            check_same(name, converted[name].view(torch.uint8), value.view(torch.uint8))
            self.assertEqual(converted[name].dtype, value.dtype)

    def test_a_source_that_was_written_again_begins_anew(self) -> None:
        """Same names and sizes, other bytes: the version of the file tells it."""
        for value in (1.0, 2.0):
            save_file({"a": torch.full((1000,), value)}, self.root / "one.safetensors")
            with (
                unittest.mock.patch(
                    "fsdp_optim.storage.posix.folder.FolderStaging.seal", side_effect=KeyboardInterrupt
                ),
                self.assertRaises(KeyboardInterrupt),
            ):
                self.convert(self.root / "one.safetensors")
        self.convert(self.root / "one.safetensors")
        check_same("a", tensors_of(self.target, "model")["a"], torch.full((1000,), 2.0))
