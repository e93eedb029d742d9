"""The memo of the pickle of torch's metadata, whose entries are read as rows: its texts, sizes and objects, by number.

Of the objects those that entries may share: properties, places, and what is said of values that are no tensors. Nothing else that
rows have added to the memo is needed: where such a value is named again by its number, the entry is not torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy
from numpy.typing import NDArray

from fsdp_optim.foreign.dcp.metadata_patterns import (
    NONE,
    SMALL_INTS,
    TEXT,
    Form,
    Numbers,
    Span,
    is_ref,
    refs_in,
    size_in,
)
from fsdp_optim.foreign.dcp.metadata_pickle import is_size, size_of
from fsdp_optim.layout import Shape

T = TypeVar("T")

NO_SIZE = -1


class _Growing:
    """Numbers that increase, in memory that doubles when it is full."""

    def __init__(self) -> None:
        self._data = numpy.empty(1024, numpy.int64)
        self._num = 0

    @property
    def data(self) -> Numbers:
        return self._data[: self._num]

    def add(self, numbers: Numbers) -> None:
        end = self._num + len(numbers)
        if end > len(self._data):
            self._data = numpy.concatenate([self._data, numpy.empty(end, numpy.int64)])
        self._data[self._num : end] = numbers
        self._num = end


def check_before(numbers: Numbers | int, lengths: Numbers | int) -> None:
    """Raise ValueError for a number that an entry names too early. `lengths`: how many values the memo has there."""
    if numpy.any(numpy.greater_equal(numbers, lengths)):
        raise ValueError("a reference to what comes later")


def nums_memoized(forms: Iterable[tuple[Form, Any]], num: int) -> Numbers:
    """Return how many values each of `num` entries adds to the memo."""
    nums = numpy.zeros(num, numpy.int64)
    for form, _ in forms:
        nums[form.rows] = form.num_memoized
    return nums


def resolved(numbers: Numbers, ids: Numbers, id_at: Callable[[int], int]) -> Numbers:
    """Return ids by numbers in the memo. `id_at`: gives that of a value that was read slowly, whose id is below zero."""
    missing = numpy.flatnonzero(ids < 0)
    distinct, which = numpy.unique(numbers[missing], return_inverse=True)
    ids[missing] = numpy.array([*map(id_at, distinct.tolist())], numpy.int64)[which]
    return ids


class Memoized:
    """The values of one kind that rows have added to the memo, by number: each value is an index into a list.

    All numbers of an `add` are above those before.
    """

    def __init__(self) -> None:
        self._numbers, self._values = _Growing(), _Growing()

    def add(self, numbers: Numbers, values: Numbers) -> None:
        order = numpy.argsort(numbers, kind="stable")
        self._numbers.add(numbers[order])
        self._values.add(values[order])

    def at(self, numbers: Numbers) -> Numbers:
        """Return the values, and -1 where the memo has none of this kind."""
        known = self._numbers.data
        if not len(known):
            return numpy.full(len(numbers), -1)
        places = numpy.minimum(numpy.searchsorted(known, numbers), len(known) - 1)
        return numpy.where(known[places] == numbers, self._values.data[places], -1)


class Memo:
    """The values of the memo. `others`: those that were not added by rows. `length`: the number of all values."""

    def __init__(self) -> None:
        self.others: dict[int, Any] = {}
        self.length = 0
        self.sizes: list[Shape] = []
        self._size_ids: dict[Shape, int] = {}
        self._new_sizes: dict[bytes, int] = {}
        self._texts, self._num_texts = numpy.empty(1024, object), 0
        self._each_once: dict[str, str] = {}
        self._of_texts, self._of_sizes = Memoized(), Memoized()
        self._of_objects: list[tuple[Memoized, Callable[[int], Any]]] = []
        self._checked: set[tuple[object, ...]] = set()

    def value(self, number: int) -> Any:
        """Return one value. Raises KeyError for one of rows that is no text, no size, and none of `objects`."""
        if number in self.others:
            return self.others[number]
        at = numpy.array([number])
        (text,), (size,) = self._of_texts.at(at).tolist(), self._of_sizes.at(at).tolist()
        if text >= 0 or size >= 0:
            return self._texts[text] if text >= 0 else self.sizes[size]
        for numbers, made in self._of_objects:
            (index,) = numbers.at(at).tolist()
            if index >= 0:
                return made(index)
        raise KeyError(number)

    def objects(self, made: Callable[[int], Any]) -> Memoized:
        """Return where rows add objects of one kind, by number. `made`: returns the object of what they add for it."""
        numbers = Memoized()
        self._of_objects.append((numbers, made))
        return numbers

    def object_of(self, number: int, cls: type[T]) -> T:
        """Return an object of a class. Raises ValueError for another value."""
        value = self.value(number)
        if isinstance(value, cls):
            return value
        raise ValueError(f"a {type(value).__name__} in the place of a {cls.__name__}")

    def grow(self, nums: Numbers) -> Numbers:
        """Count the values that entries add; return how many there are before each entry."""
        before = numpy.cumsum(nums) - nums + self.length
        self.length += int(nums.sum())
        return before

    # -------------------------------------------------------------------------------------- texts

    def add_texts(self, numbers: Numbers, texts: Sequence[str]) -> list[str]:
        """Add new texts under their numbers; return these, where equal ones are one object."""
        texts = list(map(self._each_once.setdefault, texts, texts))
        start, self._num_texts = self._num_texts, self._num_texts + len(texts)
        if self._num_texts > len(self._texts):
            self._texts = numpy.concatenate([self._texts, numpy.empty(self._num_texts, object)])
        self._texts[start : self._num_texts] = texts
        self._of_texts.add(numbers, numpy.arange(start, self._num_texts))
        return texts

    def texts_at(self, numbers: Numbers) -> NDArray[Any]:
        """Return the texts with some numbers. Raises ValueError for a value that is no text."""
        ids = self._of_texts.at(numbers)
        texts: NDArray[Any] = self._texts[ids]
        missing = numpy.flatnonzero(ids < 0)
        each, which = numpy.unique(numbers[missing], return_inverse=True)
        texts[missing] = numpy.array([*map(self.text, each.tolist())], object)[which]
        return texts

    def text(self, number: int) -> str:
        text = self.value(number)
        if type(text) is not str:
            raise ValueError(f"a {type(text).__name__} in the place of a text")
        return text

    # -------------------------------------------------------------------------------------- sizes

    def id_of_size(self, size: Any) -> int:
        """Return the id of a size. Raises ValueError for another value."""
        if not is_size(size):
            raise ValueError(f"a {type(size).__name__} in the place of a size")
        if size not in self._size_ids:
            self._size_ids[size] = len(self.sizes)
            self.sizes.append(size)
        return self._size_ids[size]

    def new_sizes(self, tokens: Sequence[bytes]) -> Numbers:
        """Return the ids of new sizes."""
        for token in tokens:
            if token not in self._new_sizes:
                number, size = size_in(token)
                self.check(number, size_of)
                self._new_sizes[token] = self.id_of_size(size)
        return numpy.fromiter(map(self._new_sizes.__getitem__, tokens), numpy.int64, len(tokens))

    def add_sizes(self, numbers: Numbers, ids: Numbers) -> None:
        """Add new sizes under their numbers."""
        self._of_sizes.add(numbers, ids)

    def sizes_at(self, numbers: Numbers) -> Numbers:
        """Return the ids of the sizes with some numbers. Raises ValueError for a value that is no size."""
        return resolved(numbers, self._of_sizes.at(numbers), lambda number: self.id_of_size(self.value(number)))

    # -------------------------------------------------------------------------------------- other values

    def check(self, number: int, wanted: object) -> None:
        """Raise ValueError unless a value is this text, or the class or function with this stand-in."""
        value = self.value(number)
        if value != wanted and wanted is not getattr(value, "call", None):
            raise ValueError(f"{value!r:.100} in the place of {wanted!r}")

    def check_span(self, span: bytes, wanted: object) -> None:
        """Check the first value that operations name, once for all that are alike."""
        if (span, wanted) not in self._checked:
            self.check(refs_in(span)[0], wanted)
            self._checked.add((span, wanted))

    def check_new(self, span: bytes, cls: object, attribute: str) -> None:
        """Raise ValueError unless a span makes an object of a class and begins with this attribute."""
        if (span, cls, attribute) not in self._checked:
            of_class, first = refs_in(span)
            self.check(of_class, cls)
            self.check(first, attribute)
            self._checked.add((span, cls, attribute))


class _Column:
    """Values of places: new ones, which are added to the memo together, and those that the memo has by number."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._new: list[tuple[Numbers, Numbers]] = []  # places and numbers in the memo
        self._refs: list[tuple[Numbers, Numbers]] = []

    def _refer(self, places: Numbers, numbers: Numbers, before: Numbers) -> None:
        check_before(numbers, before)
        self._refs.append((places, numbers))


