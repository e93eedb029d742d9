"""Which part of a torch file is which: by structure, and by the usual keys where several parts look alike."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.foreign.torch.roles import MODEL_KEYS, OPTIM_KEYS, joined_optims, parts_of
from fsdp_optim.formats.base.unread import Unread
from fsdp_optim.plugins import StoredTensor

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

    @parameterized.expand(
        [("int", 3), ("none", None), ("str", "x"), ("object", Unread("mine.Config")), ("dict", {"x": 1})]
    )
    def test_weights_with_another_value_among_them_are_a_model(self, _: str, other: Any) -> None:
        mixed = {**MODEL, "other": other}
        for key in (*MODEL_KEYS, "generator"):
            parts = parts_of("a.pt", {key: mixed, "optimizer": OPTIM, "epoch": 3})
            self.assertIs(parts.model, mixed)
            self.assertEqual((parts.optims, parts.rest), ([OPTIM], {"epoch": 3}))

    @parameterized.expand(
        [("int", 3), ("none", None), ("str", "x"), ("object", Unread("mine.Config")), ("dict", {"x": 1})]
    )
    def test_other_values_at_the_top_of_weights_are_the_trainers(self, _: str, other: Any) -> None:
        bare = torch.nn.Module().state_dict()
        bare.update({**MODEL, "0.added": 1, "_extra_state": 2, "other": other})
        parts = parts_of("a.pt", bare)
        self.assertEqual((parts.path, parts.rest), ((), {"other": other}))
        self.assertEqual(list(parts.model or ()), [*MODEL, "0.added", "_extra_state"])
        self.assertIs(parts.model._metadata, bare._metadata)  # type: ignore[union-attr]
        self.assertIn("other", bare)

    def test_the_usual_key_counts_before_a_clean_dict_of_tensors(self) -> None:
        """The model with a counter among its weights is not passed over for its average."""
        parts = parts_of("a.pt", {"model": {**MODEL, "epoch": 3}, "ema": MODEL})
        self.assertEqual((parts.where_model, list(parts.rest)), ("['model']", ["ema"]))

    def test_weights_that_are_outnumbered_are_a_model(self) -> None:
        """Under any key, and beside a clean dict of tensors, which is not taken in their place without a word."""
        others: dict[str, Any] = {f"setting_{number}": number for number in range(9)}
        mixed = {"0.weight": T, **others}
        parts = parts_of("a.pt", {"actor": mixed, "optimizer": OPTIM, "epoch": 3})
        self.assertIs(parts.model, mixed)
        self.assertEqual((parts.optims, parts.rest), ([OPTIM], {"epoch": 3}))
        with self.assertRaisesRegex(CheckpointError, "several models, under the keys 'actor', 'average'"):
            parts_of("a.pt", {"actor": mixed, "average": {"1.weight": T}})

    def test_weights_at_the_top_beside_an_optimizer(self) -> None:
        parts = parts_of("a.pt", {**MODEL, "optimizer": OPTIM, "epoch": 3, "name": "x", "seed": 5})
        self.assertEqual((list(parts.model or ()), parts.optims), (list(MODEL), [OPTIM]))
        self.assertEqual((parts.rest, parts.where_optim), ({"epoch": 3, "name": "x", "seed": 5}, "['optimizer']"))
        losses = {"optimizer": OPTIM, "losses": T, "epoch": 3}
        self.assertEqual(parts_of("a.pt", losses).rest, {"losses": T, "epoch": 3})

    def test_metrics_and_random_states_are_no_models(self) -> None:
        loss = StoredTensor("", "float32", (), "a.pt", 0)
        for others in ({"loss": loss, "n": 3}, {"mean": T, "n": 3}, {"rng_state": T, "n": 3}):
            parts = parts_of("a.pt", {"optimizer": OPTIM, "metrics": others})
            self.assertIsNone(parts.model)
        with self.assertRaisesRegex(CheckpointError, "neither a model"):
            parts_of("a.pt", {"rng_state": T, "loss": loss, "n": 3})

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
