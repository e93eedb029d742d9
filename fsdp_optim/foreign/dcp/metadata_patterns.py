"""Patterns of the entries of torch's metadata, as a pickle of protocol 4 or later has them, and the tokens in them.

An operation of a pickle is a byte and, for some, an argument. Each part of a pattern begins with the byte of its operation, and
takes as many bytes as the argument has. So where a pattern matches from the beginning of an operation on, it has the same borders
between operations as the unpickler. Only a text says its own length, which `Tokens.texts` compares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from fsdp_optim.layout import Shape

Numbers = NDArray[numpy.int64]

_REF = rb"(?:h.|j....)"  # a value of the memo
_INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
TEXT, _SHORT, _LONG, _INT32, _LONG_INT = 0x8C, ord("h"), ord("j"), ord("J"), 0x8A
_INT_CODES = (ord("K"), ord("M"), _INT32, _LONG_INT)
_TEXT = rb"\x8c.[ -~]*\x94"  # memoized; text of other characters takes the slow way


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
_VALUE = rb"(" + _TEXT + rb"|" + _NEW_SIZE + rb"|" + _REF + rb"|" + _INT + rb"|N)"

_NEW_PROPERTIES = rb"\)\x81\x94\(" + _REF + rb"(?:" + _REF + rb"|[N\x88\x89])*t\x94b"
_PROPERTIES = _NEW + _REF * 2 + rb"(?:" + _NEW_PROPERTIES + rb")?" + _REF  # those of another tensor, or new ones


def _chunk(group: bytes) -> bytes:
    """Return the pattern of a chunk, whose four parts begin with `group`: `(` to have each, `(?:` to have none."""
    return group + (rb")" + group).join([_NEW + _REF, _SIZE, _REF, _SIZE]) + rb")ub"


TENSORS = re.compile(
    _MORE
    + rb"("
    + _TEXT
    + rb")(?:("
    + _PROPERTIES
    + rb")"
    + rb"("
    + _SIZE
    + rb")("
    + _REF
    + rb"\]\x94)(?:"
    + _chunk(rb"(")
    + rb"a|\(((?:"
    + _chunk(rb"(?:")
    + rb")+)e|)ub|("
    + _REF
    + rb"(?:\)\x81\x94(?=[\x8cu])|(?=u|"
    + _TEXT
    + rb"(?!\x93)))))"  # the text is the next key, and not the name of a class
    + _REST,
    re.DOTALL,
)
"""Entries of tensors: key, properties, size, list, the four parts of one chunk, several chunks; or of other values: key, object.

Properties and objects of values are new ones, or those of an entry before.
"""

CHUNKS = re.compile(_chunk(rb"("), re.DOTALL)
"""Chunks: class with the first attribute, offsets, second attribute, sizes."""

PATHS = re.compile(
    _MORE + rb"((?:" + _REF + rb"|" + _TEXT + rb")" + _tuple_of(_PART) + rb")" + _REST,
    re.DOTALL,
)
"""Entries of paths, each in one group: key, the parts of the path, and the operation that makes a tuple of them."""

PATH_TOKENS = re.compile(rb"\(?(" + _PART + rb"|[\x85-\x87t]\x94)", re.DOTALL)
"""The tokens of entries of `PATHS`."""

_NEXT = rb"(" + _REF + rb")" + _VALUE  # the name of an attribute and its value

PLACES = re.compile(
    _MORE
    + rb"("
    + _NEW
    + _REF
    + rb")"
    + _VALUE
    + _NEXT
    + rb"(?:"
    + _NEXT
    + rb")?ub(?:("
    + _NEW
    + _REF
    + rb")"
    + _VALUE
    + _NEXT * 2
    + rb"ub|("
    + _REF
    + rb")(?=u|"
    + _REF
    + rb"\)))"  # the next entry makes an object
    + _REST,
    re.DOTALL,
)
"""Entries of places: class and first attribute of the index, value, attribute, value, attribute, value; the same of the place,
or one that is there already.

The last attribute of the index may be missing.
"""

_TOKENS = re.compile(rb"(" + _REF + rb")|.", re.DOTALL)
_IN_SIZE = re.compile(rb"(" + _REF + rb")\(?((?:" + _INT + rb")*)[)\x85-\x87t].*", re.DOTALL)
_INT_TOKENS = re.compile(_INT, re.DOTALL)


class Tokens:
    """Tokens of the patterns, none of them empty. `codes`: the byte of the operation of each."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._joined = b"".join(tokens)
        self._data = numpy.frombuffer(self._joined + bytes(8), numpy.uint8)
        self._lengths = numpy.fromiter(map(len, tokens), numpy.int64, len(tokens))
        self._starts = numpy.cumsum(self._lengths) - self._lengths
        self.codes = self._data[self._starts]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def are_texts(self) -> NDArray[numpy.bool_]:
        are_texts: NDArray[numpy.bool_] = self.codes == TEXT
        return are_texts

    @property
    def are_refs(self) -> NDArray[numpy.bool_]:
        is_short, is_long = self.codes == _SHORT, self.codes == _LONG
        are_refs: NDArray[numpy.bool_] = (is_short & (self._lengths == 2)) | (is_long & (self._lengths == 5))
        return are_refs

    def numbers(self, places: Numbers) -> Numbers:
        """Return the arguments of up to four bytes of the tokens at some places."""
        starts, lengths = self._starts[places], self._lengths[places]
        numbers = numpy.zeros(len(places), numpy.int64)
        for at in range(1, 5):
            numbers += numpy.where(lengths > at, self._data[starts + at].astype(numpy.int64) << 8 * (at - 1), 0)
        return numbers

    def texts(self, places: Numbers) -> list[str]:
        """Return the texts at some places. Raises ValueError where one says another length than it has."""
        starts, stops = self._starts[places] + 2, (self._starts + self._lengths)[places] - 1
        if (self._data[starts - 1] != stops - starts).any():
            raise ValueError("a text that has another length")
        joined = self._joined.decode("latin-1")
        return [joined[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def ints(self) -> list[int]:
        """Return numbers. Raises ValueError for a token that is none, and for one below zero."""
        if not numpy.isin(self.codes, _INT_CODES).all():
            raise ValueError("no number")
        numbers = self.numbers(numpy.arange(len(self)))
        if (numbers[self.codes == _INT32] >> 31).any():
            raise ValueError("a number below zero")
        listed: list[int] = numbers.tolist()
        for at in numpy.flatnonzero(self.codes == _LONG_INT).tolist():
            listed[at] = int.from_bytes(self.tokens[at][2:], "little", signed=True)
            if listed[at] < 0:
                raise ValueError("a number below zero")
        return listed


def refs_in(span: bytes) -> list[int]:
    """Return the numbers in the memo of all values that operations without other arguments are mixed with."""
    tokens = Tokens([token for token in _TOKENS.findall(span) if token])
    listed: list[int] = tokens.numbers(numpy.arange(len(tokens))).tolist()
    return listed


def size_in(token: bytes) -> tuple[int, Shape]:
    """Return the number in the memo of the class of a new size, and the size. Raises ValueError for another token."""
    matched = _IN_SIZE.fullmatch(token)
    if matched is None:
        raise ValueError("no size")
    (number,) = refs_in(matched[1])
    return number, tuple(Tokens(_INT_TOKENS.findall(matched[2])).ints())
