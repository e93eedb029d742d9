"""The operations of a pickle, made one after the other: for files with millions of entries, without an object for each.

A value that is remembered is a number of the memo after that, as `pickle.dumps` has it for the same object. The methods must be
called in the order of the file, because the memo counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import repeat

import numpy

from fsdp_optim.layout import Shape

START, STOP = b"\x80\x04", b"."  # of protocol 4
NONE, FALSE, MARK, END_OF_ITEMS, LIST_OF_ONE, LIST_OF_MORE, BUILD = b"N", b"\x89", b"(", b"u", b"a", b"e", b"b"
_EMPTY_DICT, _EMPTY_LIST = b"}\x94", b"]\x94"
_GLOBAL, _NEW, _CALL, _MEMOIZE = b"\x93\x94", b")\x81\x94", b"R\x94", b"\x94"
_FRAME, _FRAME_LENGTH = b"\x95", 8
_REF = numpy.dtype([("operation", "S1"), ("index", "<u4")])
_SHORT_TEXTS = [b"\x8c" + bytes([length]) for length in range(256)]
_TUPLE = b"t\x94"
_TUPLES = [b")", b"\x85\x94", b"\x86\x94", b"\x87\x94"]  # of up to three items


def frame(data: bytes) -> bytes:
    """Return operations as a frame, which an unpickler reads at once."""
    return _FRAME + len(data).to_bytes(_FRAME_LENGTH, "little") + data


def number(value: int) -> bytes:
    """Return the operation of an int that is not negative."""
    if value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")  # with a bit for the sign
    return b"\x8a" + bytes([len(data)]) + data


def ref(index: int) -> bytes:
    """Return the operation of a value of the memo."""
    return b"h" + index.to_bytes(1, "little") if index < 1 << 8 else b"j" + index.to_bytes(4, "little")


def refs(indices: Sequence[int]) -> list[bytes]:
    """Return the operations of many values of the memo, in the form that fits all."""
    rows = numpy.empty(len(indices), _REF)
    rows["operation"], rows["index"] = b"j", indices
    data, nbytes = rows.tobytes(), _REF.itemsize
    return [data[start : start + nbytes] for start in range(0, len(data), nbytes)]


def around_last(items: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return the bytes of a tuple before and after its last item, which follows the given ones."""
    num = len(items) + 1
    data = b"".join(items)
    return (data, _TUPLES[num]) if num < len(_TUPLES) else (MARK + data, _TUPLE)


class PickleStream:
    """The memo of a pickle. `length`: how many values it has; whoever repeats bytes counts what they add."""

    def __init__(self) -> None:
        self.length = 0
        self._refs: dict[Hashable, bytes] = {}
        self._repeated: dict[Hashable, tuple[bytes, int]] = {}

    def known(self, key: Hashable) -> bytes | None:
        """Return a reference to a value that is remembered, or None."""
        return self._refs.get(key)

    def remember(self, key: Hashable) -> None:
        """Remember the value that was added to the memo last."""
        self._refs[key] = ref(self.length - 1)

    def memoized(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """Return a value that `make` writes, which adds it to the memo last; a reference to it from the second time on."""
        known = self._refs.get(key)
        if known is not None:
            return known
        data = make()
        self.remember(key)
        return data

    def repeated(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """Return operations that are the same bytes each time, once all that they name is in the memo.

        So they are made twice the first time: as they must be there, and as they are from the second time on.
        """
        known = self._repeated.get(key)
        if known is not None:
            self.length += known[1]
            return known[0]
        data, length = make(), self.length
        self._repeated[key] = make(), self.length - length
        self.length = length
        return data

    def repetition(self, key: Hashable) -> tuple[bytes, int]:
        """Return the bytes of `repeated`, which was called, from the second time on, and how many values they add to the memo."""
        return self._repeated[key]

    def new_texts(self, texts: Iterable[str]) -> list[bytes]:
        """Return texts that are not there yet, or that nothing refers to."""
        encoded = [*map(str.encode, texts, repeat("utf-8"), repeat("surrogatepass"))]
        self.length += len(encoded)
        return [
            (_SHORT_TEXTS[length] if length < 256 else b"X" + length.to_bytes(4, "little")) + data + _MEMOIZE
            for data, length in zip(encoded, map(len, encoded), strict=True)
        ]

    def text(self, text: str) -> bytes:
        """Return a text, or a reference to it."""
        return self._refs.get(text) or self.memoized(text, lambda: self.new_texts([text])[0])

    def named(self, module: str, name: str) -> bytes:
        """Return a class or another value of a module."""

        def make() -> bytes:
            data = self.text(module) + self.text(name) + _GLOBAL
            self.length += 1
            return data

        return self.memoized((module, name), make)

    def new(self, module: str, name: str) -> bytes:
        """Return a new object of a class, without attributes."""
        data = self.named(module, name) + _NEW
        self.length += 1
        return data

    def tuple(self, items: Sequence[bytes]) -> bytes:
        """Return a tuple, whose items were made just before."""
        if not items:
            return _TUPLES[0]
        self.length += 1
        begin, end = around_last(items[:-1])
        return b"".join([begin, items[-1], end])

    def called(self, what: bytes, items: Sequence[bytes]) -> bytes:
        """Return the result of a call, whose arguments were made just before."""
        data = what + self.tuple(items) + _CALL
        self.length += 1
        return data

    def size(self, shape: Shape) -> bytes:
        """Return a torch.Size, or a reference to an equal one."""
        return self.memoized(
            shape, lambda: self.called(self.named("torch", "Size"), [self.tuple([*map(number, shape)])])
        )

    def empty_dict(self) -> bytes:
        """Return a dict, whose items follow."""
        self.length += 1
        return _EMPTY_DICT

    def empty_list(self) -> bytes:
        """Return a list, whose items follow."""
        self.length += 1
        return _EMPTY_LIST
