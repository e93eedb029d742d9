"""The reader of torch.distributed.checkpoint: its metadata, damaged and hostile."""

from __future__ import annotations

import dataclasses
import os
import pickle
import unittest
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit.dcp_files import MODEL, MOMENT, TALL, DcpFiles, InFolder, fill, open_any, opened, rows
from parameterized import parameterized
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from fsdp_optim import CheckpointError
from fsdp_optim.foreign.dcp.metadata_pickle import load as load_pickle
from fsdp_optim.foreign.dcp.reader import DCP
from fsdp_optim.plugins import COMMON, MODULES, Format
from fsdp_optim.storage.base import Opened
from fsdp_optim.testing import ReaderConformance, WrittenSample
from fsdp_optim.testing.foreign_readers import read_elements


class DcpTest(ReaderConformance, unittest.TestCase):
    num_flips, num_cuts = 60, 10

    @pytest.mark.slow
    def test_much_damage(self) -> None:
        with mock.patch.multiple(type(self), num_flips=300, num_cuts=40):
            self.test_damage_is_an_error_and_no_crash()

    def make_format(self) -> Format:
        return DCP

    def open_any(self, folder: Path) -> Opened:
        return open_any(folder)

    def write(self, folder: Path) -> WrittenSample:
        fill(DcpFiles(folder, 1)).finish()
        return WrittenSample(MODEL, [MOMENT, torch.tensor(3.0)])


class ValuesTest(InFolder):
    def test_the_full_dict_and_the_values_of_the_trainer(self) -> None:
        with closing(opened(fill(DcpFiles(self.folder)).finish())) as reader:
            full = reader.full_dict
            assert full is not None
            self.assertEqual(full["param_groups"], [{"lr": 0.5, "betas": (0.5, 0.75), "params": ["größe"]}])
            self.assertEqual(sorted(full["state"]["größe"]), ["exp_avg", "step"])
            extra = reader.index.extras[COMMON].decoded(allow_pickle=False)
            self.assertEqual(extra["epoch"], 3)
            self.assertTrue(torch.equal(extra["rng"]["cpu"], torch.arange(5, dtype=torch.uint8)))
            self.assertEqual(reader.world_size, 2)

    def test_values_are_not_shared(self) -> None:
        """Equal bytes are read once, and give a value to each key of its own."""
        files = DcpFiles(self.folder).tensor(["model", "a"], TALL)
        for name in ("one", "other"):
            files.value([name], [1, 2])
        with closing(opened(files.finish())) as reader:
            extra = reader.index.extras[COMMON].decoded(allow_pickle=False)
            self.assertIsNot(extra["one"], extra["other"])

    def test_extra_states_of_modules(self) -> None:
        files = DcpFiles(self.folder).tensor(["model", "a"], TALL)
        files.value(["model", "layer._extra_state"], {"scale": 2}).tensor(
            ["model", "other._extra_state"], torch.ones(2)
        )
        with closing(opened(files.finish())) as reader:
            self.assertEqual(list(reader.model), ["a"])
            states = reader.index.extras[MODULES].decoded(allow_pickle=False)
            self.assertEqual(states["layer._extra_state"], [None, {"scale": 2}])
            self.assertTrue(torch.equal(states["other._extra_state"][1], torch.ones(2)))

    def test_objects_of_unknown_classes_are_made_only_on_request(self) -> None:
        files = DcpFiles(self.folder).tensor(["model", "a"], TALL).value(["args"], Args(3)).value(["step"], 4)
        with closing(opened(files.finish())) as reader:
            extra = reader.index.extras[COMMON]
            self.assertEqual(extra.decoded_each(allow_pickle=False)["step"], 4)
            with self.assertRaisesRegex(CheckpointError, "Args.*allow_pickle=True"):
                extra.decoded(allow_pickle=False)
            self.assertEqual(extra.decoded(allow_pickle=True), {"args": Args(3), "step": 4})

    def test_an_object_in_the_optimizer_is_refused(self) -> None:
        fill(DcpFiles(self.folder)).value(["optim", "param_groups", 0, "schedule"], Args(3)).finish()
        self.check_refused("optim.param_groups.0.schedule", "Args")

    def test_large_values_beside_the_model_are_withheld(self) -> None:
        files = DcpFiles(self.folder).tensor(["model", "a"], TALL).tensor(["ema", "a"], TALL, rows(TALL, 5, 5))
        with (
            closing(opened(files.finish())) as reader,
            self.assertRaisesRegex(CheckpointError, "ema: has tensors of 280 bytes"),
        ):
            reader.index.extras[COMMON].decoded(allow_pickle=False)

    def test_heads_are_read_once_for_each_kind_of_chunk(self) -> None:
        """A chunk that looks like another one, but is stored in another order, is read as it is stored."""
        files = DcpFiles(self.folder, 1)
        alike = {f"w{i}": torch.randn(6, 4) if i % 3 else torch.randn(4, 6).t() for i in range(9)}
        for name, tensor in alike.items():
            files.tensor(["model", name], tensor)
        with closing(opened(files.finish())) as reader:
            for name, tensor in alike.items():
                elements = read_elements(reader, reader.model[name], 0, tensor.numel())
                self.assertEqual(elements, bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()), name)


