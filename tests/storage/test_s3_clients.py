"""Clients of S3: what boto3 knows about services is read once per process; credentials are found anew by each client."""

from __future__ import annotations

import concurrent.futures
import os
import tempfile
import time
import unittest
from typing import Any
from unittest import mock

import boto3
from botocore.loaders import JSONFileLoader
from botocore.session import get_session
from kit.proxy import Proxy
from kit.servers import new_bucket, port_of, shared

from fsdp_optim.buckets.s3 import Clients, S3Bucket, shared_clients

OPTIONS = {"endpoint_url": "http://127.0.0.1:9", "region_name": "us-east-1"}
KEYS = {"aws_access_key_id": "access", "aws_secret_access_key": "secret"}


def client(**options: Any) -> Any:
    return Clients({**OPTIONS, **options}).get(time.monotonic() + 10).client


class ClientsTest(unittest.TestCase):
    def test_descriptions_are_read_once(self) -> None:
        """However many clients there are, also of several threads at once; and they take no more room."""
        loaded: list[str] = []
        real = JSONFileLoader.load_file

        def load_file(self: Any, path: str) -> Any:
            loaded.append(path)
            return real(self, path)

        client(**KEYS)
        sessions: list[Any] = []
        with mock.patch.object(JSONFileLoader, "load_file", load_file):
            real_session = boto3.Session

            def session(**given: Any) -> Any:
                sessions.append(real_session(**given))
                return sessions[-1]

            with mock.patch.object(boto3, "Session", session), concurrent.futures.ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda _: client(**KEYS), range(8)))
        self.assertEqual(loaded, [])
        paths = {tuple(one._session.get_component("data_loader").search_paths) for one in sessions}
        self.assertEqual([len(set(one)) for one in paths], [len(one) for one in paths])
        self.assertEqual(len(paths), 1)

    def test_credentials_are_those_of_now(self) -> None:
        found = []
        for key in ("first", "second"):
            given = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": "of " + key}
            with mock.patch.dict(os.environ, given):
                found.append(client()._request_signer._credentials.access_key)
        self.assertEqual(found, ["first", "second"])

    def test_calls_share_a_client(self) -> None:
        """While the options, the environment and the files with credentials are the same."""
        with tempfile.NamedTemporaryFile() as file, mock.patch.dict(os.environ, AWS_SHARED_CREDENTIALS_FILE=file.name):
            first = shared_clients(OPTIONS)
            self.assertIs(shared_clients({**OPTIONS, "part_nbytes": 1000}), first)
            self.assertIsNot(shared_clients({**OPTIONS, "retry_seconds": 3}), first)
            self.assertIsNot(shared_clients({**OPTIONS, "config": {"read_timeout": 3}}), first)
            self.assertIsNot(shared_clients({**OPTIONS, "botocore_session": get_session()}), first)
            with mock.patch.dict(os.environ, AWS_ACCESS_KEY_ID="another"):
                self.assertIsNot(shared_clients(OPTIONS), first)
            self.assertIs(shared_clients(OPTIONS), first)
            file.write(b"[default]\naws_access_key_id = access\naws_secret_access_key = secret\n")
            file.flush()
            second = shared_clients(OPTIONS)
            self.assertIsNot(second, first)
            made = second.get(time.monotonic() + 10)
            self.assertEqual(made.client._request_signer._credentials.access_key, "access")
            self.assertIs(shared_clients(OPTIONS).get(time.monotonic() + 10), made)

    def test_calls_share_a_client_with_a_config(self) -> None:
        config: dict[str, Any] = {"s3": {"addressing_style": "path"}, "read_timeout": 3}
        first = shared_clients({**OPTIONS, **KEYS, "config": config})
        same = {"read_timeout": 3, "s3": {"addressing_style": "path"}}
        self.assertIs(shared_clients({**OPTIONS, **KEYS, "config": same}), first)
        config["s3"]["addressing_style"] = "virtual"
        self.assertIsNot(shared_clients({**OPTIONS, **KEYS, "config": config}), first)
        self.assertEqual(first.get(time.monotonic() + 10).client.meta.config.s3["addressing_style"], "path")

    def test_connections_that_were_idle_are_not_used_again(self) -> None:
        options = shared("rclone")
        name = new_bucket(options)
        with Proxy(port_of(options), []) as proxy:
            clients = shared_clients(proxy.options(options))
            S3Bucket(name, proxy.options(options)).put("key", b"data")
            client = clients.get(time.monotonic() + 10).client
            with mock.patch.object(client, "close", wraps=client.close) as close:
                shared_clients(proxy.options(options))
                self.assertEqual(close.call_count, 0)
                later = time.monotonic() + 31
                with mock.patch("time.monotonic", return_value=later):
                    bucket = S3Bucket(name, proxy.options(options))
                self.assertEqual(close.call_count, 1)
            self.assertEqual(bucket.read("key")[0], b"data")

    def test_a_session_of_the_user_is_used_as_it_is(self) -> None:
        mine = get_session()
        loader = mine.get_component("data_loader")
        client(botocore_session=mine, **KEYS)
        self.assertIs(mine.get_component("data_loader"), loader)


if __name__ == "__main__":
    unittest.main()
