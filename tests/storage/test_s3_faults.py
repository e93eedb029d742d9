"""Faults between a client and an S3 store: the data is right in the end, or one error comes within the stated time."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
import unittest
from collections.abc import Iterator
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kit.proxy import Fault, Proxy
from kit.servers import PART_NBYTES, Options, new_bucket, port_of, shared
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import ABSENT, OvertakenError
from fsdp_optim.buckets.s3 import S3Bucket, client
from fsdp_optim.storage.base import is_sure_that_not

DATA = random.Random(1).randbytes(5 * PART_NBYTES // 2)
SLACK = 25  # seconds, for a busy machine


def setUpModule() -> None:
    global OPTIONS
    OPTIONS = shared("moto")


OPTIONS: Options


@contextlib.contextmanager
def through(*script: Fault, seed: int = 0, **options: Any) -> Iterator[tuple[S3Bucket, Proxy]]:
    """A new bucket that is reached through a proxy."""
    name = new_bucket(OPTIONS)
    with Proxy(port_of(OPTIONS), script, seed=seed) as proxy:
        yield S3Bucket(name, {**proxy.options(OPTIONS), **options}), proxy


def use(bucket: S3Bucket) -> None:
    """All kinds of requests; each result is compared."""
    version = bucket.put("run/small", b"small", only_if=ABSENT)
    assert bucket.read("run/small") == (b"small", version)
    upload = bucket.begin_upload("run/large")
    parts = [DATA[start : start + PART_NBYTES] for start in range(0, len(DATA), PART_NBYTES)]
    receipts = [bucket.put_part("run/large", upload, number, memoryview(part)) for number, part in enumerate(parts)]
    keys = {started.key for started in bucket.uploads("run/")}  # more than one where an answer was lost
    assert keys == {"run/large"}
    large = bucket.end_upload("run/large", upload, receipts, only_if=ABSENT)
    assert [(entry.key, entry.version) for entry in bucket.list("run/")] == [
        ("run/large", large),
        ("run/small", version),
    ]
    memory = bytearray(len(DATA))
    bucket.read_into("run/large", [memoryview(memory)[:1000], memoryview(memory)[1000:]], 0, version=large)
    assert memory == DATA
    bucket.delete(["run/small"])
    assert bucket.look("run/small") is None
    assert list(bucket.folders("")) == ["run"]


def use_in_child(bucket: S3Bucket, told: Any) -> None:
    """In a process that was forked."""
    data = bucket.read("run/object")[0]
    told.put((os.getpid(), bucket._requests._clients.get().pid, data))


class TestFaultsThatPass(unittest.TestCase):
    @parameterized.expand(
        [
            ("throttled", Fault("SlowDown", times=3, every=3)),
            ("throttled by status", Fault("TooMany", times=3, every=3)),
            ("answers that break", Fault("ResetAnswer", times=-1, share=0.3)),
            ("requests that break", Fault("ResetRequest", method="PUT", times=-1, share=0.5)),
            ("answers that end too early", Fault("Truncate", times=-1, share=0.3)),
            ("expired credentials", Fault("ExpiredToken", times=3, every=4)),
            ("bodies that come damaged", Fault("Damage", method="PUT", times=3)),
            ("bodies that do not fit their signature", Fault("Damage", method="PUT", times=3, found_by="sha256")),
            ("delays", Fault("Delay", times=3, seconds=0.05)),
        ]
    )
    def test_everything_is_right_in_the_end(self, _: str, fault: Fault) -> None:
        with through(fault, seed=3) as (bucket, proxy):
            use(bucket)
            refused = proxy.num_refused
        self.assertGreater(fault.num_done, 0)
        self.assertEqual(refused, fault.num_done if fault.kind == "Damage" else 0)

    @parameterized.expand([("put_object",), ("complete",)])
    def test_an_answer_that_is_lost(self, which: str) -> None:
        """The second attempt finds what the first one has done, and does not take it for that of another process."""
        fault = Fault("ResetAnswer", method="PUT" if which == "put_object" else "POST", where=0.0)
        with through(fault) as (bucket, proxy):
            if which == "put_object":
                version = bucket.put("run/object", b"mine", only_if=ABSENT)
            else:
                fault.skip = 1  # the request that begins the upload
                upload = bucket.begin_upload("run/object")
                receipt = bucket.put_part("run/object", upload, 0, memoryview(b"mine"))
                version = bucket.end_upload("run/object", upload, [receipt], only_if=ABSENT)
            self.assertEqual(bucket.read("run/object"), (b"mine", version))
            self.assertEqual(fault.num_done, 1)
            self.assertGreaterEqual(proxy.num_requests(method=fault.method, key="run/object"), 2)

    @parameterized.expand([(404, "NoSuchUpload"), (412, "PreconditionFailed")])
    def test_a_lost_answer_to_the_end_of_an_upload(self, status: int, code: str) -> None:
        """The store says to the second attempt that the upload is gone, or that the object is there: it is this one."""
        lost = Fault("ResetAnswer", method="POST", skip=1, where=0.0)  # after the request that begins the upload
        second = Fault("Answer", method="POST", skip=1, status=status, body=f"<Error><Code>{code}</Code></Error>")
        with through(lost, second) as (bucket, _):
            upload = bucket.begin_upload("run/object")
            receipt = bucket.put_part("run/object", upload, 0, memoryview(b"mine"))
            version = bucket.end_upload("run/object", upload, [receipt], only_if=ABSENT)
            self.assertEqual(bucket.read("run/object"), (b"mine", version))
            self.assertEqual((lost.num_done, second.num_done), (1, 1))

    def test_credentials_that_have_expired(self) -> None:
        """They are asked for again, and the request is made once more, with its whole body."""
        with through(Fault("ExpiredToken", method="PUT", skip=1)) as (bucket, proxy):
            for data in (b"first", b"second"):
                bucket.put("run/object", data)
            self.assertEqual(bucket.read("run/object")[0], b"second")
            self.assertEqual(proxy.num_requests(method="PUT", key="run/object"), 3)

    def test_credentials_of_a_file_that_was_written_again(self) -> None:
        """The request after the expired one is signed with those that are there now."""
        with (
            tempfile.NamedTemporaryFile("w") as file,
            through(Fault("ExpiredToken", method="PUT", skip=1)) as (_, proxy),
        ):
            options = {name: value for name, value in proxy.options(OPTIONS).items() if not name.startswith("aws_")}
            name, keys = new_bucket(OPTIONS), list[str]()
            with mock.patch.dict(os.environ, {"AWS_SHARED_CREDENTIALS_FILE": file.name}):
                bucket = S3Bucket(name, options)
                for key in ("first", "second"):
                    file.seek(0)
                    file.write(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n".ljust(100))
                    file.flush()
                    bucket.put("run/object", b"data")
                    client: Any = bucket._requests._clients.get().client
                    keys.append(client._request_signer._credentials.access_key)
            self.assertEqual(keys, ["first", "second"])

    def test_a_lost_answer_does_not_hide_another_process(self) -> None:
        fault = Fault("ResetRequest", method="PUT", where=0.5)
        with through(fault) as (bucket, _proxy):
            S3Bucket(bucket.name.removeprefix("s3://"), OPTIONS).put("run/object", b"of another process")
            with self.assertRaises(OvertakenError):
                bucket.put("run/object", b"mine", only_if=ABSENT)
            self.assertEqual(fault.num_done, 1)

    def test_a_body_that_ends_too_early_goes_on_from_there(self) -> None:
        """No byte is asked for twice."""
        data = random.Random(2).randbytes(1 << 20)
        fault = Fault("Truncate", method="GET", times=3, where=0.5)
        with through(fault) as (bucket, proxy):
            version = bucket.put("run/object", data)
            memory = bytearray(len(data))
            bucket.read_into("run/object", [memoryview(memory)], 0, version=version)
            self.assertTrue(memory == data)
            self.assertEqual(fault.num_done, 3)
            self.assertEqual(proxy.body_nbytes(method="GET", key="run/object"), len(data))

    def test_an_object_that_is_replaced_between_two_halves(self) -> None:
        """The second half is not that of another object, also where no version was given."""
        first = Fault("Truncate", method="GET", where=0.5)
        between = Fault("Delay", method="GET", then=lambda: other.put("run/object", b"b" * 100_000))
        with through(first, between) as (bucket, _):
            other = S3Bucket(bucket.name.removeprefix("s3://"), OPTIONS)
            bucket.put("run/object", b"a" * 100_000)
            with self.assertRaises(OvertakenError):
                bucket.read_into("run/object", [memoryview(bytearray(100_000))], 0)
            self.assertEqual((first.num_done, between.num_done), (1, 1))

    def test_a_listing_that_is_stale(self) -> None:
        """It is what the store said; an object that it does not name is still found by its key."""
        with through(Fault("Stale", method="GET")) as (bucket, _proxy):
            self.assertEqual(list(bucket.list("run/")), [])
            bucket.put("run/object", b"new")
            self.assertEqual(list(bucket.list("run/")), [])
            self.assertIsNotNone(bucket.look("run/object"))
            self.assertEqual([entry.key for entry in bucket.list("run/")], ["run/object"])


class TestFaultsThatStay(unittest.TestCase):
    @parameterized.expand(
        [
            ("throttled", Fault("SlowDown", times=-1), "SlowDown (HTTP 503)"),
            ("throttled by status", Fault("TooMany", times=-1), "HTTP 429"),
            ("answers that break", Fault("ResetAnswer", times=-1, where=0.0), "Connection"),
            ("answers that never come", Fault("Delay", times=-1, seconds=4), "timeout"),
        ]
    )
    def test_one_error_within_the_stated_time(self, _: str, fault: Fault, words: str) -> None:
        """It names the object and the answer of the store, and proves nothing about a checkpoint."""
        with through(fault, retry_seconds=1) as (bucket, _proxy):
            for call in (lambda: bucket.read("run/object"), lambda: bucket.put("run/object", b"x")):
                began = time.monotonic()
                with self.assertRaises(CheckpointError) as caught:
                    call()
                self.assertLess(time.monotonic() - began, 1 + SLACK)
                text = str(caught.exception)
                self.assertIn(f"{bucket.name}/run/object: ", text)
                self.assertIn(words, text)
                self.assertNotIn("\n", text)
                self.assertFalse(is_sure_that_not(caught.exception), text)

    @parameterized.expand([("crc32", "BadDigest"), ("sha256", "XAmzContentSHA256Mismatch")])
    def test_a_body_that_is_damaged_each_time(self, by: Any, code: str) -> None:
        """The store refuses it by its checksum: one error that names the object, and nothing is there."""
        fault, pauses = Fault("Damage", method="PUT", times=-1, found_by=by), list[float]()
        # A clock in which requests take no time.
        clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=lambda seconds: pauses.append(max(seconds, 1e-6)))
        with through(fault, retry_seconds=1) as (bucket, proxy), mock.patch.object(client, "time", clock):
            upload = bucket.begin_upload("run/object")
            for call in (
                lambda: bucket.put_part("run/object", upload, 0, memoryview(DATA)),
                lambda: bucket.put("run/object", DATA),
            ):
                before, num_pauses, began = proxy.num_refused, len(pauses), clock.monotonic()
                words = f"run/object: cannot (put object|upload part): .* {code} .*400.* repeated for"
                with self.assertRaisesRegex(CheckpointError, words):
                    call()
                self.assertAlmostEqual(clock.monotonic() - began, 1.0, places=4)
                self.assertGreaterEqual(len(pauses) - num_pauses, 3)
                self.assertEqual(proxy.num_refused - before, 1 + len(pauses) - num_pauses)
            self.assertIsNone(bucket.look("run/object"))

    def test_an_expired_credential_that_stays_expired(self) -> None:
        """It is asked for once, and not for as long as throttling lasts."""
        with through(Fault("ExpiredToken", times=-1)) as (bucket, proxy):
            with self.assertRaisesRegex(CheckpointError, "run/object: the credentials have expired"):
                bucket.read("run/object")
            self.assertEqual(proxy.num_requests(key="run/object"), 2)


class TestProcesses(unittest.TestCase):
    def test_a_process_that_was_forked_has_connections_of_its_own(self) -> None:
        bucket = S3Bucket(new_bucket(OPTIONS), OPTIONS)
        bucket.put("run/object", b"data")
        context = get_context("fork")
        told = context.Queue()
        children = [context.Process(target=use_in_child, args=(bucket, told)) for _ in range(2)]
        for child in children:
            child.start()
        results = [told.get(timeout=60) for _ in children]
        for child in children:
            child.join()
        self.assertEqual({data for _, _, data in results}, {b"data"})
        for process, made_by, _ in results:
            self.assertEqual(process, made_by, "a client of another process")
        self.assertEqual(bucket.read("run/object")[0], b"data")


if __name__ == "__main__":
    unittest.main()
