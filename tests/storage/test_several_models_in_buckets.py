"""Several models in a bucket: the same files, one commit, parts of them alone, thinned, listed and replaced."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.compare import check_same, refused
from kit.servers import new_bucket, shared
from kit.several import content, models, train, wanted
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.buckets.objects import Memory, MemoryBucket, ObjectStore
from fsdp_optim.plugins import use_stores
from fsdp_optim.testing import run_on_ranks

WAYS = dict.fromkeys(("actor", "critic", "ema"), "plain")
WRAPPED = {"actor": "FSDP2", "critic": "DDP", "ema": "FSDP2"}
OTHER = {"actor": "DDP", "critic": "FSDP2", "ema": "plain"}
QUIET = {"durable": False, "progress": False}


def check_all(url: str, ways: Mapping[str, str], **storage: Any) -> None:
    options = fsdp_optim.LoadOptions(compare=True, progress=False, **storage)
    into, their = models(ways, filled=False)
    fsdp_optim.load(url, into, their, options=options)
    for name, expected in wanted(tuple(ways)).items():
        check_same(name, content(into[name], their.get(name)), expected)
    into, their = models({"critic": ways["critic"]}, filled=False)
    fsdp_optim.load(url, into, their, options=options)
    check_same("some", content(into["critic"], their["critic"]), wanted(("critic",))["critic"])
    into, their = models({"critic": ways["critic"]}, filled=False)
    fsdp_optim.load(f"{url}/critic", into["critic"], their["critic"], options=options)
    check_same("alone", content(into["critic"], their["critic"]), wanted(("critic",))["critic"])


def on_ranks(url: str, storage: Mapping[str, Any]) -> None:
    options = fsdp_optim.SaveOptions(**QUIET, storage_options=storage)
    live, optims = models(WRAPPED, filled=True)
    fsdp_optim.save(url, live, optims, step=1, options=options)
    check_all(url, WRAPPED, storage_options=storage)
    for name in optims:
        train(live[name], optims[name], 1)
    fsdp_optim.async_save(url, live, optims, step=2, overwrite=True, options=options).wait()
    into, their = models(OTHER, filled=False)
    loading = fsdp_optim.LoadOptions(compare=True, progress=False, storage_options=storage)
    check_same("step", fsdp_optim.load(url, into, their, options=loading).step, 2)
    for name in OTHER:
        check_same("replaced", content(into[name], their.get(name)), content(live[name], optims.get(name)))


class InBucketsTest(unittest.TestCase):
    @parameterized.expand([("parts by many", True), ("whole files", False)])
    def test_in_memory(self, _: str, by_many: bool) -> None:
        memory = Memory()

        def opened(url: str, probe: Any, options: Any) -> ObjectStore:
            return ObjectStore(
                MemoryBucket(memory, parts_by_many=by_many), url.partition("://")[2], probe, part_nbytes=1000
            )

        live, optims = models(WAYS, filled=True)
        with use_stores({"several": opened}):
            for number in range(3):  # the first has plain names, the others a folder of their own each
                options = fsdp_optim.SaveOptions(**QUIET, max_file_size=600)
                fsdp_optim.save(
                    "several://run/step-1", live, optims, step=number, overwrite=bool(number), options=options
                )
                check_all("several://run/step-1", WAYS)
                fsdp_optim.verify("several://run/step-1", progress=False)
                if not number:
                    refused(
                        lambda: fsdp_optim.latest("several://run/step-1"), fsdp_optim.CheckpointError, "is a checkpoint"
                    )
            with tempfile.TemporaryDirectory() as folder:
                options = fsdp_optim.SaveOptions(**QUIET, max_file_size=600)
                fsdp_optim.save(Path(folder, "c"), live, optims, step=2, options=options)
                check_same("as in a folder", fsdp_optim.diff(Path(folder, "c"), "several://run/step-1").differing, ())
            (entry,) = fsdp_optim.checkpoints("several://run")
            self.assertEqual((entry.complete, entry.step), (True, 2))
            fsdp_optim.thin("several://run/step-1")
            keys = [info.key for info in MemoryBucket(memory).list("")]
            self.assertFalse([key for key in keys if "optim-" in key or "optim.safetensors" in key], keys)
            into, _ = models(WAYS, filled=False)
            fsdp_optim.load("several://run/step-1", into)
            check_same("thin", content(into["ema"], None), {"weights": wanted(("ema",))["ema"]["weights"]})

    def test_in_s3(self) -> None:
        storage = shared("moto")
        url = f"s3://{new_bucket(storage)}/run/step-1"
        run_on_ranks(on_ranks, 2, url, storage)
        options = fsdp_optim.LoadOptions(storage_options=storage, local_cache=tempfile.mkdtemp())
        into, their = models(WAYS, filled=False)
        self.assertEqual(fsdp_optim.load(url, into, their, options=options).step, 2)
        for _ in range(2):
            alone, own = models({"actor": "plain"}, filled=False)
            fsdp_optim.load(f"{url}/actor", alone["actor"], own["actor"], options=options)
            check_same("through a cache", content(alone["actor"], own["actor"]), content(into["actor"], their["actor"]))


if __name__ == "__main__":
    unittest.main()