@dataclasses.dataclass
class Args:
    number: int


class MetadataTest(InFolder):
    @parameterized.expand([(2,), (3,), (4,), (5,)])
    def test_every_protocol_of_pickles(self, protocol: int) -> None:
        with closing(opened(fill(DcpFiles(self.folder)).finish(protocol))) as reader:
            self.check_model(reader)

    def test_metadata_of_older_versions(self) -> None:
        """Fields that were added later are absent, and classes have moved."""
        fill(DcpFiles(self.folder)).finish(2)
        path = self.folder / ".metadata"
        data = path.read_bytes()
        older = data.replace(b"torch.distributed.checkpoint.", b"torch.distributed._shard.checkpoint.")
        older = older.replace(
            b"torch.distributed._shard.checkpoint.metadata\nTensorProperties",
            b"torch.distributed._shard.sharded_tensor.metadata\nTensorProperties",
        )
        path.write_bytes(older)
        with closing(opened(self.folder)) as reader:
            self.check_model(reader)
        files = fill(DcpFiles(self.folder))
        for field in ("storage_meta", "version"):
            files.metadata.__dict__.pop(field, None)  # torch 2.6 has no version
        with closing(opened(files.finish())) as reader:
            self.check_model(reader)

    def test_without_recorded_paths(self) -> None:
        """The keys alone say what is nested: they are told from flattened ones by the lists of parameters."""
        files = DcpFiles(self.folder).tensor(["model", "a.b"], TALL).tensor(["optim", "state", "a.b", "exp_avg"], TALL)
        files.value(["optim", "param_groups", 0, "lr"], 0.5).value(["optim", "param_groups", 0, "params"], ["a.b"])
        del files.metadata.__dict__["planner_data"]
        with closing(opened(files.finish())) as reader:
            self.assertEqual(list(reader.model), ["a.b"])
            full = reader.full_dict
            assert full is not None
            self.assertEqual(full["param_groups"], [{"lr": 0.5, "params": ["a.b"]}])
            self.assertEqual(list(full["state"]), ["a.b"])

    def test_param_groups_as_one_value(self) -> None:
        """torch 2.3 did not flatten lists."""
        files = DcpFiles(self.folder).tensor(["model", "w"], TALL).tensor(["optim", "state", "0", "exp_avg"], TALL)
        files.value(["optim", "param_groups"], [{"lr": 0.5, "params": [0]}])
        with closing(opened(files.finish())) as reader:
            full = reader.full_dict
            assert full is not None
            self.assertEqual(full["param_groups"], [{"lr": 0.5, "params": [0]}])
            self.assertEqual(list(full["state"]), [0])

    def test_other_objects(self) -> None:
        self.folder.mkdir()
        for value, words in (
            ({"a": 1}, ["class dict"]),
            (Args(1), ["Args"]),
            (of_torch.Metadata(None, None, None), ["does not list"]),
            (of_torch.Metadata({"a": Args(1)}, {}, {}), ["a: is an object of the class", "Args"]),
            (of_torch.Metadata({"a": of_torch.BytesStorageMetadata()}, {}, {}), ["a: is in no file"]),
            (of_torch.Metadata({}, {}, {of_torch.MetadataIndex("a"): Args(1)}), ["Args", "OLMo-core"]),
            (of_torch.Metadata({}, {}, {of_torch.MetadataIndex("a"): _StorageInfo("a", -1, 5)}), ["no part of a file"]),
        ):
            (self.folder / ".metadata").write_bytes(pickle.dumps(value))
            self.check_refused(".metadata", *words)

    def test_ranks_that_saved_without_each_other(self) -> None:
        """Each has its own metadata; chunks are put together, and what all have is taken once."""
        for rank in range(2):
            files = DcpFiles(self.folder / f"rank{rank}", 1)
            files.tensor(["model", "w"], TALL, [rows(TALL, 4, 6)[rank]]).value(["epoch"], rank)
            for info in files.metadata.storage_data.values():
                info.relative_path = f"__{rank}_0.distcp"
            files.finish(name=f"__{rank}.metadata")
            for path, name in (("__0_0.distcp", f"__{rank}_0.distcp"), (f"__{rank}.metadata", f"__{rank}.metadata")):
                (self.folder / f"rank{rank}" / path).rename(self.folder / name)
            (self.folder / f"rank{rank}").rmdir()
        with closing(opened(self.folder)) as reader:
            elements = read_elements(reader, reader.model["w"], 0, 70)
            self.assertEqual(elements, bytes(TALL.view(-1).view(torch.uint8).numpy()))
            self.assertEqual(reader.index.extras[COMMON].decoded(allow_pickle=False), {"epoch": 0})
        (self.folder / "__0.metadata").unlink()
        self.check_refused("__0.metadata: is missing")


