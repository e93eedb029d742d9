"""`load` takes files of torch.save with full checkpoints, as torch itself, fairscale and trainers write them."""

from __future__ import annotations

import argparse
import unittest
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoints import Whole, buffers_of, load, mine, scramble
from kit.compare import Differs, check_same, error_text, refused_on_ranks
from kit.folders import SharedFolder
from kit.optimizers import OfModel, sgd
from kit.store_calls import url_of
from kit.torch_files import make_refused, oracle, whole, write_all, write_units
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.foreign.archive.torch_archive import read_archive
from fsdp_optim.formats.base.index import stored_in
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import OpenFiles
from fsdp_optim.testing import run_on_ranks

SIZES = (1, 2, 3)

# ------------------------------------------------------------------------------------------- writers


def load_units(root: Path) -> None:
    """The same units at another size; another wrapper does not know the order of units."""
    with cpu():
        alike, target = (Trained("fairscale flat", sgd, steps) for steps in (STEPS, 0))
        scramble(target)
        load(root / "fairscale-units.pt", target, compare=True)
        check_same("units", mine(target), mine(alike))
        other = Trained("FSDP2", sgd, 0)
        refused_on_ranks(
            "other units", partial(load, root / "fairscale-units.pt", other), "StateError", "by FSDP unit", "rekey"
        )


# ------------------------------------------------------------------------------------------- loads

LOADS = (
    ("fsdp1-names.pt", "FSDP2"),
    ("fsdp1-names.pt", "FSDP1 flat"),
    ("fsdp1-ids.pth", "FSDP1 orig"),
    ("fsdp1-ids.pth", "fairscale flat"),
    ("fsdp2.pt", "FSDP1 flat"),
    ("fsdp2.pt", "FSDP2"),
    ("flat.pt", "FSDP1 orig"),
    ("flat.pt", "plain"),
    ("ddp.ckpt", "FSDP2"),
    ("ddp.ckpt", "fairscale non-flat"),
    ("ddp-legacy.ckpt", "DDP"),
    ("ddp-legacy.ckpt", "fairscale flat"),
    ("olmo", "FSDP2"),
    ("pytorch_model_fsdp", "FSDP1 orig"),
    ("hugging", "DDP"),
)
EXTRAS: Mapping[str, Any] = {
    "fsdp1-names.pt": {"epoch": 3},
    "fsdp1-ids.pth": {"loss": torch.tensor(0.5)},
    "olmo": {"train": {"global_step": 7, "seen": torch.arange(3)}},
    "pytorch_model_fsdp": {"scheduler": {"last_epoch": 5}},
}


def load_all(root: Path, loads: Sequence[tuple[str, str]]) -> None:
    """Each file in its wrapper: values, buffers, state and groups are those of training without files, bit for bit."""
    for name, wrapper in loads:
        with cpu():
            alike, target = whole(wrapper), whole(wrapper, 0)
            scramble(target)
            restored = load(root / name, target, compare=True)
            what = f"{name} -> {wrapper} on {dist.get_world_size()} ranks"
            check_same(what, mine(target), mine(alike))
            check_same(f"{what}: names", (restored.missing_keys, restored.unexpected_keys), ((), ()))
            if name in EXTRAS:
                check_same(f"{what}: extra", dict(restored.state), EXTRAS[name])
            for run in (target, alike):
                run.step([STEPS])
            check_same(f"{what}: trained on", mine(target), mine(alike))


def load_parts(root: Path) -> None:
    """Weights alone, an optimizer alone, and a model without the optimizer of its file."""
    with cpu():
        alike, target = whole("FSDP2"), whole("FSDP2", 0)
        scramble(target)
        for name in ("bare-model.pt", "olmo/model.pt", "ddp.ckpt"):
            scramble(target)
            fsdp_optim.load(root / name, target.model, options=fsdp_optim.LoadOptions(compare=True))
            check_same(name, mine(target)["values"], mine(alike)["values"])
            check_same(name, buffers_without_scratch(target), buffers_without_scratch(alike))
        scramble(target)
        before = mine(target)["values"]
        for strict in (True, False):
            asked = partial(load, root / "bare-optim.pt", target, strict=strict)
            refused_on_ranks(f"no weights, strict={strict}", asked, "StateError", "no weights", 'weights="none"')
        load(root / "bare-optim.pt", target, compare=True, weights="none")
        check_same("the state", mine(target)["state"], mine(alike)["state"])
        check_same("the weights", mine(target)["values"], before)
        refused_on_ranks(
            "no optimizer", partial(fsdp_optim.load, root / "bare-optim.pt", target.model), "StateError", "no weights"
        )
        refused_on_ranks(
            "no state", partial(load, root / "bare-model.pt", target), "StateError", "without an optimizer"
        )


def buffers_without_scratch(trained: Trained) -> dict[str, Tensor]:
    return {name: value for name, value in buffers_of(trained).items() if not name.endswith("scratch")}


