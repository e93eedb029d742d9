"""Which format a checkpoint is of: the built-in ones are asked first, then those that other packages have installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

from fsdp_optim.errors import CheckpointError, ReplacedError
from fsdp_optim.formats.base import Format, Reader, replaced
from fsdp_optim.formats.ours import OURS
from fsdp_optim.storage.base import Opened, Store

GROUP = "fsdp_optim.formats"
"""The entry points by which other packages add formats: each names an object that is a `Format`."""

FORMATS: tuple[Format, ...] = (OURS,)

_LOOKS = 5  # times: for a place that is given to another checkpoint while this one is opened


def format_of(opened: Opened) -> Format:
    """The format that recognises what is open; ours where none does, whose reader says what is missing."""
    for one in FORMATS:
        if one.recognises(opened):
            return one
    return next((one for one in _installed() if one.recognises(opened)), OURS)


def _installed() -> Iterator[Format]:
    """Those of other packages, loaded one by one as they are asked for."""
    for point in entry_points(group=GROUP):
        try:
            made: Format = point.load()
        except Exception as error:
            raise CheckpointError(
                f"the format {point.name} of {point.value} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        yield made


def open_checkpoint(store: Store, *, verify: bool, format: Format | None = None) -> Reader:
    """Open the checkpoint in a store, looking again where another save replaces it meanwhile. `format` None: it is recognised.

    Raises CheckpointError that names the file that is not as it was saved.
    """
    for attempt in range(1, _LOOKS + 1):
        opened = store.open()
        try:
            return (format if format is not None else format_of(opened)).open(opened, verify=verify)
        except BaseException as error:
            was_replaced = isinstance(error, CheckpointError) and opened.was_replaced()
            opened.close()
            if not was_replaced:
                raise
            if attempt == _LOOKS:
                raise replaced(opened.where) from error
    raise ReplacedError(f"{store.where}: unreachable")
