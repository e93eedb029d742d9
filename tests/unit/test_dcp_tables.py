"""Torch's metadata read as tables: as the reader does that makes an object of each value, or not at all."""

from __future__ import annotations

import io
import itertools
import pickle
import pickletools
import random
import unittest
from collections import Counter
from inspect import signature
from typing import Any
from unittest import mock

import torch
from kit.dcp_files import DcpFiles, InFolder, fill, open_any
from parameterized import parameterized
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_optim.foreign.dcp import metadata, metadata_patterns
from fsdp_optim.foreign.dcp.metadata_patterns import TENSORS, forms_of, free_in, operations, path_parts
from fsdp_optim.foreign.dcp.metadata_tables import Tables, read_tables
from fsdp_optim.foreign.dcp.tensor_table import TensorTable, table_of

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
OLD_PROTOCOLS = (2, 3)


def any_metadata(rng: random.Random, num: int) -> Metadata:
    """As torch writes it, and as it might: shared and equal objects, any number of dimensions and chunks, any names."""
    tensors: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    shared, value_of_all, of_dtype = torch.Size([0, 0]), BytesStorageMetadata(), dict[torch.dtype, TensorProperties]()
    for number in range(num):
        fqn = rng.choice([f"layers.{number}.w", f"l{number}"])
        paths_like = (("model", fqn), ("optim", "state", fqn, "exp_avg"), (fqn,), ("a", number, fqn, "b", "c"))
        path = rng.choice(paths_like)
        key = ".".join(map(str, path)) + rng.choice([""] * 40 + ["é", "x" * 260])
        paths[key] = path
        if rng.random() < 0.2:
            again = [place for place in [*places.values()][-30:] if place.relative_path == "v.distcp"]
            place = rng.choice(again) if again and rng.random() < 0.5 else _StorageInfo("v.distcp", number, 10)
            tensors[key], places[MetadataIndex(key)] = rng.choice([BytesStorageMetadata(), value_of_all]), place
            continue
        size = torch.Size(rng.choice([1, 3, 300, 70_000]) for _ in range(rng.randrange(6)))
        num_chunks = rng.choice([1, 1, 1, 2, 3]) if size else 1
        chunks = []
        for at in range(num_chunks):
            offsets = torch.Size([at * size[0], *[0] * (len(size) - 1)]) if size else size
            is_shared = len(size) == 2 and at == 0 and rng.random() < 0.5
            chunks.append(ChunkStorageMetadata(shared if is_shared else offsets, size))
        whole = torch.Size([size[0] * num_chunks, *size[1:]]) if num_chunks > 1 else size
        properties = TensorProperties(rng.choice(DTYPES))
        properties = of_dtype.setdefault(properties.dtype, properties) if rng.random() < 0.5 else properties
        tensors[key] = TensorStorageMetadata(properties, whole, chunks)
        for at, chunk in enumerate(chunks):
            name = key if rng.random() < 0.5 else "".join([*key])
            index = MetadataIndex(name, rng.choice([chunk.offsets, torch.Size(tuple(chunk.offsets))]), at)
            start = rng.choice([number * 100, number << 20, number << 33, number << 45])
            places[index] = _StorageInfo(f"__{at}_0.distcp", start, rng.choice([5, 500, 1 << 20]))
    return Metadata(tensors, paths, places)


def few_shared_objects() -> Metadata:
    """Values that have one object in common, or a place, which may be transformed, and tensors with the same properties."""
    value, properties = BytesStorageMetadata(), TensorProperties(torch.float32)
    place, sizes = _StorageInfo("v.distcp", 0, 10), torch.Size([2])
    values: dict[str, Any] = dict.fromkeys("abc", value) | {"d": BytesStorageMetadata(), "e": value}
    values |= {key: TensorStorageMetadata(properties, sizes, [ChunkStorageMetadata(sizes, sizes)]) for key in "fg"}
    places = {MetadataIndex(key): place for key in "abd"} | {MetadataIndex("e"): _StorageInfo("v.distcp", 7, 3)}
    places |= {MetadataIndex("c"): place} | {
        MetadataIndex(key, sizes, 0): _StorageInfo("f.distcp", 1, 8) for key in "fg"
    }
    return Metadata(values, {key: (key,) for key in values}, places)


