"""The index of a checkpoint: the optimizer in its two forms, and what opening leaves undecoded."""

from __future__ import annotations

import json
import tempfile
import unittest
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.checkpoint.load.stored_state import StoredState
from fsdp_optim.formats.base.checksums import hex_of
from fsdp_optim.formats.base.description import OPAQUE, PLACED, SCALAR, SCALAR_TENSOR, TENSOR
from fsdp_optim.formats.base.index import mapped
from fsdp_optim.formats.base.saved_optim import WORD_OF, description_of
from fsdp_optim.formats.own import manifest
from fsdp_optim.formats.own import reader as own_reader
from fsdp_optim.formats.own.manifest import NAME, canonical
from fsdp_optim.formats.own.reader import Checkpoint
from fsdp_optim.plugins import (
    GroupDescription,
    OptimDescription,
    ParamDescription,
    SavedOptim,
    StoredTensor,
    saved_optim,
)
from fsdp_optim.state.dicts import Names
from fsdp_optim.state.values import Kind

TENSORS = {
    "m": StoredTensor("m", "float32", (3, 2), "optim.safetensors", 0),
    "step": StoredTensor("step", "float32", (), "optim.safetensors", 24),
    "rows": StoredTensor("rows", "float32", (3,), "optim.safetensors", 28),
}
VALUES = (("m", TENSOR, "m"), ("step", SCALAR_TENSOR, "step"), ("rows", PLACED, "rows"))
DESCRIPTION = OptimDescription(
    groups=(GroupDescription((("lr", 1e-3), ("betas", (0.9, 0.99))), ("w", "frozen")), GroupDescription((), ("b",))),
    other_keys={"loss_scale": 2.0},
    params={
        "w": ParamDescription(
            (3, 2), (*VALUES, ("n", SCALAR, 7), ("history", OPAQUE, {"x": [1, None]})), has_state=True
        ),
        "frozen": ParamDescription((4,), (), has_state=False),
        "b": ParamDescription((2,), (), has_state=True),
    },
    optimizer_class=["Adam", "SGD"],
)


def with_value(*value: Any) -> OptimDescription:
    param = replace(DESCRIPTION.params["w"], values=(value,))
    return replace(DESCRIPTION, params={**DESCRIPTION.params, "w": param})


class TestForms(unittest.TestCase):
    def test_they_are_inverse(self) -> None:
        self.assertEqual(description_of(saved_optim("here", DESCRIPTION, TENSORS)), DESCRIPTION)

    def test_the_full_dict(self) -> None:
        saved = saved_optim("here", DESCRIPTION, TENSORS)
        self.assertIs(saved.full["state"]["w"]["m"], TENSORS["m"])
        self.assertEqual(saved.full["kinds"]["w"]["step"], Kind.SCALAR.value)
        self.assertEqual(sorted(saved.full["kinds"]), ["b", "w"], "a parameter without state has no kinds")
        self.assertEqual(saved.shapes["frozen"], (4,))

    def test_parameters_with_equal_kinds_share_them(self) -> None:
        """But for names that are equal and yet differ."""
        values: list[tuple[tuple[Any, str, Any], ...]] = [
            (("m", TENSOR, "m"), ("step", SCALAR_TENSOR, "step")),
            (("m", TENSOR, "m"),),
            ((1, SCALAR, 0),),
            ((True, SCALAR, 0),),
        ]
        params = {str(index): ParamDescription((3, 2), listed, True) for index, listed in enumerate(2 * values)}
        kinds = saved_optim("here", replace(DESCRIPTION, params=params), TENSORS).full["kinds"]
        self.assertIs(kinds["0"], kinds["4"])
        self.assertIs(kinds["1"], kinds["5"])
        self.assertEqual(
            [[*words.items()] for words in kinds.values()],
            2 * [[("m", "sharded"), ("step", "scalar")], [("m", "sharded")], [(1, "scalar")], [(True, "scalar")]],
        )
        self.assertEqual([type(name) for words in kinds.values() for name in words], 2 * [str, str, str, int, bool])

    def test_the_words_are_kinds(self) -> None:
        self.assertEqual(WORD_OF, {Kind.SHARDED.value: TENSOR, Kind.SCALAR.value: SCALAR_TENSOR})
        self.assertEqual((PLACED, SCALAR, OPAQUE), (Kind.PLACED.value, Kind.SCALAR.value, Kind.OPAQUE.value))

    @parameterized.expand(
        [
            ("a tensor that is nowhere", ("m", TENSOR, "lost"), "names lost, which is in no file"),
            ("another shape", ("m", TENSOR, "rows"), r"rows has shape \[3\], its parameter \[3, 2\]"),
            ("a scalar with dimensions", ("step", SCALAR_TENSOR, "rows"), r"rows is a scalar of shape \[3\]"),
            ("a kind that nobody knows", ("m", "sideways", "m"), "m has the kind 'sideways', which is not known"),
        ]
    )
    def test_contradictions(self, _: str, value: tuple[Any, ...], wanted: str) -> None:
        with self.assertRaisesRegex(CheckpointError, f"here.*{wanted}"):
            saved_optim("here", with_value(*value), TENSORS)


