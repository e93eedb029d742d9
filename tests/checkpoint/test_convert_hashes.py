"""A conversion of our own files hashes each byte once, where the segments of both files are the same, and every hash is right."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.checkpoint_format import all_bytes
from kit.conversions import MEMORY, check_converted, save_some
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats import extents


class ConvertHashesTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.source = self.root / "source"
        save_some(self.source, num_layers=4, width=256)

    def hashed(self, target: str, **options: Any) -> int:
        """The bytes that are hashed in a conversion, in segments that lie in one piece of memory."""
        nbytes = list[int]()
        real: Callable[[Any], int] = extents.hash_of

        def counted(data: Any) -> int:
            nbytes.append(len(data))
            return real(data)

        with mock.patch.object(extents, "hash_of", counted):
            fsdp_optim.convert(self.source, self.root / target, durable=False, **options)
        return sum(nbytes)

    def test_once(self) -> None:
        nbytes = sum(path.stat().st_size for path in self.source.glob("*.safetensors"))
        self.assertLess(self.hashed("same"), 1.05 * nbytes)
        check_converted(self.root / "same", self.source)

    @parameterized.expand([("files of another cut", {"max_file_size": 300_001}), ("small units", {"memory": MEMORY})])
    def test_the_new_table_is_right(self, _: str, options: dict[str, Any]) -> None:
        """Compared with a table of hashes of the bytes that are there, by `verify`, and by the way back."""
        fsdp_optim.convert(self.source, self.root / "other", durable=False, **options)
        self.assertTrue(fsdp_optim.verify(self.root / "other").has_checksums)
        fsdp_optim.convert(self.root / "other", self.root / "back", durable=False)
        check_converted(self.root / "back", self.source)

    def test_weights_in_another_order(self) -> None:
        """A source whose tensors lie elsewhere in the file than in the new one: nothing is taken for the same."""
        model = torch.nn.Sequential(torch.nn.Linear(300, 301), torch.nn.Linear(301, 7).to(torch.float64))
        fsdp_optim.save(self.root / "mixed", model, durable=False)
        fsdp_optim.convert(self.root / "mixed", self.root / "torch", format="torch", durable=False)
        fsdp_optim.convert(self.root / "torch", self.root / "back", durable=False)
        fsdp_optim.verify(self.root / "back")
        fsdp_optim.convert(self.root / "mixed", self.root / "again", durable=False)
        fsdp_optim.verify(self.root / "again")

    def test_damage_of_the_source_is_found_before_the_commit(self) -> None:
        """Any byte: of each file, near its beginning, in the middle, and at its end."""
        for path in sorted(self.source.glob("*.safetensors")):
            whole = path.read_bytes()
            for at in (len(whole) // 5, len(whole) // 2, len(whole) - 1):
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
                with self.subTest(path.name, at=at), self.assertRaisesRegex(CheckpointError, "damaged"):
                    fsdp_optim.convert(self.source, self.root / "to", durable=False)
                self.assertEqual(sorted(one.name for one in self.root.iterdir()), ["source"])
            path.write_bytes(whole)
        self.assertIn("model.safetensors", all_bytes(self.source))
