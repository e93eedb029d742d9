"""Renames that other mounts see later: each leaves a mark at the file, and whoever reads the mark hides the name."""

from __future__ import annotations

import errno
import os
import time
import uuid

from hosts.shared_fs.nodes import Node

MARK = "trusted.shared_fs.renamed"  # an extended attribute, which root can set on any kind of file


class LateRenames:
    """The marks of one mount. `seconds`: how long other mounts' renames are hidden; 0 makes and reads no marks."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.mount = uuid.uuid4().hex

    @staticmethod
    def _path(folder: Node, name: str) -> str:
        return f"{folder.path}/{name}"

    def mark(self, folder: Node, name: str, new_folder: Node, new_name: str) -> None:
        """This mount is about to rename a file."""
        if self.seconds:
            text = f"{self.mount} {time.monotonic()} {new_folder.key[1]} {new_name}"
            os.setxattr(self._path(folder, name), MARK, os.fsencode(text), follow_symlinks=False)

    def hides(self, folder: Node, name: str) -> bool:
        """The name was given by another mount, too short a time ago."""
        if not self.seconds:
            return False
        try:
            text = os.fsdecode(os.getxattr(self._path(folder, name), MARK, follow_symlinks=False))
        except OSError as raised:
            if raised.errno in (errno.ENODATA, errno.ENOENT):
                return False
            raise
        mount, at, inode, marked = text.split(" ", 3)
        is_this_name = (int(inode), marked) == (folder.key[1], name)
        return mount != self.mount and is_this_name and time.monotonic() - float(at) < self.seconds
