"""save(format="dcp") as a save: committed like any other, replaced, counted and refused by name; in folders and in buckets."""

from __future__ import annotations

import enum
import io
import tempfile
import unittest
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.compare import check_same, error_text
from kit.folders import InFolder
from kit.optimizers import adam
from kit.options import as_options, state_for
from kit.servers import new_bucket, shared
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.buckets.s3 import S3Bucket
from fsdp_optim.checkpoint.save.writing import RankWriter
from fsdp_optim.testing import run_on_ranks

Options = dict[str, Any]
QUICK: Options = {"durable": False, "progress": False}


def model_of(seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    return model, optim


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    """The values that stock torch loads of `model_of`."""
    weights = {name: torch.zeros_like(weight) for name, weight in model_of()[0].state_dict().items()}
    dcp.load({"model": weights}, checkpoint_id=path, no_dist=True)
    return weights


class Kind(enum.Enum):
    FIRST = 1


class KeyedOptimizer(torch.optim.Optimizer):
    """An optimizer whose dicts have other keys than str."""

    def __init__(self, params: Any, schedule: Any = None) -> None:
        super().__init__(params, {"lr": 0.1, "schedule": schedule or {0: 0.1, 10: {None: 0.01}}})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                factors = {0: torch.eye(2), 1: torch.eye(3), (2, 3): "last"}
                self.state[param].update({0: torch.ones_like(param), "factors": factors, 1: 5})


class KeyedModel(nn.Module):
    """A model whose extra state has other keys than str."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.kept: Any = {0: "a", 1: torch.ones(1), "deep": [{2: 3}]}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def save_to_bucket(root: str, storage: Options) -> None:
    """Some wrappers with small parts, once over what is there, and in the background; then stock torch loads the objects."""
    with cpu():
        asked: Options = {**QUICK, "storage_options": storage, "format": "dcp", "max_file_size": 900}
        first, second = (Trained("fairscale flat", adam, steps) for steps in (1, STEPS))
        fsdp_optim.save(f"{root}/step-1", first.model, first.optim, **as_options(fsdp_optim.SaveOptions, **asked))
        handle = fsdp_optim.async_save(
            f"{root}/step-1", second.model, second.optim, overwrite=True, **as_options(fsdp_optim.SaveOptions, **asked)
        )
        handle.wait()
        fsdp_optim.save(
            f"{root}/step-2",
            first.model,
            first.optim,
            step=2,
            state={"a": torch.ones(3)},
            **as_options(fsdp_optim.SaveOptions, **asked),
        )
        check_same("latest", fsdp_optim.latest(root, storage_options=storage), f"{root}/step-2")


def fail_in_turn(folder: Path) -> None:
    """A save over another one, in which each rank in turn cannot write, or cannot commit."""
    trained = Trained("FSDP2", adam)
    fsdp_optim.save(
        folder / "a", trained.model, trained.optim, format="dcp", **as_options(fsdp_optim.SaveOptions, **QUICK)
    )
    before = all_bytes(folder / "a") if dist.get_rank() == 0 else {}
    trained.step(range(STEPS, STEPS + 1))
    for victim in range(dist.get_world_size()):
        for name in ("write", "finish"):
            broken = mock.patch.object(RankWriter, name, side_effect=OSError(28, "No space left on device"))
            with broken if dist.get_rank() == victim else nullcontext():
                kind, text = error_text(
                    lambda: fsdp_optim.save(
                        folder / "a",
                        trained.model,
                        trained.optim,
                        format="dcp",
                        overwrite=True,
                        **as_options(fsdp_optim.SaveOptions, **QUICK),
                    )
                )
            check_same("the rank is named", (f"rank {victim}" in text, kind != ""), (True, True))
            dist.barrier()
            if dist.get_rank() == 0:
                check_same("the earlier one is whole", all_bytes(folder / "a"), before)
                check_same("nothing is left", [path.name for path in folder.iterdir()], ["a"])
            dist.barrier()
    fsdp_optim.save(
        folder / "a",
        trained.model,
        trained.optim,
        format="dcp",
        overwrite=True,
        **as_options(fsdp_optim.SaveOptions, **QUICK),
    )


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fetch(bucket: S3Bucket, folder: Path) -> None:
    """All objects of a bucket as files."""
    for entry in bucket.list(""):
        path = folder / entry.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bucket.read(entry.key)[0])


class BucketTest(unittest.TestCase):
    def test_stock_torch_loads_the_objects(self) -> None:
        """Files of several parts and of one, beside the manifest and in a folder of their own."""
        storage = shared("moto")
        name = new_bucket(storage)
        run_on_ranks(save_to_bucket, 2, f"s3://{name}/run", storage)
        with tempfile.TemporaryDirectory() as folder:
            fetch(S3Bucket(name, storage), Path(folder))
            names = [path.name for path in Path(folder, "run/step-1").iterdir()]
            self.assertEqual((len(names), ".metadata" in names), (2, True), "a folder of the files, and the manifest")
            check_loads(Path(folder, "run/step-1"), STEPS)
            check_loads(Path(folder, "run/step-2"), 1)
            values: dict[str, Any] = {"a": torch.zeros(3)}
            dcp.load(values, checkpoint_id=Path(folder, "run/step-2"), no_dist=True)
            check_same("extra", values["a"], torch.ones(3))


def check_loads(path: Path, steps: int) -> None:
    oracle = Oracle(adam, steps)
    weights = {name: torch.zeros_like(weight) for name, weight in oracle.model.state_dict().items()}
    state = {
        name: {key: torch.zeros_like(value) for key, value in values.items()}
        for name, values in oracle.by_name().items()
    }
    dcp.load({"model": weights, "optimizer": {"state": state}}, checkpoint_id=path, no_dist=True)
    check_same("weights", weights, dict(oracle.model.state_dict()))
    check_same("state", state, oracle.by_name())


class FolderTest(InFolder):
    def save(self, name: str, seed: int = 0, **options: Any) -> Path:
        fsdp_optim.save(
            self.root / name,
            *model_of(seed),
            **as_options(fsdp_optim.SaveOptions, **{"format": "dcp", **QUICK, **options}),
        )
        return self.root / name

    def test_a_save_that_fails_leaves_the_earlier_one(self) -> None:
        run_on_ranks(fail_in_turn, 2, self.root)
        check_loads(self.root / "a", STEPS + 1)

    def test_overwrite(self) -> None:
        """The files of the earlier one go, what somebody has put beside them stays; one of torch's own is replaced, too."""
        path = self.save("a", max_file_size=40)
        (path / "note.txt").write_text("kept")
        self.save("a", 1, overwrite=True)
        names = sorted(file.name for file in path.iterdir() if file.name != "extra")
        self.assertEqual(names, [".metadata", "model.distcp", "note.txt", "optim.distcp", "values.distcp"])
        check_same("weights", weights_in(path), dict(model_of(1)[0].state_dict()))
        torchs = self.root / "torchs"
        dcp.save({"model": model_of(2)[0].state_dict()}, checkpoint_id=torchs, no_dist=True)
        self.assertIsNotNone(list(torchs.glob("__0_0.distcp")))
        with self.assertRaisesRegex(CheckpointError, "already exists"):
            self.save("torchs")
        self.save("torchs", 3, overwrite=True)
        self.assertEqual(list(torchs.glob("__0_0.distcp")), [])
        check_same("weights", weights_in(torchs), dict(model_of(3)[0].state_dict()))

    def test_formats_do_not_replace_each_other(self) -> None:
        self.save("a")
        self.save("b", format="safetensors")
        for name, other in (("a", "safetensors"), ("b", "dcp")):
            with self.assertRaisesRegex(
                CheckpointError, "is not a checkpoint of the format to save, so overwrite=True does not replace it"
            ):
                self.save(name, format=other, overwrite=True)

    def test_an_earlier_one_of_the_other_format_is_no_leftover(self) -> None:
        """Where a save was killed between its renames, a save of another format beside it removes nothing."""
        for format, other in (("dcp", "safetensors"), ("safetensors", "dcp")):
            path = self.save(f"{format}-1", format=format)
            old = path.rename(path.with_name(f"{path.name}.old-{'0' * 16}"))
            self.save(f"{format}-2", format=other)
            self.assertTrue(old.exists(), format)
            self.save(f"{format}-1", 1, format=format, overwrite=True)
            self.assertFalse(old.exists(), format)

    def test_latest_counts_both_formats(self) -> None:
        """The one that was saved last, whatever it is; torch's own do not count."""
        dcp.save({"model": model_of()[0].state_dict()}, checkpoint_id=self.root / "torchs", no_dist=True)
        with self.assertRaisesRegex(CheckpointError, r"those of other programs: .*torchs"):
            fsdp_optim.latest(self.root)
        for number, format in enumerate(("dcp", "safetensors", "torchtitan", "dcp")):
            path = self.save(f"step-{number}", format=format, step=number)
            self.assertEqual(fsdp_optim.latest(self.root), path)
        steps = [checkpoint.step for checkpoint in fsdp_optim.checkpoints(self.root)]
        self.assertEqual(steps, [3, 2, 1, 0])
        damaged = self.root / "step-3" / ".metadata"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        self.assertEqual(fsdp_optim.latest(self.root), self.root / "step-2")

    def test_what_is_refused(self) -> None:
        """By name, and before anything is written."""
        for extra, name in (
            ({"model": 1}, "model"),
            ({"optimizer": {}}, "optimizer"),
            ({"per_rank_extra": 1}, "per_rank"),
        ):
            with self.assertRaisesRegex(CheckpointError, f"state.*{name}.*give the value another key"):
                self.save("a", extra=extra)
        with self.assertRaisesRegex(CheckpointError, r"state\['0.weight'\]"):
            self.save("a", extra={"0.weight": 1}, format="torchtitan")
        with self.assertRaisesRegex(CheckpointError, r"state\['x'\]\['y'\].*allow_pickle=True"):
            self.save("a", extra={"x": {"y": io.StringIO}})
        for format in ("pickle", None):
            with self.assertRaisesRegex(
                CheckpointError,
                f"format must be one of 'safetensors', 'dcp', 'torchtitan', or a Format .* not {format!r}",
            ):
                self.save("a", format=format)
        with self.assertRaisesRegex(CheckpointError, "save does not write the format 'torch'"):
            self.save("a", format="torch")
        self.assertEqual(list(self.root.iterdir()), [])
        self.save("a", extra={"x": {"y": io.StringIO}}, allow_pickle=True)
        values: dict[str, Any] = {"x": {"y": None}}
        dcp.load(values, checkpoint_id=self.root / "a", no_dist=True)
        self.assertIs(values["x"]["y"], io.StringIO)

    def test_keys_that_are_no_str(self) -> None:
        """They come back in a load of this library; stock torch turns them into str, in its own saves too."""
        model, optim = model_of()
        sched = torch.optim.lr_scheduler.MultiStepLR(optim, [2, 4])
        extra = {
            "scheduler": sched.state_dict(),
            "deep": {"list": [{1: torch.ones(2), None: {True: "a", (1, 2): []}}, "x"], "plain": {"1": 1}},
            7: {},
        }
        rank_extra = {3: {0.5: 1}}
        path = self.root / "keys"
        fsdp_optim.save(
            path,
            model,
            optim,
            state=state_for(extra, rank_extra),
            format="dcp",
            **as_options(fsdp_optim.SaveOptions, **QUICK),
        )
        restored = fsdp_optim.load(path, *model_of(1), options=fsdp_optim.LoadOptions(progress=False))
        check_same(
            "extra", restored.state["extra"], {**extra, "scheduler": {**sched.state_dict(), "milestones": {2: 1, 4: 1}}}
        )
        check_same("per rank", restored.state["per_rank_extra"], rank_extra)
        _, other = model_of()
        resumed = torch.optim.lr_scheduler.MultiStepLR(other, [2, 4])
        resumed.load_state_dict(restored.state["extra"]["scheduler"])
        for _ in range(4):
            sched.step()
            resumed.step()
        self.assertEqual(other.param_groups[0]["lr"], optim.param_groups[0]["lr"])
        stock = {"extra": {"scheduler": {"milestones": {2: 0, 4: 0}}}}
        dcp.load(stock, checkpoint_id=path, no_dist=True)
        self.assertEqual(stock["extra"]["scheduler"]["milestones"]["2"], 1)

    def test_keys_that_become_one(self) -> None:
        with self.assertRaisesRegex(CheckpointError, r"state\['a'\]: two keys become '1' in a DCP checkpoint"):
            self.save("a", extra={"a": {1: 2, "1": 3}})
        with self.assertRaisesRegex(CheckpointError, r"state\['per_rank_extra'\].*: two keys become 'None'"):
            self.save("a", per_rank_extra={None: 2, "None": 3})
        self.assertEqual(list(self.root.iterdir()), [])

    def test_keys_of_optimizers_and_modules(self) -> None:
        """Dicts in the state of an optimizer, in its hyperparameters, and in extra states have their own keys again."""
        for format in ("dcp", "torchtitan"):
            model, optim = KeyedModel(), KeyedOptimizer
            first = optim(model.parameters())
            first.step()
            path = self.root / format
            options = as_options(fsdp_optim.SaveOptions, **QUICK)
            fsdp_optim.save(path, model, first, state={"x": {7: {8: 9}}}, format=format, **options)
            fsdp_optim.convert(path, self.root / f"{format}-own", options=fsdp_optim.ConvertOptions(progress=False))
            for place in (path, self.root / f"{format}-own"):
                other = KeyedModel()
                other.kept = None
                second = optim(other.parameters())
                restored = fsdp_optim.load(place, other, second, options=fsdp_optim.LoadOptions(progress=False))
                check_same("state", second.state_dict(), first.state_dict(), in_order=False)
                check_same("module", other.kept, model.kept)
                check_same("common", dict(restored.state), {"x": {7: {8: 9}}})
        model = KeyedModel()
        clashing = KeyedOptimizer(model.parameters(), {0: 1, "0": 2})
        with self.assertRaisesRegex(
            CheckpointError, r"optimizer\['param_groups'\]\[0\]\['schedule'\]: two keys become '0'"
        ):
            fsdp_optim.save(
                self.root / "b", model, clashing, format="dcp", **as_options(fsdp_optim.SaveOptions, **QUICK)
            )

    def test_names_that_become_one(self) -> None:
        """They are refused by name, before anything is made, also where each rank has them."""
        for format, extra, named in (
            ("dcp", {"model.0.weight": torch.ones(4, 3)}, r"\['model'\]\['0.weight'\] and \['model.0.weight'\]"),
            ("dcp", {"optimizer.state": {"0.bias.step": 1}}, r"optimizer.state.0.bias.step: .* and .* have this key"),
            ("dcp", {"a.b": 1, "a": {"b": 1}}, r"a.b: \['a.b'\] and \['a'\]\['b'\] both have this key"),
            ("torchtitan", {"a.b": 1, "a": {"b": torch.ones(2)}}, r"a.b: .* and .* both have this key"),
            ("dcp", {"per_rank_extra.0": 1}, r"\['per_rank_extra.0'\]: .* keys that begin with 'per_rank_extra'"),
        ):
            with self.assertRaisesRegex(CheckpointError, named):
                self.save("a", extra=extra, format=format)
        with self.assertRaisesRegex(CheckpointError, r"per_rank_extra.0.x.a.b: .* both have this key"):
            self.save("a", per_rank_extra={"x": {"a.b": 1, "a": {"b": 2}}})
        with self.assertRaisesRegex(CheckpointError, "at most 524288 bytes of them"):
            self.save("a", extra={f"{number:0600}": 1 for number in range(1000)}, format="torchtitan")
        self.assertEqual(list(self.root.iterdir()), [])

    def test_parameters_that_are_called_as_groups_are_numbered(self) -> None:
        """The hyperparameters of group 0 and those of a parameter 0 have one key: they are one value, or are refused."""
        weights = nn.ParameterList([torch.ones(2), torch.ones(3)])
        for format in ("dcp", "torchtitan"):
            optim = torch.optim.SGD(weights, lr=0.25)
            path, options = self.root / format, as_options(fsdp_optim.SaveOptions, **QUICK)
            fsdp_optim.save(path, weights, optim, format=format, **options)
            other = torch.optim.SGD(weights, lr=0.5)
            fsdp_optim.load(path, weights, other)
            self.assertEqual(other.param_groups[0]["lr"], 0.25)
            of_each = [{"params": [weights[1]], "lr": 0.1}, {"params": [weights[0]], "lr": 0.2}]
            with self.assertRaisesRegex(CheckpointError, r"optimizer.param_groups.[01].lr: .* both have this key"):
                fsdp_optim.save(self.root / "b", weights, torch.optim.SGD(of_each), format=format, **options)
        self.assertEqual(sorted(path.name for path in self.root.iterdir()), ["dcp", "torchtitan"])

    def test_large_values_of_ranks(self) -> None:
        """Each rank reads its own, however large those of all are together, and pickles where they are allowed."""
        own = {"buffer": torch.ones(17 << 20), "position": 3, "kind": {Kind.FIRST: Kind.FIRST}}
        path = self.save("a", per_rank_extra=own, allow_pickle=True)
        asked = {"model": None, "options": fsdp_optim.LoadOptions(allow_pickle=True, progress=False)}
        check_same("own", dict(fsdp_optim.load(path, **asked).state), own, in_order=False)
        fsdp_optim.convert(path, self.root / "b", options=fsdp_optim.ConvertOptions(allow_pickle=True, progress=False))
        check_same("converted", dict(fsdp_optim.load(self.root / "b", **asked).state), own, in_order=False)

    def test_pickled_keys(self) -> None:
        """Keys of unknown classes hold back the values whose keys they are until pickles are allowed."""
        path = self.save("a", extra={"kinds": {Kind.FIRST: 1}}, allow_pickle=True)
        allowed = fsdp_optim.LoadOptions(allow_pickle=True, progress=False)
        check_same("allowed", dict(fsdp_optim.load(path, options=allowed).state), {"kinds": {Kind.FIRST: 1}})
        with self.assertRaisesRegex(CheckpointError, "Kind: allow_pickle=True makes it"):
            fsdp_optim.load(path, options=fsdp_optim.LoadOptions(progress=False)).state["kinds"]

    def test_tied_weights_and_values_of_modules(self) -> None:
        """Tied weights are there under both of their names, and values of modules beside the weights."""

        class Counting(nn.Linear):
            def get_extra_state(self) -> Any:
                return {"count": 7}

            def set_extra_state(self, state: Any) -> None:
                pass

        model = nn.Sequential(Counting(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        fsdp_optim.save(self.root / "a", model, format="dcp", **as_options(fsdp_optim.SaveOptions, **QUICK))
        target: dict[str, Any] = {name: torch.zeros(3, 3) for name in ("0.weight", "1.weight")}
        target["0._extra_state"] = {"count": 0}
        dcp.load({"model": target}, checkpoint_id=self.root / "a", no_dist=True)
        check_same("both", (target["0.weight"], target["1.weight"]), (model[0].weight.data, model[0].weight.data))
        self.assertEqual(target["0._extra_state"], {"count": 7})

    def test_large_tensors_are_cut_into_rows(self) -> None:
        """A reader that needs some rows does not read all of a large tensor."""
        model = nn.Linear(1024, 40_000, bias=False)
        fsdp_optim.save(self.root / "a", model, format="dcp", **as_options(fsdp_optim.SaveOptions, **QUICK))
        metadata = dcp.FileSystemReader(self.root / "a").read_metadata()
        nbytes = [place.length for place in metadata.storage_data.values()]
        self.assertGreater(len(nbytes), 2)
        self.assertLess(max(nbytes), (64 << 20) + 4096)
        weight = torch.zeros(40_000, 1024)
        dcp.load({"model": {"weight": weight}}, checkpoint_id=self.root / "a", no_dist=True)
        self.assertTrue(torch.equal(weight, model.weight.data))
