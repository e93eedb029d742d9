"""Names that come together where Views, `rename=`, tied parameters and wrappers meet: loaded as they are meant, or refused."""

from __future__ import annotations

import functools
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_same
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import ConvertOptions, LoadOptions, SaveOptions, StateError, View, WrapperError, dcp

VIEW = View("w13", "(a + b) c", {"w1": "a c", "w3": "b c"})
W13, W = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(2, 3) + 100
SQUARE = torch.arange(16.0).view(4, 4)


def model_of(tensors: Mapping[str, Tensor]) -> Any:
    """A model with copies of these parameters."""
    root = nn.Module()
    for name, value in tensors.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, nn.Parameter(value.clone()))
    return root


def zeros(*names: str) -> Any:
    return model_of({name: torch.zeros(2, 3) for name in names})


class TestNames(unittest.TestCase):
    def setUp(self) -> None:
        self._made = tempfile.TemporaryDirectory()
        self.folder = Path(self._made.name, "step")

    def tearDown(self) -> None:
        self._made.cleanup()

    def load(self, model: Any, *, strict: bool = True, **options: Any) -> Any:
        given = LoadOptions(views=[VIEW], **options)
        return fsdp_optim.load(self.folder, model, None, strict=strict, options=given)

    def refused(self, model: Any, words: str, **options: Any) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with self.assertRaisesRegex(StateError, words):
            self.load(model, **options)
        check_same("untouched", dict(model.state_dict()), before)

    def test_two_stored_weights_that_rename_brings_to_one_name(self) -> None:
        """None is dropped without a word, as a load without Views drops none."""
        fsdp_optim.save(self.folder, model_of({"a.w": W, "b.w": W + 1, "w13": W13}), None)
        rename = {"a.": "", "b.": ""}
        self.refused(zeros("w", "w1", "w3"), "b.w", rename=rename)
        target = zeros("w", "w1", "w3")
        result = self.load(target, strict=False, rename=rename)
        check_same("unexpected", result.unexpected_keys, ("b.w",))
        check_same("loaded", dict(target.state_dict()), {"w": W, "w1": W13[:2], "w3": W13[2:]})

    def test_two_stored_weights_that_a_wrapper_has_named(self) -> None:
        """The exact name counts, and the other one is refused, for a fused parameter and for one that no View changes."""
        self.folder.mkdir()
        for name, value in (("w", W), ("w13", W13)):
            rest = {"w13": W13, "w": W}
            save_file({**rest, f"_fsdp_wrapped_module.{name}": value.clone() + 1}, self.folder / "model.safetensors")
            self.refused(zeros("w", "w1", "w3"), f"_fsdp_wrapped_module.{name}: the checkpoint has it")
            target = zeros("w", "w1", "w3")
            self.load(target, strict=False)
            check_same("loaded", dict(target.state_dict()), {"w": W, "w1": W13[:2], "w3": W13[2:]})

    def test_a_stored_name_that_a_part_gets(self) -> None:
        """A file has w1, which is x in the model, and its old.w13 has a part w1."""
        tensors = {"old.w13": W13, "w1": W}
        for listed in (tensors, dict(reversed(tensors.items()))):
            fsdp_optim.save(self.folder, model_of(listed), None, overwrite=True)
            for strict in (True, False):
                rename = {"old.w13": "w13", "w1": "x"}
                self.refused(zeros("w1", "w3", "x"), "w1: .* another parameter, x", strict=strict, rename=rename)

    def test_names_that_take_turns(self) -> None:
        """The stored w13 is y in the model, and the stored z is its w13."""
        fsdp_optim.save(self.folder, model_of({"w13": W13, "z": W13 + 50}), None)
        target = model_of({"w1": W * 0, "w3": W * 0, "y": W13 * 0})
        self.load(target, rename={"w13": "y", "z": "w13"})
        check_same("loaded", dict(target.state_dict()), {"w1": W13[:2] + 50, "w3": W13[2:] + 50, "y": W13})

    def test_a_part_that_has_the_other_name_of_a_tied_parameter(self) -> None:
        model = model_of({"x": W, "w13": W13})
        model.register_parameter("w1", model.x)
        with self.assertRaisesRegex(
            WrapperError, "w1: two parameters would have this name, the tied parameter x and a part"
        ):
            fsdp_optim.save(self.folder, model, None, options=SaveOptions(views=[VIEW]))
        self.assertFalse(self.folder.exists())
        fsdp_optim.save(self.folder, model, None)
        self.refused(zeros("w1", "w3", "x"), "w1: two parameters would have this name")

    def test_a_fused_name_that_could_be_that_of_an_expert(self) -> None:
        """Only a number is the name of an expert, so layers.0.up is fused in a checkpoint too."""
        view = View("layers.{i}.up", "e c", {"layers.{i}.{e}": "c"})
        fsdp_optim.save(self.folder, model_of({"layers.0.up": W13}), None)
        apart = {f"layers.0.{e}": W13[e] for e in range(4)}
        target = model_of({name: value * 0 for name, value in apart.items()})
        fsdp_optim.load(self.folder, target, None, options=LoadOptions(views=[view]))
        check_same("loaded", dict(target.state_dict()), apart)
        fsdp_optim.save(f"{self.folder}-2", target, None)
        check_same("saved", load_file(f"{self.folder}-2/model.safetensors"), apart)

    def test_a_part_that_has_the_name_and_the_shape_of_the_fused_parameter(self) -> None:
        """Rows in another order: which one a checkpoint has, its Views say; where it has none, the load is refused."""
        views = [
            [View("q", "(h two d) c", {"q": "(h d two) c"}, h=1, two=2)],
            [View("q", "r c", {"q": "c r"})],
            [View("q", "r c", {"k": "c r"}), View("k", "r c", {"q": "c r"})],
        ]
        for number, given in enumerate(views):
            model = model_of({view.name: SQUARE + at for at, view in enumerate(given)})
            target = model_of({view.name: SQUARE * 0 for view in given})
            folder = f"{self.folder}-{number}"
            fsdp_optim.save(f"{folder}-seen", model, None, options=SaveOptions(views=given))
            fsdp_optim.load(f"{folder}-seen", target, None, options=LoadOptions(views=given))
            check_same("loaded", dict(target.state_dict()), dict(model.state_dict()))
            fsdp_optim.save(f"{folder}-live", model, None)
            with self.assertRaisesRegex(StateError, "is the name of a fused parameter and of a part"):
                fsdp_optim.load(f"{folder}-live", target, None, strict=False, options=LoadOptions(views=given))
            undone = ConvertOptions(views=[view.inverse for view in given])
            fsdp_optim.convert(f"{folder}-seen", f"{folder}-undone", options=undone)
            for source in ("live", "undone"):
                target = model_of({view.name: SQUARE * 0 for view in given})
                fsdp_optim.load(f"{folder}-{source}", target, None)
                check_same(source, dict(target.state_dict()), dict(model.state_dict()))

    def test_parts_of_parts_names(self) -> None:
        """A part has the name of another fused parameter, whose parts are there: an unfused run has saved both."""
        views = [View("x", "(a + b) c", {"y": "a c", "z": "b c"}), View("y", "c d", {"p": "d c"})]
        fused = model_of({"x": W13, "y": W})
        fsdp_optim.save(self.folder, model_of({"y": W13[:2], "z": W13[2:], "p": W.T.contiguous()}), None)
        target = model_of({"x": W13 * 0, "y": W * 0})
        fsdp_optim.load(self.folder, target, None, options=LoadOptions(views=views))
        check_same("loaded", dict(target.state_dict()), dict(fused.state_dict()))

    def test_files_of_other_libraries_with_such_names(self) -> None:
        """Weights alone are those of a hub, in the order of parts; with an optimizer they may be those of the trainer."""
        view = View("q", "r c", {"q": "c r"})
        model, target = model_of({"q": SQUARE}), model_of({"q": SQUARE * 0})
        optim, fresh = (
            torch.optim.SGD(model.parameters(), momentum=0.5),
            torch.optim.SGD(target.parameters(), momentum=0.5),
        )
        model.q.sum().backward()
        optim.step()
        path = self.folder.with_suffix(".pt")
        torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, path)
        with self.assertRaisesRegex(StateError, "q: is the name of a fused parameter and of a part"):
            fsdp_optim.load(path, target, fresh, options=LoadOptions(views=[view]))
        fsdp_optim.load(path, target, fresh)
        check_same("live", dict(target.state_dict()), dict(model.state_dict()))
        self.folder.mkdir()
        save_file({"q": SQUARE}, self.folder / "model.safetensors")
        fsdp_optim.load(self.folder, target, None, options=LoadOptions(views=[view]))
        check_same("of a hub", dict(target.state_dict()), {"q": SQUARE.T.contiguous()})

    def test_a_tree_with_such_names(self) -> None:
        view = View("q", "r c", {"q": "c r"})
        fsdp_optim.save(f"{self.folder}-seen", model_of({"q": SQUARE}), None, options=SaveOptions(views=[view]))
        dcp.save({"model": {"q": SQUARE}}, checkpoint_id=f"{self.folder}-live")
        for kind in ("seen", "live"):
            tree = {"model": {"q": torch.zeros(4, 4)}}
            load = functools.partial(dcp.load, tree, checkpoint_id=f"{self.folder}-{kind}")
            if kind == "live":
                with self.assertRaisesRegex(StateError, "q: is the name of a fused parameter and of a part"):
                    load(options=LoadOptions(views=[view]))
                load()
            else:
                load(options=LoadOptions(views=[view]))
            check_same(kind, tree["model"], {"q": SQUARE})