def joined(parts: Sequence[tuple[Numbers, ...]], num: int = 2) -> list[Numbers]:
    """Join columns. `parts`: parts of each of `num` columns."""
    columns = zip(*parts, strict=True) if parts else [(numpy.empty(0, numpy.int64),)] * num
    return [*map(numpy.concatenate, columns)]


class TextColumn(_Column):
    """Texts of `num` places, and numbers among them."""

    def __init__(self, memo: Memo, num: int) -> None:
        super().__init__(memo)
        self._values = numpy.empty(num, object)

    def add(self, form: Form, span: Span, places: Numbers, starts: Numbers) -> None:
        """Put a part of the entries of a form into places. `starts`: how many values the memo has before each entry."""
        code, before = form.first[span[0]], starts + form.num_before(span[0])
        if code == TEXT:
            self._values[places] = form.texts(span)
            self._new.append((places, before))
        elif code in SMALL_INTS:
            self._values[places] = form.ints(span).tolist()
        else:
            self._refer(places, form.refs(span), before)

    def listed(self) -> list[Any]:
        """Return the values of all places, when all have been put."""
        places, numbers = joined(self._new)
        self._values[places] = self._memo.add_texts(numbers, self._values[places].tolist())
        places, numbers = joined(self._refs)
        self._values[places] = self._memo.texts_at(numbers)
        return self._values.tolist()  # type: ignore[no-any-return]


class SizeColumn(_Column):
    """Sizes of `num` places, as ids; `NO_SIZE` where there is none."""

    def __init__(self, memo: Memo, num: int) -> None:
        super().__init__(memo)
        self._ids = numpy.full(num, NO_SIZE)

    def add(self, form: Form, span: Span, places: Numbers, starts: Numbers) -> None:
        """Put a part of the entries of a form into places. `starts`: how many values the memo has before each entry."""
        if form.first[span[0]] == NONE:
            return
        if is_ref(form.first, span):
            self._refer(places, form.refs(span), starts + form.num_before(span[0]))
        else:
            self._ids[places] = self._memo.new_sizes(form.tokens(span))
            self._new.append((places, starts + form.num_before(span[1]) - 1))

    def ids(self) -> Numbers:
        """Return the ids of all places, when all have been put."""
        places, numbers = joined(self._new)
        self._memo.add_sizes(numbers, self._ids[places])
        places, numbers = joined(self._refs)
        self._ids[places] = self._memo.sizes_at(numbers)
        return self._ids
