"""Values of a `Writer` that are no tensors: every load gives them as they were, and makes objects of unknown classes on request.

torch's planner pickles each of them. The oracle is what was saved, and what torch's own load gives through a `Reader`.
"""

from __future__ import annotations

import unittest
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed.checkpoint as torch_dcp
from kit.compare import check_same
from kit.folders import InFolder
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import dcp
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.dcp.storage import staged_save
from fsdp_optim.formats.own import OURS
from fsdp_optim.storage.posix import Folder

PICKLES = fsdp_optim.LoadOptions(allow_pickle=True, progress=False)


class Own:
    """A class that this library does not know."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return type(other) is Own and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


VALUES: dict[str, Any] = {
    "random state": numpy.random.RandomState(0).get_state(),
    "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
    "no dimensions": numpy.array(2.5),
    "empty": numpy.zeros((0, 3), dtype=numpy.uint8),
    "by columns": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "bools": numpy.array([True, False]),
    "number": numpy.float32(0.1),
    "set": {1, "a", (2, None)},
    "frozen": frozenset({3}),
    "range": range(1, 9, 2),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "bytes": bytearray(b"\0a"),
    "nested": ({"in": [numpy.int64(3), {4}]}, 1),
}


def exactly(value: Any) -> Any:
    """A value with its types, which compares bit by bit."""
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return type(value), str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return dict, [(key, exactly(item)) for key, item in sorted(value.items())]
    if type(value) in (list, tuple):
        return type(value), [exactly(item) for item in value]
    return type(value), value


def sorted_keys(value: Any) -> Any:
    """torch's metadata have tensors before other values."""
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(item) for item in value] if isinstance(value, list) else value