def of_two_dtypes() -> Metadata:
    """Tensors with properties in common: a long name has those of a tensor before it, a short one those of a tensor after it."""
    first, second, third = (TensorProperties(dtype) for dtype in (torch.float32, torch.int64, torch.int64))
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for key, properties in (("a", first), ("b", second), ("long name", first), ("c", third), ("d", third)):
        zero, size = torch.Size([0]), torch.Size([2])
        tensors[key] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(zero, size)])
        places[MetadataIndex(key, zero, 0)] = _StorageInfo("f.distcp", 0, 1)
    return Metadata(tensors, {key: (key,) for key in tensors}, places)


def with_words_of_torch() -> Metadata:
    """Tensors with one chunk and with two, some with the same properties, and keys that are words of torch's metadata."""
    first = TensorProperties(torch.float32)
    tensors: dict[str, Any] = {"".join(["torch", ".Size"]): BytesStorageMetadata()}
    places: dict[MetadataIndex, Any] = {MetadataIndex("torch.Size"): _StorageInfo("v.distcp", 0, 1)}
    for key, properties, num in (
        ("a", first, 1),
        ("b", TensorProperties(torch.float32), 2),
        ("c", first, 1),
        ("d", first, 2),
    ):
        chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([1])) for at in range(num)]
        tensors[key] = TensorStorageMetadata(properties, torch.Size([num]), chunks)
        places |= {
            MetadataIndex(key, chunk.offsets, at): _StorageInfo("f.distcp", at, 1) for at, chunk in enumerate(chunks)
        }
    for word in ("sizes", "offsets", "size", "properties", "chunks"):
        tensors["".join([*word])] = BytesStorageMetadata()
        places[MetadataIndex(word)] = _StorageInfo("v.distcp", 0, 1)
    return Metadata(tensors, {key: (key,) for key in tensors}, places)


