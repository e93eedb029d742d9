"""Options that tests keep flat, for tables of cases and helpers that hand them on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fsdp_optim import per_rank


def as_options(kind: type, **given: Any) -> dict[str, Any]:
    """The arguments of a public call: what `kind` has as fields goes to its `options=`, and the rest stays.

    `extra` and `per_rank_extra`: values for `state=`, those of all ranks and those of each.
    """
    names = {field.name for field in fields(kind)}
    options = {name: value for name, value in given.items() if name in names}
    rest = {name: value for name, value in given.items() if name not in {*names, "extra", "per_rank_extra"}}
    whole = rest.pop("options", None)
    if whole is not None:  # what it sets counts more
        options |= {f.name: value for f in fields(whole) if (value := getattr(whole, f.name)) != f.default}
    state = state_for(given.get("extra"), given.get("per_rank_extra"))
    return {**rest, **({"state": state} if state else {}), **({"options": kind(**options)} if options else {})}


def state_for(common: Any, own: Any = None) -> dict[str, Any]:
    """A `state=` of values that all ranks have in common, and of those of each rank."""
    marked = {name: per_rank(value) for name, value in by_name("per_rank_extra", own).items()}
    return {**by_name("extra", common), **marked}


def by_name(name: str, values: Any) -> dict[str, Any]:
    """Values as an entry for each, or as one entry of this name where they have no names."""
    if values is None:
        return {}
    is_named = isinstance(values, Mapping) and all(isinstance(key, str) for key in values)
    return dict(values) if is_named else {name: values}
