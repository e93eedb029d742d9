"""One checkpoint folder of a trainer: its files and ours get their name at once, when all of them are complete."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from torch import nn

from fsdp_optim.checkpoint.common.arguments import LoadArguments, SaveArguments
from fsdp_optim.checkpoint.common.pending import pending
from fsdp_optim.checkpoint.common.seen_by_all import check_seen_by_all
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.checkpoint.load import restore
from fsdp_optim.checkpoint.save import background
from fsdp_optim.checkpoint.save import foreground as saving
from fsdp_optim.checkpoint.trainers import looks as trainer_looks
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.formats.own.manifest import NAME
from fsdp_optim.memory import ordinary_tensors
from fsdp_optim.options import BUCKET_NBYTES, CallArguments, OnReplicaMismatch, Rename, Strategy, WhichWeights
from fsdp_optim.storage.posix.files import absolute, checkpoint_errors
from fsdp_optim.storage.posix.filled import FilledFolder
from fsdp_optim.storage.posix.filling import Filling, complete_part, make_part
from fsdp_optim.storage.posix.small_files import has_file, sizes_in
from fsdp_optim.transport.agree import agree, all_gather_bytes, all_hear, in_turn
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure, is_interrupt
from fsdp_optim.transport.world import world_here
from fsdp_optim.wire import decode, encode

_CALL = "checkpoint of a trainer"
_OF_THE_RUN = re.compile(
    r"(scheduler|sampler|dl_state_dict)(_\d+)?\.(bin|pt)|scaler\.pt"
    r"|rng_state(_\d+)?\.pth|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|trainer_state\.json"
)
"""The files of trainers for the state of a run."""

_OUTDATED = re.compile(
    r"(adapter_)?(pytorch_)?model(_fsdp)?(_\d+)?(_rank\d+)?(-\d{5}-of-\d{5})?(\.bin|\.safetensors)?(\.index\.json)?"
    rf"|optimizer(_\d+)?(_rank\d+)?(\.bin|\.pt)?|{_OF_THE_RUN.pattern}"
)
"""The files of trainers for the weights, the optimizer and the state of a run. In a folder that is saved again they are old."""

_SHARDED_MODEL, SHARDED_OPTIM = "pytorch_model_fsdp_{}", "optimizer_0"
"""Folders of torch.distributed.checkpoint that Accelerate writes with SHARDED_STATE_DICT."""

Kind = Literal["ours", "sharded", "other"]
"""A checkpoint of this library, one of `is_sharded_by_accelerate`, or anything else."""

DoneT = TypeVar("DoneT")

log = logging.getLogger("fsdp_optim")


class _BeginReport(NamedTuple):
    """What a rank tells the others when a save begins. `path`, `folder`: on the leader, as in `Filling`."""

    machine: str
    path: str = ""
    folder: str = ""


@dataclass(frozen=True)
class Settings:
    """How the plug-in for Accelerate and the Trainer saves and loads.

    Args:
        background, durable, checksums, max_file_size, strategy, on_replica_mismatch, allow_pickle, cast, progress, timeout,
            bucket_nbytes: as for `fsdp_optim.integrations.accelerate.enable`.
    """

    background: bool = False
    durable: bool = True
    checksums: bool = True
    max_file_size: int = 4_000_000_000
    strategy: Strategy = "auto"
    on_replica_mismatch: OnReplicaMismatch = "error"
    allow_pickle: bool = False
    cast: bool = False
    progress: bool | None = None
    timeout: float | timedelta | None = None
    bucket_nbytes: int = BUCKET_NBYTES

    def call(self) -> CallArguments:
        """The options of every call."""
        return CallArguments(
            timeout=self.timeout,
            bucket_nbytes=self.bucket_nbytes,
            on_replica_mismatch=self.on_replica_mismatch,
        )

    def saving(self, step: int | None, weights: WhichWeights = "all") -> SaveArguments:
        """The options of a save."""
        return SaveArguments(
            timeout=self.timeout,
            bucket_nbytes=self.bucket_nbytes,
            on_replica_mismatch=self.on_replica_mismatch,
            step=step,
            weights=weights,
            overwrite=True,
            strategy=self.strategy,
            max_file_size=self.max_file_size,
            checksums=self.checksums,
            durable=self.durable,
            allow_pickle=self.allow_pickle,
            progress=self.progress,
        )

    def loading(
        self, weights: WhichWeights = "all", *, strict: bool = True, rename: Rename | None = None
    ) -> LoadArguments:
        """The options of a load."""
        return LoadArguments(
            timeout=self.timeout,
            bucket_nbytes=self.bucket_nbytes,
            on_replica_mismatch=self.on_replica_mismatch,
            strict=strict,
            weights=weights,
            rename=rename,
            cast=self.cast,
            allow_pickle=self.allow_pickle,
            progress=self.progress,
        )


@contextmanager
def meeting(what: str, settings: Settings) -> Iterator[RankGroup]:
    """All ranks of the job, for a step of the trainer. An error inside is raised on all of them."""
    world, call = world_here(), settings.call()
    group = world.group(f"{_CALL}: {what}", range(world.size), timeout=call.seconds, bucket_nbytes=call.bucket_nbytes)
    with in_turn(group), all_hear(group):
        yield group


def wait_on_all(settings: Settings) -> None:
    """Wait for the save in the background. If it failed on any rank, all ranks raise its error."""
    with meeting("wait", settings) as group:
        _settle(group)


def _settle(group: RankGroup) -> None:
    failure = Failure()
    with failure:
        pending.settle()
    agree(group, "waited", failure.error)


def is_ours(path: str) -> bool:
    """Whether a folder has a checkpoint of this library."""
    return has_file(path, NAME)


def is_sharded_by_accelerate(path: str, *, with_optim: bool) -> bool:
    """Whether a folder has the parts that Accelerate writes with SHARDED_STATE_DICT: those of one model, and of its optimizer.

    Accelerate itself loads such an optimizer into FSDP1 only where the new run's optimizer has a state already.
    """
    wanted = [_SHARDED_MODEL.format(0), *([SHARDED_OPTIM] if with_optim else [])]
    return all(has_file(f"{path}/{name}", ".metadata") for name in wanted) and not has_file(
        f"{path}/{_SHARDED_MODEL.format(1)}", ".metadata"
    )


def by_lowest(what: str, settings: Settings, do: Callable[[], DoneT]) -> DoneT:
    """What `do` returns on rank 0, on all ranks; its error is raised on all of them. Called by all ranks.

    So that all ranks take one branch: what `do` finds in a folder, ranks on other machines may find seconds later. It returns a
    value that JSON has.
    """
    with meeting(what, settings) as group:
        return trainer_looks.by_lowest(group, what, do)


@dataclass(frozen=True)
class FoundFolder:
    """What rank 0 has found in a folder of a trainer, the same on all ranks.

    Attributes:
        files: the names of the files for the state of the run, which all ranks that read them see by now.
    """

    kind: Kind
    files: frozenset[str]


def look_at(path: str, settings: Settings, *, with_optim: bool) -> FoundFolder:
    """Look at a folder that is to be loaded. Called by all ranks.

    Raises CheckpointError, on all ranks, where rank 0 cannot tell what is there, and where a rank does not see in time what it is
    to read. `with_optim`: as for `is_sharded_by_accelerate`.
    """

    def look() -> tuple[Kind, dict[str, int]]:
        kind: Kind = "ours" if is_ours(path) else "other"
        if kind == "other" and is_sharded_by_accelerate(path, with_optim=with_optim):
            kind = "sharded"
        return kind, sizes_in(path, is_of_the_run) if kind != "other" else {}

    with meeting("look", settings) as group:
        kind, sizes = trainer_looks.by_lowest(group, f"look at {Path(path).name}", look)
        if kind != "other":
            trainer_looks.see_files(group, path, sizes)
    return FoundFolder(kind, frozenset(sizes))


def see_file(path: str, name: str, settings: Settings) -> None:
    """Wait until all ranks see a file that rank 0 has found in a folder. Called by all ranks; raises as `look_at` does."""
    with meeting("look", settings) as group:
        trainer_looks.see_file(group, path, name)


def is_of_the_run(name: str) -> bool:
    """Whether a trainer gives this name to a file for the state of a run."""
    return _OF_THE_RUN.fullmatch(name) is not None


@dataclass
class FolderSave:
    """A checkpoint of a trainer under way, on all ranks.

    The trainer writes its files into `files`. An error there is noted in `failure`, so that this rank goes on to the next step
    to which all ranks come.

    Attributes:
        path: the folder of the checkpoint, which is there when everything is complete.
        files: the folder for the files that the ranks of this machine write until then.
        machine: the lowest rank of this machine. Ranks that see each other's files at once are of one machine.
        has_others: whether ranks of other machines take part.
    """

    path: Path
    files: Path
    settings: Settings
    filling: Filling
    machine: int
    has_others: bool
    failure: Failure = field(default_factory=Failure)

    @classmethod
    def begin(cls, path: str, settings: Settings) -> FolderSave:
        """Called by all ranks. Waits for the save in the background, and raises its error."""
        with meeting("save", settings) as group, checkpoint_errors(path):
            _settle(group)
            leader, store = group.ranks[0], store_at(path)
            filling: Filling | None = None
            try:
                report = _BeginReport(store.machine_id())
                if group.rank == leader:
                    filling = Filling.make(path, lambda name: _OUTDATED.fullmatch(name) is not None)
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
        return cls(filling.path, files, settings, filling, machine, len(set(machines)) > 1)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Where the trainer writes its files. An error of this rank is noted in `failure`; others remove the files."""
        try:
            with self.failure:
                yield
        except BaseException:
            self._remove_files()
            raise

    @ordinary_tensors()
    def commit(
        self,
        model: nn.Module,
        optim: Any,
        step: int | None,
        *,
        waits: bool = False,
        weights: WhichWeights = "all",
    ) -> None:
        """Save the model and the optimizer, and give the folder its name; in the background, if the settings say so.

        Called by all ranks. `waits`: whether this rank needs the complete folder when this returns.
        """
        is_there = not self.settings.background
        try:
            with meeting("commit", self.settings) as group:
                if is_interrupt(self.failure.error):
                    raise self.failure.error
                if self.failure.error is not None:
                    raise CheckpointError(f"{self.path}: {self._reason()}") from self.failure.error
                result = all_gather_bytes(group, "the trainer's files are written", b"waits" if waits else b"")
                is_there = is_there or any(result.content_of(rank) for rank in group.ranks)
                if self.has_others:
                    self._tell_files(group)
            store, options = FilledFolder(self.filling, OURS.probe), self.settings.saving(step, weights)
            with checkpoint_errors(self.path):
                if is_there:
                    saving.save(store, model, optim, options)
                else:
                    background.async_save(store, model, optim, options)
        except BaseException:
            self._remove_files()
            raise

    def _tell_files(self, group: RankGroup) -> None:
        """Tell the lowest rank which files the other machines have written, and of what size: only they are sure to see them."""
        failure, content, leader = Failure(), b"", group.ranks[0]
        if group.rank == self.machine != leader:
            with failure:
                content = json.dumps(complete_part(self.files, durable=self.settings.durable)).encode()
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


