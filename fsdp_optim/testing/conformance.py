"""A test class for every Store; `fsdp_optim.storage.base` has the protocol.

    class TestMyStore(StoreConformance, unittest.TestCase):
        def make_store(self, probe):
            return MyStore(...)          # at a new, empty place, each time that it is called

A store is expected to keep its promises where its processes are on several machines, and where they are killed, too; no suite in
one process can show that.
"""

from __future__ import annotations

import contextlib
import itertools
import random

from fsdp_optim.errors import CheckpointError
from fsdp_optim.testing.store_attaching import AttachConformance
from fsdp_optim.testing.store_case import BIG, MANIFEST, WAYS_OUT
from fsdp_optim.testing.store_shrinking import ShrinkConformance


class StoreConformance(ShrinkConformance, AttachConformance):
    """A mix-in for a `unittest.TestCase`: the promises of a Store, one per test.

    `make_store` gives a store at a place where nothing is; it is called more than once in some tests. `another_handle` gives
    another object for the same place, as another process would make it.
    """

    def test_an_empty_place_is_no_checkpoint(self) -> None:
        """Nothing can be opened where nothing was saved."""
        store = self._new()
        with self._refused(store.where):
            store.open()

    def test_what_was_saved_is_read(self) -> None:
        """Files in ranges, an empty file, small files and the manifest are read as written, also through another handle."""
        store = self._new()
        staging = store.begin(overwrite=False, durable=True)
        writer = self.another_handle(store).join(staging.address, durable=True, who="rank 0")
        in_folder = {"zero/layer.weight/fp32.pt": b"\x01\x02\x03"}  # as formats of other tools have them
        files = {"model.safetensors": self._data(BIG), "empty.safetensors": b"", **in_folder}
        for name, data in files.items():
            writer.create(name, len(data), data[:8])
        writer.write("model.safetensors", [memoryview(files["model.safetensors"])[8:]], 8)
        small = {
            "extra/common.safetensors": b"small",
            "zero/layer.weight/step.pt": b"",
            "zero/optimizer_state.pt": b"s",
        }
        for name, data in small.items():
            writer.put(name, data)
        receipt = writer.finish()
        staging.seal(list(files), [receipt], durable=True)
        staging.put("model.safetensors.sums", b"sums", durable=True)
        self._commit(staging, b"one", durable=True)
        self._check(store, files | small | {"model.safetensors.sums": b"sums"}, b"one")

    def test_ranges_in_any_order_and_shape(self) -> None:
        """Ranges of all lengths, in pieces, in any order, and across the borders of parts."""
        store, rng = self._new(), random.Random(1)
        staging = self._begin(store)
        part = staging.capabilities.part_nbytes
        data = self._data(max(BIG, 2 * part + part // 3))
        borders = sorted({8, len(data), *(rng.randrange(8, len(data)) for _ in range(30))})
        ranges = list(itertools.pairwise(borders))
        rng.shuffle(ranges)
        writer = self._join(store, staging)
        writer.create("model.safetensors", len(data), data[:8])
        for start, stop in ranges:
            cuts = sorted({start, stop, rng.randrange(start, stop)})
            writer.write("model.safetensors", [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)], start)
        self._seal(staging, [writer], ["model.safetensors"])
        self._commit(staging, b"one", durable=False)
        self._check(store, {"model.safetensors": data}, b"one")

    def test_several_processes_write(self) -> None:
        """Several processes write ranges or whole parts of one file if the store can do that; else each writes its own file."""
        store = self._new()
        staging = self._begin(store)
        can = staging.capabilities
        size = can.part_nbytes if can.writes_ranges == "parts" else BIG // 3
        data = self._data(2 * size + size // 2)
        shared = can.writes_ranges != "no"
        if shared:
            staging.create("model.safetensors", len(data), data[:8])
        head = 8 if shared and can.writes_ranges != "parts" else 0  # whoever puts the first part puts the head too
        writers = [self._join(store, staging, f"rank {rank}") for rank in range(3)]
        files, names = {}, []
        for rank, (start, stop) in enumerate([(head, size), (size, 2 * size), (2 * size, len(data))]):
            writers[rank].put(f"extra/rank-{rank:05}.safetensors", b"%d" % rank)
            files[f"extra/rank-{rank:05}.safetensors"] = b"%d" % rank
            names.append("model.safetensors" if shared else f"model-{rank}.safetensors")
            if not shared:
                writers[rank].create(names[-1], stop - start, b"")
            writers[rank].write(names[-1], [memoryview(data)[start:stop]], start if shared else 0)
            files[names[-1]] = data if shared else data[start:stop]
        self._seal(staging, writers, sorted(set(names)))
        self._commit(staging, b"one", durable=False)
        self._check(store, files, b"one")

    def test_ranges_are_read_into_memory_that_is_there(self) -> None:
        """Adjacent pieces of a file fill separate memory, and no other memory is changed."""
        store, data = self._new(), self._data(BIG)
        self._save(store, {"model.safetensors": data}, b"one")
        target, expected = bytearray(b"\xff" * 100), bytearray(b"\xff" * 100)
        pieces = [memoryview(target)[10:30], memoryview(target)[50:50], memoryview(target)[60:61]]
        with store.open() as opened:
            opened.read_into("model.safetensors", pieces, 5000)
        expected[10:30], expected[60:61] = data[5000:5020], data[5020:5021]
        self._case.assertEqual(target, expected)

    def test_sizes_and_names(self) -> None:
        """`has` and `size_of` are right for present and missing files."""
        store = self._new()
        self._save(store, {"model.safetensors": b"12345"}, b"one")
        with store.open() as opened:
            self._case.assertEqual(opened.size_of("model.safetensors"), 5)
            self._case.assertEqual(opened.nbytes_of("model.safetensors"), 5)
            self._case.assertTrue(opened.has("model.safetensors"))
            self._case.assertFalse(opened.has("optim.safetensors"))
            self._case.assertIsNotNone(opened.version_of(MANIFEST))
            self._case.assertIsNone(opened.version_of("optim.safetensors"))
            with self._refused("optim.safetensors"):
                opened.size_of("optim.safetensors")

    def test_reading_beyond_the_end(self) -> None:
        """A read beyond the end raises an error, instead of leaving memory unfilled."""
        store = self._new()
        self._save(store, {"model.safetensors": b"12345"}, b"one")
        with store.open() as opened, self._refused("model.safetensors"):
            opened.read("model.safetensors", 3, 3)

    def test_no_name_leads_out(self) -> None:
        """Names that lead out of the checkpoint are refused, because they come from untrusted files."""
        store = self._new()
        self._save(store, {"model.safetensors": b"12345"}, b"one")
        with store.open() as opened:
            for name in WAYS_OUT:
                with self._refused(repr(name), "not one of a checkpoint's own"):  # as `storage.base.check_name` says it
                    opened.read(name, 0, 1)

    def test_nothing_is_seen_before_it_is_committed(self) -> None:
        """Nothing is visible before the commit, through another handle or through this one."""
        store, files = self._new(), {"model.safetensors": b"12345678"}
        staging = self._begin(store)
        writer = self._write(store, staging, files)
        for handle in (store, self.another_handle(store)):
            with self._refused():
                handle.open()
        self._seal(staging, [writer], list(files))
        with self._refused():
            store.open()
        self._commit(staging, b"one", durable=False)
        self._check(store, files, b"one")

    def test_an_abandoned_save_leaves_nothing(self) -> None:
        """After an abandoned save nothing is left, and the next save works."""
        store, files = self._new(), {"model.safetensors": b"12345678"}
        staging = self._begin(store)
        self._write(store, staging, files).discard()
        staging.abandon()
        with self._refused():
            store.open()
        self._save(store, files, b"two")
        self._check(store, files, b"two")

    def test_a_save_that_stops_halfway_is_no_checkpoint(self) -> None:
        """After a process has died without telling the store, the next save works and stays."""
        store, files = self._new(), {"model.safetensors": b"12345678"}
        staging = self._begin(store)
        self._write(store, staging, {"model.safetensors": b"other"})
        self._save(store, files, b"two")
        self._check(store, files, b"two")
        staging.abandon()
        self._check(store, files, b"two")

    def test_a_part_that_nobody_wrote(self) -> None:
        """A file in parts with missing bytes never becomes whole."""
        store = self._new()
        staging = self._begin(store)
        part = staging.capabilities.part_nbytes
        if not part:
            staging.abandon()
            self._case.skipTest("this store has no parts")
        writer = self._join(store, staging)
        writer.create("model.safetensors", 2 * part, b"1234")
        writer.write("model.safetensors", [memoryview(bytes(part))], part)
        with self._refused("model.safetensors"):
            writer.finish()
        writer.discard()
        staging.abandon()

    def test_what_is_there_is_not_overwritten_unasked(self) -> None:
        """Without overwrite=True the present checkpoint stays whole."""
        store, files = self._new(), {"model.safetensors": b"first"}
        self._save(store, files, b"one")
        with self._refused(store.where, "overwrite=True"):
            self._begin(store)
        self._check(store, files, b"one")

    def test_overwriting(self) -> None:
        """The old checkpoint is whole until the new one is; afterwards nothing of the old one is left."""
        store, first = self._new(), {"model.safetensors": b"first", "optim.safetensors": b"old"}
        self._save(store, first, b"one")
        staging = self._begin(store, overwrite=True)
        self._case.assertTrue(staging.replaces)
        self._seal(staging, [self._write(store, staging, {"model.safetensors": b"second"})], ["model.safetensors"])
        self._check(store, first, b"one")
        self._commit(staging, b"two", durable=False)
        self._check(store, {"model.safetensors": b"second"}, b"two")
        with store.open() as opened:
            self._case.assertFalse(opened.has("optim.safetensors"))

    def test_an_abandoned_overwriting_changes_nothing(self) -> None:
        """After a failed overwrite the earlier checkpoint stays."""
        store, first = self._new(), {"model.safetensors": b"first"}
        self._save(store, first, b"one")
        staging = self._begin(store, overwrite=True)
        self._write(store, staging, {"model.safetensors": b"second"}).discard()
        staging.abandon()
        self._check(store, first, b"one")

    def test_a_reader_hears_of_a_replacement(self) -> None:
        """A read after a replacement gives bytes of the old checkpoint or an error, and `was_replaced` is True."""
        store = self._new()
        self._save(store, {"model.safetensors": b"first"}, b"one")
        with store.open() as opened:
            self._case.assertFalse(opened.was_replaced())
            self._save(store, {"model.safetensors": b"other"}, b"two", overwrite=True)
            self._case.assertTrue(opened.was_replaced())
            with contextlib.suppress(CheckpointError):
                self._case.assertEqual(opened.read("model.safetensors", 0, 5), b"first")
        self._check(store, {"model.safetensors": b"other"}, b"two")

    def test_of_two_saves_one_wins(self) -> None:
        """Of two saves one raises an error, with and without an earlier checkpoint; the checkpoint of the other is whole."""
        for there in (False, True):
            with self._case.subTest(there=there):
                store = self._new()
                if there:
                    self._save(store, {"model.safetensors": b"first"}, b"one")
                saves = [self._begin(store, overwrite=there) for _ in range(2)]
                for number, staging in enumerate(saves):
                    writer = self._write(store, staging, {"model.safetensors": b"%d" % number})
                    self._seal(staging, [writer], ["model.safetensors"])
                self._commit(saves[1], b"won", durable=False)
                with self._refused(store.where):
                    self._commit(saves[0], b"lost", durable=False)
                saves[0].abandon()
                self._check(store, {"model.safetensors": b"1"}, b"won")

    def test_tokens_differ(self) -> None:
        """Two saves to one place have different tokens and addresses."""
        store = self._new()
        saves = [self._begin(store) for _ in range(2)]
        self._case.assertNotEqual(saves[0].token, saves[1].token)
        self._case.assertNotEqual(saves[0].address, saves[1].address)
        for staging in saves:
            staging.abandon()

    def test_a_file_that_nobody_created(self) -> None:
        """A write to a file that no process has created raises an error that names the writer."""
        store = self._new()
        staging = self._begin(store)
        writer = self._join(store, staging, "rank 7")
        with self._refused("rank 7", "model.safetensors"):
            writer.write("model.safetensors", [memoryview(b"x")], 0)
        writer.discard()
        staging.abandon()

    def test_siblings(self) -> None:
        """The siblings of a place include the place, so that the next sequence number is above its own."""
        store = self._new()
        self._save(store, {"model.safetensors": b"first"}, b"mine")
        manifests = []
        for opened in store.siblings():
            with opened, contextlib.suppress(CheckpointError):
                manifests.append(self._line(opened))
        self._case.assertEqual(manifests, [b"mine"])
