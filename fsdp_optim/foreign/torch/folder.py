"""Folders of torch files that this library has written: their manifest, `torch_files.json`, and the names of their files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.beside import BesideOthers
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.json_text import parse_json
from fsdp_optim.formats.base.protocols import COMMON, Half
from fsdp_optim.formats.base.summary import ManifestSummary, SavedRoles
from fsdp_optim.storage.base import CheckpointStatus, Opened, is_sure_that_not

NAME = "torch_files.json"
ONE = "checkpoint.pt"
"""The name of the one file of the format "torch_file"."""

PARTS: Mapping[Half, str] = {"model": "model", "optim": "optimizer"}
"""The keys of the two halves in this file."""

ROLES = "fsdp_optim_roles"
"""The key of a list of those of these two that the file has, where other values in it could be taken for such a half."""

MODEL_FILE, OPTIM_FILE = "model.pt", "optim.pt"
"""The names of the files of the two halves in the format "torch"."""

EXTRAS = {COMMON: "trainer.pt"}
"""By the name of an extra, the file of the format "torch" that has it; those of ranks have the file of their name."""

PER_RANK = "per_rank_extra"
"""The key of the values of each rank in the one file, by rank."""

_OF_RANK = re.compile(r"rank-(\d{5,})\.pt")
_MOST_NBYTES = 64 << 20  # files of DeepSpeed's universal checkpoints are many
_OWN = (MODEL_FILE, OPTIM_FILE, "modules.pt", ONE, NAME, *EXTRAS.values())


def rank_in(name: str) -> int | None:
    """Return the rank whose values a file has; None for all other files."""
    matched = _OF_RANK.fullmatch(name)
    return int(matched[1]) if matched is not None else None


class TorchFilesProbe(BesideOthers):
    """The `CheckpointProbe` of folders of torch files, whose manifest has the sizes of the files."""

    manifest = NAME

    def status_in(self, opened: Opened, *, whole: bool) -> CheckpointStatus[ManifestSummary]:
        try:
            summary = summary_of(opened, self.manifest)
            _check_sizes(opened, summary)
        except (OSError, MemoryError) as error:
            return CheckpointStatus(is_sure=is_sure_that_not(error), reason=str(error))
        return CheckpointStatus(summary)

    def token_in(self, opened: Opened) -> str | None:
        with contextlib.suppress(OSError, MemoryError):
            return summary_of(opened, self.manifest).token
        return None

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        return lambda name: name in _OWN or (name.startswith("rank-") and name.endswith(".pt"))


def summary_of(opened: Opened, manifest: str = NAME) -> ManifestSummary:
    """Return the summary in the manifest. Raises CheckpointError if it is damaged."""
    where = opened.named(manifest)
    values = parse_json(where, opened.read_whole(manifest, most_nbytes=_MOST_NBYTES))
    with as_checkpoint_error(where):
        return ManifestSummary.from_json(where, values["brief"])


def checked_summary(opened: Opened, manifest: str = NAME, folder: str = "") -> ManifestSummary | None:
    """Return the summary of a folder that this library has written; None for all others, and for a file by itself.

    Raises CheckpointError that names the file, if a file of the manifest is missing or has another size. `folder`: the beginning
    of the names of all files.
    """
    if opened.selected or not opened.has(f"{folder}{manifest}"):
        return None
    summary = summary_of(opened, f"{folder}{manifest}")
    _check_sizes(opened, summary, folder)
    return summary


def _check_sizes(opened: Opened, summary: ManifestSummary, folder: str = "") -> None:
    for name, nbytes in summary.files.items():
        where, size = opened.named(f"{folder}{name}"), opened.nbytes_of(f"{folder}{name}")
        if size < 0:
            raise CheckpointError(f"{where}: is missing, or no file: {nbytes} bytes were saved in it")
        if size != nbytes:
            raise CheckpointError(f"{where}: has {size} bytes, {nbytes} were saved: it was cut short or changed")


def roles_in(opened: Opened, name: str) -> SavedRoles | None:
    """Return which parts of a file are the model's and the optimizer's, if the manifest of its folder says so."""
    with contextlib.suppress(OSError, MemoryError):
        summary = summary_of(opened) if opened.has(NAME) else None
        if summary is None or summary.roles is None or summary.files.get(name) != opened.nbytes_of(name):
            return None
        roles = summary.roles
        if name == ONE:
            return roles
        return SavedRoles(
            roles.model if name == MODEL_FILE else None,
            roles.optim if name == OPTIM_FILE else None,
        )
    return None


def sequence_of(opened: Opened, manifest: str = NAME) -> int:
    """Return the number of a folder of torch files among the checkpoints beside it; 0 if unknown."""
    with contextlib.suppress(OSError):
        return summary_of(opened, manifest).sequence
    return 0
