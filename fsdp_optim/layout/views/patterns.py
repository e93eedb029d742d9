"""Patterns of names: `{i}` stands for a part of a name between dots, `*` for any text."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_optim.errors import LayoutError

_FIELD = re.compile(r"\{(\w+)\}|(\*)")

Bindings = Mapping[str, str]
"""What the placeholders of a pattern stand for in a name. The stars are called `*0`, `*1`, ..."""


def fields_of(pattern: str) -> tuple[str, ...]:
    """Return the placeholders of a pattern, each once, in their order."""
    names, stars = list[str](), 0
    for field in _FIELD.finditer(pattern):
        names.append(field[1] or f"*{stars}")
        stars += field[2] is not None
    return tuple(dict.fromkeys(names))


def check_pattern(what: str, pattern: object) -> str:
    """Return a pattern. Raises LayoutError, which begins with `what`, for a value that is none."""
    if not isinstance(pattern, str) or not pattern:
        raise LayoutError(f"{what} must be a name, such as 'layers.{{i}}.wq.weight', not {pattern!r}")
    left = _FIELD.sub("", pattern)
    if "{" in left or "}" in left:
        raise LayoutError(f"{what} {pattern!r}: a placeholder is a word in braces, such as {{i}}")
    return pattern


def match(pattern: str, name: str) -> Bindings | None:
    """Return what the placeholders stand for in a name; None for a name that does not have this pattern."""
    compiled, fields = _compiled(pattern)
    matched = compiled.fullmatch(name)
    return dict(zip(fields, matched.groups(), strict=True)) if matched is not None else None


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    text, at, fields = "", 0, list[str]()
    stars = 0
    for field in _FIELD.finditer(pattern):
        name = field[1] or f"*{stars}"
        stars += field[2] is not None
        text += re.escape(pattern[at : field.start()])
        if name in fields:
            text += f"(?:\\{fields.index(name) + 1})"
        else:
            text += "([^.]+)" if field[1] else "(.*)"
            fields.append(name)
        at = field.end()
    return re.compile(text + re.escape(pattern[at:])), tuple(fields)


def is_index(text: str) -> bool:
    """Return whether a text may stand for an axis: it is the index that names of parts have."""
    return text.isascii() and text.isdigit() and text == str(int(text))


@dataclass(frozen=True)
class Template:
    """A pattern in which some placeholders have their texts. `text`: with `%s` in place of each of `fields`."""

    text: str
    fields: tuple[str, ...]

    @classmethod
    def of(cls, pattern: str, texts: Bindings) -> Template:
        """Return a pattern with these texts."""
        left, stars = list[str](), 0
        text, at = "", 0
        for field in _FIELD.finditer(pattern):
            name = field[1] or f"*{stars}"
            stars += field[2] is not None
            text += _escaped(pattern[at : field.start()]) + (_escaped(texts[name]) if name in texts else "%s")
            at = field.end()
            if name not in texts:
                left.append(name)
        return cls(text + _escaped(pattern[at:]), tuple(left))

    def fill(self, bindings: Bindings) -> str:
        """Return the name in which the other placeholders stand for these texts."""
        return self.text % tuple([bindings[field] for field in self.fields])


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