class TestResolved(unittest.TestCase):
    """A full dict with stored tensors becomes a state by FQN; only what is not cut like a parameter is read."""

    def read(self, tensors: Sequence[StoredTensor]) -> list[torch.Tensor]:
        self.were_read = [*self.were_read, *(tensor.key for tensor in tensors)]
        return [torch.full(tensor.shape, 5.0) for tensor in tensors]

    def setUp(self) -> None:
        self.were_read: list[str] = []

    def resolved(self, saved: SavedOptim) -> StoredState:
        names = Names((("w", "frozen"), ("b",)), {}, model_order=("w", "frozen", "b"))
        return StoredState.resolved("here", saved, names, {"w": (3, 2), "frozen": (4,), "b": (2,)}, self.read)

    def test_recorded_kinds(self) -> None:
        resolved = self.resolved(saved_optim("here", DESCRIPTION, TENSORS))
        self.assertEqual(resolved.tensors, {("w", "m"): TENSORS["m"]})
        self.assertTrue(resolved.full.state["w"]["m"].is_meta)
        self.assertEqual(sorted(self.were_read), ["rows", "step"])
        self.assertEqual(resolved.full.state["w"]["step"].item(), 5.0)
        self.assertEqual(resolved.full.other_keys, {"loss_scale": 2.0})

    def test_ids_without_kinds(self) -> None:
        state = {0: {"exp_avg": TENSORS["m"], "step": TENSORS["step"]}}
        groups = [{"lr": 1.0, "params": [0, 1]}, {"lr": TENSORS["rows"], "params": [2]}]
        resolved = self.resolved(SavedOptim({"state": state, "param_groups": groups}))
        self.assertEqual(resolved.tensors, {("w", "exp_avg"): TENSORS["m"]})
        self.assertEqual(resolved.full.state["w"]["step"].item(), 5.0)
        self.assertEqual(resolved.full.groups[1][0]["lr"].tolist(), [5.0] * 3)

    def test_numbers_in_lists(self) -> None:
        """Fairscale has a number once for each rank, in a list, and the reader of its dialect compares them."""
        state = {0: {"exp_avg": TENSORS["m"], "step": [TENSORS["step"], TENSORS["step"]]}}
        full = {"state": state, "param_groups": [{"params": [0, 1, 2]}], "param_id_map": dict.fromkeys(range(3), 0)}
        names = Names((("w", "frozen", "b"),), {}, unit_order=("w", "frozen", "b"))
        resolved = StoredState.resolved("here", SavedOptim(full), names, {"w": (3, 2)}, self.read)
        self.assertEqual(resolved.full.state["w"]["step"].item(), 5.0)
        self.assertEqual(resolved.tensors, {("w", "exp_avg"): TENSORS["m"]})

    def test_dicts_without_end(self) -> None:
        """A pickle can have them."""
        endless: dict[str, Any] = {}
        endless["x"] = endless
        full = {"state": {0: {"x": endless}}, "param_groups": [{"params": [0, 1]}, {"params": [2]}]}
        with self.assertRaisesRegex(
            CheckpointError, "here: the optimizer: is not written as it should be: RecursionError"
        ):
            self.resolved(SavedOptim(full))

    def test_one_tensor_in_two_places_is_two(self) -> None:
        state = {key: {"exp_avg": TENSORS["rows"]} for key in (0, 2)}
        groups = [{"params": [0, 1]}, {"params": [2]}]
        resolved = self.resolved(SavedOptim({"state": state, "param_groups": groups}))
        values = [resolved.full.state[fqn]["exp_avg"] for fqn in ("w", "b")]
        self.assertNotEqual(values[0].data_ptr(), values[1].data_ptr())

    def test_reserved_keys(self) -> None:
        saved = saved_optim("here", replace(DESCRIPTION, other_keys={"param_id_map": {}}), TENSORS)
        with self.assertRaisesRegex(CheckpointError, "'param_id_map' cannot be another key of an optimizer"):
            self.resolved(saved)

    def test_what_has_no_stored_tensor_stays_the_same_object(self) -> None:
        tree = {"a": OrderedDict(x=1), "b": [TENSORS["m"]]}
        new = mapped(tree, lambda value: mapped(value, lambda leaf: 0 if leaf is TENSORS["m"] else leaf))
        self.assertIs(new["a"], tree["a"])
        self.assertEqual(new["b"], [0])
        self.assertIs(mapped(tree["a"], lambda value: value), tree["a"])


