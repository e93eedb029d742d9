"""A bucket over any file system of fsspec: `gs://`, `az://`, `hf://`, `sftp://`, `memory://`, `file://`.

fsspec knows no parts of several writers: one process writes a file, from begin to end. It knows no conditions either, with one
exception: that nothing is there. Another condition is compared with what is there just before the object is put.

Files of this machine, and of what is mounted on it, are opened for writing once, as new files, and written without seeks. Only an
object that is put over another one is renamed; where the file system refuses that, the other one is removed first.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsdp_optim.buckets.fsspec.infos import has_tag, time_of, version_of
from fsdp_optim.buckets.fsspec.opening import file_system_at, is_local, secrets_in, split_url
from fsdp_optim.buckets.fsspec.uploads import FileUpload
from fsdp_optim.buckets.objects.base import ABSENT, Bucket, BucketCan, MissingObjectError, ObjectInfo, OvertakenError
from fsdp_optim.errors import CheckpointError, one_line, without
from fsdp_optim.storage.base import Undecided

_WITH_FOLDERS = {"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs", "webdav", "dbfs"}
"""On these, files are in folders that must be made. Elsewhere making one could make a bucket."""

_MISSING = (FileNotFoundError, NotADirectoryError)
_PUT = ".put-"  # the beginning of the name of a file that takes the name of another one when it is complete
_ATTEMPTS = 5  # where another process removes the empty folder that a file is to be in; where an object changes while it is read
_AT_ONCE = 16


class FsspecBucket(Bucket):
    """A folder of a file system, as a bucket.

    Args:
        fs: a file system of fsspec that keeps no listings.
        root: the path of the folder.
        name: the URL of the folder, without secrets.
        secrets: words that must not be in errors.
    """

    def __init__(self, fs: Any, root: str, name: str, *, secrets: Iterable[str] = ()) -> None:
        self._fs, self._root, self._name, self._secrets = fs, root.rstrip("/"), name, tuple(secrets)
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._has_folders, self._is_local = bool(protocols & _WITH_FOLDERS), is_local(fs)
        self._uploads: dict[str, FileUpload] = {}
        self._numbers = itertools.count(1)
        self._shown: tuple[float, float] | None = None  # the store's time of what was put last, and this process's then

    @classmethod
    def at(cls, url: str, options: Mapping[str, Any] | None = None) -> tuple[FsspecBucket, str]:
        """Return the bucket and the key of the place of a checkpoint. `options`: the arguments of its file system.

        Raises CheckpointError for a scheme that fsspec does not know, and for one whose package is missing.
        """
        name, prefix = split_url(url)
        fs, path = file_system_at(url.rstrip("/"), options or {})
        root = path.rpartition("/")[0] if prefix else path
        return cls(fs, root, name, secrets=secrets_in(options or {})), prefix

    @property
    def name(self) -> str:
        return self._name

    @property
    def local_folder(self) -> str | None:
        """The path of the folder, where its files are on this machine or mounted on it."""
        return self._root if self._is_local else None

    @property
    def can(self) -> BucketCan:
        return BucketCan(parts_by_many=False, least_part_nbytes=1)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _key(self, path: str) -> str:
        return path.removeprefix(f"{self._root}/")

    @contextlib.contextmanager
    def _errors(self, key: str, what: str) -> Iterator[None]:
        """Every error of a client as the one line of a CheckpointError."""
        where = f"{self.name}/{key}" if key else self.name
        try:
            yield
        except (CheckpointError, MemoryError):
            raise
        except _MISSING as error:
            missing = "there is no such object" if what != "written" else f"cannot be written: {self._words(error)}"
            raise MissingObjectError(f"{where}: {missing}") from error
        except FileExistsError as error:
            raise OvertakenError(f"{where}: another process has put it") from error
        except Exception as error:
            line = f"{where}: cannot be {what}: {type(error).__name__}: {self._words(error)}"
            raise CheckpointError(line) from (error if isinstance(error, OSError) and error.errno else Undecided(line))

    def _words(self, error: BaseException) -> str:
        return without(self._secrets, one_line(error))

    def look(self, key: str) -> ObjectInfo | None:
        return None if key in self._hidden() else self._look(key)

    def _hidden(self) -> set[str]:
        """Return the keys of files that this process is writing."""
        return {upload.key for upload in list(self._uploads.values()) if upload.has_file}

    def _look(self, key: str) -> ObjectInfo | None:
        info = self._info(key)
        return None if info is None else self._object_info(key, info)

    def _info(self, key: str) -> Mapping[str, Any] | None:
        with self._errors(key, "looked at"):
            self._fs.invalidate_cache()
            try:
                info: Mapping[str, Any] = self._fs.info(self._path(key))
            except _MISSING:
                return None
            if info.get("islink"):
                raise CheckpointError(f"{self.name}/{key}: is a symbolic link, and checkpoints have no links")
            return info if info["type"] == "file" else None

    def _object_info(self, key: str, info: Mapping[str, Any]) -> ObjectInfo:
        return ObjectInfo(key, int(info["size"]), version_of(info), self._age(time_of(info)))

    def _age(self, written: float | None) -> float:
        """Seconds by the clock of the store, which shows when this process has put something; never by the machine's own clock.

        0 before, and where the store does not tell the time, so that objects which may be new are not removed.
        """
        if written is None or self._shown is None:
            return 0.0
        store_time, own_time = self._shown
        return max(store_time + (time.monotonic() - own_time) - written, 0.0)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        hidden = self._hidden()
        listed = (info for info in self._listed(prefix) if info.key not in hidden)
        return iter(sorted((info for info in listed if not _is_being_put(info.key)), key=lambda info: info.key))

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        for info in self._walk(prefix.rpartition("/")[0], prefix):
            key = self._key(info["name"])
            if key.startswith(prefix):
                yield self._object_info(key, info)

    def _walk(self, folder: str, prefix: str) -> Iterator[Mapping[str, Any]]:
        """Yield all files in a folder and below. Folders whose files cannot have the prefix are not entered."""
        for info in self._ls(folder):
            key = self._key(info["name"].rstrip("/"))
            if info["type"] == "file":
                yield info
            elif info["type"] == "directory" and (f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/")):
                yield from self._walk(key, prefix)

    def _ls(self, folder: str) -> Sequence[Mapping[str, Any]]:
        path = f"{self._root}/{folder}".rstrip("/")
        with self._errors(folder, "listed"):
            self._fs.invalidate_cache()
            try:
                infos = self._fs.ls(path, detail=True)
            except _MISSING:
                return []
        return [info for info in infos if info["name"].rstrip("/") != path]  # some name the folder, or a file, itself

    def folders(self, prefix: str) -> Iterator[str]:
        infos = [info for info in self._ls(prefix.rpartition("/")[0]) if info["type"] == "directory"]
        keys = {self._key(info["name"].rstrip("/")) for info in infos}
        return iter(sorted(key for key in keys if key.startswith(prefix)))

    def read_into(self, key: str, pieces: Sequence[memoryview], offset: int, *, version: str | None = None) -> None:
        targets = [piece.cast("B") for piece in pieces if piece.nbytes]
        nbytes = sum(map(len, targets))
        failure: Exception | None = None
        data = b""
        try:
            with self._errors(key, "read"):
                data = self._fs.cat_file(self._path(key), start=offset, end=offset + nbytes) if nbytes else b""
        except CheckpointError as error:
            failure = error
        info = self._look(key)  # after the read, so that the bytes are of this version, or an error is raised
        if info is None:
            raise MissingObjectError(f"{self.name}/{key}: there is no such object") from failure
        if version is not None and info.version != version:
            raise OvertakenError(f"{self.name}/{key}: has been written again since it was opened") from failure
        if offset + nbytes > info.nbytes and nbytes:
            raise CheckpointError(f"{self.name}/{key}: ends at byte {info.nbytes}: it was cut short")
        if failure is not None:
            raise failure
        if len(data) != nbytes:
            line = f"{self.name}/{key}: the store gave {len(data)} bytes instead of {nbytes}"
            raise CheckpointError(line) from Undecided(line)
        at = 0
        for target in targets:
            target[:] = data[at : at + len(target)]
            at += len(target)

    def read(self, key: str) -> tuple[bytes, str]:
        for _ in range(_ATTEMPTS):
            before = self._look(key)
            with self._errors(key, "read"):
                data = bytes(self._fs.cat_file(self._path(key))) if before is not None else b""
            after = self._look(key)
            if before is None or after is None:
                raise MissingObjectError(f"{self.name}/{key}: there is no such object")
            if before.version == after.version and len(data) == after.nbytes:
                return data, after.version
        line = f"{self.name}/{key}: is written again and again"
        raise CheckpointError(line) from Undecided(line)

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> str:
        before = self._info(key) if only_if is not None or self._is_local else None
        self._check(key, only_if, before)
        write = self._write_local if self._is_local else self._write
        for pause in (0.005, 0.05, 0.5, 2.5, None):
            write(key, data, only_if, before is not None)
            after = self._written(key)
            is_new = before is None or has_tag(after) or version_of(after) != version_of(before)
            if is_new or pause is None:
                break
            time.sleep(pause)  # the clock of the file system is too coarse to distinguish the two files
        return version_of(after)

    def _check(self, key: str, only_if: str | None, info: Mapping[str, Any] | None) -> None:
        if only_if is not None and only_if != (ABSENT if info is None else version_of(info)):
            raise OvertakenError(f"{self.name}/{key}: another process has put or removed it")

    def _written(self, key: str) -> Mapping[str, Any]:
        """Return the store's description of an object that was put just now."""
        info = self._info(key)
        if info is None:
            line = f"{self.name}/{key}: was written, and is not there"
            raise CheckpointError(line) from Undecided(line)
        written = time_of(info)
        self._shown = (written, time.monotonic()) if written is not None else None
        return info

    def _write(self, key: str, data: bytes, only_if: str | None, is_there: bool) -> None:
        """Write a small object."""
        put = self._fs.pipe_file
        is_exclusive = only_if == ABSENT and not is_there and "mode" in inspect.signature(put).parameters
        options = {"mode": "create"} if is_exclusive else {}
        with self._errors(key, "written"):
            self._in_folder(key, lambda: put(self._path(key), data, **options))

    def _in_folder(self, key: str, write: Callable[[], Any]) -> Any:
        """Call a function that makes a file, and make the folder of that file first where it is missing."""
        for _ in range(_ATTEMPTS):
            try:
                return write()
            except FileNotFoundError:
                if not self._has_folders:
                    raise
            self._fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)  # others remove it while it is empty
        return write()

    def _write_local(self, key: str, data: bytes, only_if: str | None, is_there: bool) -> None:
        path = self._path(key)
        with self._errors(key, "written"):
            if is_there or only_if == ABSENT:  # a reader sees it whole, where the file system allows that
                temporary = f"{path.rpartition('/')[0]}/{_PUT}{secrets.token_hex(8)}"
                self._create(key, temporary, data)
                try:
                    (self._fs.mv if is_there else self._fs.link)(temporary, path)
                except FileExistsError:
                    raise
                except OSError:
                    if is_there:
                        with contextlib.suppress(*_MISSING):
                            self._fs.rm_file(path)
                    self._create(key, path, data)
                finally:
                    with contextlib.suppress(*_MISSING):
                        self._fs.rm_file(temporary)
                return
            self._create(key, path, data)

    def _create(self, key: str, path: str, data: bytes) -> None:
        with self._in_folder(key, lambda: self._fs.open(path, "xb")) as file:
            file.write(data)

    def begin_upload(self, key: str) -> str:
        def open_file() -> Any | None:
            with self._errors(key, "written"):
                if self._info(key) is not None:
                    return None  # the file stays until the upload ends
                return self._in_folder(key, lambda: self._fs.open(self._path(key), "xb" if self._is_local else "wb"))

        upload = f"upload-{next(self._numbers)}"
        self._uploads[upload] = FileUpload(f"{self.name}/{key}", key, open_file)
        return upload

    def _upload(self, key: str, upload: str) -> FileUpload:
        file_upload = self._uploads.get(upload)
        if file_upload is None:
            raise CheckpointError(f"{self.name}/{key}: the upload {upload} is gone")
        return file_upload

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        """Write a part, when its predecessors are written. fsspec offers no checksum by which a store could verify it."""
        file_upload = self._upload(key, upload)
        with self._errors(key, "written"):
            return file_upload.put(number, data)

    def end_upload(self, key: str, upload: str, receipts: Sequence[str], *, only_if: str | None = None) -> str:
        file_upload = self._upload(key, upload)
        file_upload.check(receipts)
        if only_if is not None:
            self._check(key, only_if, None if file_upload.has_file else self._info(key))
        with self._errors(key, "written"):
            whole = file_upload.end()
        version = self.put(key, whole, only_if=only_if) if whole is not None else version_of(self._written(key))
        del self._uploads[upload]
        return version

    def drop_upload(self, key: str, upload: str) -> None:
        if upload.startswith(_PUT):
            return self.delete([key])
        file_upload = self._uploads.pop(upload, None)
        if file_upload is not None and file_upload.drop():
            self.delete([key])
        return None

    def uploads(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the uploads of this process, and temporary files of objects.

        Other stores remove unfinished uploads by themselves.
        """
        for name, upload in list(self._uploads.items()):
            if upload.key.startswith(prefix):
                yield ObjectInfo(upload.key, 0, name, time.monotonic() - upload.at)
        if self._is_local:
            for info in list(self._listed(prefix)):
                if _is_being_put(info.key):
                    yield ObjectInfo(info.key, 0, info.key.rpartition("/")[2], info.age)

    def delete(self, keys: Iterable[str]) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fsdp_optim: delete") as pool:
            for _ in pool.map(self._delete, list(keys)):
                pass

    def _delete(self, key: str) -> None:
        with self._errors(key, "deleted"):
            with contextlib.suppress(*_MISSING):
                self._fs.rm_file(self._path(key))
            if self._is_local:  # folders of other stores are only names
                folder = key.rpartition("/")[0]
                with contextlib.suppress(OSError):  # the folder has other files
                    while folder:
                        self._fs.rmdir(self._path(folder))
                        folder = folder.rpartition("/")[0]


def _is_being_put(key: str) -> bool:
    return key.rpartition("/")[2].startswith(_PUT)
