"""Which part of a torch file is which: by structure, and by the usual keys where several parts look alike."""

from __future__ import annotations

import unittest
from typing import Any

from parameterized import parameterized

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base import StoredTensor
from fsdp_optim.formats.pickle_table import Unread
from fsdp_optim.formats.torch_parts import MODEL_KEYS, OPTIM_KEYS, joined_optims, parts_of

T = StoredTensor("", "float32", (2,), "a.pt", 0)
MODEL = {"0.weight": T, "0.bias": T}
OPTIM = {"state": {0: {"exp_avg": T, "step": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
FLAT = {"state.0.weight.exp_avg": T, "param_groups.0.weight.lr": 0.1}


class PartsTest(unittest.TestCase):
    @parameterized.expand([(m, o) for m, o in zip(MODEL_KEYS, [*OPTIM_KEYS[2:], *OPTIM_KEYS[:2]], strict=False)])
    def test_usual_keys(self, model: str, optim: str) -> None:
        parts = parts_of("a.pt", {model: MODEL, optim: OPTIM, "epoch": 3})
        self.assertIs(parts.model, MODEL)
        self.assertEqual((parts.optims, parts.rest), ([OPTIM], {"epoch": 3}))
        self.assertEqual((parts.where_model, parts.where_optim), (f"[{model!r}]", f"[{optim!r}]"))

    @parameterized.expand([("nested", OPTIM), ("flattened", FLAT)])
    def test_an_optimizer_is_known_by_its_structure(self, _: str, optim: Any) -> None:
        for value in (optim, {"mine": optim}, {"mine": [optim]}, {"outer": {"model": MODEL, "mine": optim}}):
            self.assertEqual(list(parts_of("a.pt", value).optims), [optim])

    def test_the_usual_key_of_several_models(self) -> None:
        parts = parts_of("a.pt", {"ema": MODEL, "model": MODEL, "teacher": MODEL})
        self.assertEqual((parts.where_model, list(parts.rest)), ("['model']", ["ema", "teacher"]))

    def test_an_unusual_key_of_the_only_model(self) -> None:
        parts = parts_of("a.pt", {"generator": MODEL, "rng_state": {"cpu": T, "cuda": T}})
        self.assertEqual((parts.where_model, list(parts.rest)), ("['generator']", ["rng_state"]))
        parts = parts_of("a.pt", {"optimizer": OPTIM, "rng_state": {"cpu": T}})
        self.assertIsNone(parts.model)

    def test_parts_below_several_keys(self) -> None:
        parts = parts_of("a.pt", {"app": {"trainer": {"model": MODEL, "optim": OPTIM}}, "step": 3})
        self.assertEqual((parts.path, parts.where_model), (("app", "trainer"), "['app']['trainer']['model']"))

    def test_values_that_modules_add_are_part_of_a_model(self) -> None:
        model = {**MODEL, "0._extra_state": {"x": 1}, "_extra_state": None}
        self.assertIs(parts_of("a.pt", model).model, model)

    @parameterized.expand(
        [
            (
                "two models",
                {"model": MODEL, "state_dict": MODEL},
                "several models, under the keys 'model', 'state_dict'",
            ),
            ("two others", {"a": MODEL, "b": MODEL}, "several models, under the keys 'a', 'b'"),
            ("two optimizers", {"a": OPTIM, "b": OPTIM}, "several optimizers, under the keys 'a', 'b'"),
            ("nothing", {"epoch": 3}, "keys are 'epoch'"),
            ("empty", {}, "keys are none"),
            ("a list", [MODEL], "a list"),
            ("an object", Unread("mine.Net"), "mine.Net"),
            ("deep", {"a": {"b": {"c": {"d": {"e": MODEL}}}}}, "keys are 'a'"),
        ]
    )
    def test_what_is_not_clear_is_refused(self, _: str, value: Any, words: str) -> None:
        with self.assertRaisesRegex(CheckpointError, f"a.pt: .*{words}"):
            parts_of("a.pt", value)


class JoinedTest(unittest.TestCase):
    def test_by_id(self) -> None:
        """Ids count on from one optimizer to the next."""
        a = {"state": {5: {"m": 1}}, "param_groups": [{"lr": 1, "params": [5]}, {"lr": 2, "params": [7, 6]}]}
        b = {"state": {0: {"m": 2}}, "param_groups": [{"lr": 3, "params": [0]}]}
        joined = joined_optims("a.pt", [a, b])
        self.assertEqual(joined["state"], {0: {"m": 1}, 3: {"m": 2}})
        self.assertEqual([group["params"] for group in joined["param_groups"]], [[0], [1, 2], [3]])
        self.assertEqual([group["lr"] for group in joined["param_groups"]], [1, 2, 3])
        self.assertEqual(a["param_groups"][0]["params"], [5])  # what comes in is not changed

    def test_by_name(self) -> None:
        a = {"state": {"x": {"m": 1}}, "param_groups": [{"params": ["x"]}]}
        b = {"state": {"y": {"m": 2}}, "param_groups": [{"params": ["y"]}]}
        self.assertEqual(joined_optims("a.pt", [a, b])["state"], {"x": {"m": 1}, "y": {"m": 2}})
        with self.assertRaisesRegex(CheckpointError, "two of its 2 optimizers have state of 'x'"):
            joined_optims("a.pt", [a, a])

    @parameterized.expand([("flattened", FLAT), ("fairscale's", {**OPTIM, "param_id_map": {0: 0}})])
    def test_dialects_that_cannot_be_joined(self, _: str, optim: Any) -> None:
        self.assertIs(joined_optims("a.pt", [optim]), optim)
        with self.assertRaisesRegex(CheckpointError, "number 0 has the keys"):
            joined_optims("a.pt", [optim, OPTIM])


if __name__ == "__main__":
    unittest.main()
