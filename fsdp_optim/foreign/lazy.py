"""Tensors and places that formats of other libraries make when they are asked for, and the bool tensors of a checkpoint."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from fsdp_optim.formats.base.bools import BoolRanges
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.protocols import StoredTensor

_Span = tuple[str, int, int]
"""The name of a source of bytes, as places have it, the first byte, and the number of bytes."""


class LazyTensors(Mapping[str, StoredTensor]):
    """Tensors that are made when they are asked for, each time anew."""

    @abstractmethod
    def of_dtype(self, dtype: str) -> Iterable[StoredTensor]:
        """Return the tensors of a dtype, without making the others."""


class LazyPlaces(Mapping[int, tuple[str, int]]):
    """The places of the pieces of a tensor, as `Chunks.at` has them, which are looked up in the files when they are asked for."""

    @abstractmethod
    def spans(self) -> Iterator[_Span]:
        """Yield where the elements of each piece may lie. Nothing is read. Other tensors may be there too."""


def places_of(stored: StoredTensor) -> Iterator[_Span]:
    """Yield where the elements of each piece of a tensor lie that has some."""
    if stored.chunks is None:
        nbytes = prod(stored.shape) * stored.itemsize
        if nbytes:
            yield stored.file, stored.start, nbytes
        return
    for rank in stored.placement.ranks:
        nbytes = stored.placement.numel_on(rank) * stored.itemsize
        if nbytes:
            yield *stored.place_on(rank), nbytes


class BoolsInFiles:
    """The bool tensors of a checkpoint, whose bytes are checked after they were read.

    Places that are lazy are looked up only for files in which a check by their spans has found other bytes than 0 and 1: a load
    that does not need a tensor reads nothing of it.
    """

    def __init__(self, halves: Sequence[Mapping[str, StoredTensor]]) -> None:
        self._spans: dict[str, list[tuple[int, int, StoredTensor]]] = {}
        for stored in (stored for half in halves for stored in _bools_in(half)):
            at = stored.chunks.at if stored.chunks is not None else None
            for name, start, nbytes in at.spans() if isinstance(at, LazyPlaces) else places_of(stored):
                self._spans.setdefault(name, []).append((start, start + nbytes, stored))
        self._by_spans: dict[str, BoolRanges] = {}
        self._exact: dict[str, BoolRanges] = {}

    def check(self, name: str, path: str, extents: Sequence[Extent]) -> None:
        """Refuse bytes other than 0 and 1 of bool tensors in what was read of a source. Raises CheckpointError.

        `path`: the source, for the error.
        """
        spans = self._spans.get(name)
        if spans is None:
            return
        if name not in self._by_spans:
            self._by_spans[name] = BoolRanges((start, stop, stored.key) for start, stop, stored in spans)
        if self._by_spans[name].have_only_bools(extents):
            return
        if name not in self._exact:
            each = {id(stored): stored for *_, stored in spans}.values()
            listed = [(place, stored.key) for stored in each for place in places_of(stored)]
            self._exact[name] = BoolRanges(
                (start, start + nbytes, key) for (other, start, nbytes), key in listed if other == name
            )
        self._exact[name].check(path, extents)


def _bools_in(tensors: Mapping[str, StoredTensor]) -> Iterable[StoredTensor]:
    if isinstance(tensors, LazyTensors):
        return tensors.of_dtype("bool")
    return (stored for stored in tensors.values() if stored.dtype == "bool")
