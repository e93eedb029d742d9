"""`copy`: byte for byte, verified meanwhile, complete or absent; into folders and into a bucket."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import torch
from kit.folders import SharedFolder
from kit.forked import LIBRARY, start
from kit.options import as_options
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.buckets.objects import MemoryBucket
from fsdp_optim.plugins import ObjectStore, OwnFormat, use_stores
from fsdp_optim.storage.posix import FolderStaging


def content_of(folder: Path) -> dict[str, tuple[int, str]]:
    """All files below a folder: the size of each, and a hash of its bytes."""
    contents = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()}


def save(path: Path, width: int, **options: object) -> None:
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))
    optim = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optim.step()
    values = as_options(fsdp_optim.SaveOptions, extra={"a": torch.arange(5)}, step=4, **options, durable=False)
    fsdp_optim.save(path, model, optim, **values)


class CopyTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        save(cls.root / "source", 900)
        save(cls.root / "split", 300, max_file_size=200_000)
        save(cls.root / "bare", 40, checksums=False)

    def setUp(self) -> None:
        self.to = self.own_folder() / "to"

    @parameterized.expand([("source",), ("split",), ("bare",)])
    def test_byte_for_byte(self, name: str) -> None:
        before = content_of(self.root / name)
        done = fsdp_optim.copy(self.root / name, self.to, bucket_nbytes=16 << 20)
        self.assertEqual(content_of(self.to), before)
        self.assertEqual(content_of(self.root / name), before)
        self.assertEqual((done.num_files, done.nbytes), (len(before), sum(nbytes for nbytes, _ in before.values())))
        self.assertEqual((done.has_checksums, done.left_out), (name != "bare", ()))
        self.assertEqual(fsdp_optim.verify(self.to).has_checksums, name != "bare")

    def test_what_somebody_has_put_beside(self) -> None:
        source = self.own_folder() / "source"
        shutil.copytree(self.root / "bare", source)
        (source / "tokenizer.json").write_bytes(os.urandom(3_000_000))
        (source / "empty.txt").write_bytes(b"")
        (source / "logs" / "old").mkdir(parents=True)
        (source / "logs" / "events").write_text("x")
        (source / "logs" / "old" / "events").write_text("y")
        with self.assertLogs("fsdp_optim", "WARNING") as logged:
            done = fsdp_optim.copy(source, self.to, bucket_nbytes=16 << 20)
        self.assertIn("logs/old/events", logged.output[0])
        self.assertEqual(done.left_out, ("logs/old/events",))
        wanted = content_of(source)
        del wanted["logs/old/events"]
        self.assertEqual(content_of(self.to), wanted)

    @parameterized.expand(
        [("model.safetensors",), ("optim.safetensors",), ("model.safetensors.sums",), ("extra/common.safetensors",)]
    )
    def test_damage_is_found_and_nothing_is_left(self, name: str) -> None:
        """The last byte, the first, and one in the middle."""
        source = self.own_folder() / "source"
        shutil.copytree(self.root / "source", source)
        content = (source / name).read_bytes()
        for at in (0, len(content) // 2, len(content) - 1):
            changed = bytearray(content)
            changed[at] ^= 4
            (source / name).write_bytes(changed)
            with self.subTest(at=at):
                with self.assertRaisesRegex(fsdp_optim.CheckpointError, Path(name).name):
                    fsdp_optim.copy(source, self.to)
                self.assertEqual(list(self.to.parent.iterdir()), [])

    def test_a_place_that_is_taken(self) -> None:
        save(self.to, 20)
        before = content_of(self.to)
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "already exists: .*overwrite=True"):
            fsdp_optim.copy(self.root / "bare", self.to)
        self.assertEqual(content_of(self.to), before)
        fsdp_optim.copy(self.root / "bare", self.to, overwrite=True)
        self.assertEqual(content_of(self.to), content_of(self.root / "bare"))

    def test_other_formats_are_refused(self) -> None:
        other = self.own_folder() / "other"
        fsdp_optim.convert(self.root / "bare", other, format="torch")
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "has no fsdp_optim.json: .*convert reads every format"):
            fsdp_optim.copy(other, self.to)
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "there is no such folder"):
            fsdp_optim.copy(self.root / "nothing", self.to)
        self.assertFalse(self.to.exists())

    def test_a_kill_before_the_end_leaves_no_checkpoint(self) -> None:
        """The process is killed when all files are written, before the copy gets its name; the next copy removes the rest."""
        code = (
            "import os, signal, fsdp_optim\n"
            "from fsdp_optim.storage.posix import FolderStaging\n"
            "FolderStaging.commit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
            f"fsdp_optim.copy({str(self.root / 'source')!r}, {str(self.to)!r})\n"
        )
        done = start(code, preload=LIBRARY).wait()
        self.assertEqual(done.returncode, -signal.SIGKILL, done.stderr)
        self.assertFalse(self.to.exists())
        self.assertEqual(len(list(self.to.parent.iterdir())), 1)
        fsdp_optim.copy(self.root / "source", self.to)
        self.assertEqual([path.name for path in self.to.parent.iterdir()], ["to"])
        self.assertEqual(content_of(self.to), content_of(self.root / "source"))

    def test_a_source_that_is_replaced_meanwhile(self) -> None:
        source = self.own_folder() / "source"
        shutil.copytree(self.root / "source", source)
        seal = FolderStaging.seal

        def replaced(*args: object, **options: object) -> None:
            shutil.rmtree(source)
            shutil.copytree(self.root / "bare", source)
            seal(*args, **options)  # type: ignore[arg-type]

        with mock.patch.object(FolderStaging, "seal", replaced):
            fsdp_optim.copy(source, self.to)
        self.assertEqual(content_of(self.to), content_of(self.root / "source"), "not the one that was opened")

    def test_to_a_bucket_and_back(self) -> None:
        bucket = MemoryBucket()

        def opened(url: str, probe: object, options: object) -> ObjectStore:
            return ObjectStore(bucket, url.partition("://")[2], OwnFormat().probe)

        with use_stores({"mem": opened}):
            done = fsdp_optim.copy(self.root / "source", "mem://run/step-4", bucket_nbytes=64 << 20)
            self.assertEqual(done.path, "memory://bucket/run/step-4")
            self.assertTrue(fsdp_optim.verify("mem://run/step-4").has_checksums)
            fsdp_optim.copy("mem://run/step-4", self.to)
            self.assertEqual(content_of(self.to), content_of(self.root / "source"))
            with self.assertRaisesRegex(fsdp_optim.CheckpointError, "already exists"):
                fsdp_optim.copy(self.root / "bare", "mem://run/step-4")
            with self.assertRaisesRegex(fsdp_optim.CheckpointError, "needs a place without any"):
                fsdp_optim.copy(self.root / "bare", "mem://run/step-4", overwrite=True)
            self.assertTrue(fsdp_optim.verify("mem://run/step-4").has_checksums)
