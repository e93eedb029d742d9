"""A save into a bucket that dies before any one of its requests, or while another save acts before any one of them.

What is there afterwards is whole and of one save, and the next save, to any place beside it, leaves nothing but checkpoints.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.checkpoints import mine, scramble
from kit.compare import check_same
from kit.interrupted import STRANGERS, InterruptedBucket, left_over
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.options import as_options
from kit.store_calls import load_from, url_of
from kit.trained import Trained
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import Memory, MemoryBucket, ObjectPlace, ObjectStore
from fsdp_optim.buckets.objects.saves import remove_dead
from fsdp_optim.formats.own import OURS

ROOT = "run/"
MINE, BESIDE, LAST = f"{ROOT}step-1", f"{ROOT}step-2", f"{ROOT}step-3"
SHORT = 0.01  # seconds after which the saves that act meanwhile take others for dead
PART_NBYTES = 600  # some files are uploads, and some are put whole


class Small(nn.Module):
    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)


def filled(number: int) -> Trained:
    """Values that tell of which save they are."""
    trained = Trained("plain", adam, 1, Small)
    with torch.no_grad():
        for param in trained.params:
            local_of(param).fill_(number)
    return trained


class RaceTest(unittest.TestCase):
    every = 11  # of the requests, which one is tried

    def setUp(self) -> None:
        self.trained = {number: filled(number) for number in (1, 2, 10, 11, 99)}
        self.reader = Trained("plain", adam, 0, Small)

    def save(self, bucket: MemoryBucket, prefix: str, number: int, dead_after: float = 300, **options: Any) -> None:
        store = ObjectStore(bucket, prefix, OURS.probe, part_nbytes=PART_NBYTES, dead_after=dead_after)
        trained = self.trained[number]
        given = as_options(fsdp_optim.SaveOptions, durable=False, progress=False, **options)
        with url_of(store) as url:
            fsdp_optim.save(url, trained.model, trained.optim, state={"number": number}, **given)

    def number_at(self, memory: Memory, prefix: str) -> int | None:
        """Which save is in a place, all of it; None where none is. Raises where it is not whole."""
        bucket = MemoryBucket(memory)
        if bucket.look(f"{prefix}/{OURS.probe.manifest}") is None:
            return None
        scramble(self.reader)
        store = ObjectStore(bucket, prefix, OURS.probe)
        number = int(load_from(store, self.reader, compare=True).state["number"])
        check_same(f"{prefix}, save {number}", mine(self.reader), mine(self.trained[number]))
        return number

    def begun(self, how: str) -> Memory:
        """A bucket with strangers' objects and uploads, and with the checkpoint that is to be replaced, if any."""
        memory = Memory()
        bucket = MemoryBucket(memory)
        for name in STRANGERS:
            bucket.put(f"{MINE}/{name}", b"of a user")
        bucket.begin_upload(f"{MINE}/{STRANGERS[0]}")
        if how == "first":
            bucket.delete([f"{MINE}/{name}" for name in STRANGERS])
        for number in range({"first": 0, "over": 1, "over twice": 2}[how]):
            self.save(bucket, MINE, 10 + number, overwrite=True)
        if how == "over":  # strangers came later: the first save has no folder of its own
            memory2 = Memory()
            bucket = MemoryBucket(memory2)
            self.save(bucket, MINE, 10)
            for name in STRANGERS:
                bucket.put(f"{MINE}/{name}", b"of a user")
            bucket.begin_upload(f"{MINE}/{STRANGERS[0]}")
            return memory2
        return memory

    def check_end(self, memory: Memory, how: str) -> None:
        """A save beside it tidies up, and strangers are as they were."""
        time.sleep(1.2 * SHORT)
        bucket = MemoryBucket(memory)
        self.save(bucket, LAST, 99, dead_after=SHORT)
        self.assertEqual(left_over(bucket, ROOT, OURS.probe), [])
        if how != "first":
            self.assertEqual({bucket.read(f"{MINE}/{name}")[0] for name in STRANGERS}, {b"of a user"})
        self.assertEqual([upload.key for upload in bucket.uploads("")], [f"{MINE}/{STRANGERS[0]}"])

    def every_request(self, how: str, conditions: bool, then: Any, probe: Any, **options: Any) -> None:
        """A save, which is stopped before its first request, before its second one, and so on."""
        kills = then is None
        first = len(how + probe.__qualname__) % self.every
        for nth in itertools.count(first, self.every):
            memory = self.begun(how)
            act: Callable[[], object] = str if kills else lambda memory=memory: then(memory)
            bucket = InterruptedBucket(memory, nth, act, kills=kills, conditions=conditions)
            error = None
            try:
                self.save(bucket, MINE, 1, overwrite=how != "first", **options)
            except (CheckpointError, OSError) as caught:
                error = caught
            what = bucket.calls[nth] if nth < len(bucket.calls) else "the end"
            with self.subTest(f"{how}, request {nth}, {what}, {error}"):
                probe(memory, error)
                self.check_end(memory, how)
            if nth >= len(bucket.calls):
                self.assertGreater(nth, 15)
                return

    @parameterized.expand([("first",), ("over",), ("over twice",)])
    def test_death(self, how: str) -> None:
        before = {"first": None, "over": 10, "over twice": 11}[how]
        ends: set[int | None] = set()

        def probe(memory: Memory, error: Exception | None) -> None:
            number = self.number_at(memory, MINE)
            ends.add(number)
            self.assertIn(number, (before, 1) if error is not None else (1,))

        self.every_request(how, True, None, probe)
        self.assertEqual(ends, {before, 1})

    def test_death_while_another_dead_save_is_removed(self) -> None:
        """Wherever the process that removes what a dead save has left dies too, a later save removes the rest."""
        place = ObjectPlace(f"memory://bucket/{MINE}", MINE)
        whole = InterruptedBucket(self.begun("over twice"))
        self.save(whole, MINE, 1, overwrite=True)
        last = max(nth for nth, call in enumerate(whole.calls) if call == f"put {place.manifest(OURS.probe.manifest)}")
        for nth in itertools.count():
            memory = self.begun("over twice")
            with contextlib.suppress(CheckpointError, OSError):
                self.save(InterruptedBucket(memory, last, kills=True), MINE, 1, overwrite=True)
            time.sleep(1.2 * SHORT)
            bucket = InterruptedBucket(memory, nth, kills=True)
            with contextlib.suppress(OSError):
                remove_dead(bucket, place, OURS.probe, SHORT)
            with self.subTest(f"request {nth}, {bucket.calls[-1]}"):
                self.check_end(memory, "over twice")
                self.assertEqual(self.number_at(memory, MINE), 11)
            if nth >= len(bucket.calls):
                break
        self.assertGreater(nth, 10)

    def test_beside_somebody_elses_model(self) -> None:
        """A pretrained model where a save goes has the names of our files; it stays, whatever becomes of the save."""
        names = ("model.safetensors", "model.safetensors.index.json", "optim.safetensors", "extra/common.safetensors")
        for nth in itertools.count(0, 3):
            memory = Memory()
            for name in names:
                MemoryBucket(memory).put(f"{MINE}/{name}", b"of a user")
            bucket = InterruptedBucket(memory, nth, str, kills=True)
            with contextlib.suppress(CheckpointError, OSError):
                self.save(bucket, MINE, 1)
            time.sleep(1.2 * SHORT)
            self.save(MemoryBucket(memory), LAST, 99, dead_after=SHORT)
            self.assertIn(self.number_at(memory, MINE), (None, 1))
            self.save(MemoryBucket(memory), MINE, 2, overwrite=True, dead_after=SHORT)
            with self.subTest(nth):
                self.assertEqual({MemoryBucket(memory).read(f"{MINE}/{name}")[0] for name in names}, {b"of a user"})
                self.assertEqual(self.number_at(memory, MINE), 2)
                self.assertEqual([key for key, *_ in memory.listed(f"{MINE}/.saving-")], [])
            if nth >= len(bucket.calls):
                return

    @parameterized.expand([("first",), ("over",), ("over twice",)])
    def test_taken_for_dead(self, how: str) -> None:
        """The save that is taken for dead fails, or it was committed; it never commits what another one has removed."""
        before = {"first": None, "over": 10, "over twice": 11}[how]

        def then(memory: Memory) -> None:
            time.sleep(1.2 * SHORT)
            remove_dead(MemoryBucket(memory), ObjectPlace(f"memory://bucket/{MINE}", MINE), OURS.probe, SHORT)

        def probe(memory: Memory, error: Exception | None) -> None:
            number = self.number_at(memory, MINE)
            self.assertIn(number, (before, 1) if error is not None else (1,))

        self.every_request(how, True, then, probe)

    @parameterized.expand(itertools.product(("first", "over", "over twice"), (True, False)))
    def test_another_save_to_the_same_place(self, how: str, conditions: bool) -> None:
        """With conditions one of two first saves wins, and the other raises."""
        before = {"first": None, "over": 10, "over twice": 11}[how]
        told: list[Exception | None] = []

        def then(memory: Memory) -> None:
            try:
                self.save(InterruptedBucket(memory, conditions=conditions), MINE, 2, overwrite=how != "first")
                told.append(None)
            except CheckpointError as error:
                told.append(error)

        def probe(memory: Memory, error: Exception | None) -> None:
            number_there = self.number_at(memory, MINE)
            self.assertNotEqual(number_there, before)
            if told:
                other = told.pop()
                if how == "first" and conditions:
                    self.assertEqual((error is None, other is None).count(True), 1, (error, other))
                self.assertTrue(error is None or other is None)
                self.assertIn(number_there, [number for number, failure in ((1, error), (2, other)) if failure is None])

        self.every_request(how, conditions, then, probe)


@pytest.mark.slow
class EveryRaceTest(RaceTest):
    every = 1


if __name__ == "__main__":
    unittest.main()
