"""The memo of the pickle of torch's metadata, whose entries are read as rows: its texts, sizes and objects, by number.

Of the objects those that entries may share: properties, places, and what is said of values that are no tensors. Nothing else that
rows have added to the memo is needed: where such a value is named again by its number, the entry is not torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, TypeVar

import numpy

from fsdp_optim.foreign.dcp.metadata_patterns import Numbers, Tokens, refs_in, size_in
from fsdp_optim.layout import Shape

T = TypeVar("T")

NO_SIZE = -1
NONE = b"N"
_LONGEST_REF = 5


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

    # -------------------------------------------------------------------------------------- texts

    def texts(self, tokens: Tokens, numbers: Numbers) -> list[Any]:
        """Return texts, and the numbers among them.

        A new text is added under its number of `numbers`: how many values the memo has there. Equal ones are one object.
        """
        places = numpy.flatnonzero(tokens.are_texts)
        texts = tokens.texts(places)
        texts = list(map(self._each_once.setdefault, texts, texts))
        start, self._num_texts = self._num_texts, self._num_texts + len(texts)
        if self._num_texts > len(self._texts):
            self._texts = numpy.concatenate([self._texts, numpy.empty(self._num_texts, object)])
        self._texts[start : self._num_texts] = texts
        self._of_texts.add(numbers[places], numpy.arange(start, self._num_texts))
        if len(texts) == len(tokens):
            return texts
        values = numpy.empty(len(tokens), object)
        values[places] = texts
        places = numpy.flatnonzero(tokens.are_refs)
        of_memo = tokens.numbers(places)
        check_before(of_memo, numbers[places])
        ids = self._of_texts.at(of_memo)
        values[places] = self._texts[ids]
        missing = numpy.flatnonzero(ids < 0)
        each, which = numpy.unique(of_memo[missing], return_inverse=True)
        values[places[missing]] = numpy.array([*map(self.text, each.tolist())], object)[which]
        places = numpy.flatnonzero((tokens.codes == ord("K")) | (tokens.codes == ord("M")))
        values[places] = tokens.numbers(places).tolist()
        listed: list[Any] = values.tolist()
        return listed

    def text(self, number: int) -> str:
        text = self.value(number)
        if type(text) is not str:
            raise ValueError(f"a {type(text).__name__} in the place of a text")
        return text

    # -------------------------------------------------------------------------------------- sizes

    def id_of_size(self, size: Any) -> int:
        if size not in self._size_ids:
            self._size_ids[size] = len(self.sizes)
            self.sizes.append(size)
        return self._size_ids[size]

    def new_sizes(self, tokens: Sequence[bytes]) -> tuple[Numbers, Numbers]:
        """Return the ids of sizes, and how many values each adds to the memo: 0 where it is no new one."""
        for token in set(tokens) - self._new_sizes.keys():
            if len(token) > _LONGEST_REF:
                number, size = size_in(token)
                self.check(number, "torch.Size")
                self._new_sizes[token] = self.id_of_size(size)
        ids = numpy.fromiter(map(self._new_sizes.get, tokens, repeat(NO_SIZE)), numpy.int64, len(tokens))
        lengths = numpy.array(
            [*(3 if size else 2 for size in self.sizes), 0]
        )  # the last one where there is no new size
        return ids, lengths[ids]

    def add_sizes(self, numbers: Sequence[Numbers], ids: Sequence[Numbers]) -> None:
        """Add new sizes under their numbers, of several columns. An id that is no size's is left out."""
        of_all, each = numpy.concatenate(numbers), numpy.concatenate(ids)
        self._of_sizes.add(of_all[each >= 0], each[each >= 0])

    def resolve_sizes(self, tokens: Sequence[bytes], ids: Numbers, before: Numbers) -> None:
        """Put the ids of sizes that are of the memo among the others. `before`: how many values the memo has at each token."""
        if (ids >= 0).all():
            return
        of_memo = Tokens(tokens)
        if ((ids < 0) & ~of_memo.are_refs & (of_memo.codes != ord(NONE))).any():
            raise ValueError("no size")
        places = numpy.flatnonzero((ids < 0) & of_memo.are_refs)
        numbers = of_memo.numbers(places)
        check_before(numbers, before[places])
        ids[places] = self._of_sizes.at(numbers)
        for at, number in zip(places.tolist(), numbers.tolist(), strict=True):
            if ids[at] < 0:
                size = self.value(number)
                if type(size) is not tuple:
                    raise ValueError(f"a {type(size).__name__} in the place of a size")
                ids[at] = self.id_of_size(size)

    # -------------------------------------------------------------------------------------- other values

    def check(self, number: int, wanted: object) -> None:
        """Raise ValueError unless a value is this text, or the class with this stand-in or name."""
        value = self.value(number)
        if value != wanted and wanted not in (getattr(value, "call", None), getattr(value, "what", None)):
            raise ValueError(f"{value!r:.100} in the place of {wanted!r}")

    def check_new(self, span: bytes, cls: object, attribute: str) -> None:
        """Raise ValueError unless a span makes an object of a class and begins with this attribute."""
        of_class, first = refs_in(span)
        self.check(of_class, cls)
        self.check(first, attribute)
