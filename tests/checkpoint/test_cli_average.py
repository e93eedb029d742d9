"""The commands `average` and `thin`: they do what the functions do, and say it in a line, or as JSON."""

from __future__ import annotations

import json
import unittest
from pathlib import Path

import torch
from kit.checkpoint_format import all_bytes
from kit.commands import called
from kit.compare import check_same
from kit.folders import SharedFolder
from torch import nn

import fsdp_optim


def save(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = nn.Linear(5, 7)
    model.register_buffer("count", torch.tensor(seed))
    optim = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optim.step()
    fsdp_optim.save(path, model, optim, options=fsdp_optim.SaveOptions(durable=False, progress=False))
    return path


def data_of(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in all_bytes(path).items() if name != "fsdp_optim.json"}


class AverageCommandTest(SharedFolder):
    def setUp(self) -> None:
        self.folder = self.own_folder()
        self.sources = [save(self.folder / f"{seed}", seed) for seed in range(3)]

    def test_average(self) -> None:
        options = fsdp_optim.ConvertOptions(durable=False)
        fsdp_optim.average(self.sources, self.folder / "wanted", weights=[1, 1, 2], moments="average", options=options)
        to = self.folder / "to"
        code, out, _ = called("average", *self.sources, "--weights", "1,1,2", "--moments", "average", "-o", to)
        self.assertEqual(code, 0)
        check_same("files", data_of(to), data_of(self.folder / "wanted"))
        self.assertIn(f"{to}: 6 of 9 tensors are averages of 3 checkpoints", out)
        self.assertIn("taken from the last one: count", out)
        code, out, _ = called("average", *self.sources, "--json", "--overwrite", "--not-durable", "-o", to)
        values = json.loads(out)
        self.assertEqual((code, values["path"], values["num_averaged"]), (0, str(to), 2))
        self.assertEqual((values["differing"], values["sources"]), (["count"], list(map(str, self.sources))))

    def test_average_refused(self) -> None:
        to = self.folder / "to"
        for arguments, code, words in (
            (self.sources[:1], 2, "two or more"),
            ([*self.sources, "--weights", "1,2"], 2, "--weights has 2 numbers"),
            ([*self.sources, "--weights", "1,x,2"], 2, "not a list of numbers such as 1,1,2"),
            ([], 2, "SOURCES"),
        ):
            got, _, err = called("average", *arguments, "-o", to)
            self.assertEqual(got, code, err)
            self.assertIn(words.replace("--weights has", "weights has"), err)
            self.assertEqual(len(err.splitlines()), 1)
        called("average", *self.sources, "-o", to)
        code, _, err = called("average", *self.sources, "-o", to)
        self.assertNotEqual(code, 0)
        self.assertIn("--overwrite", err)

    def test_thin(self) -> None:
        code, out, _ = called("thin", self.sources[0])
        self.assertEqual(code, 0)
        self.assertIn("freed ", out)
        self.assertFalse(fsdp_optim.inspect(self.sources[0]).has_optim)
        code, out, _ = called("thin", self.sources[0])
        self.assertEqual((code, out), (0, f"{self.sources[0]}: has no optimizer\n"))
        code, out, _ = called("thin", self.sources[1], "--json")
        self.assertGreater(json.loads(out)["freed_nbytes"], 0)
        code, _, err = called("thin", self.folder / "nothing")
        self.assertNotEqual(code, 0)
        self.assertIn("no such folder", err)


if __name__ == "__main__":
    unittest.main()
