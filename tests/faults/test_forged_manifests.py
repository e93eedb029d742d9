"""Manifests that somebody has forged, with checksums that agree: the values, or an error of the library, from every call."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from click.testing import CliRunner
from kit.checkpoint_damage import seal, seal_as_it_is, sealed_brief
from kit.checkpoint_format import read_manifest
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.cli.commands import doctor, inspect, ls, verify

HUGE = 10**4000  # no float, and as long as Python writes numbers


class ForgedManifestTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name) / "run"
        self.forged, self.good = self.root / "step-1", self.root / "step-2"
        self.model = nn.Linear(3, 2)
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(1, 3)).sum().backward()
        self.optim.step()
        options = fsdp_optim.SaveOptions(fingerprint=True)
        for step, path in ((1, self.forged), (2, self.good)):
            average = {"ema": {"weight": torch.ones(3)}}
            fsdp_optim.save(path, self.model, self.optim, step=step, state=average, options=options)

    def check_calls(self) -> None:
        """No call raises anything but an error of the library, and those of the whole folder see the other checkpoint."""
        out = self.root.parent / "out"
        calls: dict[str, Callable[[], object]] = {
            "load": lambda: fsdp_optim.load(self.forged, self.model, self.optim),
            "inspect": lambda: str(fsdp_optim.inspect(self.forged)),
            "verify": lambda: fsdp_optim.verify(self.forged),
            "diagnose": lambda: fsdp_optim.diagnose(self.forged),
            "diff": lambda: fsdp_optim.diff(self.forged, self.good),
            "convert": lambda: fsdp_optim.convert(self.forged, out / "converted"),
            "average": lambda: fsdp_optim.average([self.forged, self.good], out / "average"),
        }
        for name, call in calls.items():
            with self.subTest(name), contextlib.suppress(fsdp_optim.CheckpointError):
                call()
        for command, path in ((ls, self.root), (doctor, self.root), (inspect, self.forged), (verify, self.root)):
            with self.subTest(command.__name__):
                error = CliRunner().invoke(command.command, [str(path)]).exception
                self.assertIsInstance(error, (type(None), SystemExit, fsdp_optim.FsdpOptimError), error)
        self.assertEqual(fsdp_optim.latest(self.root), self.good)
        self.assertEqual(len(fsdp_optim.checkpoints(self.root)), 2)
        resumed = fsdp_optim.resume(self.root, self.model, self.optim)
        self.assertEqual(resumed.step if resumed is not None else None, 2)
        shutil.rmtree(out, ignore_errors=True)

    @parameterized.expand(
        [
            (10**30,),
            (-(10**30),),
            (253402300800 * 10**9,),  # of the year 10000
            (HUGE,),
        ]
    )
    def test_a_time_that_is_none(self, created_ns: int) -> None:
        checkpoint = read_manifest(self.forged)
        brief = sealed_brief(checkpoint["brief"] | {"created_ns": created_ns})
        seal_as_it_is(self.forged, checkpoint | {"created_ns": created_ns, "brief": brief})
        self.check_calls()
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "Expected `int`"):
            fsdp_optim.inspect(self.forged)

    def test_a_size_that_no_file_has(self) -> None:
        checkpoint = read_manifest(self.forged)
        checkpoint["files"]["model.safetensors"]["size"] = HUGE
        seal(self.forged, checkpoint)
        self.check_calls()

    def test_tensors_of_values_that_are_not_there(self) -> None:
        checkpoint = read_manifest(self.forged)
        del checkpoint["files"]["extra/common.safetensors"]
        seal(self.forged, checkpoint)
        self.check_calls()
        with self.assertRaisesRegex(
            fsdp_optim.CheckpointError, "has tensors of values, and no extra/common.safetensors"
        ):
            fsdp_optim.convert(self.forged, self.root.parent / "converted")

    @parameterized.expand([(3, 10**400), (4, 1e400), (5, [10**400]), (2, [1e400])])
    def test_a_fingerprint_of_no_number(self, at: int, value: Any) -> None:
        file, checkpoint = self.forged / "fingerprint.json", read_manifest(self.forged)
        record = json.loads(file.read_bytes())
        print_of_weight = [*record["weights"]["weight"], 0, []][:6]
        print_of_weight[at] = value
        record["weights"]["weight"] = print_of_weight
        self.put_fingerprint(checkpoint, json.dumps(record).encode())

    def test_a_fingerprint_that_is_nested_deeply(self) -> None:
        self.put_fingerprint(read_manifest(self.forged), b"[" * 100_000)

    def put_fingerprint(self, checkpoint: dict[str, Any], text: bytes) -> None:
        (self.forged / "fingerprint.json").write_bytes(text)
        about = {"size": len(text), "header_xxh3_64": xxhash.xxh3_64_hexdigest(text)}
        checkpoint["files"]["fingerprint.json"] |= about
        seal(self.forged, checkpoint)
        self.check_calls()
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "not the JSON of a fingerprint"):
            fsdp_optim.verify(self.forged)


if __name__ == "__main__":
    unittest.main()
