"""The reader of torch.distributed.checkpoint: which key is what, also of several optimizers."""

from __future__ import annotations

import unittest
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from kit.dcp_files import TALL, DcpFiles, InFolder, opened
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.foreign.dcp.keys import Leaf, meaning_of


def keys_of(
    tree: Mapping[str, Any], at: tuple[str | int, ...] = ()
) -> dict[str, tuple[tuple[str | int, ...], int | None]]:
    """Keys with their paths, and the number of dimensions of tensors: a number in the tree; None is another value."""
    keys: dict[str, tuple[tuple[str | int, ...], int | None]] = {}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for name, value in items:
        if isinstance(value, (Mapping, list)):
            keys |= keys_of(value, (*at, name))
        else:
            path = (*at, name)
            keys[".".join(map(str, path))] = (path, value)
    return keys


MODEL_KEYS = {"a.w": 2, "b.w": 1}
NESTED = {
    "state": {"a.w": {"exp_avg": 2, "step": 0}, "b.w": {"exp_avg": 1}},
    "param_groups": [{"lr": None, "params": None}],
}
FLAT = {"state.a.w.exp_avg": 2, "state.b.w.exp_avg": 1, "param_groups.a.w.lr": None, "param_groups.b.w.lr": None}
BY_ID = {"state": {"0": {"exp_avg": 2}, "1": {"exp_avg": 1}}, "param_groups": [{"lr": None, "params": None}]}
DOTTED = {f"model.{name}": dims for name, dims in MODEL_KEYS.items()}


class KeysTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("nested", {"model": MODEL_KEYS, "optimizer": NESTED}, "model.", 1),
            ("flattened", {"model": MODEL_KEYS, "optim": FLAT}, "model.", 1),
            ("torchtitan", {**MODEL_KEYS, "optimizer": FLAT, "train_state": {"step": 0}, "x": None}, "", 1),
            ("model alone", {"model": MODEL_KEYS}, "model.", 0),
            ("model alone at the top", MODEL_KEYS, "", 0),
            ("optimizer alone", {"optimizer": NESTED}, None, 1),
            ("optimizer alone at the top", NESTED, None, 1),
            ("flattened optimizer at the top", {**FLAT, "model": MODEL_KEYS}, "model.", 1),
            ("app", {"app": {"model": MODEL_KEYS, "optim": NESTED}}, "app.model.", 1),
            ("app by id", {"app": {"model": MODEL_KEYS, "optim": BY_ID}}, "app.model.", 1),
            ("of any name", {"net": MODEL_KEYS, "adam": NESTED, "rng": {"cpu": 1}}, "net.", 1),
            ("of any name, by id", {"net": MODEL_KEYS, "adam": BY_ID, "counters": {"n": 0}}, "net.", 1),
            ("state_dict", {"state_dict": MODEL_KEYS, "optimizer_0": NESTED}, "state_dict.", 1),
            ("an average beside the model", {"ema": MODEL_KEYS, "model": MODEL_KEYS, "optim": NESTED}, "model.", 1),
            (
                "an average with its own model",
                {"ema": {"model": MODEL_KEYS}, "model": MODEL_KEYS, "optim": NESTED},
                "model.",
                1,
            ),
            ("a prefix in the names", {**DOTTED, "optim": NESTED}, "model.", 1),
            ("two numbered", {"model": MODEL_KEYS, "optimizer_1": FLAT, "optimizer_0": FLAT}, "model.", 2),
            ("a list", {"model": MODEL_KEYS, "optimizers": [NESTED, NESTED]}, "model.", 2),
            ("one inside of another", {"model": MODEL_KEYS, "optim": {**NESTED, "base": NESTED}}, "model.", 1),
            (
                "a scheduler with groups",
                {"model": MODEL_KEYS, "optim": NESTED, "sched": {"last_lr": None}},
                "model.",
                1,
            ),
        ]
    )
    def test_found(self, _: str, saved: Any, prefix: str | None, num_optimizers: int) -> None:
        keys = keys_of(saved)
        meaning = self.meaning(keys)
        wanted = {} if prefix is None else {name: f"{prefix}{name}" for name in MODEL_KEYS}
        self.assertEqual(dict(meaning.model), wanted)
        self.assertEqual(len(meaning.optimizers), num_optimizers)

    def meaning(self, keys: Mapping[str, tuple[tuple[str | int, ...], int | None]]) -> Any:
        paths = {key: path for key, (path, _) in keys.items()}
        return meaning_of("here", paths, {key: dims for key, (_, dims) in keys.items() if dims is not None})

    @parameterized.expand(
        [
            ("two models", {"net": MODEL_KEYS, "twin": MODEL_KEYS, "adam": NESTED}, ["net", "twin", "model"]),
            ("two models without an optimizer", {"net": MODEL_KEYS, "twin": MODEL_KEYS}, ["net", "twin"]),
            ("two optimizers", {"model": MODEL_KEYS, "first": NESTED, "second": NESTED}, ["first", "second"]),
            (
                "two apps",
                {"app": {"model": MODEL_KEYS, "optim": NESTED}, "b": {"model": MODEL_KEYS, "optim": NESTED}},
                ["app", "b"],
            ),
        ]
    )
    def test_candidates_are_named(self, _: str, saved: Any, names: Sequence[str]) -> None:
        with self.assertRaises(CheckpointError) as caught:
            self.meaning(keys_of(saved))
        for name in names:
            self.assertIn(name, str(caught.exception))

    def test_numbers_say_the_order(self) -> None:
        meaning = self.meaning(keys_of({"model": MODEL_KEYS, **{f"optimizer_{n}": NESTED for n in (10, 2, 0)}}))
        first = [tree["param_groups"][0]["lr"] for tree in meaning.optimizers]
        self.assertEqual(first, [Leaf(f"optimizer_{n}.param_groups.0.lr") for n in (0, 2, 10)])

    def test_a_list_with_a_hole(self) -> None:
        keys = keys_of({"model": MODEL_KEYS, "optim": NESTED})
        keys["optim.param_groups.2.lr"] = (("optim", "param_groups", 2, "lr"), None)
        with self.assertRaisesRegex(CheckpointError, "number 1 is missing"):
            self.meaning(keys)


class SeveralOptimizersTest(InFolder):
    def write(self, names: Sequence[str], *, by_id: bool) -> Path:
        files = DcpFiles(self.folder)
        for number, name in enumerate(names):
            files.tensor(["model", name], TALL)
            key = "0" if by_id else name
            files.tensor([f"optimizer_{number}", "state", key, "exp_avg"], TALL)
            files.value([f"optimizer_{number}", "param_groups", 0, "lr"], number)
            files.value([f"optimizer_{number}", "param_groups", 0, "params"], [0] if by_id else [name])
        return files.finish()

    def test_they_become_one(self) -> None:
        with closing(opened(self.write(["a", "b"], by_id=False))) as reader:
            full = reader.full_dict
            assert full is not None
            self.assertEqual(full["param_groups"], [{"lr": 0, "params": ["a"]}, {"lr": 1, "params": ["b"]}])
            self.assertEqual(list(full["state"]), ["a", "b"])

    def test_ids_count_on(self) -> None:
        with closing(opened(self.write(["a", "b"], by_id=True))) as reader:
            full = reader.full_dict
            assert full is not None
            self.assertEqual([group["params"] for group in full["param_groups"]], [[0], [1]])
            self.assertEqual(list(full["state"]), [0, 1])

    def test_a_parameter_in_two(self) -> None:
        self.write(["a", "a"], by_id=False)
        self.check_refused("a is in two of its optimizers")


if __name__ == "__main__":
    unittest.main()
