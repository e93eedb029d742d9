"""A conversion into a bucket that is killed leaves no half checkpoint; the next one is whole, and removes what was left."""

from __future__ import annotations

import re
import tempfile
import time
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from kit.cases import expand
from kit.compare import check_same
from kit.conversions import MEMORY, data_of, save_some
from kit.folders import SharedFolder
from kit.forked import BUCKETS, run
from kit.interrupted import InterruptedBucket, left_over
from kit.servers import Options as ServerOptions
from kit.servers import Server, new_bucket, shared
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import Memory, MemoryBucket, ObjectStore
from fsdp_optim.buckets.s3 import S3Bucket
from fsdp_optim.formats.own import OURS
from fsdp_optim.offline.conversion import convert as conversion
from fsdp_optim.offline.conversion.arguments import ConvertArguments
from fsdp_optim.testing import run_on_ranks

PART = 4 << 10
DEAD_AFTER, SECONDS = 0.05, 1.5  # seconds after which a save is dead, in memory and on a server

KILLED = """
import os, signal, fsdp_optim
from fsdp_optim.buckets.objects import uploads
from fsdp_optim.buckets.s3 import S3Bucket

uploads._MOST_AT_ONCE = 1
real, left = S3Bucket.put_part, [{num}]

def put_part(self, key, upload, number, data):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, key, upload, number, data)

S3Bucket.put_part = put_part
fsdp_optim.convert({source!r}, {target!r}, options=fsdp_optim.ConvertOptions(bucket_nbytes={memory}, storage_options={options}))
"""


class CountingBucket(MemoryBucket):
    """The bytes that were put in parts, or in whole files of tensors."""

    nbytes_put = 0

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        self.nbytes_put += len(data)
        return super().put_part(key, upload, number, data)

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> str:
        self.nbytes_put += (
            len(data) if key.endswith(".safetensors") and not {"extra", ".saving"} & {*re.split("[/-]", key)} else 0
        )
        return super().put(key, data, only_if=only_if)


class Stopped(BaseException):
    """The exception of a user's interrupt."""


def converted(source: Path, bucket: MemoryBucket, *, dead_after: float = DEAD_AFTER, **options: Any) -> int:
    place = ObjectStore(bucket, "run/to", OURS.probe, part_nbytes=PART, dead_after=dead_after)
    wanted = {"bucket_nbytes": MEMORY, "max_file_size": 64 << 10, **options}
    return conversion.convert(source, place, ConvertArguments(**wanted)).nbytes_written


def content_of(bucket: MemoryBucket) -> dict[str, bytes]:
    """The files of the checkpoint, but the manifest, which has the time and the token of its save."""
    with ObjectStore(bucket, "run/to", OURS.probe, part_nbytes=PART).open() as opened:
        names = OURS.probe.status_in(opened, whole=True).summary.files
        return {name: opened.read_whole(name) for name in sorted(names)}


