"""One checkpoint folder of a trainer: its files and ours get their name at once, when all of them are complete."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_optim.checkpoint import background, restore
from fsdp_optim.checkpoint import save as saving
from fsdp_optim.checkpoint.pending import pending
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.manifest import NAME
from fsdp_optim.formats.ours import OURS
from fsdp_optim.memory import ordinary_tensors
from fsdp_optim.options import (
    BUCKET_NBYTES,
    LoadOptions,
    OnReplicaMismatch,
    Options,
    Rename,
    SaveOptions,
    Strategy,
    WhichWeights,
)
from fsdp_optim.storage.posix.files import absolute, checkpoint_errors
from fsdp_optim.storage.posix.filled import FilledFolder, has_file
from fsdp_optim.storage.posix.filling import Filling
from fsdp_optim.transport.agree import agree, all_hear, in_turn, tell
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.transport.world import world_here

_CALL = "checkpoint of a trainer"
_OUTDATED = re.compile(
    r"(adapter_)?(pytorch_)?model(_fsdp)?(_\d+)?(_rank\d+)?(-\d{5}-of-\d{5})?(\.bin|\.safetensors)?(\.index\.json)?"
    r"|optimizer(_\d+)?(_rank\d+)?(\.bin|\.pt)?|(scheduler|sampler|dl_state_dict)(_\d+)?\.(bin|pt)|scaler\.pt"
    r"|rng_state(_\d+)?\.pth|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|trainer_state\.json"
)
"""The files of trainers for the weights, the optimizer and the state of a run. In a folder that is saved again they are old."""

_SHARDED_MODEL, SHARDED_OPTIM = "pytorch_model_fsdp_{}", "optimizer_0"
"""Folders of torch.distributed.checkpoint that Accelerate writes with SHARDED_STATE_DICT."""

log = logging.getLogger("fsdp_optim")


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

    def call(self, *, strict: bool = True) -> Options:
        """The options of every call."""
        return Options(
            timeout=self.timeout,
            bucket_nbytes=self.bucket_nbytes,
            on_replica_mismatch=self.on_replica_mismatch,
            strict=strict,
        )

    def saving(self, step: int | None, weights: WhichWeights = "all") -> SaveOptions:
        """The options of a save."""
        return SaveOptions(
            self.call(),
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
    ) -> LoadOptions:
        """The options of a load."""
        return LoadOptions(
            self.call(strict=strict),
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


@dataclass
class FolderSave:
    """A checkpoint of a trainer under way, on all ranks.

    The trainer writes its files into `files`. An error there is noted in `failure`, so that this rank goes on to the next step
    to which all ranks come.

    Attributes:
        path: the folder of the checkpoint, which is there when everything is complete.
        files: the folder for the trainer's files until then.
    """

    path: Path
    files: Path
    settings: Settings
    filling: Filling
    failure: Failure = field(default_factory=Failure)

    @classmethod
    def begin(cls, path: str, settings: Settings) -> FolderSave:
        """Called by all ranks. Waits for the save in the background, and raises its error."""
        with meeting("save", settings) as group, checkpoint_errors(path):
            _settle(group)
            leads = group.rank == group.ranks[0]
            filling: Filling | None = None
            try:
                content = b""
                if leads:
                    filling = Filling.make(path, lambda name: _OUTDATED.fullmatch(name) is not None)
                    content = json.dumps([str(filling.path), str(filling.folder)]).encode()
                result = tell(group, f"save {Path(path).name}", content)
                where, folder = json.loads(result.content_of(group.ranks[0]))
                if filling is None:
                    filling = Filling(Path(where), Path(folder), lambda _: False)
                    if not has_file(folder, "owner.lock"):
                        raise CheckpointError(
                            f"{where}: rank {group.rank} does not see {folder}, which rank {group.ranks[0]} has made: the folder "
                            "has to be on a file system that all ranks share"
                        )
                agree(group, "folder")
            except BaseException:
                if filling is not None and leads:
                    filling.remove()
                raise
        return cls(filling.path, filling.folder, settings, filling)

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
                if self.failure.error is not None:
                    raise CheckpointError(f"{self.path}: {self._reason()}") from self.failure.error
                result = tell(group, "the trainer's files are written", b"waits" if waits else b"")
                is_there = is_there or any(result.content_of(rank) for rank in group.ranks)
            store, options = FilledFolder(self.filling, OURS.judge), self.settings.saving(step, weights)
            with checkpoint_errors(self.path):
                if is_there:
                    saving.save(store, model, optim, options)
                else:
                    background.async_save(store, model, optim, options)
        except BaseException:
            self._remove_files()
            raise

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
            raise StateError(f"{name} has to be True or False, not {getattr(settings, name)!r}")
