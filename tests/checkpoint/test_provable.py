"""A saved value can be loaded, or is refused at save by name, and the older checkpoint is as it was."""

from __future__ import annotations

import json
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit.options import as_options
from parameterized import parameterized
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fsdp_optim
from fsdp_optim import CheckpointError, WrapperError
from fsdp_optim.state.values import same


class Columns(nn.Module):
    """Parameters whose factored moments have their own shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.last = nn.Linear(4, 1)
        self.conv = nn.Conv2d(3, 2, 1)
        self.body = nn.Linear(5, 4)


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.0))
        self.b = nn.Parameter(torch.tensor(2.0))


def trained(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optim = make(model.parameters())
    for step in range(2):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5 + step)
        optim.step()
    return optim


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "step"

    def check_comes_back(self, model: nn.Module, optim: Any, fresh: Any, **kwargs: Any) -> None:
        fsdp_optim.save(self.path, model, optim, options=fsdp_optim.SaveOptions(durable=False))
        fsdp_optim.load(self.path, model, fresh, **as_options(fsdp_optim.LoadOptions, **kwargs, compare=True))
        wanted, got = optim.state_dict()["state"], fresh.state_dict()["state"]
        self.assertTrue(same(wanted, got), f"{got}, not {wanted}")


class TestLoadable(Folder):
    def test_factored_moments_of_columns(self) -> None:
        model = Columns()
        self.check_comes_back(model, trained(model, torch.optim.Adafactor), torch.optim.Adafactor(model.parameters()))

    @parameterized.expand(
        [
            ("a float called sum", lambda param: {"sum": 0.5}),
            ("a history", lambda param: {"history": torch.arange(4.0)}),
            ("one of a row", lambda param: {"moment": torch.ones(1)}),
            ("lists of numbers", lambda param: {"steps": [torch.tensor(1.0), torch.tensor(1.0)]}),
            ("a dict under a moment's name", lambda param: {"momentum_buffer": {0.9: torch.ones_like(param)}}),
            ("a tensor that is made of others", lambda param: {"two": TwoTensor(torch.ones(3), torch.zeros(3))}),
        ]
    )
    def test_values(self, _: str, values: Callable[[torch.Tensor], dict[str, Any]]) -> None:
        model = Columns()
        optim = sgd(model.parameters())
        for param in model.parameters():
            optim.state[param].update(values(param))
        self.check_comes_back(model, optim, sgd(model.parameters()))

    def test_a_number_of_parameters_without_dimensions(self) -> None:
        """Loaded where an optimizer has other parameters, too: a scalar that is no moment is not cut out of fresh memory."""
        model = Scalars()
        optim = sgd(model.parameters())
        for param in model.parameters():
            optim.state[param] = {"momentum_buffer": torch.tensor(2.0), "norm": torch.tensor(7.25)}
        self.check_comes_back(model, optim, sgd(model.parameters()), strict=False)
        only = sgd([model.a])
        fsdp_optim.save(self.path, model, only, options=fsdp_optim.SaveOptions(durable=False), overwrite=True)
        both = sgd(model.parameters())
        both.state[model.b] = {"norm": torch.tensor(7.25)}
        fsdp_optim.load(self.path, model, both, strict=False)
        self.assertEqual(both.state[model.b]["norm"].item(), 7.25)

    def test_blocks_are_tensors_in_a_file_and_need_no_pickle(self) -> None:
        model = nn.Linear(4, 3)
        optim = sgd(model.parameters())
        blocks = TwoTensor(torch.randn(100_000), torch.randn(100_000))
        optim.state[model.weight]["blocks"] = blocks
        self.check_comes_back(model, optim, sgd(model.parameters()))
        manifest = (self.path / "fsdp_optim.json").read_bytes()
        self.assertLess(len(manifest), 10_000)
        self.assertNotIn(b"$pickle", b"".join(path.read_bytes() for path in self.path.rglob("*") if path.is_file()))
        self.assertIsNone(json.loads(manifest)["checkpoint"]["optim"])


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


class TestRefused(Folder):
    def check_refused(
        self, words: str, model: nn.Module, optim: Any, kind: type[Exception] = CheckpointError, **kwargs: Any
    ) -> None:
        fsdp_optim.save(self.path, model, sgd(model.parameters()), options=fsdp_optim.SaveOptions(durable=False))
        before = {path.name: path.read_bytes() for path in self.path.rglob("*") if path.is_file()}
        with self.assertRaisesRegex(kind, words):
            fsdp_optim.save(
                self.path, model, optim, overwrite=True, **as_options(fsdp_optim.SaveOptions, **kwargs, durable=False)
            )
        self.assertEqual([path.name for path in self.path.parent.iterdir()], ["step"])
        self.assertEqual({path.name: path.read_bytes() for path in self.path.rglob("*") if path.is_file()}, before)

    @parameterized.expand(
        [
            ("nested", nested(200), "100 levels deep"),
            ("long", 10**5000, r"state.*too long"),
            ("surrogate", {"name": "\udc80"}, r"state\['name'\]"),
        ]
    )
    def test_extras(self, _: str, extra: Any, words: str) -> None:
        model = nn.Linear(2, 2)
        self.check_refused(words, model, sgd(model.parameters()), extra=extra)

    @parameterized.expand([("a number", 3, "param group 0.*3"), ("a tuple", (1, 2), r"param group 0.*\(1, 2\)")])
    def test_names_of_hyperparameters(self, _: str, name: Any, words: str) -> None:
        model = nn.Linear(2, 2)
        optim = sgd(model.parameters())
        optim.param_groups[0][name] = 1
        self.check_refused(words, model, optim)

    def test_a_state_that_is_nested_too_deeply(self) -> None:
        model = nn.Linear(2, 2)
        optim = sgd(model.parameters())
        optim.state[model.bias]["history"] = nested(150)
        self.check_refused("bias.*100 levels deep", model, optim, WrapperError)

    def test_what_is_as_deep_as_can_be_comes_back(self) -> None:
        model = nn.Linear(2, 2)
        optim = sgd(model.parameters())
        fsdp_optim.save(
            self.path, model, optim, state={"deep": nested(98)}, options=fsdp_optim.SaveOptions(durable=False)
        )
        self.assertEqual(fsdp_optim.load(self.path, model, optim).state["deep"], nested(98))

    def test_what_no_reader_would_take_is_found_by_reading_it(self) -> None:
        """A value whose recorded kind is wrong is refused by the save, not by the load, whatever made it so."""
        from unittest import mock

        from fsdp_optim.checkpoint.save import save_contents

        model = nn.Linear(2, 2)
        optim = trained(model, sgd)
        describe = save_contents.describe

        def wrong(state: Any, stored: Any) -> Any:
            made = describe(state, stored)
            state = made.full["state"]
            state["weight"] = dict.fromkeys(state["weight"], state["bias"].get("momentum_buffer"))
            return made

        with mock.patch.object(save_contents, "describe", wrong):
            self.check_refused("could not be loaded.*state.bias.momentum_buffer has shape", model, optim)


if __name__ == "__main__":
    unittest.main()
