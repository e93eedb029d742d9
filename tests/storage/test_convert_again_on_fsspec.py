"""A conversion to a file system of fsspec that is killed begins anew: whatever was left, the next one is whole, and alone."""

from __future__ import annotations

import tempfile
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from kit.compare import check_same
from kit.conversions import MEMORY, data_of, save_some
from kit.folders import SharedFolder
from kit.forked import LIBRARY, run
from kit.interrupted import left_over
from kit.options import as_options
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.buckets.fsspec import FsspecBucket
from fsdp_optim.buckets.objects import ObjectStaging, ObjectStore
from fsdp_optim.formats.own import OURS
from fsdp_optim.offline.conversion import convert as conversion
from fsdp_optim.offline.conversion.arguments import ConvertArguments

DEAD_AFTER = 0.1  # seconds

KILLED = """
import os, signal, fsdp_optim
from fsdp_optim.buckets.fsspec import FsspecBucket

real, left = FsspecBucket.put, [{num}]

def put(self, key, *args, **options):
    left[0] -= key.endswith(".safetensors")
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, key, *args, **options)

FsspecBucket.put = put
fsdp_optim.convert({source!r}, {target!r}, options=fsdp_optim.ConvertOptions(bucket_nbytes={memory}, max_file_size=1 << 16))
"""


class Stopped(BaseException):
    """The exception of a user's interrupt."""


class FsspecTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        cls.source, cls.wanted = cls.root / "source", cls.root / "wanted"
        save_some(cls.source, num_layers=2, width=128)
        fsdp_optim.convert(
            cls.source,
            cls.wanted,
            options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, max_file_size=1 << 16, durable=False),
        )

    def check(self, url: str) -> None:
        """The next call writes everything, what comes back is what was converted, and nothing else is there."""
        bucket, prefix = FsspecBucket.at(url)
        place = ObjectStore(bucket, prefix, OURS.probe, dead_after=DEAD_AFTER)
        options: dict[str, Any] = {"bucket_nbytes": MEMORY, "max_file_size": 1 << 16}
        done = conversion.convert(self.source, place, ConvertArguments(**options))
        self.assertEqual(done.nbytes_written, done.nbytes)
        check_same("left", left_over(bucket, prefix, OURS.probe), [])
        with tempfile.TemporaryDirectory() as folder:
            fsdp_optim.convert(
                url, Path(folder) / "back", **as_options(fsdp_optim.ConvertOptions, **options, durable=False)
            )
            check_same("files", data_of(Path(folder) / "back"), data_of(self.wanted))

    @parameterized.expand([("the first file", 0), ("a file", 6)])
    def test_killed(self, _: str, num: int) -> None:
        place = self.root / f"killed-{num}"
        words = {"source": str(self.source), "target": f"file://{place}/to", "memory": MEMORY}
        done = run(KILLED.format(num=num, **words), preload=LIBRARY)
        check_same("killed", (done.returncode, done.stderr[-300:]), (-9, ""))
        self.assertTrue(any(place.rglob("*")))
        time.sleep(2 * DEAD_AFTER)
        self.check(f"file://{place}/to")

    def test_interrupted(self) -> None:
        """In the same process, which leaves nothing."""
        target = "memory://test-convert-again/run/to"
        with mock.patch.object(ObjectStaging, "seal", side_effect=Stopped), self.assertRaises(Stopped):
            fsdp_optim.convert(self.source, target, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY))
        bucket, _ = FsspecBucket.at(target)
        check_same("left", [entry.key for entry in bucket.list("")], [])
        self.check(target)


if __name__ == "__main__":
    unittest.main()
