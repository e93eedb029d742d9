"""A test class for every format that is written for other programs, and read back as what such programs write.

    class TestTheirFormat(WrittenConformance, unittest.TestCase):
        def make_format(self):
            return WRITTEN_FOR_THEM

        def make_store(self, folder):
            return Folder(folder, WRITTEN_FOR_THEM.probe)

        def open_any(self, folder):
            return Folder(folder, PROBE).open_any()

It has the promises of `ReaderConformance`, for checkpoints of the format's own writer, and those of a format that this library
keeps: the number of a checkpoint, and that a probe calls it complete and damaged ones not.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from fsdp_optim.formats.base.description import SCALAR, SCALAR_TENSOR, TENSOR
from fsdp_optim.formats.base.protocols import written
from fsdp_optim.plugins import COMMON, GroupDescription, Half, OptimDescription, ParamDescription
from fsdp_optim.storage.base import Store
from fsdp_optim.testing import ReaderConformance, WrittenSample
from fsdp_optim.testing.foreign_readers import Tensors
from fsdp_optim.testing.saved_sample import SavedSample, save_as


class WrittenConformance(ReaderConformance):
    """A mix-in for a `unittest.TestCase`: the promises of a format that is written for other programs.

    Attributes:
        extra_read: what a reader gives of the trainer's values `extra`; None: as they were saved.
    """

    extra_read: Any = None

    def make_store(self, folder: Path) -> Store:
        """A store at a folder that is not there yet, with the format's probe."""
        raise NotImplementedError

    def write(self, folder: Path) -> WrittenSample:
        self._saved(folder)
        state, extra = self._halves()["optim"], self._extra()
        return WrittenSample(
            self._halves()["model"], list(state.values()), extra if self.extra_read is None else self.extra_read
        )

    def _saved(self, folder: Path) -> SavedSample:
        folder.rmdir()
        description = OptimDescription(
            groups=(GroupDescription((("lr", 1e-3), ("betas", (0.9, 0.999))), ("große",)),),
            other_keys={},
            params={"große": ParamDescription((7, 5), self._values(), has_state=True)},
            optimizer_class="Adam",
        )
        return save_as(
            self.make_format(), self.make_store(folder), self._halves(), description, {COMMON: self._extra()}
        )

    def _new_place(self) -> Path:
        folder = Path(tempfile.mkdtemp())
        self._case.addCleanup(shutil.rmtree, folder)
        place = folder / "ours"
        place.mkdir()
        return place

    def _values(self) -> tuple[tuple[Any, str, Any], ...]:
        return (
            ("exp_avg", TENSOR, "state.große.exp_avg"),
            ("step", SCALAR_TENSOR, "state.große.step"),
            ("ratio", SCALAR, 0.5),
        )

    def _halves(self) -> dict[Half, Tensors]:
        model = {
            "große": torch.arange(35, dtype=torch.float32).reshape(7, 5),
            "none": torch.empty(0, 4),
            "scalar": torch.tensor(-0.0),
            "half": torch.arange(9, dtype=torch.bfloat16).reshape(3, 3),
            "flags": torch.tensor([True, False, True]),
            "small": torch.arange(5, dtype=torch.uint8).view(torch.float8_e4m3fn),
        }
        state = {"state.große.exp_avg": torch.ones(7, 5), "state.große.step": torch.tensor(3.0)}
        return {"model": model, "optim": state}

    def _extra(self) -> dict[str, Any]:
        return {"epoch": 7, "seen": [1, 2.5]}

    def test_a_whole_one_is_complete_and_a_part_of_it_is_not(self) -> None:
        """Each file that is missing or short, by what stores ask before they remove or replace anything."""
        folder = self._new_place()
        saved, format = self._saved(folder), written(self.make_format())
        with saved.store.open() as opened:
            self._case.assertTrue(format.recognises(opened))
            self._case.assertEqual(format.sequence_in(opened), 5)
            self._case.assertTrue(format.probe.status_in(opened, whole=True).is_complete)
        for name, data in saved.files.items():
            for damaged in (None, data[:-9]) if name != saved.manifest and data else (data[: len(data) // 2],):
                (folder / name).unlink()
                if damaged is not None:
                    (folder / name).write_bytes(damaged)
                with self._case.subTest(name, nbytes=damaged is not None), saved.store.open() as opened:
                    self._case.assertFalse(format.probe.status_in(opened, whole=True).is_complete)
                (folder / name).unlink(missing_ok=True)
                (folder / name).write_bytes(data)

    def test_two_saves_are_two(self) -> None:
        """Every save has a token of its own, and its probe says it."""
        tokens = []
        for _ in range(2):
            with self._saved(self._new_place()).store.open() as opened:
                tokens.append(written(self.make_format()).probe.token_in(opened))
        self._case.assertEqual(len({*tokens, None}), 3)
