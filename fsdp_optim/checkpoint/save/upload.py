"""upload_to=: a checkpoint that is saved in a folder goes up to a store in the background. Every rank uploads its share of it.

The bytes are read from the folder, so training is not held up, and no collective runs. The ranks agree on the end
through the rendezvous store, as in `background`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from fsdp_optim.checkpoint.catalog.newest import Series, keep_newest
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.files import File
from fsdp_optim.checkpoint.common.seen_by_all import check_seen_by_all
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.errors import CheckpointError, FsdpOptimError
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.storage.base import VISIBLE_WITHIN, Capabilities, Opened, Staging, Store, StoreWriter
from fsdp_optim.storage.posix.store import Folder
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.completion import Completion
from fsdp_optim.transport.failure import RANK_ERRORS, Failure

_PIECE_NBYTES = 1 << 20
"""Bytes that are read from the folder at once."""

_LOOK_EVERY = 0.1  # seconds


@dataclass(frozen=True)
class FolderUpload:
    """An upload that all ranks have agreed on. `staging`: on the rank that leads it."""

    group: RankGroup
    options: SaveArguments
    format: Format
    store: Store
    address: str
    files: tuple[File, ...]
    capabilities: Capabilities
    completion: Completion
    token: str
    staging: Staging | None

    @classmethod
    def begin(
        cls, group: RankGroup, options: SaveArguments, format: Format, files: Sequence[File], token: str
    ) -> FolderUpload | None:
        """Begin an upload where one is asked for; nothing is sent yet. Called by all ranks.

        `token`: that of the save in the folder.
        """
        if options.upload_to is None:
            return None
        store, content = store_at(options.upload_to, format, options.storage_options), b""
        if isinstance(store, Folder):
            raise CheckpointError(f"upload_to={options.upload_to!r}: must be a URL, such as s3://bucket/run/step-1000")
        staging: Staging | None = None
        try:
            if group.rank == group.ranks[0]:
                staging = store.begin(overwrite=options.overwrite, durable=True, token=token[-16:])
                can = staging.capabilities
                if can.writes_ranges == "parts":
                    for file in files:
                        staging.create(file.name, file.plan.nbytes, b"")
                content = json.dumps([staging.address, can.writes_ranges, can.part_nbytes, can.most_parts]).encode()
            result = all_gather_bytes(group, "upload", content, compared=store.machine_id().encode())
            address, ranges, part_nbytes, most_parts = json.loads(result.content_of(group.ranks[0]))
            if not result.all_equal:
                check_seen_by_all(group, store, address)
            can = Capabilities(ranges, renames=False, part_nbytes=part_nbytes, most_parts=most_parts)
            completion = Completion.join(group, f"{token[-16:]} uploaded", store.where)
            return cls(group, options, format, store, address, tuple(files), can, completion, token, staging)
        except BaseException:
            if staging is not None:
                staging.abandon()
            raise

    def abandon(self) -> None:
        """Give the upload up, because the save in the folder has failed. Raises nothing."""
        self.completion.close()
        if self.staging is not None:
            self.staging.abandon()

    def run(self, source: Store, small: Sequence[str], content: str) -> None:
        """Upload this rank's share, and wait for the end. Called in the background, when the checkpoint is in the folder.

        Args:
            small: the names of all files but those with tensors and the manifest, on the leader.
            content: the text that tells the series of the checkpoint, on the leader.
        """
        with closing(self.completion):
            failed: str | None = None
            try:
                with self._opened(source) as opened:
                    self.completion.done(self._send_all(opened, small))
            except RANK_ERRORS as error:
                failed = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                self.completion.failed(failed)
            if self.staging is not None:
                self._lead(self.staging, source, failed, content)
            else:
                self.completion.wait_for_end()

    def _opened(self, source: Store) -> Opened:
        """The checkpoint that was saved. A rank on another machine than the one that named it may see it some seconds later."""
        deadline = time.monotonic() + VISIBLE_WITHIN
        while True:
            failure = Failure()
            with failure:
                opened = source.open()
                if self.format.probe.token_in(opened) == self.token:
                    return opened
                opened.close()
            if time.monotonic() > deadline:
                reason = failure.error or "another checkpoint is there"
                raise CheckpointError(f"not visible on rank {self.group.rank} after {VISIBLE_WITHIN:g} s: {reason}")
            time.sleep(_LOOK_EVERY)

    def _send_all(self, opened: Opened, small: Sequence[str]) -> bytes:
        rank = self.group.rank
        writer = self.store.join(self.address, durable=True, who=f"rank {rank}", budget_nbytes=self.group.budget.nbytes)
        try:
            for index, file in enumerate(self.files):
                if self.capabilities.writes_ranges == "parts":
                    self._send_parts(opened, writer, file)
                elif index % len(self.group.ranks) == self.group.position:
                    writer.create(file.name, file.plan.nbytes, b"")
                    _send(opened, writer, file.name, 0, file.plan.nbytes)
            for name in small:
                writer.put(name, opened.read_whole(name))
            return writer.finish()
        finally:
            writer.discard()

    def _send_parts(self, opened: Opened, writer: StoreWriter, file: File) -> None:
        """Send this rank's share of the parts of a file, which lie together."""
        size = self.capabilities.part_nbytes_of(file.plan.nbytes)
        num, position, ranks = -(-file.plan.nbytes // size), self.group.position, len(self.group.ranks)
        start, stop = num * position // ranks * size, num * (position + 1) // ranks * size
        _send(opened, writer, file.name, start, min(stop, file.plan.nbytes))

    def _lead(self, staging: Staging, source: Store, failed: str | None, content: str) -> None:
        """Finish the upload when all ranks have sent their shares, and announce the result."""
        try:
            if failed is not None:
                raise CheckpointError(f"rank {self.group.rank}: {failed}")
            receipts = self.completion.wait_for_all()
            staging.seal([file.name for file in self.files], receipts, durable=True)
            self.completion.commit()
            with self._opened(source) as opened:
                manifest = self.format.probe.manifest
                staging.commit(manifest, opened.read_whole(manifest), durable=True)
        except RANK_ERRORS as error:
            ours = isinstance(error, FsdpOptimError)
            why = str(error) if ours else f"rank {self.group.rank}: {type(error).__name__}: {error}"
            text = f"{source.where}: is saved, but it was not uploaded to {self.store.where}: {why}"
            all_have_stopped = self.completion.not_saved(text)
            staging.abandon(late=not all_have_stopped)
            raise CheckpointError(text) from error
        self.completion.saved()
        if self.options.keep_last is not None:
            series = Series.of(self.store.where, content, self.options.step, self.options.keep_last)
            keep_newest(self.store, series, self.options.keep_last)


def _send(opened: Opened, writer: StoreWriter, name: str, start: int, stop: int) -> None:
    """Copy bytes [start, stop) of a file."""
    memory = memoryview(bytearray(max(min(_PIECE_NBYTES, stop - start), 0)))
    for first in range(start, stop, _PIECE_NBYTES):
        piece = memory[: min(_PIECE_NBYTES, stop - first)]
        opened.read_into(name, [piece], first)
        writer.write(name, [piece], first)
