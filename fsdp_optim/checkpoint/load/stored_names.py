"""Explain in errors of loads why the names in a folder of transformers differ from the model's names."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import shortened
from fsdp_optim.formats.base.index import CheckpointIndex

_MOST_PAIRS = 4


def why_names_differ(
    reader: ModelReader, index: CheckpointIndex, missing: Sequence[str], unexpected: Sequence[str]
) -> str:
    """Say how transformers renames the weights of this model, and the fix; "" where it keeps the names.

    `missing`, `unexpected`: names that only the model has, and only the checkpoint.
    """
    if not missing or not unexpected:
        return ""
    renamed = reader.stored_names() if not index.facts.names_are_fqns else None
    if renamed is None:
        return ""
    pairs = shortened((f"{stored} -> {live}" for stored, live in renamed.pairs), _MOST_PAIRS)
    return (
        f"transformers 5 stores a {renamed.class_name} under other names than its state_dict() has, and may split or join its "
        f"tensors ({pairs}; {unexpected[0]} is in the checkpoint, {missing[0]} in the model): read the folder once with "
        f"{renamed.class_name}.from_pretrained, write it with save_pretrained(NEW, save_original_format=False), and load NEW"
    )
