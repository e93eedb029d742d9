"""Diff: two checkpoints of any formats and world sizes, value by value, each read once, in bounded memory.

opened  ->  names: parameters by FQN, or by id with the names that are known     named_values.py, diff_names.py
        ->  pairs of values of one name: shapes differ, objects, or elements to compare
        ->  windows of elements of both sides, in several threads                element_windows.py, element_numbers.py
        ->  DiffResult
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod, sqrt

from fsdp_optim.arguments import check_at_least, check_views
from fsdp_optim.checkpoint.common.progress import Progress
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions, is_url, options_beside
from fsdp_optim.checkpoint.views import check_used, seen
from fsdp_optim.errors import CheckpointError, StateError, counted_noun
from fsdp_optim.layout.views import InverseView, View
from fsdp_optim.offline.pages.diff_page import page_of
from fsdp_optim.offline.pages.output_file import checked_output, write_output
from fsdp_optim.offline.values.diff_names import (
    ValuePair,
    hyperparameters_that_differ,
    named_alike,
    paired,
    text_of,
)
from fsdp_optim.offline.values.element_numbers import ChunkDifference, ChunkMemory
from fsdp_optim.offline.values.element_windows import (
    CHUNK_NUMEL,
    ElementWindow,
    WindowReader,
    all_elements,
    batches_of,
    chunks_of,
    num_threads_in,
    window_nbytes_in,
    windows_of,
)
from fsdp_optim.offline.values.named_values import Decoded, NamedValues, opened_at
from fsdp_optim.offline.values.stored_prints import equal_by_prints
from fsdp_optim.options import CONVERT_NBYTES, LEAST_CONVERT_NBYTES
from fsdp_optim.plan import Plans
from fsdp_optim.results.differences import DiffResult, ObjectDiff, ShapeDiff, ValueDiff
from fsdp_optim.state.values.same import same
from fsdp_optim.tensors.memory import Budget


@dataclass(frozen=True)
class DiffArguments:
    """The arguments of `diff` besides the two checkpoints."""

    match: str | None = None
    tolerance: float | None = None
    html: str | os.PathLike[str] | None = None
    param_names: Sequence[str] | None = None
    allow_pickle: bool = False
    bucket_nbytes: int = CONVERT_NBYTES
    progress: bool | None = None
    views: Sequence[View | InverseView] = ()
    storage_options: StorageOptions = field(default=None, repr=False)


def diff(place_a: Place, place_b: Place, arguments: DiffArguments) -> DiffResult:
    """Compare two checkpoints. No communication."""
    check_at_least("bucket_nbytes", arguments.bucket_nbytes, LEAST_CONVERT_NBYTES, " bytes (16 MiB)", CheckpointError)
    check_views(arguments.views, of_checkpoints=True)
    if arguments.html is not None:
        checked_output(arguments.html)
    DiffResult(
        "", "", (None, None), (), tolerance=arguments.tolerance
    )  # refuses a wrong tolerance before anything is read
    places = (place_a, place_b, arguments.html)
    url = next((place for place in places if place is not None and is_url(place)), None)
    with ExitStack() as stack:
        readers = [
            seen(
                stack.enter_context(opened_at(place, options_beside(url, place, arguments.storage_options))),
                arguments.views,
            )
            for place in (place_a, place_b)
        ]
        opened = [Decoded.of(reader, allow_pickle=arguments.allow_pickle) for reader in readers]
        a, b, notes = named_alike(opened[0], opened[1], arguments.param_names)
        check_used(*readers)
        result = _compared(a, b, notes, arguments)
        for decoded in opened:
            decoded.reader.check_unchanged()
    if arguments.html is not None:
        write_output(arguments.html, page_of(result), arguments.storage_options)
    return result


def _compared(a: NamedValues, b: NamedValues, notes: list[str], arguments: DiffArguments) -> DiffResult:
    pairs, only_in_a, only_in_b = paired(a, b, arguments.match)
    if arguments.match is not None and not (pairs or only_in_a or only_in_b):
        raise StateError(
            f"match={arguments.match!r}: fits no name of a value, neither in {a.reader.index.where} nor in "
            f"{b.reader.index.where}: a * stands for any characters, and inspect lists the names"
        )
    shapes = [ShapeDiff(pair.name, pair.a.info, pair.b.info) for pair in pairs if pair.shapes_differ]
    objects = [
        ObjectDiff(pair.name, pair.text_a, pair.text_b)
        for pair in pairs
        if not pair.are_tensors and (pair.a.is_tensor or pair.b.is_tensor or not same(pair.a.other, pair.b.other))
    ]
    everything = arguments.match is None
    objects += _other_keys(a, b) if everything else ()
    elements = [pair for pair in pairs if pair.are_tensors and not pair.shapes_differ]
    equal = equal_by_prints(a.reader.index, b.reader.index, elements)
    if equal:
        notes = [
            *notes,
            f"{len(equal)} of {counted_noun(len(elements), 'value')} were not read: their fingerprints are equal",
        ]
    others = [pair for pair in elements if pair.name not in equal]
    budget = Budget(arguments.bucket_nbytes, "the elements of two checkpoints")
    compared = iter(_Comparison(a, b, others, budget).run(arguments.progress))
    values = [equal[pair.name] if pair.name in equal else next(compared) for pair in elements]
    return DiffResult(
        a=a.reader.index.where,
        b=b.reader.index.where,
        steps=(a.reader.index.facts.step, b.reader.index.facts.step) if everything else (None, None),
        values=tuple(values),
        shapes=tuple(shapes),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        hyperparameters=hyperparameters_that_differ(a, b) if everything else (),
        objects=tuple(objects),
        tolerance=arguments.tolerance,
        notes=tuple(notes),
    )


def _other_keys(a: NamedValues, b: NamedValues) -> Iterator[ObjectDiff]:
    """Yield the entries of the optimizers' dicts that belong to no parameter and differ."""
    for key in sorted(a.others.keys() & b.others.keys()):
        if not same(a.others[key], b.others[key]):
            yield ObjectDiff(f":{key}", text_of(a.others[key]), text_of(b.others[key]))
    for key in sorted(a.others.keys() ^ b.others.keys()):
        sides = [text_of(side.others[key]) if key in side.others else "-" for side in (a, b)]
        yield ObjectDiff(f":{key}", sides[0], sides[1])


