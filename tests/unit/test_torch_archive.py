"""Files of torch.save are read without their elements: values, ranges and the classes that they name."""

from __future__ import annotations

import argparse
import io
import unittest
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.archives import ArchiveTestCase, same, values, written, zipped
from parameterized import parameterized
from torch._subclasses import FakeTensorMode
from torch.serialization import skip_data

from fsdp_optim.foreign.archive.torch_archive import is_torch_archive, read_archive, read_tensor
from fsdp_optim.formats.base.unread import Unread
from fsdp_optim.plugins import StoredTensor
from fsdp_optim.storage.base import Opened
from fsdp_optim.storage.posix import OpenFiles


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
        loaded = self.whole(bytes(start) + data + other, start=start, nbytes=len(data))
        same(torch.load(io.BytesIO(data)), loaded)

    def test_names_of_sources_differ_between_parts_of_a_file(self) -> None:
        data = zipped(written([torch.arange(3.0)]))
        opened = self.opened(data + data)
        archives = [read_archive(opened, "a.pt", start=start, nbytes=len(data)) for start in (0, len(data))]
        self.assertFalse(set(archives[0].sources) & set(archives[1].sources))

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
            loaded = self.whole(written(value, pickle_protocol=protocol))
            for key in ("array", "fortran", "bools"):
                self.assertEqual(loaded[key].dtype, value[key].dtype)  # type: ignore[attr-defined]
                np.testing.assert_array_equal(loaded[key], value[key])
            self.assertEqual((type(loaded["scalar"]), loaded["scalar"]), (np.float32, 1.5))
            np.testing.assert_array_equal(loaded["state"][1], value["state"][1])

    def test_a_defaultdict_of_a_plain_class(self) -> None:
        loaded = self.whole(written({"state": defaultdict(dict, {0: {"step": torch.tensor(2.0)}})}))
        self.assertIs(loaded["state"].default_factory, dict)
        self.assertEqual(loaded["state"][0]["step"], 2)

    def test_what_occurs_twice_is_one_object(self) -> None:
        shared = [torch.ones(1)]
        loaded = self.whole(written({"a": shared, "b": shared}))
        self.assertIs(loaded["a"], loaded["b"])

    def test_the_digest_is_of_the_pickle(self) -> None:
        for is_zip in (True, False):
            pickled = written({"a": 1}, _use_new_zipfile_serialization=is_zip)
            other = written({"a": 2}, _use_new_zipfile_serialization=is_zip)
            self.assertEqual(self.archive(pickled).digest, self.archive(pickled).digest)
            self.assertNotEqual(self.archive(pickled).digest, self.archive(other).digest)


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
        torch_reader = torch._C.PyTorchFileReader(str(path))
        self.assertFalse(archive.sources)
        starts = [archive.value[name].start for name in numels]
        self.assertEqual(starts, [torch_reader.get_record_offset(f"data/{index}") for index in range(len(numels))])
        self.assertGreater(starts[-1], 1 << 32)

    def test_where_records_begin_is_known_without_a_read(self) -> None:
        """For any length of the names in an archive, which torch pads."""
        for length in range(1, 90):
            path = self.folder / f"{'n' * length}.pt"
            torch.save([torch.zeros(index) for index in range(1, 9)], path)
            with closing(OpenFiles.at(self.folder)) as opened:
                archive = read_archive(opened, path.name)
            torch_reader = torch._C.PyTorchFileReader(str(path))
            self.assertFalse(archive.sources, length)
            starts = [stored.start for stored in archive.value]
            self.assertEqual(starts, [torch_reader.get_record_offset(f"data/{index}") for index in range(8)])

    def test_many_tensors_take_few_reads(self) -> None:
        data = written({str(index): torch.full((3,), float(index)) for index in range(3000)})
        opened = Counted(self.opened(data))
        archive = read_archive(opened, "a.pt")
        self.assertLessEqual(opened.num, 6)
        self.assertFalse(archive.sources)
        same(torch.full((3,), 1234.0), read_tensor(opened, archive.sources, archive.value["1234"]))


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
        value = self.archive(written({"t": tensor})).value["t"]
        self.assertIsInstance(value, Unread)
        self.assertIn("sparse", value.what)

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

        tensors = self.archive(written([OfDevice(torch.float32), OfDevice(torch.float64)])).value
        self.assertEqual((tensors[0].dtype, tensors[0].shape), ("float32", (3,)))
        self.assertIsInstance(tensors[1], Unread)

    def test_stand_ins(self) -> None:
        data = written({"config": Config(torch.ones(2)), "ns": argparse.Namespace(a=1)})
        names = {f"{Config.__module__}.Config": Recorded, "argparse.Namespace": Recorded}
        value = self.archive(data, stand_ins=names).value
        self.assertEqual(value["ns"].state, {"a": 1})
        self.assertIsInstance(value["config"].state["tensor"], StoredTensor)


if __name__ == "__main__":
    unittest.main()
