"""Nothing in a file of torch.save runs: hostile and broken files are refused by name."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import unittest
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.archives import ArchiveTestCase, same, values, written, zipped
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.foreign.archive.torch_archive import Unread, read_archive
from fsdp_optim.plugins import StoredTensor


def with_pickle(pickled: bytes, num: int = 2, numel: int = 4) -> bytes:
    """An archive with any pickle, and `num` storages of `numel` float32."""
    data = written([torch.arange(numel * (index + 1.0))[-numel:].clone() for index in range(num)])
    return zipped(data, data_pkl=pickled)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = call, arguments

    def __reduce__(self) -> Any:
        return self.reduced


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
        ordered = self.archive(with_pickle(pickled)).value
        self.assertEqual(vars(ordered), {"_metadata": {}})
        self.assertEqual(list(ordered.items()), [])

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
                loaded = self.whole(bytes(damaged))
            except CheckpointError:
                refused += 1
            else:
                same(expected, loaded)
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
