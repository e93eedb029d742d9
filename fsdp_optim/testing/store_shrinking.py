"""The promises of `Store.shrink`, which a store may leave out."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Opened, Store
from fsdp_optim.testing.store_case import BIG, MANIFEST, WAYS_OUT, StoreCase


class ShrinkConformance(StoreCase):
    """The part of `StoreConformance` about `shrink`; stores without `can_shrink` skip most of it."""

    def _shrinkable(self) -> tuple[Store, Mapping[str, bytes]]:
        """Return a store that can shrink, with a checkpoint of two files; skip the test for another store."""
        store = self._new()
        if not store.can_shrink:
            self._case.skipTest("this store cannot shrink")
        files = {"model.safetensors": self._data(BIG), "optim.safetensors": self._data(BIG // 2)}
        self._save(store, files, b"one")
        return store, files

    def _smaller(self, opened: Opened) -> bytes:
        """Return the manifest of a checkpoint that is open, with another line and its own token."""
        return b"smaller\n" + self._read(opened, MANIFEST).partition(b"\n")[2]

    def _check_smaller(self, store: Store, files: Mapping[str, bytes]) -> None:
        self._check(store, {"model.safetensors": files["model.safetensors"]}, b"smaller")
        with self.another_handle(store).open() as opened:
            self._case.assertFalse(opened.has("optim.safetensors"))

    def test_a_store_that_cannot_shrink_says_so(self) -> None:
        """`shrink` of a store without `can_shrink` is refused and changes nothing; `can_shrink` is the same on every handle."""
        store = self._new()
        self._case.assertEqual(self.another_handle(store).can_shrink, store.can_shrink)
        files = {"model.safetensors": b"12345678", "optim.safetensors": b"87654321"}
        self._save(store, files, b"one")
        if not store.can_shrink:
            with store.open() as opened, self._refused(store.where):
                store.shrink(opened, MANIFEST, self._smaller(opened), ["optim.safetensors"])
            self._check(store, files, b"one")

    def test_shrinking(self) -> None:
        """The new manifest is there, its bytes are counted, the other files stay; a second call finds nothing to remove."""
        store, files = self._shrinkable()
        with store.open() as opened:
            freed = store.shrink(opened, MANIFEST, self._smaller(opened), ["optim.safetensors"])
        self._case.assertEqual(freed, len(files["optim.safetensors"]))
        self._check_smaller(store, files)
        with store.open() as opened:
            self._case.assertEqual(store.shrink(opened, MANIFEST, None, ["optim.safetensors"]), 0)
        self._check_smaller(store, files)

    def test_shrinking_what_another_save_replaced(self) -> None:
        """A checkpoint that has replaced an earlier one is shrunk as every other, and nothing of the earlier one comes back."""
        store, files = self._shrinkable()
        self._save(store, files, b"two", overwrite=True)
        with store.open() as opened:
            store.shrink(opened, MANIFEST, self._smaller(opened), ["optim.safetensors"])
        self._check_smaller(store, files)

    def test_a_shrink_that_was_killed_is_continued(self) -> None:
        """After a new manifest without a removal, the checkpoint is complete, and the next call removes the files."""
        store, files = self._shrinkable()
        with store.open() as opened:
            self._case.assertEqual(store.shrink(opened, MANIFEST, self._smaller(opened), []), 0)
        self._check(store, {"model.safetensors": files["model.safetensors"]}, b"smaller")
        with store.open() as opened:
            freed = store.shrink(opened, MANIFEST, None, ["optim.safetensors"])
        self._case.assertEqual(freed, len(files["optim.safetensors"]))
        self._check_smaller(store, files)

    def test_saving_over_what_was_shrunk(self) -> None:
        """A save over a shrunk checkpoint, also over one whose files were not yet removed, leaves only its own files."""
        for names in ([], ["optim.safetensors"]):
            with self._case.subTest(names=names):
                store, _ = self._shrinkable()
                with store.open() as opened:
                    store.shrink(opened, MANIFEST, self._smaller(opened), names)
                self._save(store, {"model.safetensors": b"second"}, b"two", overwrite=True)
                self._check(store, {"model.safetensors": b"second"}, b"two")
                with store.open() as opened:
                    self._case.assertFalse(opened.has("optim.safetensors"))

    def test_shrinking_after_a_replacement(self) -> None:
        """A checkpoint that was replaced since it was opened is not shrunk: the new one stays as it is."""
        store, files = self._shrinkable()
        with store.open() as opened:
            data = self._smaller(opened)
            self._save(self.another_handle(store), files, b"two", overwrite=True)
            with self._refused(store.where):
                store.shrink(opened, MANIFEST, data, ["optim.safetensors"])
        self._check(store, files, b"two")

    def test_a_reader_of_what_is_shrunk(self) -> None:
        """Who has the checkpoint open reads the files that stay, and the removed ones as they were, or gets an error."""
        store, files = self._shrinkable()
        with self.another_handle(store).open() as reading:
            with store.open() as opened:
                store.shrink(opened, MANIFEST, self._smaller(opened), ["optim.safetensors"])
            for name, data in files.items():
                try:
                    self._case.assertEqual(reading.read(name, 0, len(data)), data)
                except CheckpointError:
                    self._case.assertTrue(name == "optim.safetensors" or reading.was_replaced(), name)

    def test_shrinking_removes_nothing_outside(self) -> None:
        """Names that lead out of the checkpoint are refused before anything is changed."""
        store, files = self._shrinkable()
        for name in WAYS_OUT:
            with store.open() as opened, self._refused("not one of a checkpoint's own"):
                store.shrink(opened, MANIFEST, self._smaller(opened), ["optim.safetensors", name])
        self._check(store, files, b"one")
