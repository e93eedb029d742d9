"""Verify: read all bytes of a checkpoint of any format, in several threads and bounded memory, and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from fsdp_optim.arguments import check_at_least
from fsdp_optim.checkpoint.common.contents import RECORDS, TREE, SavedValue
from fsdp_optim.checkpoint.common.files import File, planned
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.progress import Progress
from fsdp_optim.checkpoint.common.retry import retry_if_replaced
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, store_at
from fsdp_optim.errors import CheckpointError, counted_noun, shortened
from fsdp_optim.foreign.archive.record_sums import RecordSums
from fsdp_optim.formats.base.protocols import Half, PlannedFile, Reader, StoredTensor
from fsdp_optim.layout import whole_on
from fsdp_optim.move import Key
from fsdp_optim.offline.conversion.copy_ranges import plan_units
from fsdp_optim.offline.conversion.unit_sources import CheckpointSource
from fsdp_optim.offline.conversion.workers import RankWork, num_threads_in, unit_nbytes_in
from fsdp_optim.offline.values.stored_prints import FilePrints
from fsdp_optim.options import CONVERT_NBYTES, LEAST_CONVERT_NBYTES
from fsdp_optim.results.fingerprints import Fingerprint
from fsdp_optim.results.offline import VerifyResult
from fsdp_optim.tensors.memory import Budget, dtype_named

_NUM_THREADS = 4  # that compare torch's checksums; each checksum is of a complete tensor
_MOST_NAMED = 20  # damaged places in an error


def verify(
    place: Place,
    *,
    bucket_nbytes: int = CONVERT_NBYTES,
    progress: bool | None = None,
    storage_options: StorageOptions = None,
) -> VerifyResult:
    """Read every byte. Raises CheckpointError that names all places with damage."""
    check_at_least("bucket_nbytes", bucket_nbytes, LEAST_CONVERT_NBYTES, " bytes (16 MiB)", CheckpointError)
    store = store_at(place, options=storage_options)
    with closing(retry_if_replaced(lambda: open_checkpoint(store, verify=True))) as checkpoint:
        budget = Budget(bucket_nbytes, "the elements of a checkpoint that a process verifies")
        unit_nbytes = unit_nbytes_in(budget)
        # Before the tables of all tensors, so that both are never in memory together.
        problems = [*_read_small(checkpoint)]
        files, stored = _files(checkpoint)
        nbytes = sum(file.plan.nbytes for file in files)
        sums = RecordSums.of(checkpoint)
        of_archives = sums.nbytes if sums is not None else 0
        with Progress(progress, "verifying", of_archives + nbytes, shown=True) as shown:
            has_sums = checkpoint.index.facts.has_checksums
            if sums is not None:
                problems += sums.compare(_NUM_THREADS, shown.up_to)
                has_sums = sums.is_whole
            source, prints = (
                CheckpointSource(checkpoint, stored),
                FilePrints(files, _fingerprint_in(checkpoint, problems)),
            )
            share = RankWork(
                source,
                files,
                plan_units(files, unit_nbytes, {}),
                join=prints.writer,
                unit_nbytes=unit_nbytes,
                shown=lambda num: shown.up_to(of_archives + num),
                failed=lambda error: problems.append(str(error)),
            )
            share.run(prints.writer(), num_threads_in(budget, unit_nbytes, source))
            checkpoint.check_unchanged()
            num_proven, wrong = prints.compare() if not problems else (0, [])
            problems += wrong
            _raise(checkpoint, problems)
            shown.done()
        return VerifyResult(
            checkpoint.index.where,
            checkpoint.index.facts.format_name,
            len(stored),
            nbytes,
            has_sums,
            len(checkpoint.index.extras),
            num_proven=num_proven,
        )


def _fingerprint_in(checkpoint: Reader, problems: list[str]) -> Fingerprint | None:
    """Return the fingerprint in a checkpoint. `problems` gets the error about a damaged one."""
    try:
        return checkpoint.index.fingerprint
    except CheckpointError as error:
        problems.append(str(error))
        return None


def _files(checkpoint: Reader) -> tuple[list[File], dict[Key, StoredTensor]]:
    """Return one file for each half with all tensors, as for a save, in the order in which they are stored."""
    files: list[File] = []
    stored: dict[Key, StoredTensor] = {}
    halves: tuple[tuple[Half, dict[str, StoredTensor]], ...] = (
        ("model", dict(checkpoint.index.weights)),
        ("optim", dict(checkpoint.index.optim_tensors)),
        ("state", dict(checkpoint.index.trees)),
    )
    for half, tensors in halves:
        values, starts, at = list[SavedValue](), list[int](), 0
        for key, tensor in sorted(tensors.items(), key=lambda pair: (pair[1].file, pair[1].start)):
            name, whole = TREE if half == "state" else "", whole_on(tensor.shape, (0,))
            value = SavedValue(key, name, dtype_named(tensor.dtype), whole, half == "optim", key)
            stored[value.key] = tensor
            values.append(value)
            starts.append(at)
            at += value.nbytes
        plan = PlannedFile(
            name=half,
            half=half,
            head=b"",
            tensors=tuple(map(planned, values)),
            starts=tuple(starts),
            nbytes_of_data=at,
            segment_nbytes=0,
            tensors_in=_unnamed,
        )
        files.append(File(plan, tuple(values)))
    return files, stored


def _unnamed(start: int, stop: int) -> str:
    """Name the content of a range of bytes for errors. All files that are verified share one name."""
    return "its tensors"


def _read_small(checkpoint: Reader) -> Iterator[str]:
    """Read the description of the optimizer and the extras, without decoding pickles. Yields the errors."""
    if checkpoint.index.optim is not None:
        try:
            checkpoint.index.optim.decoded(allow_pickle=False, records=RECORDS)
        except CheckpointError as error:
            if "allow_pickle" not in str(error):
                yield str(error)
    for extra in checkpoint.index.extras.values():
        try:
            extra.as_tree(allow_pickle=False)
        except CheckpointError as error:
            yield str(error)


def _raise(checkpoint: Reader, problems: Sequence[str]) -> None:
    if len(problems) == 1:
        raise CheckpointError(problems[0])
    if problems:
        raise CheckpointError(
            f"{checkpoint.index.where}: {counted_noun(len(problems), 'damaged place')}: "
            + shortened(sorted(problems), _MOST_NAMED, "; ")
        )
