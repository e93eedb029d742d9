"""A put of a rank that arrives after its save was given up: nothing looks complete, and the next save removes it."""

from __future__ import annotations

import time
import unittest
from typing import Any

import torch.distributed as dist
from kit.cases import expand
from kit.interrupted import left_over
from kit.optimizers import adam
from kit.options import as_options
from kit.proxy import Fault, Proxy
from kit.servers import Options, new_bucket, port_of, shared
from kit.trained import Trained
from kit.wrapping import cpu

import fsdp_optim
from fsdp_optim.buckets.s3 import S3Bucket
from fsdp_optim.formats.own import OURS
from fsdp_optim.testing import run_on_ranks

LATE = "extra/rank-00001.safetensors"
TIMEOUT = 5.0  # seconds for which rank 0 waits for rank 1
LIMIT = 60.0


def save_late(url: str, options: Options, slow: Options, is_async: bool, is_over: bool) -> str:
    """Save; the requests of rank 1 are those of `slow`. Returns the error."""
    with cpu():
        trained = Trained("FSDP2", adam, 1)
        asked: dict[str, Any] = {"storage_options": slow if dist.get_rank() == 1 else options, "progress": False}
        asked |= {"per_rank_extra": {"rank": dist.get_rank()}, "overwrite": is_over, "timeout": TIMEOUT}
        save: Any = fsdp_optim.async_save if is_async else fsdp_optim.save
        dist.barrier()
        try:
            done = save(url, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **asked))
            if is_async:
                done.wait()
        except fsdp_optim.FsdpOptimError as error:
            outcome = f"{type(error).__name__}: {error}"
        else:
            outcome = ""
        dist.barrier()
        return outcome


def save_well(url: str, options: Options) -> None:
    with cpu():
        trained = Trained("FSDP2", adam, 1)
        asked: dict[str, Any] = {"storage_options": options, "progress": False}
        fsdp_optim.save(
            url, trained.model, trained.optim, overwrite=True, **as_options(fsdp_optim.SaveOptions, **asked)
        )
        fsdp_optim.load(url, trained.model, trained.optim, **as_options(fsdp_optim.LoadOptions, **asked, compare=True))


class LatePutsTest(unittest.TestCase):
    @expand(soon=[("save", False)], later=[("async_save", False), ("save", True), ("async_save", True)])
    def test_put_after_the_save_was_given_up(self, verb: str, is_over: bool) -> None:
        options = {**shared("rclone"), "part_nbytes": 512}
        name = new_bucket(options)
        bucket, root = S3Bucket(name, options), f"s3://{name}/run"
        if is_over:
            run_on_ranks(save_well, 2, f"{root}/step-1", options)

        def wait_until_given_up() -> None:
            end = time.monotonic() + LIMIT
            while any(entry.key.endswith("/claim") for entry in bucket.list("run/")) and time.monotonic() < end:
                time.sleep(0.05)

        late = Fault("Delay", method="PUT", key=LATE, then=wait_until_given_up)
        with Proxy(port_of(options), [late]) as proxy:
            slow = {**proxy.options(options), "retry_seconds": LIMIT}
            errors = run_on_ranks(save_late, 2, f"{root}/step-1", options, slow, verb == "async_save", is_over)
            self.assertEqual(proxy.num_requests(method="PUT", key=LATE), 1)
        self.assertNotIn("", errors)
        self.assertEqual([entry.key.endswith(LATE) for entry in bucket.list("run/")].count(True), 1, errors)
        newest = fsdp_optim.latest(root, storage_options=options)
        self.assertEqual(newest, f"{root}/step-1" if is_over else None)
        run_on_ranks(save_well, 2, f"{root}/step-1", options)
        self.assertEqual(left_over(bucket, "run/", OURS.probe), [])


if __name__ == "__main__":
    unittest.main()
