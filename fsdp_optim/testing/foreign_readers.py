"""A test class for every format of another library that is read; `fsdp_optim.foreign.reader` has the reader that they share.

    class TestTheirFormat(ReaderConformance, unittest.TestCase):
        def make_format(self):
            return THEIR_FORMAT

        def write(self, folder):
            their_library.save(folder, tensors, ...)
            return Written(model=tensors, optim=[...])

        def open_any(self, folder):
            return Folder(folder, PROBE).open_any()

Everything runs in one process, on a folder.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.index import stored_in
from fsdp_optim.formats.base.protocols import COMMON, Format, Reader, StoredTensor
from fsdp_optim.layout import Whole
from fsdp_optim.plan import Copy, copies_into
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.memory import dtype_name, dtype_named
from fsdp_optim.testing.mix_in import MixIn

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class WrittenSample:
    """The checkpoint that a test has written.

    Attributes:
        model: tensors by the names in the checkpoint.
        optim: the tensors of the full dict, in its order.
        extra: the values of the trainer; None: they are not compared.
    """

    model: Tensors
    optim: Sequence[torch.Tensor] = ()
    extra: Mapping[str, Any] | None = field(default=None)


class ReaderConformance(MixIn):
    """A mix-in for a `unittest.TestCase`: the promises of a format that is read, one per test."""

    def make_format(self) -> Format:
        """Return the format."""
        raise NotImplementedError

    def write(self, folder: Path) -> WrittenSample:
        """Write a checkpoint into an empty folder, as the other library does."""
        raise NotImplementedError

    num_flips, num_cuts = 300, 40
    """How many damaged copies of each file are read: with one bit changed, and cut short."""

    def open_any(self, folder: Path) -> Opened:
        """Return the files of a folder, as a store opens files of any content."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- helpers

    def _written(self) -> tuple[Path, WrittenSample]:
        folder = Path(tempfile.mkdtemp())
        self._case.addCleanup(shutil.rmtree, folder)
        place = folder / "theirs"
        place.mkdir()
        return place, self.write(place)

    def _open(self, folder: Path) -> Reader:
        format = self.make_format()
        opened = self.open_any(folder)
        try:
            return format.open(opened, verify=True)
        except BaseException:
            opened.close()
            raise

    def _recognises(self, folder: Path) -> bool:
        with self.open_any(folder) as opened:
            return self.make_format().recognises(opened)

    # ------------------------------------------------------------------------------------------- the promises

    def test_its_checkpoints_are_recognised(self) -> None:
        folder, _ = self._written()
        self._case.assertTrue(self._recognises(folder))
        empty = folder.with_name("empty")
        empty.mkdir()
        (empty / "notes.txt").write_text("nothing")
        self._case.assertFalse(self._recognises(empty))

    def test_every_tensor_is_read_as_it_was_written(self) -> None:
        folder, written = self._written()
        with closing(self._open(folder)) as reader:
            self._case.assertEqual(sorted(reader.index.weights), sorted(written.model))
            for name, tensor in written.model.items():
                self._check_read(reader, name, reader.index.weights[name], tensor)
            optim = reader.index.optim
            stored = list(stored_in(optim.decoded(allow_pickle=False, records={}).full)) if optim is not None else []
            self._case.assertEqual(len(stored), len(written.optim))
            for entry, tensor in zip(stored, written.optim, strict=True):
                self._check_read(reader, entry.key, entry, tensor)
            self._case.assertEqual(
                [*reader.index.optim_tensors.values()], list({entry.key: entry for entry in stored}.values())
            )
            reader.check_unchanged()

    def test_parts_are_read(self) -> None:
        """Any range of elements, one by one and together, without the others."""
        folder, written = self._written()
        rng = random.Random(7)
        with closing(self._open(folder)) as reader:
            for name, tensor in written.model.items():
                numel = tensor.numel()
                for _ in range(4 if numel else 0):
                    first = rng.randrange(numel)
                    num = rng.randrange(1, numel - first + 1)
                    data = read_elements(reader, reader.index.weights[name], first, num)
                    wanted = _bytes_of(tensor)[first * tensor.itemsize : (first + num) * tensor.itemsize]
                    self._case.assertEqual(data, wanted, f"{name}: elements [{first}, {first + num})")

    def test_extras(self) -> None:
        folder, written = self._written()
        if written.extra is None:
            return
        with closing(self._open(folder)) as reader:
            self._case.assertEqual(COMMON in reader.index.extras, bool(written.extra))
            if written.extra:
                self._case.assertEqual(reader.index.extras[COMMON].decoded(allow_pickle=False), dict(written.extra))

    def test_two_readers_agree(self) -> None:
        """The identity is the same for two readers of one checkpoint, and another one for another checkpoint."""
        folder, _ = self._written()
        with closing(self._open(folder)) as reader, closing(self._open(folder)) as other:
            self._case.assertEqual(reader.index.identity, other.index.identity)

    def test_nothing_is_written(self) -> None:
        folder, written = self._written()
        before = {path: path.read_bytes() for path in _files(folder)}
        with closing(self._open(folder)) as reader:
            for name in written.model:
                read_elements(reader, reader.index.weights[name], 0, reader.index.weights[name].placement.numel)
        self._case.assertEqual({path: path.read_bytes() for path in _files(folder)}, before)

    def test_a_file_that_is_written_again_is_noticed(self) -> None:
        folder, written = self._written()
        with closing(self._open(folder)) as reader:
            name = next(iter(written.model))
            read_elements(reader, reader.index.weights[name], 0, reader.index.weights[name].placement.numel)
            for path in _files(folder):
                data = path.read_bytes()
                path.unlink()
                path.write_bytes(data)
                os.utime(path, ns=(1, 1))
            with self._case.assertRaises(CheckpointError):
                reader.check_unchanged()

    def test_damage_is_an_error_and_no_crash(self) -> None:
        """Files that were cut short, lost, emptied, or have changed bytes: CheckpointError or values, and nothing else."""
        folder, _ = self._written()
        rng = random.Random(11)
        for path in _files(folder):
            data = path.read_bytes()
            cuts = sorted(
                {0, 1, len(data) // 2, len(data) - 1, *(rng.randrange(len(data) or 1) for _ in range(self.num_cuts))}
            )
            for cut in cuts:
                if cut < len(data):
                    self._check_damaged(folder, path, data[:cut], f"cut to {cut} of {len(data)} bytes")
            for _ in range(self.num_flips if data else 0):
                at, bit = rng.randrange(len(data)), rng.randrange(8)
                self._check_damaged(
                    folder, path, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], f"bit {bit} of byte {at}"
                )
            path.unlink()
            self._all_or_error(folder, f"{path.name} is missing")
            path.write_bytes(data)

    def _check_damaged(self, folder: Path, path: Path, data: bytes, what: str) -> None:
        whole = path.read_bytes()
        path.write_bytes(data)
        try:
            self._all_or_error(folder, f"{path.name}: {what}")
        finally:
            path.write_bytes(whole)

    def _all_or_error(self, folder: Path, what: str) -> None:
        """Open and read everything. A CheckpointError is right; everything else that is raised fails the test."""
        try:
            if not self._recognises(folder):
                return
            with closing(self._open(folder)) as reader:
                for stored in (*reader.index.weights.values(), *reader.index.optim_tensors.values()):
                    read_elements(reader, stored, 0, stored.placement.numel)
                for extra in reader.index.extras.values():
                    extra.decoded_each(allow_pickle=False)
        except CheckpointError:
            return
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error

    def _check_read(self, reader: Reader, name: str, stored: StoredTensor, tensor: torch.Tensor) -> None:
        self._case.assertEqual(
            (stored.dtype, tuple(stored.shape)), (dtype_name(tensor.dtype), tuple(tensor.shape)), name
        )
        self._case.assertIsInstance(dtype_named(stored.dtype), torch.dtype)
        data = read_elements(reader, stored, 0, tensor.numel())
        self._case.assertEqual(data, _bytes_of(tensor), name)


