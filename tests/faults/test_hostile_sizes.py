"""Files that would take many times their size in memory, or end the process: refused by an error that names file and limit."""

from __future__ import annotations

import io
import pickle
import struct
import tempfile
import textwrap
import unittest
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from kit.folders import InFolder
from kit.forked import LIBRARY, run
from parameterized import parameterized
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.foreign.dcp import metadata_pickle as dcp_pickle
from fsdp_optim.foreign.dcp.pickle_operations import Operations

HEAD, MANY = b"\x80\x02", 3_000_000
TEXT = b"X\x30\x00\x00\x00" + b"x" * 48 + b"0"  # bytes that bring no object
SIZE = HEAD + b"ctorch\nSize\nq\x00"

HOSTILE: dict[str, bytes] = {
    "nested tuples": HEAD + b")" + b"\x85" * MANY + b".",
    "nested tuples as a key": HEAD + b"})" + b"\x85" * MANY + b"Ns.",
    "far between": HEAD + b"})" + (TEXT + b"\x85") * (MANY // 16) + b"Ns.",
    "through the memo": HEAD + b"})q\x01" + (b"0h\x01\x85q\x01" + TEXT) * (MANY // 16) + b"Ns.",
    "through shapes": SIZE + b")q\x01" + (b"0h\x00]h\x01a\x85Rq\x01" + TEXT) * (MANY // 16) + b"0}h\x01Ns.",
    "shared tuples": HEAD + b"}N" + b"q\x01h\x01\x86" * 64 + b"Ns.",
    "nested lists": HEAD + b"]" * MANY + b"a" * (MANY - 1) + b".",
    "nested dicts": HEAD + b"}" + b"K\x01}" * MANY + b"s" * MANY + b".",
    "empty dicts": HEAD + b"](" + b"}" * (20 << 20) + b"e.",
    "dicts of one": HEAD + b"](" + b"}K\x01K\x01s" * (3 << 20) + b"e.",
    "objects": HEAD + b"ctorch\nX\nq\x00](" + b"h\x00)\x81" * (5 << 20) + b"e.",
    "zeros": b"\x00" * (20 << 20),
}

LIMITS = {
    "empty dicts": "dicts in its first [0-9]+ bytes, and beyond 65536 at most one in 16 bytes is read",
    "nested tuples as a key": "tuples in its first [0-9]+ bytes, and beyond 65536 at most one in 6 bytes",
    "far between": "a tuple of more than 4096 values, with those of the tuples inside",
}
"""What the errors of some of them say about the limit."""


def peak_of(code: str, *arguments: object, most_nbytes: int) -> str:
    """What a process of its own prints, whose memory may grow by so many bytes after the imports."""
    program = f"""
        import resource, sys
        import fsdp_optim.api  # with torch, before memory is scarce
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + {most_nbytes}, now + {most_nbytes}))
    """
    words = f"sys.argv[1:] = {[str(word) for word in arguments]!r}\n"
    done = run(textwrap.dedent(program) + words + textwrap.dedent(code), timeout=300, preload=LIBRARY)
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


INSPECT = """
    try:
        fsdp_optim.inspect(sys.argv[1])
    except fsdp_optim.CheckpointError as error:
        print(error)
"""


class MetadataTest(InFolder):
    @parameterized.expand([(name,) for name in HOSTILE])
    def test_refused_in_little_memory(self, name: str) -> None:
        """In a process of its own, which must not end by a signal, and has a fraction of what the objects would take."""
        (self.root / ".metadata").write_bytes(HOSTILE[name])
        said = peak_of(INSPECT, self.root, most_nbytes=400 << 20)
        self.assertIn(f"{self.root}/.metadata: is not written as it should be", said)
        self.assertRegex(said, LIMITS.get(name, "metadata"))

    def test_the_rest_of_a_damaged_file_is_not_read(self) -> None:
        """A file as large as the largest metadata is refused by its first bytes; a larger one by its size."""
        with open(self.root / ".metadata", "wb") as file:
            file.truncate((1 << 31) - 1)
        self.assertIn("at byte 0 is not known", peak_of(INSPECT, self.root, most_nbytes=400 << 20))
        with open(self.root / ".metadata", "wb") as file:
            file.truncate((1 << 31) + 1)
        with self.assertRaisesRegex(
            CheckpointError, r"\.metadata: has 2147483649 bytes, and at most 2147483648 are allowed"
        ):
            fsdp_optim.inspect(self.root)

    @parameterized.expand([(1, 3000, 2), (1, 3000, 4), (64, 100, 4), (2000, 4, 2), (2000, 4, 5), (3, 1, 4)])
    def test_real_metadata_is_read(self, num_chunks: int, num_tensors: int, protocol: int) -> None:
        """Of many tensors, and of many ranks; in pieces of any length, with the same result."""
        data = pickle.dumps(metadata(num_tensors, num_chunks), protocol)
        for length in (len(data), 100_003, 1009):
            parsed = dcp_pickle.load("here", (data[at : at + length] for at in range(0, len(data), length)))
            self.assertEqual(len(parsed.storage_data), num_tensors * num_chunks)
            (last,) = [parsed.state_dict_metadata[f"model.layer.{num_tensors - 1}.weight"]]
            self.assertEqual([chunk.offsets for chunk in last.chunks], [(64 * n, 0) for n in range(num_chunks)])
            self.assertEqual(parsed.planner_data["model.layer.0.weight"], ("model", "model.layer.0.weight"))

    def test_every_cut_into_pieces(self) -> None:
        for protocol in (2, 3, 4, 5):
            data = pickle.dumps(metadata(3, 2), protocol)
            whole = b"".join(Operations().checked([data]))
            for length in range(1, 40):
                pieces = [data[at : at + length] for at in range(0, len(data), length)]
                self.assertEqual(b"".join(Operations().checked(pieces)), whole, length)
            for end in range(0, len(data) - 1, 7):
                with self.assertRaisesRegex(ValueError, "cut short"):
                    b"".join(Operations().checked([data[:end]]))


def metadata(num_tensors: int, num_chunks: int) -> Metadata:
    """As torch's writers make it."""
    tensors: dict[str, Any] = {}
    stored: dict[MetadataIndex, Any] = {}
    for number in range(num_tensors):
        name = f"model.layer.{number}.weight"
        chunks = [ChunkStorageMetadata(torch.Size([64 * n, 0]), torch.Size([64, 4096])) for n in range(num_chunks)]
        size = torch.Size([64 * num_chunks, 4096])
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, chunks)
        for n, chunk in enumerate(chunks):
            stored[MetadataIndex(name, chunk.offsets, n)] = _StorageInfo(f"__{n}_0.distcp", number << 20, 1 << 20)
    return Metadata(tensors, {name: ("model", name) for name in tensors}, stored)


def deflated(tree: Any, level: int = 9) -> bytes:
    """A file of torch.save whose records somebody has compressed."""
    plain = io.BytesIO()
    torch.save(tree, plain)
    made = io.BytesIO()
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return made.getvalue()


class InflatedTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "a.pt"

    def test_few_elements_of_a_large_storage(self) -> None:
        """368 elements of 313 MiB, in less than half a megabyte."""
        large = torch.zeros(82_000_000)
        self.path.write_bytes(deflated({"model": {"weight": large[:368]}}))
        self.assertLess(self.path.stat().st_size, 500_000)
        code = """
            try:
                options = fsdp_optim.ConvertOptions(durable=False, progress=False)
                fsdp_optim.convert(sys.argv[1], sys.argv[1] + "-to", options=options)
            except fsdp_optim.CheckpointError as error:
                print(error)
        """
        said = peak_of(code, self.path, most_nbytes=300 << 20)
        self.assertIn(f"{self.path}: the record ", said)
        self.assertIn(
            "is compressed and has 328000000 bytes, and at most 1051520 are read for tensors with 1472 bytes", said
        )

    def test_a_pickle_that_inflates(self) -> None:
        self.path.write_bytes(deflated({"model": {"weight": torch.ones(2)}, "text": "x" * (200 << 20)}))
        with self.assertRaisesRegex(
            CheckpointError, r"data\.pkl is compressed and has 2\d+ bytes, and at most \d+ are read for its"
        ):
            fsdp_optim.inspect(self.path)

    def test_what_is_used_is_read(self) -> None:
        """Tensors of zeros compress a thousand times, and are what the model has; so are halves of one storage."""
        both = torch.arange(1 << 20, dtype=torch.float32)
        weights = {"zeros": torch.zeros(1 << 22), "a": both[: 1 << 19], "b": both[1 << 19 :]}
        self.path.write_bytes(deflated({"model": weights}))
        target = self.path.with_name("to")
        fsdp_optim.convert(
            self.path,
            target,
            options=fsdp_optim.ConvertOptions(durable=False, progress=False),
        )
        tensors = load_file(target / "model.safetensors")
        for name, value in weights.items():
            self.assertTrue(torch.equal(tensors[name], value), name)

    def test_a_size_in_the_directory_that_is_a_lie(self) -> None:
        data = bytearray(deflated({"model": {"weight": torch.zeros(1 << 16)}}))
        directory = data.rindex(b"PK\1\2", 0, data.rindex(b"data/0"))
        data[directory + 24 : directory + 28] = struct.pack("<I", 1 << 18)
        data[directory + 20 : directory + 24] = struct.pack("<I", 9)
        self.path.write_bytes(data)
        with self.assertRaises(CheckpointError):
            fsdp_optim.convert(
                self.path,
                self.path.with_name("to"),
                options=fsdp_optim.ConvertOptions(durable=False, progress=False),
            )


class SavedAfterTest(unittest.TestCase):
    def test_torchs_own_folder_is_read(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"{root}/dcp")
            other = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
            fsdp_optim.load(f"{root}/dcp", other)
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                self.assertTrue(torch.equal(a, b))
