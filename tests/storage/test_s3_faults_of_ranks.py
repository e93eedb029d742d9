"""Faults between several ranks and an object store: the data is right, or all ranks raise one clear error in time."""

from __future__ import annotations

import time
import unittest
from typing import Any

import torch.distributed as dist
from kit.checkpoints import mine, scramble
from kit.compare import check_same, error_text
from kit.optimizers import adam
from kit.proxy import Fault, Proxy
from kit.servers import Options, new_bucket, port_of, shared
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.buckets.s3 import S3Bucket
from fsdp_optim.testing import run_on_ranks

RETRY_SECONDS = 1
SLACK = 60  # seconds, on a machine with much to do


def save_and_load(url: str, options: Options) -> None:
    with cpu():
        trained, other = Trained("FSDP2", adam), Trained("fairscale flat", adam, steps=0)
        scramble(other)
        fsdp_optim.save(
            url,
            trained.model,
            trained.optim,
            options=fsdp_optim.SaveOptions(storage_options=options, progress=False),
            state={"a": 1},
        )
        restored = fsdp_optim.load(
            url,
            other.model,
            other.optim,
            options=fsdp_optim.LoadOptions(storage_options=options, progress=False, compare=True),
        )
        check_same("loaded", mine(other), mine(Trained("fairscale flat", adam)))
        check_same("extra", dict(restored.state), {"a": 1})


def fail(verb: str, url: str, options: Options) -> tuple[str, str, float]:
    """The error of a save or a load on this rank, and after how many seconds."""
    with cpu():
        trained = Trained("FSDP2", adam)
        call: Any = fsdp_optim.save if verb == "save" else fsdp_optim.load
        kind_of: Any = fsdp_optim.SaveOptions if verb == "save" else fsdp_optim.LoadOptions
        quiet = kind_of(storage_options=options, progress=False)
        dist.barrier()
        began = time.monotonic()
        kind, text = error_text(lambda: call(url, trained.model, trained.optim, options=quiet))
        return kind, text, time.monotonic() - began


def save_plainly(url: str, options: Options) -> None:
    with cpu():
        trained = Trained("FSDP2", adam)
        fsdp_optim.save(
            url, trained.model, trained.optim, options=fsdp_optim.SaveOptions(storage_options=options, progress=False)
        )


class FaultsTest(unittest.TestCase):
    options: Options

    @classmethod
    def setUpClass(cls) -> None:
        cls.options = {**shared("rclone"), "part_nbytes": 512}

    def test_faults_that_pass(self) -> None:
        """Credentials that expire in the middle of a save are asked for again."""
        script = [
            Fault("ExpiredToken", method="PUT", key=".safetensors", skip=3),
            Fault("SlowDown", times=4, every=5),
            Fault("TooMany", method="PUT", times=2, every=4),
            Fault("ResetRequest", method="PUT", key=".safetensors", times=2, every=5),
            Fault("ResetAnswer", method="PUT", key=".safetensors", times=1, skip=4),
            Fault("Damage", method="PUT", key=".safetensors", times=2, skip=2, every=3),
            Fault("Truncate", method="GET", key=".safetensors", times=3, every=2),
            Fault("Delay", times=3, every=7, seconds=0.2),
        ]
        name = new_bucket(self.options)
        with Proxy(port_of(self.options), script, seed=3) as proxy:
            run_on_ranks(save_and_load, 3, f"s3://{name}/run/step-1", proxy.options(self.options))
        for fault in script:
            self.assertGreater(fault.num_done, 0, fault)
        self.assertEqual(proxy.num_refused, 2, "damaged parts that their checksums have shown")

    @parameterized.expand(
        [
            ("save", "SlowDown", "PUT", "optim.safetensors", "HTTP 503"),
            ("save", "ResetRequest", "PUT", "model.safetensors", "model.safetensors"),
            ("save", "Damage", "PUT", "optim.safetensors", "BadDigest"),
            ("load", "TooMany", "GET", "optim.safetensors", "HTTP 429"),
            ("load", "Truncate", "GET", "model.safetensors", "model.safetensors"),
            ("load", "ExpiredToken", "GET", "model.safetensors", "credentials"),
        ]
    )
    def test_faults_that_stay(self, verb: str, kind: Any, method: str, key: str, words: str) -> None:
        """All ranks raise the same error, which names the object, within the stated time; a save leaves nothing."""
        name = new_bucket(self.options)
        url = f"s3://{name}/run/step-1"
        if verb == "load":
            run_on_ranks(save_plainly, 2, url, self.options)
        fault = Fault(kind, method=method, key=key, times=-1, where=0.5 if kind != "Truncate" else 0.0)
        with Proxy(port_of(self.options), [fault]) as proxy:
            options = {**proxy.options(self.options), "retry_seconds": RETRY_SECONDS}
            failures = run_on_ranks(fail, 2, verb, url, options)
        self.assertEqual({(name_of_error, text) for name_of_error, text, _ in failures}, {failures[0][:2]})
        error, text, _ = failures[0]
        self.assertEqual(error, "CheckpointError", text)
        self.assertIn(f"{url}/{key}", text)
        self.assertIn(words, text)
        self.assertLess(max(seconds for *_, seconds in failures), RETRY_SECONDS + SLACK)
        if verb == "save":
            self.assertEqual([entry.key for entry in S3Bucket(name, self.options).list("")], [])


if __name__ == "__main__":
    unittest.main()
