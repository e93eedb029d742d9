"""The keys that `dcp.save(format="dcp")` writes: those of torch, so that torch's own load finds what it asks for."""

from __future__ import annotations

import unittest
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as torch_dcp
from kit.cases import case_name
from kit.compare import check_same
from kit.folders import InFolder
from parameterized import parameterized
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fsdp_optim
from fsdp_optim import dcp

QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)
OWN = "fsdp_optim_keys."


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def blank(tree: Any) -> Any:
    """The same tree, with zeros and other plain values."""
    if isinstance(tree, dict):
        return type(tree)((key, blank(value)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(blank, tree))
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else None


def written(path: Path) -> dict[str, Any]:
    """The keys of torch's metadata, each with its path, without those that are this library's own."""
    metadata = FileSystemReader(path).read_metadata()
    return {key: metadata.planner_data[key] for key in metadata.state_dict_metadata if not key.startswith(OWN)}


def save(tree: dict[str, Any], path: Path, format: str = "dcp") -> None:
    dcp.save(tree, checkpoint_id=path, format=format, options=QUIET)


class TuplesTest(InFolder):
    def test_a_warning_names_those_that_torch_does_not_find(self) -> None:
        tree = {"a": {"t": (ones(2), 1), "plain": (1, 2), "deep": [{"u": (ones(1), (ones(1),))}]}}
        with self.assertLogs("fsdp_optim", "WARNING") as logs:
            save(tree, self.path / "saved")
        (line,) = [line for line in logs.output if "tuples with tensors" in line]
        self.assertIn(
            "lists for torch: state['a']['t'], state['a']['deep'][0]['u'], state['a']['deep'][0]['u'][1]", line
        )
        into = blank(tree)
        dcp.load(into, checkpoint_id=self.path / "saved")
        check_same("ours", into, tree)


LOADS = {
    "torch": lambda tree, path: torch_dcp.load(tree, checkpoint_id=path),
    "ours": lambda tree, path: dcp.load(tree, checkpoint_id=path),
    "reader": lambda tree, path: torch_dcp.load(tree, storage_reader=dcp.Reader(path)),
}

EMPTY_DICTS = {
    "beside a dict without tensors": {"a": {"w": ones(2), "e": {}, "m": {"x": 1}}},
    "at the top": {"e": {}, "m": {"x": 1}},
    "an OrderedDict": {"o": OrderedDict(), "m": {"x": 1}},
    "of an optimizer without state": {"optim": {"state": {}, "param_groups": [{"lr": ones()}]}, "sched": {"step": 1}},
    "at the end of a list": {"a": [ones(2), {}], "m": {"x": 1}},
    "inside the end of a list": {"a": [ones(2), {"e": {}}], "m": {"x": 1}},
    "in a list of dicts": {"a": [{"e": {}, "w": ones(2)}], "m": {"x": 1}},
    "at the beginning of a list": {"a": [{}, ones(2)], "m": {"x": 1}},
    "alone in a list": {"a": [{}], "m": {"x": 1}},
    "by numbers": {"a": {0: {}, 1: {2: ones(1)}}, "m": {"x": 1}},
}


class EmptyDictsTest(InFolder):
    """torch has no keys for them. With keys in a folder it takes it for one of torch 2.3, and looks for that version's keys."""

    @parameterized.expand(
        [
            (name, load, format)
            for name in EMPTY_DICTS
            for load in LOADS
            for format in ("dcp", "safetensors")
            if (load, format) != ("torch", "safetensors")
        ],
        name_func=case_name,
    )
    def test_loaded(self, name: str, load: str, format: str) -> None:
        tree = EMPTY_DICTS[name]
        save(tree, self.path, format)
        into = blank(tree)
        LOADS[load](into, self.path)
        check_same(name, into, tree, same_mappings=True)

    @parameterized.expand(EMPTY_DICTS, name_func=case_name)
    def test_keys(self, name: str) -> None:
        """Those of torch, beside an item of a list for which torch asks, although it does not save it."""
        save(EMPTY_DICTS[name], self.path)
        torch_dcp.save(EMPTY_DICTS[name], checkpoint_id=self.root / "torch")
        asked = {"a.0": ("a", 0)} if name == "at the beginning of a list" else {}
        self.assertEqual(written(self.path), {**written(self.root / "torch"), **asked})

    @parameterized.expand(EMPTY_DICTS, name_func=case_name)
    def test_under_their_paths(self, name: str) -> None:
        """As earlier releases have written them."""
        with mock.patch("fsdp_optim.foreign.dcp.writer.unasked_in", return_value=set()):
            save(EMPTY_DICTS[name], self.path)
        self.assertFalse([key for key in FileSystemReader(self.path).read_metadata().planner_data if "empty" in key])
        into = blank(EMPTY_DICTS[name])
        dcp.load(into, checkpoint_id=self.path)
        check_same(name, into, EMPTY_DICTS[name], same_mappings=True)

    def test_as_one_file_of_torch(self) -> None:
        """torch leaves them out, as of its own folders."""
        tree = {"a": {"w": ones(2), "e": {}}, "m": {"x": 1}}
        save(tree, self.path)
        dcp_to_torch_save(self.path, self.root / "one.pt")
        loaded = torch.load(self.root / "one.pt")
        check_same("what torch has keys for", loaded["a"]["w"], ones(2))
        self.assertEqual((loaded["a"].keys(), loaded["m"]), ({"w"}, {"x": 1}))

    def test_names_with_dots(self) -> None:
        """An empty dict may have the name of another value, joined by dots."""
        for other in (ones(2), {}):
            tree = {"a": {"e": {}, "w": ones(1)}, "a.e": other}
            save(tree, self.path)
            into = blank(tree)
            dcp.load(into, checkpoint_id=self.path)
            check_same("a name with a dot", into, tree)

    def test_of_groups(self) -> None:
        """In the param groups of an optimizer, whose values have a second key for each parameter."""
        model = torch.nn.Linear(2, 1, bias=False)
        optim = torch.optim.Adam(model.parameters())
        optim.param_groups[0]["own"] = {"e": {}, "none": {}}
        optim.param_groups[0]["empty"] = {}
        fsdp_optim.save(self.path, model, optim, format="dcp", options=QUIET)
        self.assertFalse([key for key in written(self.path) if key.endswith((".e", ".none", ".empty"))])
        other = torch.optim.Adam(model.parameters())
        fsdp_optim.load(self.path, model, other)
        check_same("the group", other.param_groups[0], optim.param_groups[0], in_order=False)


if __name__ == "__main__":
    unittest.main()
