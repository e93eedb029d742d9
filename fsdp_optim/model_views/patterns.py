"""Views of many layers as one, with placeholders for the numbers of layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fsdp_optim.layout.views import View

_PLACEHOLDERS = "ijklm"


def joined(views: Sequence[View], names: Collection[str]) -> list[View]:
    """Return Views in which those that differ in the numbers of layers alone are one, in the order of the first of each.

    Args:
        views: each of one live parameter.
        names: all names of the model. No View of the result matches one of these that is not of the Views it was made of.
    """
    by_length: dict[int, list[str]] = {}
    for name in names:
        by_length.setdefault(name.count("."), []).append(name)
    alike: dict[object, list[View]] = {}
    for view in views:
        alike.setdefault(_key(view), []).append(view)
    result: list[View] = []
    for members in alike.values():
        pattern = _pattern(members)
        own = {view.name for view in members}
        others = [name for name in by_length.get(members[0].name.count("."), ()) if name not in own]
        if pattern is None or any(map(pattern.matches, others)):
            result += members
        else:
            result.append(pattern)
    return result


def _key(view: View) -> object:
    """Return what Views have in common that may be one: all but the numbers in their names."""
    return (
        _with_stars(view.name),
        view.axes,
        tuple((_with_stars(part), axes) for part, axes in view.parts),
        view.sizes,
    )


def _with_stars(name: str) -> str:
    return ".".join("*" if text.isdigit() else text for text in name.split("."))


def _pattern(views: Sequence[View]) -> View | None:
    """Return one View of several. None for a single one, and where the numbers in parts are not those of the live name."""
    if len(views) < 2:
        return None
    live = [view.name.split(".") for view in views]
    varying = [at for at, texts in enumerate(zip(*live, strict=True)) if len(set(texts)) > 1]
    if not varying or len(varying) > len(_PLACEHOLDERS):
        return None
    taken = dict(zip(varying, _free(views, len(varying)), strict=True))
    parts: dict[str, str] = {}
    for number, (_, axes) in enumerate(views[0].parts):
        texts = _filled([view.parts[number][0].split(".") for view in views], live, taken)
        if texts is None:
            return None
        parts[texts] = axes
        if len(parts) != number + 1:
            return None
    name = ".".join(f"{{{taken[at]}}}" if at in taken else text for at, text in enumerate(live[0]))
    return View(name, views[0].axes, parts, **dict(views[0].sizes))


def _filled(parts: Sequence[list[str]], live: Sequence[list[str]], taken: dict[int, str]) -> str | None:
    """Return the name of a part with placeholders. None where its numbers are others than those of the live name."""
    texts = []
    for at, column in enumerate(zip(*parts, strict=True)):
        if len(set(column)) == 1:
            texts.append(column[0])
            continue
        same = [place for place in taken if list(column) == [name[place] for name in live]]
        if not same:
            return None
        texts.append(f"{{{taken[at if at in same else same[0]]}}}")
    return ".".join(texts)


def _free(views: Sequence[View], number: int) -> Iterable[str]:
    """Return names of placeholders that no axis has."""
    axes = f"{views[0].axes} {views[0].parts}"
    words = set(axes.replace("(", " ").replace(")", " ").replace("{", " ").replace("}", " ").replace(".", " ").split())
    free = [text for text in _PLACEHOLDERS if text not in words and f"'{text}'" not in axes]
    return [*free, *(f"i{at}" for at in range(number))][:number]
