"""Masters: tensors that an optimizer holds in the place of the model's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fsdp_optim.adapters.naming import Naming
from fsdp_optim.errors import WrapperError
from fsdp_optim.view import Handle, ModelView, NamedHandle


def with_masters(view: ModelView, masters: Iterable[Handle], naming: Naming) -> ModelView:
    """The model as an optimizer sees that holds masters: each in the place of the live parameters that it is a copy of.

    Raises WrapperError for masters of a part of a live parameter, and of what is in no model.
    """
    of_fqn: dict[str, NamedHandle] = {}
    for handle in masters:
        named = naming.name(handle)
        of_fqn.update(dict.fromkeys(named.fqns, named))
        if handle.master is None:
            raise WrapperError(
                f"{named.fqns[0]}: its adapter does not say under which name the optimizer's state_dict() has the elements of "
                "its master (Handle.master), which would be neither saved nor loaded without it"
            )
    unknown = [fqn for fqn in of_fqn if fqn not in view.place_of]
    if unknown:
        raise WrapperError(f"{unknown[0]}: the optimizer holds a master of it, and the model has no such parameter")
    handles: dict[int, NamedHandle] = {}
    for named in view.handles:
        mine = [of_fqn[fqn] for fqn in named.fqns if fqn in of_fqn]
        if mine and len(mine) < len(named.fqns):
            left = next(fqn for fqn in named.fqns if fqn not in of_fqn)
            raise WrapperError(
                f"{mine[0].fqns[0]}: the optimizer holds a master of it and none of {left}, which are in one live parameter"
            )
        handles.update((id(one), one) for one in mine or [named])
    return replace(view, handles=tuple(handles.values()))
