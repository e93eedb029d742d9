"""The quick tests: those of `make test`, which are all but the ones that `tests/data/not_quick.txt` lists.

    # a comment
    faults
    + faults/test_overwrite::OverwriteTest
    checkpoint/test_diff::SameTrainingTest

A line is a folder, a file, or the beginning of the name of a test, that is left out; with a `+` it is what stays of that. Of
several lines that fit, the longest counts. So a test of a new file is quick until somebody lists it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]
LIST = TESTS / "data" / "not_quick.txt"
ASKED = "QUICK_TESTS"
"""The variable that is set where the quick tests are asked for."""


@functools.cache
def listed() -> Mapping[str, bool]:
    """Whether it stays, for each folder, file and test of the list."""
    lines = [line.strip() for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return {line.removeprefix("+ "): line.startswith("+ ") for line in lines if line}


@functools.cache
def _rules_of(place: str) -> tuple[bool, Mapping[str, bool]]:
    """Of a folder or a file: whether its tests are quick, and the lines for single ones, by the beginning of their names."""
    within = [place, *(str(parent) for parent in Path(place).parents)]
    stays = next((listed()[each] for each in within if each in listed()), True)
    return stays, {name.partition("::")[2]: kept for name, kept in listed().items() if name.startswith(f"{place}::")}


def is_quick(file: Path, nodeid: str) -> bool:
    """Whether a test is one of the quick ones, by its file and pytest's name of it."""
    stays, rules = _rules_of(_place(file))
    name = nodeid.partition("::")[2]
    return rules[max(fit, key=len)] if (fit := [each for each in rules if name.startswith(each)]) else stays


def is_left_out(path: Path) -> bool:
    """Whether a folder or a file has no quick test."""
    place = _place(path)
    if place == ".":
        return False
    kept_inside = any(kept and (name.startswith((f"{place}/", f"{place}::"))) for name, kept in listed().items())
    return not _rules_of(place)[0] and not kept_inside


def has_few(file: Path) -> bool:
    """Whether the quick tests are asked for, and a file has few: what its tests share is not worth making."""
    return ASKED in os.environ and not _rules_of(_place(file))[0]


@functools.cache
def _place(path: Path) -> str:
    """The name of a folder or a file in the list."""
    return path.relative_to(TESTS).with_suffix("").as_posix() if TESTS in path.parents else "."