@ordinary_tensors()
def load_folder(
    path: str,
    model: nn.Module,
    optim: Any,
    settings: Settings,
    *,
    weights: WhichWeights = "all",
    strict: bool = True,
    rename: Rename | None = None,
) -> None:
    """Load a checkpoint of this library, or one that its readers know. Called by all ranks."""
    with checkpoint_errors(path):
        restore.restore(absolute(path), model, optim, settings.loading(weights, strict=strict, rename=rename))


def optimizer_inside(optim: Any) -> Any:
    """The optimizer in the wrapper that Accelerate puts around it."""
    while type(optim).__name__ == "AcceleratedOptimizer":
        optim = optim.optimizer
    return optim


def optimizers_inside(optims: Sequence[Any]) -> Any:
    """One optimizer, a list of several, or None."""
    inside = [optimizer_inside(optim) for optim in optims]
    return inside if len(inside) > 1 else inside[0] if inside else None


def check_settings(settings: Settings) -> None:
    """Raise StateError or CheckpointError for a wrong option."""
    settings.saving(None).validate()
    settings.loading().validate()
    for name in ("background", "durable", "checksums", "allow_pickle", "cast"):
        if not isinstance(getattr(settings, name), bool):
            raise StateError(f"{name} must be True or False, not {getattr(settings, name)!r}")
