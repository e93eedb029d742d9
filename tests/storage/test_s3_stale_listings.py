"""Ranks that save where listings are stale: nothing complete is removed, and nothing incomplete is given.

The proxy answers half of the listings, at random, as it answered them when they were asked for first.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import Differs, check_same, error_text
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.options import as_options
from kit.proxy import Fault, Proxy
from kit.retention import path_of_step, save_managed
from kit.servers import Options, new_bucket, port_of, shared
from kit.store_calls import save_to
from kit.trained import Trained
from kit.wrapping import cpu

import fsdp_optim
from fsdp_optim.buckets.objects import MemoryBucket, ObjectInfo, ObjectStore
from fsdp_optim.checkpoint.catalog import listing as catalog
from fsdp_optim.checkpoint.catalog.retention import KnownSaves
from fsdp_optim.formats.own import OURS
from fsdp_optim.testing import run_on_ranks

KEEP_LAST, NUM_SAVES = 2, 3


def check_at(url: str, options: Options, numbers: range) -> int:
    """The number of the save that is at a URL; raises unless it is whole, and one of these saves. Called by all ranks."""
    other = Trained("FSDP2", adam, 1)
    loaded = fsdp_optim.load(
        url,
        other.model,
        other.optim,
        options=fsdp_optim.LoadOptions(storage_options=options, progress=False, compare=True),
    )
    number = int(loaded.state["number"])
    if number not in numbers or not all(bool((local_of(param) == number).all()) for param in other.params):
        raise Differs(f"{url}: save {number}, not all of one of the saves {numbers}")
    return number


def look(url: str, stale: Options, direct: Options, newest: int) -> str | None:
    """The result of `latest` where listings are stale, which is whole; on all ranks. Where they are not, it is `url`."""
    root = url.rpartition("/")[0]
    check_same("latest", fsdp_optim.latest(root, storage_options=direct), url)
    newest_place = [fsdp_optim.latest(root, storage_options=stale) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(newest_place)
    if newest_place[0] is not None:
        check_at(str(newest_place[0]), direct, range(1, newest + 1))
    return str(newest_place[0]) if newest_place[0] is not None else None


def save_and_look(root: str, stale: Options, direct: Options) -> list[str | None]:
    """The result of `latest` after each save."""
    given: list[str | None] = []
    with cpu():
        trained, known = Trained("FSDP2", adam, 1), KnownSaves()
        for number in range(1, NUM_SAVES + 1):
            with torch.no_grad():
                for param in trained.params:
                    local_of(param).fill_(number)
            asked: dict[str, Any] = {"storage_options": stale, "progress": False, "extra": {"number": number}}
            save_managed(root, number, trained.model, trained.optim, keep_last=KEEP_LAST, known=known, **asked)
            given.append(look(path_of_step(root, number), stale, direct, number))
            fsdp_optim.save(
                f"{root}/current",
                trained.model,
                trained.optim,
                overwrite=True,
                **as_options(fsdp_optim.SaveOptions, **asked),
            )
            given.append(look(f"{root}/current", stale, direct, number))
            check_at(f"{root}/current", direct, range(number, number + 1))
            for kept in range(max(1, number - KEEP_LAST + 1), number + 1):
                check_at(path_of_step(root, kept), direct, range(kept, kept + 1))
    return given


def save_number(root: str, number: int, options: Options, known: KnownSaves) -> None:
    trained = Trained("FSDP2", adam, 1)
    with torch.no_grad():
        for param in trained.params:
            local_of(param).fill_(number)
    asked: dict[str, Any] = {"storage_options": options, "extra": {"number": number}}
    save_managed(root, number, trained.model, trained.optim, keep_last=KEEP_LAST, known=known, **asked)


def save_beside_removed(root: str, stale: Options, direct: Options) -> None:
    """Every listing through `stale` is the one before step 3: it shows what was removed, and lacks the newest."""
    places, known = {number: path_of_step(root, number) for number in range(1, 6)}, KnownSaves()
    with cpu():
        for number in (1, 2):
            save_number(root, number, direct, known)
        first = dist.get_rank() == 0
        if first:
            check_same("latest", fsdp_optim.latest(root, storage_options=stale), places[2])
        dist.barrier()
        for number in (3, 4):
            save_number(root, number, direct, known)
        if first:
            check_same(
                "latest, where all that is listed was removed", fsdp_optim.latest(root, storage_options=stale), None
            )
        trained = Trained("FSDP2", adam, 1)
        asked: dict[str, Any] = {"storage_options": stale, "progress": False}
        error, words = error_text(
            lambda: fsdp_optim.load(
                places[1], trained.model, trained.optim, **as_options(fsdp_optim.LoadOptions, **asked)
            )
        )
        check_same("load of what was removed", (error, places[1] in words), ("CheckpointError", True))
        check_at(places[4], stale, range(4, 5))
        save_number(root, 5, stale, known)
        for number in (4, 5):
            check_at(places[number], direct, range(number, number + 1))
        if first:
            check_same("latest", fsdp_optim.latest(root, storage_options=direct), places[5])
        asked = {"storage_options": stale, "progress": False}
        error, words = error_text(
            lambda: fsdp_optim.save(
                places[4], trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **asked)
            )
        )
        check_same("save over one that is not listed", (error, "already exists" in words), ("CheckpointError", True))


class StaleBucket(MemoryBucket):
    """One that knows no conditions, and whose next listing of a place is empty where it `is_stale`."""

    is_stale = False

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> str:
        return super().put(key, data)

    def look(self, key: str) -> ObjectInfo | None:
        return next((entry for entry in super().list(key) if entry.key == key), None)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.is_stale and ".saving-" not in prefix:
            self.is_stale = False
            return iter(())
        return super().list(prefix)

    def folders(self, prefix: str) -> Iterator[str]:
        return iter(()) if self.is_stale else super().folders(prefix)


class OrderTest(unittest.TestCase):
    def test_a_save_that_does_not_see_the_others(self) -> None:
        """It is the newest nevertheless."""
        bucket, trained = StaleBucket(), Trained("plain", adam, 1)
        for number in range(1, 5):
            bucket.is_stale = number == 3
            store = ObjectStore(bucket, f"run/step-{number}", OURS.probe)
            save_to(store, trained)
            bucket.is_stale = False
            self.assertEqual(catalog.latest(store.directory()), f"memory://bucket/run/step-{number}")

    def test_a_save_that_does_not_see_what_it_replaces(self) -> None:
        """It puts its files beside those, and never removes its own."""
        bucket, trained = StaleBucket(), Trained("plain", adam, 1)
        store = ObjectStore(bucket, "run/current", OURS.probe)
        for bucket.is_stale in (False, True, True, False):
            save_to(store, trained, overwrite=True)
            with store.open() as opened:
                status = OURS.probe.status_in(opened, whole=True)
            self.assertTrue(status.is_complete, status.reason)


class StaleListingsTest(unittest.TestCase):
    options: Options

    @classmethod
    def setUpClass(cls) -> None:
        cls.options = {**shared("rclone"), "part_nbytes": 512}

    @expand(soon=[], later=[(0,), (1,), (2,)])
    def test_saves_where_listings_are_stale(self, seed: int) -> None:
        bucket = new_bucket(self.options)
        fault = Fault("Stale", method="GET", query="list-type=2", times=-1, share=0.5)
        with Proxy(port_of(self.options), [fault], seed=seed) as proxy:
            stale = proxy.options(self.options)
            by_rank = run_on_ranks(save_and_look, 2, f"s3://{bucket}/run", stale, self.options)
        self.assertGreater(fault.num_done, 10)
        self.assertGreater(len([newest for newest in by_rank[0] if newest is not None]), 0, by_rank[0])

    def test_listings_that_show_what_was_removed(self) -> None:
        bucket = new_bucket(self.options)
        fault = Fault("Stale", method="GET", query="list-type=2", times=-1)
        with Proxy(port_of(self.options), [fault]) as proxy:
            run_on_ranks(save_beside_removed, 2, f"s3://{bucket}/run", proxy.options(self.options), self.options)
        self.assertGreater(fault.num_done, 3)


if __name__ == "__main__":
    unittest.main()
