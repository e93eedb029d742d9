"""Fingerprints in checkpoints without ranks: verify compares them, diff reads no equal values, convert keeps them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.commands import called
from kit.folders import SharedFolder
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import CheckpointError, Fingerprint, LoadOptions, SaveOptions
from fsdp_optim.offline.values import element_windows


class Model(torch.nn.Module):
    """Tensors of several dtypes, which begin at odd places of a file, one of them longer than a unit of a conversion."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.large = torch.nn.Parameter(torch.randn(2500, 1001, generator=generator))
        self.small = torch.nn.Parameter(torch.randn(3, generator=generator).bfloat16())
        self.scalar = torch.nn.Parameter(torch.tensor(2.5))
        self.register_buffer("mask", torch.rand(77, generator=generator) > 0.5)
        self.register_buffer("nan", torch.tensor([1.0, torch.nan]))


class OfflineTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        cls.model = Model()
        cls.optim = torch.optim.Adam(cls.model.parameters())
        for param in cls.model.parameters():
            param.grad = torch.ones_like(param)
        cls.optim.step()
        cls.save(cls.root / "a")

    @classmethod
    def save(cls, path: Path, **options: Any) -> None:
        given = {"durable": False, "progress": False, "fingerprint": True, "checksums": False, **options}
        state = {"ema": torch.arange(5000.0)}
        fsdp_optim.save(path, cls.model, cls.optim, state=state, overwrite=True, options=SaveOptions(**given))

    def copied(self, name: str = "b") -> Path:
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.root / "a", path)
        return path

    def verify(self, path: Path) -> Any:
        return fsdp_optim.verify(path, progress=False, bucket_nbytes=16 << 20)

    def test_verify(self) -> None:
        result = self.verify(self.root / "a")
        self.assertEqual((result.num_proven, result.num_tensors, result.has_checksums), (15, 15, False))
        for name, at in (("model.safetensors", 5_000_000), ("optim.safetensors", -1), ("state.safetensors", -1)):
            path = self.copied()
            data = bytearray((path / name).read_bytes())
            data[at] ^= 64
            (path / name).write_bytes(data)
            with self.assertRaisesRegex(
                CheckpointError, "its elements are not those of which the save has made the fingerprint"
            ):
                self.verify(path)

    def test_exchanged_tensors(self) -> None:
        """Two tensors that were exchanged after the save, with a header that is right: each is named."""
        path = self.copied()
        file = path / "optim.safetensors"
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        body = bytearray(data[8 + length :])
        (a, b), (c, d) = (header[f"state.large.{name}"]["data_offsets"] for name in ("exp_avg", "exp_avg_sq"))
        body[a:b], body[c:d] = body[c:d], body[a:b]
        file.write_bytes(data[: 8 + length] + body)
        with self.assertRaisesRegex(
            CheckpointError, r"2 damaged places.*state\.large\.exp_avg: .*state\.large\.exp_avg_sq: "
        ):
            self.verify(path)

    def test_command(self) -> None:
        _, text, _ = called("verify", self.root / "a", "--quiet")
        self.assertIn("complete: 15 tensors", text)
        self.assertIn("are as they were saved, by their fingerprints", text)
        self.save(self.root / "sums", checksums=True)
        _, text, _ = called("verify", self.root / "sums", "--quiet")
        self.assertIn("by their checksums; the fingerprints of 15 are those of the live values", text)
        _, text, _ = called("verify", self.root / "sums", "--json", "--quiet")
        self.assertEqual(json.loads(text)["num_proven"], 15)

    def test_diff_reads_no_equal_values(self) -> None:
        before = self.model.small.detach().clone()
        with torch.no_grad():
            self.model.small[1] += 1
        self.save(self.root / "c")
        with torch.no_grad():
            self.model.small.copy_(before)
        plain = self.copied("plain")
        self.save(plain, fingerprint=False)
        read: list[int] = []
        of_reader = element_windows.WindowReader.read

        def count(reader: Any, parts: Any) -> Any:
            read.extend(num for _, _, _, num in parts)
            return of_reader(reader, parts)

        with mock.patch.object(element_windows.WindowReader, "read", count):
            got = fsdp_optim.diff(self.root / "a", self.root / "c", progress=False)
            self.assertEqual(
                sorted(set(read)), [1, 2, 3]
            )  # the scalars in memory, the value with a NaN, the other values
            want = fsdp_optim.diff(plain, self.root / "c", progress=False)
            self.assertGreater(sum(read), 2 * 3 * 2500 * 1001)
        self.assertEqual([value.name for value in got.differing], ["small"])
        for by_prints, other in zip(got.values, want.values, strict=True):
            self.assertEqual(
                (by_prints.name, by_prints.num_differing, by_prints.a, by_prints.nans),
                (other.name, other.num_differing, other.a, other.nans),
            )
            self.assertAlmostEqual(by_prints.norm, other.norm, delta=1e-9 * (1 + by_prints.norm))
        self.assertRegex("; ".join(got.notes), r"\d+ of \d+ values were not read: their fingerprints are equal")

    def test_convert_keeps_it(self) -> None:
        out = self.root / "own"
        fsdp_optim.convert(self.root / "a", out, overwrite=True)
        self.assertEqual((out / "fingerprint.json").read_bytes(), (self.root / "a" / "fingerprint.json").read_bytes())
        self.assertEqual(self.verify(out).num_proven, 15)

    @parameterized.expand([("dcp",), ("torch",)])
    def test_formats_without_a_place_say_so(self, format: str) -> None:
        with self.assertLogs(logging.getLogger("fsdp_optim"), "WARNING") as logs:
            fsdp_optim.convert(self.root / "a", self.root / f"to {format}", format=format, overwrite=True)
        self.assertIn("left out of the new checkpoint: the fingerprint, for which the format", "\n".join(logs.output))
        result = self.verify(self.root / f"to {format}")
        self.assertEqual(result.num_proven, 0)

    def test_of_another_version(self) -> None:
        """A fingerprint that this version cannot compare is no damage of the values: the error says what it is."""
        self.save(self.root / "newer", checksums=True)
        with (
            mock.patch("fsdp_optim.results.fingerprints._VERSION", 2),
            self.assertRaisesRegex(CheckpointError, "fingerprint of version 1, and this version of fsdp_optim makes"),
        ):
            fsdp_optim.load(self.root / "newer", self.model, self.optim, options=LoadOptions(progress=False))

    def test_public_fingerprint_of_a_checkpoint(self) -> None:
        saved = Fingerprint.from_json((self.root / "a" / "fingerprint.json").read_text())
        live = fsdp_optim.fingerprint(self.model, self.optim, state={"ema": torch.arange(5000.0)})
        self.assertEqual(live.differences(saved), ())
