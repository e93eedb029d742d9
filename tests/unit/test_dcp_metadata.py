"""The reader of torch.distributed.checkpoint: its metadata, damaged and hostile ones, cuts, and which key is what."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import random
import tempfile
import unittest
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit import oracle
from kit.dcp_files import DcpFiles, grid, rows
from parameterized import parameterized
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.dcp.keys import Leaf, meaning_of
from fsdp_optim.foreign.dcp.metadata_pickle import load as load_pickle
from fsdp_optim.foreign.dcp.reader import DCP
from fsdp_optim.foreign.reader import ForeignReader
from fsdp_optim.formats.base.protocols import COMMON, MODULES, Format
from fsdp_optim.formats.own.probe import PROBE
from fsdp_optim.layout import Block, Box, Boxes, DisjointBoxes, FlatChunks, Whole
from fsdp_optim.plan import Copy, copies_into
from fsdp_optim.storage.base import Opened
from fsdp_optim.storage.posix.store import Folder
from fsdp_optim.testing import ReaderConformance, WrittenSample
from fsdp_optim.testing.foreign_readers import read_elements

TALL = torch.arange(70, dtype=torch.float32).reshape(10, 7)
WIDE = torch.arange(48, dtype=torch.bfloat16).reshape(4, 12)
CUBE = torch.arange(120, dtype=torch.int64).reshape(4, 5, 6)
TURNED = torch.arange(24, dtype=torch.float64).reshape(4, 6).t()
MOMENT = TALL * 2


def fill(files: DcpFiles) -> DcpFiles:
    """A model in chunks of all kinds, an optimizer, and values of a trainer."""
    files.tensor(["model", "größe"], TALL, rows(TALL, 3, 0, 6, 1))
    files.tensor(["model", "wide"], WIDE, grid(WIDE, 3, 5))
    cubes = [((0, 0, 0), (4, 2, 6)), ((0, 2, 0), (2, 3, 6)), ((2, 2, 0), (2, 3, 1)), ((2, 2, 1), (2, 3, 5))]
    files.tensor(["model", "cube"], CUBE, cubes)
    files.tensor(["model", "turned"], TURNED, rows(TURNED, 2, 4))
    files.tensor(["model", "scalar"], torch.tensor(-0.0))
    files.tensor(["model", "flags"], torch.tensor([True, False, True]))
    files.tensor(["model", "none"], torch.empty(0, 4), [])
    files.tensor(["optim", "state", "größe", "exp_avg"], MOMENT, rows(MOMENT, 4, 6))
    files.tensor(["optim", "state", "größe", "step"], torch.tensor(3.0))
    files.value(["optim", "param_groups", 0, "lr"], 0.5)
    files.value(["optim", "param_groups", 0, "betas"], (0.5, 0.75))
    files.value(["optim", "param_groups", 0, "params"], ["größe"])
    return files.value(["epoch"], 3).tensor(["rng", "cpu"], torch.arange(5, dtype=torch.uint8))


MODEL = {
    "größe": TALL,
    "wide": WIDE,
    "cube": CUBE,
    "turned": TURNED,
    "scalar": torch.tensor(-0.0),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
}


def open_any(folder: Path) -> Opened:
    return Folder(folder, PROBE).open_any()


def opened(folder: Path) -> ForeignReader:
    files = open_any(folder)
    try:
        return DCP.open(files, verify=True)
    except BaseException:
        files.close()
        raise


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


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name) / "checkpoint"

    def check_refused(self, *words: str) -> str:
        """Opening is an error that has these words."""
        with self.assertRaises(CheckpointError) as caught:
            opened(self.folder).close()
        for word in words:
            self.assertIn(word, str(caught.exception))
        return str(caught.exception)

    def check_model(self, reader: ForeignReader) -> None:
        for name, tensor in MODEL.items():
            found = read_elements(reader, reader.model[name], 0, tensor.numel())
            self.assertEqual(
                found, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if found else b"", name
            )


class ValuesTest(InFolder):
    def test_the_full_dict_and_the_values_of_the_trainer(self) -> None:
        with closing(opened(fill(DcpFiles(self.folder)).finish())) as reader:
            full = reader.full_dict
            assert full is not None
            self.assertEqual(full["param_groups"], [{"lr": 0.5, "betas": (0.5, 0.75), "params": ["größe"]}])
            self.assertEqual(sorted(full["state"]["größe"]), ["exp_avg", "step"])
            extra = reader.extra(COMMON, verify=True).decoded(allow_pickle=False)
            self.assertEqual(extra["epoch"], 3)
            self.assertTrue(torch.equal(extra["rng"]["cpu"], torch.arange(5, dtype=torch.uint8)))
            self.assertEqual(reader.world_size, 2)

    def test_values_are_not_shared(self) -> None:
        """Equal bytes are read once, and give a value to each key of its own."""
        files = DcpFiles(self.folder).tensor(["model", "a"], TALL)
        for name in ("one", "other"):
            files.value([name], [1, 2])
        with closing(opened(files.finish())) as reader:
            extra = reader.extra(COMMON, verify=True).decoded(allow_pickle=False)
            self.assertIsNot(extra["one"], extra["other"])

    def test_extra_states_of_modules(self) -> None:
        files = DcpFiles(self.folder).tensor(["model", "a"], TALL)
        files.value(["model", "layer._extra_state"], {"scale": 2}).tensor(
            ["model", "other._extra_state"], torch.ones(2)
        )
        with closing(opened(files.finish())) as reader:
            self.assertEqual(list(reader.model), ["a"])
            found = reader.extra(MODULES, verify=True).decoded(allow_pickle=False)
            self.assertEqual(found["layer._extra_state"], [None, {"scale": 2}])
            self.assertTrue(torch.equal(found["other._extra_state"][1], torch.ones(2)))

    def test_objects_of_unknown_classes_are_made_only_on_request(self) -> None:
        files = DcpFiles(self.folder).tensor(["model", "a"], TALL).value(["args"], Args(3)).value(["step"], 4)
        with closing(opened(files.finish())) as reader:
            extra = reader.extra(COMMON, verify=True)
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
            reader.extra(COMMON, verify=True).decoded(allow_pickle=False)

    def test_heads_are_read_once_for_each_kind_of_chunk(self) -> None:
        """A chunk that looks like another one, but is stored in another order, is read as it is stored."""
        files = DcpFiles(self.folder, 1)
        alike = {f"w{i}": torch.randn(6, 4) if i % 3 else torch.randn(4, 6).t() for i in range(9)}
        for name, tensor in alike.items():
            files.tensor(["model", name], tensor)
        with closing(opened(files.finish())) as reader:
            for name, tensor in alike.items():
                found = read_elements(reader, reader.model[name], 0, tensor.numel())
                self.assertEqual(found, bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()), name)


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
            found = read_elements(reader, reader.model["w"], 0, 70)
            self.assertEqual(found, bytes(TALL.view(-1).view(torch.uint8).numpy()))
            self.assertEqual(reader.extra(COMMON, verify=True).decoded(allow_pickle=False), {"epoch": 0})
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
                    reader.extra(COMMON, verify=True).decoded_each(allow_pickle=False)
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


def replaced(files: DcpFiles, key: str, **fields: Any) -> None:
    """Change where the first item of a key is said to be."""
    files.info(key).__dict__.update(fields)


class CutsTest(InFolder):
    @parameterized.expand(
        [
            ("a gap", [((0, 0), (4, 7)), ((5, 0), (5, 7))], ["elements [28, 35) of 70"]),
            ("a gap in a row", [((0, 0), (10, 3)), ((0, 4), (10, 3))], ["elements [3, 4) of 70"]),
            ("no chunk", [], ["elements [0, 70) of 70"]),
            ("an overlap", [((0, 0), (6, 7)), ((5, 0), (5, 7))], ["[0, 0]", "[5, 0]", "overlap"]),
            ("an overlap of boxes", [((0, 0), (10, 4)), ((2, 3), (3, 4)), ((0, 4), (10, 3))], ["overlap"]),
            ("the same twice", [((0, 0), (10, 7)), ((0, 0), (10, 7))], ["overlap"]),
            ("outside", [((0, 0), (10, 7)), ((10, 0), (1, 7))], ["[10, 0]", "outside of its shape [10, 7]"]),
            ("dimensions", [((0,), (10,))], ["outside of its shape [10, 7]"]),
        ]
    )
    def test_refused(self, _: str, boxes: Any, words: Sequence[str]) -> None:
        """By the name of the tensor, and before anything is read."""
        files = DcpFiles(self.folder).tensor(["model", "w"], TALL)
        files.metadata.state_dict_metadata["model.w"].chunks = [
            of_torch.ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes
        ]
        item = files.info("model.w")
        files.metadata.storage_data = {of_torch.MetadataIndex("model.w", o): item for o, _ in boxes}
        files.finish()
        self.check_refused("model.w", *words)

    def test_random_cuts_are_read_like_listed_boxes(self) -> None:
        rng = random.Random(5)
        for _ in range(60):
            shape = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(1, 4)))
            boxes = [Box((0,) * len(shape), shape)]
            for _ in range(rng.randrange(12)):
                cut = boxes.pop(rng.randrange(len(boxes)))
                dim = rng.randrange(len(shape))
                at = rng.randrange(cut.sizes[dim] + 1)
                for first, num in ((0, at), (at, cut.sizes[dim] - at)):
                    offsets, sizes = list(cut.offsets), list(cut.sizes)
                    offsets[dim], sizes[dim] = offsets[dim] + first, num
                    boxes.append(Box(tuple(offsets), tuple(sizes)))
            boxes = [box for box in boxes if box.numel]
            by = tuple(range(-1, -1 - len(boxes), -1))
            ours = DisjointBoxes(shape, tuple(boxes), by)
            listed = Boxes(shape, tuple((rank, (Block(box, 0),)) for rank, box in zip(by, boxes, strict=True)))
            self.assertEqual(ours.gap(), None)
            self.assertEqual(ours.numel, sum(ours.numel_on(rank) for rank in by))
            wholes = [Whole(shape, (0,)), FlatChunks(shape, 0, -(-ours.numel // 3), (range(3),))]
            for target, rank in itertools.product(wholes, range(3)):
                self.assertEqual(*(elements_of(copies_into(cut, target, rank)) for cut in (ours, listed)))
            if len(boxes) > 1:
                without = DisjointBoxes(shape, tuple(boxes[1:]), by[1:])
                self.assertEqual(without.gap(), replaced_boxes(listed).gap())


def elements_of(copies: Sequence[Copy]) -> list[tuple[int, int, int]]:
    """The rank that sends each element, and where the element is read and written."""
    return sorted((copy.source_rank, *address) for copy in copies for address in oracle.addresses(copy))


def replaced_boxes(listed: Boxes) -> Boxes:
    return Boxes(listed.full_shape, listed.by_rank[1:])


class FilesTest(InFolder):
    def test_a_missing_file_is_named_with_a_key(self) -> None:
        fill(DcpFiles(self.folder)).finish()
        (self.folder / "__1_0.distcp").unlink()
        self.check_refused("__1_0.distcp: is missing", "is in it")

    def test_a_short_file_is_named_with_a_key(self) -> None:
        fill(DcpFiles(self.folder)).finish()
        os.truncate(self.folder / "__0_0.distcp", 9000)
        self.check_refused("__0_0.distcp: has 9000 bytes", "ends at byte")

    def test_files_outside_are_not_read(self) -> None:
        for name in ("../secret", "/etc/passwd", "a/../../secret"):
            files = fill(DcpFiles(self.folder))
            replaced(files, "epoch", relative_path=name)
            files.finish()
            self.check_refused("is missing")

    def test_transformed_items_are_refused_by_name(self) -> None:
        files = fill(DcpFiles(self.folder))
        replaced(files, "model.wide", transform_descriptors=["stream.zstd/1"])
        files.finish()
        self.check_refused("model.wide", "stream.zstd/1")

    def test_another_tensor_than_the_metadata_says(self) -> None:
        """Found when its elements are read, and named."""
        files = fill(DcpFiles(self.folder))
        other = files.info("model.wide")
        replaced(files, "model.größe", **other.__dict__)
        files.finish()
        with (
            closing(opened(self.folder)) as reader,
            self.assertRaisesRegex(CheckpointError, r"model.größe: holds a bfloat16 tensor.*float32"),
        ):
            read_elements(reader, reader.model["größe"], 0, 70)

    def test_a_chunk_without_room(self) -> None:
        files = fill(DcpFiles(self.folder))
        replaced(files, "model.cube", length=100)
        files.finish()
        self.check_refused("model.cube: a chunk of the sizes [4, 2, 6] has 384 bytes, but 100")

    def test_several_checkpoints_are_named(self) -> None:
        for step in (10, 20):
            fill(DcpFiles(self.folder / f"step-{step}")).finish()
        self.check_refused("several checkpoints, step-10, step-20")

    def test_one_checkpoint_below(self) -> None:
        fill(DcpFiles(self.folder / "model_and_optim")).finish()
        with closing(opened(self.folder)) as reader:
            self.check_model(reader)

    def test_the_path_of_the_metadata(self) -> None:
        fill(DcpFiles(self.folder)).finish()
        with closing(opened(self.folder / ".metadata")) as reader:
            self.check_model(reader)


# ------------------------------------------------------------------------------------------- which key is what

GROUP = {("lr",): False, ("params",): False}


def keys_of(
    tree: Mapping[str, Any], at: tuple[str | int, ...] = ()
) -> dict[str, tuple[tuple[str | int, ...], int | None]]:
    """Keys with their paths, and the number of dimensions of tensors: a number in the tree; None is another value."""
    found: dict[str, tuple[tuple[str | int, ...], int | None]] = {}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for name, value in items:
        if isinstance(value, (Mapping, list)):
            found |= keys_of(value, (*at, name))
        else:
            path = (*at, name)
            found[".".join(map(str, path))] = (path, value)
    return found


MODEL_KEYS = {"a.w": 2, "b.w": 1}
NESTED = {
    "state": {"a.w": {"exp_avg": 2, "step": 0}, "b.w": {"exp_avg": 1}},
    "param_groups": [{"lr": None, "params": None}],
}
FLAT = {"state.a.w.exp_avg": 2, "state.b.w.exp_avg": 1, "param_groups.a.w.lr": None, "param_groups.b.w.lr": None}
BY_ID = {"state": {"0": {"exp_avg": 2}, "1": {"exp_avg": 1}}, "param_groups": [{"lr": None, "params": None}]}
DOTTED = {f"model.{name}": dims for name, dims in MODEL_KEYS.items()}


class KeysTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("nested", {"model": MODEL_KEYS, "optimizer": NESTED}, "model.", 1),
            ("flattened", {"model": MODEL_KEYS, "optim": FLAT}, "model.", 1),
            ("torchtitan", {**MODEL_KEYS, "optimizer": FLAT, "train_state": {"step": 0}, "x": None}, "", 1),
            ("model alone", {"model": MODEL_KEYS}, "model.", 0),
            ("model alone at the top", MODEL_KEYS, "", 0),
            ("optimizer alone", {"optimizer": NESTED}, None, 1),
            ("optimizer alone at the top", NESTED, None, 1),
            ("flattened optimizer at the top", {**FLAT, "model": MODEL_KEYS}, "model.", 1),
            ("app", {"app": {"model": MODEL_KEYS, "optim": NESTED}}, "app.model.", 1),
            ("app by id", {"app": {"model": MODEL_KEYS, "optim": BY_ID}}, "app.model.", 1),
            ("of any name", {"net": MODEL_KEYS, "adam": NESTED, "rng": {"cpu": 1}}, "net.", 1),
            ("of any name, by id", {"net": MODEL_KEYS, "adam": BY_ID, "counters": {"n": 0}}, "net.", 1),
            ("state_dict", {"state_dict": MODEL_KEYS, "optimizer_0": NESTED}, "state_dict.", 1),
            ("an average beside the model", {"ema": MODEL_KEYS, "model": MODEL_KEYS, "optim": NESTED}, "model.", 1),
            (
                "an average with its own model",
                {"ema": {"model": MODEL_KEYS}, "model": MODEL_KEYS, "optim": NESTED},
                "model.",
                1,
            ),
            ("a prefix in the names", {**DOTTED, "optim": NESTED}, "model.", 1),
            ("two numbered", {"model": MODEL_KEYS, "optimizer_1": FLAT, "optimizer_0": FLAT}, "model.", 2),
            ("a list", {"model": MODEL_KEYS, "optimizers": [NESTED, NESTED]}, "model.", 2),
            ("one inside of another", {"model": MODEL_KEYS, "optim": {**NESTED, "base": NESTED}}, "model.", 1),
            (
                "a scheduler with groups",
                {"model": MODEL_KEYS, "optim": NESTED, "sched": {"last_lr": None}},
                "model.",
                1,
            ),
        ]
    )
    def test_found(self, _: str, saved: Any, prefix: str | None, num_optimizers: int) -> None:
        keys = keys_of(saved)
        found = self.meaning(keys)
        wanted = {} if prefix is None else {name: f"{prefix}{name}" for name in MODEL_KEYS}
        self.assertEqual(dict(found.model), wanted)
        self.assertEqual(len(found.optimizers), num_optimizers)

    def meaning(self, keys: Mapping[str, tuple[tuple[str | int, ...], int | None]]) -> Any:
        paths = {key: path for key, (path, _) in keys.items()}
        return meaning_of("here", paths, {key: dims for key, (_, dims) in keys.items() if dims is not None})

    @parameterized.expand(
        [
            ("two models", {"net": MODEL_KEYS, "twin": MODEL_KEYS, "adam": NESTED}, ["net", "twin", "model"]),
            ("two models without an optimizer", {"net": MODEL_KEYS, "twin": MODEL_KEYS}, ["net", "twin"]),
            ("two optimizers", {"model": MODEL_KEYS, "first": NESTED, "second": NESTED}, ["first", "second"]),
            (
                "two apps",
                {"app": {"model": MODEL_KEYS, "optim": NESTED}, "b": {"model": MODEL_KEYS, "optim": NESTED}},
                ["app", "b"],
            ),
        ]
    )
    def test_candidates_are_named(self, _: str, saved: Any, names: Sequence[str]) -> None:
        with self.assertRaises(CheckpointError) as caught:
            self.meaning(keys_of(saved))
        for name in names:
            self.assertIn(name, str(caught.exception))

    def test_numbers_say_the_order(self) -> None:
        found = self.meaning(keys_of({"model": MODEL_KEYS, **{f"optimizer_{n}": NESTED for n in (10, 2, 0)}}))
        first = [tree["param_groups"][0]["lr"] for tree in found.optimizers]
        self.assertEqual(first, [Leaf(f"optimizer_{n}.param_groups.0.lr") for n in (0, 2, 10)])

    def test_a_list_with_a_hole(self) -> None:
        keys = keys_of({"model": MODEL_KEYS, "optim": NESTED})
        keys["optim.param_groups.2.lr"] = (("optim", "param_groups", 2, "lr"), None)
        with self.assertRaisesRegex(CheckpointError, "number 1 is missing"):
            self.meaning(keys)


class SeveralOptimizersTest(InFolder):
    def write(self, names: Sequence[str], *, by_id: bool) -> Path:
        files = DcpFiles(self.folder)
        for number, name in enumerate(names):
            files.tensor(["model", name], TALL)
            key = "0" if by_id else name
            files.tensor([f"optimizer_{number}", "state", key, "exp_avg"], TALL)
            files.value([f"optimizer_{number}", "param_groups", 0, "lr"], number)
            files.value([f"optimizer_{number}", "param_groups", 0, "params"], [0] if by_id else [name])
        return files.finish()

    def test_they_become_one(self) -> None:
        with closing(opened(self.write(["a", "b"], by_id=False))) as reader:
            full = reader.full_dict
            assert full is not None
            self.assertEqual(full["param_groups"], [{"lr": 0, "params": ["a"]}, {"lr": 1, "params": ["b"]}])
            self.assertEqual(list(full["state"]), ["a", "b"])

    def test_ids_count_on(self) -> None:
        with closing(opened(self.write(["a", "b"], by_id=True))) as reader:
            full = reader.full_dict
            assert full is not None
            self.assertEqual([group["params"] for group in full["param_groups"]], [[0], [1]])
            self.assertEqual(list(full["state"]), [0, 1])

    def test_a_parameter_in_two(self) -> None:
        self.write(["a", "a"], by_id=False)
        self.check_refused("a is in two of its optimizers")


if __name__ == "__main__":
    unittest.main()
