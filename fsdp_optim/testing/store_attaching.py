"""The promises of `Store.attach`, which a store may leave out."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import Store
from fsdp_optim.testing.store_case import StoreCase

_NOTE = "note.json"


class AttachConformance(StoreCase):
    """The part of `StoreConformance` about `attach`; stores without `can_attach` skip most of it."""

    def _attachable(self) -> tuple[Store, Mapping[str, bytes]]:
        """Return a store that can attach, with a checkpoint; skip the test for another store."""
        store = self._new()
        if not store.can_attach:
            self._case.skipTest("this store cannot add a file to a checkpoint")
        files = {"model.safetensors": b"12345678"}
        self._save(store, files, b"one")
        return store, files

    def test_a_store_that_cannot_attach_says_so(self) -> None:
        """`attach` of a store without `can_attach` is refused; `can_attach` is the same on every handle."""
        store = self._new()
        self._case.assertEqual(self.another_handle(store).can_attach, store.can_attach)
        self._save(store, {"model.safetensors": b"12345678"}, b"one")
        if not store.can_attach:
            with store.open() as opened, self._refused(store.where):
                store.attach(opened, _NOTE, b"one")

    def test_attaching(self) -> None:
        """Any handle reads the file, a second call replaces it, and the checkpoint stays complete."""
        store, files = self._attachable()
        for data in (b"first", b"the second"):
            with store.open() as opened:
                store.attach(opened, _NOTE, data)
            with self.another_handle(store).open() as opened:
                self._case.assertTrue(opened.has(_NOTE))
                self._case.assertEqual(opened.read_whole(_NOTE), data)
            self._check(store, files, b"one")

    def test_attaching_to_what_another_save_replaced(self) -> None:
        """What is attached to a checkpoint that is gone does not come to the checkpoint that took its place."""
        store, files = self._attachable()
        with store.open() as opened:
            self._save(store, files, b"two", overwrite=True)
            try:
                store.attach(opened, _NOTE, b"of the first")
            except CheckpointError as error:
                self._case.assertIn(store.where, str(error))
        with self.another_handle(store).open() as opened:
            self._case.assertFalse(opened.has(_NOTE))
        self._check(store, files, b"two")
