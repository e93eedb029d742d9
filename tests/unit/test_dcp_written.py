"""The metadata of a DCP folder that is written: what torch's own classes make of it, beside objects of these classes."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import unittest
from collections import Counter
from typing import Any

import torch
from parameterized import parameterized
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.pickle_stream import number
from fsdp_optim.foreign.archive.torch_archives import TensorKind, file_plans
from fsdp_optim.foreign.dcp.metadata_tables import read_tables
from fsdp_optim.foreign.dcp.values import PathGroup, ValueItem, apart, keys_in, with_apart
from fsdp_optim.foreign.dcp.written_metadata import ListedItem, check_keys, written_pickle
from fsdp_optim.formats.base.protocols import PlannedTensor
from fsdp_optim.layout import Shape

DTYPES = ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn")
FOLDER = "of_save/"
NUMBERS = (0, 1, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32, 2**39 - 1, 2**39, 2**62, 2**63 - 1)


def written(items: list[ListedItem], token: str = "a token") -> bytes:
    """The pickle of items, in a folder that is named so that it is seen in the metadata."""
    return b"".join(written_pickle(FOLDER, items, token))


def of_torch(items: list[ListedItem], token: str = "a token") -> Metadata:
    """The same, of objects of torch's classes, one after the other."""
    tensors: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for item in items:
        for path in item.paths:
            key = ".".join(map(str, path))
            paths[key] = path
            if item.kind is None:
                ((start, nbytes),) = item.places
                tensors[key] = BytesStorageMetadata()
                places[MetadataIndex(key)] = _StorageInfo(FOLDER + item.file, start, nbytes)
                continue
            chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in item.kind.chunks]
            dtype = getattr(torch, item.kind.dtype)
            tensors[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(item.kind.shape), chunks)
            for at, (chunk, (start, nbytes)) in enumerate(zip(chunks, item.places, strict=True)):
                places[MetadataIndex(key, chunk.offsets, at)] = _StorageInfo(FOLDER + item.file, start, nbytes)
    made = Metadata(tensors, paths, places, StorageMeta(save_id=token))
    made.version = "1.0.0"
    return made


def any_kind(rng: random.Random) -> TensorKind:
    """Any number of dimensions and chunks."""
    shape = tuple(rng.choice([0, 1, 3, 300, 70_000]) for _ in range(rng.randrange(6)))
    num_chunks = rng.choice([1, 1, 1, 2, 5]) if shape and shape[0] else 1
    chunks = tuple(((at * shape[0], *[0] * (len(shape) - 1)), shape) if shape else ((), ()) for at in range(num_chunks))
    return TensorKind(rng.choice(DTYPES), (shape[0] * num_chunks, *shape[1:]) if shape else (), chunks)


def any_items(rng: random.Random, num: int) -> list[ListedItem]:
    """Values and tensors, some under several paths, some at one place; of few kinds, or of as many as there are."""
    kinds = [any_kind(rng) for _ in range(rng.choice([1, 3, num]))]
    items = []
    for index in range(num):
        fqn = f"layers.{index}." + rng.choice(["w"] * 20 + ["é", "\ud800", "x" * 250, "x" * 300])
        prefix = rng.choice([(), ("model",), ("optimizer", "state", fqn), ("a", index, "b", "c", "d")])
        others = [f"{fqn}.{other}" for other in range(rng.choice([0, 0, 1, 3]))]
        name: str | int = rng.choice([fqn, index]) if prefix else fqn
        kind = rng.choice([None, *kinds])
        start = rng.choice([index * 100, index << 20, index << 33, 7])
        places = [(start + at, rng.choice(NUMBERS)) for at in range(len(kind.chunks) if kind is not None else 1)]
        items.append(ListedItem(PathGroup(prefix, name, others), kind, rng.choice(["a.distcp", "b.distcp"]), places))
    return items