def load_fairscales(root: Path) -> None:
    """fairscale's dicts of all versions; what a list of numbers of all ranks has, is one number."""
    wanted = {name: dict(values) for name, values in Oracle(sgd).by_name().items()}
    for name, wrapper in (
        ("fairscale.pt", "FSDP2"),
        ("fairscale.pt", "FSDP1 flat"),
        ("fairscale-first.pt", "plain"),
        ("fairscale-first.pt", "FSDP1 orig"),
        ("fairscale-lists.pt", "FSDP2"),
    ):
        with cpu():
            alike, target = (Trained(wrapper, sgd, steps) for steps in (STEPS, 0))
            scramble(target)
            load(root / name, target, strict="lists" not in name)
            check_same(f"{name}: values", mine(target)["values"], mine(alike)["values"])
            state = target.gather(None, "name")["state"]
            scale = {"scale": torch.tensor(2.5)} if "lists" in name else {}
            check_same(
                f"{name}: state", state, {key: {**values, **scale} for key, values in wanted.items()}, in_order=False
            )
    with cpu():
        target = Trained("FSDP2", sgd, 0)
        refused_on_ranks(
            "lists", partial(load, root / "fairscale-lists-differ.pt", target), "StateError", "scale", "differs between"
        )


def load_what_only_its_class_can_make(root: Path) -> None:
    """An object of another class is withheld by name, and everything else is loaded."""
    with cpu():
        target = whole("FSDP2", 0)
        restored = load(root / "ddp.ckpt", target)
        check_same("a plain value", restored.state["scheduler"], {"last_epoch": 2})
        kind, text = error_text(lambda: restored.state["args"])
        if kind != "CheckpointError" or "argparse.Namespace" not in text or "allow_pickle=True" not in text:
            raise Differs(f"{kind}: {text}")
        again = load(root / "ddp.ckpt", target, allow_pickle=True)
        check_same("with allow_pickle", again.state["args"], argparse.Namespace(lr=0.5))
        check_same("with allow_pickle", again.state["scheduler"], {"last_epoch": 2})
        of_folder = load(root / "hugging", target, allow_pickle=True)
        check_same("a file", of_folder.state["training_args"], argparse.Namespace(lr=0.5))


# ------------------------------------------------------------------------------------------- damage

REFUSED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cut.pt", "CheckpointError", ("cut.pt",)),
    ("short-storage.pt", "CheckpointError", ("short-storage.pt", "storage 3 has 1 bytes")),
    ("no-storage.pt", "CheckpointError", ("no-storage.pt", "data/3 is missing")),
    ("no-pickle.pt", "CheckpointError", ("no-pickle.pt", "data.pkl is missing")),
    ("big-endian.pt", "CheckpointError", ("big-endian.pt", "byte order")),
    ("sparse.pt", "CheckpointError", ("sparse.pt", "'stem.weight'", "sparse")),
    ("sharded.pt", "CheckpointError", ("sharded.pt", "DTensor")),
    ("sparse-state.pt", "CheckpointError", ("sparse-state.pt", "x of ", "sparse")),
    ("evil-group.pt", "CheckpointError", ("evil-group.pt", "lr of a param group", "system")),
    ("evil.pt", "CheckpointError", ("evil.pt", "system")),
    ("module.pt", "CheckpointError", ("module.pt", "torch.nn.modules.linear.Linear", "state_dict()")),
    ("list.pt", "CheckpointError", ("list.pt", "a list")),
    ("two-models.pt", "CheckpointError", ("two-models.pt", "'model', 'state_dict'")),
    ("two-optims.pt", "CheckpointError", ("two-optims.pt", "'optimizer', 'optim'")),
    ("nothing.pt", "CheckpointError", ("nothing.pt", "'epoch', 'args'")),
    ("other-shape.pt", "StateError", ("stem.weight", "[3, 3]", "nothing was loaded")),
    ("no-weight.pt", "StateError", ("stem.weight", "the checkpoint does not")),
    ("other-ids.pt", "StateError", ("2 parameters",)),
    ("several.pt", "StateError", ("has 2 optimizers", "1 was given")),
    ("two-files", "CheckpointError", ("a.pt, b.pt", "path of one")),
    ("no-files", "CheckpointError", ("no-files",)),
    ("missing", "CheckpointError", ("pytorch_model-00002-of-00002.bin",)),
    ("leads-out", "CheckpointError", ("../evil.pt",)),
)


def refuse_all(root: Path) -> None:
    """On all ranks alike, and nothing is loaded."""
    with cpu():
        target = whole("FSDP2", 1)
        before = mine(target)
        for name, kind, words in REFUSED:
            refused_on_ranks(name, partial(load, root / "refused" / name, target), kind, *words)
            check_same(f"{name}: what was there", mine(target), before)
        if (root / "ran").exists():
            raise Differs("a command of a file was run")


