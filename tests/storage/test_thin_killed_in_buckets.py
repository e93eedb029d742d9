"""A thin in a bucket that dies before any of its requests leaves the checkpoint complete, with the optimizer or without it."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import torch
from kit.compare import check_same, refused
from kit.forked import BUCKETS, run
from kit.interrupted import InterruptedBucket, left_over
from kit.servers import Server, new_bucket, shared
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, SaveOptions, StateError
from fsdp_optim.buckets.objects import Memory, MemoryBucket
from fsdp_optim.buckets.s3 import S3Bucket
from fsdp_optim.checkpoint.catalog.thinning import thin as thin_store
from fsdp_optim.formats.own import OURS
from fsdp_optim.plugins import ObjectStore

MOST = 60  # requests

KILLED = """
import os, signal, botocore.httpsession, fsdp_optim
real, left = botocore.httpsession.URLLib3Session.send, [{number}]

def send(self, request):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, request)

botocore.httpsession.URLLib3Session.send = send
fsdp_optim.thin({path!r}, storage_options={options!r})
"""


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optim = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).square().mean().backward()
    optim.step()
    return model, optim


def save(place: Any, seed: int, *, overwrite: bool = False, **options: Any) -> None:
    values = SaveOptions(progress=False, durable=False, **options)
    fsdp_optim.save(place, *made(seed), step=3, overwrite=overwrite, options=values)


def check_complete(place: Any, **options: Any) -> bool:
    """The weights load, verified, as they were saved; and the optimizer, if it is there. Return whether it is."""
    load = fsdp_optim.LoadOptions(progress=False, **options)
    model, optim = made(9)
    wanted_model, wanted_optim = made(1)
    try:
        fsdp_optim.load(place, model, optim, options=load)
        has_optim = True
        check_same("state", optim.state_dict()["state"], wanted_optim.state_dict()["state"])
    except StateError as error:
        if "was thinned" not in str(error):
            raise
        has_optim = False
        fsdp_optim.load(place, model, options=load)
    check_same("weights", dict(model.state_dict()), dict(wanted_model.state_dict()))
    return has_optim


def check_outcomes(test: unittest.TestCase, outcomes: list[bool]) -> None:
    """First with the optimizer, then without it, never with it again."""
    test.assertEqual(outcomes, sorted(outcomes, reverse=True))
    test.assertGreater(outcomes.count(True), 1)
    test.assertGreater(outcomes.count(False), 0)


class InMemoryTest(unittest.TestCase):
    @parameterized.expand([(saves, conditions) for saves in (1, 2) for conditions in (True, False)])
    def test_before_each_request(self, saves: int, conditions: bool) -> None:
        """`saves` 2: the files are in a folder of the second save, with a copy of the manifest."""
        outcomes = []
        for number in range(MOST):
            memory = Memory()

            def opened(bucket: MemoryBucket | None = None, memory: Memory = memory) -> ObjectStore:
                return ObjectStore(bucket or MemoryBucket(memory), "run/step", OURS.probe)

            for seed in range(2 - saves, 2):
                save(opened(), seed, overwrite=seed > 2 - saves)
            dying = InterruptedBucket(memory, number, kills=True, conditions=conditions)
            try:
                thin_store(opened(dying))
            except OSError:
                outcomes.append(check_complete(opened()))
                thin_store(opened())
                self.assertFalse(check_complete(opened()))
                check_same("left", left_over(MemoryBucket(memory), "run/", OURS.probe), [])
            else:
                break
        check_outcomes(self, outcomes)

    @parameterized.expand([(True,), (False,)])
    def test_another_save_before_each_request(self, conditions: bool) -> None:
        """A save that replaces the checkpoint between two requests of a thin is complete, with or without its optimizer."""
        number_of_requests = self.requests_of_thin()
        for number in range(number_of_requests):
            memory = Memory()
            store = ObjectStore(MemoryBucket(memory), "run/step", OURS.probe)
            save(store, 0)
            another = self.saving_over(memory)
            bucket = InterruptedBucket(memory, number, another, conditions=conditions)
            if not conditions and bucket_puts_at(number, self.calls):
                continue  # between the look and the put a store without conditions cannot see another save
            try:
                thin_store(ObjectStore(bucket, "run/step", OURS.probe))
            except CheckpointError as error:
                self.assertIn("replaced", str(error))
            check_complete(store)

    def requests_of_thin(self) -> int:
        memory = Memory()
        save(ObjectStore(MemoryBucket(memory), "run/step", OURS.probe), 0)
        bucket = InterruptedBucket(memory)
        thin_store(ObjectStore(bucket, "run/step", OURS.probe))
        self.calls = bucket.calls
        return len(bucket.calls)

    def saving_over(self, memory: Memory) -> Callable[[], object]:
        return lambda: save(ObjectStore(MemoryBucket(memory), "run/step", OURS.probe), 1, overwrite=True)


def bucket_puts_at(number: int, calls: list[str]) -> bool:
    return calls[number].startswith("put ")


class OnServersTest(unittest.TestCase):
    """Processes that are killed by a signal, before every third of their requests to a server."""

    @parameterized.expand([("moto", 0), ("rclone", 2)])
    def test_before_some_requests(self, kind: Server, first: int) -> None:
        options = shared(kind)
        bucket = S3Bucket(new_bucket(options), options)
        outcomes = []
        for number in range(first, MOST, 3):
            path = f"{bucket.name}/{number}/step"
            save(path, 1, storage_options=options)
            done = run(KILLED.format(number=number, path=path, options=options), preload=BUCKETS)
            if done.returncode == 0:
                break
            check_same("killed", (done.returncode, done.stderr[-300:]), (-9, ""))
            outcomes.append(check_complete(path, storage_options=options))
            fsdp_optim.thin(path, storage_options=options)
            self.assertFalse(check_complete(path, storage_options=options))
            check_same("left", left_over(bucket, f"{number}/", OURS.probe), [])
        check_outcomes(self, outcomes)

    @parameterized.expand([("moto",), ("rclone",)])
    def test_what_is_left_and_what_is_freed(self, kind: Server) -> None:
        options = shared(kind)
        bucket = S3Bucket(new_bucket(options), options)
        path = f"{bucket.name}/run/step"
        save(path, 1, storage_options=options)
        before = {info.key: info.nbytes for info in bucket.list("run/")}
        done = fsdp_optim.thin(path, storage_options=options)
        after = {info.key for info in bucket.list("run/")}
        gone = {key: nbytes for key, nbytes in before.items() if key not in after}
        self.assertEqual(
            sorted(key.rpartition("/")[2] for key in gone), ["optim.safetensors", "optim.safetensors.sums"]
        )
        self.assertEqual(done.freed_nbytes, sum(gone.values()))
        fsdp_optim.verify(path, storage_options=options, progress=False)
        load = fsdp_optim.LoadOptions(storage_options=options)
        refused(lambda: fsdp_optim.load(path, *made(2), options=load), StateError, "was thinned")
        self.assertEqual(fsdp_optim.thin(path, storage_options=options).freed_nbytes, 0)


if __name__ == "__main__":
    unittest.main()
