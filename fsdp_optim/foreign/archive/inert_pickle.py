"""A reader of pickles of unknown origin: it builds plain values, and calls nothing but the functions of a table.

The standard library's `pickletools` splits the bytes into operations; this file interprets them. An object of a class that is
not in the table becomes an `Unread`. Nothing is imported, and only the methods of objects that are named here are called.
"""

from __future__ import annotations

import importlib
import pickle
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.pickle_table import Global, Known, Table, checked_keys, is_left, set_state
from fsdp_optim.foreign.archive.tree import mapped
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.unread import Unread

MOST_NBYTES = 256 << 20
"""The most bytes that a pickle may have. A pickle with a million tensors has some 120 MB."""

_FEW = 1 << 18  # containers that even a short pickle may have
_NBYTES_EACH = 8  # bytes that a pickle needs for each further container
_DICTS: tuple[type, ...] = (dict, OrderedDict, Counter, defaultdict)
_OF_ANY_KEYS = ("builtins.set", "builtins.frozenset", "collections.Counter", "collections.defaultdict")
_MOST_BITS = 8192  # of a number; Python refuses to show one of more than 4300 digits


class Readable(Protocol):
    """A file that pickles are read from."""

    def read(self, size: int = -1, /) -> bytes: ...
    def readline(self) -> bytes: ...
    def tell(self) -> int: ...


