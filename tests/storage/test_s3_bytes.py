"""How many bytes and requests a save to an object store and a load from it take, counted between the ranks and the store."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from kit.checkpoints import mine
from kit.compare import check_same
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.options import as_options
from kit.proxy import Proxy
from kit.servers import Options, new_bucket, port_of, shared
from kit.trained import Trained
from kit.wrapping import cpu
from torch import nn

import fsdp_optim
from fsdp_optim.buckets.s3 import S3Bucket
from fsdp_optim.testing import run_on_ranks

WRAPS = {"FSDP2": "FSDP2", "fairscale flat": "DDP", "HSDP": "fairscale flat", "DDP": "FSDP2"}
"""In which wrapper 4 ranks save, and in which 3 ranks load that."""

PART_NBYTES = 1 << 20
SAVES_BESIDE_PARTS = 43  # requests; docs/storage.md says which
LOADS_PER_RANK = 24


class Layers(nn.Module):
    """Some 7 MB, and 20 MB with Adam's state."""

    units = ("layers.0", "layers.1", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(640, 691) for _ in range(4))


def trained(wrap: str, steps: int) -> Trained:
    run = Trained(wrap, adam, steps, Layers)
    run.forget_gradients()
    return run


def save_one(url: str, wrap: str, options: Options) -> int:
    with cpu():
        run = trained(wrap, 1)
        asked: Options = {"process_group": run.process_group, "progress": False, "storage_options": options}
        return fsdp_optim.save(url, run.model, run.optim, **as_options(fsdp_optim.SaveOptions, **asked)).nbytes


def load_one(url: str, wrap: str, options: Options) -> None:
    with cpu():
        target, expected = trained(wrap, 1), trained(wrap, 1)
        with torch.no_grad():
            for param in target.params:
                local_of(param).fill_(-1)
        asked: Options = {"process_group": target.process_group, "progress": False, "storage_options": options}
        fsdp_optim.load(url, target.model, target.optim, **as_options(fsdp_optim.LoadOptions, **asked))
        check_same(wrap, mine(target), mine(expected))


class BytesTest(unittest.TestCase):
    options: Options

    @classmethod
    def setUpClass(cls) -> None:
        cls.options = {**shared("rclone"), "part_nbytes": PART_NBYTES}

    def test_bytes_and_requests(self) -> None:
        self.check({wrap: WRAPS[wrap] for wrap in ("HSDP",)})

    @pytest.mark.slow
    def test_bytes_and_requests_of_other_wrappers(self) -> None:
        self.check({wrap: WRAPS[wrap] for wrap in ("FSDP2", "fairscale flat", "DDP")})

    def check(self, wraps: Mapping[str, str]) -> None:
        name = new_bucket(self.options)
        bucket = S3Bucket(name, self.options)
        for wrap, target in wraps.items():
            prefix = f"{wrap.replace(' ', '-')}/step-1"
            with self.subTest(f"{wrap} into {target}"):
                with Proxy(port_of(self.options)) as proxy:
                    nbytes = run_on_ranks(save_one, 4, f"s3://{name}/{prefix}", wrap, proxy.options(self.options))[0]
                    files = {entry.key: entry.nbytes for entry in bucket.list(prefix) if entry.nbytes > PART_NBYTES}
                    put = {key: sent for key, sent in proxy.by_key("PUT").items() if key in files}
                    self.assertEqual(put, files, "every byte is put once")
                    parts = sum(-(-size // PART_NBYTES) for size in files.values())
                    beside = proxy.num_requests() - parts
                with Proxy(port_of(self.options)) as proxy:
                    run_on_ranks(load_one, 3, f"s3://{name}/{prefix}", target, proxy.options(self.options))
                    read, loads = proxy.body_nbytes(method="GET"), proxy.num_requests()
                    ranges = sum(request.received > 64 << 10 for request in proxy.requests(method="GET"))
                print(
                    f"{wrap}: {nbytes} bytes, {parts} parts, {beside} more; read {read}, {loads}, of them {ranges} ranges"
                )
                headers = 3 * 4 * (64 << 10)  # each rank reads the beginning of each file
                self.assertLess(read, 1.05 * nbytes + headers)
                self.assertLessEqual(beside, SAVES_BESIDE_PARTS)
                self.assertLessEqual(loads - ranges, 3 * LOADS_PER_RANK)


if __name__ == "__main__":
    unittest.main()
