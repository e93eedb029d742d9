"""What a save knows to be the model, the optimizer or a value of the trainer is loaded as that, whatever its name and form."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.compare import check_same
from kit.folders import InFolder
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, ConvertOptions, SaveOptions, per_rank
from fsdp_optim.foreign.dcp.writer import DcpWriter
from fsdp_optim.foreign.torch.writer import TorchWriter

QUICK = SaveOptions(durable=False, progress=False)
CONVERTED = ConvertOptions(durable=False, progress=False)
FORMATS = ("dcp", "torchtitan", "torch", "torch_file")
NAMES_OF_MODELS = ("model", "state_dict", "module", "model_state", "model_state_dict", "net", "ema")


def trained(num: int = 2, kind: Any = torch.optim.Adam) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(3, num))
    optim = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    return model, optim


def average_of(model: nn.Module) -> dict[str, Any]:
    return {name: torch.full_like(weight, 7.0) for name, weight in model.state_dict().items()}


class RolesTest(InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.model, self.optim = trained()

    def save(self, format: str, state: dict[str, Any], *, optim: Any = None, weights: Any = "all") -> Path:
        """Save in a format, by a conversion where `save` does not write it."""
        path = self.root / format
        given: dict[str, Any] = {"state": state, "weights": weights, "options": QUICK}
        if format in ("dcp", "torchtitan"):
            fsdp_optim.save(path, self.model, optim, format=format, **given)
        else:
            fsdp_optim.save(self.root / "source", self.model, optim, **given)
            fsdp_optim.convert(self.root / "source", path, format=format, options=CONVERTED)
        return path

    def check_loads(self, path: Path, state: dict[str, Any], *, optim: bool) -> None:
        """Everything is there, in a load of the checkpoint, and in one of what a conversion to the own format makes of it."""
        back = path.with_name(f"{path.name}-back")
        fsdp_optim.convert(path, back, options=CONVERTED)
        for place in (path, back):
            model, other = trained()
            for param in model.parameters():
                nn.init.zeros_(param)
            result = fsdp_optim.load(place, model, other if optim else None)
            check_same(f"weights of {place.name}", dict(model.state_dict()), dict(self.model.state_dict()))
            check_same(f"state= of {place.name}", dict(result.state), state, in_order=False)
            if optim:
                check_same(f"optimizer of {place.name}", other.state_dict(), self.optim.state_dict(), in_order=False)

    @parameterized.expand([(format, name) for format in FORMATS for name in NAMES_OF_MODELS])
    def test_an_average_is_no_model(self, format: str, name: str) -> None:
        if name == "model" and format in ("dcp", "torch_file"):  # which have the model itself there, and refuse it
            return
        state = {name: average_of(self.model)}
        self.check_loads(self.save(format, state, optim=self.optim), state, optim=True)

    @parameterized.expand([(format,) for format in FORMATS])
    def test_values_that_look_like_parts(self, format: str) -> None:
        """A second optimizer, tensors by themselves, and optimizers' forms, beside the optimizer and without it."""
        _, second = trained(kind=torch.optim.RMSprop)
        state = {
            "disc_optim": second.state_dict(),
            "optim": self.optim.state_dict(),
            "tokens": torch.ones(3),
            "state_dict": {"t": torch.ones(2)},
            "rng": {"cuda": torch.ones(4, dtype=torch.uint8)},
            "epoch": 3,
        }
        for has_optim in (True, False):
            with self.subTest(has_optim=has_optim):
                self.path = self.root = self.root / str(has_optim)
                self.root.mkdir()
                path = self.save(format, state, optim=self.optim if has_optim else None)
                self.check_loads(path, state, optim=has_optim)

    @parameterized.expand([(format, has_optim) for format in FORMATS for has_optim in (True, False)])
    def test_values_without_weights(self, format: str, has_optim: bool) -> None:
        """Strict loads fill trees in place, and return them."""
        optim = self.optim if has_optim else None
        state = {"ema": {"decay": 0.9, "shadow": average_of(self.model)}, "flat": average_of(self.model)}
        path = self.save(format, state, optim=optim, weights="none")
        result = fsdp_optim.load(path, self.model, optim, weights="none", state=dict.fromkeys(state))
        check_same("returned", dict(result.state), state, in_order=False)
        live = {name: torch.zeros_like(tensor) for name, tensor in state["flat"].items()}
        shadow = {name: torch.zeros_like(tensor) for name, tensor in state["flat"].items()}
        trees = {"ema": {"decay": 0, "shadow": shadow}, "flat": live}
        fsdp_optim.load(path, self.model, optim, weights="none", state=trees)
        check_same("in place", (live, shadow), (state["flat"], state["flat"]))

    def test_values_that_are_not_read(self) -> None:
        """A tree for a value that the reader holds back is an error: nothing would fill it."""
        path = self.save("torch_file", {"big": torch.ones(17 << 20), "epoch": 3})
        with self.assertRaisesRegex(CheckpointError, r"state\['big'\]: cannot be filled in place: .* 71303168 bytes"):
            fsdp_optim.load(path, self.model, state={"big": torch.zeros(17 << 20), "epoch": 0})
        self.assertEqual(fsdp_optim.load(path, self.model, state={"big": None, "epoch": 0}).state["epoch"], 3)

    @parameterized.expand([(format,) for format in FORMATS])
    def test_without_the_record(self, format: str) -> None:
        """As older versions wrote these formats, their structure says it."""
        state = {"epoch": 3, "lrs": {1: [0.1, 0.2]}, "of_ranks": per_rank({2: 3})}
        writer = TorchWriter if format.startswith("torch") and format != "torchtitan" else DcpWriter
        with mock.patch.object(writer, "_roles_of", return_value=None):
            path = self.save(format, state, optim=self.optim)
        self.assertNotIn(b"roles", b"".join(file.read_bytes() for file in path.iterdir()))
        self.check_loads(path, {"epoch": 3, "lrs": {1: [0.1, 0.2]}, "of_ranks": {2: 3}}, optim=True)

    def test_one_file_by_itself(self) -> None:
        """The file says it where there is no manifest; one whose values cannot be taken for parts has no key more."""
        state = {"state_dict": average_of(self.model), "disc_optim": self.optim.state_dict()}
        for name, values in (("a", state), ("b", {"epoch": 3})):
            fsdp_optim.save(self.root / name, self.model, self.optim, state=values, options=QUICK)
            path = self.root / f"{name}.pt"
            fsdp_optim.convert(self.root / name, path, format="torch_file", options=CONVERTED)
            self.check_loads(path, values, optim=True)
        self.assertEqual(list(torch.load(self.root / "b.pt")), ["model", "optimizer", "epoch"])

    def test_the_metadata_by_its_path(self) -> None:
        state = {"state_dict": average_of(self.model), "own": 1}
        path = self.save("dcp", state, optim=self.optim)
        check_same(
            "state", dict(fsdp_optim.load(path / ".metadata", self.model, self.optim).state), state, in_order=False
        )
