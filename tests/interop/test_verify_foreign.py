"""`verify` and `inspect` read every format of other libraries; what is cut short is an error of `verify` and of `convert`."""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path

import test_rank_file_readers as of_ranks
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.errors import CheckpointError
from fsdp_optim.testing import Written

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import test_foreign_readers as whole

WRITERS = [
    *(whole.SafetensorsTest, whole.SplitSafetensorsTest, whole.TorchFileTest, whole.LegacyTorchFileTest),
    *(whole.TorchFilesTest, whole.DcpTest, whole.ZeroTest, whole.Zero3Test),
    *(one for one in vars(of_ranks).values() if isinstance(one, type) and getattr(one, "kind", "")),
]

UNREAD = ("config.yaml", "zero_pp_rank_1_mp_rank_00_model_states.pt")
"""Files that have nothing for a load: OLMo's config, and ZeRO 3's copy of the buffers where no rank has given a client_state."""


class VerifyForeignTest(unittest.TestCase):
    @parameterized.expand([(one.__name__, one) for one in WRITERS])
    def test_every_format(self, _: str, writer: type[unittest.TestCase]) -> None:
        with tempfile.TemporaryDirectory() as root:
            folder, target = Path(root) / "theirs", Path(root) / "ours"
            folder.mkdir()
            written: Written = writer("test_extras").write(folder)  # type: ignore[attr-defined]
            found, info = fsdp_optim.verify(folder, progress=False), fsdp_optim.inspect(folder)
            self.assertEqual(set(info.model), set(written.model))
            for name, tensor in written.model.items():
                self.assertEqual(tuple(info.model[name].shape), tuple(tensor.shape), name)
            self.assertEqual((found.format, found.has_checksums), (info.format, False))
            self.assertGreaterEqual(found.num_tensors, len(written.model))
            self.assertEqual(info.has_optim, bool(written.optim))
            files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in UNREAD)
            for file in (path for path in files if path.stat().st_size > 9 and path.suffix != ".json"):
                data = file.read_bytes()
                file.write_bytes(data[: len(data) // 2])
                with self.subTest(file.name):
                    with self.assertRaises(CheckpointError):
                        fsdp_optim.verify(folder, progress=False)
                    with self.assertRaises((CheckpointError, fsdp_optim.StateError)):
                        fsdp_optim.convert(folder, target, durable=False)
                    self.assertFalse(target.exists())
                file.write_bytes(data)
