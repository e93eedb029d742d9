"""Checkpoints in a bucket: saved and loaded by one process and by ranks, in parts of several writers and of one."""

from __future__ import annotations

import itertools
import tempfile
import threading
import unittest
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoint_format import MANIFEST
from kit.checkpoints import everything, mine, scramble
from kit.compare import Differs, check_same, error_text
from kit.retention import save_managed
from kit.store_calls import load_from, save_in_background, save_to
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.buckets.objects import Memory, MemoryBucket, ObjectStore
from fsdp_optim.checkpoint.save.writing import RankWriter
from fsdp_optim.formats.own import OURS
from fsdp_optim.storage.base import Store
from fsdp_optim.testing import run_on_ranks

PARTS = (True, False)  # whether several ranks can put the parts of one file
PART_NBYTES = 1000
WRAPS = ("fairscale flat", "FSDP1 orig", "FSDP2", "DDP")


def store_in(memory: Any, prefix: str, by_many: bool = True) -> ObjectStore:
    return ObjectStore(MemoryBucket(memory, parts_by_many=by_many), prefix, OURS.probe, part_nbytes=PART_NBYTES)


class InOneProcessTest(unittest.TestCase):
    def setUp(self) -> None:
        self.memory, self.trained = Memory(), Trained("plain")

    @property
    def bucket(self) -> MemoryBucket:
        return MemoryBucket(self.memory)

    def store(self, prefix: str = "run/step-1", by_many: bool = True) -> ObjectStore:
        return store_in(self.memory, prefix, by_many)

    def keys(self) -> list[str]:
        return [entry.key for entry in (*self.bucket.list(""), *self.bucket.uploads(""))]

    def check_loads(self, store: Store, **options: Any) -> Any:
        other = Trained("plain", steps=0)
        scramble(other)
        restored = load_from(store, other, compare=True, **options)
        check_same("loaded", mine(other), mine(self.trained))
        return restored

    @parameterized.expand(itertools.product(PARTS, (4_000_000_000, 300, 1)))
    def test_bit_for_bit(self, by_many: bool, max_file_size: int) -> None:
        store = self.store(by_many=by_many)
        extra = {"step": 7, "tensor": torch.arange(3)}
        save_to(store, self.trained, max_file_size=max_file_size, extra=extra, per_rank_extra=[1.5], step=3)
        restored = self.check_loads(self.store())
        check_same("values", restored.state, {**extra, "per_rank_extra": [1.5]})
        check_same("per rank", restored.all_ranks, ({"per_rank_extra": [1.5]},))
        check_same("step", restored.step, 3)
        files = [name for name in self.files(store) if name.startswith("model")]
        self.assertEqual(len(files) > 3, max_file_size < 1000, files)

    def files(self, store: ObjectStore) -> dict[str, bytes]:
        """The files of a place, by name."""
        inside = store.place.inside
        return {entry.key.removeprefix(inside): self.bucket.read(entry.key)[0] for entry in self.bucket.list(inside)}

    @parameterized.expand([(size,) for size in (4_000_000_000, 300)])
    def test_the_files_are_those_of_a_folder(self, max_file_size: int) -> None:
        """Only the manifest has another token and another time."""
        store = self.store()
        save_to(store, self.trained, max_file_size=max_file_size, extra={"a": 1})
        stored = self.files(store)
        with tempfile.TemporaryDirectory() as folder:
            fsdp_optim.save(
                Path(folder, "step-1"),
                self.trained.model,
                self.trained.optim,
                options=fsdp_optim.SaveOptions(max_file_size=max_file_size, durable=False),
                state={"a": 1},
            )
            path = Path(folder, "step-1")
            expected = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        del expected[MANIFEST], stored[MANIFEST]
        self.assertGreater(len(expected), 4)
        self.assertEqual(stored, expected)

    @parameterized.expand([(part,) for part in PARTS])
    def test_every_flipped_byte_is_found(self, by_many: bool) -> None:
        store = self.store(by_many=by_many)
        save_to(store, self.trained, extra={"a": 1})
        target = Trained("plain", steps=1)
        before = everything(target)
        for key in self.keys():
            data = self.bucket.read(key)[0]
            for at in {0, len(data) // 2, len(data) - 1}:
                wrong = bytearray(data)
                wrong[at] ^= 1
                self.bucket.put(key, bytes(wrong))
                with self.subTest(key=key, at=at):
                    kind, text = error_text(lambda: load_from(self.store(), target))
                    if kind not in ("CheckpointError", "StateError"):
                        raise Differs(f"{key}, byte {at}: {kind}: {text}")
                    self.assertIn("memory://bucket/run/step-1", text)
                self.bucket.put(key, data)
        check_same("nothing was loaded", everything(target), before)
        self.check_loads(store)

    def test_missing_and_cut_objects(self) -> None:
        store = self.store()
        save_to(store, self.trained)
        saved = {key: self.bucket.read(key)[0] for key in self.keys()}
        for key, data in saved.items():
            for cut in (None, b"", data.rstrip(b"\n")[:-1], data[: len(data) // 2]):
                self.bucket.delete([key])
                if cut is not None:
                    self.bucket.put(key, cut)
                with self.subTest(key=key, cut=cut and len(cut)):
                    kind, text = error_text(lambda: load_from(store, Trained("plain", steps=1)))
                    self.assertEqual(kind, "CheckpointError", text)
                for name, whole in saved.items():
                    self.bucket.put(name, whole)
        self.check_loads(store)

    def test_overwriting(self) -> None:
        """An earlier checkpoint is refused, replaced when asked, and its objects go."""
        store = self.store()
        save_to(store, Trained("plain", steps=1))
        kind, text = error_text(lambda: save_to(store, self.trained))
        self.assertEqual((kind, "overwrite=True" in text), ("CheckpointError", True))
        names = set(self.files(store))
        for _ in range(3):  # the first one has the plain names, each other one a folder of its own
            save_to(store, self.trained, overwrite=True)
            self.check_loads(store)
            with store.open() as opened:
                folder = opened.files.token
            stored = {name.removeprefix(f"{folder}/") for name in self.files(store)}
            self.assertEqual(stored, names)
            self.assertEqual(len(self.keys()), len(names) + 1, "the manifest is in the folder too")

    def test_strangers_stay(self) -> None:
        """Objects that somebody has put beside the files are kept when the files are replaced, and when they are removed."""
        store = self.store()
        save_to(store, self.trained)
        self.bucket.put("run/step-1/config.json", b"{}")
        save_to(store, self.trained, overwrite=True)
        save_to(store, self.trained, overwrite=True)
        self.check_loads(store)
        self.assertEqual(self.bucket.read("run/step-1/config.json")[0], b"{}")

    def test_what_a_manager_keeps(self) -> None:
        root = f"memory://{self.id()}/run"
        for step in range(1, 6):
            save_managed(root, step, self.trained.model, self.trained.optim, keep_last=2)
        self.assertEqual([checkpoint.step for checkpoint in fsdp_optim.checkpoints(root)], [5, 4])
        self.assertEqual(fsdp_optim.latest(root), f"{root}/step-00000005")

    def test_sequence_numbers(self) -> None:
        """Each is above the others under one prefix, whatever the clocks say, and not below the time in milliseconds."""
        newest = {"run": 0, "other": 0}
        days = (20_000, 19_000, 18_000, 20_001)
        for day, prefix in zip(days, ("run/step-1", "run/step-2", "other/step-3", "run/step-2"), strict=True):
            now = day * 86_400_000
            with mock.patch("time.time_ns", lambda now=now: now * 1_000_000):
                save_to(self.store(prefix), self.trained, overwrite=True)
            root = prefix.partition("/")[0]
            with self.store(prefix).open() as opened:
                number = OURS.sequence_in(opened)
            self.assertEqual(number, max(newest[root] + 1, now))
            newest[root] = number

    def test_a_save_that_fails_leaves_nothing(self) -> None:
        class Full(Memory):
            def put(self, key: str, data: bytes, only_if: str | None) -> str | None:
                if key.endswith(".sums"):
                    raise CheckpointError("the store is full")
                return super().put(key, data, only_if)

        self.memory = Full()
        kind, text = error_text(lambda: save_to(self.store(), self.trained))
        self.assertEqual((kind, text), ("CheckpointError", "the store is full"))
        self.assertEqual(self.keys(), [])

    @parameterized.expand([(part,) for part in PARTS])
    def test_in_the_background(self, by_many: bool) -> None:
        """Later steps of the training are not saved; when the save is over, no note is left."""
        store, kept = self.store(by_many=by_many), Trained("plain")
        handle = save_in_background(store, kept, extra={"a": 1})
        scramble(kept)
        handle.wait()
        self.check_loads(store)
        self.assertEqual([key for key in self.keys() if ".saving-" in key], [])

    def test_a_failure_in_the_background(self) -> None:
        store = self.store()

        def fail(*args: Any) -> None:
            raise CheckpointError("the store went away")

        with mock.patch.object(self.memory, "put_part", fail):
            handle = save_in_background(store, self.trained, strategy="per_rank_files")
            kind, text = error_text(handle.wait)
        self.assertEqual((kind, text), ("CheckpointError", "rank 0: the store went away"))
        self.assertEqual(self.keys(), [])

    def test_what_it_cannot_do_is_refused(self) -> None:
        kind, text = error_text(lambda: save_to(self.store(by_many=False), self.trained, strategy="in_place"))
        self.assertEqual(kind, "CheckpointError")
        self.assertIn("in_place", text)
        self.assertEqual(self.keys(), [])


class Serving(BaseManager):
    """Gives ranks that are processes one bucket."""


class Asking(BaseManager):
    """Asks for it."""


Asking.register("bucket")


@contextmanager
def shared_bucket() -> Iterator[tuple[Any, bytes]]:
    """A bucket that is served by this process: where, and the key to it."""
    bucket, key = Memory(), b"of this test"
    Serving.register("bucket", callable=lambda: bucket)
    server = Serving(("127.0.0.1", 0), key).get_server()

    def serve() -> None:
        with suppress(SystemExit):  # which is how it ends
            server.serve_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.address, key
    finally:
        server.stop_event.set()  # type: ignore[attr-defined]
        thread.join(5)


def bucket_at(address: Any, key: bytes) -> Any:
    manager = Asking(address, key)
    manager.connect()
    return manager.bucket()  # type: ignore[attr-defined]


def save_on_ranks(address: Any, key: bytes, by_many: bool) -> list[Any]:
    """The part of each wrapper's model that each rank holds, and the part that it saved."""
    bucket = bucket_at(address, key)
    nbytes = []
    with cpu():
        for wrap in WRAPS:
            trained = Trained(wrap)
            store = store_in(bucket, f"run/{wrap}", by_many)
            options: dict[str, Any] = {"per_rank_extra": dist.get_rank(), "max_file_size": 500}
            saved = (
                save_in_background(store, trained, **options).wait()
                if wrap == "FSDP2"
                else save_to(store, trained, **options)
            )
            nbytes.append((saved.nbytes, saved.nbytes_written))
    return nbytes


def load_on_ranks(address: Any, key: bytes) -> None:
    """Every wrapper's checkpoint into every wrapper, beside what training gave it."""
    bucket = bucket_at(address, key)
    with cpu():
        for source, wrap in zip(WRAPS, (*WRAPS[1:], WRAPS[0]), strict=True):
            expected, other = Trained(wrap), Trained(wrap, steps=0)
            scramble(other)
            restored = load_from(store_in(bucket, f"run/{source}"), other, compare=True)
            check_same(f"{source} into {wrap}", mine(other), mine(expected))
            is_new = dist.get_rank() > 2
            check_same("per rank", restored.state.get("per_rank_extra"), None if is_new else dist.get_rank())


def one_rank_fails(address: Any, key: bytes, victim: int) -> tuple[str, str]:
    """A rank whose store cannot write: all raise its error, and nothing is there."""
    bucket = bucket_at(address, key)

    class Broken(ObjectStore):
        def join(self, *args: Any, **kwargs: Any) -> Any:
            writer = super().join(*args, **kwargs)
            if dist.get_rank() == victim:
                writer.write = no_room  # type: ignore[method-assign]
            return writer

    def no_room(*args: Any) -> None:
        raise CheckpointError("there is no room")

    with cpu():
        return error_text(
            lambda: save_to(
                Broken(MemoryBucket(bucket), "run/broken", OURS.probe, part_nbytes=PART_NBYTES), Trained("FSDP2")
            )
        )


def one_rank_fails_in_the_background(address: Any, key: bytes, victim: int) -> tuple[str, str]:
    bucket = bucket_at(address, key)
    with cpu():
        trained = Trained("FSDP2")
        with (
            mock.patch.object(RankWriter, "write", side_effect=CheckpointError("no room"))
            if (dist.get_rank() == victim)
            else nullcontext()
        ):
            return error_text(save_in_background(store_in(bucket, "run/broken"), trained).wait)


class OnRanksTest(unittest.TestCase):
    @expand(soon=tuple(PARTS)[:1], later=tuple(PARTS)[1:])
    def test_saved_on_three_and_loaded_on_fewer(self, by_many: bool) -> None:
        with shared_bucket() as (address, key):
            by_rank = run_on_ranks(save_on_ranks, 3, address, key, by_many)
            for name, wrap in zip(WRAPS, zip(*by_rank, strict=True), strict=True):
                self.assertEqual(sum(written for _, written in wrap), wrap[0][0], "every byte is written once")
                if name != "DDP":  # of small replicas, neighbours in a file are written by one rank
                    self.assertGreater(sum(written > 0 for _, written in wrap), 1, f"{name}: the ranks share the work")
            for world_size in (1, 2, 3):
                run_on_ranks(load_on_ranks, world_size, address, key)

    def test_one_rank_fails(self) -> None:
        with shared_bucket() as (address, key):
            for victim in range(2):
                told = run_on_ranks(one_rank_fails, 2, address, key, victim)
                check_same("told", told, [("CheckpointError", f"rank {victim}: there is no room")] * 2)
                self.assertEqual(bucket_at(address, key).listed(""), [])

    def test_one_rank_fails_in_the_background(self) -> None:
        with shared_bucket() as (address, key):
            for victim in range(3):
                told = run_on_ranks(one_rank_fails_in_the_background, 3, address, key, victim)
                check_same("told", told, [("CheckpointError", f"rank {victim}: no room")] * 3)
                self.assertEqual(bucket_at(address, key).listed(""), [])


if __name__ == "__main__":
    unittest.main()
