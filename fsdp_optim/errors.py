"""The errors that this library raises. Each is also the builtin error that a caller would expect."""

from __future__ import annotations

from collections.abc import Iterator


def counted_noun(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that led to it, also what its traceback does not show because its words say the same."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class FsdpOptimError(Exception):
    """Parent of every error that this library raises on purpose.

    `told`: every rank that makes the call raises this same error.
    """

    told: bool = False


class LayoutError(FsdpOptimError, ValueError):
    """A Layout is impossible, or two Layouts do not describe the same parameters."""


class StateError(FsdpOptimError, ValueError):
    """An optimizer state does not fit: missing, extra, wrong shape, disagreeing values, another model's."""


class WrapperError(FsdpOptimError, TypeError):
    """A model or an optimizer is of a kind, or in a condition, that cannot be read."""


class RankError(FsdpOptimError, RuntimeError):
    """One or more ranks failed, or the ranks called with different arguments. Raised on all ranks alike."""


class RankTimeoutError(FsdpOptimError, TimeoutError):
    """Some ranks did not arrive, or did not answer, in time. The message names them."""


class CheckpointError(FsdpOptimError, OSError):
    """A checkpoint cannot be written, is not whole, or is not what was saved. The message names the file and the way out."""


class ReplacedError(CheckpointError):
    """A checkpoint was replaced by another one while it was read. What was read of it is not used."""
