"""Headers of unknown origin: what is decoded in C is what the careful reader gives, and it leaves to that one what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_optim import CheckpointError
from fsdp_optim.formats.base.header import _listed, _listed_at_once

A = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
B = '"b":{"dtype":"F32","shape":[],"data_offsets":[8,12]}'


def outcome(read: Callable[[str, bytes], Any], text: str) -> Any:
    try:
        return read("here", text.encode())
    except CheckpointError as error:
        return str(error)


PIECES = st.sampled_from(
    ['"__metadata__":{"k":"v:}"}', '"__metadata__":{}', A, B, ",", ",", ",", "{", "}", " ", "\x0c", "1"]
)


@given(st.lists(PIECES, max_size=7).map("".join))
def test_any_text(text: str) -> None:
    for header in (f"{{{text}}}", f'{{"__metadata__":{{}}{text}', f"{{{A},{text}}}"):
        at_once = outcome(_listed_at_once, header)
        assert at_once is None or at_once == outcome(_listed, header)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"__metadata__":{{}}{A}}}',
        f'{{"__metadata__":{{}},,{A}}}',
        '{"__metadata__":{},}',
        f'{{"__metadata__":{{}},"__metadata__":{{}},{A}}}',
        f'{{"__metadata__":{{}},{A},{A}}}',
        f'{{"__metadata__":{{}},"\\u005f_metadata__"{A[3:]}}}',
        f'{{{A},"__metadata__":{{}}}}',
        f'{{"__metadata__":{{"k":"v"}}\x0c,{A}}}',
        f'{{"__metadata__":{{"k",{A}}}',
    ],
)
def test_what_is_doubted(text: str) -> None:
    assert _listed_at_once("here", text.encode()) is None


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"é": 'a:b"},{"', "": "\\"}])
@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n", " : ")])
@pytest.mark.parametrize("tensors", ["{}", f"{{{A}}}", f"{{{A},{B}}}"])
def test_most_headers_are_decoded_at_once(metadata: dict[str, str], separators: tuple[str, str], tensors: str) -> None:
    values = {"__metadata__": metadata, **json.loads(tensors)}
    text = json.dumps(values, separators=separators, ensure_ascii=False)
    assert _listed_at_once("here", text.encode()) == _listed("here", text.encode())
