"""The promises of `verify`, `inspect` and `convert` about a checkpoint of another library, for the tests of its reader."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.testing import ReaderConformance


class VerifiedConformance(ReaderConformance):
    """`ReaderConformance`, and the calls that need no model. `unread`: the files that have nothing for a load."""

    unread: Sequence[str] = ()
    has_checksums = True  # the CRC32 of each record of torch's files

    def test_it_is_verified_and_inspected(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            written = self.write(Path(folder))
            report, info = fsdp_optim.verify(folder, progress=False), fsdp_optim.inspect(folder)
            shapes = {name: tuple(tensor.shape) for name, tensor in written.model.items()}
            self._case.assertEqual({name: tuple(tensor.shape) for name, tensor in info.model.items()}, shapes)
            self._case.assertEqual((report.format, report.has_checksums), (info.format, self.has_checksums))
            self._case.assertGreaterEqual(report.num_tensors, len(shapes))
            self._case.assertEqual(info.has_optim, bool(written.optim))

    def test_a_file_that_was_cut_short_is_not_converted(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            folder, target = Path(root) / "theirs", Path(root) / "ours"
            folder.mkdir()
            self.write(folder)
            for file in self._files_that_are_read(folder):
                data = file.read_bytes()
                file.write_bytes(data[: len(data) // 2])
                with self._case.subTest(file.name):
                    with self._case.assertRaises(CheckpointError):
                        fsdp_optim.verify(folder, progress=False)
                    with self._case.assertRaises((CheckpointError, fsdp_optim.StateError)):
                        fsdp_optim.convert(folder, target, options=fsdp_optim.ConvertOptions(durable=False))
                    self._case.assertFalse(target.exists())
                file.write_bytes(data)

    def _files_that_are_read(self, folder: Path) -> Iterator[Path]:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in self.unread and path.stat().st_size > 9 and path.suffix != ".json":
                yield path
