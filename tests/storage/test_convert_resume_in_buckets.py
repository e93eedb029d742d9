"""A conversion into a bucket that is killed goes on where it stopped: parts that the bucket has are not put again."""

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
from kit.interrupted import InterruptedBucket, left_over
from kit.proxy import Proxy
from kit.scripts import run
from kit.servers import Options as ServerOptions
from kit.servers import Server, new_bucket, port_of, shared
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.buckets.objects.memory import Memory, MemoryBucket
from fsdp_optim.buckets.objects.store import ObjectStore
from fsdp_optim.buckets.s3.bucket import S3Bucket
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.offline import convert as conversion
from fsdp_optim.offline.arguments import ConvertArguments
from fsdp_optim.testing import run_on_ranks

PART = 4 << 10
DEAD_AFTER = 0.05  # seconds; a conversion goes on when the claim of the killed one is older than two fifths of it

KILLED = """
import os, signal, fsdp_optim
from fsdp_optim.buckets import uploads
from fsdp_optim.buckets.s3.bucket import S3Bucket

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
    wanted = {"memory": MEMORY, "max_file_size": 64 << 10, **options}
    return conversion.convert(source, place, ConvertArguments(**wanted)).nbytes_written


def content_of(bucket: MemoryBucket) -> dict[str, bytes]:
    """The files of the checkpoint, but the manifest, which has the time and the token of its save."""
    with ObjectStore(bucket, "run/to", OURS.probe, part_nbytes=PART).open() as opened:
        names = OURS.probe.status_in(opened, whole=True).summary.files
        return {name: opened.read_whole(name) for name in sorted(names)}


class InMemoryTest(SharedFolder):
    """Each of the requests of a conversion is the last one of a process; the next process goes on."""

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
        time.sleep(DEAD_AFTER)
        return memory

    def check(self, nth: int) -> int:
        """The bytes that are put after a kill before the nth request."""
        bucket = CountingBucket(self.killed(nth))
        converted(self.source, bucket)
        check_same("files", content_of(bucket), self.wanted)
        check_same("left", left_over(bucket, "run/", OURS.probe), [])
        return bucket.nbytes_put

    def place_of(self, what: str, nth: int = 0) -> int:
        return [number for number, call in enumerate(self.calls) if call.startswith(what)][nth]

    @parameterized.expand([("first", 0.0), ("middle", 0.5), ("last", 1.0)])
    def test_parts_that_are_there_are_not_put_again(self, _: str, share: float) -> None:
        parts = [number for number, call in enumerate(self.calls) if call.startswith("put_part")]
        done = round(share * (len(parts) - 1))
        self.assertGreater(len(parts), 30)
        left = self.nbytes_put - self.check(parts[done])
        self.assertGreaterEqual(left, (done - 8) * PART)  # its note may be missing, and last parts are shorter
        self.assertLessEqual(left, (done + 4) * PART)

    def test_around_the_parts(self) -> None:
        """Before the first part everything is put; when all files are complete, nothing is."""
        self.assertEqual(self.check(self.place_of("begin_upload")), self.nbytes_put)
        self.assertEqual(self.check(self.place_of("put run/to/fsdp_optim.json")), 0)
        for nth in (0, 1, -1):  # in the middle of the completion of the files
            self.assertEqual(self.check(self.place_of("end_upload", nth)), 0, nth)

    def test_a_file_that_is_complete_and_not_noted_begins_anew(self) -> None:
        """Its upload is gone, and nothing shows that the object is what it became."""
        nth = self.place_of("end_upload") + 1
        self.assertIn("sealed-", self.calls[nth])
        self.assertEqual(self.check(nth), self.nbytes_put)

    def test_before_any_request(self) -> None:
        """A sample of all requests: the new checkpoint is whole, and nothing is left beside it."""
        for nth in range(0, self.place_of("put run/to/fsdp_optim.json"), 9):
            with self.subTest(nth, before=self.calls[nth]):
                self.check(nth)

    def test_again_and_again(self) -> None:
        """Each process makes a third of the requests that one needs, and its first ones find what is there."""
        memory, nbytes = Memory(), 0
        for _ in range(3):
            with self.assertRaises(OSError):  # Killed, or the CheckpointError that it caused
                converted(self.source, InterruptedBucket(memory, len(self.calls) // 3, kills=True))
            time.sleep(DEAD_AFTER)
        bucket = CountingBucket(memory)
        converted(self.source, bucket)
        nbytes = bucket.nbytes_put
        self.assertLess(nbytes, self.nbytes_put * 3 // 4)
        check_same("files", content_of(bucket), self.wanted)

    def test_what_has_changed_begins_anew(self) -> None:
        nth = self.place_of("put_part", -1)
        save_some(self.root / "changed", num_layers=3, width=64, seed=1)
        for change in ({"source": self.root / "changed"}, {"max_file_size": 1 << 20}):
            memory = self.killed(nth)
            bucket = CountingBucket(memory)
            self.assertEqual(converted(**{"source": self.source, "bucket": bucket, **change}), self.nbytes)
            self.assertGreaterEqual(bucket.nbytes_put, self.nbytes)
            check_same("left", left_over(bucket, "run/", OURS.probe), [])

    def test_a_note_that_is_gone_or_an_object_of_somebody_else(self) -> None:
        """Parts without a note are put again; a small file that was written again by somebody is not taken for ours."""
        memory = self.killed(self.place_of("end_upload"))
        notes = [key for key, *_ in memory.listed("run/to/.saving-") if "/parts-" in key]
        memory.delete(notes[:1])
        bucket = CountingBucket(memory)
        converted(self.source, bucket)
        self.assertGreater(bucket.nbytes_put, 0)
        self.assertLess(bucket.nbytes_put, self.nbytes_put // 2)
        check_same("files", content_of(bucket), self.wanted)

    def test_an_interrupt_leaves_it_for_the_next_call(self) -> None:
        """At once, in the same process, and an error leaves nothing."""
        for error in (Stopped(), OSError(28, "No space left")):
            bucket = CountingBucket()
            with (
                mock.patch("fsdp_optim.buckets.objects.staging.ObjectStaging.seal", side_effect=error),
                self.assertRaises((Stopped, CheckpointError, OSError)),
            ):
                converted(self.source, bucket, dead_after=300)
            bucket.nbytes_put = 0
            is_left = isinstance(error, Stopped)
            self.assertEqual(any(bucket.list("run/to/")), is_left)
            self.assertEqual(converted(self.source, bucket, dead_after=300), 0 if is_left else self.nbytes)
            self.assertEqual(bucket.nbytes_put, 0 if is_left else self.nbytes_put)
            check_same("files", content_of(bucket), self.wanted)
            check_same("left", left_over(bucket, "run/", OURS.probe), [])

    def test_one_under_way_is_left_alone(self) -> None:
        """The second one to the same place begins by itself, and the one that is done first wins."""
        bucket, begun = CountingBucket(), list[int]()
        from fsdp_optim.buckets.objects.staging import ObjectStaging

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


def resumed_by_ranks(source: Path, target: str, options: ServerOptions) -> int:
    return fsdp_optim.convert(
        source, target, options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, storage_options=options)
    ).nbytes_written


class OnServersTest(unittest.TestCase):
    """Processes that are killed by a signal; what the next one sends is counted on its way to the server."""

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
        words = {"source": str(self.source), "target": target, "memory": MEMORY, "options": options}
        done = run(KILLED.format(num=num, **words), preload=("torch", "fsdp_optim"))
        check_same("killed", (done.returncode, done.stderr[-300:]), (-9, ""))
        return target, options

    def check(self, target: str, options: ServerOptions) -> None:
        with tempfile.TemporaryDirectory() as folder:
            fsdp_optim.convert(
                target,
                Path(folder) / "back",
                options=fsdp_optim.ConvertOptions(durable=False, storage_options=options, bucket_nbytes=MEMORY),
            )
            check_same("files", data_of(Path(folder) / "back"), data_of(self.wanted))

    @expand(soon=[("rclone", 14)], later=[("moto", 14), ("moto", 1), ("moto", 24)])
    def test_only_the_rest_is_put(self, kind: Server, num: int) -> None:
        target, options = self.killed(kind, num)
        with Proxy(port_of(options)) as proxy:
            done = fsdp_optim.convert(
                self.source,
                target,
                options=fsdp_optim.ConvertOptions(bucket_nbytes=MEMORY, storage_options=proxy.options(options)),
            )
            sent = sum(nbytes for key, nbytes in proxy.by_key("PUT").items() if key.endswith(".safetensors"))
        self.check(target, options)
        self.assertEqual(done.nbytes, self.nbytes)
        in_flight = 6 * (16 << 10)  # one that was done and not noted, and shorter last parts of two files
        rest = self.nbytes - num * (16 << 10)
        self.assertLess(sent, rest + in_flight)
        self.assertLess(done.nbytes_written, rest + in_flight)
        if num > 10:
            self.assertLess(done.nbytes_written, self.nbytes)

    def test_two_ranks_go_on_where_one_process_was_killed(self) -> None:
        target, options = self.killed("moto", 20)
        written = run_on_ranks(resumed_by_ranks, 2, self.source, target, options)
        self.assertLess(sum(written), self.nbytes - 8 * (16 << 10))
        self.check(target, options)