@dataclass
class _Comparison:
    """The comparison of the elements of pairs of values, by several threads."""

    a: NamedValues
    b: NamedValues
    pairs: Sequence[ValuePair]
    budget: Budget
    _chunks: dict[int, list[ChunkDifference]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _nbytes_done: int = 0

    def run(self, progress: bool | None) -> list[ValueDiff]:
        """Return the difference of each pair, in the order of the pairs."""
        window_nbytes = window_nbytes_in(self.budget, 2)
        in_order = sorted(
            range(len(self.pairs)), key=lambda index: self.pairs[index].place
        )  # as the first one is stored
        sizes = ((index, prod(self.pairs[index].shape), self.pairs[index].itemsize) for index in in_order)
        batches = batches_of(windows_of(sizes, window_nbytes), window_nbytes)
        total = sum(pair.a.info.nbytes + pair.b.info.nbytes for pair in self.pairs)
        num_threads = num_threads_in(self.budget, window_nbytes, 2)
        with Progress(progress, "comparing", total, shown=True) as shown:
            with ThreadPoolExecutor(num_threads, thread_name_prefix="fsdp_optim: diff") as pool:
                done = [pool.submit(self._work, batches, window_nbytes, shown) for _ in range(num_threads)]
                for work in done:
                    work.result()
            shown.done()
        return [self._result(index) for index in range(len(self.pairs))]

    def _work(self, batches: Iterator[list[ElementWindow]], window_nbytes: int, shown: Progress) -> None:
        plans = Plans()
        sides = [WindowReader(side.reader, window_nbytes, plans) for side in (self.a, self.b)]
        memory = ChunkMemory(CHUNK_NUMEL)
        try:
            while not self._stopped.is_set():
                with self._lock:
                    batch = next(batches, None)
                if batch is None:
                    return
                self._compare(batch, sides, memory)
                with self._lock:
                    pairs = [self.pairs[window.index] for window in batch]
                    sizes = (pair.a.dtype.itemsize + pair.b.dtype.itemsize for pair in pairs)
                    self._nbytes_done += sum(window.num * size for window, size in zip(batch, sizes, strict=True))
                    shown.up_to(self._nbytes_done)
        except BaseException:
            self._stopped.set()
            raise

    def _compare(self, batch: Sequence[ElementWindow], sides: Sequence[WindowReader], memory: ChunkMemory) -> None:
        pairs = [self.pairs[window.index] for window in batch]
        flats = [
            side.read(
                [
                    (value, all_elements(pair.shape), window.first, window.num)
                    for window, pair in zip(batch, pairs, strict=True)
                    for value in [pair.sides[number]]
                ]
            )
            for number, side in enumerate(sides)
        ]
        for window, flat_a, flat_b in zip(batch, *flats, strict=True):
            parts = zip(chunks_of(flat_a), chunks_of(flat_b), strict=True)
            chunks = [ChunkDifference.of(part_a, part_b, memory) for part_a, part_b in parts]
            with self._lock:
                self._chunks.setdefault(window.index, []).append(ChunkDifference.over(chunks))

    def _result(self, index: int) -> ValueDiff:
        pair, total = self.pairs[index], ChunkDifference.over(self._chunks.get(index, ()))
        return ValueDiff(
            name=pair.name,
            a=pair.a.info,
            b=pair.b.info,
            num_differing=total.num_differing,
            max_abs=total.max_abs,
            norm=sqrt(total.a.squares),
            norm_of_difference=sqrt(total.squares),
            nans=(total.a.num_nans, total.b.num_nans),
            infinities=(total.a.num_infinities, total.b.num_infinities),
        )
