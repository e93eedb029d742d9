"""The seam of formats: save, async_save, load and convert work with a second format without a line of their own for it."""

from __future__ import annotations

import json
import unittest
from pathlib import Path
from typing import Any

import torch
from kit.checkpoint_format import all_bytes, check_folder, extra, tensors_of
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.installed import installed as installed_format
from kit.installed import nothing_asked_for
from kit.options import as_options
from kit.raw_format import INDEX, RAW, encoded_index, index_in
from kit.trained import Trained
from kit.wrapping import cpu
from xxhash import xxh3_64_intdigest

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.checkpoint.common.arguments import LoadArguments, SaveArguments
from fsdp_optim.checkpoint.load import restore
from fsdp_optim.checkpoint.save import foreground as save
from fsdp_optim.offline.conversion.arguments import ConvertArguments
from fsdp_optim.offline.conversion.convert import convert
from fsdp_optim.registry import FORMATS
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing import run_on_ranks

WRAPPERS = ("FSDP2", "FSDP1 flat")


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def save_all(root: Path) -> None:
    """In the second format by save and by async_save, and in our own; each rank with values of its own."""
    for wrapper in WRAPPERS:
        with cpu():
            trained = Trained(wrapper, adam)
            rank = torch.distributed.get_rank()
            options: dict[str, Any] = as_options(
                fsdp_optim.SaveOptions, extra=extra(), per_rank_extra=rank, step=7, durable=False
            )
            fsdp_optim.save(root / f"raw-{wrapper}", trained.model, trained.optim, format=RAW, **options)
            fsdp_optim.async_save(root / f"async-{wrapper}", trained.model, trained.optim, format=RAW, **options).wait()
            fsdp_optim.save(root / f"ours-{wrapper}", trained.model, trained.optim, **options)


def load_all(root: Path, names: tuple[str, ...], installed: bool) -> None:
    """On another number of ranks, into the other wrapper, and bit for bit; with `installed` the format is recognised."""
    for wrapper, name in zip(reversed(WRAPPERS), names, strict=True):
        with cpu(), installed_format(FORMATS, raw="kit.raw_format:RAW"):
            target, wanted = Trained(wrapper, adam, 0), Trained(wrapper, adam)
            options = LoadArguments(compare=True)
            format = None if installed else RAW
            restored = restore.restore(root / name, target.model, target.optim, options, format)
            check_same(name, target.gather(None), wanted.gather(None))
            check_same("extra", {name: restored.state[name] for name in extra()}, extra())
            check_same("the rest", (restored.step, restored.world_size), (7, 2))
            check_same("of all ranks", restored.all_ranks, ({"per_rank_extra": 0}, {"per_rank_extra": 1}))


class SecondFormatTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(save_all, 2, cls.root)

    def test_it_is_loaded_at_another_world_size(self) -> None:
        """By an argument; and recognised, as the format of an installed package."""
        run_on_ranks(load_all, 3, self.root, ("raw-FSDP2", "raw-FSDP1 flat"), False)
        run_on_ranks(load_all, 3, self.root, ("async-FSDP2", "async-FSDP1 flat"), True)

    def test_there_and_back(self) -> None:
        """From ours to the second one and back: the same tensors, extras and description, and it is loaded."""
        for wrapper in WRAPPERS:
            own, there, back = (self.root / f"{name}-{wrapper}" for name in ("ours", "there", "back"))
            options = ConvertArguments(durable=False)
            convert(own, there, options, target_format=RAW)
            convert(there, back, options, source_format=RAW)
            check_folder(back)
            for half in ("model", "optim"):
                check_same(half, tensors_of(back, half), tensors_of(own, half))
            got, wanted = all_bytes(back), all_bytes(own)
            check_same("the extra", *(fsdp_optim.load(folder, None).state for folder in (back, own)))
            manifests = [json.loads(files["fsdp_optim.json"])["checkpoint"] for files in (got, wanted)]
            for key in ("optim", "model", "has_optim", "world_size"):
                check_same(key, manifests[0][key], manifests[1][key])
        run_on_ranks(load_all, 3, self.root, ("back-FSDP2", "back-FSDP1 flat"), True)
        run_on_ranks(load_all, 1, self.root, ("there-FSDP2", "there-FSDP1 flat"), False)

    def test_tensors_in_chunks(self) -> None:
        """Each rank reads its elements out of several files, as other projects' sharded checkpoints have them."""
        for wrapper in WRAPPERS:
            cut_in_three(self.root / f"raw-{wrapper}", self.root / f"chunks-{wrapper}")
        run_on_ranks(load_all, 2, self.root, ("chunks-FSDP2", "chunks-FSDP1 flat"), False)
        with cpu():
            target = self.root / "from chunks"
            options = ConvertArguments(durable=False)
            convert(self.root / "chunks-FSDP2", target, options, source_format=RAW)
            check_same("state", tensors_of(target, "optim"), tensors_of(self.root / "ours-FSDP2", "optim"))

    def test_without_a_format_that_knows_it(self) -> None:
        """The error says what is missing; nothing of what is installed is loaded where ours recognises it."""
        with self.assertRaisesRegex(CheckpointError, "has no fsdp_optim.json"):
            fsdp_optim.load(self.root / "raw-FSDP2")
        with nothing_asked_for():
            fsdp_optim.load(self.root / "ours-FSDP2")

    def test_a_package_that_cannot_be_loaded(self) -> None:
        with (
            installed_format(FORMATS, broken="kit.no_such_module:FORMAT"),
            self.assertRaisesRegex(CheckpointError, "broken.*kit.no_such_module"),
        ):
            fsdp_optim.load(self.root / "raw-FSDP2")

    def test_in_another_store(self) -> None:
        """Formats do not know stores: in memory, in parts, it is written and read alike."""
        store = ObjectStore(MemoryBucket(), "run/step-1", RAW.probe, part_nbytes=100)
        trained, other = Trained("plain", adam), Trained("plain", adam, 0)
        save.save(store, trained.model, trained.optim, SaveArguments(durable=False), RAW)
        restore.restore(store, other.model, other.optim, LoadArguments(), RAW)
        check_same("loaded", other.gather(None), trained.gather(None))

    def test_damage_is_refused_by_load(self) -> None:
        target = self.root / "damaged"
        for name, content in all_bytes(self.root / "raw-FSDP2").items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)
        file = target / "model-00000.raw"
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
        trained = Trained("plain", adam, 0)
        with self.assertRaisesRegex(CheckpointError, "model-00000.raw"):
            restore.restore(target, trained.model, trained.optim, LoadArguments(), RAW)


def cut_in_three(source: Path, target: Path) -> None:
    """The same checkpoint with each tensor of enough elements in three files."""
    files = all_bytes(source)
    with Folder(source, RAW.probe).open() as opened:
        index = index_in(opened)
    for tensors in index["tensors"].values():
        for entry in tensors.values():
            (chunk,) = entry["chunks"]
            data = files[chunk["file"]]
            numel = 1
            for size in entry["shape"]:
                numel *= size
            if numel < 6 or numel % 3 == 1:
                continue
            itemsize = len(data) // numel
            length = -(-numel // 3) * itemsize
            del files[chunk["file"]]
            entry["chunks"] = []
            for number in range(3):
                part, name = (
                    data[number * length : (number + 1) * length],
                    chunk["file"].replace(".raw", f"-{number}.raw"),
                )
                files[name] = part
                hashes = [xxh3_64_intdigest(part)] if part else []
                entry["chunks"].append({"file": name, "ends": [len(part)] if part else [], "hashes": hashes})
    files[INDEX] = encoded_index(index)
    for name, content in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)


if __name__ == "__main__":
    unittest.main()
