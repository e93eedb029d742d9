"""Values of another library's checkpoint: those of one element that are cut like their parameter, and those that share memory."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_same

from fsdp_optim.checkpoint.restore import restore
from fsdp_optim.formats.base import StoredTensor
from fsdp_optim.formats.foreign import ForeignFormat, ForeignReader
from fsdp_optim.options import LoadOptions, Options
from fsdp_optim.storage.base import Opened


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
            restore(folder, model, optim, LoadOptions(Options()), Raw())
        values = [numbers[:1], numbers[1:4], numbers[1:4]]
        check_same("weights", [param.detach() for param in model.parameters()], values)
        found = [optim.state[param] for param in model.parameters()]
        check_same("state", found, [{"step": numbers[4], "exp_avg": one, "exp_avg_sq": one} for one in values])


if __name__ == "__main__":
    unittest.main()
