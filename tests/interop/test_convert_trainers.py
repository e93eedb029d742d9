"""Checkpoints of trainers that are converted whole: an HF Trainer's folder, Lightning's with its random states, empty tensors."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.hugging_face import on_cpu, tiny_llama, trainer_of
from kit.lightning_runs import data, module, quiet, strategy, trainer
from kit.options import as_options, state_for
from parameterized import parameterized
from torch import nn
from torch.utils.data import DataLoader

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.offline.conversion.group_order import by_group
from fsdp_optim.plugins import StoredTensor
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
QUIET: dict[str, Any] = {"durable": False, "progress": False}
FORMATS = ("torch_file", "torch", "safetensors", "dcp")


def names_in_order(model: Any, optim: Any) -> list[str]:
    """The names of the ids of an optimizer."""
    name_of = {param: name for name, param in model.named_parameters()}
    return [name_of[param] for group in optim.param_groups for param in group["params"]]


class TrainerTest(SharedFolder):
    """A folder of transformers' own Trainer, without a plug-in: two groups by ids, and a pickled object beside them."""

    @classmethod
    def fill(cls) -> None:
        with on_cpu("none"):
            run = trainer_of("none", cls.root / "run", model=tiny_llama(), max_steps=2, weight_decay=0.1)
            run.train()
            cls.names = names_in_order(run.model, run.optimizer)
            cls.sizes = [len(group["params"]) for group in run.optimizer.param_groups]
            cls.weights = {name: value.clone() for name, value in run.model.state_dict().items()}
        cls.source = cls.root / "run" / "checkpoint-2"

    def check(self, target: Path, format: str) -> None:
        """All that the Trainer's own files have is in the result, under the right names."""
        if format not in ("torch_file",):
            fsdp_optim.convert(
                target, target.with_suffix(".pt"), format="torch_file", **as_options(fsdp_optim.ConvertOptions, **QUIET)
            )
            target = target.with_suffix(".pt")
        converted = torch.load(target, weights_only=True)
        check_same("weights", converted["model"], self.weights, in_order=False)
        wanted_optim = torch.load(self.source / "optimizer.pt", weights_only=True)
        optim = converted["optimizer"]
        ids = [name for group in optim["param_groups"] for name in group["param_names"]]
        self.assertEqual([len(group["params"]) for group in optim["param_groups"]], self.sizes)
        self.assertEqual(ids, self.names)
        check_same(
            "state",
            {ids[n]: values for n, values in optim["state"].items()},
            {self.names[n]: values for n, values in wanted_optim["state"].items()},
            in_order=False,
        )
        for group, wanted in zip(optim["param_groups"], wanted_optim["param_groups"], strict=True):
            hyper = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            check_same("groups", hyper, {k: v for k, v in wanted.items() if k != "params"}, in_order=False)
        check_same("scheduler", converted["scheduler"], torch.load(self.source / "scheduler.pt", weights_only=True))
        self.assertNotIn("training_args", converted)

    @parameterized.expand([(format, by) for format in FORMATS for by in ("names", "model")])
    def test_converted(self, format: str, by: str) -> None:
        """`training_args.bin` is left out, and a warning names it; the decay groups of the Trainer are found by shapes."""
        self.assertGreater(len([size for size in self.sizes if size]), 1)
        self.assertNotEqual(self.names, [name for name, _ in tiny_llama().named_parameters()])
        target = self.own_folder() / ("to.pt" if format == "torch_file" else "to")
        given: Any = {"param_names": self.names} if by == "names" else {"model": tiny_llama(1)}
        with self.assertLogs("fsdp_optim", "WARNING") as logged:
            fsdp_optim.convert(
                self.source,
                target,
                format=format,
                **as_options(fsdp_optim.ConvertOptions, **given, **QUIET),
            )
        lines = [line for line in logged.output if "left out of the new checkpoint" in line]
        self.assertEqual(len(lines), 1)
        self.assertRegex(lines[0], r"training_args\.bin: training_args .*TrainingArguments.*allow_pickle=True")
        self.check(target, format)

    def test_with_the_object(self) -> None:
        """Who trusts the author gets all of it."""
        target = self.own_folder() / "to"
        fsdp_optim.convert(
            self.source,
            target,
            **as_options(fsdp_optim.ConvertOptions, **QUIET, param_names=self.names, allow_pickle=True),
        )
        arguments = fsdp_optim.load(target, options=fsdp_optim.LoadOptions(allow_pickle=True)).state["training_args"]
        self.assertEqual(type(arguments).__name__, "TrainingArguments")

    def test_what_is_left_out_for_its_size_is_an_error(self) -> None:
        """No tensors are lost for a warning."""
        folder = self.own_folder()
        average = {"a": torch.zeros(17 << 20)}
        torch.save({"model": dict(nn.Linear(2, 2).state_dict()), "average of weights": [average]}, folder / "a.pt")
        with self.assertRaisesRegex(CheckpointError, r"a\.pt: average of weights has tensors of \d+ bytes"):
            fsdp_optim.convert(folder / "a.pt", folder / "to", **as_options(fsdp_optim.ConvertOptions, **QUIET))
        self.assertFalse((folder / "to").exists())