# ------------------------------------------------------------------------------------------- more optimizers than one


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam for the unit `stem`, SGD for the rest."""
    named = list(model.named_parameters())
    stem = [param for name, param in named if "stem" in name.split(".")]
    rest = [param for name, param in named if "stem" not in name.split(".")]
    return [torch.optim.Adam(stem, lr=0.5), torch.optim.SGD(rest, lr=0.25, momentum=0.5)]


def load_several(root: Path) -> None:
    """A list of optimizers takes the list of a file, by id and by name."""
    two = OfModel(two_optimizers)
    for name in ("two-ids.pt", "two-names.pt"):
        for wrapper in ("FSDP2", "FSDP1 flat", "DDP"):
            with cpu():
                alike, target = whole(wrapper, make=two), whole(wrapper, 0, two)
                scramble(target)
                load(root / name, target, compare=True)
                check_same(f"{name} -> {wrapper}", mine(target), mine(alike))
    with cpu():
        single = whole("FSDP2", 0)
        refused_on_ranks(
            "one for two", partial(load, root / "two-ids.pt", single), "StateError", "2 optimizers", "a list"
        )


class TorchFilesTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(write_all, 2, cls.root)

    def test_every_file_loads(self) -> None:
        """Each at one size."""
        for index, size in enumerate(SIZES):
            run_on_ranks(load_all, size, self.root, LOADS[index :: len(SIZES)])

    @pytest.mark.slow
    def test_every_file_loads_at_every_size(self) -> None:
        for size in SIZES:
            run_on_ranks(load_all, size, self.root, LOADS)

    def test_weights_alone_and_an_optimizer_alone(self) -> None:
        run_on_ranks(load_parts, 2, self.root)

    @expand(soon=[3], later=[2])
    def test_fairscales_dicts_of_all_versions(self, size: int) -> None:
        run_on_ranks(load_fairscales, size, self.root)

    @expand(soon=[3], later=[1, 2])
    def test_fairscales_dict_of_several_units(self, size: int) -> None:
        run_on_ranks(write_units, 2, self.root)
        run_on_ranks(load_units, size, self.root)

    def test_converted_without_ranks(self) -> None:
        """Into a checkpoint of this library, which has the same values."""
        fsdp_optim.convert(self.root / "fsdp1-names.pt", self.root / "converted")
        target, wanted = whole("plain", 0), oracle()
        scramble(target)
        fsdp_optim.load(
            self.root / "converted", target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True)
        )
        check_same("model", dict(target.model.state_dict()), dict(wanted.model.state_dict()))
        state = target.optim.state_dict()["state"]
        check_same("state", state, wanted.optim.state_dict()["state"], in_order=False)

    def test_objects_of_other_classes(self) -> None:
        run_on_ranks(load_what_only_its_class_can_make, 2, self.root)

    def test_what_is_not_whole_or_not_clear_is_refused(self) -> None:
        make_refused(self.root)
        run_on_ranks(refuse_all, 2, self.root)

    def test_several_optimizers(self) -> None:
        trained = Oracle(OfModel(two_optimizers), STEPS, Whole)
        model, optims = trained.model.state_dict(), [optim.state_dict() for optim in trained.optim]
        torch.save({"state_dict": model, "optimizer_states": optims}, self.root / "two-ids.pt")
        names = {param: name for name, param in trained.model.named_parameters()}
        by_name = [
            {
                "state": {names[param]: values for param, values in optim.state.items()},
                "param_groups": [
                    {**group, "params": [names[param] for param in group["params"]]} for group in optim.param_groups
                ],
            }
            for optim in trained.optim
        ]
        torch.save({"model": model, "optimizer": dict(zip("ab", by_name, strict=True))}, self.root / "two-names.pt")
        run_on_ranks(load_several, 2, self.root)

    def test_from_a_bucket(self) -> None:
        bucket = MemoryBucket()
        wanted = oracle()
        bucket.put("run/last.pt", (self.root / "fsdp2.pt").read_bytes())
        for place in ("run/last.pt", "run"):
            target = whole("plain", 0)
            scramble(target)
            with url_of(ObjectStore(bucket, place, PROBE)) as url:
                load(url, target, compare=True)
            check_same(place, dict(target.model.state_dict()), dict(wanted.model.state_dict()))
            check_same(place, target.optim.state_dict()["state"], wanted.optim.state_dict()["state"])

    def test_a_dtensor_is_given_to_a_stand_in(self) -> None:
        """For formats whose files have the part of one rank: the description, and the state with the local tensor."""
        names = {"torch.distributed.tensor.DTensor": Described}
        with closing(OpenFiles.at(self.root)) as opened:
            described = read_archive(opened, "sharded.pt", stand_ins=names).value["model"]["stem.weight"]
        dtype, shape = described.description[:2]
        self.assertEqual((dtype, tuple(shape)), (torch.float32, (7, 5)))
        self.assertEqual([stored.shape for stored in stored_in(described.state)], [(4, 5)])


class Described:
    """A stand-in for a tensor subclass."""

    def __init__(self, *description: Any) -> None:
        self.description = description

    def __setstate__(self, state: Any) -> None:
        self.state = state


if __name__ == "__main__":
    unittest.main()
