"""`load` takes what torch.distributed.checkpoint writes as safetensors: each rank's files of one checkpoint, and DCP folders.

torch writes all files here. What is read is compared with the tensors that were saved, bit for bit, at 1, 2 and 3 ranks.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.checkpoints import Whole, load, mine, scramble
from kit.compare import check_same, refused, refused_on_ranks
from kit.dcp import TRAIN_STATE, model_dict, optim_dict
from kit.folders import SharedFolder
from kit.optimizers import OfModel, two_groups
from kit.store_calls import url_of
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.formats.own import PROBE
from fsdp_optim.testing import run_on_ranks

pytest.importorskip(
    "torch.distributed.checkpoint._consolidate_hf_safetensors", reason="this torch writes no such files"
)

from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.filesystem import SerializationFormat

ADAM = OfModel(two_groups)
SIZES = (1, 2, 3)
FILE_OF = {"rows": 1, "columns": 2, "both": 1, "short": 2, "one": 1, "none": 2, "rest": 1, "alike": 2, "number": 1}


def tensors() -> dict[str, Tensor]:
    """Uneven on 2 and 3 ranks, with fewer rows than ranks, without elements, without dimensions, of several dtypes.

    All are floating: torch makes no single checkpoint of others (enable_consolidation).
    """
    return {
        "rows": torch.arange(23 * 16.0).reshape(23, 16) / 7,
        "columns": torch.arange(4 * 7.0).reshape(4, 7) * 3,
        "both": torch.arange(5 * 9.0).reshape(5, 9).to(torch.bfloat16),
        "short": torch.arange(6.0).reshape(1, 6) + 0.5,
        "one": torch.tensor([-1.5]),
        "none": torch.empty(0, 3),
        "rest": torch.arange(5.0, dtype=torch.float64),
        "alike": torch.arange(3.0) - 9,
        "number": torch.tensor(0.1, dtype=torch.float64),
    }


def shared(whole: dict[str, Tensor]) -> dict[str, Any]:
    """The same tensors as DTensors: cut along rows, columns, both, and copied."""
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    grid = init_device_mesh("cpu", (2, 2)) if dist.get_world_size() == 4 else None
    dtensors: dict[str, Any] = {}
    for name, tensor in whole.items():
        if name in ("rest", "number"):
            dtensors[name] = tensor  # no DTensor
        elif name == "both" and grid is not None:
            dtensors[name] = distribute_tensor(tensor, grid, [Shard(0), Shard(1)])
        elif name == "columns" and grid is not None:
            dtensors[name] = distribute_tensor(tensor, grid, [Replicate(), Shard(1)])
        else:
            dtensors[name] = distribute_tensor(
                tensor, line, [Replicate() if name == "alike" else Shard(int(name == "columns"))]
            )
    return dtensors


def wanted(names: Iterable[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors().items() if name in names}


def names_in(checkpoint: str) -> list[str]:
    """The tensors of a checkpoint: torch's one checkpoint of several files has none without dimensions."""
    return [name for name in tensors() if name != "number" or "consolidated" not in checkpoint]


def in_order(by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(sorted(by_name.items()))


class Holder(nn.Module):
    """A model whose parameters are the tensors."""

    def __init__(self, names: Iterable[str] = tuple(tensors())) -> None:
        super().__init__()
        for name, tensor in wanted(names).items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor)))


def write(root: Path) -> None:
    """On 1, 2, 3 and 4 ranks."""
    num = dist.get_world_size()

    def save(name: str, state: Any, **options: Any) -> None:
        with warnings.catch_warnings(action="ignore"):
            dcp.save(
                state,
                storage_writer=HuggingFaceStorageWriter(str(root / f"{num}-{name}"), save_distributed=True, **options),
            )

    with cpu():
        given = shared(tensors())
        save("shards", given)
        save("mapped", given, fqn_to_index_mapping=FILE_OF)
        save("zeros", given, enable_consolidation=True)
        del given["number"]
        save("consolidated", given, enable_consolidation=True)
        save(
            "mapped consolidated",
            given,
            fqn_to_index_mapping={name: FILE_OF[name] for name in given},
            enable_consolidation=True,
        )
        if num == 4:
            return
        if num == 2:
            save("with values", {**given, "step": 3})
        trained = Trained("FSDP2", ADAM, model=Whole)
        save("fsdp2", model_dict(trained))
        saved = {"model": model_dict(trained), "optimizer": optim_dict(trained), "train_state": TRAIN_STATE}
        flat = {**saved, "optimizer": optim_dict(trained, flattened=True)}
        for name, state, options in (
            ("dcp", saved, {}),
            ("dcp flattened", flat, {"single_file_per_rank": False}),
            ("dcp threads", saved, {"thread_count": 2}),
        ):
            writer = dcp.FileSystemWriter(
                root / f"{num}-{name}",
                sync_files=False,
                serialization_format=SerializationFormat.SAFETENSORS,
                **options,
            )
            dcp.save(dict(state), storage_writer=writer)


