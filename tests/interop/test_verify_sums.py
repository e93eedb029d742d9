"""`verify` compares the CRC32 of each record of torch's files, in all formats made of such files; `torch.load` does not."""

from __future__ import annotations

import copy
import io
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from kit.checkpoints import Whole
from kit.compare import check_same, error_text, refused
from kit.dcp import TRAIN_STATE, model_dict, optim_dict
from kit.folders import SharedFolder
from kit.optimizers import OfModel, two_groups
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn
from torch.serialization import set_crc32_options

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_ranks

ADAM = OfModel(two_groups)


def trained_dicts() -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a model without a wrapper, with state."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 7)).square().sum().backward()
    optim.step()
    return dict(model.state_dict()), optim.state_dict()


def write_dcp(root: Path) -> None:
    """On two ranks."""
    with cpu():
        trained = Trained("FSDP2", ADAM, model=Whole)
        saved = {"model": model_dict(trained), "optimizer": optim_dict(trained), "train_state": TRAIN_STATE}
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(root / "dcp", sync_files=False))


def write_files(root: Path) -> None:
    model, optim = trained_dicts()
    whole = {"model": model, "optimizer": optim, "epoch": 3, "average": torch.ones(5)}
    torch.save(whole, root / "one.pt")
    set_crc32_options(False)
    try:
        torch.save(whole, root / "without.pt")
    finally:
        set_crc32_options(True)
    torch.save(whole, root / "legacy.pt", _use_new_zipfile_serialization=False)
    folder = root / "folder"
    folder.mkdir()
    torch.save(model, folder / "model.pt")
    torch.save(optim, folder / "optim.pt")
    torch.save({"seen": torch.arange(9)}, folder / "train.pt")
    turned = {**model, "0.weight": model["0.weight"].t().contiguous().t()}  # not in row-major order
    torch.save(turned, root / "turned.pt")
    with (
        zipfile.ZipFile(root / "one.pt") as source,
        zipfile.ZipFile(root / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for info in source.infolist():
            packed.writestr(info.filename, source.read(info))


def records_in(path: Path) -> Iterator[tuple[str, int, int]]:
    """The name of each record of a zip file, the byte at which its content begins, and its number of bytes in the file."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            at = info.header_offset
            start = at + 30 + sum(int.from_bytes(data[at + n : at + n + 2], "little") for n in (26, 28))
            if zlib.crc32(data[start : start + info.file_size]) != info.CRC and not info.compress_type:
                raise AssertionError(f"{info.filename}: the oracle looks at the wrong bytes")
            yield info.filename, start, info.compress_size


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


class VerifySumsTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        write_files(cls.root)
        run_on_ranks(write_dcp, 2, cls.root)

    def copied(self, name: str) -> Path:
        new = self.own_folder() / name
        (shutil.copytree if (self.root / name).is_dir() else shutil.copy)(self.root / name, new)
        return new

    def test_what_is_whole(self) -> None:
        for name, has in (
            ("one.pt", True),
            ("folder", True),
            ("turned.pt", True),
            ("packed.pt", True),
            ("dcp", True),
            ("without.pt", False),
            ("legacy.pt", False),
        ):
            with self.subTest(name):
                self.assertIs(fsdp_optim.verify(self.root / name, progress=False).has_checksums, has)

    def test_a_file_without_checksums_loads(self) -> None:
        """After `set_crc32_options(False)`: zipfile would take the zeros for damage."""
        model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
        restored = fsdp_optim.load(self.root / "without.pt", model, options=fsdp_optim.LoadOptions(progress=False))
        check_same("weights", dict(model.state_dict()), trained_dicts()[0])
        self.assertEqual(restored.state["epoch"], 3)

    @parameterized.expand(
        [("one.pt", ""), ("turned.pt", ""), ("folder", "model.pt"), ("folder", "optim.pt"), ("folder", "train.pt")]
    )
    def test_a_byte_of_each_tensor(self, name: str, file: str) -> None:
        """The first, the middle and the last byte of each record; a load takes them, because torch has no way to see them."""
        for record, start, nbytes in list(records_in(self.root / name / file if file else self.root / name)):
            for place in sorted({0, nbytes // 2, nbytes - 1}):
                damaged = self.copied(name)
                flipped(damaged / file if file else damaged, start + place)
                text = error_text(partial(fsdp_optim.verify, damaged, progress=False))
                self.assertEqual(text[0], "CheckpointError", (record, place))
                self.assertIn(str(damaged / file if file else damaged), text[1])
                if "/data/" in record:
                    self.assertIn(f"the record {record}", text[1])
                    self.assertRegex(text[1], r"its CRC32 is [0-9a-f]{8}, not [0-9a-f]{8}")

    def test_the_tensor_is_named(self) -> None:
        model, _ = trained_dicts()
        data = (self.root / "one.pt").read_bytes()
        for name in ("0.weight", "1.running_mean"):
            at = data.index(model[name].numpy().tobytes())
            damaged = self.copied("one.pt")
            flipped(damaged, at + 2)
            refused(
                partial(fsdp_optim.verify, damaged, progress=False),
                CheckpointError,
                f"with {name}, is not what was saved",
            )
        model = torch.load(self.root / "turned.pt")
        damaged = self.copied("turned.pt")
        at = damaged.read_bytes().index(model["0.weight"].t().numpy().tobytes())
        flipped(damaged, at)
        refused(
            partial(fsdp_optim.verify, damaged, progress=False), CheckpointError, "with 0.weight, is not what was saved"
        )

    def test_all_damage_is_named_at_once(self) -> None:
        damaged = self.copied("one.pt")
        for record, start, _ in list(records_in(damaged)):
            if "/data/" in record:
                flipped(damaged, start)
        number = sum("/data/" in record for record, _, _ in records_in(self.root / "one.pt"))
        refused(
            partial(fsdp_optim.verify, damaged, progress=False),
            CheckpointError,
            f"{number} damaged places",
            "exp_avg_sq",
        )

    def test_records_that_share_bytes(self) -> None:
        """A hostile directory lets many records have the same bytes, so that a small file would be read for hours."""
        path = self.own_folder() / "shared.pt"
        with zipfile.ZipFile(path, "w") as archive:
            whole = io.BytesIO()
            torch.save({"weight": torch.zeros(50_000)}, whole)
            with zipfile.ZipFile(whole) as source:
                for info in source.infolist():
                    archive.writestr(info.filename, source.read(info))
            data = next(info for info in archive.filelist if info.filename.endswith("/data/0"))
            for number in range(100):
                again = copy.copy(data)
                again.filename = f"{data.filename}{number}"
                archive.filelist.append(again)
        refused(
            partial(fsdp_optim.verify, path, progress=False),
            CheckpointError,
            "shared.pt: its records have ",
            "it was changed",
        )

    def test_compressed_records(self) -> None:
        damaged = self.copied("packed.pt")
        for record, start, nbytes in list(records_in(damaged)):
            if record.endswith("/data/0"):
                flipped(damaged, start + nbytes // 2)
        refused(
            partial(fsdp_optim.verify, damaged, progress=False),
            CheckpointError,
            "packed.pt: the record one/data/0",
            "damaged",
        )

    def test_a_byte_of_each_item_of_dcp(self) -> None:
        """Each has an archive of its own; the error names the file and the key."""
        places = dcp.FileSystemReader(self.root / "dcp").read_metadata().storage_data
        for index, info in places.items():
            damaged = self.copied("dcp")
            path = damaged / info.relative_path
            part = path.read_bytes()[info.offset : info.offset + info.length]
            if (at := at_of_data(part)) is None:
                continue
            flipped(path, info.offset + at)
            refused(
                partial(fsdp_optim.verify, damaged, progress=False),
                CheckpointError,
                str(path),
                index.fqn,
            )


def at_of_data(part: bytes) -> int | None:
    """A byte of the elements in an archive, or of its pickle for other values; None for a tensor without elements."""
    with zipfile.ZipFile(io.BytesIO(part)) as archive:
        infos = {info.filename.rpartition("/")[2]: info for info in archive.infolist()}
        info = infos.get("0", infos["data.pkl"])
        start = info.header_offset + 30
        start += sum(
            int.from_bytes(part[info.header_offset + n : info.header_offset + n + 2], "little") for n in (26, 28)
        )
        return start + info.file_size // 2 if info.file_size else None
