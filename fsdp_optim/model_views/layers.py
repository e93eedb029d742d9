"""Equal layers: what is learned of one holds for the others, and their Views become one, with a placeholder in its names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import View

_FIELDS = ("i", "j", "k", "m", "n", "layer", "block", "stage", "unit")

Kind = tuple[tuple[str, Shape], ...]
"""The parameters of a layer, each with its shape, by their names after the number of the layer."""


def layers_of(shapes: Mapping[str, Shape]) -> dict[tuple[str, str], dict[str, Shape]]:
    """Return parameters by layer: by what is before the first number in their names, and the number, or by ("", "")."""
    layers: dict[tuple[str, str], dict[str, Shape]] = {}
    for name, shape in shapes.items():
        layers.setdefault(_layer(name)[:2], {})[name] = shape
    return layers


def kind_of(layer: tuple[str, str], shapes: Mapping[str, Shape]) -> tuple[str, Kind]:
    """Return what is equal for layers that are converted alike."""
    return layer[0], tuple(sorted((_layer(name)[2], shape) for name, shape in shapes.items()))


def in_layer(view: View, number: str) -> View:
    """Return the View of the same parameter in another layer."""
    own = _layer(view.name)[1]
    parts = {_renumbered(part, own, number): axes for part, axes in view.parts}
    return View(_renumbered(view.name, own, number), view.axes, parts, **dict(view.sizes))


def _layer(name: str) -> tuple[str, str, str]:
    """Return what is before the first number in a name, the number, and what is after it."""
    texts = name.split(".")
    at = next((at for at, text in enumerate(texts) if text.isdigit()), None)
    return ("", "", name) if at is None else (".".join(texts[:at]), texts[at], ".".join(texts[at + 1 :]))


def _renumbered(name: str, own: str, number: str) -> str:
    """Return a name with another number in place of the first `own`."""
    texts = name.split(".")
    if own in texts:
        texts[texts.index(own)] = number
    return ".".join(texts)


def generalised(views: Sequence[View], names: Collection[str]) -> list[View]:
    """Return Views of which those of equal layers are one, with placeholders for the numbers of layers.

    Args:
        views: Views without placeholders, of different tensors.
        names: the names of all parameters and buffers. No View is to match one that it is not of.
    """
    groups: dict[str, list[View]] = {}
    patterns: dict[str, View] = {}
    for view in views:
        pattern = _pattern(view)
        groups.setdefault(repr(pattern), []).append(view)
        patterns[repr(pattern)] = pattern
    taken = {view.name for view in views} | set(names)
    general = list[View]()
    for text, group in groups.items():
        own = {view.name for view in group}
        is_right = len(group) > 1 and own == {name for name in taken if patterns[text].matches(name)}
        general += [patterns[text]] if is_right else group
    return general


def _pattern(view: View) -> View:
    """Return a View with placeholders for the numbers in its name; the View itself where its parts have other numbers."""
    axes = {*view.axes.replace("(", " ").replace(")", " ").split()}
    fields = [field for field in _FIELDS if field not in axes]
    numbers = [text for text in view.name.split(".") if text.isdigit()]
    if (
        not numbers
        or len(numbers) > len(fields)
        or any(_numbers(part)[: len(numbers)] != numbers for part, _ in view.parts)
    ):
        return view
    parts = {_with_fields(part, fields[: len(numbers)]): text for part, text in view.parts}
    return View(_with_fields(view.name, fields[: len(numbers)]), view.axes, parts, **dict(view.sizes))


def _numbers(name: str) -> list[str]:
    return [text for text in name.split(".") if text.isdigit()]


def _with_fields(name: str, fields: Iterable[str]) -> str:
    left = iter(fields)
    texts = name.split(".")
    return ".".join(f"{{{field}}}" if text.isdigit() and (field := next(left, None)) else text for text in texts)