def stored(*shape: int) -> StoredTensor:
    return StoredTensor("x", "float32", shape, "f", 0)


def full_of(*groups: list[tuple[int, ...] | None]) -> dict[str, Any]:
    """A full dict by id. None: a parameter without state."""
    flat = [shape for group in groups for shape in group]
    state = {n: {"exp_avg": stored(*shape), "step": stored()} for n, shape in enumerate(flat) if shape is not None}
    ids = iter(range(len(flat)))
    return {"state": state, "param_groups": [{"params": [next(ids) for _ in group]} for group in groups]}


class GroupOrderTest(unittest.TestCase):
    SHAPES = {"a": (3, 2), "b": (3,), "c": (4, 3), "d": (4,), "e": (3, 2), "f": (3,)}

    @parameterized.expand(
        [
            ("interleaved", [(3, 2), (4, 3), (3, 2)], [(3,), (4,), (3,)], [["a", "c", "e"], ["b", "d", "f"]]),
            ("one after the other", [(3, 2), (3,), (4, 3)], [(4,), (3, 2), (3,)], [["a", "b", "c"], ["d", "e", "f"]]),
            ("an empty group", [], [(3, 2), (3,), (4, 3), (4,), (3, 2), (3,)], [[], ["a", "b", "c", "d", "e", "f"]]),
            ("one without state", [(3, 2), None, (3, 2)], [(3,), (4,), (3,)], [["a", "c", "e"], ["b", "d", "f"]]),
        ]
    )
    def test_one_way(self, _: str, first: list[Any], second: list[Any], wanted: list[list[str]]) -> None:
        self.assertEqual(by_group("here", full_of(first, second), list(self.SHAPES), self.SHAPES), wanted)

    @parameterized.expand(
        [
            ("two ways", [(3, 2)], [None] * 5, "several ways"),
            ("no state at all", [None] * 3, [None] * 3, "several ways"),
            ("no way", [(4, 3), (3, 2), (3, 2)], [(3,), (4,), (3,)], "fit no order"),
        ]
    )
    def test_otherwise_the_caller_is_asked(self, _: str, first: list[Any], second: list[Any], words: str) -> None:
        with self.assertRaisesRegex(StateError, rf"^here: .*2 param groups .*{words}.*param_names="):
            by_group("here", full_of(first, second), list(self.SHAPES), self.SHAPES)

    def test_many_equal_parameters(self) -> None:
        """Too many ways to follow are several; they are not followed one by one."""
        shapes = dict.fromkeys(map(str, range(2000)), (3, 2))
        with self.assertRaisesRegex(StateError, "several ways"):
            by_group("here", full_of(*[[(3, 2)] * 500] * 4), list(shapes), shapes)
        wide = {name: (3, 2) if number % 2 else (3,) for number, name in enumerate(shapes)}
        made = by_group("here", full_of([(3, 2)] * 1000, [(3,)] * 1000), list(wide), wide)
        self.assertEqual(made, [[*wide][1::2], [*wide][::2]])

    def test_ids_in_another_order_are_not_given_other_names(self) -> None:
        """Also with one group: what has another shape than its parameter was before written under its name."""
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optim = torch.optim.Adam(reversed(list(model.parameters())))
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, folder / "a.pt")
        with self.assertRaisesRegex(StateError, "exp_avg has shape .*the parameter has .*order"):
            fsdp_optim.convert(
                folder / "a.pt", folder / "to", model=model, **as_options(fsdp_optim.ConvertOptions, **QUIET)
            )
        self.assertFalse((folder / "to").exists())


