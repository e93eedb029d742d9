"""One checkpoint folder of a trainer: its files and ours get their name at once, when all of them are complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.pending import SaveHandle
from fsdp_optim.checkpoint.common.seen_by_all import check_seen_by_all
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.checkpoint.save import background as async_saving
from fsdp_optim.checkpoint.save import foreground as saving
from fsdp_optim.checkpoint.trainers.meeting import meeting, settle
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.options import SaveOptions, WhichWeights
from fsdp_optim.storage.posix.files import checkpoint_errors, write_file
from fsdp_optim.storage.posix.filled import FilledFolder, remove_files
from fsdp_optim.storage.posix.filling import Filling, complete_part, make_part
from fsdp_optim.storage.posix.small_files import has_file
from fsdp_optim.tensors.memory import ordinary_tensors
from fsdp_optim.transport.agree import agree, all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure, is_interrupt
from fsdp_optim.verbs.named_models import named_models
from fsdp_optim.wire import decode, encode

_SAVE = SaveOptions()


class _BeginReport(NamedTuple):
    """What a rank sends the others when a save begins. `path`, `folder`: on the leader, as in `Filling`."""

    machine: str
    path: str = ""
    folder: str = ""


@dataclass
class TrainerFolder:
    """A checkpoint folder that a trainer fills too, while it is saved: its files and ours get their name together.

        save = TrainerFolder.begin(path, options)  # on all ranks
        with save.writing():
            trainer.write_its_files(save.files)
        save.commit(model, optim, step=step)       # on all ranks, also after an error in the block

    An error in the block is noted in `failure`, so that this rank continues to `commit`, to which all ranks come, and which
    raises the error on all of them. Nothing has the name of the folder until everything is complete, and an error leaves nothing.

    Attributes:
        path: the folder of the checkpoint, which is there when everything is complete.
        files: the folder for the files that the ranks of this machine write until then.
        options: the options of the save.
        machine: the lowest rank of this machine. Ranks that see each other's files at once are of one machine.
        has_others: whether ranks of other machines take part.
    """

    path: Path
    files: Path
    options: SaveOptions
    filling: Filling
    machine: int
    has_others: bool
    failure: Failure = field(default_factory=Failure)

    @classmethod
    def begin(
        cls, path: str, options: SaveOptions = _SAVE, *, is_outdated: Callable[[str], bool] = lambda name: False
    ) -> TrainerFolder:
        """Begin a save. Called by all ranks of the job. Waits for the save in the background.

        Args:
            path: the folder of the checkpoint. One that is there is replaced when the new one is complete; other files in it
                are carried over.
            options: a `SaveOptions`.
            is_outdated: whether a file of this name is the trainer's own, so that it is not carried over from a folder that is
                replaced.

        Raises (the same on all ranks):
            CheckpointError: the save in the background has failed; or the folder cannot be made, or not all ranks see it.
            StateError: an option is wrong.
        """
        with meeting("save", options) as group, checkpoint_errors(path):
            options.validate()
            settle(group)
            leader, store = group.ranks[0], store_at(path)
            filling: Filling | None = None
            try:
                report = _BeginReport(store.machine_id())
                if group.rank == leader:
                    filling = Filling.make(path, is_outdated)
                    report = _BeginReport(store.machine_id(), str(filling.path), str(filling.folder))
                result = all_gather_bytes(group, f"save {Path(path).name}", encode(report).encode())
                machines = [decode(_BeginReport, result.content_of(rank)).machine for rank in group.ranks]
                _, where, folder = decode(_BeginReport, result.content_of(leader))
                filling = filling or Filling(Path(where), Path(folder), lambda _: False)
                check_seen_by_all(group, store, folder)
                machine = group.ranks[machines.index(machines[group.ranks.index(group.rank)])]
                files = filling.folder if machine == leader else filling.part_of(machine)
                if machine == group.rank != leader:
                    make_part(files)
                agree(group, "folder")
            except BaseException:
                if filling is not None and group.rank == leader:
                    filling.remove()
                raise
        return cls(filling.path, files, options, filling, machine, len(set(machines)) > 1)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Where the trainer writes its files. An error of this rank is noted in `failure`; others remove the files."""
        try:
            with self.failure:
                yield
        except BaseException:
            self._remove_files()
            raise

    def write(self, name: str, data: bytes) -> None:
        """Write a small file into `files`, unless the trainer has written one of this name. Raises CheckpointError."""
        if not has_file(self.files, name):
            write_file(self.files / name, data, durable=False)  # the commit flushes all files of the folder

    def remove(self, matches: Callable[[str], bool]) -> None:
        """Remove the files in `files` whose names `matches` accepts. Raises OSError."""
        remove_files(self.files, matches)

    @ordinary_tensors()
    def commit(
        self,
        model: nn.Module,
        optim: Any,
        *,
        step: int | None = None,
        weights: WhichWeights = "all",
        background: bool = False,
    ) -> SaveHandle | None:
        """Save the model and the optimizer, and give the folder its name. Called by all ranks of the job, once.

        Returns the handle of the save in the background; None where the folder is complete.

        Args:
            model, optim, step, weights: as for `fsdp_optim.save`.
            background: write in the background, as `fsdp_optim.async_save`, if all ranks say so. False on some rank: the folder
                is complete when this returns.

        Raises (the same on all ranks):
            CheckpointError: a rank has failed while the trainer wrote its files; or the errors of `fsdp_optim.save`.
        """
        try:
            with meeting("commit", self.options) as group:
                if is_interrupt(self.failure.error):
                    raise self.failure.error
                if self.failure.error is not None:
                    raise CheckpointError(f"{self.path}: {self._reason()}") from self.failure.error
                result = all_gather_bytes(group, "the trainer's files are written", b"" if background else b"waits")
                is_waited_for = any(result.content_of(rank) for rank in group.ranks)
                if self.has_others:
                    self._tell_files(group)
            store = FilledFolder(self.filling, OURS.probe)
            named = named_models(model, optim)
            arguments = SaveArguments.of(self.options, None, named, step=step, overwrite=True, weights=weights)
            with checkpoint_errors(self.path):
                if not is_waited_for:
                    return async_saving.async_save(store, named.model, named.optim, arguments)
                saving.save(store, named.model, named.optim, arguments)
                return None
        except BaseException:
            self._remove_files()
            raise

    def _tell_files(self, group: RankGroup) -> None:
        """Tell the lowest rank which files the other machines have written, and of what size: only they are sure to see them."""
        failure, content, leader = Failure(), b"", group.ranks[0]
        if group.rank == self.machine != leader:
            with failure:
                content = json.dumps(complete_part(self.files, durable=self.options.durable)).encode()
        result = all_gather_bytes(group, "the files of each machine", content, error=failure.error)
        for rank in group.ranks if group.rank == leader else ():
            if result.content_of(rank):
                self.filling.note(rank, json.loads(result.content_of(rank)))

    def _reason(self) -> str:
        error = self.failure.error
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"

    def _remove_files(self) -> None:
        """Remove the trainer's files, after a failure, on the rank that has made their folder."""
        if self.filling.lock >= 0:
            self.filling.remove()
