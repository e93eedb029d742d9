"""`proof.json` beside a checkpoint: small, put there after the fact, and never needed to load the checkpoint."""

from __future__ import annotations

import json
import re

from msgspec import structs

from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, store_at
from fsdp_optim.checkpoint.proof.record import VERSION, StepRecord
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.checksums import hex_of
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.formats.own.probe import PROBE, PROOF_NAME
from fsdp_optim.storage.base import Opened
from fsdp_optim.wire import decode, encode

_MOST_NBYTES = 1 << 30
_HEAD_NBYTES = 4096  # of a record, which have its first fields, however long the name of the checkpoint's folder is
_HEAD = re.compile(rb'\{"version": (\d+), "checkpoint": ("(?:[^"\\]|\\.)*"), "proven": "(identical|rounding|)"')
_SUM, _SUM_NBYTES = b', "xxh3_64": "%s"}', 32
_ENDS = re.compile(rb', "xxh3_64": "([0-9a-f]{16})"\}')


def write_proof(place: Place, record: StepRecord, storage_options: StorageOptions = None) -> None:
    """Put a record beside the checkpoint that is at a place. Called by one process.

    Raises CheckpointError where the checkpoint is gone, or cannot get a file.
    """
    store = store_at(place, OURS, storage_options)
    with store.open() as opened:
        bound = structs.replace(record, checkpoint=PROBE.token_in(opened) or "")
        store.attach(opened, PROOF_NAME, _with_sum(encode(bound).encode()))


def read_proof(place: Place, storage_options: StorageOptions = None) -> StepRecord | None:
    """Return the record beside a checkpoint; None where there is none of this checkpoint, or one of another version.

    Raises CheckpointError where it cannot be read.
    """
    with store_at(place, OURS, storage_options).open() as opened:
        return proof_in(opened)


def proof_in(opened: Opened) -> StepRecord | None:
    """Return the record beside a checkpoint that is open, as `read_proof` does."""
    if not opened.has(PROOF_NAME):
        return None
    where, data = opened.named(PROOF_NAME), opened.read_whole(PROOF_NAME, most_nbytes=_MOST_NBYTES)
    with as_checkpoint_error(where):
        record = decode(StepRecord, _without_sum(where, data))
    is_of_this = record.checkpoint == (PROBE.token_in(opened) or "")
    return record if is_of_this and record.version == VERSION else None


def proof_of(place: Place, storage_options: StorageOptions = None) -> str:
    """Return what is known about resumes from a checkpoint, without reading the record.

    "identical", "rounding": a run that resumed was proven so. "recorded": no run has been proven yet. "": there is no record.
    Raises CheckpointError where there is no checkpoint.
    """
    with store_at(place, OURS, storage_options).open() as opened:
        if not opened.has(PROOF_NAME):
            return ""
        head = opened.read(PROOF_NAME, 0, min(_HEAD_NBYTES, opened.size_of(PROOF_NAME)))
        fields = _HEAD.match(head)
        token = json.dumps(PROBE.token_in(opened) or "").encode()
        if fields is None or fields[1] != b"%d" % VERSION or fields[2] != token:
            return ""
        return fields[3].decode() or "recorded"


def _with_sum(text: bytes) -> bytes:
    """Return the JSON of a record with the hash of this JSON as its last entry."""
    return text[:-1] + _SUM % hex_of(text).encode()


def _without_sum(where: str, data: bytes) -> bytes:
    """Return the JSON whose hash is its last entry; all of it where an earlier version wrote no hash.

    Raises CheckpointError where the hash is another one.
    """
    ends = _ENDS.fullmatch(data, max(len(data) - _SUM_NBYTES, 0))
    if ends is None:
        return data
    text = data[:-_SUM_NBYTES] + b"}"
    if hex_of(text).encode() != ends[1]:
        raise CheckpointError(f"{where}: is not what was saved: its checksum differs")
    return text
