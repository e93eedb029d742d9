"""Files of torch.save are read without their elements, and nothing in them is executed. Oracle: torch.load(weights_only=True)."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import re
import struct
import tempfile
import unittest
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.serialization import skip_data

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.torch_archive import TorchArchive, is_torch_archive, read_archive, read_tensor
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.formats.base.unread import Unread
from fsdp_optim.storage.base import Opened
from fsdp_optim.storage.posix.opened_any import OpenFiles

_OTHERS = re.compile(r"torch\.(q|bits|complex32|u?int[1-7]$|float4)")  # quantized numbers, and parts of bytes
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype) and not _OTHERS.match(str(v))}, key=str)


def numbers(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random bytes; of zeros and ones for bools."""
    numel = int(np.prod(shape, dtype=np.int64))
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), dtype=torch.uint8).bool()
    return torch.randint(0, 255, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def values() -> dict[str, Any]:
    """Every kind of value that torch.load accepts with weights_only=True."""
    torch.manual_seed(1)
    tied, base = nn.Parameter(torch.randn(3, 5)), torch.randn(6, 4)
    model = OrderedDict(a=tied, b=tied, plain=torch.randn(2).requires_grad_())
    model._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    with_attribute = torch.ones(2)
    with_attribute.tag = "x"  # type: ignore[attr-defined]
    return {
        "dtypes": {str(dtype): numbers((3, 2), dtype) for dtype in DTYPES},
        "model": model,
        "views": [base, base[2:4], base[:, 1:3], base.t(), base[5], base.view(2, 12), base[1, 1:]],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "small": [torch.tensor(3.5), torch.zeros(0), torch.zeros(0, 4), torch.zeros(2, 0, 3), torch.tensor(True)],
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "attribute": with_attribute,
        "plain": [
            1,
            -(2**80),
            1.5,
            float("inf"),
            "text \u20ac",
            b"bytes",
            bytearray(b"more"),
            None,
            True,
            2j,
            (1, (2,)),
            (),
        ],
        "sets": [{1, "b"}, set(), {(1, 2)}],
        "torch": [torch.Size([2, 3]), torch.float16, torch.device("cuda", 1), torch.strided],
        "counter": Counter("abca"),
        1: {2: {"three": [{}, [], ""]}},
    }


def written(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, file, **options)
    return file.getvalue()


def zipped(data: bytes, compression: int = zipfile.ZIP_STORED, **changed: bytes) -> bytes:
    """The same archive as another program writes it, with other contents of records."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, changed.get(name.partition("/")[2].replace(".", "_"), old.read(name)))
    return file.getvalue()


def with_pickle(pickled: bytes, num: int = 2, numel: int = 4) -> bytes:
    """An archive with any pickle, and `num` storages of `numel` float32."""
    data = written([torch.arange(numel * (index + 1.0))[-numel:].clone() for index in range(num)])
    return zipped(data, data_pkl=pickled)


def same(a: Any, b: Any) -> None:
    """Raise AssertionError for two values that differ in anything."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (a, b)
        a, b = (x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for x in (a, b))
        assert torch.equal(a, b), (a, b)
        return
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert list(a) == list(b), (a, b)
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), (a, b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b, (a, b)


class Counted(Opened):
    """Files that count what is read of them."""

    def __init__(self, opened: Opened) -> None:
        self._opened, self.nbytes, self.num = opened, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    where = property(lambda self: self._opened.where)  # type: ignore[assignment]

    def size_of(self, name: str) -> int:
        return self._opened.size_of(name)

    def read_into(self, name: str, pieces: Sequence[memoryview], offset: int) -> None:
        self.num += 1
        self.nbytes += sum(map(len, pieces))
        self._opened.read_into(name, pieces, offset)


class ArchiveTestCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def opened(self, data: bytes) -> Opened:
        (self.folder / "a.pt").write_bytes(data)
        opened = OpenFiles.at(self.folder)
        self.addCleanup(opened.close)
        return opened

    def archive(self, data: bytes, **options: Any) -> TorchArchive:
        return read_archive(self.opened(data), "a.pt", **options)

    def whole(self, data: bytes, **options: Any) -> Any:
        with closing(self.opened(data)) as opened:
            archive = read_archive(opened, "a.pt", **options)
            return archive.materialised(archive.value)


class TestValues(ArchiveTestCase):
    @parameterized.expand(
        [
            ("zip", {}),
            ("protocol 3", {"pickle_protocol": 3}),
            ("protocol 4", {"pickle_protocol": 4}),
            ("protocol 5", {"pickle_protocol": 5}),
            ("legacy", {"_use_new_zipfile_serialization": False}),
            ("legacy 4", {"_use_new_zipfile_serialization": False, "pickle_protocol": 4}),
        ]
    )
    def test_values_are_those_of_torch(self, _: str, options: dict[str, Any]) -> None:
        """torch itself does not read the legacy files that it writes of dtypes such as float8."""
        value = values()
        data = written(value, **options)
        expected = torch.load(io.BytesIO(written(value)), weights_only=True)
        self.assertTrue(is_torch_archive(self.opened(data), "a.pt"))
        same(expected, self.whole(data))

    @parameterized.expand([("zip", True), ("legacy", False)])
    def test_views(self, _: str, is_zip: bool) -> None:
        value = values()["views"]
        data = written(value, _use_new_zipfile_serialization=is_zip)
        same(torch.load(io.BytesIO(data)), self.whole(data))

    @parameterized.expand([("stored", zipfile.ZIP_STORED), ("deflated", zipfile.ZIP_DEFLATED)])
    def test_archives_of_other_programs(self, _: str, compression: int) -> None:
        data = written(values())
        same(torch.load(io.BytesIO(data)), self.whole(zipped(data, compression)))

    @parameterized.expand([("zip", True, 0), ("zip", True, 777), ("legacy", False, 777)])
    def test_an_archive_in_a_part_of_a_file(self, _: str, is_zip: bool, start: int) -> None:
        data = written(values()["model"], _use_new_zipfile_serialization=is_zip)
        other = written({"other": torch.zeros(1000)})
        found = self.whole(bytes(start) + data + other, start=start, nbytes=len(data))
        same(torch.load(io.BytesIO(data)), found)

    def test_names_of_sources_differ_between_parts_of_a_file(self) -> None:
        data = zipped(written([torch.arange(3.0)]))
        opened = self.opened(data + data)
        found = [read_archive(opened, "a.pt", start=start, nbytes=len(data)) for start in (0, len(data))]
        self.assertFalse(set(found[0].sources) & set(found[1].sources))

    def test_another_alignment(self) -> None:
        config = pytest.importorskip("torch.utils.serialization.config")  # torch 2.6 does not have it
        before = config.save.storage_alignment
        config.save.storage_alignment = 4096
        try:
            data = written(values()["model"])
        finally:
            config.save.storage_alignment = before
        same(torch.load(io.BytesIO(data)), self.whole(data))

    def test_tied_weights_and_views_share_a_file_and_its_bytes(self) -> None:
        for is_zip in (True, False):
            value = self.archive(written(values(), _use_new_zipfile_serialization=is_zip)).value
            a, b = value["model"]["a"], value["model"]["b"]
            self.assertEqual((a.file, a.start, a.shape), (b.file, b.start, b.shape))
            base, rows = value["views"][:2]
            self.assertEqual((rows.file, rows.start), (base.file, base.start + 2 * 4 * 4))

    def test_numpy(self) -> None:
        value = {
            "scalar": np.float32(1.5),
            "state": ("MT19937", np.arange(5, dtype=np.uint32), 2, 0, 0.0),
            "array": np.arange(6, dtype=np.int16).reshape(2, 3),
            "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "bools": np.array([True, False]),
        }
        for protocol in (2, 5):
            found = self.whole(written(value, pickle_protocol=protocol))
            for key in ("array", "fortran", "bools"):
                self.assertEqual(found[key].dtype, value[key].dtype)  # type: ignore[attr-defined]
                np.testing.assert_array_equal(found[key], value[key])
            self.assertEqual((type(found["scalar"]), found["scalar"]), (np.float32, 1.5))
            np.testing.assert_array_equal(found["state"][1], value["state"][1])

    def test_a_defaultdict_of_a_plain_class(self) -> None:
        found = self.whole(written({"state": defaultdict(dict, {0: {"step": torch.tensor(2.0)}})}))
        self.assertIs(found["state"].default_factory, dict)
        self.assertEqual(found["state"][0]["step"], 2)

    def test_what_occurs_twice_is_one_object(self) -> None:
        shared = [torch.ones(1)]
        found = self.whole(written({"a": shared, "b": shared}))
        self.assertIs(found["a"], found["b"])

    def test_the_digest_is_of_the_pickle(self) -> None:
        for is_zip in (True, False):
            one = written({"a": 1}, _use_new_zipfile_serialization=is_zip)
            other = written({"a": 2}, _use_new_zipfile_serialization=is_zip)
            self.assertEqual(self.archive(one).digest, self.archive(one).digest)
            self.assertNotEqual(self.archive(one).digest, self.archive(other).digest)


class TestReads(ArchiveTestCase):
    @parameterized.expand([("zip", True), ("legacy", False)])
    def test_no_element_is_read_before_it_is_needed(self, _: str, is_zip: bool) -> None:
        data = written(
            {"big": torch.zeros(4 << 20), "t": torch.zeros(1024, 1024).t()}, _use_new_zipfile_serialization=is_zip
        )
        opened = Counted(self.opened(data))
        archive = read_archive(opened, "a.pt")
        self.assertLess(opened.nbytes, 200 << 10)
        self.assertLessEqual(opened.num, 2)
        before = opened.nbytes, opened.num
        read_tensor(opened, archive.sources, archive.value["big"])
        self.assertLessEqual(opened.nbytes - before[0], (16 << 20) + 8)
        self.assertLessEqual(opened.num - before[1], 1 if is_zip else 2)
        before = opened.nbytes, opened.num
        same(torch.zeros(1024, 1024), read_tensor(opened, archive.sources, archive.value["t"]))
        self.assertLessEqual(opened.nbytes - before[0], (4 << 20) + 8)

    def test_records_beyond_four_gigabytes(self) -> None:
        """The file has holes. torch itself says where its records begin."""
        with FakeTensorMode():
            numels = {"a": 3, "big": 1 << 30, "b": 7, "c": 1}
            fakes = {name: torch.empty(numel) for name, numel in numels.items()}
        path = self.folder / "a.pt"
        with skip_data(materialize_fake_tensors=True):
            torch.save(fakes, path)
        with closing(OpenFiles.at(self.folder)) as opened:
            archive = read_archive(opened, "a.pt")
        theirs = torch._C.PyTorchFileReader(str(path))
        self.assertFalse(archive.sources)
        starts = [archive.value[name].start for name in numels]
        self.assertEqual(starts, [theirs.get_record_offset(f"data/{index}") for index in range(len(numels))])
        self.assertGreater(starts[-1], 1 << 32)

    def test_where_records_begin_is_known_without_a_read(self) -> None:
        """For any length of the names in an archive, which torch pads."""
        for length in range(1, 90):
            path = self.folder / f"{'n' * length}.pt"
            torch.save([torch.zeros(index) for index in range(1, 9)], path)
            with closing(OpenFiles.at(self.folder)) as opened:
                archive = read_archive(opened, path.name)
            theirs = torch._C.PyTorchFileReader(str(path))
            self.assertFalse(archive.sources, length)
            starts = [stored.start for stored in archive.value]
            self.assertEqual(starts, [theirs.get_record_offset(f"data/{index}") for index in range(8)])

    def test_many_tensors_take_few_reads(self) -> None:
        data = written({str(index): torch.full((3,), float(index)) for index in range(3000)})
        opened = Counted(self.opened(data))
        archive = read_archive(opened, "a.pt")
        self.assertLessEqual(opened.num, 6)
        self.assertFalse(archive.sources)
        same(torch.full((3,), 1234.0), read_tensor(opened, archive.sources, archive.value["1234"]))


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = call, arguments

    def __reduce__(self) -> Any:
        return self.reduced


class Config:
    """A class of a trainer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.name = tensor, "c"


class Recorded:
    """A stand-in for a class."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class TestClasses(ArchiveTestCase):
    def test_an_object_of_another_class_is_unread_and_only_it(self) -> None:
        archive = self.archive(
            written({"args": argparse.Namespace(lr=1), "t": torch.ones(2), "dict": {"path": Path("x")}})
        )
        self.assertIsInstance(archive.value["args"], Unread)
        self.assertEqual(archive.value["args"].what, "argparse.Namespace")
        self.assertEqual(archive.value["dict"]["path"].what.rpartition(".")[2], type(Path("x")).__name__)
        self.assertIsInstance(archive.value["t"], StoredTensor)

    @parameterized.expand([("sparse", torch.eye(3).to_sparse()), ("csr", torch.eye(3).to_sparse_csr())])
    def test_a_tensor_without_plain_elements_is_unread(self, _: str, tensor: torch.Tensor) -> None:
        found = self.archive(written({"t": tensor})).value["t"]
        self.assertIsInstance(found, Unread)
        self.assertIn("sparse", found.what)

    def test_a_quantized_tensor_is_unread(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
            data = written({"t": tensor})
        self.assertEqual(self.archive(data).value["t"].what, "torch._utils._rebuild_qtensor")

    def test_real_objects_on_request(self) -> None:
        for is_zip in (True, False):
            torch_made = torch.arange(6.0).reshape(2, 3).t()
            value = {"config": Config(torch_made), "args": argparse.Namespace(lr=1), "t": torch.ones(2)}
            archive = self.archive(written(value, _use_new_zipfile_serialization=is_zip))
            self.assertIsInstance(archive.value["config"], Unread)
            real = archive.unpickled()
            self.assertEqual(real["args"], argparse.Namespace(lr=1))
            self.assertIsInstance(real["config"], Config)
            same(torch_made, real["config"].tensor)
            self.assertIsInstance(real["t"], StoredTensor)
            same(torch.ones(2), archive.materialised(real["t"]))

    def test_a_tensor_of_a_device_that_goes_by_way_of_the_cpu(self) -> None:
        class OfDevice:
            def __init__(self, dtype: torch.dtype) -> None:
                self.dtype = dtype

            def __reduce__(self) -> Any:
                made = torch._utils._rebuild_device_tensor_from_cpu_tensor
                return made, (torch.arange(3.0), self.dtype, "cpu", False)

        found = self.archive(written([OfDevice(torch.float32), OfDevice(torch.float64)])).value
        self.assertEqual((found[0].dtype, found[0].shape), ("float32", (3,)))
        self.assertIsInstance(found[1], Unread)

    def test_stand_ins(self) -> None:
        data = written({"config": Config(torch.ones(2)), "ns": argparse.Namespace(a=1)})
        names = {f"{Config.__module__}.Config": Recorded, "argparse.Namespace": Recorded}
        value = self.archive(data, stand_ins=names).value
        self.assertEqual(value["ns"].state, {"a": 1})
        self.assertIsInstance(value["config"].state["tensor"], StoredTensor)


def tensor_pickle(
    storage: str = "FloatStorage", key: str = "0", numel: int = 4, offset: Any = 0, **others: Any
) -> bytes:
    """The pickle of {"w": a tensor} with any numbers."""
    shape, stride = others.get("shape", (4,)), others.get("stride", (1,))
    inner = b"(X\7\0\0\0storagectorch\n" + storage.encode() + b"\n" + _dumped(key) + b"X\3\0\0\0cpu" + _dumped(numel)
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + inner + b"tQ" + _dumped(offset) + _dumped(shape) + _dumped(stride)
    return b"\x80\2}X\1\0\0\0w" + call + b"\x89}" + b"tRs."


def _dumped(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


NESTED = b"\x80\2" + b"]" * 5000 + b"a" * 4999 + b"."
DEEP_KEY = b"\x80\2})" + b"\x85" * 50_000 + b"K\1s."


def laughs(num: int) -> bytes:
    """A list of two lists of two lists of ..., `num` levels: 2 ** num items."""
    body = b"]q\0"
    for index in range(num):
        body += b"0](h" + bytes([index]) + b"h" + bytes([index]) + b"eq" + bytes([index + 1])
    return b"\x80\2" + body + b"."


BROKEN: list[tuple[str, bytes]] = [
    ("negative shape", tensor_pickle(shape=(-1,))),
    ("negative stride", tensor_pickle(stride=(-1,))),
    ("negative offset", tensor_pickle(offset=-1)),
    ("an offset beyond", tensor_pickle(offset=1)),
    ("a shape beyond", tensor_pickle(shape=(5,))),
    ("a stride beyond", tensor_pickle(stride=(2,))),
    ("a huge shape", tensor_pickle(shape=(1 << 40, 1 << 40), stride=(0, 0))),
    ("a number of 2**70", tensor_pickle(shape=(1 << 70,))),
    ("a shape of floats", tensor_pickle(shape=(4.0,))),
    ("a shape that is a text", tensor_pickle(shape="abcd", stride="abcd")),
    ("two strides", tensor_pickle(stride=(1, 1))),
    ("an offset that is none", tensor_pickle(offset=None)),
    ("a storage that is larger than its record", tensor_pickle(numel=5, shape=(5,))),
    ("a storage that is missing", tensor_pickle(key="7")),
    ("a storage outside of the folder", tensor_pickle(key="../version")),
]

HOSTILE: list[tuple[str, bytes]] = [
    ("nested", NESTED),
    ("a deep key", DEEP_KEY),
    ("itself", b"\x80\2]q\0h\0a."),
    ("laughs", laughs(60)),
    ("a memo of 2**32", b"\x80\2Nr\xff\xff\xff\xff0]s."),
    ("a text of 2**60 bytes", b"\x80\4\x8d" + struct.pack("<Q", 1 << 60) + b"x."),
    ("an array of 2**60 bytes", b"\x80\5\x96" + struct.pack("<Q", 1 << 60) + b"x."),
    ("a frame of 2**60 bytes", b"\x80\4\x95" + struct.pack("<Q", 1 << 60) + b"."),
    ("a bytearray of a number", b"\x80\2cbuiltins\nbytearray\nJ\0\0\0\x7f\x85R."),
    ("a set of a range", b"\x80\2cbuiltins\nset\ncbuiltins\nrange\nJ\0\0\0\x7f\x85R\x85R."),
    ("a list as a key", b"\x80\2}]K\1s."),
    ("an underflow", b"\x80\2\x87."),
    ("an empty stack", b"\x80\2."),
    ("a mark too few", b"\x80\2t."),
    ("no end", b"\x80\2]"),
    ("nothing", b""),
    ("an extension", b"\x80\2\x82\1."),
    ("a buffer of elsewhere", b"\x80\5\x97."),
    ("a call of a number", b"\x80\2K\1)R."),
    ("a call without a tuple", b"\x80\2ccollections\nOrderedDict\n]R."),
    ("a state for a class", b"\x80\2ctorch._utils\n_rebuild_tensor_v2\nN}X\x08\0\0\0__code__Ns\x86b."),
    ("a state for a dict", b"\x80\2}}X\1\0\0\0aK\1sb."),
    ("a state for a dtype", b"\x80\2ctorch\nfloat32\n}X\1\0\0\0aK\1sb."),
    ("items for a class", b"\x80\2ccollections\nOrderedDict\nX\1\0\0\0aK\1s."),
    ("items for a tuple", b"\x80\2)K\1a."),
    ("an id that is no tuple", b"\x80\2K\1Q."),
    ("an id of another kind", b"\x80\2(X\6\0\0\0modulectorch\nFloatStorage\nK\1K\1K\1tQ."),
    ("a size below zero", b"\x80\2ctorch\nSize\nJ\xff\xff\xff\xff\x85\x85R."),
    ("a size of texts", b"\x80\2ctorch\nSize\nX\1\0\0\0a\x85\x85R."),
    ("a layout that is a function", b"\x80\2ctorch.serialization\n_get_layout\nX\4\0\0\0load\x85R."),
    ("numbers of numpy that are objects", pickle.dumps(np.array([{}], dtype=object), 2)),
    ("a dtype of numpy with fields", pickle.dumps(np.zeros(2, [("a", "f4")]), 2)),
]


class TestHostile(ArchiveTestCase):
    @parameterized.expand(BROKEN)
    def test_a_damaged_tensor_is_named(self, _: str, pickled: bytes) -> None:
        with self.assertRaisesRegex(CheckpointError, r"a\.pt"):
            try:
                self.archive(with_pickle(pickled))
            except CheckpointError as error:
                self.assertRegex(str(error), r"\['w'\]|data/|record")
                raise

    @parameterized.expand(HOSTILE)
    def test_a_hostile_pickle_is_refused(self, _: str, pickled: bytes) -> None:
        with self.assertRaisesRegex(CheckpointError, r"a\.pt"):
            self.archive(with_pickle(pickled))

    def test_a_sound_pickle_of_the_same_make_is_read(self) -> None:
        """Otherwise the two tables above could pass for another reason."""
        same({"w": torch.arange(4.0)}, self.whole(with_pickle(tensor_pickle())))

    def test_nothing_is_executed(self) -> None:
        marker = self.folder / "executed"
        calls: list[Any] = [
            Evil(os.system, f"touch {marker}"),
            Evil(eval, f"open({str(marker)!r}, 'w')"),
            Evil(exec, f"open({str(marker)!r}, 'w')"),
            Evil(getattr, StoredTensor, "key"),
            Evil(setattr, StoredTensor, "key", 1),
            Evil(__import__, "antigravity"),
            Evil(torch.load, str(marker)),
            Evil(torch.hub.load, "x"),
            Evil(Path.write_text, marker, "x"),
        ]
        for call in calls:
            for is_zip in (True, False):
                data = written({"a": call, "t": torch.ones(1)}, _use_new_zipfile_serialization=is_zip)
                self.assertIsInstance(self.archive(data).value["a"], Unread)
        self.assertFalse(marker.exists())

    def test_an_ordered_dict_gets_no_attribute_but_its_metadata(self) -> None:
        pickled = b"\x80\2ccollections\nOrderedDict\n)R}(X\5\0\0\0itemsK\1X\x09\0\0\0_metadata}ub."
        found = self.archive(with_pickle(pickled)).value
        self.assertEqual(vars(found), {"_metadata": {}})
        self.assertEqual(list(found.items()), [])

    def test_copies_of_one_large_value_are_refused(self) -> None:
        large = b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"q\0"
        again = b"cbuiltins\nbytearray\nh\0X\6\0\0\0latin1\x86R0" * 100
        with self.assertRaisesRegex(CheckpointError, "copy"):
            self.archive(with_pickle(b"\x80\2" + large + again + b"."))

    def test_a_tensor_that_expands_far_beyond_its_bytes(self) -> None:
        with self.assertRaisesRegex(CheckpointError, r"a\.pt: the value\['w'\].*share memory"):
            self.archive(with_pickle(tensor_pickle(shape=(1 << 30, 4), stride=(0, 1))))

    def test_big_endian(self) -> None:
        with self.assertRaisesRegex(CheckpointError, "byte order.*big"):
            self.archive(zipped(written({"a": torch.ones(1)}), byteorder=b"big"))

    def test_a_record_that_is_smaller_than_it_says(self) -> None:
        data = bytearray(zipped(written({"a": torch.zeros(1 << 16)}), zipfile.ZIP_DEFLATED))
        directory = data.rindex(b"PK\1\2", 0, data.rindex(b"archive/data/0"))
        data[directory + 24 : directory + 28] = struct.pack("<I", 0x7FFFFFFF)
        with self.assertRaisesRegex(
            CheckpointError, "data/0 is compressed and has 2147483647 bytes, and at most [0-9]+ are"
        ):
            self.archive(bytes(data))

    def test_a_record_that_begins_elsewhere(self) -> None:
        """Where only the local header can tell, it must be the right one."""
        data = bytearray(zipped(written([torch.zeros(3), torch.ones(3)])))
        first, second = (data.rindex(b"PK\1\2", 0, data.rindex(f"archive/data/{i}".encode())) for i in (0, 1))
        data[second + 42 : second + 46] = data[first + 42 : first + 46]
        archive = self.archive(bytes(data))
        with self.assertRaisesRegex(CheckpointError, "data/1: does not begin where the archive says"):
            archive.materialised(archive.value)

    def test_a_legacy_storage_of_another_size(self) -> None:
        data = bytearray(written([torch.arange(1.0, 4.0)], _use_new_zipfile_serialization=False))
        at = data.rindex(struct.pack("<3f", 1.0, 2.0, 3.0)) - 8
        data[at : at + 8] = struct.pack("<q", 2)
        archive = self.archive(bytes(data))
        with self.assertRaisesRegex(CheckpointError, "has 2 elements in the file, not 3"):
            archive.materialised(archive.value)

    def test_a_value_that_contains_itself_is_named(self) -> None:
        with self.assertRaisesRegex(CheckpointError, r"the value\['a'\]: contains itself"):
            self.archive(with_pickle(b"\x80\2}q\0X\1\0\0\0ah\0s."))

    @parameterized.expand([("text", b"hello"), ("empty", b""), ("pickle", pickle.dumps({"a": 1})), ("zip", b"PK\3\4")])
    def test_other_files(self, _: str, data: bytes) -> None:
        with self.assertRaisesRegex(CheckpointError, r"a\.pt"):
            self.archive(data)

    def test_a_part_outside_of_the_file(self) -> None:
        data = written([1])
        for start, nbytes in ((-1, 5), (0, len(data) + 1), (len(data), 1), (len(data) + 1, None), (3, -1)):
            with self.assertRaisesRegex(CheckpointError, "cut short"):
                self.archive(data, start=start, nbytes=nbytes)


class TestFuzz(ArchiveTestCase):
    """Only CheckpointError or a right value. `FUZZ=100000` tries more."""

    rounds = int(os.environ.get("FUZZ", "120"))

    def small(self) -> dict[str, Any]:
        value = values()
        del value["dtypes"], value["plain"]
        return value

    def expected(self, data: bytes) -> Any:
        return torch.load(io.BytesIO(data))

    def test_truncations(self) -> None:
        for is_zip in (True, False):
            data = written(self.small(), _use_new_zipfile_serialization=is_zip)
            draw = random.Random(1)
            for nbytes in sorted(draw.sample(range(len(data)), min(self.rounds // 4, len(data)))):
                refused = self.assertRaises(CheckpointError, msg=f"the first {nbytes} bytes")
                with closing(self.opened(data[:nbytes])) as opened, refused:
                    read_archive(opened, "a.pt")

    def test_flipped_bits_of_an_archive(self) -> None:
        """Flips in elements are left out: a part of a record has no checksum."""
        data = written(self.small())
        expected = self.expected(data)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            headers = [(i.filename, i.header_offset, i.file_size) for i in archive.infolist()]
        elements: set[int] = set()
        for name, offset, nbytes in headers:
            if "/data/" in name:
                begin = offset + 30 + sum(struct.unpack("<HH", data[offset + 26 : offset + 30]))
                elements |= set(range(begin, begin + nbytes))
        places = [at for at in range(len(data)) if at not in elements]
        draw, refused = random.Random(2), 0
        for at in draw.choices(places, k=self.rounds):
            damaged = bytearray(data)
            damaged[at] ^= 1 << draw.randrange(8)
            try:
                found = self.whole(bytes(damaged))
            except CheckpointError:
                refused += 1
            else:
                same(expected, found)
        self.assertGreater(refused, self.rounds // 20)

    def test_mutated_pickles(self) -> None:
        """With a valid checksum: any value or a CheckpointError, and nothing else."""
        draw, read = random.Random(3), 0
        for data in (written(self.small()), written(self.small(), _use_new_zipfile_serialization=False)):
            is_zip = data[:2] == b"PK"
            pickled = zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl") if is_zip else data
            for _ in range(self.rounds // 2):
                mutant = bytearray(pickled)
                for _ in range(draw.choice((1, 1, 2, 8))):
                    at = draw.randrange(len(mutant))
                    kind = draw.randrange(3)
                    if kind == 0:
                        mutant[at] = draw.randrange(256)
                    elif kind == 1:
                        del mutant[at : at + draw.randrange(1, 20)]
                    else:
                        mutant[at:at] = mutant[draw.randrange(len(mutant)) :][: draw.randrange(1, 40)]
                    mutant = mutant or bytearray(b".")
                try:
                    self.whole(zipped(data, data_pkl=bytes(mutant)) if is_zip else bytes(mutant))
                    read += 1
                except CheckpointError:
                    pass
        self.assertGreater(read, 0)


if __name__ == "__main__":
    unittest.main()
