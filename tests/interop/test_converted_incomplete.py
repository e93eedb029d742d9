"""Folders that `convert` has written for other programs, and that have lost files of their own manifest: every reader says so."""

from __future__ import annotations

import json
import shutil
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import torch
from kit.compare import refused
from kit.folders import SharedFolder
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.plugins import FairscaleShards

PARAMS = ["weight", "bias"]
FORMATS: dict[str, Any] = {
    "torch": "torch",
    "torch_file": "torch_file",
    "fairscale": "fairscale",
    "fairscale_shards": FairscaleShards(world_size=2, units={"": PARAMS}),
    "deepspeed_universal": "deepspeed_universal",
}
MANIFESTS = {"deepspeed_universal": "deepspeed_universal.json"}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    return model, optim


def files_of(folder: Path, format: str) -> dict[str, int]:
    """The files that the manifest lists, with their sizes."""
    brief = json.loads((folder / MANIFESTS.get(format, "torch_files.json")).read_bytes())["brief"]
    files: dict[str, int] = brief["files"]
    return files


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def check_refused(where: Path, *words: str) -> None:
    """All readers raise the same error, and `diagnose` reports it."""
    readers: list[Callable[[], object]] = [
        lambda: fsdp_optim.load(where, *trained()),
        lambda: fsdp_optim.load(where, trained()[0]),
        lambda: fsdp_optim.load(where),
        lambda: fsdp_optim.verify(where),
        lambda: fsdp_optim.inspect(where),
        lambda: fsdp_optim.convert(where, where.parent / "again", options=fsdp_optim.ConvertOptions(durable=False)),
    ]
    for reader in readers:
        refused(reader, CheckpointError, *words)
    diagnosis = fsdp_optim.diagnose(where)
    assert not diagnosis.complete
    assert all(word in "\n".join(diagnosis.problems) for word in words), diagnosis.problems


class IncompleteTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        state = {"scheduler": {"last": 1}, "seen": fsdp_optim.per_rank({"rank": 0})}
        fsdp_optim.save(
            cls.root / "own", *trained(), step=1, state=state, options=fsdp_optim.SaveOptions(durable=False)
        )
        for name, format in FORMATS.items():
            options = fsdp_optim.ConvertOptions(durable=False)
            fsdp_optim.convert(cls.root / "own", cls.root / name, format=format, options=options)

    def copy(self, name: str, *inside: str) -> Path:
        folder = self.own_folder() / "copy"
        shutil.copytree(self.root / name, folder.joinpath(*inside))
        return folder

    @parameterized.expand([(name,) for name in FORMATS])
    def test_each_file(self, name: str) -> None:
        folder = self.copy(name)
        fsdp_optim.verify(folder)
        for file, nbytes in files_of(folder, name).items():
            path = folder / file
            kept = path.read_bytes()
            self.assertEqual(len(kept), nbytes)
            path.unlink()
            check_refused(folder, f"{path}: is missing")
            for damage, size in ((cut, nbytes - 1), (lengthen, nbytes + 1)):
                path.write_bytes(kept)
                damage(path)
                check_refused(folder, f"{path}: has {size} bytes, {nbytes} were saved")
            path.unlink()
            path.mkdir()
            check_refused(folder, f"{path}: is missing, or no file: {nbytes} bytes were saved in it")
            path.rmdir()
            path.write_bytes(kept)
        fsdp_optim.verify(folder)

    @parameterized.expand([("torch",), ("torch_file",), ("deepspeed_universal",)])
    def test_all_files(self, name: str) -> None:
        """Nothing but the manifest shows what the folder was."""
        folder = self.copy(name)
        for file in files_of(folder, name):
            (folder / file).unlink()
        check_refused(folder, f"{folder}/", ": is missing")

    @parameterized.expand([(name,) for name in FORMATS])
    def test_in_a_bucket(self, name: str) -> None:
        url = f"memory://{self.id()}/{name}"
        options = fsdp_optim.ConvertOptions(durable=False)
        fsdp_optim.convert(self.root / "own", url, format=FORMATS[name], options=options)
        fsdp_optim.verify(url)
        file, nbytes = next(iter(files_of(self.root / name, name).items()))
        memory = fsspec.filesystem("memory")
        kept = memory.cat_file(f"{url}/{file}")
        memory.pipe_file(f"{url}/{file}", kept[:-1])
        words = (f"{url}/{file}: has {nbytes - 1} bytes, {nbytes} were saved",)
        refused(lambda: fsdp_optim.verify(url), CheckpointError, *words)
        memory.rm(f"{url}/{file}")
        refused(lambda: fsdp_optim.verify(url), CheckpointError, f"{url}/{file}", "is missing")
        refused(lambda: fsdp_optim.load(url, *trained()), CheckpointError, f"{url}/{file}", "is missing")

    def test_in_the_folder_of_a_tag(self) -> None:
        """Someone has moved a universal checkpoint into the folder that DeepSpeed's `latest` names."""
        above = self.copy("deepspeed_universal", "tag")
        (above / "latest").write_text("tag")
        fsdp_optim.verify(above)
        path = above / "tag" / "zero" / "bias" / "exp_avg.pt"
        path.unlink()
        check_refused(above, f"{path}: is missing")

    def test_a_file_by_itself_is_read(self) -> None:
        folder = self.copy("torch")
        (folder / "trainer.pt").unlink()
        fsdp_optim.verify(folder / "model.pt")
        fsdp_optim.load(folder / "model.pt", trained()[0])

    def test_other_files_in_the_folder(self) -> None:
        folder = self.copy("torch")
        (folder / "notes.txt").write_text("mine")
        fsdp_optim.verify(folder)


if __name__ == "__main__":
    unittest.main()
