"""How many requests of one rank are under way at the same time: as many as memory takes, because stores limit each connection."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import torch
from kit.proxy import Fault, Proxy
from kit.servers import new_bucket, port_of, shared
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.formats import extents
from fsdp_optim.storage.objects.s3_client import shared_clients
from fsdp_optim.storage.objects.store import PART_NBYTES

KIB = 1 << 10
PART_KIB = 5
READ_NBYTES = 16 * KIB
FILE = "model.safetensors"


class AtOnceTest(unittest.TestCase):
    @parameterized.expand([(64, 10), (24, 3), (12, 1), (1024, 16)])
    def test_uploads(self, bucket_kib: int, num: int) -> None:
        """An eighth of the memory is for elements, a part is being filled, and the rest is parts that are sent."""
        model, options = nn.Linear(64 * KIB, 1, bias=False), {**shared("rclone"), "part_nbytes": PART_KIB * KIB}
        slow = Fault("Delay", method="PUT", key=FILE, times=-1, seconds=0.4)
        with Proxy(port_of(options), [slow]) as proxy:
            given: Any = {"storage_options": proxy.options(options), "progress": False}
            fsdp_optim.save(f"s3://{new_bucket(options)}/step", model, bucket_nbytes=bucket_kib * KIB, **given)
            self.assertEqual(proxy.most_delayed, num)
            self.assertGreater(proxy.num_requests(method="PUT", key=FILE), 50)

    def test_the_usual_memory_takes_ten_parts(self) -> None:
        """The test above in other units: the least part of S3 is what the store chooses."""
        self.assertEqual(PART_NBYTES, PART_KIB << 20)

    def test_reads(self) -> None:
        model, options = nn.Linear(128 * KIB, 1, bias=False), shared("rclone")
        url = f"s3://{new_bucket(options)}/step"
        fsdp_optim.save(url, model, storage_options=options, progress=False)
        loaded = nn.Linear(128 * KIB, 1, bias=False)
        slow = Fault("Delay", method="GET", key=FILE, times=-1, seconds=0.4)
        with Proxy(port_of(options), [slow]) as proxy, mock.patch.object(extents, "_READ_NBYTES", READ_NBYTES):
            fsdp_optim.load(url, loaded, storage_options=proxy.options(options), progress=False)
            self.assertEqual(proxy.most_delayed, 16)
        self.assertTrue(torch.equal(model.weight, loaded.weight))

    def test_the_client_has_a_connection_for_each(self) -> None:
        """A request without one would open and close its own."""
        client = shared_clients(shared("rclone")).get(0).client
        self.assertGreaterEqual(client.meta.config.max_pool_connections, 2 * 16)


if __name__ == "__main__":
    unittest.main()
