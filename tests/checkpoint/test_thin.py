"""A thin checkpoint: the optimizer is gone, everything else is as it was, and no load gets a wrong value."""

from __future__ import annotations

import threading
import unittest
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.checkpoint_format import all_bytes, check_folder, read_manifest
from kit.compare import check_same, refused
from kit.conversions import save_some
from kit.folders import SharedFolder
from kit.options import state_for
from safetensors.torch import save_file
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, SaveOptions, StateError
from fsdp_optim.buckets.objects import Bucket, Memory, MemoryBucket
from fsdp_optim.checkpoint.catalog.thinning import thin as thin_store
from fsdp_optim.checkpoint.load import reading
from fsdp_optim.errors import ReplacedError
from fsdp_optim.formats.own import OURS, PROBE
from fsdp_optim.plugins import ObjectStore, OwnFormat
from fsdp_optim.storage.posix import Folder

QUICK = SaveOptions(durable=False, progress=False)


def made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optim = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).square().mean().backward()
    optim.step()
    return model, optim


def save(path: Any, seed: int = 0, **options: Any) -> Any:
    fsdp_optim.save(path, *made(seed), step=7, options=QUICK, **options)
    return path


def is_of_optim(name: str) -> bool:
    return name.startswith(("optim", "extra/optim"))


