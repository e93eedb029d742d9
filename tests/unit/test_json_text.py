"""JSON of unknown origin: the fast parser gives what the careful one gives, and leaves to it what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.compare import check_same

from fsdp_optim import CheckpointError
from fsdp_optim.formats.base import json_text
from fsdp_optim.formats.base.json_text import parse_json

WORDS = st.sampled_from(["", "a", "a:b", '":', "\\", "é", "\u2028", "\0", "😀", "$tuple"])
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.just(2**100) | st.floats(allow_nan=True, allow_infinity=True) | WORDS
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=8
)


def outcome(parse: Any, *args: Any) -> Any:
    try:
        return parse(*args)
    except CheckpointError as error:
        return str(error)


@given(VALUES, st.booleans(), st.none() | st.integers(0, 2))
def test_values(value: Any, ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    check_same("parsed", outcome(parse_json, "here", text), outcome(json_text._parsed, "here", text))


TEXTS = st.lists(st.sampled_from([*'{}[],:"\\u003a1.e-', '"a"', '"\\u003a"', "null", "\x01"]), max_size=12).map("".join)


@given(TEXTS | TEXTS.map(lambda text: '{"a":1,' + text + "}"))
@example('{"a":1,"a":2}')
@example('{"a":1,"a":"\\u003a"}')
@example('["\\ud800"]')
@example("1e400")
@example("")
def test_texts(text: str) -> None:
    check_same("parsed", outcome(parse_json, "here", text.encode()), outcome(json_text._parsed, "here", text.encode()))


@pytest.mark.parametrize("text", ['{"a":1,"a":2}', '{"a":1,"a":"\\u003a"}', '[{"b:":{"a":":","a":[":"]}}]'])
def test_keys_twice(text: str) -> None:
    """Also where a colon in a string could hide the lost one."""
    with pytest.raises(CheckpointError, match="here: is not readable JSON: 'a' occurs twice"):
        parse_json("here", text.encode())


def test_most_texts_are_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(json_text, "_parsed")
    text = b'{"a:b": {"shape": [8, 8], "lr": 1e-08}, "c": ["d:", null, true]}\n'
    assert parse_json("here", text) == json.loads(text)