def save_by_lightning(root: str) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    with quiet():
        numpy.random.seed(5)
        saves = ModelCheckpoint(dirpath=root, filename="{step}", save_top_k=-1, every_n_train_steps=4)
        trainer(strategy("FSDP2"), callbacks=[saves], max_epochs=1).fit(module(), DataLoader(data(), batch_size=2))


class LightningTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(save_by_lightning, 2, str(cls.root / "run"))
        cls.source = cls.root / "run" / "step=4.ckpt"

    @parameterized.expand(["torch", "torch_file"])
    def test_there_and_back(self, format: str) -> None:
        """Also the random states of each rank, of which numpy's is an array."""
        fsdp_optim.convert(
            self.source, self.root / format, format=format, **as_options(fsdp_optim.ConvertOptions, **QUIET)
        )
        for path in (self.root / format).glob("*.pt"):
            torch.load(path, weights_only=True)
        fsdp_optim.convert(
            self.root / format, self.root / f"back-{format}", **as_options(fsdp_optim.ConvertOptions, **QUIET)
        )
        got, wanted = fsdp_optim.load(self.root / f"back-{format}"), fsdp_optim.load(self.source)
        self.assertEqual(len(wanted.all_ranks), 2)
        for rank in range(2):
            got_numpy, expected = (
                restored.all_ranks[rank]["of_this_rank"]["random"]["numpy"] for restored in (got, wanted)
            )
            self.assertEqual((type(got_numpy[1]), *got_numpy[::2]), (numpy.ndarray, *expected[::2]))
            numpy.testing.assert_array_equal(got_numpy[1], expected[1])
        check_same("keys", sorted(got.state), sorted(wanted.state))


EMPTY: dict[str, Any] = {
    "empty": torch.zeros(0),
    "rows": torch.zeros(3, 0, dtype=torch.int64),
    "in a list": [torch.zeros(0), torch.ones(2)],
    "deep": {"inside": {"none": torch.zeros(0, 2, dtype=torch.bfloat16)}},
    "conjugated": torch.zeros(0, dtype=torch.complex64).conj(),
    "no strides": torch.empty_strided((0,), (0,)),
    "one of many": torch.arange(10.0)[::10],
    "of numpy": torch.from_numpy(numpy.zeros(0)),
}


class EmptyTest(SharedFolder):
    @parameterized.expand([(name,) for name in EMPTY])
    def test_among_extras(self, name: str) -> None:
        """Saved by this library, by torch and by torch.distributed.checkpoint, and converted to every format, and from it."""
        root, model = self.own_folder(), nn.Linear(3, 2)
        extra = {name.replace(" ", "_"): EMPTY[name], "epoch": 3}
        wanted = {key: plain(value) for key, value in extra.items()}
        fsdp_optim.save(
            root / "ours",
            model,
            state=state_for(extra, [EMPTY[name]]),
            options=fsdp_optim.SaveOptions(durable=False),
        )
        torch.save({"model": dict(model.state_dict()), **extra}, root / "torch.pt")
        dcp.save({"model": dict(model.state_dict()), **extra}, checkpoint_id=root / "dcp")
        for source in ("ours", "torch.pt", "dcp"):
            of_ranks = {"per_rank_extra": plain([EMPTY[name]])} if source == "ours" else {}
            check_same(source, plain(fsdp_optim.load(root / source).state), {**wanted, **of_ranks}, in_order=False)
            for format in FORMATS:
                target = root / f"{source}-{format}"
                fsdp_optim.convert(
                    root / source, target, format=format, **as_options(fsdp_optim.ConvertOptions, **QUIET)
                )
                fsdp_optim.convert(
                    target, root / f"{source}-{format}-back", **as_options(fsdp_optim.ConvertOptions, **QUIET)
                )
                for place in (target, root / f"{source}-{format}-back"):
                    got = fsdp_optim.load(place)
                    check_same(f"{source} to {format}", plain(got.state), {**wanted, **of_ranks}, in_order=False)


def plain(value: Any) -> Any:
    """A value with tensors whose strides are those of new ones."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return torch.empty(value.shape, dtype=value.dtype).copy_(value) if isinstance(value, torch.Tensor) else value
