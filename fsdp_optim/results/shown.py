"""Parts of the representations of results."""

from __future__ import annotations

from fsdp_optim.errors import shortened

MOST_SHOWN = 4
"""The names of a list that a representation shows."""


def names_shown(names: tuple[str, ...]) -> str | None:
    """Names in a representation; None where there are none."""
    return f"<{shortened(names, MOST_SHOWN)}>" if names else None


def shown(result: object, **parts: object) -> str:
    """Return a representation with these parts, except parts that are None."""
    texts = [f"{name}={value}" for name, value in parts.items() if value is not None]
    return f"{type(result).__name__}({', '.join(texts)})"
