"""The keys of a checkpoint in a bucket.

run/step-1000/<manifest>                 written last, on a condition; its token says which files count
run/step-1000/model.safetensors          the files, where nothing was there before
run/step-1000/<token>/model.safetensors  the files of a save over an older one, or beside one that is under way
run/step-1000/.saving-<token>/claim      written again and again by a save under way, and removed at its end
run/step-1000/.saving-<token>/dead       put by another save, which takes this one for dead and removes what it has left
run/step-1000/.saving-<token>/plain      the save has put, or replaces, files that have no folder of their own
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from fsdp_optim.storage.base import check_name

SAVING = ".saving-"
_TOKEN = "[0-9a-f]{16}"
_OF_SAVE = re.compile(rf"(?:\.saving-)?({_TOKEN})/.+")


def new_token() -> str:
    """Return a string that no other save has."""
    return secrets.token_hex(8)


def own_token(token: str | None) -> str | None:
    """Return the part of a manifest's token that names objects: its last 16 digits.

    A checkpoint that an older version uploaded from a folder has more before them.
    """
    matched = re.search(f"{_TOKEN}$", token) if token is not None else None
    return matched[0] if matched is not None else None


@dataclass(frozen=True)
class ObjectPlace:
    """One place for a checkpoint. `where`: its URL, for errors; `prefix`: the beginning of its keys, without a last slash."""

    where: str
    prefix: str

    @property
    def parent(self) -> str:
        """The beginning of the keys of this place and its siblings, with a slash at its end unless it is empty."""
        return self.prefix[: self.prefix.rfind("/") + 1]

    @property
    def inside(self) -> str:
        """The beginning of all keys of this place."""
        return f"{self.prefix}/"

    @property
    def saving(self) -> str:
        """The beginning of the keys of all saves that are under way here, or have died."""
        return f"{self.prefix}/{SAVING}"

    def manifest(self, name: str) -> str:
        """Return the key of the manifest."""
        return f"{self.prefix}/{check_name(self.where, name)}"

    def claim(self, token: str) -> str:
        """Return the key of the object that shows that a save is under way."""
        return self.note(token, "claim")

    def tombstone(self, token: str) -> str:
        """Return the key of the object by which another save says that this one is dead."""
        return self.note(token, "dead")

    def plain(self, token: str) -> str:
        """Return the key of the object that shows that files without a folder of their own were put by saves."""
        return self.note(token, "plain")

    def note(self, token: str, name: str = "") -> str:
        """Return the key of a note of a save under way."""
        return f"{self.saving}{token}/{name}"

    def token_of_note(self, key: str) -> str:
        """Return the token of the save that a claim or a note belongs to."""
        return key.removeprefix(self.saving).split("/")[0]

    def name_in(self, key: str) -> str:
        """Return the name of a file under a key, which may be in the folder of a save."""
        name = key.removeprefix(self.inside)
        matched = _OF_SAVE.fullmatch(name)
        return name if matched is None or name.startswith(SAVING) else name.partition("/")[2]

    def token_in(self, key: str) -> str | None:
        """Return the token of the save that has put an object under a key of its own; None for every other key."""
        matched = _OF_SAVE.fullmatch(key.removeprefix(self.inside))
        return matched[1] if matched is not None else None


@dataclass(frozen=True)
class KeyedFiles:
    """Where the files of one save are. `token`: of the save, where the files have a folder of their own; else None."""

    place: ObjectPlace
    token: str | None

    def key(self, name: str) -> str:
        """Return the key of a file. Raises CheckpointError for a name that leaves the checkpoint."""
        name = check_name(self.place.where, name)
        return f"{self.place.inside}{self.token}/{name}" if self.token is not None else f"{self.place.inside}{name}"
