"""Masters: tensors that an optimizer holds in place of the model's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fsdp_optim.adapters.naming import Naming
from fsdp_optim.errors import WrapperError
from fsdp_optim.view import Handle, ModelView, NamedHandle


def with_masters(view: ModelView, masters: Iterable[Handle], naming: Naming) -> ModelView:
    """Return the view of a model whose optimizer holds masters: each master replaces the live parameters that it copies.

    Raises WrapperError for a master of a part of a live parameter, and for a master of no parameter of the model.
    """
    of_fqn: dict[str, NamedHandle] = {}
    for handle in masters:
        named = naming.name(handle)
        of_fqn.update(dict.fromkeys(named.fqns, named))
        if handle.master is None:
            raise WrapperError(
                f"{named.fqns[0]}: the adapter of its master does not set Handle.master, the name of the master in the "
                "optimizer's state_dict(), without which the master is neither "
                "saved nor loaded: set it in the adapter"
            )
    unknown = [fqn for fqn in of_fqn if fqn not in view.place_of]
    if unknown:
        raise WrapperError(
            f"{unknown[0]}: the optimizer holds a master of this parameter, and the model has no such parameter: give the "
            "model that the optimizer was built for"
        )
    handles: dict[int, NamedHandle] = {}
    for named in view.handles:
        replacing = [of_fqn[fqn] for fqn in named.fqns if fqn in of_fqn]
        if replacing and len(replacing) < len(named.fqns):
            lacking = next(fqn for fqn in named.fqns if fqn not in of_fqn)
            raise WrapperError(
                f"{replacing[0].fqns[0]}: the optimizer holds a master of this parameter and none of {lacking}, and both are in "
                "one live parameter: give the optimizer masters of both, or of none"
            )
        handles.update((id(handle), handle) for handle in replacing or [named])
    return replace(view, handles=tuple(handles.values()))