class WriterValuesTest(InFolder):
    def save(self, tree: dict[str, Any]) -> Path:
        path = self.path / "saved"
        torch_dcp.save(tree, storage_writer=dcp.Writer(path, durable=False), no_dist=True)
        return path

    def loaded(self, path: Path, names: dict[str, Any], options: fsdp_optim.LoadOptions = PICKLES) -> dict[str, Any]:
        into = dict(names)
        dcp.load(into, checkpoint_id=path, no_dist=True, options=options)
        return into

    def test_every_way_gives_plain_values_without_pickles(self) -> None:
        path = self.save({"w": torch.ones(3), **VALUES})
        names, plain = dict.fromkeys(VALUES), fsdp_optim.LoadOptions(progress=False)
        by_torch: dict[str, Any] = {"w": torch.zeros(3), **names}
        torch_dcp.load(by_torch, storage_reader=dcp.Reader(path), no_dist=True)
        fsdp_optim.convert(path, self.path / "converted", format="dcp")
        ways = {
            "dcp.load": self.loaded(path, {"w": torch.zeros(3), **names}, plain),
            "load": fsdp_optim.load(path, state={"w": torch.zeros(3), **names}, options=plain).state,
            "without names": fsdp_optim.load(path, options=plain).state,
            "Reader": by_torch,
            "converted": self.loaded(self.path / "converted", {"w": torch.zeros(3), **names}, plain),
        }
        for way, got in ways.items():
            check_same(f"{way}: w", got["w"], torch.ones(3))
            for name, value in VALUES.items():
                self.assertEqual(exactly(got[name]), exactly(value), f"{way}: {name}")

    def test_objects_are_made_on_request_and_never_their_bytes(self) -> None:
        tree = {"w": torch.ones(3), "own": Own(1), "deep": {"n": 5, "list": [{"own": Own(2)}, torch.ones(1)]}}
        path = self.save(tree)
        names: dict[str, Any] = {
            "w": torch.zeros(3),
            "own": None,
            "deep": {"n": 0, "list": [{"own": 0}, torch.ones(1)]},
        }
        for name, place in (("own", "own"), ("deep", r"deep\.list\.0\.own")):
            why = rf"{path}: {place}: is an object that torch's planner has pickled: allow_pickle=True"
            with self.assertRaisesRegex(fsdp_optim.CheckpointError, why):
                self.loaded(path, {name: names[name]}, fsdp_optim.LoadOptions(progress=False))
        with self.assertRaisesRegex(
            fsdp_optim.CheckpointError, "is an object that torch's planner has pickled: allow_"
        ):
            fsdp_optim.load(path, state=names)
        with closing(open_checkpoint(Folder(path, OURS.probe), verify=True)) as opened:
            common = opened.index.extras["common"]
            with self.assertRaisesRegex(fsdp_optim.CheckpointError, "is an object that torch's planner has pickled"):
                common.decoded(allow_pickle=False)
            check_same("decoded", sorted_keys(common.decoded(allow_pickle=True)["deep"]), sorted_keys(tree["deep"]))
        for format in ("dcp", "torch"):
            with self.assertRaisesRegex(fsdp_optim.CheckpointError, "is an object that torch's planner has pickled"):
                fsdp_optim.convert(path, self.path / "refused", format=format)
            self.assertFalse((self.path / "refused").exists())
        by_torch: dict[str, Any] = {
            "w": torch.zeros(3),
            "own": None,
            "deep": {"n": 0, "list": [{"own": 0}, torch.ones(1)]},
        }
        torch_dcp.load(by_torch, storage_reader=dcp.Reader(path), no_dist=True)
        fsdp_optim.convert(path, self.path / "copied")  # which makes no objects
        for way, got in {
            "dcp.load": self.loaded(path, names),
            "load": fsdp_optim.load(path, options=PICKLES).state,
            "Reader": by_torch,
            "copied": fsdp_optim.load(self.path / "copied", options=PICKLES).state,
        }.items():
            check_same(way, sorted_keys(got), sorted_keys(tree))

    def test_values_that_an_earlier_release_has_kept_as_bytes(self) -> None:
        with mock.patch.object(staged_save, "value_in", lambda data: (data, True)):
            path = self.save({"w": torch.ones(3), "array": VALUES["array"], "deep": {"n": 7}})
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, r"array: is an object .* allow_pickle=True"):
            self.loaded(path, {"array": None}, fsdp_optim.LoadOptions())
        got = self.loaded(path, {"array": None, "deep": {"n": 0}})
        self.assertEqual((exactly(got["array"]), got["deep"]), (exactly(VALUES["array"]), {"n": 7}))

    @parameterized.expand(
        [
            ("a key without a path", {"raw": ["other"], "paths": {}}),
            ("a path to nothing", {"raw": ["n"], "paths": {"n": ["n", 5]}}),
            ("no bytes", {"raw": ["n"], "paths": {"n": ["n"]}}),
            ("no list", {"raw": 3, "paths": {}}),
        ]
    )
    def test_a_record_that_does_not_fit(self, _: str, record: dict[str, Any]) -> None:
        real = staged_save.KnownExtra

        def changed(how: dict[str, Any]) -> Any:
            return real({**how, **record})

        with mock.patch.object(staged_save, "KnownExtra", changed):
            path = self.save({"w": torch.ones(3), "n": 7})
        with self.assertRaises(fsdp_optim.CheckpointError):
            fsdp_optim.load(path, options=PICKLES)

    def test_items_of_lists_of_which_torch_saves_nothing(self) -> None:
        tree = {"parts": [{}, {"w": torch.ones(2), "n": 1}, {}, [{}, torch.ones(1)]], "numbers": {"1": 5}}
        path = self.save(tree)
        live: dict[str, Any] = {
            "parts": [{}, {"w": torch.zeros(2), "n": 0}, {}, [{}, torch.zeros(1)]],
            "numbers": {"1": 0},
        }
        check_same("dcp.load", self.loaded(path, live), tree)
        check_same("load", fsdp_optim.load(path, options=PICKLES).state, tree)


if __name__ == "__main__":
    unittest.main()
