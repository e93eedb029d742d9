"""Descriptions of arguments that say `as for another function`: on the site each page has the words themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

HEAD = re.compile(r"^(Args|Attributes):$")
ARGUMENT = re.compile(r"^    (?P<name>\*{0,2}\w+): ?(?P<says>.*)$")
AS_FOR = re.compile(r"^as for\s+`(?P<what>[\w.]+)`(?P<rest>.*)$", re.DOTALL)
DEEPEST = 8  # of chains: a docstring that refers to itself ends there

Find = Callable[[str], Iterable[str]]
"""The docstrings of what a name may mean, the likeliest first."""


def arguments(docstring: str) -> dict[str, list[str]]:
    """The lines of the description of each argument, without the name; in a docstring with sections as griffe knows them."""
    described: dict[str, list[str]] = {}
    inside, lines = False, []
    for line in docstring.splitlines():
        if HEAD.match(line):
            inside = True
        elif line and not line.startswith(" "):
            inside = False
        elif inside and (match := ARGUMENT.match(line)):
            lines = described[match["name"]] = [match["says"]]
        elif inside and line:
            lines.append(line.strip())
    return described


def says(name: str, lines: list[str], find: Find, depth: int = 0) -> list[str]:
    """The description of an argument, with the words of what it refers to in the place of `as for`."""
    match = AS_FOR.match("\n".join(lines))
    if match is None or depth == DEEPEST:
        return lines
    theirs = next((known[name] for known in map(arguments, find(match["what"])) if name in known), None)
    if theirs is None:
        return lines
    text = "\n".join(says(name, theirs, find, depth + 1))
    rest = match["rest"]
    joined = text if rest == "." else text.removesuffix(".") + rest
    return joined.split("\n")


def filled(docstring: str, find: Find) -> str:
    """The docstring with the words of others in the place of `as for` at the beginning of an argument's description."""
    known = arguments(docstring)
    out, inside, skipping = [], False, False
    for line in docstring.splitlines():
        if HEAD.match(line):
            inside = True
        elif line and not line.startswith(" "):
            inside = False
        match = ARGUMENT.match(line) if inside else None
        if match:
            lines = says(match["name"], known[match["name"]], find)
            skipping = lines != known[match["name"]]
            if skipping:
                out += [f"    {match['name']}: {lines[0]}", *(f"        {more}" for more in lines[1:])]
                continue
        elif skipping and line.startswith("        "):
            continue
        else:
            skipping = False
        out.append(line)
    return "\n".join(out)
