"""Names of other packages that are replaced, put back, and looked for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fsdp_optim.errors import WrapperError

_MARK = "_is_of_fsdp_optim"


def check_names(package: str, tested: str, names: Sequence[tuple[Any, str]]) -> None:
    """Raise WrapperError, in one line, unless every owner has its name. `tested`: the version of the package that is known to."""
    missing = [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name in names if not hasattr(owner, name)]
    if missing:
        raise WrapperError(
            f"{package} {version_of(package)} does not have {', '.join(missing)}, which this plug-in needs: install {package} "
            f"{tested}, which was tested, or save with fsdp_optim.save"
        )


def version_of(package: str) -> str:
    """The version of a package that is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown version"


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
    """Put back what a name was before it was replaced. Does nothing where something else has the name now."""
    while is_replaced(owner, name):
        setattr(owner, name, getattr(owner, name).__wrapped__)


@contextlib.contextmanager
def standing_in(owner: Any, **values: Any) -> Iterator[None]:
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
