"""Entries of torch's metadata, as a pickle of protocol 4 or later has them: patterns of one, and the forms of many.

An operation of a pickle is a byte and, for some, an argument. Each part of a pattern begins with the byte of its operation, and
takes as many bytes as the argument has. So where a pattern matches from the beginning of an operation on, it has the same borders
between operations as the unpickler. Only a text says its own length: `free_in` refuses one that has another.

Entries that are the same operations are one `Form`, whatever numbers and texts these have: the rows of a table of bytes.

    \x8c \x04 n a m e \x94 h \x0f ...    an argument that may differ is a column of the table, or several;
    \x8c \x04 b i a s \x94 h \x0f ...    the other bytes are the same in all rows
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
from numpy.typing import NDArray

from fsdp_optim.layout import Shape

T = TypeVar("T")
Numbers = NDArray[numpy.int64]
Span = tuple[int, int]
"""Where a part begins and ends, in bytes from the beginning of its entry."""

Spans = Sequence[Span]
Free = NDArray[numpy.bool_]
"""Of each byte of an entry, whether it may differ in a form."""

_REF = rb"(?:h.|j....)"  # a value of the memo
_INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
TEXT, _INT32, _LONG_INT, _MEMOIZE = 0x8C, ord("J"), 0x8A, 0x94
REFS = (ord("h"), ord("j"))
SMALL_INTS = (ord("K"), ord("M"))
_SIGNED = (_INT32, _LONG_INT)
INTS = (*SMALL_INTS, *_SIGNED)
NONE = ord("N")
_NBYTES_OF_ARGUMENT = {ord("h"): 1, ord("j"): 4, ord("K"): 1, ord("M"): 2, _INT32: 4}
_COUNTED = (TEXT, _LONG_INT)  # their argument begins with the number of its bytes
_TEXT = rb"\x8c.[ -~]*\x94"  # memoized; text of other characters takes the slow way
_PRINTABLE = range(ord(" "), ord("~") + 1)


def _tuple_of(item: bytes) -> bytes:
    """Return the pattern of a tuple of 1 to 64 items.

    Tuples of one, two and three items share their beginning, so that no item is matched twice.
    """
    short = item + rb"(?:\x85|" + item + rb"(?:\x86|" + item + rb"\x87))"
    return rb"(?:" + short + rb"|\(" + item + rb"{4,64}t)\x94"


_INTS = rb"(?:\)|" + _tuple_of(_INT) + rb")"
_NEW_SIZE = _REF + _INTS + rb"\x85\x94R\x94"  # torch.Size, called with a tuple of numbers
_SIZE = _NEW_SIZE + rb"|" + _REF  # in a group
_NEW = _REF + rb"\)\x81\x94\}\x94\("  # an object of a class, and the beginning of its attributes
_MORE = rb"(?:u\()?"  # the end of a thousand entries, and the beginning of the next ones
_REST = rb"|(.+)"  # takes all that follows the last entry that matches, so that `findall` finds no entry further on
_PART = rb"(?:" + _REF + rb"|" + _TEXT + rb"|K.|M..)"
_VALUE = rb"|".join([_TEXT, _NEW_SIZE, _REF, _INT, rb"N"])  # in a group

_NEW_PROPERTIES = rb"\)\x81\x94\(" + _REF + rb"(?:" + _REF + rb"|[N\x88\x89])*t\x94b"
_PROPERTIES = _NEW + _REF * 2 + rb"(?:" + _NEW_PROPERTIES + rb")?" + _REF  # those of another tensor, or new ones


def _chunk(group: bytes) -> bytes:
    """Return the pattern of a chunk, whose four parts begin with `group`: `(` to have each, `(?:` to have none."""
    return group + (rb")" + group).join([_NEW + _REF, _SIZE, _REF, _SIZE]) + rb")ub"


@dataclass(frozen=True)
class Entry:
    """The pattern of the entries of one table.

    `borders`: takes many, each in a group, and all that follows in the last group. `parts`: has groups for the parts of one.
    """

    borders: re.Pattern[bytes]
    parts: re.Pattern[bytes]

    @classmethod
    def of(cls, pattern: Callable[[bytes, bytes], bytes], ahead: bytes = b"", long: bytes = b"") -> Entry:
        """`pattern`: of a group and of what must follow the last part; `ahead`: this, where other entries follow.

        `long`: the pattern of entries of another kind, with groups.
        """
        borders = _MORE + rb"(?:(" + pattern(rb"(?:", ahead) + rb")" + long + rb")" + _REST
        return cls(re.compile(borders, re.DOTALL), re.compile(pattern(rb"(", b""), re.DOTALL))

    def spans(self, entry: bytes) -> list[Span]:
        """Return the spans of all parts of an entry that `borders` has matched; (-1, -1) for one that is not there."""
        matched = self.parts.fullmatch(entry)
        if matched is None:
            raise ValueError("an entry whose texts have other lengths")
        return [matched.span(group) for group in range(1, self.parts.groups + 1)]


def _begun(group: bytes) -> bytes:
    """Return the pattern of the parts of a tensor before its chunks."""
    return group + (rb")" + group).join([_PROPERTIES, _SIZE, _REF + rb"\]\x94"]) + rb")"


def _tensor(group: bytes, ahead: bytes) -> bytes:
    end = rb"ub" if ahead else rb"(?:ub)?"  # of one that has several chunks, `parts` gets what is before them
    plain = group + _REF + rb"(?:\)\x81\x94" + (rb"(?=[\x8cu])" if ahead else b"") + rb"|" + ahead + rb"))"
    return group + _TEXT + rb")(?:" + _begun(group) + rb"(?:" + _chunk(group) + rb"a)?" + end + rb"|" + plain + rb")"


def _place(group: bytes, ahead: bytes) -> bytes:
    value, attribute, made = group + _VALUE + rb")", group + _REF + rb")", group + _NEW + _REF + rb")"
    index = made + value + attribute + value + rb"(?:" + attribute + value + rb")?ub"
    new_place = made + value + (attribute + value) * 2 + rb"ub"
    return index + rb"(?:" + new_place + rb"|" + attribute + ahead + rb")"


TENSORS = Entry.of(
    _tensor,
    rb"(?=u|" + _TEXT + rb"(?!\x93))",  # the text is the next key, and not the name of a class
    rb"|(" + _TEXT + _begun(rb"(?:") + rb")\(((?:" + _chunk(rb"(?:") + rb")+)eub",
)
"""Entries of tensors: key, properties, size, list, the four parts of one chunk; or of other values: key, object.

