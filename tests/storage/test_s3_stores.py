"""The promises of a Store, kept by an ObjectStore on servers that speak S3."""

from __future__ import annotations

import unittest
from typing import Any

from kit.servers import PART_NBYTES, Server, new_bucket, shared

from fsdp_optim.buckets.objects import ObjectStore
from fsdp_optim.buckets.s3 import Clients, S3Bucket
from fsdp_optim.storage.base import Store
from fsdp_optim.testing import StoreConformance


class OnServer(StoreConformance):
    kind: Server

    @classmethod
    def setUpClass(cls) -> None:
        cls.options = shared(cls.kind)
        cls.clients = Clients(cls.options)  # shared, because making a client takes a tenth of a second

    def make_store(self, probe: Any) -> Store:
        self.bucket = S3Bucket(new_bucket(self.options), self.options, clients=self.clients)
        self.probe = probe
        return self.another_handle(None)

    def another_handle(self, store: Any) -> Store:
        return ObjectStore(self.bucket, "run/step-1", self.probe, part_nbytes=PART_NBYTES)


class TestMoto(OnServer, unittest.TestCase):
    kind = "moto"


class TestRclone(OnServer, unittest.TestCase):
    kind = "rclone"
