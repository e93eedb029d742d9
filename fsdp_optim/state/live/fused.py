"""Fused live parameters, which Views have split into parts: what their state must be, and the words for what it is not."""

from __future__ import annotations

from fsdp_optim.errors import StateError, shortened
from fsdp_optim.state.live.local import LocalOptim, LocalParam
from fsdp_optim.state.values.summary import Summary

_FLAT = (
    "they lie in one flat parameter of this model, which has one value for both: wrap the two in different units, or without "
    "flattening"
)


def why_together(param: LocalParam) -> str:
    """Return why the originals of a live parameter must have equal values, and what to do where they have not."""
    fused = param.handle.fused
    if not fused:
        return _FLAT
    return (
        f"they are parts of {shortened(fused)} in this model, which has one value for both: load them into a model in which they "
        "are parameters of their own"
    )


def check_follows(param: LocalParam, summary: Summary | None) -> None:
    """Refuse a state value that is neither a scalar nor of the shape of a fused parameter, so that no View can cut it.

    `summary`: the live state of the parameter, or the state that it would get.
    """
    unfit = unfit_values(summary) if param.handle.fused and summary is not None else []
    if unfit:
        name, what = unfit[0]
        live = shortened(param.handle.fused)
        raise StateError(
            f"{live}: {name} is {what}, not of the shape of the parameter, and cannot be cut into its parts "
            f"({shortened(param.named.fqns)}): save with fused_state='keep', by which the state of {live} keeps that name beside "
            f"canonical weights, leave the View of {live} out, or use an optimizer whose state has the shapes of the parameters"
        )


def unfit_values(summary: Summary) -> list[tuple[str, str]]:
    """Return the values that no View can cut, each with what it is."""
    unfit = [(name, str(kind)) for name, kind in summary.opaque]
    return unfit + [(name, f"a DTensor of shape {list(where.shape)}") for name, (_, where) in summary.placed]


def names_of_unfit(optim: LocalOptim) -> list[str]:
    """Return the names of the fused parameters whose state no View can cut."""
    unfit = list[str]()
    for param, summary in zip(optim.params, optim.summaries, strict=True):
        if param.handle.fused and summary is not None and unfit_values(summary):
            unfit += param.handle.fused
    return unfit
