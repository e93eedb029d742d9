"""Checkpoints in a store that is no folder: saved and loaded through the protocol alone, by one process and by ranks."""

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
from kit.checkpoint_format import MARKER
from kit.checkpoints import everything, mine, scramble
from kit.wrapping import Differs, Trained, check_same, cpu, error_text
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.checkpoint.background import async_save
from fsdp_optim.checkpoint.restore import restore
from fsdp_optim.checkpoint.save import save
from fsdp_optim.checkpoint.writing import RankWriter
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.ours import OURS
from fsdp_optim.options import LoadOptions, Options, SaveOptions
from fsdp_optim.storage.base import Store
from fsdp_optim.storage.memory import Bucket, MemoryStore
from fsdp_optim.testing import run_on_ranks

PARTS = (0, 1000)
WRAPS = ("fairscale flat", "FSDP1 orig", "FSDP2", "DDP")


def call_of(trained: Trained) -> Options:
    return Options(process_group=trained.process_group)


def save_to(store: Store, trained: Trained, **options: Any) -> Any:
    given = SaveOptions(call_of(trained), durable=False, progress=False)
    return save(store, trained.model, trained.optim, SaveOptions(**{**vars(given), **options}))


def save_in_background(store: Store, trained: Trained, **options: Any) -> Any:
    given = SaveOptions(call_of(trained), durable=False, progress=False)
    return async_save(store, trained.model, trained.optim, SaveOptions(**{**vars(given), **options}))


def load_from(store: Store, trained: Trained, **options: Any) -> Any:
    return restore(store, trained.model, trained.optim, LoadOptions(call_of(trained), progress=False, **options))


