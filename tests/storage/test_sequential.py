"""File systems that take a file from begin to end and once only, through `file://`, on ranks that are processes."""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path

import torch.distributed as dist
from kit import checkpoints
from kit.checkpoints import mine, scramble
from kit.compare import check_same, error_text
from kit.sequential import sequential
from kit.store_calls import load_from, save_in_background, save_to
from kit.trained import Trained
from kit.wrapping import cpu

from fsdp_optim.buckets.fsspec import FsspecBucket
from fsdp_optim.buckets.objects import ObjectStore
from fsdp_optim.formats.own import OURS
from fsdp_optim.storage.base import Store
from fsdp_optim.testing import run_on_ranks

WRAPS = ("fairscale flat", "FSDP1 orig", "FSDP2", "DDP")


def store_at(path: Path) -> Store:
    return ObjectStore(*FsspecBucket.at(f"file://{path}"), OURS.probe, part_nbytes=300)


def check_loads(store: Store, wrap: str, steps: int = 3) -> None:
    expected, other = Trained(wrap, steps=steps), Trained(wrap, steps=0)
    scramble(other)
    load_from(store, other, compare=True)
    check_same(wrap, mine(other), mine(expected))


def save_on_ranks(folder: str, refuses: bool) -> list[int]:
    """How many bytes each rank has written of each wrapper's model."""
    written = []
    with cpu(), sequential(Path(folder)) if refuses else cpu():
        for wrap in WRAPS:
            trained = Trained(wrap)
            store = store_at(Path(folder, wrap.replace(" ", "-")))
            if wrap == "FSDP2":
                written.append(save_in_background(store, trained, max_file_size=500).wait().nbytes_written)
            else:
                written.append(
                    save_to(store, trained, max_file_size=500, per_rank_extra=dist.get_rank()).nbytes_written
                )
    return written


def load_on_ranks(folder: str) -> None:
    """Every wrapper's checkpoint into another one, through `file://` and by the path of the folder."""
    with cpu():
        for source, wrap in zip(WRAPS, (*WRAPS[1:], WRAPS[0]), strict=True):
            path = Path(folder, source.replace(" ", "-"))
            check_loads(store_at(path), wrap)
            other, expected = Trained(wrap, steps=0), Trained(wrap)
            scramble(other)
            checkpoints.load(path, other)
            check_same(f"{source} into {wrap} by path", mine(other), mine(expected))


def overwrite_on_ranks(folder: str) -> str:
    """A save over another one; returns the folder that has its files."""
    path = Path(folder, "FSDP2")
    with cpu(), sequential(Path(folder)):
        kind, text = error_text(lambda: save_to(store_at(path), Trained("FSDP2", steps=1)))
        check_same("refused", (kind, "overwrite=True" in text), ("CheckpointError", True))
        save_to(store_at(path), Trained("FSDP2", steps=2), overwrite=True)
        check_loads(store_at(path), "FSDP2", steps=2)
        token = next(name for name in os.listdir(path) if (path / name).is_dir())
        other = Trained("FSDP2", steps=0)
        checkpoints.load(path / token, other)
        check_same("by the path of its files", mine(other), mine(Trained("FSDP2", steps=2)))
    return token


def from_a_folder_on_ranks(folder: str) -> None:
    """A checkpoint that was saved by its path, through `file://`."""
    with cpu():
        checkpoints.save(Path(folder, "posix"), Trained("FSDP2"))
        check_loads(store_at(Path(folder, "posix")), "fairscale flat")


def refused_on_ranks(folder: str, strategy: str) -> tuple[str, str]:
    """A save by path."""
    with cpu(), sequential(Path(folder)):
        return error_text(lambda: checkpoints.save(Path(folder, "by-path"), Trained("FSDP2"), strategy=strategy))


class TestSequential(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def names(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in Path(self.folder).rglob("*")}

    def test_saved_on_three_ranks_and_loaded_on_fewer(self) -> None:
        """Where nothing but new files is taken: every byte is written once, by several ranks, and nothing else is left."""
        written = run_on_ranks(save_on_ranks, 3, self.folder, True)
        for wrap in zip(*written, strict=True):
            self.assertGreater(sum(nbytes > 0 for nbytes in wrap), 1)
        self.assertEqual([name for name in self.names() if "/." in name], [])
        for world_size in (2, 1):
            run_on_ranks(load_on_ranks, world_size, self.folder)
        tokens = run_on_ranks(overwrite_on_ranks, 2, self.folder)
        inside = [name for name in self.names() if name.startswith("FSDP2/")]
        own = {"FSDP2/fsdp_optim.json", f"FSDP2/{tokens[0]}"}
        self.assertEqual(
            [name for name in inside if name not in own and not name.startswith(f"FSDP2/{tokens[0]}/")], []
        )
        run_on_ranks(from_a_folder_on_ranks, 2, self.folder)

    def test_a_save_by_path_names_the_way_out(self) -> None:
        """On all ranks; and it leaves nothing."""
        for strategy in ("auto", "in_place", "per_rank_files"):
            for kind, text in run_on_ranks(refused_on_ranks, 2, self.folder, strategy):
                self.assertEqual(kind, "CheckpointError")
                self.assertIn(f"save to file://{self.folder}/by-path", text)
        self.assertEqual(self.names(), set())


class TestTheFolder(unittest.TestCase):
    """The calls that the folder of these tests refuses."""

    def test_refusals(self) -> None:
        with tempfile.TemporaryDirectory() as name, sequential(Path(name)):
            file = Path(name, "file")
            with file.open("xb") as opened:
                opened.write(b"12")
                opened.write(b"34")
            fd = os.open(file.with_name("other"), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.pwritev(fd, [b"12"], 0)
            refused = [
                lambda: file.open("r+b"),
                lambda: file.open("wb"),
                lambda: os.open(file, os.O_WRONLY),
                lambda: file.rename(file.with_name("new")),
                lambda: os.truncate(file, 9),
                lambda: os.ftruncate(fd, 9),
                lambda: os.link(file, file.with_name("new")),
                lambda: os.pwritev(fd, [b"x"], 0),
                lambda: os.pwritev(fd, [b"x"], 5),
            ]
            for do in refused:
                with self.assertRaises(PermissionError):
                    do()
            os.close(fd)
            self.assertEqual(file.read_bytes(), b"1234")
        with tempfile.TemporaryDirectory() as name:
            Path(name, "file").write_bytes(b"x")
            Path(name, "file").rename(Path(name, "new"))


if __name__ == "__main__":
    unittest.main()
