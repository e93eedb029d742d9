"""Show: figures about one value of a checkpoint, in one pass over its elements, and one more for the histogram."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, prod, sqrt
from typing import TypeVar

import numpy
import torch

from fsdp_optim.arguments import check_at_least
from fsdp_optim.checkpoint.common.stores import Place, StorageOptions
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.protocols import Reader
from fsdp_optim.offline.values.element_numbers import ChunkStatistics, finite_numbers
from fsdp_optim.offline.values.element_windows import WindowReader, chunks_of, window_nbytes_in, windows_of
from fsdp_optim.offline.values.named_values import Decoded, NamedValue, NamedValues, opened_at
from fsdp_optim.offline.values.slices import TensorSlice, sliced
from fsdp_optim.options import CONVERT_NBYTES, LEAST_CONVERT_NBYTES
from fsdp_optim.plan import Plans
from fsdp_optim.results.differences import ValueStatistics
from fsdp_optim.tensors.memory import Budget

ResultT = TypeVar("ResultT")

_MOST_BINS = 10_000


def show(
    place: Place,
    name: str,
    *,
    text: str | None = None,
    bins: int = 20,
    allow_pickle: bool = False,
    bucket_nbytes: int = CONVERT_NBYTES,
    storage_options: StorageOptions = None,
) -> ValueStatistics:
    """Return figures about one value. `text`: a slice. No communication."""
    check_at_least("bucket_nbytes", bucket_nbytes, LEAST_CONVERT_NBYTES, " bytes (16 MiB)", CheckpointError)
    if not 1 <= bins <= _MOST_BINS:
        raise StateError(f"bins is a number of bins from 1 to {_MOST_BINS}, not {bins!r}")
    with opened_at(place, storage_options) as reader:
        decoded = Decoded.of(reader, allow_pickle=allow_pickle, with_state=":" in name)
        value = tensor_named(decoded.named(), name)
        part = sliced(name, text, value.info.shape)
        nbytes = prod(part.shape) * value.dtype.itemsize
        budget = Budget(bucket_nbytes, "the elements of a value that is shown").share(2, "the windows, and the slice")
        if text is not None and nbytes > budget.nbytes:
            raise StateError(
                f"{name}: the slice {text!r} has {nbytes} bytes, and {budget.nbytes} fit into half of bucket_nbytes: give a "
                "smaller slice, or use extract"
            )
        elements = _Elements(reader, value, part, budget)
        total = ChunkStatistics.over(elements.each(ChunkStatistics.of))
        histogram = _histogram(elements, total, bins)
        kept = elements.kept() if text is not None else None
        reader.check_unchanged()
        return ValueStatistics(
            path=reader.index.where,
            name=name,
            dtype=value.info.dtype,
            shape=part.shape,
            nbytes=nbytes,
            slice=text,
            min=total.low,
            max=total.high,
            mean=total.total / total.num_finite if total.num_finite else None,
            norm=sqrt(total.sums.squares),
            num_zeros=total.num_zeros,
            num_nans=total.sums.num_nans,
            num_infinities=total.sums.num_infinities,
            histogram=histogram,
            elements=kept,
        )


def tensor_named(values: NamedValues, name: str) -> NamedValue:
    """Return the tensor of a name. Raises StateError where there is none."""
    value = values.find(name)
    if not value.is_tensor:
        raise StateError(f"{name}: is a {value.info.dtype}, not a tensor or a number")
    return value


class _Elements:
    """The elements of a value, or of a slice of it, read in windows as often as needed."""

    def __init__(self, reader: Reader, value: NamedValue, part: TensorSlice, budget: Budget) -> None:
        self._value, self._part = value, part
        self._window_nbytes = window_nbytes_in(budget, 1)
        self._windows = WindowReader(reader, self._window_nbytes, Plans())

    def each(self, figure: Callable[[torch.Tensor], ResultT]) -> list[ResultT]:
        """Return a figure about each chunk, in their order."""
        figures = []
        numel, itemsize = prod(self._part.shape), self._value.dtype.itemsize
        for window in windows_of([(0, numel, itemsize)], self._window_nbytes):
            (flat,) = self._windows.read([(self._value, self._part.cut, window.first, window.num)])
            figures += [figure(chunk) for chunk in chunks_of(flat)]
        return figures

    def kept(self) -> torch.Tensor:
        """Return all elements as one tensor of the slice's shape."""
        chunks = self.each(torch.clone)
        flat = torch.cat(chunks) if chunks else torch.empty(0, dtype=self._value.dtype)
        return flat.view(self._part.shape)


def _histogram(elements: _Elements, total: ChunkStatistics, bins: int) -> tuple[int, ...]:
    """Count the finite elements in bins of equal width; without finite elements there are no bins."""
    if total.low is None or total.high is None:
        return ()
    low, high = float(total.low), float(total.high)
    if low == high:
        return (total.num_finite,)
    half = 1.0 if isfinite(high - low) else 0.5  # of the range, which may be longer than a float
    edges = numpy.linspace(low * half, high * half, bins + 1) / half
    counts = elements.each(lambda chunk: numpy.histogram(finite_numbers(chunk).astype(numpy.float64), edges)[0])
    return tuple(int(number) for number in numpy.stack(counts).sum(0))
