"""What all tests of a Store share: a probe for checkpoints of any bytes, and saves of them by one process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import CheckpointProbe, CheckpointStatus, Opened, Staging, Store, StoreWriter
from fsdp_optim.testing.mix_in import MixIn

MANIFEST = "manifest.json"
BIG = 10_000  # bytes; of a file that is written in ranges, unless the store's parts are larger
WAYS_OUT = (
    "../outside",
    "/outside",
    "extra/../../outside",
    "",
    ".hidden",
    "a/b/c",
    "a.b/c",
    "extra/",
    "zero/../a.pt",
    "zero/a/b/c.pt",
)


@dataclass(frozen=True)
class AnySummary:
    """The summary of a checkpoint of any bytes: no checkpoint is older than another."""

    order: tuple[int, int, int, str] = (0, 0, 0, "")


class AnyManifest(CheckpointProbe[AnySummary]):
    """The probe of a format in which a manifest makes a checkpoint complete. A manifest is any line and the token of the save."""

    manifest = MANIFEST

    def status_in(self, opened: Opened, *, whole: bool) -> CheckpointStatus[AnySummary]:
        """Return whether there is a manifest."""
        return CheckpointStatus(AnySummary()) if opened.has(MANIFEST) else CheckpointStatus(reason="it has no manifest")

    def token_in(self, opened: Opened) -> str | None:
        """Return the second line of the manifest."""
        with contextlib.suppress(OSError):
            return opened.read_whole(MANIFEST).decode().partition("\n")[2]
        return None

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        """Count every file as written by a save."""
        return lambda name: True


class StoreCase(MixIn):
    """The base of mix-ins for a `unittest.TestCase` that test a Store.

    `make_store` gives a store at a place where nothing is; it is called more than once in some tests. `another_handle` gives
    another object for the same place, as another process would make it.
    """

    def make_store(self, probe: CheckpointProbe[AnySummary]) -> Store:
        """Return a store at a new, empty place."""
        raise NotImplementedError

    def another_handle(self, store: Store) -> Store:
        """Another object for the same place."""
        return store

    def _new(self) -> Store:
        return self.make_store(AnyManifest())

    def _begin(self, store: Store, *, overwrite: bool = False) -> Staging:
        return store.begin(overwrite=overwrite, durable=False)

    def _join(self, store: Store, staging: Staging, who: str = "rank 1") -> StoreWriter:
        return self.another_handle(store).join(staging.address, durable=False, who=who)

    def _write(self, store: Store, staging: Staging, files: Mapping[str, bytes]) -> StoreWriter:
        """Write files by one process: each in one range, behind a head of at most four bytes.

        The memory of the range is used for something else as soon as the call is over, as that of a save is.
        """
        writer = self._join(store, staging)
        for name, data in files.items():
            writer.create(name, len(data), data[:4])
            if data[4:]:
                used_again = bytearray(data[4:])
                writer.write(name, [memoryview(used_again)], 4)
                used_again[:] = bytes(len(used_again))
        return writer

    def _seal(self, staging: Staging, writers: Sequence[StoreWriter], names: Sequence[str]) -> None:
        staging.seal(names, [writer.finish() for writer in writers], durable=False)

    def _save(self, store: Store, files: Mapping[str, bytes], manifest: bytes, *, overwrite: bool = False) -> None:
        staging = self._begin(store, overwrite=overwrite)
        self._seal(staging, [self._write(store, staging, files)], list(files))
        self._commit(staging, manifest, durable=False)

    def _commit(self, staging: Staging, line: bytes, *, durable: bool) -> None:
        """Commit with a manifest of one line and the token, as formats write it."""
        staging.commit(MANIFEST, line + b"\n" + staging.token.encode(), durable=durable)

    def _line(self, opened: Opened) -> bytes:
        """Return the line of a manifest."""
        return self._read(opened, MANIFEST).partition(b"\n")[0]

    def _read(self, opened: Opened, name: str) -> bytes:
        return opened.read(name, 0, opened.size_of(name))

    def _check(self, store: Store, files: Mapping[str, bytes], manifest: bytes) -> None:
        with self.another_handle(store).open() as opened:
            self._case.assertEqual(self._line(opened), manifest)
            for name, data in files.items():
                self._case.assertEqual(self._read(opened, name), data, name)

    @contextlib.contextmanager
    def _refused(self, *words: str) -> Iterator[None]:
        """Expect a CheckpointError with these words."""
        with self._case.assertRaises(CheckpointError) as caught:
            yield
        for word in words:
            self._case.assertIn(word, str(caught.exception))

    def _data(self, nbytes: int) -> bytes:
        return random.Random(nbytes).randbytes(nbytes)