class Unpickler:
    """Reads pickles, one after the other, from a file.

    Attributes:
        where: the name of the pickle, for errors.
        table: the globals.
        persistent: the function that gives the value for a persistent id; None: the pickle may have none.
        prepared: None, or a function that makes the arguments of real classes ready: then a global that is not in the table is
            imported, and runs any code. Only for pickles that the user trusts.
    """

    def __init__(
        self,
        where: str,
        table: Table,
        persistent: Callable[[Any], Any] | None = None,
        prepared: Callable[[Any], Any] | None = None,
    ) -> None:
        self._where, self._table, self._persistent, self._prepared = where, table, persistent, prepared
        self._operations = {
            name.removeprefix("do_").upper(): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }

    def load(self, file: Readable) -> Any:
        """Return the next value in a file. Raises CheckpointError for anything that no honest program writes."""
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._num_containers = self._num_copied = 0
        start = file.tell()
        with as_checkpoint_error(self._where), _without_warnings():
            for code, argument, position in pickletools.genops(file):  # type: ignore[arg-type]  # it needs these methods only
                self._nbytes = (position or start) - start
                name = code.name
                if name in _PUSHES:
                    if type(argument) is int and argument.bit_length() > _MOST_BITS:
                        raise ValueError(f"a number of {argument.bit_length()} bits")
                    self._stack.append(argument)
                elif name == "STOP":
                    value = self._stack.pop()
                    return value if self._prepared is None else mapped(value, Global, Global.imported)
                elif name not in self._operations:
                    raise ValueError(f"the operation {name} does not belong into a checkpoint")
                else:
                    self._operations[name](argument)
        raise CheckpointError(f"{self._where}: ends before its last value")

    # -------------------------------------------------------------------------------------- limits

    def _check_size(self) -> None:
        self._num_containers += 1
        if self._num_containers > _FEW + self._nbytes // _NBYTES_EACH:
            raise ValueError("so many containers in few bytes would take many times as much memory")
        if self._nbytes > MOST_NBYTES:
            raise ValueError(f"a pickle of more than {MOST_NBYTES} bytes")

    def _check_copies(self, arguments: Any) -> None:
        """Bound the bytes that calls copy, because a call may name one large value again and again."""
        for argument in arguments if isinstance(arguments, (tuple, list)) else ():
            if isinstance(argument, (str, bytes, bytearray, list, tuple, dict, set, frozenset)):
                self._num_copied += len(argument)
        if self._num_copied > _FEW + 2 * self._nbytes:
            raise ValueError("calls that copy the same values again and again")

    # -------------------------------------------------------------------------------------- the stack

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def do_mark(self, argument: Any) -> None:
        self._check_size()
        self._marks.append(self._stack)
        self._stack = []

    def do_pop(self, argument: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def do_pop_mark(self, argument: Any) -> None:
        self._pop_mark()

    def do_dup(self, argument: Any) -> None:
        self._stack.append(self._stack[-1])

    def do_proto(self, argument: int) -> None:
        if argument > pickle.HIGHEST_PROTOCOL:
            raise ValueError(f"a pickle of the protocol {argument}")

    def do_frame(self, argument: int) -> None:
        pass

    def do_put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    do_binput = do_long_binput = do_put

    def do_memoize(self, argument: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def do_get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    do_binget = do_long_binget = do_get

    # -------------------------------------------------------------------------------------- values

    def _push(self, container: Any) -> None:
        self._check_size()
        self._stack.append(container)

    def do_none(self, argument: Any) -> None:
        self._stack.append(None)

    def do_newtrue(self, argument: Any) -> None:
        self._stack.append(True)

    def do_newfalse(self, argument: Any) -> None:
        self._stack.append(False)

    def do_string(self, argument: str) -> None:
        """Push the str of Python 2, which `pickletools` decodes as Latin-1."""
        self._stack.append(argument.encode("latin-1").decode())

    do_binstring = do_short_binstring = do_string

    def do_bytearray8(self, argument: bytearray) -> None:
        self._push(argument)

    def do_empty_list(self, argument: Any) -> None:
        self._push([])

    def do_empty_dict(self, argument: Any) -> None:
        self._push({})

    def do_empty_set(self, argument: Any) -> None:
        self._push(set())

    def do_empty_tuple(self, argument: Any) -> None:
        self._stack.append(())

    def do_list(self, argument: Any) -> None:
        items = self._pop_mark()
        self._push(items)

    def do_tuple(self, argument: Any) -> None:
        items = self._pop_mark()
        self._push(tuple(items))

    def do_tuple1(self, argument: Any) -> None:
        self._tuple_of(1)

    def do_tuple2(self, argument: Any) -> None:
        self._tuple_of(2)

    def do_tuple3(self, argument: Any) -> None:
        self._tuple_of(3)

    def _tuple_of(self, number: int) -> None:
        if len(self._stack) < number:
            raise IndexError("too few values on the stack")
        items = tuple(self._stack[-number:])
        del self._stack[-number:]
        self._push(items)

    def do_dict(self, argument: Any) -> None:
        items = self._pop_mark()
        self._push({})
        self._set_items(items)

    def do_frozenset(self, argument: Any) -> None:
        items = self._pop_mark()
        self._push(frozenset(self._keys(items)))

    def do_append(self, argument: Any) -> None:
        self._extend([self._stack.pop()])

    def do_appends(self, argument: Any) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if is_left(target):
            return
        if type(target) is list or (isinstance(target, list) and self._is_stand_in(target)):
            list.extend(target, items)
        elif self._prepared is not None:
            for item in self._real(items):
                target.append(item)
        else:
            raise TypeError(f"items for a {type(target).__name__}, which is not a list")

    def do_additems(self, argument: Any) -> None:
        items = self._pop_mark()
        if type(self._stack[-1]) is set:
            self._stack[-1].update(self._keys(items))
        elif not is_left(self._stack[-1]):
            raise TypeError(f"items for a {type(self._stack[-1]).__name__}, which is not a set")

    def do_setitem(self, argument: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def do_setitems(self, argument: Any) -> None:
        self._set_items(self._pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if is_left(target):
            return
        if len(items) % 2:
            raise ValueError("a key without a value")
        keys, values = items[::2], items[1::2]
        if type(target) in _DICTS or (isinstance(target, dict) and self._is_stand_in(target)):
            for key, value in zip(self._keys(keys), values, strict=True):
                target[key] = value
        elif self._prepared is not None:
            for key, value in zip(self._real(keys), self._real(values), strict=True):
                target[key] = value
        else:
            raise TypeError(f"keys for a {type(target).__name__}, which is not a dict")

    # -------------------------------------------------------------------------------------- names and calls

    def do_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        self._stack.append(self._named(IMPORT_MAPPING.get(module, module), name))

    def do_stack_global(self, argument: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("the name of a class is not a str")
        self._stack.append(self._named(module, name))

    def _named(self, module: str, name: str) -> Any:
        what = f"{module}.{name}"
        if what in self._table.globals:
            return self._table.globals[what]
        if self._prepared is None:
            return Unread(what)
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def _real(self, items: list[Any]) -> list[Any]:
        """Return the arguments of a real class or function, of a pickle that the user trusts."""
        if self._prepared is None:
            raise TypeError("a real class in a pickle of unknown origin")
        return list(self._prepared(items))

    def _keys(self, items: list[Any]) -> list[Any]:
        """Return the keys of a dict, or the items of a set."""
        return checked_keys(items) if self._prepared is None else self._real(items)

    def do_reduce(self, argument: Any) -> None:
        arguments = self._stack.pop()
        self._push(self._called(self._stack.pop(), arguments, {}))

    def do_newobj(self, argument: Any) -> None:
        arguments = self._stack.pop()
        self._push(self._new(self._stack.pop(), arguments, {}))

    def do_newobj_ex(self, argument: Any) -> None:
        named, arguments, cls = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if type(named) is not dict or not all(type(name) is str for name in named):
            raise TypeError("arguments without names")
        self._push(self._new(cls, arguments, named))

    def do_obj(self, argument: Any) -> None:
        function, *arguments = self._pop_mark()
        self._push(self._called(function, tuple(arguments), {}))

    def do_inst(self, argument: str) -> None:
        arguments = tuple(self._pop_mark())
        self.do_global(argument)
        self._push(self._called(self._stack.pop(), arguments, {}))

    def _new(self, cls: Any, arguments: Any, named: dict[str, Any]) -> Any:
        """Return an object of a class, without its `__init__`."""
        if isinstance(cls, Known) and cls.call in self._table.stand_ins:
            return self._called(Known(cls.what, partial(cls.call.__new__, cls.call)), arguments, named)
        is_real = self._prepared is not None and isinstance(cls, type)
        return self._called(partial(cls.__new__, cls) if is_real else cls, arguments, named)

    def _called(self, function: Any, arguments: Any, named: dict[str, Any]) -> Any:
        if type(arguments) is not tuple:
            raise TypeError("arguments that are no tuple")
        if is_left(function):
            return Unread(function.what)
        if isinstance(function, Known):
            self._check_copies(arguments)
            if self._prepared is None or function.what not in _OF_ANY_KEYS:
                made = function.call(*arguments, **named)
                if self._prepared is None or type(made) is not Unread or made.what != function.what:
                    return made
        if self._prepared is not None:
            function, named = self._real([function, named])
            return function(*self._real(list(arguments)), **named)
        raise TypeError(f"a call of a {type(function).__name__}")

    def do_build(self, argument: Any) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        self._check_copies([state, *state] if type(state) is tuple else [state])
        if type(target) in self._table.build:
            self._table.build[type(target)](target, state)
        elif self._is_stand_in(target) and hasattr(type(target), "__setstate__"):
            target.__setstate__(state)
        elif self._prepared is not None and not isinstance(target, Known):
            set_state(target, self._real([state])[0])
        elif not is_left(target):
            raise TypeError(f"a state for a {type(target).__name__}")

    def _is_stand_in(self, value: Any) -> bool:
        return type(value) in self._table.stand_ins

    def do_persid(self, argument: Any) -> None:
        if self._persistent is None:
            raise ValueError("a reference to an object outside of the pickle")
        self._push(self._persistent(argument))

    def do_binpersid(self, argument: Any) -> None:
        self.do_persid(self._stack.pop())


_PUSHES = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)
"""The operations whose argument is the value."""


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Raise a warning of the parser about a text as an error, if the process has made errors of warnings."""
    try:
        yield
    except Warning as warning:
        raise ValueError(f"{warning}") from warning
