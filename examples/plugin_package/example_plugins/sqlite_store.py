"""A store in one SQLite file: `sqlite:///data/run.db/step-1000`. All processes of one machine can write to it.

Only a `Bucket` is written here, objects under keys; `ObjectStore` makes a store of it.
"""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from fsdp_optim import CheckpointError
from fsdp_optim.plugins import (
    ABSENT,
    Bucket,
    BucketCan,
    CheckpointProbe,
    MissingObjectError,
    ObjectInfo,
    ObjectStore,
    OvertakenError,
)

_END = ".db"
_TABLES = """
CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data BLOB, version INTEGER, at REAL);
CREATE TABLE IF NOT EXISTS uploads (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT, at REAL);
CREATE TABLE IF NOT EXISTS parts (id INTEGER PRIMARY KEY AUTOINCREMENT, upload INTEGER, number INTEGER, data BLOB);
CREATE TABLE IF NOT EXISTS numbers (last INTEGER);
"""


def open_store(url: str, probe: CheckpointProbe[Any], options: Mapping[str, Any]) -> ObjectStore:
    """The store of the checkpoint at `sqlite:///path/to/file.db/prefix`.

    `options`: those of an ObjectStore, and `durable`: whether what was put survives a power cut.
    """
    path, end, prefix = url.removeprefix("sqlite://").partition(f"{_END}/")
    if not end:
        raise CheckpointError(f"{url}: must be sqlite:///path/to/file{_END}/name-of-the-checkpoint")
    own = dict(options)
    return ObjectStore(SqliteBucket(path + _END, durable=own.pop("durable", True)), prefix, probe, **own)


class SqliteBucket(Bucket):
    """Objects in one SQLite file."""

    name = ""
    can = BucketCan(parts_by_many=True, least_part_nbytes=1, most_parts=10_000)

    def __init__(self, path: str, *, durable: bool = True) -> None:
        self._path, self._durable = path, durable
        self.name = f"sqlite://{path}"
        with self._transaction() as database:
            for table in _TABLES.strip().splitlines():
                database.execute(table)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees what was written before it, and is seen as a whole. A connection serves one thread."""
        try:
            with closing(sqlite3.connect(self._path, timeout=60, isolation_level=None)) as database:
                if not self._durable:
                    database.execute("PRAGMA synchronous = OFF")
                database.execute("BEGIN IMMEDIATE")
                yield database
                database.execute("COMMIT")  # an exception closes the connection before, which takes everything back
        except sqlite3.Error as error:
            raise CheckpointError(f"{self.name}: {error}") from error

    def look(self, key: str) -> ObjectInfo | None:
        return next((found for found in self.list(key) if found.key == key), None)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._listed("SELECT key, length(data), version, at FROM objects", prefix)

    def uploads(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._listed("SELECT key, 0, id, at FROM uploads", prefix)

    def _listed(self, select: str, prefix: str) -> Iterator[ObjectInfo]:
        with self._transaction() as database:
            rows = database.execute(
                f"{select} WHERE substr(key, 1, ?) = ? ORDER BY key", (len(prefix), prefix)
            ).fetchall()
        return iter([ObjectInfo(key, nbytes, str(version), time.time() - at) for key, nbytes, version, at in rows])

    def folders(self, prefix: str) -> Iterator[str]:
        rest = (found.key[len(prefix) :] for found in self.list(prefix))
        return iter(sorted({prefix + name.partition("/")[0] for name in rest if "/" in name}))

    def read_into(self, key: str, pieces: Sequence[memoryview], offset: int, *, version: str | None = None) -> None:
        nbytes = sum(map(len, pieces))
        data, there = self._read(key, "substr(data, ?, ?)", (offset + 1, nbytes))
        if version is not None and there != version:
            raise OvertakenError(f"{self.name}/{key}: has been written again since it was opened")
        if len(data) != nbytes:
            raise CheckpointError(f"{self.name}/{key}: ends before byte {offset + nbytes}: it was cut short")
        ends = list(itertools.accumulate(map(len, pieces)))
        for piece, end in zip(pieces, ends, strict=True):
            piece[:] = data[end - len(piece) : end]

    def read(self, key: str) -> tuple[bytes, str]:
        return self._read(key, "data", ())

    def _read(self, key: str, what: str, values: tuple[int, ...]) -> tuple[bytes, str]:
        with self._transaction() as database:
            row = database.execute(f"SELECT {what}, version FROM objects WHERE key = ?", (*values, key)).fetchone()
        if row is None:
            raise MissingObjectError(f"{self.name}/{key}: there is no such object")
        return row[0] or b"", str(row[1])

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> str:
        with self._transaction() as database:
            return self._put(database, key, data, only_if)

    def _put(self, database: sqlite3.Connection, key: str, data: bytes, only_if: str | None) -> str:
        row = database.execute("SELECT version FROM objects WHERE key = ?", (key,)).fetchone()
        if only_if is not None and only_if != (str(row[0]) if row is not None else ABSENT):
            raise OvertakenError(f"{self.name}/{key}: another process has put or removed it")
        last = (database.execute("SELECT last FROM numbers").fetchone() or (0,))[0] + 1  # no version comes again
        database.execute("DELETE FROM numbers")
        database.execute("INSERT INTO numbers VALUES (?)", (last,))
        database.execute("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)", (key, data, last, time.time()))
        return str(last)

    def begin_upload(self, key: str) -> str:
        with self._transaction() as database:
            return str(database.execute("INSERT INTO uploads (key, at) VALUES (?, ?)", (key, time.time())).lastrowid)

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        with self._transaction() as database:
            self._check(database, key, upload)
            row = (upload, number, bytes(data))
            return str(database.execute("INSERT INTO parts (upload, number, data) VALUES (?, ?, ?)", row).lastrowid)

    def end_upload(self, key: str, upload: str, receipts: Sequence[str], *, only_if: str | None = None) -> str:
        with self._transaction() as database:
            self._check(database, key, upload)
            rows = database.execute("SELECT number, id, data FROM parts WHERE upload = ? ORDER BY id", (upload,))
            parts = {number: (str(receipt), data) for number, receipt, data in rows}  # the last one of each number
            if [parts.get(number, ("",))[0] for number in range(len(receipts))] != list(receipts):
                raise CheckpointError(f"{self.name}/{key}: a part of the upload {upload} is gone")
            version = self._put(database, key, b"".join(parts[number][1] for number in range(len(receipts))), only_if)
            self._drop(database, upload)
            return version

    def drop_upload(self, key: str, upload: str) -> None:
        with self._transaction() as database:
            self._drop(database, upload)

    def _drop(self, database: sqlite3.Connection, upload: str) -> None:
        database.execute("DELETE FROM parts WHERE upload = ?", (upload,))
        database.execute("DELETE FROM uploads WHERE id = ?", (upload,))

    def _check(self, database: sqlite3.Connection, key: str, upload: str) -> None:
        if database.execute("SELECT 1 FROM uploads WHERE id = ?", (upload,)).fetchone() is None:
            raise CheckpointError(f"{self.name}/{key}: the upload {upload} is gone")

    def delete(self, keys: Iterable[str]) -> None:
        with self._transaction() as database:
            database.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in keys])
