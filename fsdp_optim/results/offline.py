"""The results of the calls on checkpoints without a model and without ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_optim.results.contents import CheckpointInfo
from fsdp_optim.results.shown import names_shown, shown


@dataclass(frozen=True)
class AverageResult:
    """The result of `average`.

    Attributes:
        path: the path of the new checkpoint.
        sources: the checkpoints that were averaged, in their order.
        weights: the share of each in the average; their sum is 1.
        num_tensors: the number of tensors of the new checkpoint.
        num_averaged: how many of them are averages. The others are integers, flags and the like, of the last checkpoint.
        nbytes: the bytes of all tensors.
        differing: what was not averaged and is not the same in all checkpoints, so that the last one decided: the FQNs of integer
            and bool tensors; numbers of the optimizer, as in `weight:step`; and hyperparameters, as in `lr of param group 0`.
    """

    path: Path | str
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    num_tensors: int
    num_averaged: int
    nbytes: int
    differing: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return shown(
            self,
            path=repr(str(self.path)),
            weights=self.weights,
            num_tensors=self.num_tensors,
            num_averaged=self.num_averaged,
            nbytes=self.nbytes,
            differing=names_shown(self.differing),
        )


@dataclass(frozen=True)
class AdapterMergeResult:
    """The result of `merge_adapter`.

    Attributes:
        path: the path of the new checkpoint.
        base, adapter: what was merged.
        num_tensors: the number of tensors of the new checkpoint.
        num_merged: how many of them have a product of LoRA factors in them.
        num_replaced: how many are the adapter's own: of `modules_to_save`, and biases that were trained.
        nbytes: the bytes of all tensors.
    """

    path: Path | str
    base: str
    adapter: str
    num_tensors: int
    num_merged: int
    num_replaced: int
    nbytes: int


@dataclass(frozen=True)
class VerifyResult:
    """The result of `verify`, which has found nothing wrong.

    Attributes:
        path, format, num_tensors, nbytes: the place, the name of its format, the tensors that were read, and their bytes.
        has_checksums: whether every byte of the tensors was compared with a checksum: this library's own, or the CRC32 that files
            of `torch.save` have. False: there are none, and changed bytes show in `num_proven` tensors alone.
        num_proven: tensors with the fingerprints that the save has made of its live values.
        num_extras: the number of other values that were read: of the trainer, of ranks and of modules.
    """

    path: str
    format: str
    num_tensors: int
    nbytes: int
    has_checksums: bool
    num_extras: int
    num_proven: int = 0


@dataclass(frozen=True)
class PruneResult:
    """The result of `prune`.

    Attributes:
        root: the folder of checkpoints.
        removed: the checkpoints that were removed, or would be with `dry_run=True`, the newest first.
        kept: the complete checkpoints that stay, the newest first.
        passed_over: damaged and unreadable checkpoints, and symbolic links: they neither count nor go.
        not_removed: the checkpoints that no rule keeps and that could not be removed; the log says why.
        nbytes: the bytes of the removed checkpoints.
        dry_run: whether nothing was removed.
    """

    root: str
    removed: tuple[Path | str, ...]
    kept: tuple[Path | str, ...]
    passed_over: tuple[Path | str, ...]
    not_removed: tuple[Path | str, ...]
    nbytes: int
    dry_run: bool


@dataclass(frozen=True)
class CopyResult:
    """The result of `copy`.

    Attributes:
        path: the new checkpoint.
        num_files, nbytes: the files that were copied, with the manifest, and their bytes.
        has_checksums: whether all bytes of the tensors were compared with their checksums; False: the save wrote none.
        left_out: files that somebody had put into the folder under names that no checkpoint has, and that were not copied.
    """

    path: Path | str
    num_files: int
    nbytes: int
    has_checksums: bool
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` has seen at a path.

    Attributes:
        path: the path or URL.
        kind: "checkpoint", "root" (a folder of checkpoints), "unfinished" (the folder of a save that has not ended), or "none".
        complete: whether everything is there; of a root, whether all its checkpoints are complete. Bytes are not compared.
        problems: what is missing or damaged, a sentence for each.
        load: the line of Python that loads it; empty where nothing can be loaded.
        format, step, world_size, has_optim, nbytes: of a checkpoint, as for `inspect`; None, 0 and empty where unknown.
        checkpoints: the checkpoints of a root, the newest first.
    """

    path: str
    kind: str
    complete: bool
    problems: tuple[str, ...] = ()
    load: str = ""
    format: str = ""
    step: int | None = None
    world_size: int = 0
    has_optim: bool | None = None
    nbytes: int = 0
    checkpoints: tuple[CheckpointInfo, ...] = ()
