"""The error that a user reads when S3 refuses: one line with the way out, without secrets."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import sys
import traceback
import unittest
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from kit.proxy import Fault, Proxy
from kit.servers import SECRET_KEY, Options, free_port, new_bucket, port_of, shared
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import MissingObjectError
from fsdp_optim.buckets.s3 import Clients, S3Bucket
from fsdp_optim.storage.base import is_sure_that_not

TOKEN = "session-token-2718281828"
OPTIONS: Options


def setUpModule() -> None:
    global OPTIONS
    OPTIONS = shared("moto")


def answer(code: str, status: int, more: str = "", **headers: str) -> Fault:
    """The server refuses everything."""
    body = f"<Error><Code>{code}</Code><Message>the words of the store</Message>{more}</Error>"
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Fault("Answer", times=-1, status=status, body=body, headers=names)


@contextlib.contextmanager
def refused_by(fault: Fault) -> Iterator[S3Bucket]:
    """A bucket on a server that refuses."""
    with Proxy(port_of(OPTIONS), [fault]) as proxy:
        yield S3Bucket("some-bucket", {**proxy.options(OPTIONS), "aws_session_token": TOKEN, "retry_seconds": 1})


CALLS: dict[str, tuple[Callable[[S3Bucket], object], str]] = {
    "look": (lambda b: b.look("run/a"), "/run/a"),
    "list": (lambda b: list(b.list("run/")), ""),
    "folders": (lambda b: list(b.folders("run/")), ""),
    "read": (lambda b: b.read("run/a"), "/run/a"),
    "read_into": (lambda b: b.read_into("run/a", [memoryview(bytearray(3))], 0), "/run/a"),
    "put": (lambda b: b.put("run/a", b"x", only_if=""), "/run/a"),
    "begin_upload": (lambda b: b.begin_upload("run/a"), "/run/a"),
    "put_part": (lambda b: b.put_part("run/a", "id", 0, memoryview(b"x")), "/run/a"),
    "end_upload": (lambda b: b.end_upload("run/a", "id", ["1 - etag"], only_if=""), "/run/a"),
    "drop_upload": (lambda b: b.drop_upload("run/a", "id"), "/run/a"),
    "uploads": (lambda b: list(b.uploads("run/")), ""),
    "delete": (lambda b: b.delete(["run/a"]), ""),
}


class TestErrors(unittest.TestCase):
    def check(self, call: Callable[[], object], *words: str, kind: type[CheckpointError] = CheckpointError) -> None:
        """One line with these words, and no secret in it, in its traceback, or in what is logged."""
        with self.assertLogs(level=logging.INFO) as logged, self.assertRaises(kind) as caught:
            logging.info("assertLogs wants a line")
            call()
        error, text = caught.exception, str(caught.exception)
        self.assertIs(type(error), kind)
        self.assertNotIn("\n", text)
        for word in words:
            self.assertIn(word, text)
        everything = "".join(traceback.format_exception(error)) + repr(error) + "\n".join(logged.output)
        for secret in (SECRET_KEY, TOKEN):
            self.assertNotIn(secret, everything)

    def test_denied(self) -> None:
        """The line says which rights are needed; it does not prove that there is no checkpoint."""
        with refused_by(answer("AccessDenied", 403)) as bucket:
            for name, (call, where) in CALLS.items():
                with self.subTest(name):
                    words = (f"s3://some-bucket{where}: may not", "s3:GetObject", "s3:PutObject", "it answered")
                    self.check(partial(call, bucket), *words)
                    with self.assertRaises(CheckpointError) as caught:
                        call(bucket)
                    self.assertFalse(is_sure_that_not(caught.exception))

    def test_there_is_no_bucket(self) -> None:
        bucket, words = S3Bucket("missing-bucket", OPTIONS), "s3://missing-bucket: there is no such bucket"
        for name, (call, _) in CALLS.items():
            with self.subTest(name):
                self.check(partial(call, bucket), words, kind=MissingObjectError)

    @parameterized.expand(
        [
            ("moved", answer("PermanentRedirect", 301, x_amz_bucket_region="eu-west-3")),
            (
                "signed for another one",
                answer(
                    "AuthorizationHeaderMalformed", 400, "<Region>eu-west-3</Region>", x_amz_bucket_region="eu-west-3"
                ),
            ),
        ]
    )
    def test_another_region(self, _: str, fault: Fault) -> None:
        with refused_by(fault) as bucket:
            for call in (lambda: bucket.read("run/a"), lambda: bucket.look("run/a"), lambda: bucket.put("run/a", b"")):
                self.check(call, "s3://some-bucket: ", "region_name='eu-west-3'")

    @parameterized.expand([("InvalidAccessKeyId",), ("SignatureDoesNotMatch",)])
    def test_wrong_credentials(self, code: str) -> None:
        with refused_by(answer(code, 403)) as bucket:
            self.check(
                lambda: bucket.put("run/a", b""), "does not accept the credentials", code, "the words of the store"
            )

    def test_a_store_that_repeats_a_secret(self) -> None:
        fault = answer("Odd", 400)
        fault.body = f"<Error><Code>Odd</Code><Message>{TOKEN} and {SECRET_KEY} are odd</Message></Error>"
        with refused_by(fault) as bucket:
            self.check(lambda: bucket.put("run/a", b""), "*** and *** are odd")

    def test_an_endpoint_that_cannot_be_reached(self) -> None:
        where = f"http://user:{SECRET_KEY}@127.0.0.1:{free_port()}"
        for endpoint in (where.replace(f"user:{SECRET_KEY}@", ""), where):
            bucket = S3Bucket("some-bucket", {**OPTIONS, "endpoint_url": endpoint, "retry_seconds": 0.5})
            words = (
                "s3://some-bucket/run/a: the store cannot be reached, check endpoint_url",
                "127.0.0.1",
                "repeated for",
            )
            self.check(lambda: bucket.read("run/a"), *words)  # noqa: B023

    def test_no_credentials(self) -> None:
        env = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull, "HOME": os.devnull}
        options = {"endpoint_url": OPTIONS["endpoint_url"], "region_name": "us-east-1"}
        with mock.patch.dict(os.environ, {**env, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}, clear=True):
            bucket = S3Bucket("some-bucket", options)
            self.check(lambda: bucket.read("run/a"), "s3://some-bucket: no credentials for S3", "AWS_ACCESS_KEY_ID")
            bucket = S3Bucket("some-bucket", {**options, "profile_name": "no-such-profile"})
            self.check(lambda: bucket.read("run/a"), "no credentials for S3", "no-such-profile")

    def test_options(self) -> None:
        """An unknown one is named, and so is what the others are."""
        for options in ({"acces_key": SECRET_KEY}, {"retry_seconds": 0}, {"part_nbytes": "1"}):
            self.check(lambda: S3Bucket("some-bucket", options), *options)  # noqa: B023
        with self.assertRaisesRegex(CheckpointError, "aws_access_key_id, .*endpoint_url, .*retry_seconds"):
            S3Bucket("some-bucket", {"endpoint": 1})

    def test_the_size_of_parts(self) -> None:
        """S3 refuses parts that are too small only when all of them are there, so they are refused before."""
        self.assertEqual(S3Bucket("some-bucket", {"part_nbytes": 6 << 20}).can.least_part_nbytes, 6 << 20)
        self.assertEqual(S3Bucket("some-bucket", {**OPTIONS, "part_nbytes": 1}).can.least_part_nbytes, 1)
        self.check(
            lambda: S3Bucket("some-bucket", {"part_nbytes": (5 << 20) - 1}), "part_nbytes=5242879", "endpoint_url"
        )
        for wrong in (0, -1, "8 MiB", 8.0, True):
            self.check(lambda: S3Bucket("some-bucket", {"part_nbytes": wrong}), "part_nbytes", repr(wrong))  # noqa: B023

    def test_configuration_as_plain_values(self) -> None:
        """A bucket can be handed to ranks in other processes."""
        config: dict[str, Any] = {"s3": {"payload_signing_enabled": False}, "read_timeout": 7}
        bucket = S3Bucket(new_bucket(OPTIONS), {**OPTIONS, "config": config})
        bucket.put("run/a", b"x")
        self.assertEqual(bucket.read("run/a")[0], b"x")

    @parameterized.expand([("https", "UNSIGNED-PAYLOAD"), ("http", hashlib.sha256(b"data").hexdigest())])
    def test_what_protects_a_body(self, scheme: str, signed: str) -> None:
        """A CRC that the store verifies; over TLS the body is not hashed for the signature as well."""
        clients = Clients({**OPTIONS, "endpoint_url": f"{scheme}://127.0.0.1:{free_port()}", "retry_seconds": 0.1})
        sent: list[dict[str, Any]] = []
        events = clients.get().client.meta.events
        events.register("before-send.s3", lambda request, **_: sent.append(dict(request.headers)))
        bucket = S3Bucket("some-bucket", clients=clients)
        for call in (
            lambda: bucket.put("run/a", b"data"),
            lambda: bucket.put_part("run/a", "1", 0, memoryview(b"data")),
        ):
            with self.assertRaises(CheckpointError):
                call()
            crc = base64.b64encode(zlib.crc32(b"data").to_bytes(4, "big"))
            self.assertEqual(sent[-1]["x-amz-checksum-crc32"], crc)
            self.assertEqual(sent[-1]["X-Amz-Content-SHA256"], signed.encode())
            self.assertEqual(sent[-1]["Content-Length"], "4")

    def test_credentials_are_asked_for_again(self) -> None:
        """Where boto3 finds them: after an answer that they have expired, those that are there by then are used."""
        env = {"AWS_ACCESS_KEY_ID": "old-access", "AWS_SECRET_ACCESS_KEY": "old-secret"}
        fault = Fault("ExpiredToken", method="PUT", skip=1)
        with mock.patch.dict(os.environ, env), Proxy(port_of(OPTIONS), [fault]) as proxy:
            bucket = S3Bucket(new_bucket(OPTIONS), {**proxy.options({}), "region_name": "us-east-1"})
            bucket.put("run/a", b"x")
            os.environ |= {"AWS_ACCESS_KEY_ID": "new-access", "AWS_SECRET_ACCESS_KEY": "new-secret"}
            bucket.put("run/a", b"y")
            self.assertEqual(bucket.read("run/a")[0], b"y")
            keys = [request.access_key for request in proxy.requests(method="PUT")]
            self.assertEqual(keys, ["old-access", "old-access", "new-access"])

    def test_nothing_secret_is_shown(self) -> None:
        bucket = S3Bucket("some-bucket", {**OPTIONS, "aws_session_token": TOKEN})
        with contextlib.suppress(CheckpointError):
            bucket.look("run/a")
        seen = [bucket, bucket._requests, bucket._requests._clients, bucket._requests._clients._client]
        for secret in (SECRET_KEY, TOKEN):
            self.assertNotIn(secret, " ".join(map(repr, seen)) + bucket.name)

    def test_boto3_is_not_installed(self) -> None:
        """It is imported when it is used, and the error says what to install."""
        bucket = S3Bucket("some-bucket", OPTIONS)
        with mock.patch.dict(sys.modules, {"boto3": None}):
            self.check(lambda: bucket.look("run/a"), "needs boto3: pip install 'boto3>=1.36'")


if __name__ == "__main__":
    unittest.main()
