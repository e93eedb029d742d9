"""The errors that this library raises. Each class also derives from the builtin error that a caller would expect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

_LEFT_OUT = "..."


def counted_noun(number: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(items: Iterable[object], most: int = 8, between: str = ", ") -> str:
    """Return the first `most` items as text, and the number of the others: `a, b and 3 more`. Nothing is left out silently."""
    texts = [str(item) for item in items]
    left_out = len(texts) - most
    more = f"{' ' if between == ', ' else between}and {left_out} more" if left_out > 0 else ""
    return between.join(texts[:most]) + more


def one_line(error: BaseException) -> str:
    """Return the words of an error, without line breaks."""
    return " ".join(str(error).split())


def without(secrets: Iterable[str], line: str) -> str:
    """Return a line without secrets."""
    for secret in secrets:
        line = line.replace(secret, "***")
    return line


def only_differing(calls: Sequence[str]) -> list[str]:
    """Return descriptions of calls without the options that are equal in all of them: `save(the model, ..., step=2, ...)`.

    `calls`: each with its arguments after a comma; those with `=` are options.
    """
    common = set.intersection(*(set(call.split(", ")) for call in calls))
    shown = []
    for call in calls:
        texts: list[str] = []
        for text in call.split(", "):
            is_common = "=" in text and text in common
            if not is_common or texts[-1:] != [_LEFT_OUT]:
                texts.append(_LEFT_OUT if is_common else text)
        closes = ")" if texts[-1] == _LEFT_OUT and call.endswith(")") else ""
        shown.append(", ".join(texts) + closes)
    return shown


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes, including causes that `raise ... from None` hides in the traceback."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def pip_install(package: str) -> str:
    """Return the command that installs a package, in a version that this distribution's extras ask for.

    It works wherever this library came from (a clone, a wheel, an index), because it does not name its distribution.
    """
    from importlib.metadata import PackageNotFoundError, requires  # no part of what a save and a load need

    try:
        requirements = requires("fsdp-optim") or []
    except PackageNotFoundError:  # the sources are on the path, and nothing is installed
        requirements = []
    for requirement in requirements:
        wanted = requirement.partition(";")[0].strip()
        if re.match(r"[\w.-]+", wanted)[0].lower() == package.lower():  # type: ignore[index]
            return f"pip install {wanted!r}" if wanted != package else f"pip install {package}"
    return f"pip install {package}"


def missing(user: str, package: str) -> ModuleNotFoundError:
    """Return the error of a `user` that needs a package which is not installed."""
    return ModuleNotFoundError(f"{user} needs {package}, which is not installed: {pip_install(package)}", name=package)


class FsdpOptimError(Exception):
    """Parent of every error that this library raises on purpose.

    Attributes:
        on_all_ranks: whether every rank that makes the call raises this same error, so that no rank needs to report it.
        is_wrong_use: whether the call is wrong, or nothing is at the path; False: something there is damaged, or cannot be read
            or written now.
    """

    on_all_ranks: bool = False
    is_wrong_use: bool = False


class LayoutError(FsdpOptimError, ValueError):
    """A Layout is impossible, or two Layouts describe different parameters."""


class StateError(FsdpOptimError, ValueError):
    """An optimizer state does not fit: parameters are missing or unexpected, shapes or values differ, the model is another."""

    is_wrong_use = True


class StateKeysError(StateError, RuntimeError):
    """Names are missing or unexpected in a dict to load. It is a RuntimeError too, as torch's `load_state_dict` raises."""


class WrapperError(FsdpOptimError, TypeError):
    """A model or an optimizer has a class or a condition that this library cannot read."""

    is_wrong_use = True


class RankError(FsdpOptimError, RuntimeError):
    """One or more ranks failed, or the ranks called with different arguments. All ranks raise the same error."""


class StoreLostError(RankError):
    """The rendezvous store of the job does not answer, so that ranks can no longer agree."""


class RankTimeoutError(FsdpOptimError, TimeoutError):
    """Some ranks did not arrive or answer in time. The message names these ranks."""


class CheckpointError(FsdpOptimError, OSError):
    """A checkpoint cannot be written, is incomplete or damaged. The message names the file and the fix."""


def wrong_use(message: str) -> CheckpointError:
    """Return the error of a call that is wrong: nothing is there, the place is taken, or an argument is not allowed."""
    error = CheckpointError(message)
    error.is_wrong_use = True
    return error


class ReplacedError(CheckpointError):
    """A checkpoint was replaced by another checkpoint during a load. The bytes that were read so far are not used."""


def class_name(error: BaseException) -> str:
    """Return the name of an error's class; for subclasses of this package's errors, the public class that users catch."""
    if not isinstance(error, FsdpOptimError):
        return type(error).__name__
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == __name__)
