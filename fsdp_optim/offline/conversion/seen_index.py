"""The index of a source as Views see it, with the optimizer where the source records its names."""

from __future__ import annotations

from functools import partial

from fsdp_optim.checkpoint.load.reading import read_constants
from fsdp_optim.checkpoint.views import SeenReader
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import Reader


def index_of(checkpoint: Reader, *, allow_pickle: bool) -> CheckpointIndex:
    """Return the index of a checkpoint. Where Views see it and it records names, its optimizer is as they see it.

    An optimizer without names is seen through them when it has got names.
    """
    if isinstance(checkpoint, SeenReader) and checkpoint.index.facts.names_are_fqns:
        return checkpoint.recorded(partial(read_constants, checkpoint), allow_pickle=allow_pickle)
    return checkpoint.index
