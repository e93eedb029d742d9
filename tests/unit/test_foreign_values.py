"""Values of another library's checkpoint: of one element, cut like their parameter; in shared memory; made for each read."""

from __future__ import annotations

import tempfile
import unittest
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_same

import fsdp_optim
from fsdp_optim.foreign.reader import ForeignFormat, ForeignReader, Source
from fsdp_optim.formats.own import PROBE
from fsdp_optim.plugins import Extent, StoredTensor, use_formats
from fsdp_optim.storage.base import Opened
from fsdp_optim.storage.posix import Folder


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(1))
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.twin = torch.nn.Parameter(torch.zeros(3))


def stored(key: str, shape: tuple[int, ...], at: int) -> StoredTensor:
    return StoredTensor(key, "float32", shape, "data", 4 * at)


class Raw(ForeignFormat):
    """Numbers in one file, `exp_avg` of a parameter of one element among them; two parameters and all steps share memory."""

    name = "raw"

    def recognises(self, opened: Opened) -> bool:
        return opened.has("data")

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        params: list[tuple[str, tuple[int, ...], int]] = [("scale", (1,), 0), ("weight", (3,), 1), ("twin", (3,), 1)]
        state: dict[str, Any] = {
            fqn: {"step": stored(f"{fqn}.step", (), 4), "exp_avg": stored(f"{fqn}.exp_avg", shape, at)}
            for fqn, shape, at in params
        }
        for values in state.values():
            values["exp_avg_sq"] = values["exp_avg"]
        groups = [{"params": [fqn for fqn, *_ in params], **torch.optim.Adam([torch.zeros(1)]).defaults}]
        model = {fqn: stored(fqn, shape, at) for fqn, shape, at in params}
        return ForeignReader(opened, self.name, model, {"state": state, "param_groups": groups})


class ForeignValueTest(unittest.TestCase):
    def test_values_of_one_element_are_cut_like_their_parameter_and_shared_bytes_are_read_for_each(self) -> None:
        model = Model()
        optim = torch.optim.Adam(model.parameters())
        with tempfile.TemporaryDirectory() as folder:
            numbers = torch.arange(5, dtype=torch.float32) + 1
            Path(folder, "data").write_bytes(numbers.numpy().tobytes())
            with use_formats([Raw()]):
                fsdp_optim.load(folder, model, optim)
        values = [numbers[:1], numbers[1:4], numbers[1:4]]
        check_same("weights", [param.detach() for param in model.parameters()], values)
        states = [optim.state[param] for param in model.parameters()]
        check_same("state", states, [{"step": numbers[4], "exp_avg": value, "exp_avg_sq": value} for value in values])

    def test_what_is_made_for_a_read_is_kept_until_the_next_one(self) -> None:
        """A tensor that is read in parts is made once, and only the last one takes memory."""
        made: list[str] = []

        def make(name: str) -> memoryview:
            made.append(name)
            return memoryview(name.encode() * 8)

        sources = {name: Source(memory=partial(make, name)) for name in "ab"}
        with tempfile.TemporaryDirectory() as folder, Folder(folder, PROBE).open_any() as opened:
            reader = ForeignReader(opened, "raw", {}, sources=sources)
            buffer = bytearray(8)
            for name, start in (("a", 0), ("a", 4), ("b", 2), ("b", 6), ("a", 4)):
                reader.read({name: [Extent(start, memoryview(buffer)[start : start + 2])]})
        self.assertEqual(made, ["a", "b", "a"])
        self.assertEqual(bytes(buffer), b"aabbaabb")


if __name__ == "__main__":
    unittest.main()
