"""What `Writer` and `Reader` have in common: the path of their checkpoint, which torch may give after they are made."""

from __future__ import annotations

import os

from fsdp_optim.errors import CheckpointError
from fsdp_optim.registry import scheme_of


class AtPath:
    """A storage class of torch at a path."""

    _path: str | os.PathLike[str] | None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The path of the checkpoint; None until this object, or a call of torch, is given one."""
        return self._path

    @property
    def _place(self) -> str | os.PathLike[str]:
        """The same. Raises CheckpointError where there is none."""
        if self._path is None:
            name = type(self).__name__
            raise CheckpointError(f"the {name} has no path: give {name}(path), or checkpoint_id= to the call")
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this class takes a place: paths, and not URLs."""
        return isinstance(checkpoint_id, os.PathLike) or scheme_of(checkpoint_id) is None