HOLDERS = (
    "shards",
    "mapped",
    "consolidated",
    "consolidated/sharded",
    "mapped consolidated",
    "mapped consolidated/sharded",
)


def load_holders(root: Path) -> None:
    """On 1, 2 and 3 ranks: every checkpoint as one, into plain models and into models that FSDP2 has cut."""
    for num in (*SIZES, 4):
        for name in HOLDERS:
            for is_cut in (False, True):
                model: Any = Holder(names_in(name))
                if is_cut:
                    line = init_device_mesh("cpu", (dist.get_world_size(),))
                    for key in ("rows", "both", "short"):
                        param = distribute_tensor(getattr(model, key).detach(), line, [Shard(0)])
                        setattr(model, key, nn.Parameter(param))
                restored = fsdp_optim.load(
                    root / f"{num}-{name}",
                    model,
                    options=fsdp_optim.LoadOptions(progress=False, process_group=dist.group.WORLD),
                )
                weights = {
                    key: value.full_tensor() if hasattr(value, "full_tensor") else value
                    for key, value in model.state_dict().items()
                }
                check_same(f"{num} {name}", weights, wanted(names_in(name)))
                check_same("missing", (restored.missing_keys, restored.unexpected_keys), ((), ()))


def load_trained(root: Path) -> None:
    """On 1, 2 and 3 ranks: weights, and weights with an optimizer, into several wrappers."""
    with cpu():
        for place, wrapper in enumerate(("FSDP2", "FSDP1 flat", "FSDP1 orig")):
            alike = Trained(wrapper, ADAM, model=Whole)
            for num in SIZES:
                target = Trained(wrapper, ADAM, 0, model=Whole)
                scramble(target)
                fsdp_optim.load(root / f"{num}-fsdp2", target.model, options=fsdp_optim.LoadOptions(progress=False))
                check_same(f"{num} fsdp2", mine(target)["values"], mine(alike)["values"])
                name = ("dcp", "dcp flattened", "dcp threads")[(place + num) % 3]
                scramble(target)
                restored = load(root / f"{num}-{name}", target, compare=True)
                check_same(f"{num} {name}", mine(target), mine(alike))
                check_same("extra", dict(sorted(restored.state["train_state"].items())), TRAIN_STATE)


def refuse_parts(root: Path) -> None:
    """On two ranks: the file of one rank is no checkpoint, whichever it is."""
    for num in (*SIZES, 4):
        for file in sorted((root / f"{num}-shards").iterdir()):
            words = (
                file.name,
                "the part of one rank",
                "the path of the folder",
                f"fsdp_optim.load('{file.parent}', ...)",
            )
            refused_on_ranks(
                file.name,
                partial(fsdp_optim.load, file, Holder(), options=fsdp_optim.LoadOptions(progress=False)),
                "CheckpointError",
                *words,
            )
    renamed = root / "renamed.safetensors"
    words = ("renamed.safetensors: is the part of one rank", "columns begins at [0, 4]")
    refused_on_ranks(
        "renamed",
        partial(fsdp_optim.load, renamed, Holder(), options=fsdp_optim.LoadOptions(progress=False)),
        "CheckpointError",
        *words,
    )


def refuse_damage(root: Path) -> None:
    """On two ranks: whichever rank reads the damage, all ranks raise the same error, and nothing is changed."""
    with cpu():
        target = Trained("FSDP2", ADAM, 0, model=Whole)
        scramble(target)
        before = mine(target)
        for place, words in (
            ("2-dcp without its end", ("__1_0.distcp",)),
            ("2-dcp moved", ("__0_0.distcp", "and the metadata says")),
            ("2-fsdp2 without its end", ("shard-00002", "was cut short")),
        ):
            asked = partial(load, root / place, target)
            if "fsdp2" in place:
                asked = partial(
                    fsdp_optim.load, root / place, target.model, options=fsdp_optim.LoadOptions(progress=False)
                )
            refused_on_ranks(place, asked, "CheckpointError", *words)
            check_same(f"{place}: nothing was loaded", mine(target), before)


class DcpSafetensorsTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        for num in (*SIZES, 4):
            run_on_ranks(write, num, cls.root)
        shutil.copy(
            cls.root / "2-shards" / "shard-00002-model-00001-of-00001.safetensors", cls.root / "renamed.safetensors"
        )

    @parameterized.expand(
        [(f"{function.__name__}_{num}", function, num) for function in (load_holders, load_trained) for num in SIZES]
    )
    def test_loads(self, _: str, function: Callable[[Path], None], num: int) -> None:
        run_on_ranks(function, num, self.root)

    def test_one_rank_is_no_checkpoint(self) -> None:
        run_on_ranks(refuse_parts, 2, self.root)

    @parameterized.expand([(f"{num} {name}", num, name) for num in (1, 3, 4) for name in HOLDERS])
    def test_offline(self, _: str, num: int, name: str) -> None:
        place = self.root / f"{num}-{name}"
        new = self.root / f"converted {num}-{name}".replace("/", "-")
        fsdp_optim.convert(place, new, options=fsdp_optim.ConvertOptions(progress=False))
        check_same("converted", in_order(load_file(new / "model.safetensors")), in_order(wanted(names_in(name))))
        verified = fsdp_optim.verify(place, progress=False)
        self.assertEqual(
            (verified.format, verified.num_tensors, verified.has_checksums), ("safetensors", len(names_in(name)), False)
        )
        inspected = fsdp_optim.inspect(place)
        shapes = {key: tuple(value.shape) for key, value in wanted(names_in(name)).items()}
        self.assertEqual({key: tuple(tensor.shape) for key, tensor in inspected.model.items()}, shapes)
        for file in place.glob("shard-*"):
            converts = partial(
                fsdp_optim.convert, file, self.root / "none", options=fsdp_optim.ConvertOptions(progress=False)
            )
            for call in (converts, partial(fsdp_optim.verify, file, progress=False), partial(fsdp_optim.inspect, file)):
                refused(call, CheckpointError, "the part of one rank", file.name)

    @parameterized.expand([(name,) for name in ("dcp", "dcp flattened", "dcp threads")])
    def test_offline_with_an_optimizer(self, name: str) -> None:
        for num in SIZES:
            place, new = self.root / f"{num}-{name}", self.root / f"converted {num}-{name}"
            fsdp_optim.convert(place, new, options=fsdp_optim.ConvertOptions(progress=False))
            fsdp_optim.convert(
                new, self.root / f"again {num}-{name}", format="dcp", options=fsdp_optim.ConvertOptions(progress=False)
            )
            self.assertEqual(fsdp_optim.verify(place, progress=False).format, "dcp")
            self.assertEqual(fsdp_optim.inspect(place).step, None)
            if num > 1:
                first = self.root / f"converted 1-{name}"
                for file in ("model.safetensors", "optim.safetensors"):
                    check_same(file, in_order(load_file(new / file)), in_order(load_file(first / file)))

    def refused(self, name: str, *words: str) -> None:
        place = self.root / name
        converts = partial(
            fsdp_optim.convert, place, self.root / "none", options=fsdp_optim.ConvertOptions(progress=False)
        )
        for call in (converts, partial(fsdp_optim.verify, place, progress=False), partial(fsdp_optim.inspect, place)):
            refused(call, CheckpointError, *words)

    def copied(self, name: str, new: str) -> Path:
        return Path(shutil.copytree(self.root / name, self.root / new))

    def test_files_that_are_missing(self) -> None:
        for gone, num, words in (
            (1, 3, ("elements [0, ", "no files of shard-00001")),
            (2, 3, ("are in none of its 2 chunks", "no files of shard-00002")),
            (2, 2, ("short", "in none of its")),
        ):
            name = f"without {gone} of {num}"
            place = self.copied(f"{num}-shards", name)
            (place / f"shard-{gone:05}-model-00001-of-00001.safetensors").unlink()
            if (
                words[0] == "short"
            ):  # the end of a tensor is where its last chunk ends, so that a load finds this, by the shape
                words = ("rows: shape [12, 16] in the checkpoint, [23, 16] in the model",)
                refused(
                    partial(fsdp_optim.load, place, Holder(), options=fsdp_optim.LoadOptions(progress=False)),
                    StateError,
                    *words,
                )
            else:
                self.refused(name, *words)

    def test_files_of_another_save(self) -> None:
        """Of more ranks than the last save had; with other files; with another number of files for each rank."""
        place = self.copied("2-shards", "stale")
        shutil.copy(self.root / "4-shards" / "shard-00003-model-00001-of-00001.safetensors", place)
        self.refused("stale", "overlap", "its files are of 3 ranks", "remove the files of the save before")
        place = self.copied("2-shards", "other files")
        shutil.copy(self.root / "2-mapped" / "shard-00001-model-00002-of-00002.safetensors", place)
        self.refused("other files", "two checkpoints, with 1 and with 2 files for each rank")
        place = self.copied("2-shards", "with a whole one")
        shutil.copy(self.root / "2-consolidated" / "model-00001-of-00001.safetensors", place / "model.safetensors")
        self.refused("with a whole one", "has files of ranks, such as shard-00001", "model.safetensors")

    def test_a_consolidation_beside_the_files_of_ranks(self) -> None:
        """By torch's function, into the folder itself: the error names both, and the path of the index reads one of them."""
        place = self.copied("2-consolidated/sharded", "beside")
        mapping = dict.fromkeys(names_in("consolidated"), 1)
        consolidate_safetensors_files(str(place), str(place), mapping)
        index = "model.safetensors.index.json"
        self.refused("beside", "has files of ranks, such as shard-00001", index, f"give the path of {place / index}")
        model = Holder(mapping)
        fsdp_optim.load(place / index, model, options=fsdp_optim.LoadOptions(progress=False))
        check_same("by the index", {**model.state_dict()}, wanted(mapping))
        place = self.copied("2-shards", "beside with zeros")
        consolidate_safetensors_files(str(place), str(place), dict.fromkeys(tensors(), 1))
        self.refused(f"beside with zeros/{index}", "number has other bytes", "beside with zeros/shard-0000")

    def test_a_consolidation_that_has_lost_values(self) -> None:
        """torch 2.13 writes zeros in the place of tensors without dimensions; the files of the ranks have them."""
        for num in (*SIZES, 4):
            words = (
                "model-00001-of-00001.safetensors: number has other bytes (0000000000000000)",
                f"{num}-zeros/sharded",
            )
            self.refused(f"{num}-zeros", *words)
            model = Holder()
            fsdp_optim.load(
                self.root / f"{num}-zeros" / "sharded", model, options=fsdp_optim.LoadOptions(progress=False)
            )
            check_same("sharded", {**model.state_dict()}, tensors())

    def test_a_consolidation_that_did_not_end(self) -> None:
        place = self.copied("2-consolidated", "killed")
        (place / "model.safetensors.index.json").unlink()
        self.refused("killed", "torch was killed", f"{place / 'sharded'}")
        (place / "model-00001-of-00001.safetensors").unlink()
        self.refused("killed", "torch was killed", f"{place / 'sharded'}")

    def test_values_that_are_no_tensors(self) -> None:
        self.refused("2-with values", "begins with a value that is not a tensor", "FileSystemWriter")

    def test_metadata_that_were_changed(self) -> None:
        file = "shard-00002-model-00001-of-00001.safetensors"
        for new, old, words in (
            ("[999, 0]", "[12, 0]", "elements [192, "),
            ("[12]", "[12, 0]", "says at [12] rows, of shape [11, 16], begins"),
            ("[-1, 0]", "[12, 0]", "says at [-1, 0] rows"),
            ("[11, 0]", "[12, 0]", "overlap"),
            ('"x"', "[12, 0]", "DCP_SHARDING_INFO in its metadata"),
        ):
            place = self.copied("2-shards", f"changed to {new}".replace("/", ""))
            data = (place / file).read_bytes()
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
            self.assertEqual(info["rows"]["saved_offsets"], json.loads(old))
            info["rows"]["saved_offsets"] = json.loads(new)
            header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
            text = json.dumps(header).encode()
            (place / file).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
            self.refused(place.name, words)

    def test_damage_is_an_error_on_all_ranks(self) -> None:
        """A file of safetensors in a DCP folder has the chunks that the metadata say, or the error names it."""
        for name, file in (("2-dcp", "__1_0.distcp"), ("2-fsdp2", "shard-00002-model-00001-of-00001.safetensors")):
            place = self.copied(name, f"{name} without its end")
            (place / file).write_bytes((place / file).read_bytes()[:-1])
            refused(partial(fsdp_optim.verify, place, progress=False), CheckpointError, file)
        place = self.copied("2-dcp", "2-dcp moved")
        data = (place / "__0_0.distcp").read_bytes()
        old, new = (b'\\"saved_offsets\\": [%d, 0]' % first for first in (0, 1))
        self.assertIn(old, data)
        (place / "__0_0.distcp").write_bytes(data.replace(old, new))
        words = "from [1, 0] on, and the metadata says"
        refused(partial(fsdp_optim.verify, place, progress=False), CheckpointError, words)
        run_on_ranks(refuse_damage, 2, self.root)

    def test_from_a_bucket(self) -> None:
        for name in ("3-shards", "4-consolidated", "3-dcp"):
            bucket = MemoryBucket()
            for file in (file for file in (self.root / name).rglob("*") if file.is_file()):
                bucket.put(f"run/{file.relative_to(self.root / name)}", file.read_bytes())
            model: Any = Whole() if name == "3-dcp" else Holder(names_in(name))
            with url_of(ObjectStore(bucket, "run", PROBE)) as url:
                fsdp_optim.load(url, model)
            alike: Any = Whole() if name == "3-dcp" else Holder(names_in(name))
            fsdp_optim.load(self.root / name, alike, options=fsdp_optim.LoadOptions(progress=False))
            check_same(name, {**model.state_dict()}, {**alike.state_dict()})
