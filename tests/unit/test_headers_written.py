"""The header of a file that is written: the JSON that Python's own encoder writes, and as many files as needed."""

from __future__ import annotations

import json

import pytest

from fsdp_optim.formats.base import header as header_module
from fsdp_optim.formats.base.header import Header

KEYS = [
    "weight",
    "a.b",
    'with "quotes"',
    "back\\slash",
    "line\nbreak",
    "tab\t",
    "é",
    "\x7f",
    "日本",
    "",
    "\u2028",
    "a b",
]
TENSORS = [
    (key, ("float32", "int64", "float16", "bool")[at % 4], ((), (2, 3), (0,))[at % 3]) for at, key in enumerate(KEYS)
]


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"format": "pt", "param_groups": '[{"lr": 0.1}]'}])
@pytest.mark.parametrize("num", [0, 1, len(KEYS)])
@pytest.mark.parametrize("together", [1, 4, len(KEYS), 1 << 12])
def test_headers_are_the_json_of_their_tensors(
    num: int, metadata: dict[str, str], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header_module, "_ENTRIES_TOGETHER", together)
    header = Header.of(TENSORS[:num], metadata)
    values: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    for entry in header.entries:
        values[entry.key] = {
            "dtype": entry.code,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    wanted = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
    wanted += b" " * (-len(wanted) % 8)
    assert header.encoded() == len(wanted).to_bytes(8, "little") + wanted


@pytest.mark.parametrize("less", [0, 1])
def test_all_tensors_are_in_one_file_as_long_as_they_fit(less: int) -> None:
    """The longest file that is allowed, to the byte, has all of them; one byte less makes two files."""
    header = Header.of(TENSORS, {"format": "pt"})
    numbers = list(header.files_within(len(header.encoded()) + header.data_nbytes - less, {}))
    assert sum(numbers) == len(TENSORS)
    assert len(numbers) == 1 + less