class WrittenTest(unittest.TestCase):
    def check(self, items: list[ListedItem]) -> Metadata:
        data = written(items)
        loaded, wanted = pickle.loads(data), of_torch(items)
        self.assertEqual(loaded, wanted)
        for name in ("state_dict_metadata", "planner_data"):
            self.assertEqual([*getattr(loaded, name)], [*getattr(wanted, name)])  # in this order
        indices = Counter((index.fqn, index.offset, index.index) for index in wanted.storage_data)
        self.assertEqual(Counter((index.fqn, index.offset, index.index) for index in loaded.storage_data), indices)
        self.assertIs(type(loaded), Metadata)
        pickletools.dis(
            data, out=Nowhere()
        )  # no value of the memo is named before it is there, and none stays on the stack
        return loaded  # type: ignore[no-any-return]

    @parameterized.expand([(seed,) for seed in range(40)])
    def test_any_items(self, seed: int) -> None:
        rng = random.Random(seed)
        self.check(any_items(rng, rng.choice([0, 1, 2, 20, 90, 700])))

    def test_more_entries_than_a_batch(self) -> None:
        """In one item and in many; one more, one less, and exactly as many."""
        kind = TensorKind("float32", (2, 3), (((0, 0), (2, 3)),))
        for num in (999, 1000, 1001, 2001):
            group = PathGroup(("optimizer",), "first", [f"name{n}" for n in range(num - 1)])
            self.check([ListedItem(group, None, "a", [(0, 1)])])
            self.check([ListedItem(group, kind, "a", [(0, 1)])])
            items = [ListedItem(PathGroup(("m",), f"w{n}"), kind, "a", [(n, 1)]) for n in range(num)]
            self.check(items)
            frames = [size for operation, size, _ in pickletools.genops(written(items)) if operation.name == "FRAME"]
            self.assertLess(max(filter(None, frames)), 100_000)  # bytes that an unpickler reads at once

    def test_what_is_equal_is_one_object(self) -> None:
        """Sizes, properties, values that are no tensors and places of values: a pickle and its reader take less memory."""
        kind = TensorKind("float32", (2,), (((0,), (2,)),))
        value = [
            ListedItem(PathGroup((), "a", ["b", "c"]), None, "v", [(5, 6)]),
            ListedItem(PathGroup((), "d"), None, "v", [(5, 6)]),
            ListedItem(PathGroup((), "e"), None, "v", [(5, 7)]),
        ]
        tensors = [
            ListedItem(PathGroup((), "x", ["y"]), kind, "t", [(0, 8)]),
            ListedItem(PathGroup((), "z"), kind, "t", [(8, 8)]),
        ]
        loaded = self.check([*value, *tensors])
        places = {index.fqn: place for index, place in loaded.storage_data.items()}
        self.assertEqual([places[key] is places["a"] for key in "bcde"], [True, True, True, False])
        self.assertIs(places["x"], places["y"])
        entries = [loaded.state_dict_metadata[key] for key in "xyz"]
        self.assertEqual(len({id(entry.properties) for entry in entries}), 1)
        self.assertEqual(len({id(entry.size) for entry in entries}), 1)
        self.assertEqual(len({id(loaded.state_dict_metadata[key]) for key in "abcde"}), 1)
        self.assertEqual(len({id(entry) for entry in entries}), 3)  # the chunks of each are a list of its own

    @parameterized.expand([(seed,) for seed in range(10)])
    def test_read_as_tables(self, seed: int) -> None:
        """The quick reader takes it: it would read objects of each entry otherwise, in many times the time."""
        items = [
            ListedItem(PathGroup(item.paths.prefix, f"n{at}", item.paths.others), item.kind, item.file, item.places)
            for at, item in enumerate(any_items(random.Random(seed), 300))
            if all(len(str(path)) < 250 and str(path).isascii() for path in item.paths)
        ]
        data = written(items)
        tables = read_tables("here", iter([data[start : start + 1000] for start in range(0, len(data), 1000)]))
        assert tables is not None
        wanted = of_torch(items)
        self.assertEqual(tables.tensors.keys, [*wanted.state_dict_metadata])
        self.assertEqual(tables.paths.paths, wanted.planner_data)
        self.assertEqual(Counter(tables.places.keys), Counter(index.fqn for index in wanted.storage_data))

    def test_archives_in_files(self) -> None:
        """The bytes of each chunk are a file of torch.save: of tensors of all sizes, none at all too, in files of any length."""
        rng = random.Random(3)
        tensors = [torch.randn(rng.choice([(0,), (), (1,), (3, 5), (16,), (9, 0)])) for _ in range(60)]
        planned = [PlannedTensor(f"t{at}", "float32", tuple(tensor.shape)) for at, tensor in enumerate(tensors)]

        def rows_of(shape: Shape, itemsize: int) -> list[tuple[Shape, Shape]]:
            self.assertEqual(itemsize, 4)
            if len(shape) < 2:
                return [((0,) * len(shape), shape)]
            return [((row, 0), (1, shape[1])) for row in range(shape[0])]

        for most_nbytes in (1, 5_000, 1 << 20):
            left = iter(tensors)
            for plan in file_plans(planned, rows_of, most_nbytes):
                inside = [next(left) for _ in plan.tensors]
                data, file, at = b"".join(tensor.numpy().tobytes() for tensor in inside), b"", 0
                for byte, frame in plan.frames:
                    file, at = file + data[at:byte] + frame, byte
                starts = iter(plan.chunk_starts)
                for tensor, of_kind in zip(inside, plan.plans, strict=True):
                    for (offsets, sizes), archive in zip(of_kind.kind.chunks, of_kind.archives, strict=True):
                        start = next(starts)
                        self.assertEqual(start % 64, 0)
                        loaded = torch.load(io.BytesIO(file[start : start + archive.nbytes]), weights_only=True)
                        wanted = tensor[offsets[0] : offsets[0] + sizes[0]] if sizes else tensor
                        self.assertTrue(torch.equal(loaded, wanted) and loaded.shape == sizes)
                self.assertEqual(len(file), plan.place)
                self.assertEqual(list(starts), [])
            self.assertEqual(list(left), [])

    def test_tensors_of_a_kind_share_frames(self) -> None:
        """Frames take a kilobyte for each tensor, which may have a few numbers."""
        planned = [PlannedTensor(f"t{at}", "float32", (3,)) for at in range(1000)]
        (plan,) = file_plans(planned, lambda shape, itemsize: [((0,), shape)], 1 << 30)
        self.assertEqual(len(plan.frames), 1001)
        self.assertLess(len({id(frame) for _, frame in plan.frames}), 70)

    def test_numbers(self) -> None:
        for value in NUMBERS:
            self.assertEqual(number(value), pickle.dumps(value, 2)[2:-1])

    def test_items_as_json(self) -> None:
        for item in (
            ValueItem(PathGroup(("a", 0), "b", ("c",)), 5, 6),
            ValueItem(PathGroup((), 3), 0, 0, ("float32", ())),
            ValueItem(PathGroup(("x",), "y"), 1, 2, ("int64", (4, 5))),
        ):
            self.assertEqual(ValueItem.from_json(item.to_json()), item)

    def test_two_values_under_one_key(self) -> None:
        """First, middle and last of a group, and in another one."""
        many = PathGroup(("a",), "x", ["y", "z"])
        for name in "xyz":
            for groups in ([many, PathGroup((), f"a.{name}")], [PathGroup(("a",), name), many]):
                with self.assertRaisesRegex(CheckpointError, rf"a.{name}: .* and .* both have this key"):
                    check_keys(groups)
        with self.assertRaisesRegex(CheckpointError, "a.y: .* and .* both have this key"):
            check_keys([PathGroup(("a",), "x", ["y", "z", "y"])])
        check_keys([many, PathGroup(("a", "x"), "y"), PathGroup((), "a")])

    def test_keys_of_this_library(self) -> None:
        """Under any way to make such a key, but the library's own."""
        for group in (
            PathGroup((), "fsdp_optim_keys.x"),
            PathGroup((), "w", ["v", "per_rank_extra.0"]),
            PathGroup(("per_rank_extra.0",), "x"),
        ):
            with self.assertRaisesRegex(CheckpointError, "has its own values under keys that begin with"):
                check_keys([group])
        check_keys(
            [PathGroup(("per_rank_extra",), "0"), PathGroup(("fsdp_optim_keys",), "x"), PathGroup((), "per_rank_extra")]
        )


class Nowhere:
    """A file that keeps nothing."""

    def write(self, _: str) -> None:
        pass


class ApartTest(unittest.TestCase):
    """The paths of empty dicts, under keys that are none of torch's."""

    def test_back(self) -> None:
        for path in (("a",), ("a.b", 0, "é\ud800", "0"), ("",)):
            group = apart(path)
            self.assertEqual(
                with_apart("here", dict(zip(keys_in(group), group, strict=True))), {keys_in(group)[0]: path}
            )
        self.assertEqual(with_apart("here", {"a.b": ("a", "b")}), {"a.b": ("a", "b")})

    @parameterized.expand(["", "x", "[" * 9999, "{}", "[]", '[["a"]]', "[null]", "[1.5]", "[true]"])
    def test_no_path(self, text: str) -> None:
        with self.assertRaisesRegex(CheckpointError, "^here: .*: is no path of an empty dict$"):
            with_apart("here", {f"fsdp_optim_keys.empty.{text}": ("x",)})


if __name__ == "__main__":
    unittest.main()
