"""Options that tests keep flat, for tables of cases and helpers that hand them on."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def as_options(kind: type, **given: Any) -> dict[str, Any]:
    """The arguments of a public call: what `kind` has as fields goes to its `options=`, and the rest stays."""
    names = {field.name for field in fields(kind)}
    options = {name: value for name, value in given.items() if name in names}
    rest = {name: value for name, value in given.items() if name not in names}
    return {**rest, "options": kind(**options)} if options else rest
