"""The manifest of a DCP checkpoint that this library writes: `.metadata`, which begins with this library's summary.

`.metadata` is a pickle. The summary is a str at its beginning that the pickle drops again, so torch.distributed.checkpoint reads
the file as it reads its own, and the summary is read without unpickling anything:

# bytes    | 80 02 | 58 length | JSON with the summary and a hash of the rest | 30  | the pickle of torch's Metadata
# meaning  | proto | a str     |                                            | pop |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.beside import BesideOthers
from fsdp_optim.formats.base.checksums import Digest
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.json_text import parse_json
from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.registry import DCP
from fsdp_optim.storage.base import CheckpointProbe, CheckpointStatus, Opened, is_sure_that_not

NAME = DCP.manifest
VERSION = 1
_BEGIN, _POP = b"\x80\x02X", b"0"
_LENGTH = 4  # bytes
_FIRST_NBYTES = 4096
_PIECE_NBYTES = 8 << 20  # that are read at once
_MOST_NBYTES = 1 << 20  # in a summary
_IS_TORCHS = b"torch.distributed.checkpoint"
_OWN = re.compile(DCP.traces)
_OF_TORCH = re.compile(r"__\d+_\d+\.distcp")


def with_summary(summary: ManifestSummary, pickle: Sequence[bytes]) -> bytes:
    """Return the content of `.metadata`. `pickle`: the pieces of the pickle of torch's Metadata."""
    digest = Digest()
    for piece in pickle:
        digest.add(piece)
    values = {"brief": summary.to_json(), "metadata_xxh3_64": digest.hex}
    text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    return b"".join([_BEGIN, len(text).to_bytes(_LENGTH, "little"), text, _POP, *pickle])


@dataclass(frozen=True)
class _DcpManifest:
    """The summary of a manifest, the hash of the rest, and the byte at which the rest begins."""

    summary: ManifestSummary
    rest: str
    start: int


def summary_of(opened: Opened) -> ManifestSummary | None:
    """Return the summary of a checkpoint; None if torch.distributed.checkpoint itself has written it.

    Raises CheckpointError if the manifest is damaged or cannot be read.
    """
    manifest = _manifest_of(opened)
    return manifest.summary if manifest is not None else None


def _manifest_of(opened: Opened) -> _DcpManifest | None:
    where, size = opened.named(NAME), opened.size_of(NAME)
    first = opened.read(NAME, 0, min(size, _FIRST_NBYTES))
    if not first.startswith(_BEGIN) or not first[len(_BEGIN) + _LENGTH :].startswith(b'{"brief":'):
        if not first.startswith(b"\x80") or _IS_TORCHS not in first:
            raise CheckpointError(f"{where}: is not the metadata of a checkpoint")
        return None
    begin = len(_BEGIN) + _LENGTH
    end = begin + int.from_bytes(first[len(_BEGIN) : begin], "little")
    if end >= min(size, _MOST_NBYTES):
        raise CheckpointError(f"{where}: was cut short")
    text = first[begin:end] if end <= len(first) else opened.read(NAME, begin, end - begin)
    values = parse_json(where, text)
    with as_checkpoint_error(where):
        return _DcpManifest(
            ManifestSummary.from_json(where, values["brief"]), str(values["metadata_xxh3_64"]), end + len(_POP)
        )


_OLDEST = ManifestSummary(
    version=VERSION, sequence=0, step=None, keep_last=None, created_ns=0, token="", content="", world_size=0, files={}
)
"""Stands for the brief of a checkpoint that torch.distributed.checkpoint itself has written: it is older than all others."""


class DcpProbe(BesideOthers):
    """The `CheckpointProbe` of DCP checkpoints. Those of other writers count as complete; their token is empty."""

    manifest = NAME

    def status_in(self, opened: Opened, *, whole: bool) -> CheckpointStatus[ManifestSummary]:
        try:
            manifest = _manifest_of(opened)
            if manifest is None:
                return CheckpointStatus(_OLDEST)
            if manifest.summary.version > VERSION:
                return CheckpointStatus(
                    is_sure=False, reason=f"{opened.named(NAME)} has the schema version {manifest.summary.version}"
                )
            if whole:
                digest, size = Digest(), opened.size_of(NAME)
                for start in range(manifest.start, size, _PIECE_NBYTES):
                    digest.add(opened.read(NAME, start, min(_PIECE_NBYTES, size - start)))
                if digest.hex != manifest.rest:
                    return CheckpointStatus(
                        reason=f"{opened.named(NAME)} is not the file that was saved: its checksum differs"
                    )
            for name, nbytes in manifest.summary.files.items():
                if opened.nbytes_of(name) != nbytes:
                    return CheckpointStatus(
                        reason=f"{opened.named(name)} does not have the {nbytes} bytes that were saved"
                    )
        except (OSError, MemoryError) as error:
            return CheckpointStatus(is_sure=is_sure_that_not(error), reason=str(error))
        return CheckpointStatus(manifest.summary)

    def token_in(self, opened: Opened) -> str | None:
        try:
            manifest = _manifest_of(opened)
        except (OSError, MemoryError):
            return None
        return manifest.summary.token if manifest is not None else None

    def is_trace(self, name: str) -> bool:
        return _OWN.fullmatch(name) is not None

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        listed: set[str] | None = None
        is_torchs = False
        if opened is not None:
            try:
                manifest = _manifest_of(opened)
                listed, is_torchs = set(manifest.summary.files) if manifest is not None else None, manifest is None
            except (OSError, MemoryError):
                pass

        def is_own(name: str) -> bool:
            if name == NAME:
                return True
            if listed is not None:
                return name in listed
            return (_OF_TORCH if is_torchs else _OWN).fullmatch(name) is not None

        return is_own


DCP_PROBE: CheckpointProbe[Any] = DcpProbe()
