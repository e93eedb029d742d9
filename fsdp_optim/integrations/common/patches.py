"""Names of other packages that are replaced and put back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

_MARK = "_is_of_fsdp_optim"


def replace_method(owner: type, name: str, new: Callable[..., Any]) -> None:
    """Replace a method by a call of `new(original, self, ...)`, where `original` is bound to the same object."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return new(functools.partial(original, self), self, *args, **kwargs)

    setattr(method, _MARK, True)
    setattr(owner, name, method)


def replace_function(owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Replace a function of a module by a call of `new(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return new(original, *args, **kwargs)

    setattr(function, _MARK, True)
    setattr(owner, name, function)


def is_replaced(owner: Any, name: str) -> bool:
    """Whether a name was replaced and not put back."""
    return bool(getattr(getattr(owner, name, None), _MARK, False))


def put_back(owner: Any, name: str) -> None:
    """Put back the object that a name had before it was replaced. Does nothing where the name has another object now."""
    while is_replaced(owner, name):
        setattr(owner, name, getattr(owner, name).__wrapped__)


@contextlib.contextmanager
def status_in(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of an object or a module with other values inside the block."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                vars(owner).pop(name, None)