def alike(num: int) -> Metadata:
    """Tensors with two chunks and values, with names of one length."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for number in range(num):
        size = torch.Size([2, 300])
        chunks = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([1, 300])) for at in range(2)]
        tensors[f"t{number}"] = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
        tensors[f"v{number}"] = BytesStorageMetadata()
        for at, chunk in enumerate(chunks):
            index = MetadataIndex(f"t{number}", chunk.offsets, at)
            places[index] = _StorageInfo(f"__{at}_0.distcp", 1000 * number, 700)
        places[MetadataIndex(f"v{number}")] = _StorageInfo("v.distcp", 10 * number, 10)
    return Metadata(tensors, {key: ("all", key) for key in tensors}, places)


def with_two_names(saved: Metadata) -> bytes:
    """A pickle in which each index has the attribute `fqn` twice, first with another text."""

    class Attributes(dict[str, Any]):
        def items(self) -> Any:
            return [("fqn", f"not {self['fqn']}"), ("index", self["index"]), ("fqn", self["fqn"])]

    class Pickler(pickle._Pickler):  # type: ignore[name-defined]
        dispatch = {**pickle._Pickler.dispatch}  # type: ignore[attr-defined]
        dispatch[Attributes] = dispatch[dict]

        def save_reduce(self, func: Any, args: Any, state: Any = None, *rest: Any, **named: Any) -> None:
            is_index = isinstance(named.get("obj"), MetadataIndex)
            super().save_reduce(func, args, Attributes(state) if is_index else state, *rest, **named)

    file = io.BytesIO()
    Pickler(file, 4).dump(saved)
    return file.getvalue()


def in_pieces(data: bytes, length: int) -> Any:
    return (data[at : at + length] for at in range(0, len(data), length))


def tables_of(data: bytes, length: int = 1 << 20) -> Tables | None:
    return read_tables("here", in_pieces(data, length))


def values_of(parsed: metadata.Metadata) -> list[Any]:
    """All that metadata say, in their order."""
    return [list(parsed.tensors.items()), list(parsed.values.items()), list(parsed.paths.items()), parsed.digest]


class SameTest(InFolder):
    def read(self, data: bytes, *, as_tables: bool) -> list[Any]:
        self.folder.mkdir(exist_ok=True)
        (self.folder / ".metadata").write_bytes(data)
        opened = open_any(self.folder)
        try:
            if as_tables:
                return values_of(metadata.read_metadata(opened, ".metadata"))
            with mock.patch.object(metadata, "read_tables", return_value=None):
                return values_of(metadata.read_metadata(opened, ".metadata"))
        finally:
            opened.close()

    @parameterized.expand(itertools.product((4, 5), (7, 400, 3000)))
    def test_any_metadata(self, protocol: int, num: int) -> None:
        """Of many frames too, and in pieces of any length. The memo is counted as the unpickler counts it."""
        data = pickle.dumps(any_metadata(random.Random(num), num), protocol)
        self.assertEqual(self.read(data, as_tables=True), self.read(data, as_tables=False))
        num_values = sum(code.name == "MEMOIZE" for code, _, _ in pickletools.genops(data))
        for length in (1009, 70_001, len(data)):
            tables = tables_of(data, length)
            assert tables is not None, length
            self.assertEqual(tables.memo.length, num_values)
            self.assertEqual(len(tables.tensors.keys), num)

    def test_what_this_library_writes_is_read_as_tables(self) -> None:
        files = fill(DcpFiles(self.folder))
        data = (files.finish() / ".metadata").read_bytes()
        self.assertIsNotNone(tables_of(data))
        self.assertEqual(self.read(data, as_tables=True), self.read(data, as_tables=False))

    def test_damage_gives_the_same_or_nothing(self) -> None:
        """Whatever bytes are changed: tables say what the other reader says, or there are none."""
        rng, ends = random.Random(0), Counter[str]()
        originals = [pickle.dumps(any_metadata(rng, num)) for num in (3, 8, 20)]
        for _ in range(300):
            data = bytearray(rng.choice(originals))
            for at in rng.sample(range(len(data)), rng.choice([1, 1, 2])):
                data[at] = rng.choice([rng.randrange(256), rng.choice(data), data[at] ^ 1])
            tables = tables_of(bytes(data))
            ends["none" if tables is None else "some"] += 1
            if tables is None or table_of(tables, "") is None:
                continue
            wanted = self.read(bytes(data), as_tables=False)
            self.assertEqual(self.read(bytes(data), as_tables=True), wanted)
        self.assertGreater(min(ends["none"], ends["some"]), 10)

    def test_a_value_that_is_named_before_it_is_there(self) -> None:
        """A reference to a later value of the memo: the unpickler refuses it, and so there are no tables."""
        for saved, step, most in ((any_metadata(random.Random(5), 8), 3, 12), (of_two_dtypes(), 1, 70)):
            data = pickle.dumps(saved)
            tables = tables_of(data)
            self.assertTrue(tables is not None and table_of(tables, "") is not None)
            num_before, num_refused = 0, 0
            for code, argument, at in pickletools.genops(data):
                num_before += code.name == "MEMOIZE"
                if code.name != "BINGET":
                    continue
                for later in range(num_before, min(num_before + most, 256), step):
                    damaged = data[: at + 1] + bytes([later]) + data[at + 2 :]
                    tables = tables_of(damaged)
                    self.assertTrue(
                        tables is None or table_of(tables, "") is None, f"{argument} at {at} is {later} now"
                    )
                    num_refused += 1
            self.assertGreater(num_refused, 200)

    def test_another_object_in_the_place_of_a_shared_one(self) -> None:
        """Whatever value of the memo is named there, or class: tables say what the other reader says, or there are none."""
        data, ends = pickle.dumps(few_shared_objects(), 4), Counter[str]()
        self.assertIsNotNone(tables_of(data))
        codes = list(pickletools.genops(data))
        names = [code.name for code, _, _ in codes]
        num_values, num_before = names.count("MEMOIZE"), itertools.accumulate(name == "MEMOIZE" for name in names)
        self.assertLess(num_values, 256)
        for index, before in enumerate(num_before):
            is_value = names[index : index + 2] in (["BINGET", "SHORT_BINUNICODE"], ["BINGET", "SETITEMS"])
            is_place = names[index - 1 : index + 3] == ["BUILD", "BINGET", "BINGET", "EMPTY_TUPLE"]
            is_class = names[index : index + 5] == ["BINGET", "EMPTY_TUPLE", "NEWOBJ", "MEMOIZE", "SHORT_BINUNICODE"]
            at = codes[index][2]
            for number in range(num_values) if is_value or is_place or is_class else ():
                damaged = data[: at + 1] + bytes([number]) + data[at + 2 :]
                tables = tables_of(damaged)
                if tables is None or table_of(tables, "") is None:
                    ends["none"] += 1
                    continue
                self.assertLess(number, before)
                ends["value" if is_value else "place" if is_place else "class"] += 1
                self.assertEqual(self.read(damaged, as_tables=True), self.read(damaged, as_tables=False))
        self.assertGreater(min(ends[end] for end in ("none", "value", "place")), 2, ends)
        self.assertEqual(ends["class"], 1)  # the class itself

    def test_a_text_in_the_place_of_each_value(self) -> None:
        """Of a word of torch's metadata, which comes before or after it: the unpickler tells texts from classes."""
        data, ends = pickle.dumps(with_words_of_torch(), 4), Counter[str]()
        self.assertIsNotNone(tables_of(data))
        num, words = 0, dict[str, int]()
        for code, argument, _ in pickletools.genops(data):
            if code.name == "SHORT_BINUNICODE" and argument in with_words_of_torch().state_dict_metadata:
                words[argument] = num  # the last one is the key's
            num += code.name == "MEMOIZE"
        self.assertLess(num, 256)
        for code, _, at in pickletools.genops(data):
            for number in words.values() if code.name == "BINGET" else ():
                damaged = data[: at + 1] + bytes([number]) + data[at + 2 :]
                tables = tables_of(damaged)
                ends["none" if tables is None else "some"] += 1
                if tables is not None and table_of(tables, "") is not None:
                    self.assertEqual(self.read(damaged, as_tables=True), self.read(damaged, as_tables=False))
        self.assertGreater(min(ends["none"], ends["some"]), 10, ends)

    def test_another_operation_in_the_place_of_each(self) -> None:
        """Whatever stands in the place of a value, in the first, a middle or the last of entries that look alike."""
        numbers = [b"K\x02", b"M\x02\x01", b"J\x02\x00\x00\x00", b"J\xff\xff\xff\xff"]
        others = [*numbers, b"h\x07", b"h\xff", b"N", b")", b"\x8c\x01a"]
        for saved in (any_metadata(random.Random(8), 5), alike(3)):
            data, ends = pickle.dumps(saved, 4), Counter[str]()
            codes = [(code.name, at) for code, _, at in pickletools.genops(data)]
            for (name, at), (_, end) in itertools.pairwise(codes):
                if name not in ("BINGET", "BININT1", "BININT2", "BININT", "NONE", "EMPTY_TUPLE"):
                    continue
                for other in others:
                    damaged = data[:at] + other + data[end:]
                    tables = tables_of(damaged)
                    ends["none" if tables is None else "some"] += 1
                    if tables is not None and table_of(tables, "") is not None:
                        what = f"{other!r} in the place of {data[at:end]!r} at {at}"
                        self.assertEqual(self.read(damaged, as_tables=True), self.read(damaged, as_tables=False), what)
            self.assertGreater(min(ends["none"], ends["some"]), 10, ends)

    def test_another_operation_in_the_place_of_the_last(self) -> None:
        """SETITEMS puts entries into their dict. Another operation there is refused, also where entries were read as rows."""
        data = pickle.dumps(alike(5), 4)
        self.assertIsNotNone(tables_of(data))
        names = {code.name: code.code.encode("latin-1") for code in pickletools.opcodes}
        ends = [at for code, _, at in pickletools.genops(data) if code.name == "SETITEMS"]
        others = [
            "POP",
            "POP_MARK",
            "TUPLE",
            "LIST",
            "DICT",
            "FROZENSET",
            "APPENDS",
            "ADDITEMS",
            "SETITEM",
            "BUILD",
            "DUP",
        ]
        for other, at in itertools.product(others, ends):
            damaged = data[:at] + names[other] + data[at + 1 :]
            tables = tables_of(damaged)
            if tables is not None and table_of(tables, "") is not None:
                self.assertEqual(self.read(damaged, as_tables=True), self.read(damaged, as_tables=False))

    def test_entries_of_one_length_and_of_many_forms(self) -> None:
        """More forms than entries are compared with: the others are read one by one, up to a bound."""
        data = pickle.dumps(any_metadata(random.Random(9), 400), 4)
        wanted = self.read(data, as_tables=False)
        with mock.patch.object(metadata_patterns, "_MOST_TRIED", 1):
            self.assertEqual(self.read(data, as_tables=True), wanted)
            self.assertIsNotNone(tables_of(data))
        with mock.patch.multiple(metadata_patterns, _FEW_FORMS=2, _NBYTES_OF_FORM=1 << 20):
            self.assertIsNone(tables_of(data))
            self.assertEqual(self.read(data, as_tables=True), wanted)

    @unittest.skipUnless(
        "transform_descriptors" in signature(_StorageInfo).parameters, "this torch transforms no files"
    )
    def test_a_shared_place_whose_bytes_are_transformed(self) -> None:
        """An entry of its own names the place that a table has no columns for: all is read by the other reader."""
        saved = few_shared_objects()
        place = _StorageInfo("v.distcp", 20, 30, ["zstd"])
        saved.storage_data.update({MetadataIndex(key): place for key in "ab"})
        self.assertIsNone(tables_of(pickle.dumps(saved, 4)))

    def test_a_protocol_that_does_not_exist(self) -> None:
        data = pickle.dumps(any_metadata(random.Random(6), 3))
        self.assertIsNotNone(tables_of(data))
        self.assertIsNone(tables_of(data[:1] + bytes([pickle.HIGHEST_PROTOCOL + 1]) + data[2:]))

    def test_an_attribute_that_is_there_twice(self) -> None:
        """The unpickler takes the last one, and both are in its memo."""
        saved = any_metadata(random.Random(7), 60)
        values = {key for key, value in saved.state_dict_metadata.items() if isinstance(value, BytesStorageMetadata)}
        only = Metadata(
            {key: saved.state_dict_metadata[key] for key in values},
            {key: saved.planner_data[key] for key in values},
            {index: place for index, place in saved.storage_data.items() if index.fqn in values},
        )
        self.assertIsNotNone(tables_of(pickle.dumps(only, 4)))
        self.assertIsNone(tables_of(with_two_names(only)))


