"""The reading of docstrings for the site: the sections of this package become sections that griffe knows.

- `a, b: text` in Args describes each of them.
- `Raises (the same on all ranks):` is a section, and a sentence before it says the rest.
- `as for another function` has the words of that function's argument in its place.
- A public name in backticks is a link to its description.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

from website.as_for import filled

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises)\b *(\(.*\))?:$", re.MULTILINE)
OPTIONS = {"save": ("SaveOptions", "CallOptions"), "load": ("LoadOptions", "CallOptions")}
"""By function, the classes that describe its options."""
ITEM = re.compile(r"^(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*):(?= |$)")


def items(lines: list[str]) -> list[list[str]]:
    """The items of a section: their first lines are indented by four, and what belongs to them deeper."""
    joined: list[list[str]] = []
    for line in lines:
        if (line.startswith("    ") and not line.startswith("     ")) or not joined:
            joined.append([line])
        else:
            joined[-1].append(line)
    return joined


def split_names(item: list[str]) -> list[list[str]]:
    """The same item for each of the names that it begins with, which may be on several lines."""
    text = item[0].strip()
    rest = list(item[1:])
    while text.endswith(",") and ITEM.match(text) is None and rest:
        text += " " + rest.pop(0).strip()
    match = ITEM.match(text)
    if match is None:
        return [item]
    says = text[match.end() :]
    return [[f"    {name}:{says}", *rest] for name in match["names"].split(", ")]


def rewritten(docstring: str) -> str:
    """The docstring with sections as griffe knows them."""
    lines = docstring.splitlines()
    out: list[str] = []
    at = 0
    while at < len(lines):
        head = SECTION.match(lines[at])
        if head is None:
            out.append(lines[at])
            at += 1
            continue
        kind, when = head[1], head[2]
        body = []
        at += 1
        while at < len(lines) and (lines[at].startswith("    ") or not lines[at]):
            body.append(lines[at])
            at += 1
        if when:
            out += [f"Errors are {when[1:-1]}.", ""]
        out.append(f"{kind}:")
        if kind in ("Args", "Raises", "Attributes"):
            body = [line for item in items(body) for each in split_names(item) for line in each]
        out.extend(body)
        if body and body[-1]:
            out.append("")
    return "\n".join(out)


def linked(docstring: str, public: dict[str, str], own: set[str]) -> str:
    """The docstring with a link from each public name in backticks to its description.

    A name in `own` (the object itself, or a method of its class) is meant as such, except in `as for`.
    """

    def link(match: re.Match[str]) -> str:
        says, name = match.groups()
        if name not in public or (name in own and says != "as for "):
            return match[0]
        return f"{says}[`{name}`][{public[name]}]"

    return re.sub(r"(as for |)(?<!\[)`([\w.]+)`", link, docstring)


def with_value(function: griffe.Function) -> None:
    """Show the value of a default that is a constant of a module: nobody who reads the page knows the constant."""
    for parameter in function.parameters:
        if not isinstance(parameter.default, griffe.ExprName):
            continue
        try:
            constant = function.modules_collection[parameter.default.canonical_path]
        except (KeyError, griffe.GriffeError):
            continue
        if constant.is_attribute and constant.value is not None:  # type: ignore[union-attr]
            parameter.default = constant.value  # type: ignore[union-attr]


def defined_in(module: griffe.Module) -> dict[str, str]:
    """The public names that a module defines itself: there they are meant, and not others of the same name."""
    exports = [name for name in module.exports or () if isinstance(name, str)]
    return {name: f"{module.path}.{name}" for name in exports if name in module.members and not module[name].is_alias}


def objects_in(pkg: griffe.Module) -> Iterator[griffe.Object]:
    """All objects of a package, each once."""
    seen, waiting = set[int](), list[griffe.Object]([pkg])
    while waiting:
        here = waiting.pop()
        if id(here) not in seen:
            seen.add(id(here))
            yield here
            waiting += [member for member in here.members.values() if not member.is_alias]  # type: ignore[misc]


def meant(name: str, one: griffe.Object, pkg: griffe.Module) -> Iterator[str]:
    """The paths of what a docstring of `one` may mean by a name: a method beside it, or what its module or the package has."""
    first, _, rest = name.removeprefix(f"{pkg.path}.").partition(".")
    owner = one if isinstance(one, griffe.Class) else one.parent
    for place in (pkg,) if name.startswith(f"{pkg.path}.") else (owner, one.module, pkg):
        if place is None:
            continue
        try:
            thing = place[first]
            path = thing.final_target.path if thing.is_alias else thing.path
        except (KeyError, griffe.GriffeError):
            continue
        yield f"{path}.{rest}" if rest else path
    yield from (f"{pkg.path}.options.{options}" for options in OPTIONS.get(first, ()))


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of all objects of a package when it is read."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        public = {name: f"{pkg.path}.{name}" for name in pkg.exports or () if isinstance(name, str)}
        objects = list(objects_in(pkg))
        written = {one.path: rewritten(one.docstring.value) for one in objects if one.docstring is not None}

        for one in objects:
            if one.docstring is not None:
                own = {one.name} | (set(one.parent.members) if isinstance(one.parent, griffe.Class) else set())
                own |= set(one.members) if isinstance(one, griffe.Class) else set()
                known = {**public, **defined_in(one.module)}
                known |= {path: path for path in known.values()}  # `fsdp_optim.save`
                text = filled(
                    written[one.path],
                    lambda name, one=one: (written[path] for path in meant(name, one, pkg) if path in written),
                )
                one.docstring.value = linked(text, known, own)
            if isinstance(one, griffe.Function):
                with_value(one)
