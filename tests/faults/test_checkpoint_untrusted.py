"""Faults in a checkpoint, an optimizer or a process: an error of the library, in time and memory that sizes justify."""

from __future__ import annotations

import gc
import json
import math
import tracemalloc
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import xxhash
from kit.cases import expand, some
from kit.checkpoint_format import canonical, read_manifest
from kit.compare import check_same, error_text
from kit.folders import InFolder
from kit.options import as_options, state_for
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.checkpoint.load import stored_state
from fsdp_optim.plugins import parse_json

QUIET: dict[str, Any] = {"durable": False, "progress": False}


def stepped(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optim = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(4, 3, device="cpu")).sum().backward()
    optim.step()
    optim.param_groups[0].update(options)
    return model, optim


def contents(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": dict(model.state_dict()), "state": [dict(optim.state[p]) for p in model.parameters()]}


class Rewriting(InFolder):
    def rewrite(self, edit: Callable[[Any], Any]) -> None:
        """Another manifest, with the right checksum."""
        text = canonical(edit(read_manifest(self.path)))
        checksum = xxhash.xxh3_64_hexdigest(text).encode()
        (self.path / "fsdp_optim.json").write_bytes(b'{"checksum":"' + checksum + b'","checkpoint":' + text + b"}\n")


# ------------------------------------------------------------------------------------------ of the process


class ProcessTest(Rewriting):
    def test_default_device(self) -> None:
        """The meta device stands for CUDA: what is made there by mistake has no elements."""
        model, optim = stepped()
        extra: dict[str, Any] = {"tensor": torch.arange(3), "array": torch.arange(4).numpy(), "step": 7}
        other, other_optim = stepped()
        torch.set_default_device("meta")
        try:
            fsdp_optim.save(
                self.path,
                model,
                optim,
                state=state_for(extra, [extra]),
                **as_options(fsdp_optim.SaveOptions, **QUIET),
            )
            restored = fsdp_optim.load(self.path, other, other_optim, options=fsdp_optim.LoadOptions(compare=True))
            fsdp_optim.async_save(
                self.path,
                model,
                optim,
                state=state_for(extra),
                overwrite=True,
                **as_options(fsdp_optim.SaveOptions, **QUIET),
            ).wait()
            fsdp_optim.load(self.path, other, other_optim)
            full = fsdp_optim.gather_full_optim_state_dict(model, optim)
            shard = fsdp_optim.get_shard_from_optim_state_dict(other, other_optim, full)
            fsdp_optim.load_optim_state_dict(other_optim, shard)
        finally:
            torch.set_default_device(None)
        check_same("loaded", contents(other, other_optim), contents(model, optim))
        values = dict(restored.state)
        for extras in (values.pop("per_rank_extra")[0], values):
            extras["array"] = torch.from_numpy(extras["array"])
            check_same("extra", extras, {**extra, "array": torch.arange(4)})

    def test_inference_mode(self) -> None:
        model, optim = stepped()
        fsdp_optim.save(
            self.path, model, optim, state={"t": torch.arange(3)}, **as_options(fsdp_optim.SaveOptions, **QUIET)
        )
        other, other_optim = stepped()
        with torch.inference_mode():
            restored = fsdp_optim.load(self.path, other, other_optim, options=fsdp_optim.LoadOptions(compare=True))
            inference_only = nn.Linear(3, 2)
            fsdp_optim.load(self.path, inference_only)
        check_same("weights", dict(inference_only.state_dict()), dict(model.state_dict()))
        check_same("loaded", contents(other, other_optim), contents(model, optim))
        restored.state["t"].add_(1)
        for module, with_optim in ((model, optim), (other, other_optim)):
            with_optim.zero_grad()
            module(torch.ones(4, 3)).sum().backward()
            with_optim.step()
        check_same("a step later", contents(other, other_optim), contents(model, optim))

    @parameterized.expand((("nan", math.nan), ("negative", -1.0), ("a word", "7")))
    def test_wait_for_no_time(self, _: str, timeout: Any) -> None:
        model, optim = stepped()
        handle = fsdp_optim.async_save(self.path, model, optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
        kind, text = error_text(lambda: handle.wait(timeout))
        self.assertEqual(kind, "StateError", text)
        self.assertIn("timeout", text)
        handle.wait(math.inf)


# ------------------------------------------------------------------------------------------ of the optimizer


class OptimizerTest(Rewriting):
    @parameterized.expand(
        (
            ("tuple keys", {"scales": {(1, 2): 3.0, ("a",): [4]}}),
            ("tuple keys, inside", {"scales": [{"deep": {(1, 2): {None: 5}}}]}),
            ("a long range", {"range": range(10**12)}),
        )
    )
    def test_hyperparameters(self, _: str, options: dict[str, Any]) -> None:
        model, optim = stepped(**options)
        fsdp_optim.save(
            self.path, model, optim, state=state_for(options), **as_options(fsdp_optim.SaveOptions, **QUIET)
        )
        other, other_optim = stepped(**dict.fromkeys(options))
        restored = fsdp_optim.load(self.path, other, other_optim)
        for key, value in options.items():
            check_same(key, [other_optim.param_groups[0][key], restored.state[key]], [value, value])

    @parameterized.expand(
        (
            ("alone", {"name": "a\udc80b"}),
            ("in a key", {"names": {"a\udc80b": 1}}),
            ("in a name", {"a\udc80b": 1}),
            ("inside", {"names": [{(1, 2): {"a": ("a\udc80b",)}}]}),
        )
    )
    def test_lone_surrogates(self, _: str, options: dict[str, Any]) -> None:
        for in_optim in (True, False):
            model, optim = stepped(**(options if in_optim else {}))
            extra = {} if in_optim else options
            kind, text = error_text(
                lambda: fsdp_optim.save(
                    self.path,
                    model,  # noqa: B023
                    optim,  # noqa: B023
                    state=state_for(extra),  # noqa: B023
                    **as_options(fsdp_optim.SaveOptions, **QUIET),
                )
            )
            self.assertEqual(kind, "CheckpointError", text)
            self.assertIn("udc80", text)
            self.assertFalse(self.path.exists())

    def test_a_name_that_no_file_can_have(self) -> None:
        model, optim = stepped()
        for values in optim.state.values():
            values["a\udc80b"] = torch.zeros_like(values["exp_avg"])
        kind, text = error_text(
            lambda: fsdp_optim.save(self.path, model, optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
        )
        self.assertEqual(kind, "CheckpointError", text)
        self.assertIn("udc80", text)
        self.assertFalse(self.path.exists())

    def test_views_that_are_conjugated_or_negated_when_they_are_read(self) -> None:
        model = nn.ParameterDict({"z": nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))})
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        moment = torch.randn(4, 3, dtype=torch.complex64)
        optim.state[model["z"]] = {"conj": moment.conj(), "moved": torch.randn(3, 4, dtype=torch.complex64).conj().t()}
        real = nn.Parameter(torch.randn(4, 3))
        model["r"] = real
        optim.add_param_group({"params": [real]})
        optim.state[real] = {"neg": moment.conj().imag}
        self.assertTrue(optim.state[real]["neg"].is_neg() and optim.state[model["z"]]["conj"].is_conj())
        extra = {"conj": moment.conj(), "neg": moment.conj().imag}
        fsdp_optim.save(
            self.path,
            model,
            optim,
            state=state_for(extra),
            **as_options(fsdp_optim.SaveOptions, **QUIET, bucket_nbytes=16),
        )
        wanted = [
            {name: value.resolve_conj().resolve_neg() for name, value in state.items()}
            for state in optim.state.values()
        ]
        for _ in range(2):
            restored = fsdp_optim.load(self.path, model, optim, options=fsdp_optim.LoadOptions(compare=True))
            loaded = [dict(state) for state in optim.state.values()]
            check_same("state", loaded, wanted)
            check_same("extra", dict(restored.state), {"conj": wanted[0]["conj"], "neg": wanted[1]["neg"]})

    def test_a_state_without_step(self) -> None:
        model, optim = stepped()
        for values in optim.state.values():
            del values["step"]
        fsdp_optim.save(self.path, model, optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
        other, other_optim = stepped()
        before = [dict(other_optim.state[p]) for p in other.parameters()]
        kind, text = error_text(lambda: fsdp_optim.load(self.path, other, other_optim))
        self.assertEqual(kind, "StateError", text)
        self.assertIn("step", text)
        check_same("before", [dict(other_optim.state[p]) for p in other.parameters()], before)


# ------------------------------------------------------------------------------------------ of the checkpoint


class SaidTest(Rewriting):
    def edited(self, edit: Callable[[dict[str, Any]], Any]) -> tuple[str, str]:
        model, optim = stepped()
        fsdp_optim.save(self.path, model, optim, overwrite=True, **as_options(fsdp_optim.SaveOptions, **QUIET))

        def in_optim(checkpoint: Any) -> Any:
            edit(checkpoint["optim"])
            return checkpoint

        self.rewrite(in_optim)
        return error_text(lambda: fsdp_optim.load(self.path, model, optim))

    @parameterized.expand(("system", "Tensor", "", 7, None, ["tensor"]))
    def test_unknown_how(self, how: Any) -> None:
        kind, text = self.edited(lambda said: said["params"]["weight"].update(values=[["exp_avg", how, "x"]]))
        self.assertEqual(kind, "CheckpointError", text)
        self.assertIn(str(self.path), text)

    @parameterized.expand(
        (
            ("extra", {"extra": {"param_id_map": [1]}}),
            ("extra of state", {"extra": {"state": {}}}),
            ("extra is a list", {"extra": [1]}),
            ("groups of words", {"groups": [{"hyperparameters": [], "params": "weight"}]}),
            ("groups of lists", {"groups": [{"hyperparameters": [], "params": [["weight"], ["bias"]]}]}),
            ("names that are numbers", {"params": {"$dict": [[1, {"values": [], "shape": []}]]}}),
            ("class", {"optimizer_class": {"a": 1}}),
        )
    )
    def test_other_types(self, _: str, values: dict[str, Any]) -> None:
        kind, text = self.edited(lambda said: said.update(values))
        self.assertEqual(kind, "CheckpointError", text)
        self.assertIn(str(self.path), text)

    def test_our_own_mistakes_are_not_called_damage(self) -> None:
        model, optim = stepped()
        fsdp_optim.save(self.path, model, optim, **as_options(fsdp_optim.SaveOptions, **QUIET))

        def mistaken(*args: Any) -> Any:
            raise AttributeError("a mistake in the library")

        calls: dict[str, Callable[[], Any]] = {
            "load": lambda: fsdp_optim.load(self.path, model, optim),
            "save": lambda: fsdp_optim.save(
                self.path, model, optim, overwrite=True, **as_options(fsdp_optim.SaveOptions, **QUIET)
            ),
        }
        for name, call in calls.items():
            with self.subTest(name), mock.patch.object(stored_state, "normalize", mistaken):
                self.assertEqual(error_text(call), ("AttributeError", "a mistake in the library"))


class NoWeightsTest(Rewriting):
    def test_a_manifest_that_has_lost_the_model(self) -> None:
        """A load that restores the optimizer and leaves the weights as they are would be silently wrong."""
        model, optim = stepped()
        fsdp_optim.save(self.path, model, optim, **as_options(fsdp_optim.SaveOptions, **QUIET))

        def without_model(manifest: dict[str, Any]) -> dict[str, Any]:
            files = {name: info for name, info in manifest["files"].items() if not name.startswith("model")}
            return {**{key: value for key, value in manifest.items() if key != "brief"}, "files": files, "version": 1}

        self.rewrite(without_model)
        before = contents(model, optim)
        kind, text = error_text(lambda: fsdp_optim.load(self.path, model, optim))
        self.assertEqual((kind, "weight: the model has it" in text), ("StateError", True), text)
        check_same("as it was", contents(model, optim), before)


class GrowthTest(Rewriting):
    def test_keys_twice_take_linear_time(self) -> None:
        """Comparisons are counted: those of the keys."""

        class Key(str):
            compared = 0
            __slots__ = ()

            def __eq__(self, other: object) -> bool:
                Key.compared += 1
                return str.__eq__(self, other)  # type: ignore[arg-type]

            __hash__ = str.__hash__

        from fsdp_optim.formats.base import json_text

        for number in (500, 2000):
            pairs = [(Key(f"key {index}"), 0) for index in range(number)] + [(Key(f"key {number - 1}"), 1)]
            Key.compared = 0
            kind, text = error_text(lambda: json_text.without_duplicates(pairs))  # noqa: B023
            self.assertEqual((kind, text), ("ValueError", f"'key {number - 1}' occurs twice"))
            self.assertLess(Key.compared, 10 * number)
        kind, text = error_text(lambda: parse_json("here", b'{"a": 1, "b": 2, "a": 3}'))
        self.assertEqual((kind, text), ("CheckpointError", "here: is not readable JSON: 'a' occurs twice"))

    @expand(
        *some(
            (
                ("empty lists", "[" + ",".join(["[]"] * 30_000) + "]"),
                ("empty objects", "[" + ",".join(["{}"] * 30_000) + "]"),
                ("small objects", "[" + ",".join(['{"":0}'] * 50_000) + "]"),
                ("lists in lists", "[" + ",".join(["[" * 50 + "]" * 50] * 3_000) + "]"),
            ),
            every=2,
        )
    )
    def test_memory_of_a_manifest(self, _: str, text: str) -> None:
        model, optim = stepped()
        fsdp_optim.save(self.path, model, optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
        manifest = self.path / "fsdp_optim.json"
        rest = json.dumps(read_manifest(self.path), sort_keys=True)[1:]
        for body in (f'{{"filling":{text},{rest}', f'{{"model":{text}}}'):
            checksum = xxhash.xxh3_64_hexdigest(body.encode())
            manifest.write_text(f'{{"checksum":"{checksum}","checkpoint":{body}}}\n')
            gc.collect()
            tracemalloc.start()
            try:
                kind, message = error_text(lambda: fsdp_optim.load(self.path, model, optim))
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            self.assertEqual(kind, "CheckpointError", message)
            self.assertIn(str(manifest), message)
            self.assertLess(peak, 5 * len(text) + (1 << 20))

    def test_what_would_not_be_read_is_not_written(self) -> None:
        model, optim = stepped()
        fsdp_optim.save(self.path, model, optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
        optim.param_groups[0]["filling"] = [[] for _ in range(50_000)]
        kind, text = error_text(
            lambda: fsdp_optim.save(
                self.path, model, optim, overwrite=True, **as_options(fsdp_optim.SaveOptions, **QUIET)
            )
        )
        self.assertEqual(kind, "CheckpointError", text)
        del optim.param_groups[0]["filling"]
        fsdp_optim.load(self.path, model, optim)  # the older one is still there

    def test_brackets_in_words_are_no_lists(self) -> None:
        model, optim = stepped(words="[{" * 100_000, quoted='"[\\"{' * 1000)
        fsdp_optim.save(
            self.path,
            model,
            optim,
            state={"words": "[[" * 100_000, "lists": [[]] * 100_000},
            **as_options(fsdp_optim.SaveOptions, **QUIET),
        )
        other, other_optim = stepped(words="", quoted="")
        restored = fsdp_optim.load(self.path, other, other_optim)
        self.assertEqual(other_optim.param_groups[0]["words"], "[{" * 100_000)
        self.assertEqual(restored.state["lists"], [[]] * 100_000)


if __name__ == "__main__":
    unittest.main()
