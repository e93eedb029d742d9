"""Whether a place has a complete checkpoint. "It cannot be told" is an answer of its own, for which nothing is removed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from fsdp_optim.formats.brief import MOST_NBYTES, Brief, brief_in
from fsdp_optim.formats.checksums import sums_of
from fsdp_optim.formats.manifest import NAME, VERSION, manifest_in
from fsdp_optim.storage.base import Opened, Standing, is_sure_that_not

_FIRST_NBYTES = 4096  # of a manifest are read for its brief
_TIMES = 16  # as many are read where it does not end there
_OWN = re.compile(
    r"(model|optim)(-\d{5}-of-\d{5})?\.safetensors(\.sums|\.index\.json)?|extra/[a-z]+(-\d{5})?\.safetensors"
)


class CheckpointJudge:
    """What a store has to know of this format."""

    manifest = NAME

    def standing_in(self, opened: Opened, *, whole: bool) -> Standing[Brief]:
        """Look whether all files that the manifest names are there in their sizes."""
        try:
            brief = (None if whole else read_brief(opened)) or manifest_in(opened).short
            if brief.version > VERSION:
                reason = f"{opened.named(NAME)} has the schema version {brief.version}"
                return Standing(is_sure=False, reason=reason)
            for name, nbytes in brief.files.items():
                if opened.nbytes_of(name) != nbytes:
                    return Standing(reason=f"{opened.named(name)} does not have the {nbytes} bytes that were saved")
        except (OSError, MemoryError) as error:
            return Standing(is_sure=is_sure_that_not(error), reason=str(error))
        return Standing(brief)

    def token_in(self, opened: Opened) -> str | None:
        """What only this checkpoint has; None where it cannot be read."""
        try:
            return any_brief(opened).token
        except (OSError, MemoryError):
            return None

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        """Whether a save has written a file of some name.

        Where the manifest cannot be read, what has a name that a save gives is the save's.
        """
        listed: set[str] | None = None
        if opened is not None:
            with contextlib.suppress(OSError):
                listed = set(any_brief(opened).files)
                listed |= {sums_of(name) for name in listed}

        def is_own(name: str) -> bool:
            return name == NAME or (name in listed if listed is not None else _OWN.fullmatch(name) is not None)

        return is_own


JUDGE = CheckpointJudge()


def read_brief(opened: Opened) -> Brief | None:
    """The brief of a manifest; None where it has none. Raises CheckpointError where it is damaged, or is not read."""
    nbytes, size = _FIRST_NBYTES, opened.size_of(NAME)
    while True:
        brief = brief_in(opened.named(NAME), opened.read(NAME, 0, min(nbytes, size)))
        if brief is not None or nbytes >= min(size, MOST_NBYTES):
            return brief
        nbytes *= _TIMES


def any_brief(opened: Opened) -> Brief:
    """The brief of a manifest, which is made of the rest where it has none."""
    return read_brief(opened) or manifest_in(opened).short