class Hostile:
    """An object whose pickle runs a command."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._made = (call, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made


class HostileTest(InFolder):
    def test_nothing_is_executed(self) -> None:
        """Neither in the metadata nor in a value, wherever the object is."""
        mark = self.folder.parent / "executed"
        bomb = Hostile(os.mkdir, str(mark))
        for place in range(6):
            files = fill(DcpFiles(self.folder))
            saved: Any = files.metadata
            if place == 0:
                saved = bomb
            elif place == 1:
                saved.storage_meta = bomb
            elif place == 2:
                saved.planner_data["epoch"] = bomb
            elif place == 3:
                saved.state_dict_metadata["epoch"] = bomb
            elif place == 4:
                saved.storage_data[of_torch.MetadataIndex("more")] = bomb
            else:
                files.value(["bomb"], bomb)
            files.metadata = saved
            files.finish()
            try:
                with closing(opened(self.folder)) as reader:
                    reader.index.extras[COMMON].decoded_each(allow_pickle=False)
            except CheckpointError:
                pass
            self.assertFalse(mark.exists(), place)

    def test_attributes_of_classes_are_not_changed_for_later_pickles(self) -> None:
        """A pickle can set attributes of a class that it names."""
        self.folder.mkdir()
        for name in (b"ChunkStorageMetadata", b"MetadataIndex", b"TensorStorageMetadata"):
            named = b"ctorch.distributed.checkpoint.metadata\n" + name + b"\n"
            (self.folder / ".metadata").write_bytes(
                b"\x80\x02" + named + b"N}X\x0c\x00\x00\x00__setstate__K\x01s\x86b."
            )
            self.check_refused(".metadata", "the class torch.distributed.checkpoint.metadata." + name.decode())
        fill(DcpFiles(self.folder)).finish()
        with closing(opened(self.folder)) as reader:
            self.check_model(reader)

    def test_pickles_that_ask_for_memory(self) -> None:
        """They are refused before the unpickler sees them."""
        self.folder.mkdir()
        length = b"\xff" * 7 + b"\x7f"
        for evil, words in (
            (b"\x80\x04Nr\xff\xff\xff\xff.", "the operation b'r' at byte 3"),
            (b"\x80\x04\x8d" + length + b".", "it was cut short"),
            (b"\x80\x05\x96" + length + b".", "the operation b'\\x96' at byte 2"),
        ):
            (self.folder / ".metadata").write_bytes(evil)
            self.check_refused(".metadata", words)

    def test_words_are_not_made(self) -> None:
        """Paths, layouts and memory formats, which nobody needs."""
        for value in (Path("a/b"), torch.strided):
            self.assertEqual(load_pickle("here", [pickle.dumps(value)]), "")


if __name__ == "__main__":
    unittest.main()