class InMemoryTest(SharedFolder):
    """Each of the requests of a conversion is the last one of a process; the next process begins again."""

    source: Path
    wanted: dict[str, bytes]

    @classmethod
    def fill(cls) -> None:
        cls.source = cls.root / "source"
        save_some(cls.source, num_layers=3, width=64)
        bucket = CountingBucket()
        cls.nbytes = converted(cls.source, bucket)
        cls.wanted, cls.nbytes_put = content_of(bucket), bucket.nbytes_put
        one_at_once = mock.patch("fsdp_optim.buckets.objects.uploads._MOST_AT_ONCE", 1)
        one_at_once.start()
        cls.addClassCleanup(one_at_once.stop)
        counted = InterruptedBucket(Memory())
        converted(cls.source, counted, dead_after=300)  # no sign of life is due, so all runs make the same requests
        cls.calls = counted.calls

    def killed(self, nth: int) -> Memory:
        """The objects of a bucket after a process that was killed before its nth request."""
        memory = Memory()
        with self.assertRaises(OSError):  # Killed, or the CheckpointError that it caused
            converted(self.source, InterruptedBucket(memory, nth, kills=True), dead_after=300)
        time.sleep(2 * DEAD_AFTER)
        return memory

    def check(self, nth: int) -> None:
        """After a kill before the nth request there is no checkpoint, and the next process puts everything."""
        bucket = CountingBucket(self.killed(nth))
        with self.assertRaises(CheckpointError):
            content_of(bucket)
        converted(self.source, bucket)
        check_same("put", bucket.nbytes_put, self.nbytes_put)
        check_same("files", content_of(bucket), self.wanted)
        check_same("left", left_over(bucket, "run/", OURS.probe), [])

    def place_of(self, what: str, nth: int = 0) -> int:
        return [number for number, call in enumerate(self.calls) if call.startswith(what)][nth]

    @parameterized.expand(
        [("begin_upload", 0), ("put_part", 5), ("end_upload", 0), ("end_upload", -1), ("put run/to/fsdp_optim.json", 0)]
    )
    def test_around_the_parts(self, what: str, nth: int) -> None:
        self.check(self.place_of(what, nth))

    def test_before_any_request(self) -> None:
        """A sample of all requests: the new checkpoint is whole, and nothing is left beside it."""
        for nth in range(0, self.place_of("put run/to/fsdp_optim.json"), 9):
            with self.subTest(nth, before=self.calls[nth]):
                self.check(nth)

    def test_again_and_again(self) -> None:
        memory = Memory()
        for _ in range(3):
            with self.assertRaises(OSError):  # Killed, or the CheckpointError that it caused
                converted(self.source, InterruptedBucket(memory, len(self.calls) // 3, kills=True))
            time.sleep(2 * DEAD_AFTER)
        bucket = CountingBucket(memory)
        converted(self.source, bucket)
        check_same("files", content_of(bucket), self.wanted)
        check_same("left", left_over(bucket, "run/", OURS.probe), [])

    def test_neither_an_interrupt_nor_an_error_leaves_anything(self) -> None:
        for error in (Stopped(), OSError(28, "No space left")):
            bucket = CountingBucket()
            with (
                mock.patch("fsdp_optim.buckets.objects.staging.ObjectStaging.seal", side_effect=error),
                self.assertRaises((Stopped, CheckpointError, OSError)),
            ):
                converted(self.source, bucket, dead_after=300)
            check_same("left", [entry.key for entry in bucket.list("run/to/")], [])
            self.assertEqual(converted(self.source, bucket, dead_after=300), self.nbytes)
            check_same("files", content_of(bucket), self.wanted)
            check_same("left", left_over(bucket, "run/", OURS.probe), [])

    def test_one_under_way_is_left_alone(self) -> None:
        """The second one to the same place begins by itself, and the one that is done first wins."""
        bucket, begun = CountingBucket(), list[int]()
        from fsdp_optim.buckets.objects import ObjectStaging

        real = ObjectStaging.seal

        def seal(staging: ObjectStaging, names: Sequence[str], receipts: Sequence[bytes], *, durable: bool) -> None:
            if not begun:
                begun.append(0)
                begun.append(converted(self.source, bucket, dead_after=300))
            real(staging, names, receipts, durable=durable)

        with mock.patch.object(ObjectStaging, "seal", seal), self.assertRaisesRegex(CheckpointError, "was faster"):
            converted(self.source, bucket, dead_after=300)
        self.assertEqual(begun[1], self.nbytes)
        check_same("files", content_of(bucket), self.wanted)


def converted_by_ranks(source: Path, target: str, options: ServerOptions) -> int:
    return fsdp_optim.convert(
        source, target, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, storage_options=options)
    ).nbytes_written


class OnServersTest(unittest.TestCase):
    """Processes that are killed by a signal."""

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.source, cls.wanted = Path(folder.name) / "source", Path(folder.name) / "wanted"
        save_some(cls.source, num_layers=2, width=128)
        cls.nbytes = fsdp_optim.convert(
            cls.source, cls.wanted, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, durable=False)
        ).nbytes

    def killed(self, kind: Server, num: int) -> tuple[str, ServerOptions]:
        """Convert in a process that is killed when it puts part `num`; the place and its options."""
        options = {**shared(kind), "part_nbytes": 16 << 10}
        target = f"{S3Bucket(new_bucket(options), options).name}/run/to"
        options |= {"dead_after": SECONDS}
        words = {"source": str(self.source), "target": target, "memory": MEMORY, "options": options}
        done = run(KILLED.format(num=num, **words), preload=BUCKETS)
        check_same("killed", (done.returncode, done.stderr[-300:]), (-9, ""))
        time.sleep(1.2 * SECONDS + 1)  # the clock of the store counts whole seconds
        return target, options

    def check(self, target: str, options: ServerOptions) -> None:
        with tempfile.TemporaryDirectory() as folder:
            fsdp_optim.convert(
                target,
                Path(folder) / "back",
                options=fsdp_optim.ConvertOptions(durable=False, storage_options=options, bucket_nbytes=MEMORY),
            )
            check_same("files", data_of(Path(folder) / "back"), data_of(self.wanted))
        name, prefix = target.removeprefix("s3://").split("/", 1)
        check_same(
            "left",
            left_over(
                S3Bucket(name, {key: options[key] for key in options.keys() - {"dead_after"}}), f"{prefix}/", OURS.probe
            ),
            [],
        )

    @expand(soon=[("rclone", 14)], later=[("moto", 14), ("moto", 1), ("moto", 24)])
    def test_the_next_one_is_whole(self, kind: Server, num: int) -> None:
        target, options = self.killed(kind, num)
        self.assertIsNone(fsdp_optim.latest(target.rpartition("/")[0], storage_options=options))
        done = fsdp_optim.convert(
            self.source, target, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, storage_options=options)
        )
        check_same("written", (done.nbytes, done.nbytes_written), (self.nbytes, self.nbytes))
        self.check(target, options)

    def test_two_ranks_after_one_process_was_killed(self) -> None:
        target, options = self.killed("moto", 20)
        written = run_on_ranks(converted_by_ranks, 2, self.source, target, options)
        self.assertEqual(sum(written), self.nbytes)
        self.check(target, options)
