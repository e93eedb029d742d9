"""Fingerprints that saves keep: equal to those of the live model, compared by a load at any world size, in any wrapper."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.checkpoints import Whole, load, save
from kit.compare import error_text
from kit.folders import InFolder, SharedFolder
from kit.log_texts import lines_said
from kit.optimizers import OfModel, two_groups
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch.distributed.checkpoint.state_dict import get_state_dict

import fsdp_optim
from fsdp_optim import CheckpointError, CheckpointManager, Fingerprint, LoadOptions, ManagerOptions, SaveOptions, dcp
from fsdp_optim.checkpoint.load import installing
from fsdp_optim.testing import run_on_ranks

OPTIMIZER = OfModel(two_groups)
SOURCES = [("FSDP2", 2), ("fairscale flat", 2), ("HSDP", 4), ("DDP", 2), ("FSDP1 orig", 2)]
TARGETS = [("FSDP2", 4), ("FSDP1 flat", 2), ("FSDP2 x TP", 2), ("plain", 1), ("fairscale non-flat", 2)]


def stored(path: Path) -> Fingerprint:
    return Fingerprint.from_json((path / "fingerprint.json").read_text())


def save_all(root: Path, wrappers: list[str]) -> None:
    for wrapper in wrappers:
        with cpu():
            trained = Trained(wrapper, OPTIMIZER, model=Whole)
            path = root / f"{wrapper} {dist.get_world_size()}"
            save(path, trained, fingerprint=True, checksums=False, extra={"ema": torch.arange(5.0), "n": 3})
            live = fsdp_optim.fingerprint(trained.model, trained.optim)
        kept = stored(path)
        assert kept.weights == live.weights
        assert kept.optim == live.optim
        assert set(kept.state) == {"ema"}, kept.state


@contextlib.contextmanager
def wrong_elements(rank: int, name: str) -> Iterator[None]:
    """On one rank, a load that puts other elements in place than it has read."""
    install = installing.install_all

    def install_all(group: Any, weights: Any, reader: Any, optim: Any, **kwargs: Any) -> Any:
        install(group, weights, reader, optim, **kwargs)
        if dist.get_rank() == rank:
            state = next(state for state in optim.state.values() if name in state and state[name].numel())
            value = state[name].to_local() if hasattr(state[name], "to_local") else state[name]
            value.view(-1)[:1] += 1

    with mock.patch("fsdp_optim.checkpoint.load.restore.install_all", install_all):
        yield


def load_all(root: Path, wrapper: str) -> None:
    with cpu():
        for path in sorted(root.iterdir()):
            trained = Trained(wrapper, OPTIMIZER, 0, model=Whole)
            result = load(path, trained)
            assert (
                f"{result.num_tensors} fingerprints equal to the saved" in str(result.receipt or "") or dist.get_rank()
            )
            live = fsdp_optim.fingerprint(trained.model, trained.optim)
            assert not (differing := live.differences(dataclasses.replace(stored(path), state={}))), [
                str(difference) for difference in differing
            ]
        for name in ("exp_avg", "step"):
            with wrong_elements(dist.get_world_size() - 1, name):
                kind, text = error_text(functools.partial(load, path, Trained(wrapper, OPTIMIZER, 0, model=Whole)))
                assert (kind, f":{name}: has other elements (" in text) == ("CheckpointError", True), text
                assert "in the live model and optimizer are not what was saved, by their fingerprints" in text, text
                load(path, Trained(wrapper, OPTIMIZER, 0, model=Whole), fingerprint=False)


class TestSavesAndLoads(SharedFolder):
    """One folder with the checkpoints of several wrappers, which others load."""

    @classmethod
    def fill(cls) -> None:
        for size in (2, 4):
            run_on_ranks(save_all, size, cls.root, [wrapper for wrapper, of in SOURCES if of == size])

    @parameterized.expand(TARGETS)
    def test_load(self, wrapper: str, world_size: int) -> None:
        run_on_ranks(load_all, world_size, self.root, wrapper)

    def test_equal_whoever_saved(self) -> None:
        first, *others = (stored(path) for path in sorted(self.root.iterdir()))
        for other in others:
            self.assertEqual(first.differences(other), ())


class TestAlone(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "step"
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 300), torch.nn.Linear(300, 2))
        self.optim = torch.optim.Adam(self.model.parameters())
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.optim.step()

    def save(self, path: Path | None = None, **options: Any) -> Any:
        given = {"durable": False, "progress": False, "fingerprint": True, **options}
        return fsdp_optim.save(path or self.path, self.model, self.optim, overwrite=True, options=SaveOptions(**given))

    def load(self, **options: Any) -> Any:
        return fsdp_optim.load(self.path, self.model, self.optim, options=LoadOptions(progress=False, **options))

    def damage(self, name: str = "optim.safetensors") -> None:
        data = bytearray((self.path / name).read_bytes())
        data[-3] ^= 1
        (self.path / name).write_bytes(data)

    def test_without_there_is_no_file(self) -> None:
        self.save(fingerprint=False)
        self.assertFalse((self.path / "fingerprint.json").exists())
        self.assertNotIn("fingerprint", str(self.load().receipt))

    def test_in_the_background(self) -> None:
        options = SaveOptions(durable=False, fingerprint=True)
        handle = fsdp_optim.async_save(self.path, self.model, self.optim, options=options)
        live = fsdp_optim.fingerprint(self.model, self.optim)
        with torch.no_grad():
            self.model[0].weight += 1
        handle.wait()
        self.assertEqual(stored(self.path).differences(live), ())
        self.load()
        self.assertEqual(fsdp_optim.fingerprint(self.model, self.optim), live)

    def test_a_changed_byte_without_checksums(self) -> None:
        self.save(checksums=False)
        self.damage()
        with self.assertRaisesRegex(CheckpointError, r"1 of 16 values .*: has other elements \(norm"):
            self.load()
        self.load(fingerprint=False)

    def test_a_damaged_fingerprint(self) -> None:
        self.save()
        path = self.path / "fingerprint.json"
        path.write_bytes(path.read_bytes().replace(b"float32", b"float64"))
        with torch.no_grad():
            self.model[0].weight += 1
        live = fsdp_optim.fingerprint(self.model, self.optim)
        with self.assertRaisesRegex(CheckpointError, "fingerprint.json: is not what was saved: its checksum differs"):
            self.load()
        self.assertEqual(fsdp_optim.fingerprint(self.model, self.optim), live)  # nothing is loaded
        with self.assertRaisesRegex(CheckpointError, "fingerprint.json: is not what was saved"):
            fsdp_optim.verify(self.path, progress=False)

    def test_cast_weights(self) -> None:
        """A save that casts keeps no fingerprints of what it casts; a load that casts compares what it does not. Both say so."""
        with self.assertLogs("fsdp_optim", "WARNING") as saved:
            self.save(weights_dtype=torch.bfloat16)
        self.assertIn("no fingerprints are kept of 4 weights that the save casts: 0.bias, ", "".join(saved.output))
        kept = stored(self.path)
        self.assertEqual(kept.weights, {})
        self.assertEqual(len(kept.values_of("optim")), 12)
        self.assertIn("12 fingerprints equal", str(self.load(cast=True).receipt))
        self.save()
        self.model.bfloat16()
        self.optim = torch.optim.Adam(self.model.parameters())
        with self.assertLogs("fsdp_optim", "WARNING") as loaded:
            receipt = self.load(cast=True).receipt
        self.assertIn("4 fingerprints equal", str(receipt))  # the steps; moments follow the weights
        self.assertIn(
            "the fingerprints of 4 values that the load casts are not compared: 0.bias, ", "".join(loaded.output)
        )

    def test_formats_that_keep_none(self) -> None:
        with self.assertRaisesRegex(
            fsdp_optim.StateError, "fingerprint=True: the format 'dcp' has no place for a fingerprint"
        ):
            fsdp_optim.save(
                self.path, self.model, self.optim, format="dcp", options=SaveOptions(progress=False, fingerprint=True)
            )
        with self.assertRaisesRegex(fsdp_optim.StateError, "fingerprint must be True or False, not 'yes'"):
            self.save(fingerprint="yes")

    def test_part_of_a_checkpoint(self) -> None:
        """The weights alone, and renamed ones."""
        self.save(rename={"": "model."})
        self.assertEqual(set(stored(self.path).weights), {f"model.{name}" for name, _ in self.model.named_parameters()})
        result = fsdp_optim.load(self.path, self.model, options=LoadOptions(rename={"model.": ""}, progress=False))
        self.assertIn("4 fingerprints equal", str(result.receipt))

    def test_the_manifest_names_it(self) -> None:
        self.save()
        files = json.loads((self.path / "fsdp_optim.json").read_text())["checkpoint"]["files"]
        self.assertIn("fingerprint.json", files)

    def test_thin_and_copy(self) -> None:
        self.save()
        copied = self.path.with_name("copy")
        fsdp_optim.copy(self.path, copied)
        self.assertEqual(stored(copied), stored(self.path))
        fsdp_optim.thin(self.path)
        result = fsdp_optim.load(self.path, self.model, options=LoadOptions(progress=False))
        self.assertIn("4 fingerprints equal", str(result.receipt))


def by_dcp(root: Path) -> None:
    """The calls of torch.distributed.checkpoint, by which moments are tensors of a tree."""
    with cpu():
        trained, fresh = (Trained("FSDP2", OPTIMIZER, steps, model=Whole) for steps in (3, 0))
        tree, into = (
            {"model": m_sd, "optim": o_sd}
            for m_sd, o_sd in (get_state_dict(t.model, t.optim) for t in (trained, fresh))
        )
        dcp.save(tree, checkpoint_id=root / "dcp", options=SaveOptions(fingerprint=True, durable=False))
        with lines_said() as lines:
            dcp.load(into, checkpoint_id=root / "dcp")
        kept = stored(root / "dcp")
        assert len(kept.values_of("optim")) >= 2 * len(trained.params), kept
        num = len(kept.values_of("weights")) + len(kept.values_of("optim"))
        assert dist.get_rank() or f"{num} fingerprints equal to the saved" in "".join(lines), (num, lines)


def managed(root: Path) -> None:
    """A manager keeps fingerprints too, and compares them when it resumes."""
    options = ManagerOptions(fingerprint=True, durable=False)
    for steps in (3, 0):
        trained = Trained("FSDP2", OPTIMIZER, steps, model=Whole)
        with CheckpointManager(root / "run", trained.model, trained.optim, every=1, options=options) as manager:
            if not steps:
                assert manager.resume() == 1
                assert dist.get_rank() or "fingerprints equal to the saved" in str(manager.restored.receipt)
            else:
                manager.step(1)


class TestDoors(InFolder):
    """What else saves and loads: dcp, a manager, stores of objects."""

    def test_dcp_and_a_manager(self) -> None:
        run_on_ranks(both_doors, 2, self.root)

    def test_in_a_bucket(self) -> None:
        model = torch.nn.Linear(300, 5)
        url = f"file://{self.root}/bucket/step"
        fsdp_optim.save(url, model, options=SaveOptions(fingerprint=True, progress=False))
        result = fsdp_optim.load(url, model, options=LoadOptions(progress=False))
        self.assertIn("2 fingerprints equal to the saved", str(result.receipt))
        self.assertEqual(fsdp_optim.verify(url, progress=False).num_proven, 2)


def both_doors(root: Path) -> None:
    by_dcp(root)
    managed(root)
