"""The error of one rank, as it is kept until all ranks meet; and which calls cannot be under way at once."""

from __future__ import annotations

import pytest

from fsdp_optim import RankError
from fsdp_optim.transport import Failure
from fsdp_optim.transport.turns import Turn


def test_the_first_error_is_kept() -> None:
    """A later one often follows from it, and would hide the reason."""
    failure, first = Failure(), OSError("no space left")
    with failure:
        raise first
    failure.note(RankError("lost the connection"), fatal=True)
    with failure:
        raise ValueError("no elements")
    assert failure.error is first
    assert failure.fatal


def test_what_is_not_kept() -> None:
    """What all ranks raise alike, also an interrupt that they have been told of, and the end of a generator."""
    failure, of_all = Failure(), RankError("on all ranks")
    of_all.on_all_ranks = True
    told = KeyboardInterrupt()
    told.on_all_ranks = True  # type: ignore[attr-defined]
    for error in (of_all, told, GeneratorExit()):
        with pytest.raises(type(error)), failure:
            raise error
    assert failure.error is None


def test_interrupts_are_kept_until_the_ranks_meet() -> None:
    for error in (KeyboardInterrupt(), SystemExit(3)):
        failure = Failure()
        with failure:
            raise error
        assert failure.error is error


def test_calls_that_would_mix() -> None:
    """Those of the same ranks share their meetings; those with two common ranks in one process group share messages."""
    group = object()
    for other, others_group, meets in (
        ((0, 1, 2), group, True),
        ((0, 1, 2), object(), True),
        ((1, 2, 3), group, True),
        ((2, 3), group, False),
        ((1, 2), object(), False),
    ):
        assert Turn("save", (0, 1, 2), group).conflicts_with(Turn("load", other, others_group)) is meets, other
