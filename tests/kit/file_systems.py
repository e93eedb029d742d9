"""File systems of fsspec as object stores have them, in memory: a file is seen when it is closed, and has a tag."""

from __future__ import annotations

import itertools
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile


class BufferedFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is sent in chunks, and completed by the last of them."""

    def _initiate_upload(self) -> None:
        self.sent = bytearray()

    def _upload_chunk(self, final: bool = False) -> bool:
        self.sent += self.buffer.getvalue()
        if final:
            self.fs.objects[self.path] = (bytes(self.sent), f"tag-{next(self.fs.tags)}")
        return True

    def discard(self) -> None:
        """Throw the chunks away."""
        self.fs.discarded.append(self.path)


class Buffered(AbstractFileSystem):  # type: ignore[misc]
    """Objects under paths. It keeps listings unless it is told not to, as most file systems of object stores do."""

    protocol = "buffered"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.tags = itertools.count(1)
        self.discarded: list[str] = []
        self.fails: dict[str, Exception] = {}  # by the name of a call

    def _raise(self, call: str) -> None:
        if call in self.fails:
            raise self.fails[call]

    def _entry(self, path: str) -> dict[str, Any]:
        data, tag = self.objects[path]
        return {"name": path, "size": len(data), "type": "file", "etag": tag}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Files, and folders, which are only names."""
        self._raise("ls")
        path = self._strip_protocol(path)
        entries: list[Any] = []
        if path not in self.dircache:
            below = [key for key in self.objects if key.startswith(f"{path}/")]
            folders = {f"{path}/{key[len(path) + 1 :].split('/')[0]}" for key in below if "/" in key[len(path) + 1 :]}
            files = [self._entry(key) for key in below if "/" not in key[len(path) + 1 :]]
            entries = files + [{"name": name, "size": 0, "type": "directory"} for name in folders]
            if not entries:
                raise FileNotFoundError(path)
            self.dircache[path] = entries
        known = self.dircache.get(path, entries)
        return known if detail else [entry["name"] for entry in known]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Of a file, or of a folder."""
        self._raise("info")
        path = self._strip_protocol(path)
        if path in self.objects:
            return self._entry(path)
        if any(key.startswith(f"{path}/") for key in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget all listings."""
        self.dircache.clear()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> BufferedFile:
        self._raise("open")
        return BufferedFile(self, path, mode, **{"block_size": 500, **options})

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """A range of a file."""
        self._raise("cat_file")
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][0][start:end]

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self._raise("rm_file")
        if self.objects.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Would make a bucket."""
        raise AssertionError("a bucket is made")

    makedirs = mkdir
