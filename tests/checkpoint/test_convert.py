"""From files to other files, in one process without ranks: the same checkpoint, element by element."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.checkpoint_format import Buffered, all_bytes, check_folder, extra, read_manifest, tensors_of
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import collective

WRAPPERS = ("FSDP2", "fairscale flat", "plain")


def saved(root: Path, *, with_optim: bool = True) -> None:
    """One checkpoint for each wrapper."""
    for wrapper in WRAPPERS:
        with cpu():
            trained = Trained(wrapper, adam, model=Buffered)
            optim = trained.optim if with_optim else None
            options: dict[str, Any] = {
                "extra": extra(),
                "per_rank_extra": ["of a rank"],
                "process_group": trained.process_group,
            }
            fsdp_optim.save(
                root / wrapper,
                trained.model,
                optim,
                step=7,
                **as_options(fsdp_optim.SaveOptions, **options, durable=False),
            )


def loaded(root: Path) -> None:
    """A conversion keeps a checkpoint bit for bit, for another wrapper and world size."""
    for wrapper in WRAPPERS:
        with cpu():
            target, wanted = Trained("FSDP2", adam, 0, Buffered), Trained("FSDP2", adam, model=Buffered)
            restored = fsdp_optim.load(
                root / wrapper, target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True)
            )
            check_same(wrapper, target.gather(None), wanted.gather(None))
            check_same("step", restored.step, 7)
            own = {"per_rank_extra": ["of a rank"]} if dist.get_rank() < 2 else {}
            check_same("values", restored.state, {**extra(), **own})


class ConvertTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        (cls.root / "saved").mkdir()
        (cls.root / "weights").mkdir()
        run_on_ranks(saved, 2, cls.root / "saved")
        run_on_ranks(saved, 2, cls.root / "weights", with_optim=False)

    def converted(self, source: Path, name: str, size: int) -> Path:
        """No message is sent, and no process group is there."""
        target = self.root / name / source.name
        target.parent.mkdir(exist_ok=True)
        before = all_bytes(source)
        with mock.patch.object(collective.dist, "batch_isend_irecv", side_effect=AssertionError("a message was sent")):
            done = fsdp_optim.convert(
                source, target, options=fsdp_optim.ConvertOptions(max_file_size=size, durable=False)
            )
        self.assertEqual(done.path, target)
        check_same("the source", all_bytes(source), before)
        check_folder(target)
        return target

    def test_every_tensor_is_the_same_in_files_of_another_size(self) -> None:
        for size in (1, 100, 10**9):
            for kind in ("saved", "weights"):
                for wrapper in WRAPPERS:
                    source = self.root / kind / wrapper
                    target = self.converted(source, f"{kind}-{size}", size)
                    for half in ("model", "optim"):
                        check_same(half, tensors_of(target, half), tensors_of(source, half))
                    files = list(target.glob("model*.safetensors"))
                    self.assertEqual(len(files), 1 if size == 10**9 else max(len(files), 2))
                    told = [{**read_manifest(folder)} for folder in (source, target)]
                    for manifest in told:
                        for key in ("created_ns", "token", "files", "brief"):
                            del manifest[key]
                    check_same("the manifest", told[1], told[0])

    def test_it_is_loaded_as_the_first_one_is(self) -> None:
        for size in (100, 10**9):
            for wrapper in WRAPPERS:
                self.converted(self.root / "saved" / wrapper, f"loaded-{size}", size)
            run_on_ranks(loaded, 3, self.root / f"loaded-{size}")

    def test_and_back_gives_the_same_files(self) -> None:
        source = self.root / "saved" / "FSDP2"
        there = self.converted(source, "there", 100)
        back = self.converted(there, "back", 10**9)
        got, wanted = all_bytes(back), all_bytes(source)
        for name in wanted:
            if name.endswith(".safetensors"):
                self.assertEqual(got[name], wanted[name], name)

    def test_damage_is_not_converted(self) -> None:
        source = self.root / "damaged"
        source.mkdir()
        for name, content in all_bytes(self.root / "saved" / "plain").items():
            (source / name).parent.mkdir(exist_ok=True)
            (source / name).write_bytes(content)
        file = source / "optim.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        target = self.root / "from damaged"
        with self.assertRaisesRegex(CheckpointError, "optim.safetensors.*not those that were saved"):
            fsdp_optim.convert(source, target, options=fsdp_optim.ConvertOptions(max_file_size=100, durable=False))
        self.assertEqual([path.name for path in self.root.iterdir() if "from damaged" in path.name], [])

    def test_pickled_values_are_copied_with_the_tensors_beside_them_and_never_left_out(self) -> None:
        values = {"own": {"made": unittest.TestCase, "ema": torch.ones(3)}, "plain": torch.zeros(2)}
        source = self.root / "pickled"
        asked = fsdp_optim.SaveOptions(allow_pickle=True, durable=False)
        fsdp_optim.save(source, torch.nn.Linear(2, 2), state=values, options=asked)
        for again in ("first", "second"):
            target = self.root / f"{again} of pickled"
            fsdp_optim.convert(source, target, options=fsdp_optim.ConvertOptions(max_file_size=1, durable=False))
            fsdp_optim.verify(target)
            got = fsdp_optim.load(target, options=fsdp_optim.LoadOptions(allow_pickle=True)).state
            check_same(again, {name: got[name] for name in values}, values)
            source = target
        for format in ("dcp", "torch", "torch_file"):
            with self.assertRaisesRegex(CheckpointError, "has a pickled value, .*give allow_pickle=True"):
                fsdp_optim.convert(source, self.root / "refused", format=format)
            self.assertFalse((self.root / "refused").exists())

    def test_what_is_there_stays(self) -> None:
        source, target = self.root / "saved" / "FSDP2", self.root / "taken"
        target.mkdir()
        (target / "note").write_text("mine")
        with self.assertRaises(CheckpointError):
            fsdp_optim.convert(source, target, options=fsdp_optim.ConvertOptions(max_file_size=100))
        self.assertEqual((target / "note").read_text(), "mine")
        self.assertTrue(torch.is_tensor(tensors_of(source, "model")["scale"]))
