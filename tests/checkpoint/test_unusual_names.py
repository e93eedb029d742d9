"""Unusual names: one that UTF-8 cannot encode is refused by every format, on all ranks, before anything is made."""

from __future__ import annotations

import itertools
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, LoadOptions, SaveOptions
from fsdp_optim.testing import run_on_threads

BAD = "a\ud800b"  # half a character
FORMATS = ("safetensors", "dcp", "torchtitan")


def model_with(what: str) -> nn.Module:
    model = nn.Module()
    model.first = nn.Linear(2, 3)
    if what == "weight":
        model.add_module(BAD, nn.Linear(3, 2))
    elif what == "buffer":
        model.register_buffer(BAD, torch.ones(2))
    elif what == "alias":
        model.add_module(BAD, model.first)
    return model


def trained(what: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_with(what)
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        nn.init.ones_(param)  # the same on all ranks
        param.grad = torch.ones_like(param)
    optim.step()
    if what == "value":
        optim.state[model.first.weight][BAD] = torch.ones(3, 2)
    return model, optim


def saved_on_all(folder: str) -> str:
    model, optim = trained("weight")
    try:
        fsdp_optim.save(f"{folder}/on-ranks", model, optim, options=SaveOptions(allow_pickle=True))
    except CheckpointError as error:
        return str(error)
    return "saved"


class UnusualNamesTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def check_refused(self, model: nn.Module, **arguments: Any) -> None:
        with self.assertRaisesRegex(CheckpointError, r"a\\ud800b.*cannot be encoded as UTF-8.*rename="):
            fsdp_optim.save(self.folder / "a", model, **arguments)
        self.assertEqual(list(self.folder.iterdir()), [])

    @parameterized.expand(
        itertools.product(("weight", "buffer", "alias", "value"), (False, True), FORMATS),
        name_func=lambda function, number, case: f"{function.__name__}_{'_'.join(map(str, case.args))}",
    )
    def test_refused(self, what: str, allow_pickle: bool, format: str) -> None:
        model, optim = trained(what)
        self.check_refused(model, optim=optim, format=format, options=SaveOptions(allow_pickle=allow_pickle))

    @parameterized.expand([(False,), (True,)])
    def test_weights_alone_and_trees(self, allow_pickle: bool) -> None:
        options = SaveOptions(allow_pickle=allow_pickle)
        self.check_refused(model_with("weight"), options=options)
        self.check_refused(model_with(""), state={"ema": {BAD: torch.ones(2)}}, options=options)

    def test_on_all_ranks(self) -> None:
        texts = run_on_threads(saved_on_all, 2, str(self.folder))
        for text in texts:
            self.assertRegex(text, r"a\\ud800b.*cannot be encoded as UTF-8")

    def test_renamed(self) -> None:
        model, optim = trained("weight")
        save = SaveOptions(rename=lambda fqn: fqn.replace(BAD, "second"))
        fsdp_optim.save(self.folder / "a", model, optim, options=save)
        other, other_optim = trained("weight")
        for param in other.parameters():
            param.data.zero_()
        load = LoadOptions(rename=lambda name: name.replace("second", BAD))
        fsdp_optim.load(self.folder / "a", other, other_optim, options=load)
        for name, param in model.named_parameters():
            self.assertTrue(torch.equal(param, other.get_parameter(name)), ascii(name))

    def test_a_name_that_begins_with_a_dollar(self) -> None:
        """As the words do that mark values in the JSON of a description, beside a state value that is written there."""
        models = []
        for number in range(2):
            model = nn.ParameterDict({name: nn.Parameter(torch.full((2,), float(number))) for name in ("$dict", "w")})
            optim = torch.optim.SGD(model.parameters(), lr=0.1)
            models.append((model, optim))
        (model, optim), (other, other_optim) = models
        for index, param in enumerate(model.parameters()):
            optim.state[param].update(number=index + 1, moment=torch.full((2,), 3.0 + index))
        fsdp_optim.save(self.folder / "a", model, optim)
        fsdp_optim.load(self.folder / "a", other, other_optim)
        for index, name in enumerate(("$dict", "w")):
            state = other_optim.state[other[name]]
            self.assertEqual((state["number"], state["moment"].tolist()), (index + 1, [3.0 + index] * 2))
            self.assertEqual(other[name].tolist(), [0.0, 0.0])