class TestOpening(unittest.TestCase):
    def test_nothing_is_decoded_before_it_is_asked_for(self) -> None:
        model = nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        path = f"{tempfile.mkdtemp()}/step"
        fsdp_optim.save(
            path, model, optim, state={"epoch": 3}, options=fsdp_optim.SaveOptions(durable=False, progress=False)
        )
        refused = mock.Mock(side_effect=CheckpointError("decoded"))
        with (
            mock.patch.object(own_reader, "decoded_text", refused),
            mock.patch.object(own_reader, "read_extra", refused),
            closing(open_checkpoint(store_at(path), verify=True)) as checkpoint,
        ):
            index = checkpoint.index
            self.assertEqual((sorted(index.weights), sorted(index.extras)), (["bias", "weight"], ["common"]))
            self.assertEqual((index.facts.format_name, index.facts.world_size), ("fsdp_optim", 1))
            refused.assert_not_called()
            assert index.optim is not None
            with self.assertRaisesRegex(CheckpointError, "decoded"):
                index.optim.decoded(allow_pickle=False, records={})
            with self.assertRaisesRegex(CheckpointError, "decoded"):
                index.extras["common"].decoded(allow_pickle=False)

    @parameterized.expand([(1 << 63,), (1 << 64,)])
    def test_the_description_of_the_optimizer_stays_a_text(self, number: int) -> None:
        """It is decoded, and written, again as before."""
        model = nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=float("inf"), momentum=0.5)
        optim.param_groups[0]["seed"] = number
        path = f"{tempfile.mkdtemp()}/step"
        fsdp_optim.save(path, model, optim, options=fsdp_optim.SaveOptions(durable=False, progress=False))
        with closing(Checkpoint.opened_in(store_at(path).open(), verify=True)) as checkpoint:
            assert checkpoint.index.optim is not None
            values, text = checkpoint.manifest.optim, checkpoint.manifest.encoded()
            self.assertEqual(text, Path(path, NAME).read_bytes())
            first, second = (checkpoint.index.optim.decoded(allow_pickle=False, records={}) for _ in range(2))
            self.assertEqual(first, second)
            self.assertEqual(first.full["param_groups"][0]["seed"], number)
            self.assertIsInstance(values, msgspec.Raw)
            self.assertEqual(checkpoint.manifest.encoded(), text)

    def test_a_manifest_that_another_program_has_written_again(self) -> None:
        """The checksum is of the values, whatever stands between them, and in whatever order."""
        path = saved_once()
        with closing(Checkpoint.opened_in(store_at(path).open(), verify=True)) as checkpoint:
            wanted = checkpoint.manifest.encoded(), checkpoint._decoded_optim(False, {})
        self.assertIsNotNone(manifest._with_optim_apart(Path(path, NAME).read_bytes()))
        values = json.loads(Path(path, NAME).read_bytes())
        reordered = {"checkpoint": dict(reversed(values["checkpoint"].items())), "checksum": values["checksum"]}
        for text in (json.dumps(values), json.dumps(values, indent=1), json.dumps(reordered, separators=(",", ":"))):
            Path(path, NAME).write_text(text)
            self.assertIsNone(manifest._with_optim_apart(text.encode()))
            with closing(Checkpoint.opened_in(store_at(path).open(), verify=True)) as checkpoint:
                self.assertEqual((checkpoint.manifest.encoded(), checkpoint._decoded_optim(False, {})), wanted)

    def test_a_key_that_a_manifest_has_twice(self) -> None:
        """With the checksum of its text: at the top it is refused when opened, in the optimizer when this is decoded."""
        path = saved_once()
        body = canonical(json.loads(Path(path, NAME).read_bytes())["checkpoint"])
        for old, new, is_optim in (
            (b'"world_size":1', b'"world_size":2,"world_size":1', False),
            (b'"aliases":{}', b'"aliases":{"a":"weight"},"aliases":{}', False),
            (b'"optim":{', b'"optim":{},"optim":{', False),
            (b'"has_state":true', b'"has_state":false,"has_state":true', True),
            (b'"extra":{}', b'"extra":{"a":1},"extra":{}', True),
        ):
            self.assertIn(old, body)
            twice = body.replace(old, new, 1)
            Path(path, NAME).write_bytes(b'{"checksum":"%s","checkpoint":%s}\n' % (hex_of(twice).encode(), twice))
            with (
                self.assertRaisesRegex(CheckpointError, "occurs twice"),
                closing(Checkpoint.opened_in(store_at(path).open(), verify=True)) as checkpoint,
            ):
                self.assertTrue(is_optim, new)
                checkpoint._decoded_optim(False, {})

    def test_a_manifest_that_says_nothing_of_an_optimizer(self) -> None:
        """Null says that there is none, or that its description has a file."""
        path = saved_once()
        values = json.loads(Path(path, NAME).read_bytes())["checkpoint"]
        del values["optim"]
        body = canonical(values)
        Path(path, NAME).write_bytes(b'{"checksum":"%s","checkpoint":%s}\n' % (hex_of(body).encode(), body))
        with self.assertRaisesRegex(CheckpointError, "optim"):
            Checkpoint.opened_in(store_at(path).open(), verify=True)

    def test_an_optimizer_that_was_changed(self) -> None:
        path = saved_once()
        text = Path(path, NAME).read_bytes()
        for old, new in ((b'"has_state":true', b'"has_state":null'), (b'"lr",', b'"lR",')):
            self.assertIn(old, text)
            Path(path, NAME).write_bytes(text.replace(old, new, 1))
            with self.assertRaisesRegex(CheckpointError, "checksum"):
                Checkpoint.opened_in(store_at(path).open(), verify=True)


def saved_once() -> str:
    """The path of a checkpoint of a model and its optimizer."""
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(2)).sum().backward()
    optim.step()
    path = f"{tempfile.mkdtemp()}/step"
    fsdp_optim.save(path, model, optim, options=fsdp_optim.SaveOptions(durable=False, progress=False))
    return path


if __name__ == "__main__":
    unittest.main()
