"""The text of an optimizer's description in a manifest: the shorter way to write it gives the same bytes."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fsdp_optim.formats.own.manifest import canonical, canonical_optim

NAMES = st.text(st.characters(max_codepoint=127), max_size=8) | st.text(string.ascii_letters + ".", min_size=1)
ROWS = st.lists(st.lists(NAMES, min_size=3, max_size=3), max_size=3)
PARAMS = st.dictionaries(
    NAMES,
    st.fixed_dictionaries(
        {"shape": st.lists(st.integers(0, 1 << 62), max_size=3), "values": ROWS, "has_state": st.booleans()}
    ),
    max_size=4,
)
GROUPS = st.lists(st.dictionaries(NAMES, st.floats(allow_nan=False, allow_infinity=False), max_size=3), max_size=2)


@given(PARAMS, GROUPS, NAMES | st.none())
def test_names_and_whole_numbers(params: dict[str, Any], groups: list[Any], name: str | None) -> None:
    values = {"optimizer_class": name, "groups": groups, "extra": {}, "params": params}
    assert canonical_optim(values, plain=True) == canonical(values)


@given(PARAMS, GROUPS)
def test_a_description_whose_last_key_is_another(params: dict[str, Any], groups: list[Any]) -> None:
    values = {"zero": {}, "groups": groups, "params": params}
    assert canonical_optim(values, plain=True) == canonical(values)


def test_floats_are_written_as_before() -> None:
    values = {"params": {"a": {"values": [["lr", "scalar", 1e-08]]}}}
    assert canonical_optim(values, plain=False) == canonical(values)
    assert b"1e-08" in canonical_optim(values, plain=False)
