"""Equal layers: what is learned of one holds for the others, where the files have the same of these."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import View

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
