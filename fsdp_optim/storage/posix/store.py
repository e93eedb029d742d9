"""`Folder`: a folder as a `Store`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fsdp_optim.errors import CheckpointError, causes_of
from fsdp_optim.storage.base import CheckpointDirectory, CheckpointProbe, Opened, Store, check_name
from fsdp_optim.storage.posix.beacon import beacon_above, sees
from fsdp_optim.storage.posix.directory import FolderDirectory
from fsdp_optim.storage.posix.files import absolute
from fsdp_optim.storage.posix.filesystem import this_host
from fsdp_optim.storage.posix.filling import Filling
from fsdp_optim.storage.posix.folder import FolderStaging
from fsdp_optim.storage.posix.leftovers import existing
from fsdp_optim.storage.posix.opened import OpenFiles, OpenFolder
from fsdp_optim.storage.posix.shrinking import attach_file, shrink_folder
from fsdp_optim.storage.posix.writer import FolderWriter

_LOOKS, _AGAIN = 5, 0.01  # times, seconds: for a save that is between its two renames


class Folder(Store):
    """The checkpoint of a path. `probe`: answers of the format about the files there."""

    on_file_system = True

    def __init__(self, path: str | os.PathLike[str], probe: CheckpointProbe[Any]) -> None:
        self.path = absolute(path)
        self._probe = probe
        self._directory: FolderDirectory[Any] = FolderDirectory(self.path.parent, probe)

    @property
    def where(self) -> str:
        return str(self.path)

    def open(self) -> OpenFolder:
        """Open the checkpoint: at the path, or under another name where a save was killed between its two renames."""
        for _ in range(_LOOKS - 1):
            try:
                return self._open()
            except CheckpointError as error:
                if not any(isinstance(cause, FileNotFoundError) for cause in causes_of(error)):
                    raise
                time.sleep(_AGAIN)  # a save may be between its two renames
        return self._open()

    def _open(self) -> OpenFolder:
        return OpenFolder(existing(self.path, self._probe), asked=self.path)

    def open_any(self) -> OpenFiles:
        return OpenFiles.at(self.path)

    def with_probe(self, probe: CheckpointProbe[Any]) -> Folder:
        return Folder(self.path, probe)

    def above(self) -> tuple[Folder, str] | None:
        return (Folder(self.path.parent, self._probe), self.path.name) if self.path.name else None

    def begin(self, *, overwrite: bool, durable: bool) -> FolderStaging:
        return self.begun(overwrite=overwrite, durable=durable)

    def begun(self, *, overwrite: bool, durable: bool, filling: Filling | None = None) -> FolderStaging:
        """As `begin`. `filling`: files of a trainer that the checkpoint gets too."""
        staging = FolderStaging.begin(self.path, self._probe, overwrite=overwrite, durable=durable, filling=filling)
        try:
            (staging.folder / "extra").mkdir()
        except BaseException as error:
            staging.abandon()
            if isinstance(error, OSError):
                raise CheckpointError(f"{staging.folder}: {error.strerror or error}") from error
            raise
        return staging

    def join(self, address: str, *, durable: bool, who: str, budget_nbytes: int = 64 << 20) -> FolderWriter:
        return FolderWriter(Path(address), durable=durable, who=who)

    def machine_id(self) -> str:
        return this_host(self.path)

    def sees(self, address: str) -> bool:
        return sees(Path(address))

    def beacon(self) -> AbstractContextManager[str]:
        return beacon_above(self.path)

    @property
    def can_shrink(self) -> bool:
        return True

    @property
    def can_attach(self) -> bool:
        return True

    def shrink(self, opened: Opened, manifest: str, data: bytes | None, names: Sequence[str]) -> int:
        with self._to_change(opened, manifest, *names) as (path, folder):
            return shrink_folder(path, folder, manifest, data, names)

    def attach(self, opened: Opened, name: str, data: bytes) -> None:
        with self._to_change(opened, name) as (path, folder):
            attach_file(path, folder, name, data)

    @contextlib.contextmanager
    def _to_change(self, opened: Opened, *names: str) -> Iterator[tuple[Path, int]]:
        """Yield the path and the descriptor of a checkpoint's folder. An OSError inside becomes a CheckpointError."""
        if not isinstance(opened, OpenFolder):
            raise CheckpointError(f"{self.where}: was not opened as a folder, so it cannot be changed")
        for name in names:
            check_name(self.where, name)
        try:
            with opened.held() as folder:
                yield opened.path, folder
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.where}: cannot be changed: {error.strerror or error}") from error

    def directory(self) -> FolderDirectory[Any]:
        return self._directory

    def share_looks(self, directory: CheckpointDirectory[Any]) -> None:
        """As a Store does. Does nothing for the directory of another folder."""
        if isinstance(directory, FolderDirectory) and directory.where == self._directory.where:
            self._directory = directory

    def siblings(self, known: Collection[str] = ()) -> Iterator[OpenFolder]:
        """Yield all folders in the same folder, including unfinished saves and renamed earlier checkpoints.

        `known`: the names of folders that are left out.
        """
        try:
            names = os.listdir(self.path.parent)
        except PermissionError:  # then no user can list checkpoints there either
            names = []
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: the folder that it is in cannot be listed: {error.strerror or error}"
            ) from error
        for name in names:
            if name in known:
                continue
            with contextlib.suppress(CheckpointError):
                yield OpenFolder(self.path.parent / name)
