"""The commands diff, show and extract: what they print, as text and as JSON, and their exit codes."""

from __future__ import annotations

import json
import math

import numpy
import torch
from kit.commands import called
from kit.folders import SharedFolder, at
from parameterized import parameterized
from torch import nn

import fsdp_optim

QUICK = fsdp_optim.SaveOptions(durable=False, progress=False)


class LookCommandsTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        torch.manual_seed(1)
        cls.model = nn.Linear(30, 40)
        optim = torch.optim.Adam(cls.model.parameters(), lr=0.01)
        cls.model.weight.grad, cls.model.bias.grad = torch.ones(40, 30), torch.ones(40)
        optim.step()
        cls.a, cls.b = cls.root / "a", cls.root / "b"
        fsdp_optim.save(cls.a, cls.model, optim, step=1, options=QUICK)
        fsdp_optim.save(cls.root / "run" / "step-1", cls.model, options=QUICK)
        fsdp_optim.convert(
            cls.a, cls.root / "dcp", format="dcp", options=fsdp_optim.ConvertOptions(durable=False, progress=False)
        )
        cls.weight = cls.model.weight.detach().clone()
        cls.model.weight.data[3, 4] *= 1 + 1e-4
        optim.state[cls.model.bias]["exp_avg"][0] = math.nan
        optim.param_groups[0]["lr"] = 0.02
        fsdp_optim.save(cls.b, cls.model, optim, step=2, options=QUICK)

    def test_equal(self) -> None:
        self.assertEqual(called("diff", self.a, self.root / "dcp"), (0, "equal, bit by bit: 8 values\n", ""))

    def test_different(self) -> None:
        code, out, err = called("diff", self.a, self.b)
        self.assertEqual((code, err), (1, ""))
        lines = out.splitlines()
        self.assertEqual(lines[0], "differ: 2 of 8 values differ")
        self.assertEqual(lines[2].split(), ["bias:exp_avg", "inf", "inf", "1", "40", "float32", "NaN:", "0,", "1"])
        self.assertEqual(lines[3].split()[0], "weight")
        self.assertEqual(lines[4:], ["step: 1 and 2", "lr: 0.01 and 0.02, for 2 parameters"])

    def test_within_a_tolerance(self) -> None:
        given = ("diff", self.a, self.b, "--match", "weight")
        code, out, _ = called(*given, "--tolerance", "1e-4")
        self.assertEqual(code, 0)
        self.assertIn("equal within the tolerance: 1 of 1 value differ, 1 of them within 0.0001", out)
        self.assertEqual(called(*given, "--tolerance", "1e-9")[0], 1)
        self.assertEqual(called(*given)[0], 1)

    def test_json_of_diff(self) -> None:
        code, out, err = called("diff", self.a, self.b, "--json")
        self.assertEqual((code, err), (1, ""))
        printed, result = json.loads(out), fsdp_optim.diff(self.a, self.b)
        self.assertEqual((printed["equal"], printed["steps"]), (False, [1, 2]))
        values = {value["name"]: value for value in printed["values"]}
        for value in result.values:
            shown = values[value.name]
            relative = value.relative if math.isfinite(value.relative) else None
            self.assertEqual((shown["num_differing"], shown["relative"]), (value.num_differing, relative))
            self.assertEqual(shown["a"]["shape"], list(value.a.shape))

    def test_names_for_ids(self) -> None:
        folder = self.own_folder()
        optim = torch.optim.Adam(self.model.parameters())
        self.model.weight.grad = self.model.bias.grad = None
        self.model.bias.grad = torch.ones(40)
        optim.step()
        torch.save({"optimizer": optim.state_dict()}, folder / "optim.pt")
        code, out, _ = called("diff", folder / "optim.pt", self.a)
        self.assertEqual(code, 1)
        (folder / "names").write_text("weight\nbias\n")
        code, out, _ = called("diff", folder / "optim.pt", folder / "optim.pt", "--names", folder / "names", "--json")
        self.assertEqual(code, 0)
        self.assertEqual(json.loads(out)["values"][0]["name"], "bias:exp_avg")

    def test_a_page(self) -> None:
        page = self.own_folder() / "page.html"
        self.assertEqual(called("diff", self.a, self.b, "--html", page)[0], 1)
        self.assertIn("<td><code>bias:exp_avg</code></td>", page.read_text())

    def test_figures(self) -> None:
        code, out, err = called("show", self.a, "weight", "--bins", 4)
        self.assertEqual((code, err), (0, ""))
        lines = out.splitlines()
        self.assertEqual(lines[0], "weight: float32 (40, 30), 1,200 elements, 4.8 kB")
        self.assertEqual(lines[1], f"min      {self.weight.min().item():.9g}")
        counts, _ = numpy.histogram(self.weight.double().numpy(), 4)
        self.assertEqual([line.split()[-1] for line in lines[9:]], [str(count) for count in counts])
        bars = [line.count("█") for line in lines[9:]]
        self.assertEqual(max(bars), 48)

    def test_elements(self) -> None:
        code, out, _ = called("show", self.b, "weight", "--slice", "3:5, 4")
        self.assertEqual(code, 0)
        self.assertTrue(out.endswith(f"\n\n{self.model.weight.detach()[3:5, 4]}\n"), out)
        printed = json.loads(called("show", self.b, "bias:exp_avg", "--slice", ":2", "--json")[1])
        self.assertEqual((printed["num_nans"], printed["shape"], printed["elements"][0]), (1, [2], None))

    def test_files(self) -> None:
        file = self.own_folder() / "x.npy"
        code, out, err = called("extract", self.root / "dcp", "weight", "-o", file, "--slice", ":, 2")
        self.assertEqual((code, out, err), (0, f"{file}: 1 value, 160 B\n", ""))
        self.assertTrue(numpy.array_equal(numpy.load(file), self.weight[:, 2].numpy()))

    @parameterized.expand(
        [
            (("show", "a", "wieght"), "has no value 'wieght': did you mean weight"),
            (("show", "a", "weight", "--slice", "0:1:2"), "'0:1:2'"),
            (("extract", "a", "weight", "-o", "x.bin"), "must end with .npy"),
            (("extract", "a", "weight", "-o", "a"), "a: is a folder: give the path of a file"),
            (("extract", "a", "-o", "x.npy"), "NAME"),
            (("diff", "a"), "Missing argument 'B'"),
            (("diff", "a", "b", "--tolerance", "-1"), "tolerance"),
            (("diff", "a", "nowhere"), "nowhere: there is no such"),
            (("show", "run", "weight"), "is a folder of checkpoints, not a checkpoint: it has step-1"),
            (("extract", "run", "weight", "-o", "x.pt"), "is a folder of checkpoints, not a checkpoint: it has step-1"),
            (("diff", "a", "run"), "is a folder of checkpoints, not a checkpoint: it has step-1"),
            (("show", "nowhere", "weight"), "nowhere: there is no such"),
        ]
    )
    def test_wrong_use(self, arguments: tuple[str, ...], why: str) -> None:
        with at(self.root):
            code, out, err = called(*arguments)
        self.assertEqual((code, out, err.count("\n")), (2, "", 1))
        self.assertIn(why, err)
