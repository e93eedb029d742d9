"""The probe of this library's own format: whether a place has a complete checkpoint. "Undecided" is a result of its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from fsdp_optim.formats.base.beside import BesideOthers
from fsdp_optim.formats.base.checksums import sums_of
from fsdp_optim.formats.base.summary import MOST_NBYTES, ManifestSummary, summary_in
from fsdp_optim.formats.own.manifest import NAME, VERSION, manifest_in
from fsdp_optim.storage.base import CheckpointStatus, Opened, is_reserved, is_sure_that_not

PROOF_NAME = "proof.json"
"""The file that a run adds to a checkpoint later: what the step after it led to. The manifest does not name it."""

_FIRST_NBYTES = 4096  # of a manifest, read first for its summary
_TIMES = 16  # as many bytes are read next, if the summary is longer
_FOLDER = r"([A-Za-z0-9_-]+/)?"  # of one of several models
_OWN = re.compile(
    _FOLDER + r"((adapter_)?model|optim|state)(-\d{5}-of-\d{5})?\.safetensors(\.sums|\.index\.json)?|"
    r"extra/[a-z]+(-\d{5})?\.safetensors"
)
_OF_OPTIM = re.compile(
    _FOLDER + r"optim(-\d{5}-of-\d{5})?\.safetensors(\.sums|\.index\.json)?|extra/optim\.safetensors"
)
_TRACE = re.compile(
    _FOLDER
    + r"((adapter_)?model|optim|state)(-\d{5}-of-\d{5})?\.safetensors\.sums|"
    + _FOLDER
    + r"optim(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|"
    r"extra/[a-z]+(-\d{5})?\.safetensors"
)


class OwnProbe(BesideOthers):
    """The `CheckpointProbe` of this library's own format."""

    manifest = NAME

    def status_in(self, opened: Opened, *, whole: bool) -> CheckpointStatus[ManifestSummary]:
        """Return whether the place has all files of the manifest with their sizes."""
        summary: ManifestSummary | None = None
        try:
            summary = (None if whole else read_summary(opened)) or manifest_in(opened).effective_summary
            if summary.version > VERSION:
                reason = f"{opened.named(NAME)} has the schema version {summary.version}"
                return CheckpointStatus(is_sure=False, reason=reason, partial=summary)
            for name, nbytes in summary.files.items():
                if opened.nbytes_of(name) != nbytes:
                    reason = f"{opened.named(name)} does not have the {nbytes} bytes that were saved"
                    return CheckpointStatus(reason=reason, partial=summary)
        except (OSError, MemoryError) as error:
            return CheckpointStatus(is_sure=is_sure_that_not(error), reason=str(error), partial=summary)
        return CheckpointStatus(summary)

    def token_in(self, opened: Opened) -> str | None:
        """Return the token of a checkpoint; None if it cannot be read."""
        try:
            return any_summary(opened).token
        except (OSError, MemoryError):
            return None

    def is_trace(self, name: str) -> bool:
        """Return whether only a save gives this name to a file.

        Other libraries have files of the name `model.safetensors` too.
        """
        return _TRACE.fullmatch(name) is not None

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        """Return a function that says whether a file of a given name was written by a save.

        Where the manifest cannot be read, every name that a save could give counts as written by a save.
        """
        listed: set[str] | None = None
        is_thin = False
        if opened is not None:
            with contextlib.suppress(OSError):
                summary = any_summary(opened)
                listed, is_thin = set(summary.files), summary.thinned_from is not None
                listed |= {sums_of(name) for name in listed}

        def is_own(name: str) -> bool:
            if any(name == own or (name.startswith(own) and is_reserved(name)) for own in (NAME, PROOF_NAME)):
                return True
            if is_thin and is_of_optim(name):  # what a killed thin has left
                return True
            return name in listed if listed is not None else _OWN.fullmatch(name) is not None

        return is_own


PROBE = OwnProbe()


def is_of_optim(name: str) -> bool:
    """Return whether a save gives this name to a file of the optimizer."""
    return _OF_OPTIM.fullmatch(name) is not None


def read_summary(opened: Opened) -> ManifestSummary | None:
    """Return the summary of a manifest; None if it has none. Raises CheckpointError if the summary is damaged or unreadable."""
    nbytes, size = _FIRST_NBYTES, opened.size_of(NAME)
    while True:
        summary = summary_in(opened.named(NAME), opened.read(NAME, 0, min(nbytes, size)))
        if summary is not None or nbytes >= min(size, MOST_NBYTES):
            return summary
        nbytes *= _TIMES


def any_summary(opened: Opened) -> ManifestSummary:
    """Return the summary of a manifest or, for a manifest without one, a summary that is made of the rest."""
    return read_summary(opened) or manifest_in(opened).effective_summary
