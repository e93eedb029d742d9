"""The Views that a call is given: what may be among them."""

from __future__ import annotations

from fsdp_optim.errors import StateError
from fsdp_optim.layout.views.fusion import View
from fsdp_optim.layout.views.inverse import InverseView


def check_given(views: object, *, of_checkpoints: bool) -> None:
    """Raise StateError for a value that is no list of Views. `of_checkpoints`: it may have inverse ones."""
    kinds = (View, InverseView) if of_checkpoints else (View,)
    listed = list(views) if isinstance(views, (list, tuple)) else [None]
    if all(isinstance(view, kinds) for view in listed):
        return
    inverse = next((view for view in listed if isinstance(view, InverseView)), None)
    if inverse is not None:
        raise StateError(
            f"{inverse!r} is for checkpoints alone, in convert and diff: a live model is seen through the View itself, without "
            ".inverse, and has the parts if it is not fused"
        )
    or_words = "" if of_checkpoints else ", 'hooks' or 'hub'"
    raise StateError(f"views must be a list of Views, as in views=[View(...)]{or_words}, not {views!r}")
