"""A folder of any content, held open: files of any name in folders of any name, also behind symbolic links."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base import MOST_DEPTH, MOST_FILES, check_inside
from fsdp_optim.storage.posix.opened import ANY_FILE, OpenFolder


class OpenFiles(OpenFolder):
    """The files of a folder, or one file of it, as `Store.open_any` opens them."""

    is_any = True

    def __init__(self, path: Path, selected: str = "") -> None:
        super().__init__(path)
        self.selected = selected
        self._names: list[str] | None = None

    @classmethod
    def at(cls, path: Path) -> OpenFiles:
        """Return the folder at a path; the folder of the file at a path, or of files whose names begin like the path."""
        try:
            is_file = stat.S_ISREG(os.stat(path).st_mode)
        except OSError:
            stem = f"{path.stem}-"
            is_file = any(name.startswith(stem) and name.endswith(path.suffix) for name in _listed(path.parent))
        return cls(path.parent, path.name) if is_file else cls(path)

    @property
    def where(self) -> str:
        return str(self.path / self.selected) if self.selected else str(self.path)

    def named(self, name: str) -> str:
        return f"{self.path}/{name}"

    def names(self) -> list[str]:
        if self._names is None:
            try:
                self._names = sorted(self._walk())
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be listed: {error.strerror or error}") from error
        return self._names

    def _walk(self) -> Iterator[str]:
        num = 0
        for folder, folders, files in os.walk(self.path):
            inside = Path(folder).relative_to(self.path)
            if len(inside.parts) >= MOST_DEPTH:
                folders.clear()
            num += len(files)
            if num > MOST_FILES:
                raise CheckpointError(
                    f"{self.path}: has more than {MOST_FILES} files: give the folder of one checkpoint"
                )
            yield from (str(inside / file) for file in files)

    def was_replaced(self) -> bool:
        return False

    def _stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd)

    def _checked(self, name: str) -> str:
        return check_inside(str(self.path), name)

    def _open_inside(self, name: str) -> int:
        return os.open(name, ANY_FILE, dir_fd=self._fd)


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
