"""The names that transformers' `save_pretrained` gives weights, as Views, learned by its own conversion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import View
from fsdp_optim.model_views.conversion_twins import FEW, check_stored, learned_views
from fsdp_optim.model_views.conversions import Conversion, conversions_in
from fsdp_optim.model_views.layers import in_layer, kind_of, layers_of
from fsdp_optim.model_views.patterns import joined
from fsdp_optim.options import Model


def views_of_transformers(model: Model) -> list[View]:
    """Return the Views by which a checkpoint of transformers models has the names that `save_pretrained` writes.

    Version 5 stacks experts, splits and renames weights when it loads a model, and `save_pretrained` reverts that. This runs
    the same `revert_weight_conversion` on the numbers of elements in place of the weights. Nothing of the model is read but
    names, shapes and its config, so it may be on the meta device, and under any wrapper; no rank is asked.

    A parameter that is cut, transposed or renamed in the files gets a View. Where the files have several parameters in one
    tensor, the View is of that tensor, and its parts are the parameters: a save keeps their names, which `from_pretrained` reads
    too. Where one name of a tied parameter is changed, its other names get a View too.

    Args:
        model: the model, wrapped or not; also a list of pipeline stages.

    Returns:
        The Views; none for a model that is no transformers model, or whose files have its own names.

    Raises:
        LayoutError: the conversion of a parameter is none of elements (dequantization, a cast): named with its operations.
    """
    return views_of_files(ModelReader(model))


def views_of_files(reader: ModelReader) -> list[View]:
    """Return as `views_of_transformers`, of a model by its reader: `views="hub"`."""
    view = reader.read()
    buffers = reader.buffers(view)
    shapes = {
        fqn: original.placement.shape
        for named in (*view.handles, *buffers.handles)
        for fqn, original in zip(named.fqns, named.handle.originals, strict=True)
    }
    aliases = {**view.aliases, **buffers.aliases}
    shapes |= {alias: shapes[fqn] for alias, fqn in aliases.items()}
    views = [
        _below(path, each)
        for path, conversion in conversions_in(reader.modules(), shapes)
        for each in views_of_conversion(conversion)
    ]
    return joined([*views, *_of_tied(aliases, views, shapes)], shapes)


@dataclass(frozen=True)
class _Changed:
    """The parameters that are more than renamed (`shapes`), and the tensors that are made of them (`stored`)."""

    conversion: Conversion
    shapes: Mapping[str, Shape]
    renamed: Mapping[str, Shape]
    stored: Mapping[str, Shape]
    few: int

    def learned(self, shapes: Mapping[str, Shape]) -> list[View]:
        """Return the Views of some of the parameters, with the renamed ones around them where their names depend on these."""
        try:
            views = learned_views(self.conversion, shapes, {}, self.stored, self.few)
            for view in views:
                check_stored(view, self.shapes, self.stored)
        except LayoutError:
            return learned_views(self.conversion, shapes, self.renamed, self.stored, self.few)
        return views

    def why_not(self, view: View) -> str:
        """Return why a View is not of these parameters and tensors; "" where it is."""
        try:
            check_stored(view, self.shapes, self.stored)
        except LayoutError as error:
            return str(error)
        return ""

    def check(self, views: Sequence[View]) -> None:
        """Raise LayoutError for Views that do not give all names that the files have."""
        names = set[str]()
        for view in views:
            check_stored(view, self.shapes, self.stored)
            is_cut = view.name in self.shapes
            names.update(view.bind(view.name, self.shapes[view.name]).names if is_cut else [view.name])
        lacking = sorted(set(self.stored) - names)
        if lacking:
            source = self.conversion.source_of(lacking[0], self.conversion.shapes)
            raise LayoutError(
                f"{source}: transformers' conversion of this parameter ({self.conversion.operations(source)}) gives {lacking[0]} "
                "besides, and every element must be in the files once: save it under its own name, by a list of Views without it"
            )


def views_of_conversion(conversion: Conversion, few: int = FEW) -> list[View]:
    """Return the Views of one transformers model, one for each parameter whose name or layout differs in the files.

    Args:
        few: the number of elements up to which parameters are numbered as they are (`conversion_twins.py`).

    Raises:
        LayoutError: as for `views_of_transformers`.
    """
    renamed, stored = conversion.on_shapes()
    changed = {name: shape for name, shape in conversion.shapes.items() if name not in renamed}
    views = [_renaming(name, other, conversion.shapes[name]) for name, other in renamed.items() if name != other]
    kept = {name: conversion.shapes[name] for name in renamed}
    return views + _of_changed(_Changed(conversion, changed, kept, stored, few)) if changed or stored else views


def _of_changed(changed: _Changed) -> list[View]:
    """Return the Views of the parameters that are more than renamed: layer by layer, or of all together."""
    try:
        views = _by_layer(changed)
        changed.check(views)
    except LayoutError as error:
        try:
            views = changed.learned(changed.shapes)
            changed.check(views)
        except LayoutError:
            raise error from None
    return views


def _by_layer(changed: _Changed) -> list[View]:
    """Return Views that are learned of one layer of each kind, where the files have the same of the others."""
    views = list[View]()
    by_kind: dict[object, list[View]] = {}
    for layer, shapes in layers_of(changed.shapes).items():
        kind = kind_of(layer, shapes)
        of_layer = [in_layer(view, layer[1]) for view in by_kind.get(kind, ())]
        if not of_layer or any(changed.why_not(view) for view in of_layer):
            of_layer = by_kind[kind] = changed.learned(shapes)
        views += of_layer
    return views


def _renaming(name: str, stored: str, shape: Shape) -> View:
    axes = " ".join(f"d{number}" for number in range(len(shape)))
    return View(name, axes, {stored: axes})


def _below(path: str, view: View) -> View:
    if not path:
        return view
    return View(
        f"{path}.{view.name}", view.axes, {f"{path}.{name}": axes for name, axes in view.parts}, **dict(view.sizes)
    )


def _of_tied(aliases: Mapping[str, str], views: Sequence[View], shapes: Mapping[str, Shape]) -> Iterator[View]:
    """Yield Views that keep a name of a tied parameter, where another of its names has a View: then each name needs one."""
    known = {view.name for view in views}
    tied: dict[str, set[str]] = {}
    for alias, fqn in aliases.items():
        tied.setdefault(fqn, {fqn}).add(alias)
    for names in tied.values():
        if names & known:
            yield from (_renaming(name, name, shapes[name]) for name in sorted(names - known))
