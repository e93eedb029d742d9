"""Clients of S3: what boto3 knows about services is read once per process; credentials are found anew by each client."""

from __future__ import annotations

import concurrent.futures
import os
import unittest
from typing import Any
from unittest import mock

import boto3
from botocore.loaders import JSONFileLoader
from botocore.session import get_session

from fsdp_optim.buckets.s3 import Clients

OPTIONS = {"endpoint_url": "http://127.0.0.1:9", "region_name": "us-east-1"}
KEYS = {"aws_access_key_id": "access", "aws_secret_access_key": "secret"}


def client(**options: Any) -> Any:
    return Clients({**OPTIONS, **options}).get().client


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
        paths = {tuple(made._session.get_component("data_loader").search_paths) for made in sessions}
        self.assertEqual([len(set(folders)) for folders in paths], [len(folders) for folders in paths])
        self.assertEqual(len(paths), 1)

    def test_credentials_are_those_of_now(self) -> None:
        access_keys = []
        for key in ("first", "second"):
            given = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": "of " + key}
            with mock.patch.dict(os.environ, given):
                access_keys.append(client()._request_signer._credentials.access_key)
        self.assertEqual(access_keys, ["first", "second"])

    def test_a_session_of_the_user_is_used_as_it_is(self) -> None:
        own_session = get_session()
        loader = own_session.get_component("data_loader")
        client(botocore_session=own_session, **KEYS)
        self.assertIs(own_session.get_component("data_loader"), loader)


if __name__ == "__main__":
    unittest.main()