def read_elements(reader: Reader, stored: StoredTensor, first: int, num: int) -> bytes:
    """Return some elements of a stored tensor, in row-major order, one run at a time.

    Raises ValueError if an element is in no chunk.
    """
    size, data = stored.itemsize, bytearray(num * stored.itemsize)
    covered, memory = 0, memoryview(data)
    for copy in copies_into(stored.placement, Whole(stored.shape, (0,)), 0):
        for source, target, numel in _runs(copy):
            begin, end = max(target, first), min(target + numel, first + num)
            if begin < end:
                file, start = stored.place_on(copy.source_rank)
                part = memory[(begin - first) * size : (end - first) * size]
                reader.read({file: [Extent(start + (source + begin - target) * size, part)]})
                covered += end - begin
    if covered != num:
        raise CheckpointError(f"{stored.key}: {covered} of {num} elements are in chunks")
    return bytes(data)


def _runs(copy: Copy) -> Iterator[tuple[int, int, int]]:
    """(element of the source, element of the target, number of elements) of each contiguous run of a copy."""
    if not copy.sizes:
        yield copy.source_offset, copy.target_offset, 1
        return
    outer = [range(size) for size in copy.sizes[:-1]]
    last, source_step, target_step = copy.sizes[-1], copy.source_strides[-1], copy.target_strides[-1]
    for index in itertools.product(*outer):
        source = copy.source_offset + sum(i * s for i, s in zip(index, copy.source_strides, strict=False))
        target = copy.target_offset + sum(i * s for i, s in zip(index, copy.target_strides, strict=False))
        if source_step == target_step == 1:
            yield source, target, last
        else:
            yield from ((source + i * source_step, target + i * target_step, 1) for i in range(last))


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