Properties and objects of values are new ones, or those of an entry before. Of tensors that have several chunks, `borders` has two
groups of its own: what is before the chunks, and the chunks.
"""

CHUNK = Entry.of(lambda group, ahead: _chunk(group))
"""Chunks: class with the first attribute, offsets, second attribute, sizes."""

PATHS = Entry.of(lambda group, ahead: rb"(?:" + _REF + rb"|" + _TEXT + rb")" + _tuple_of(_PART))
"""Entries of paths: key, and a tuple of the parts of the path. `path_parts` has the spans of these."""

PLACES = Entry.of(_place, rb"(?=u|" + _REF + rb"\))")  # the next entry makes an object
"""Entries of places: class and first attribute of the index, value, attribute, value, attribute, value; the same of the place,
or one that is there already.

The last attribute of the index may be missing.
"""

# ------------------------------------------------------------------------------------------- operations


def operations(data: bytes) -> list[Span]:
    """Return where each operation begins and ends. Raises ValueError where the last one is longer than the data."""
    spans, at = [], 0
    while at < len(data):
        code = data[at]
        nbytes = _NBYTES_OF_ARGUMENT.get(code, 0)
        if code in _COUNTED:
            nbytes = 1 + int.from_bytes(data[at + 1 : at + 2], "little")
        spans.append((at, at + 1 + nbytes))
        at += 1 + nbytes
    if at != len(data):
        raise ValueError("a text that has another length")
    return spans


def _argument(data: bytes, start: int, stop: int) -> int:
    """Return the argument of a reference or a number."""
    code = data[start]
    at = start + (2 if code == _LONG_INT else 1)
    return int.from_bytes(data[at:stop], "little", signed=code in _SIGNED)


def refs_in(data: bytes) -> list[int]:
    """Return the numbers in the memo of all values that operations name."""
    return [_argument(data, start, stop) for start, stop in operations(data) if data[start] in REFS]


def is_ref(entry: bytes, span: Span) -> bool:
    """Return whether a part of an entry is one reference."""
    code = entry[span[0]]
    return code in REFS and span[1] - span[0] == 1 + _NBYTES_OF_ARGUMENT[code]


def size_in(token: bytes) -> tuple[int, Shape]:
    """Return the number in the memo of the class of a new size, and the size. Raises ValueError for another token."""
    values = (*REFS, *INTS)
    number, *size = [_argument(token, start, stop) for start, stop in operations(token) if token[start] in values]
    if token[0] not in REFS:
        raise ValueError("no size")
    return number, tuple(size)


# ------------------------------------------------------------------------------------------- forms


class Form:
    """Entries that are the same operations with other arguments. `rows`: which ones, ascending; `first`: the first of them."""

    def __init__(self, rows: Numbers, table: NDArray[numpy.uint8], memoized: Sequence[int]) -> None:
        self.rows = rows
        self.first: bytes = table[0].tobytes()
        self._table, self._memoized = table, memoized

    @property
    def num_memoized(self) -> int:
        """The values that an entry adds to the memo."""
        return len(self._memoized)

    def num_before(self, at: int) -> int:
        """Return how many values an entry adds to the memo before this byte."""
        return bisect_left(self._memoized, at)

    def refs(self, span: Span) -> Numbers:
        """Return the numbers of values of the memo. Raises ValueError for another part than a reference."""
        if not is_ref(self.first, span):
            raise ValueError("no reference")
        return self._arguments(span)

    def ints(self, span: Span) -> Numbers:
        """Return numbers. Raises ValueError for another part, and for a number below zero."""
        if self.first[span[0]] not in INTS:
            raise ValueError("no number")
        return self._arguments(span)

    def _arguments(self, span: Span) -> Numbers:
        start, stop = span
        code = self.first[start]
        columns = self._table[:, start + (2 if code == _LONG_INT else 1) : stop]
        if code in _SIGNED and (columns[:, -1] >> 7).any():
            raise ValueError("a number below zero")
        numbers = numpy.zeros(len(columns), numpy.int64)
        for number in range(columns.shape[1]):
            numbers |= columns[:, number].astype(numpy.int64) << 8 * number
        return numbers

    def texts(self, span: Span) -> list[str]:
        """Return texts. Raises ValueError for other characters than the patterns allow."""
        start, stop = span[0] + 2, span[1] - 1  # between its length and the operation that adds it to the memo
        columns = self._table[:, start:stop]
        if columns.size and not (_PRINTABLE[0] <= columns.min() and columns.max() <= _PRINTABLE[-1]):
            raise ValueError("a text that has another length")
        joined, width = columns.tobytes().decode("ascii"), max(columns.shape[1], 1)
        return [joined[at : at + width] for at in range(0, len(joined), width)] or [""] * len(columns)

    def tokens(self, span: Span) -> list[bytes]:
        """Return the bytes of a part of each entry; only once if they are the same in all of them."""
        columns = self._table[:, slice(*span)]
        if (columns == columns[0]).all():
            return [columns[0].tobytes()]
        joined = columns.tobytes()
        return [joined[start : start + columns.shape[1]] for start in range(0, len(joined), columns.shape[1])]


_MOST_TRIED = 32  # forms of entries of one length that others are compared with
_FEW_FORMS, _NBYTES_OF_FORM = 256, 256
"""Forms that few entries may have, and bytes of entries for each further one."""


def forms_of(entries: Sequence[bytes], parts_of: Callable[[bytes, Spans], tuple[Free, T]]) -> list[tuple[Form, T]]:
    """Return the forms of entries.

    `parts_of`: for an entry and its operations, which bytes may differ in a form, and what to return with that form.
    """
    forms, at = list[tuple[Form, T]](), 0
    lengths = numpy.fromiter(map(len, entries), numpy.int64, len(entries))
    order = numpy.argsort(lengths, kind="stable")
    data = numpy.frombuffer(b"".join([entries[row] for row in order.tolist()]), numpy.uint8)
    for rows in numpy.split(order, numpy.flatnonzero(numpy.diff(lengths[order])) + 1) if entries else ():
        nbytes = int(lengths[rows[0]])
        table = data[at : at + len(rows) * nbytes].reshape(len(rows), nbytes)
        for form in _forms_in(rows, table, parts_of):
            forms.append(form)
            if len(forms) > _FEW_FORMS + len(data) // _NBYTES_OF_FORM:
                raise ValueError("entries that have too little in common")
        at += table.size
    return forms


def _forms_in(
    rows: Numbers, table: NDArray[numpy.uint8], parts_of: Callable[[bytes, Spans], tuple[Free, T]]
) -> Iterator[tuple[Form, T]]:
    """Yield the forms of entries of one length, which are the rows of a table."""
    num_tried = 0
    while len(rows):
        first = table[0].tobytes()
        spans = operations(first)
        free, parts = parts_of(first, spans)
        here: Any = slice(0, 1)
        rest: Any = slice(1, None)
        if num_tried < _MOST_TRIED:
            here = ((table == table[0]) | free).all(axis=1)
            rest = ~here
        memoized = [start for start, _ in spans if first[start] == _MEMOIZE]
        yield Form(rows[here], table[here], memoized), parts
        rows, table, num_tried = rows[rest], table[rest], num_tried + 1


def free_in(entry: bytes, spans: Spans, parts: Iterable[Span]) -> Free:
    """Return which bytes of entries may differ: the arguments of operations in some parts.

    A part that has more than one operation keeps its references. Raises ValueError where a part and its operations have other
    borders, because a text has another length than it says.
    """
    free = numpy.zeros(len(entry), numpy.bool_)
    starts = [start for start, _ in spans]
    for first, last in parts:
        index = bisect_left(starts, first)
        if index == len(starts) or starts[index] != first:
            raise ValueError("a text that has another length")
        codes = (*INTS, TEXT, *REFS) if is_ref(entry, (first, last)) else (*INTS, TEXT)
        for start, stop in spans[index : bisect_left(starts, last)]:
            code = entry[start]
            if code == TEXT and ((start, stop + 1) != (first, last) or entry[stop:last] != bytes([_MEMOIZE])):
                raise ValueError("a text that has another length")
            if code in codes:
                free[start + (2 if code in _COUNTED else 1) : stop] = True
    return free


# ------------------------------------------------------------------------------------------- the parts of entries

NOTHING = (-1, -1)  # the span of a part that is not there
_REFS_OF_SHARED_HEAD = 4  # class, attribute of the properties, properties of another tensor, attribute of the size
_PLACE_OF_SHARED = 2


@dataclass(frozen=True)
class TensorParts:
    """The parts of an entry of `TENSORS`: of a tensor with a chunk, which has four parts, or of another value: `is_plain`.

    `head`: the properties or the object. `shared`: the reference to these, where they are those of an entry before.
    """

    key: Span
    head: Span
    size: Span = NOTHING
    attribute: Span = NOTHING
    chunk: tuple[Span, ...] = ()
    shared: Span = NOTHING

    @property
    def is_plain(self) -> bool:
        return self.size == NOTHING

    @property
    def is_new(self) -> bool:
        """Whether the properties or the object are new ones."""
        return self.shared == NOTHING

    @classmethod
    def of(cls, entry: bytes, spans: Spans) -> tuple[Free, TensorParts]:
        """Return which bytes may differ, and the parts."""
        key, head, size, attribute, *chunk, plain = TENSORS.spans(entry)
        if plain != NOTHING:
            shared = plain if is_ref(entry, plain) else NOTHING
            return free_in(entry, spans, [key, plain]), cls(key, plain, shared=shared)
        refs = [span for span in spans if head[0] <= span[0] < head[1] and entry[span[0]] in REFS]
        shared = refs[_PLACE_OF_SHARED] if len(refs) == _REFS_OF_SHARED_HEAD else NOTHING
        chunk = chunk if chunk[0] != NOTHING else []
        parts = cls(key, head, size, attribute, tuple(chunk), shared)
        return free_in(entry, spans, [part for part in (key, size, shared, *chunk[1::2]) if part != NOTHING]), parts


def chunk_parts(entry: bytes, spans: Spans) -> tuple[Free, Spans]:
    """Return which bytes of an entry of `CHUNK` may differ, and its four parts."""
    parts = CHUNK.spans(entry)
    return free_in(entry, spans, parts[1::2]), parts


@dataclass(frozen=True)
class PlaceParts:
    """The parts of an entry of `PLACES`: class and first attribute, value, attribute, value, ... of the index and of the place.

    `place`: nothing where the place is one of an entry before, which is `shared`.
    """

    index: Spans
    place: Spans
    shared: Span

    @classmethod
    def of(cls, entry: bytes, spans: Spans) -> tuple[Free, PlaceParts]:
        """Return which bytes may differ, and the parts."""
        *parts, shared = PLACES.spans(entry)
        index, place = parts[:6], parts[6:] if shared == NOTHING else []
        values = [span for span in (*index[1::2], *place[1::2], shared) if span != NOTHING]
        return free_in(entry, spans, values), cls(index, place, shared)


def path_parts(entry: bytes, spans: Spans) -> tuple[Free, Spans]:
    """Return which bytes of an entry of `PATHS` may differ, and the spans of the key and of the parts of the path."""
    codes = (TEXT, *REFS, *INTS)  # a text has the operation that adds it to the memo
    values = [(start, stop + (entry[start] == TEXT)) for start, stop in spans if entry[start] in codes]
    return free_in(entry, spans, values), values