class ThinTest(SharedFolder):
    def setUp(self) -> None:
        self.folder = self.own_folder()

    def check_thin(self, path: Path, before: dict[str, bytes], result: Any) -> None:
        """All files but those of the optimizer, and the manifest, are the same; `freed_nbytes` counts what went."""
        after = all_bytes(path)
        kept = {name: data for name, data in before.items() if not is_of_optim(name) and name != "fsdp_optim.json"}
        gone = sum(len(data) for name, data in before.items() if is_of_optim(name))
        del after["fsdp_optim.json"]
        check_same("files", after, kept)
        self.assertEqual((result.path, result.freed_nbytes), (path, gone))
        check_folder(path)

    def test_a_reader_that_is_open_hears_of_it(self) -> None:
        """The two can be told apart, and files that an open reader can no longer read count as replaced, not as damaged."""
        path, (model, _) = self.folder / "step-7", made()
        optim = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))  # its description is in a file of its own
        fsdp_optim.save(path, model, optim, options=QUICK)
        store = Folder(path, PROBE)
        with closing(OURS.open(store.open(), verify=True)) as whole:
            fsdp_optim.thin(path)
            with closing(OURS.open(store.open(), verify=True)) as thin:
                self.assertNotEqual(dict(thin.index.identity), dict(whole.index.identity))
                self.assertEqual(thin.index.identity["token"], whole.index.identity["token"])
            with self.assertRaises(ReplacedError):
                whole.check_unchanged()
            assert whole.index.optim is not None
            with self.assertRaises(ReplacedError):
                whole.index.optim.decoded(allow_pickle=False, records={})

    def test_all_but_the_optimizer_stays(self) -> None:
        state = state_for({"history": torch.arange(3), "note": "text"})
        path = save(self.folder / "step", state=state)
        before, wanted = all_bytes(path), made()[0].state_dict()
        result = fsdp_optim.thin(path)
        self.check_thin(path, before, result)
        self.assertTrue(fsdp_optim.verify(path, progress=False).has_checksums)
        summary = fsdp_optim.inspect(path)
        self.assertEqual((summary.has_optim, summary.about["optimizer"], summary.step), (False, "removed by thin", 7))
        (info,) = fsdp_optim.checkpoints(self.folder)
        self.assertEqual((info.complete, info.thinned, info.step), (True, True, 7))
        self.assertEqual(fsdp_optim.latest(self.folder), path)
        model, optim = made(1)
        restored = fsdp_optim.load(path, model)
        check_same("weights", dict(model.state_dict()), dict(wanted))
        check_same("note", restored.state["note"], "text")
        refused(lambda: fsdp_optim.load(path, model, optim), StateError, str(path), "was thinned", "without optim=")
        self.assertEqual(fsdp_optim.thin(path).freed_nbytes, 0)

    def test_many_files(self) -> None:
        """Halves in several files, with an index each."""
        path = self.folder / "step"
        save_some(self.folder / "one")
        fsdp_optim.convert(
            self.folder / "one", path, options=fsdp_optim.ConvertOptions(max_file_size=1 << 20, durable=False)
        )
        before = all_bytes(path)
        self.assertGreater(sum(is_of_optim(name) for name in before), 4)
        self.check_thin(path, before, fsdp_optim.thin(path))
        fsdp_optim.verify(path, progress=False)

    def test_a_description_in_a_file_of_its_own(self) -> None:
        """Hyperparameters that are tensors make the description a file, which goes too."""
        model, optim = made()
        optim.param_groups[0]["lr"] = torch.tensor(0.1)
        path = self.folder / "step"
        fsdp_optim.save(path, model, optim, options=QUICK)
        before = all_bytes(path)
        self.assertIn("extra/optim.safetensors", before)
        self.check_thin(path, before, fsdp_optim.thin(path))

    def test_what_can_be_done_with_it(self) -> None:
        """It is converted, averaged and replaced; the copy of it is no thin one, and files of a user stay."""
        path = save(self.folder / "step")
        (path / "notes.txt").write_text("mine")
        fsdp_optim.thin(path)
        self.assertEqual((path / "notes.txt").read_text(), "mine")
        options = fsdp_optim.ConvertOptions(durable=False)
        fsdp_optim.convert(path, self.folder / "copy", options=options)
        self.assertNotIn("thinned", read_manifest(self.folder / "copy"))
        fsdp_optim.average([path, path], self.folder / "average", options=options)
        (path / "optim.safetensors").write_bytes(b"left by a killed thin")
        save(path, 1, overwrite=True)
        fsdp_optim.load(path, *made(2))
        self.assertEqual((path / "notes.txt").read_text(), "mine")

    def test_refused(self) -> None:
        refused(lambda: fsdp_optim.thin(self.folder / "nothing"), CheckpointError, "no such folder")
        file = self.folder / "model.safetensors"
        save_file({"weight": torch.zeros(3)}, file)
        refused(lambda: fsdp_optim.thin(file), CheckpointError, "of this library alone", "convert")
        without = save(self.folder / "none", weights="none")
        refused(lambda: fsdp_optim.thin(without), CheckpointError, "has no weights")
        path = self.folder / "weights"
        fsdp_optim.save(path, made()[0], options=QUICK)
        before = all_bytes(path)
        self.assertEqual(fsdp_optim.thin(path).freed_nbytes, 0)
        check_same("a checkpoint without optimizer", all_bytes(path), before)
        damaged = save(self.folder / "damaged")
        (damaged / "model.safetensors").unlink()
        refused(lambda: fsdp_optim.thin(damaged), CheckpointError, "model.safetensors")
        self.assertTrue((damaged / "optim.safetensors").exists())

    def test_a_load_that_reads_it(self) -> None:
        """Thinned at any moment of a load: the load gets all, or raises and names the reason."""
        wanted = made()[1].state_dict()["state"]
        real, outcomes = reading.CheckpointEnd.fill, []
        for moment in range(4):
            path, calls = save(self.folder / f"{moment}"), [moment]

            def fill(end: Any, parts: Any, path: Path = path, calls: list[int] = calls) -> None:
                calls[0] -= 1
                if calls[0] == 0:
                    fsdp_optim.thin(path)
                real(end, parts)

            model, optim = made(3)
            before = optim.state_dict()["state"][0]["exp_avg"].clone()
            with mock.patch.object(reading.CheckpointEnd, "fill", fill):
                try:
                    fsdp_optim.load(path, model, optim)
                except StateError as error:
                    self.assertIn("was thinned", str(error))
                    check_same("untouched", optim.state_dict()["state"][0]["exp_avg"], before)
                    outcomes.append("refused")
                else:
                    check_same("loaded", optim.state_dict()["state"], wanted)
                    outcomes.append("loaded")
        self.assertEqual(set(outcomes), {"refused", "loaded"})

    def test_two_at_a_time(self) -> None:
        path = save(self.folder / "step")
        errors: list[BaseException] = []

        def thin() -> None:
            try:
                fsdp_optim.thin(path)
            except CheckpointError as error:
                errors.append(error)

        threads = [threading.Thread(target=thin) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        fsdp_optim.thin(path)
        self.assertLess(len(errors), 4)
        check_folder(path)
        self.assertEqual([name for name in all_bytes(path) if is_of_optim(name) or "new-" in name], [])
        fsdp_optim.load(path, made(1)[0])


class ThinInABucketTest(unittest.TestCase):
    """Objects: the manifest is put on a condition, and then the optimizer's objects are deleted."""

    def setUp(self) -> None:
        self.objects = Memory()
        self.store = self.opened()

    def opened(self) -> ObjectStore:
        return ObjectStore(MemoryBucket(self.objects), "run/step", OwnFormat().probe)

    def keys(self) -> set[str]:
        return {info.key for info in MemoryBucket(self.objects).list("")}

    def test_it(self) -> None:
        save(self.store)
        keys = self.keys()
        result = thin_store(self.opened())
        gone = keys - self.keys()
        self.assertEqual({key.rpartition("/")[2] for key in gone}, {"optim.safetensors", "optim.safetensors.sums"})
        self.assertGreater(result.freed_nbytes, 0)
        model, optim = made(1)
        fsdp_optim.load(self.opened(), model)
        check_same("weights", dict(model.state_dict()), dict(made()[0].state_dict()))
        refused(lambda: fsdp_optim.load(self.opened(), model, optim), StateError, "was thinned")
        self.assertEqual(thin_store(self.opened()).freed_nbytes, 0)

    def test_over_an_older_one(self) -> None:
        """There the files have a folder of the save, with a copy of the manifest."""
        save(self.store)
        save(self.opened(), 1, overwrite=True)
        thin_store(self.opened())
        left = [key for key in self.keys() if "optim.safetensors" in key]
        self.assertEqual(left, [])
        manifests = {MemoryBucket(self.objects).read(key)[0] for key in self.keys() if key.endswith("fsdp_optim.json")}
        self.assertEqual(len(manifests), 1)
        model, _ = made(2)
        fsdp_optim.load(self.opened(), model)
        check_same("weights", dict(model.state_dict()), dict(made(1)[0].state_dict()))

    def test_another_save_is_faster(self) -> None:
        """The manifest that another save has put meanwhile is not replaced, and none of its objects goes."""
        save(self.store)
        real = MemoryBucket.put

        def put(bucket: Bucket, key: str, data: bytes, **options: Any) -> str:
            if key.endswith("fsdp_optim.json"):
                with mock.patch.object(MemoryBucket, "put", real):
                    save(self.opened(), 1, overwrite=True)
            return real(bucket, key, data, **options)  # type: ignore[arg-type]

        with mock.patch.object(MemoryBucket, "put", put):
            refused(lambda: thin_store(self.opened()), CheckpointError, "was replaced by another save")
        model, optim = made(2)
        fsdp_optim.load(self.opened(), model, optim)
        check_same("weights", dict(model.state_dict()), dict(made(1)[0].state_dict()))


if __name__ == "__main__":
    unittest.main()
