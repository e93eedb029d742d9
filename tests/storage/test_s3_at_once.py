"""How many requests of one rank are under way at the same time: as many as memory takes, because stores limit each connection."""

from __future__ import annotations

import itertools
import unittest
from typing import Any
from unittest import mock

import torch
from kit.cases import expand
from kit.options import as_options
from kit.proxy import Fault, Proxy
from kit.servers import new_bucket, port_of, shared
from torch import nn

import fsdp_optim
from fsdp_optim.buckets.objects import PART_NBYTES, ObjectWriter
from fsdp_optim.buckets.s3 import Clients
from fsdp_optim.formats.base import extents

KIB = 1 << 10
PART_KIB = 5
READ_NBYTES = 16 * KIB
FILE = "model.safetensors"


class AtOnceTest(unittest.TestCase):
    @expand([(64, 9), (24, 3), (1024, 16)], [(12, 1)])
    def test_uploads(self, bucket_kib: int, num: int) -> None:
        """An eighth of the memory is for elements, one of the rest is for the client, and what is left is parts."""
        width = 66 * KIB + 128  # so that the last part is almost as long as the others
        model, options = nn.Linear(width, 1, bias=False), {**shared("rclone"), "part_nbytes": PART_KIB * KIB}
        slow = Fault("Delay", method="PUT", key=FILE, times=-1, seconds=0.4)
        with Proxy(port_of(options), [slow]) as proxy:
            given: Any = {"storage_options": proxy.options(options), "progress": False}
            fsdp_optim.save(
                f"s3://{new_bucket(options)}/step",
                model,
                **as_options(fsdp_optim.SaveOptions, **given, bucket_nbytes=bucket_kib * KIB),
            )
            self.assertEqual(proxy.most_delayed, num)
            self.assertGreater(proxy.num_requests(method="PUT", key=FILE), 50)

    def test_the_usual_memory_takes_ten_parts(self) -> None:
        """Those of S3, of 5 MiB: the client needs no more than 6 MiB, so that a larger memory is for parts."""
        model, options = nn.Linear(15 << 20, 1, bias=False), {**shared("rclone"), "part_nbytes": PART_NBYTES}
        slow = Fault("Delay", method="PUT", key=FILE, times=-1, seconds=0.8)
        with Proxy(port_of(options), [slow]) as proxy:
            url = f"s3://{new_bucket(options)}/step"
            fsdp_optim.save(
                url, model, options=fsdp_optim.SaveOptions(storage_options=proxy.options(options), progress=False)
            )
            self.assertEqual(proxy.most_delayed, 10)
            self.assertEqual(proxy.num_requests(method="PUT", key=FILE), 13)

    def test_one_file_after_the_other(self) -> None:
        """The head of a file comes with its first tensor: a part that is open takes memory."""
        model, options, written = nn.Linear(4 * KIB, 1), shared("rclone"), list[str]()
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 4 * KIB)).sum().backward()
        optim.step()
        real = ObjectWriter.write

        def write(self: ObjectWriter, name: str, pieces: Any, offset: int) -> None:
            written.append(name)
            real(self, name, pieces, offset)

        with mock.patch.object(ObjectWriter, "write", write):
            url = f"s3://{new_bucket(options)}/step"
            fsdp_optim.save(url, model, optim, options=fsdp_optim.SaveOptions(storage_options=options, progress=False))
        self.assertEqual([name for name, _ in itertools.groupby(written)], [FILE, "optim.safetensors"])

    def test_reads(self) -> None:
        model, options = nn.Linear(128 * KIB, 1, bias=False), shared("rclone")
        url = f"s3://{new_bucket(options)}/step"
        fsdp_optim.save(url, model, options=fsdp_optim.SaveOptions(storage_options=options, progress=False))
        loaded = nn.Linear(128 * KIB, 1, bias=False)
        slow = Fault("Delay", method="GET", key=FILE, times=-1, seconds=0.4)
        with Proxy(port_of(options), [slow]) as proxy, mock.patch.object(extents, "_READ_NBYTES", READ_NBYTES):
            fsdp_optim.load(
                url, loaded, options=fsdp_optim.LoadOptions(storage_options=proxy.options(options), progress=False)
            )
            self.assertEqual(proxy.most_delayed, 16)
        self.assertTrue(torch.equal(model.weight, loaded.weight))

    def test_the_client_has_a_connection_for_each(self) -> None:
        """A request without one would open one, which would be thrown away at its end."""
        options = shared("rclone")
        name = new_bucket(options)
        client = Clients(options).get().client
        client.put_object(Bucket=name, Key="key", Body=b"data")
        with self.assertNoLogs("urllib3.connectionpool", "WARNING"):
            bodies = [client.get_object(Bucket=name, Key="key")["Body"] for _ in range(2 * 16)]  # of two calls at once
            self.assertEqual({body.read() for body in bodies}, {b"data"})


if __name__ == "__main__":
    unittest.main()