class GivingUpTest(unittest.TestCase):
    @parameterized.expand(OLD_PROTOCOLS)
    def test_old_protocols(self, protocol: int) -> None:
        self.assertIsNone(tables_of(pickle.dumps(any_metadata(random.Random(0), 7), protocol)))

    @parameterized.expand([("other values", 3), ("a key twice", 1)])
    def test_entries_that_are_not_torchs(self, what: str, num: int) -> None:
        """A dict of the large ones that has another entry, or is used elsewhere."""
        saved = any_metadata(random.Random(1), 20)
        if what == "other values":
            saved.planner_data["one more"] = {"a": num}
        else:
            saved.storage_meta = saved.planner_data  # type: ignore[assignment]
        tables = tables_of(pickle.dumps(saved))
        self.assertTrue(tables is None or what == "a key twice")

    def test_a_text_that_says_another_length(self) -> None:
        data = pickle.dumps(any_metadata(random.Random(2), 30))
        texts = [
            at for code, text, at in pickletools.genops(data) if code.name == "SHORT_BINUNICODE" and "layers." in text
        ]
        for at in (texts[0], texts[len(texts) // 2], texts[-1]):
            damaged = bytearray(data)
            damaged[at + 1] -= 1
            self.assertIsNone(tables_of(bytes(damaged)))

    def test_soon(self) -> None:
        """A large pickle without entries of torch is given up after a bounded part of it, in every way of writing it."""
        for filler in (b"K\x01", b"N0", b")0", b"]\x94", b"\x95" + bytes(8), b"(1", b"}\x94"):
            data = b"\x80\x04" + filler * (8 << 20)
            pieces = Counter[str]()

            def counted(data: bytes = data, pieces: Counter[str] = pieces) -> Any:
                for piece in in_pieces(data, 1 << 20):
                    pieces["read"] += 1
                    yield piece

            self.assertIsNone(read_tables("here", counted()), filler)
            self.assertLess(pieces["read"], 4, filler)


class FormTest(unittest.TestCase):
    """Forms refuse a text whose recorded length differs from the one that a pattern found.

    The entries are made by hand, because in every damaged pickle that was tried another check failed first.
    """

    def test_operations_behind_the_end(self) -> None:
        for entry in (b"\x8c", b"\x8c\x05ab\x94", b"h", b"j\x01\x02", b"M\x01"):
            with self.assertRaises(ValueError):
                operations(entry)

    def test_parts_that_begin_elsewhere_or_end_elsewhere(self) -> None:
        entry = b"\x8c\x02ab\x94h\x07"
        spans = operations(entry)
        self.assertEqual(
            free_in(entry, spans, [(0, 5), (5, 7)]).tolist(), [False] * 2 + [True] * 2 + [False] * 2 + [True]
        )
        for part in ((1, 5), (0, 4), (0, 7), (7, 8)):
            with self.assertRaises(ValueError):
                free_in(entry, spans, [part])

    def test_characters_that_no_pattern_allows(self) -> None:
        for last in (b"b", b" ", b"~", b"\x1f", b"\x7f", b"\x94", b"\xc3"):
            entries = [b"\x8c\x02ab\x94", b"\x8c\x02a" + last + b"\x94"]
            ((form, (part,)),) = forms_of(entries, path_parts)
            if last in b"b ~":
                self.assertEqual(form.texts(part), ["ab", f"a{last.decode()}"])
                continue
            with self.assertRaises(ValueError):
                form.texts(part)

    def test_an_entry_that_is_none(self) -> None:
        with self.assertRaises(ValueError):
            TENSORS.spans(b"\x8c\x02ab\x94h")


class TableTest(unittest.TestCase):
    def test_of_objects_and_of_rows(self) -> None:
        """A table that is made of objects is the table that rows make."""
        tables = tables_of(pickle.dumps(any_metadata(random.Random(3), 200)))
        assert tables is not None
        made = table_of(tables, "folder/")
        assert made is not None
        wanted = {(item.file, item.start, item.nbytes): key for key, tensor in made[0].items() for item in tensor.items}
        self.assertEqual(dict(made[0].places()), wanted)
        again = TensorTable.of(dict(made[0]))
        self.assertEqual(dict(again), dict(made[0]))
        self.assertEqual(again.ends_of_files(), made[0].ends_of_files())
        self.assertEqual(again.dimensions(), {key: len(tensor.shape) for key, tensor in made[0].items()})
        self.assertTrue(all(item.file.startswith("folder/__") for tensor in again.values() for item in tensor.items))

    def test_memory(self) -> None:
        """Of a closed reader nothing but the columns stays: some bytes for each chunk."""
        tables = tables_of(pickle.dumps(any_metadata(random.Random(4), 2000)))
        assert tables is not None
        made = table_of(tables, "")
        assert made is not None
        nbytes = sum(column.nbytes for column in made[0].columns)
        num_chunks = sum(len(tensor.items) for tensor in made[0].values())
        self.assertLess(nbytes, 32 * num_chunks)


if __name__ == "__main__":
    unittest.main()
