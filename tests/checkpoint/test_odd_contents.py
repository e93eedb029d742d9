"""Diff, show, extract and average on contents that few checkpoints have: ties on one side, names with colons, huge numbers."""

from __future__ import annotations

import math
import warnings

import numpy
import torch
from kit.commands import called
from kit.folders import SharedFolder
from kit.models import TiedHead
from parameterized import parameterized
from safetensors.torch import save_file
from torch import nn

import fsdp_optim

QUICK = fsdp_optim.SaveOptions(durable=False, progress=False)
CHUNK = 1 << 16  # elements that figures are computed of together
HUGE = 1.7e308


class Colons(nn.Module):
    """A weight whose name is also that of a value of another one's state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("w", nn.Parameter(torch.tensor([1.0, 2.0])))
        self.register_parameter("w:exp_avg", nn.Parameter(torch.tensor([3.0, 4.0, 5.0])))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    optim.step()
    return optim


class OddContentsTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        torch.manual_seed(3)
        model = TiedHead()
        fsdp_optim.save(cls.root / "tied", model, trained(model), options=QUICK)
        weight = cls.weight = model.embed.weight.detach().clone()
        save_file({"embed.weight": weight, "head.weight": weight.clone()}, cls.root / "apart.safetensors")
        changed = weight.clone()
        changed[4, 2] += 1
        save_file({"embed.weight": weight, "head.weight": changed}, cls.root / "changed.safetensors")
        cls.colons = Colons()
        optim = trained(cls.colons)
        fsdp_optim.save(cls.root / "colons", cls.colons, optim, options=QUICK)
        cls.state = optim.state[dict(cls.colons.named_parameters())["w:exp_avg"]]["exp_avg"].clone()
        huge = torch.zeros(3 * CHUNK, dtype=torch.float64)
        huge[0], huge[CHUNK], huge[2 * CHUNK] = HUGE, HUGE, -HUGE
        values = {
            "infinities": torch.tensor([math.inf, -math.inf, 1.0]),
            "range": torch.tensor([-HUGE, HUGE, 0.0, 5.0], dtype=torch.float64),
            "huge": huge,
        }
        save_file(values, cls.root / "huge.safetensors")

    @parameterized.expand([(False,), (True,)])
    def test_tied_on_one_side_alone(self, swaps: bool) -> None:
        for other, num in (("apart", 0), ("changed", 1)):
            sides = [self.root / "tied", self.root / f"{other}.safetensors"]
            result = fsdp_optim.diff(*(reversed(sides) if swaps else sides), match="*weight", progress=False)
            differences = {value.name: (value.num_differing, value.max_abs) for value in result.values}
            wanted = float(abs((self.weight[4, 2] + 1).double() - self.weight[4, 2].double())) if num else 0
            self.assertEqual(differences, {"embed.weight": (0, 0), "head.weight": (num, wanted)})

    def test_names_with_colons(self) -> None:
        for name, wanted in (
            ("w:exp_avg", dict(self.colons.named_parameters())["w:exp_avg"].detach()),  # the weight before the state
            ("w:exp_avg:exp_avg", self.state),
            ("w", self.colons.w.detach()),
        ):
            with self.subTest(name):
                shown = fsdp_optim.show(self.root / "colons", name, slice=":")
                self.assertTrue(torch.equal(shown.elements, wanted))
                file = self.root / "out.npy"
                fsdp_optim.extract(self.root / "colons", [name], file, overwrite=True)
                self.assertTrue(numpy.array_equal(numpy.load(file), wanted.numpy()))
        code, _, err = called("show", self.root / "colons", "w:exp_avq")
        self.assertEqual(code, 2)
        self.assertIn("did you mean w:exp_avg", err)

    def test_numbers_whose_sums_are_too_large(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shown = fsdp_optim.show(self.root / "huge.safetensors", "infinities")
            self.assertEqual((shown.min, shown.max, shown.num_infinities), (1.0, 1.0, 2))
            shown = fsdp_optim.show(self.root / "huge.safetensors", "range", bins=2)
            self.assertEqual((shown.min, shown.max, shown.mean, shown.norm), (-HUGE, HUGE, 1.25, math.inf))
            self.assertEqual(shown.histogram, (1, 3))
            shown = fsdp_optim.show(self.root / "huge.safetensors", "huge", bins=3)
            self.assertEqual((shown.mean, shown.histogram), (HUGE / (3 * CHUNK), (1, 3 * CHUNK - 3, 2)))
            same = self.root / "huge.safetensors"
            self.assertTrue(fsdp_optim.diff(same, same, progress=False).equal)
        code, out, err = called("show", self.root / "huge.safetensors", "range", "--bins", "2")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual([line.split()[0] for line in out.splitlines()[-2:]], ["-1.7e+308", "0"])
