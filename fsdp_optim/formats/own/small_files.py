"""Small files that a save writes beside the tensors: an index of several files, and the fingerprint."""

from __future__ import annotations

from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.checksums import hex_of
from fsdp_optim.formats.own.manifest import FINGERPRINT, FileInfo, Manifest
from fsdp_optim.results.fingerprints import Fingerprint
from fsdp_optim.storage.base import Opened

MOST_INDEX_NBYTES = 1 << 28


def read_small(opened: Opened, name: str, info: FileInfo) -> bytes:
    """Return a small file that a save has written beside the tensors. Raises CheckpointError if its checksum differs."""
    data, path = opened.read_whole(name, most_nbytes=MOST_INDEX_NBYTES), opened.named(name)
    if (len(data), hex_of(data)) != (info.nbytes, info.header):
        raise CheckpointError(f"{path}: is not what was saved: its checksum differs")
    return data


def fingerprint_in(opened: Opened, manifest: Manifest) -> Fingerprint | None:
    """Return the fingerprint that a save has kept; None where it has kept none. Raises CheckpointError for a damaged one."""
    if FINGERPRINT not in manifest.files:
        return None
    data = read_small(opened, FINGERPRINT, manifest.files[FINGERPRINT])
    try:
        return Fingerprint.from_json(data)
    except StateError as error:
        where = opened.named(FINGERPRINT)
        raise CheckpointError(f"{where}: {error} (LoadOptions(fingerprint=False) does not read it)") from error
