"""Why the names of a folder of transformers differ from those of the model, for the errors of loads."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import shortened
from fsdp_optim.formats.base.index import CheckpointIndex

_MOST_PAIRS = 4


def why_names_differ(
    reader: ModelReader, index: CheckpointIndex, missing: Sequence[str], unexpected: Sequence[str]
) -> str:
    """How transformers renames the weights of this model, and the fix; "" where it keeps them.

    `missing`, `unexpected`: names that only the model has, and only the checkpoint.
    """
    if not missing or not unexpected:
        return ""
    found = reader.stored_names() if not index.facts.names_are_fqns else None
    if found is None:
        return ""
    pairs = shortened((f"{stored} -> {live}" for stored, live in found.pairs), _MOST_PAIRS)
    return (
        f"transformers 5 stores a {found.class_name} under other names than its state_dict() has, and may split or join its "
        f"tensors ({pairs}; {unexpected[0]} is in the checkpoint, {missing[0]} in the model): read the folder once with "
        f"{found.class_name}.from_pretrained, write it with save_pretrained(NEW, save_original_format=False), and load NEW"
    )
