"""Diagnose: what a path is, whether all of it is there, and the line of Python that loads it. Reads no elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from fsdp_optim.checkpoint.catalog import listing
from fsdp_optim.checkpoint.common.formats import format_of, listed_formats
from fsdp_optim.checkpoint.common.stores import StorageOptions, directory_at, store_at
from fsdp_optim.errors import CheckpointError, counted_noun
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.formats.own.probe import any_summary
from fsdp_optim.offline.looking.inspecting import inspect
from fsdp_optim.results.contents import CheckpointInfo
from fsdp_optim.results.offline import Diagnosis
from fsdp_optim.storage.base import Opened, is_reserved

_DCP_PART, _INDEX = ".distcp", ".safetensors.index.json"
"""How the names of files of other programs end: elements of torch.distributed.checkpoint, the list of Hugging Face's files."""


def diagnose(place: str, storage_options: StorageOptions = None) -> Diagnosis:
    """Say what a path is."""
    name = place.rstrip("/").rpartition("/")[2]
    if is_reserved(name):
        base = name.rpartition(".")[0]
        why = f"{place}: is what a save of {base} has written so far, or left behind when it died; the next save removes it"
        return Diagnosis(place, "unfinished", False, (why,))
    try:
        summary = inspect(place, storage_options)
    except CheckpointError as error:
        return _of_root(place, storage_options) or _of_broken(place, storage_options, error)
    optim = ", optim" if summary.has_optim else ""
    return Diagnosis(
        path=summary.path,
        kind="checkpoint",
        complete=True,
        load=f"fsdp_optim.load({summary.path!r}, model{optim})",
        format=summary.format,
        step=summary.step,
        world_size=summary.world_size,
        has_optim=summary.has_optim,
        nbytes=summary.nbytes,
    )


def _of_root(place: str, options: StorageOptions) -> Diagnosis | None:
    """Return the diagnosis of a folder of checkpoints; None for any other path."""
    checkpoints: list[CheckpointInfo] = []
    with suppress(CheckpointError):
        checkpoints = listing.checkpoints(*(directory_at(place, options, format) for format in listed_formats()))
    if not checkpoints:
        return None
    good = next((known for known in checkpoints if known.complete), None)
    problems = tuple(_problem(known) for known in checkpoints if not known.complete)
    return Diagnosis(
        path=place,
        kind="root",
        complete=not problems,
        problems=problems,
        load=f"fsdp_optim.resume({place!r}, model{_optim_of(good, options)})" if good is not None else "",
        step=good.step if good is not None else None,
        world_size=good.world_size if good is not None else 0,
        nbytes=sum(known.nbytes for known in checkpoints),
        checkpoints=tuple(checkpoints),
    )


def _optim_of(info: CheckpointInfo, options: StorageOptions) -> str:
    """Return the argument of the optimizer; nothing for a checkpoint without one, such as a thin one."""
    with suppress(CheckpointError):
        return ", optim" if inspect(str(info.path), options).has_optim else ""
    return ", optim"


def _problem(info: CheckpointInfo) -> str:
    return info.reason if info.reason.startswith(str(info.path)) else f"{info.path}: {info.reason}"


def _of_broken(place: str, options: StorageOptions, error: CheckpointError) -> Diagnosis:
    """Return the diagnosis of a path that cannot be opened: a damaged checkpoint, or none."""
    if error.is_wrong_use:
        return _without_manifest(place, options, error)
    with suppress(CheckpointError), store_at(place, OURS, options).open() as opened:
        if not opened.has(OURS.probe.manifest):
            return _without_manifest(place, options, error)
        summary = any_summary(opened)
        problems = tuple(_missing(opened, summary.files)) or (str(error),)
        return Diagnosis(
            place,
            "checkpoint",
            False,
            problems,
            format=OURS.name,
            step=summary.step,
            world_size=summary.world_size,
            nbytes=sum(summary.files.values()),
        )
    return Diagnosis(place, "checkpoint", False, (str(error),))


def _without_manifest(place: str, options: StorageOptions, error: CheckpointError) -> Diagnosis:
    """Return the diagnosis of a place without a manifest: with files that only a save writes, the manifest is lost.

    Files of another format that cannot be opened are a damaged checkpoint of that format.
    """
    names: list[str] = []
    other = None
    with suppress(CheckpointError), store_at(place, OURS, options).open_any() as files:
        names = files.names()
        other = format_of(files)
    traces = [name for name in names if OURS.probe.is_trace(name)]
    if not traces and other is not None and not error.is_wrong_use:
        return Diagnosis(place, "checkpoint", False, (str(error),), format=other.name)
    if not traces:
        return _of_remains(place, names) or Diagnosis(place, "none", False, (str(error),))
    manifest = OURS.probe.manifest
    why = (
        f"{place}/{manifest}: is missing, so the checkpoint cannot be loaded, though "
        f"{counted_noun(len(traces), 'file')} of a save are there: bring the manifest back, or load another checkpoint"
    )
    return Diagnosis(place, "checkpoint", False, (why,), format=OURS.name)


def _of_remains(place: str, names: Sequence[str]) -> Diagnosis | None:
    """Return the diagnosis of files of another program without those by which its format is recognised; None for any other."""
    parts = [name for name in names if name.endswith(_DCP_PART)]
    if parts:
        why = (
            f"{place}/.metadata: is missing, which torch.distributed.checkpoint writes last, though "
            f"{counted_noun(len(parts), 'file')} of elements are there: its save died, or is writing now"
        )
        return Diagnosis(place, "unfinished", False, (why,))
    index = next((name for name in names if name.endswith(_INDEX)), None)
    if index is None:
        return None
    why = f"{place}/{index}: names the files with the weights, and none of these is there: copy them into the folder"
    return Diagnosis(place, "checkpoint", False, (why,), format="safetensors")


def _missing(opened: Opened, files: dict[str, int]) -> Iterator[str]:
    """Yield a sentence for each file that is missing, or does not have its size."""
    for name, nbytes in files.items():
        if not opened.has(name):
            yield f"{opened.named(name)}: is missing; it had {nbytes} bytes"
            continue
        try:
            size = opened.nbytes_of(name)
        except OSError as error:
            yield f"{opened.named(name)}: cannot be read: {error.strerror or error}"
        else:
            if size < 0:
                yield f"{opened.named(name)}: is a link or a folder, and checkpoints have files alone: replace it by the file"
            elif size != nbytes:
                yield f"{opened.named(name)}: has {size} bytes, {nbytes} were saved: it was cut short or changed"
