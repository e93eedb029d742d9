"""Changes of a checkpoint that is complete, each of which a store may leave out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fsdp_optim.errors import CheckpointError
from fsdp_optim.storage.base.opened import Opened


class ChangesCheckpoint(Protocol):
    """The part of a Store that changes a checkpoint which is there. The checkpoint is complete at every moment."""

    @property
    def where(self) -> str: ...

    @property
    def can_shrink(self) -> bool:
        """Whether `shrink`, which `fsdp_optim.thin` needs, is implemented."""
        return False

    def shrink(self, opened: Opened, manifest: str, data: bytes | None, names: Sequence[str]) -> int:
        """Replace the manifest of a checkpoint that is open, then remove files of it; return the bytes of these files.

        A store may leave it out, with `can_shrink`. The checkpoint is complete at every moment: by its old manifest, with the
        files, or by the new one. What a killed call has left is removed by the next one, and by a save over the checkpoint. Files
        that are gone are no error. Who has the checkpoint open reads a removed file, or gets a CheckpointError.

        Args:
            opened: the checkpoint, opened by this store.
            manifest: the name of the manifest.
            data: the content of the new manifest, which does not name the files; None where an earlier call has put it.
            names: the files to remove, all inside the checkpoint.

        Raises CheckpointError where the checkpoint cannot be changed, or was replaced since it was opened: then what is there
        stays as it is.
        """
        raise CheckpointError(
            f"{self.where}: this store cannot remove files of a checkpoint: save a new one without them"
        )

    @property
    def can_attach(self) -> bool:
        """Whether `attach` is implemented."""
        return False

    def attach(self, opened: Opened, name: str, data: bytes) -> None:
        """Put a small file beside those of a checkpoint that is open, in place of an earlier file of this name, at once.

        The manifest does not name the file, and a checkpoint without it is complete. A store may leave it out, with `can_attach`.

        Raises CheckpointError where the checkpoint cannot be changed, or was replaced since it was opened.
        """
        raise CheckpointError(f"{self.where}: this store cannot add a file to a checkpoint")
