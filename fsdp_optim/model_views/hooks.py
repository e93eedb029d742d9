"""Views learned from the hooks of one unit of modules: the hooks are run on numbers, and their results are read.

A unit whose numbers are small is learned exactly. A larger one is learned from two small twins (`twins.py`), and its shapes are
confirmed on the meta device; the complete stack is in memory on no device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fsdp_optim.adapters.state_dict_hooks import HookedUnit
from fsdp_optim.errors import LayoutError, WrapperError
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import View, fitted_view
from fsdp_optim.layout.views.numbered import Numbers
from fsdp_optim.model_views.numbering import Numbering
from fsdp_optim.model_views.running import HookFailed, HookRun, refusal, run_load, run_save
from fsdp_optim.model_views.twins import Twins

EXACT_NBYTES = 8 << 20
"""The most bytes of numbers of a unit that is learned exactly. Its hooks make several copies of these."""

MOST_NBYTES = 32 << 20
"""The same limit for a unit that has no twins."""


def learned_views(unit: HookedUnit) -> list[View]:
    """Return Views of the parameters that the hooks rename, cut or permute; their names are those in state_dict().

    Raises:
        WrapperError: the hooks do something else with a parameter, or what they may not.
    """
    shapes = {name: tensor.shape for name, tensor in unit.tensors.items()}
    try:
        at_full_size: HookRun | None = run_save(unit, {name: on_meta(shape) for name, shape in shapes.items()})
    except HookFailed:  # it may look at elements, which there are none of
        at_full_size = None
    touched = at_full_size.touched if at_full_size is not None else list(shapes)
    numbering = Numbering({name: shapes[name] for name in touched})
    if not touched or numbering.nbytes <= EXACT_NBYTES:
        return list(views_at(unit, shapes, touched).values())
    try:
        if at_full_size is not None:
            return Twins(at_full_size, touched, views_at).views()
    except WrapperError:
        if numbering.nbytes > MOST_NBYTES:
            raise
    if numbering.nbytes > MOST_NBYTES:
        raise refusal(
            unit, f"they do not run on the meta device, and {numbering.nbytes} bytes of numbers are too many", touched
        )
    return list(views_at(unit, shapes, touched).values())


def flow_of(unit: HookedUnit) -> tuple[object, ...]:
    """Return what the hooks do with the parameters of this unit, as a key: equal units have one key, unless it is unknown.

    Hooks get the names of parameters too, in which layers differ, and could do otherwise for some of them.

    Raises WrapperError as `learned_views` does.
    """
    prefix = unit.outermost.prefix
    try:
        run = run_save(unit, {name: on_meta(tensor.shape) for name, tensor in unit.tensors.items()})
    except HookFailed:
        return (prefix,)
    if not run.guard.is_closed:
        return (prefix,)
    kept = sorted((name.removeprefix(prefix), run.guard.number(value)) for name, value in run.state.items())
    return (tuple(run.guard.flow), tuple(kept))


def on_meta(shape: Shape) -> torch.Tensor:
    """Return a tensor in place of a parameter, without memory."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def views_at(unit: HookedUnit, shapes: Mapping[str, Shape], touched: list[str]) -> dict[str, View]:
    """Return Views by live parameter, as the hooks make them of parameters with these shapes.

    Raises WrapperError as `learned_views` does.
    """
    if not touched:
        return {}
    numbering = Numbering({name: shapes[name] for name in touched})
    given = {
        name: numbering.numbers_of(name) if name in numbering.shapes else on_meta(shape)
        for name, shape in shapes.items()
    }
    try:
        run = run_save(unit, given)
    except HookFailed as error:
        raise refusal(unit, f"on numbers in place of weights {error}", touched) from error
    views: dict[str, View] = {}
    for name, parts in _parts_by_owner(run, numbering).items():
        try:
            views[name] = fitted_view(name, tuple(shapes[name]), parts)
        except LayoutError as error:
            raise refusal(unit, f"what they make of {error}", [name]) from None
    _prove(run, numbering, views)
    return views


def _parts_by_owner(run: HookRun, numbering: Numbering) -> dict[str, dict[str, Numbers]]:
    """Return, by live parameter, the elements in each part. Parameters that the hooks leave, or drop, have none."""
    parts: dict[str, dict[str, Numbers]] = {}
    for key, value in run.state.items():
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            continue
        if key in run.given and run.is_left(key):
            continue
        is_computed = run.guard.is_computed(value)
        if value.dtype != torch.int64 or type(value) is not torch.Tensor:
            if is_computed:
                raise refusal(run.unit, f"they compute {key}, of {value.dtype}, from weights", list(numbering.shapes))
            continue
        numbers = value.detach().cpu().numpy()
        owners = numbering.owners(numbers)
        if owners is None or (not owners and numbers.size and is_computed):
            raise refusal(
                run.unit, f"they compute {key}, whose values are no elements of parameters", list(numbering.shapes)
            )
        if len(owners) > 1:
            raise refusal(run.unit, f"{key} has elements of {' and of '.join(owners)}", owners)
        if owners:
            parts.setdefault(owners[0], {})[key] = numbering.within(owners[0], numbers)
    return {name: made for name, made in parts.items() if not numbering.is_whole(name, run.state.get(name))}


def _prove(run: HookRun, numbering: Numbering, views: Mapping[str, View]) -> None:
    """Refuse hooks of load_state_dict() that do not make of the parts what state_dict() began with."""
    if not views or not any(hooked.load for hooked in run.unit.hooked):
        return
    try:
        loaded = run_load(run, run.state)
    except HookFailed as error:
        raise refusal(
            run.unit, f"load_state_dict() cannot take what state_dict() gives: {error}", list(views)
        ) from error
    for name, view in views.items():
        if not numbering.is_whole(name, loaded.get(name)):
            what = "other elements in it" if name in loaded else "no such entry"
            raise refusal(
                run.unit,
                f"of {', '.join(part for part, _ in view.parts)} the hooks of load_state_dict() do not make {name} again: "
                f"there is {what}",
                [name],
            )