class InOneProcessTest(unittest.TestCase):
    def setUp(self) -> None:
        self.bucket, self.trained = Bucket(), Trained("plain")

    def store(self, prefix: str = "run/step-1", part_nbytes: int = 0) -> MemoryStore:
        return MemoryStore(self.bucket, prefix, part_nbytes=part_nbytes)

    def check_loads(self, store: Store, **options: Any) -> Any:
        other = Trained("plain", steps=0)
        scramble(other)
        restored = load_from(store, other, check="bitwise", **options)
        check_same("loaded", mine(other), mine(self.trained))
        return restored

    @parameterized.expand(itertools.product(PARTS, (4_000_000_000, 300, 1)))
    def test_bit_for_bit(self, part_nbytes: int, max_file_size: int) -> None:
        store = self.store(part_nbytes=part_nbytes)
        extra = {"step": 7, "tensor": torch.arange(3)}
        save_to(store, self.trained, max_file_size=max_file_size, extra=extra, per_rank_extra=[1.5], step=3)
        restored = self.check_loads(self.store())
        check_same("extra", dict(restored), extra)
        check_same("per rank", (restored.per_rank, restored.all_ranks), ([1.5], ([1.5],)))
        check_same("step", restored.summary.step, 3)
        files = [name for name in self.files(store) if name.startswith("model")]
        self.assertEqual(len(files) > 3, max_file_size < 1000, files)

    def files(self, store: MemoryStore) -> dict[str, bytes]:
        """What the save that counts has written, by name."""
        keys = [key for key in self.bucket.keys(store.prefix) if "\n" in key]
        return {key.split("\n")[1].split("/", 1)[1]: self.bucket.get(key, 0, 1 << 30) for key in keys}

    @parameterized.expand([(size,) for size in (4_000_000_000, 300)])
    def test_the_files_are_those_of_a_folder(self, max_file_size: int) -> None:
        """Only the marker has another token and another time."""
        store = self.store()
        save_to(store, self.trained, max_file_size=max_file_size, extra={"a": 1})
        found = self.files(store)
        with tempfile.TemporaryDirectory() as folder:
            fsdp_optim.save(
                Path(folder, "step-1"),
                self.trained.model,
                self.trained.optim,
                max_file_size=max_file_size,
                extra={"a": 1},
                durable=False,
            )
            path = Path(folder, "step-1")
            expected = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        del expected[MARKER]
        self.assertGreater(len(expected), 4)
        self.assertEqual(found, expected)

    @parameterized.expand([(part,) for part in PARTS])
    def test_every_flipped_byte_is_found(self, part_nbytes: int) -> None:
        store = self.store(part_nbytes=part_nbytes)
        save_to(store, self.trained, extra={"a": 1})
        target = Trained("plain", steps=1)
        before = everything(target)
        for key in self.bucket.keys(store.prefix):
            data = self.bucket.get(key, 0, 1 << 30)
            for at in {0, len(data) // 2, len(data) - 1}:
                wrong = bytearray(data)
                wrong[at] ^= 1
                tag = self.bucket.tag_of(key)
                self.bucket.put(key, bytes(wrong), tag or "")
                with self.subTest(key=key, at=at):
                    kind, text = error_text(lambda: load_from(self.store(), target))
                    if kind not in ("CheckpointError", "StateError"):
                        raise Differs(f"{key}, byte {at}: {kind}: {text}")
                    self.assertIn("memory:run/step-1", text)
                self.bucket.put(key, data, tag or "")
        check_same("nothing was loaded", everything(target), before)
        self.check_loads(store)

    def test_missing_and_cut_objects(self) -> None:
        store = self.store()
        save_to(store, self.trained)
        saved = {key: (self.bucket.get(key, 0, 1 << 30), self.bucket.tag_of(key)) for key in self.bucket.keys("")}
        for key, (data, tag) in saved.items():
            for cut in (None, b"", data[:-1], data[: len(data) // 2]):
                self.bucket.delete(key)
                if cut is not None:
                    self.bucket.put(key, cut, tag or "")
                with self.subTest(key=key, cut=cut and len(cut)):
                    kind, text = error_text(lambda: load_from(store, Trained("plain", steps=1)))
                    self.assertEqual(kind, "CheckpointError", text)
                for name, (whole, its) in saved.items():
                    self.bucket.put(name, whole, its or "")
        self.check_loads(store)

    def test_overwriting(self) -> None:
        """What was there is refused, replaced when asked, and its objects go."""
        store = self.store()
        save_to(store, Trained("plain", steps=1))
        kind, text = error_text(lambda: save_to(store, self.trained))
        self.assertEqual((kind, "overwrite=True" in text), ("CheckpointError", True))
        keys = len(self.bucket.keys(""))
        save_to(store, self.trained, overwrite=True)
        self.check_loads(store)
        self.assertEqual(len(self.bucket.keys("")), keys)

    def test_sequence_numbers(self) -> None:
        """Of the places under one prefix."""
        for number, prefix in enumerate(("run/step-1", "run/step-2", "other/step-3", "run/step-2"), start=1):
            save_to(self.store(prefix), self.trained, overwrite=True)
            with self.store(prefix).open() as opened:
                self.assertEqual(OURS.sequence_in(opened), 1 if prefix.startswith("other") else min(number, 3))

    def test_a_save_that_fails_leaves_nothing(self) -> None:
        class Full(Bucket):
            def put(self, key: str, data: bytes, tag: str = "") -> None:
                if key.endswith(".sums"):
                    raise CheckpointError("the store is full")
                super().put(key, data, tag)

        self.bucket = Full()
        kind, text = error_text(lambda: save_to(self.store(), self.trained))
        self.assertEqual((kind, text), ("CheckpointError", "the store is full"))
        self.assertEqual(self.bucket.keys(""), [])

    @parameterized.expand([(part,) for part in PARTS])
    def test_in_the_background(self, part_nbytes: int) -> None:
        """What the training does meanwhile is not saved; when it is over, no note is left."""
        store, kept = self.store(part_nbytes=part_nbytes), Trained("plain")
        handle = save_in_background(store, kept, extra={"a": 1})
        scramble(kept)
        handle.wait()
        self.check_loads(store)
        self.assertEqual([key for key in self.bucket.keys("") if ":" in key], [])

    def test_a_failure_in_the_background(self) -> None:
        store = self.store()

        def fail(*args: Any) -> None:
            raise CheckpointError("the store went away")

        with mock.patch.object(self.bucket, "put_range", fail):
            handle = save_in_background(store, self.trained, strategy="per_rank_files")
            kind, text = error_text(handle.wait)
        self.assertEqual((kind, text), ("CheckpointError", "rank 0: the store went away"))
        self.assertEqual(self.bucket.keys(""), [])

    @parameterized.expand([("keep_last=", {"keep_last": 1}), ("in_place", {"strategy": "in_place"})])
    def test_what_it_cannot_do_is_refused(self, words: str, options: dict[str, Any]) -> None:
        kind, text = error_text(lambda: save_to(self.store(part_nbytes=1000), self.trained, **options))
        self.assertEqual(kind, "CheckpointError")
        self.assertIn(words, text)
        self.assertEqual(self.bucket.keys(""), [])


class Serving(BaseManager):
    """Gives ranks that are processes one bucket."""


class Asking(BaseManager):
    """Asks for it."""


Asking.register("bucket")


@contextmanager
def shared_bucket() -> Iterator[tuple[Any, bytes]]:
    """A bucket that is served by this process: where, and the key to it."""
    bucket, key = Bucket(), b"of this test"
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


def save_on_ranks(address: Any, key: bytes, part_nbytes: int) -> list[Any]:
    """What each rank holds of each wrapper's model, and what it saved of it."""
    bucket = bucket_at(address, key)
    found = []
    with cpu():
        for wrap in WRAPS:
            trained = Trained(wrap)
            store = MemoryStore(bucket, f"run/{wrap}", part_nbytes=part_nbytes)
            options: dict[str, Any] = {"per_rank_extra": dist.get_rank(), "max_file_size": 500}
            saved = (
                save_in_background(store, trained, **options).wait()
                if wrap == "FSDP2"
                else save_to(store, trained, **options)
            )
            found.append((saved.nbytes, saved.nbytes_written))
    return found


def load_on_ranks(address: Any, key: bytes) -> None:
    """Every wrapper's checkpoint into every wrapper, beside what training gave it."""
    bucket = bucket_at(address, key)
    with cpu():
        for source, wrap in zip(WRAPS, (*WRAPS[1:], WRAPS[0]), strict=True):
            expected, other = Trained(wrap), Trained(wrap, steps=0)
            scramble(other)
            restored = load_from(MemoryStore(bucket, f"run/{source}"), other, check="bitwise")
            check_same(f"{source} into {wrap}", mine(other), mine(expected))
            check_same("per rank", restored.per_rank, min(dist.get_rank(), 2))


def one_rank_fails(address: Any, key: bytes, victim: int) -> tuple[str, str]:
    """A rank whose store cannot write: all raise its error, and nothing is there."""
    bucket = bucket_at(address, key)

    class Broken(MemoryStore):
        def join(self, *args: Any, **kwargs: Any) -> Any:
            writer = super().join(*args, **kwargs)
            if dist.get_rank() == victim:
                writer.write = no_room  # type: ignore[method-assign]
            return writer

    def no_room(*args: Any) -> None:
        raise CheckpointError("there is no room")

    with cpu():
        return error_text(lambda: save_to(Broken(bucket, "run/broken"), Trained("FSDP2")))


def one_rank_fails_in_the_background(address: Any, key: bytes, victim: int) -> tuple[str, str]:
    bucket = bucket_at(address, key)
    with cpu():
        trained = Trained("FSDP2")
        with (
            mock.patch.object(RankWriter, "write", side_effect=CheckpointError("no room"))
            if (dist.get_rank() == victim)
            else nullcontext()
        ):
            return error_text(save_in_background(MemoryStore(bucket, "run/broken"), trained).wait)


class OnRanksTest(unittest.TestCase):
    @parameterized.expand([(part,) for part in PARTS])
    def test_saved_on_three_and_loaded_on_fewer(self, part_nbytes: int) -> None:
        with shared_bucket() as (address, key):
            by_rank = run_on_ranks(save_on_ranks, 3, address, key, part_nbytes)
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
                self.assertEqual(bucket_at(address, key).keys(""), [])

    def test_one_rank_fails_in_the_background(self) -> None:
        with shared_bucket() as (address, key):
            for victim in range(3):
                told = run_on_ranks(one_rank_fails_in_the_background, 3, address, key, victim)
                check_same("told", told, [("CheckpointError", f"rank {victim}: no room")] * 3)
                self.assertEqual(bucket_at(address, key).keys(""), [])


if __name__ == "__main__":
    unittest.main()
