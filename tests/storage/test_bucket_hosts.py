"""Saves into a bucket, and conversions, by processes on several machines: what one of them may think of another."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import time
import unittest
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

from kit.conversions import save_some
from kit.forked import BUCKETS, start
from kit.servers import free_port
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.buckets.fsspec import FsspecBucket
from fsdp_optim.buckets.fsspec import bucket as filesystem
from fsdp_optim.buckets.objects import Bucket, ObjectStaging, ObjectStore
from fsdp_optim.buckets.s3 import bucket as s3
from fsdp_optim.testing.store_case import MANIFEST, AnyManifest

DEAD_AFTER = 300.0  # seconds: no beat of a thread comes while a test runs
HERE, BESIDE, LAST = "run/step-1", "run/step-2", "run/step-3"
NAME = "model.safetensors"

_numbers = itertools.count()


@contextlib.contextmanager
def clock_of_machine(ahead: float) -> Iterator[None]:
    """Inside, this process is on a machine whose clock is some seconds ahead of that of the store."""
    real = time.time
    with mock.patch.object(time, "time", side_effect=lambda: real() + ahead):
        yield


@contextlib.contextmanager
def later(seconds: float) -> Iterator[None]:
    """Inside, some seconds have passed for this process; the store's clock, and the beats of saves, do not know of them."""
    real = time.monotonic
    watch = mock.Mock(monotonic=lambda: real() + seconds)
    with mock.patch("fsdp_optim.buckets.objects.watched.time", watch):
        yield


def begun(bucket: Bucket, prefix: str, *, overwrite: bool = False) -> ObjectStaging:
    store = ObjectStore(bucket, prefix, AnyManifest(), dead_after=DEAD_AFTER)
    return store.begin(overwrite=overwrite, durable=False)


def filled(staging: ObjectStaging, bucket: Bucket, prefix: str) -> None:
    store = ObjectStore(bucket, prefix, AnyManifest(), dead_after=DEAD_AFTER)
    store.join(staging.address, durable=False, who="rank 0").put(NAME, staging.token.encode())


def committed(staging: ObjectStaging) -> None:
    staging.commit(MANIFEST, b"one\n" + staging.token.encode(), durable=False)


def killed(staging: ObjectStaging) -> None:
    """Its process gives no sign of life any more."""
    staging._claim.stop()


class SavesTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.number = next(_numbers)

    def bucket(self, kind: str = "file") -> FsspecBucket:
        """The bucket, as a process opens it that has not asked it for anything."""
        place = {"file": f"file://{self.folder}/bucket", "memory": f"memory://hosts-{self.number}/bucket"}[kind]
        return FsspecBucket.at(f"{place}/run")[0]

    def content(self, bucket: Bucket, prefix: str) -> bytes:
        with ObjectStore(bucket, prefix, AnyManifest()).open() as opened:
            return opened.read_whole(NAME)

    def age(self, staging: ObjectStaging, seconds: float) -> None:
        """Let all objects of a save on disk be older, by the clock of the store."""
        for path in self.folder.rglob("*"):
            if path.is_file() and (staging.token in str(path) or path.name == NAME):
                then = path.stat().st_mtime - seconds
                os.utime(path, (then, then))

    @parameterized.expand(itertools.product(("file", "memory"), (BESIDE, HERE), (400.0, 90_000.0)))
    def test_a_machine_whose_clock_is_ahead_leaves_a_live_save_alone(self, kind: str, then: str, ahead: float) -> None:
        bucket = self.bucket(kind)
        first = begun(bucket, HERE)
        filled(first, bucket, HERE)
        with clock_of_machine(ahead):
            other = self.bucket(kind)
            second = begun(other, then)
            filled(second, other, then)
        committed(first)
        self.assertEqual(self.content(bucket, HERE), first.token.encode())
        if then == HERE:
            with self.assertRaisesRegex(CheckpointError, "another save to this path was faster"):
                committed(second)
            second.abandon()
        else:
            committed(second)

    @parameterized.expand(itertools.product((BESIDE, HERE), (-90_000.0, -400.0, 0.0, 400.0)))
    def test_the_next_save_removes_what_is_old_by_the_clock_of_the_store(self, then: str, ahead: float) -> None:
        dead = begun(self.bucket(), HERE)
        filled(dead, self.bucket(), HERE)
        killed(dead)
        self.age(dead, DEAD_AFTER + 60)
        with clock_of_machine(ahead):
            bucket = self.bucket()
            staging = begun(bucket, then)
            filled(staging, bucket, then)
            committed(staging)
        left = [entry.key for entry in bucket.list("") if dead.token in entry.key or not entry.key.startswith(then)]
        self.assertEqual(left, [])
        self.assertEqual([entry.key for entry in bucket.list(f"{then}/.saving-")], [])
        self.assertEqual(self.content(bucket, then), staging.token.encode())

    def test_a_save_that_is_not_old_by_the_clock_of_the_store_stays(self) -> None:
        slow = begun(self.bucket(), HERE)
        filled(slow, self.bucket(), HERE)
        self.age(slow, DEAD_AFTER - 60)
        committed(begun(self.bucket(), BESIDE))
        committed(slow)
        self.assertEqual(self.content(self.bucket(), HERE), slow.token.encode())

    def without_times(self) -> None:
        """From now on the store does not say when an object was written."""
        patch = mock.patch.object(filesystem, "time_of", return_value=None)
        patch.start()
        self.addCleanup(patch.stop)

    def saved(self, number: int) -> None:
        staging = begun(self.bucket("memory"), f"run/other-{number}")
        filled(staging, self.bucket("memory"), f"run/other-{number}")
        committed(staging)

    def keys(self, staging: ObjectStaging) -> list[str]:
        return [entry.key for entry in self.bucket("memory").list("") if staging.token in entry.key]

    def test_a_claim_that_does_not_change_while_this_process_watches_is_dead(self) -> None:
        """Where the store tells no times. A claim that changes is alive, whenever it is looked at."""
        self.without_times()
        dead, live = begun(self.bucket("memory"), HERE), begun(self.bucket("memory"), BESIDE)
        filled(live, self.bucket("memory"), BESIDE)
        killed(dead)
        self.saved(1)
        self.assertTrue(self.keys(dead))
        with later(DEAD_AFTER - 60):
            live._claim.beat()
            self.saved(2)
        self.assertTrue(self.keys(dead))
        with later(DEAD_AFTER + 60):
            self.saved(3)
        self.assertEqual(self.keys(dead), [])
        with later(2 * DEAD_AFTER - 30):
            live._claim.beat()
            self.saved(4)
        committed(live)
        self.assertEqual(self.content(self.bucket("memory"), BESIDE), live.token.encode())

    def test_a_claim_of_an_older_version_may_stay_the_same(self) -> None:
        """Its beats write the same bytes, so that only its age by the clock of the store counts."""
        self.without_times()
        live = begun(self.bucket("memory"), HERE)
        filled(live, self.bucket("memory"), HERE)
        content = json.dumps({"token": live.token, "owner": "unknown"}).encode()
        self.bucket("memory").put(live._place.claim(live.token), content)
        self.saved(1)
        with later(10 * DEAD_AFTER):
            self.saved(2)
        committed(live)

    def test_an_upload_of_this_process_is_not_old_when_its_clock_is_set(self) -> None:
        bucket = self.bucket()
        bucket.begin_upload(f"{HERE}/{NAME}")
        with clock_of_machine(90_000.0):
            (upload,) = bucket.uploads(HERE)
        self.assertLess(upload.age, 600)


class AgesTest(unittest.TestCase):
    def test_an_answer_of_s3_without_a_date_tells_no_age(self) -> None:
        """Else the clock of this machine would tell it."""
        written = datetime(2020, 1, 1, tzinfo=timezone.utc)
        dated = {"date": "Wed, 01 Jan 2020 00:06:00 GMT"}
        for headers, wanted in ((dated, 360.0), ({}, 0.0)):
            answer: dict[str, Any] = {"ResponseMetadata": {"HTTPHeaders": headers}}
            self.assertEqual(s3._age(answer, written), wanted)


class CommandLineTest(unittest.TestCase):
    @parameterized.expand([("names", "names.txt"), ("units", "units.json")])
    def test_a_file_that_one_machine_lacks_is_an_error_on_all(self, option: str, name: str) -> None:
        """Each process reads a path that leads to its own machine's folder."""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            save_some(root / "source")
            (root / "machine-0").mkdir()
            (root / "machine-0" / name).write_text("{}")
            port, ranks = free_port(), []
            for rank in range(2):
                words = ["convert", f"{root}/source", f"file://{root}/to", "--format", "fairscale_shards"]
                words += ["--world-size", "2", f"--{option}", f"{root}/machine-{rank}/{name}"]
                code = f"import sys; sys.argv[1:] = {words!r}\n"
                code += "import runpy; runpy.run_module('fsdp_optim', run_name='__main__', alter_sys=True)"
                given = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environment = {**os.environ, **{key: str(value) for key, value in given.items()}}
                ranks.append(start(code, preload=BUCKETS, environment=environment))
            first, second = (started.wait() for started in ranks)
            self.assertEqual((first.returncode, second.returncode), (1, 1), first.stderr + second.stderr)
            for word in ("rank 1", f"machine-1/{name}: the file of {option} cannot be read"):
                self.assertIn(word, first.stderr)
            self.assertEqual((first.stdout, second.stdout, second.stderr), ("", "", ""))
            self.assertEqual(list(root.glob("to*")), [])


if __name__ == "__main__":
    unittest.main()
