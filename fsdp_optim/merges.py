"""The result of the merge of an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AdapterMergeResult:
    """The result of `merge_adapter`.

    Attributes:
        path: the path of the new checkpoint.
        base, adapter: what was merged.
        num_tensors: the number of tensors of the new checkpoint.
        num_merged: how many of them have a product of LoRA factors in them.
        num_replaced: how many are the adapter's own: of `modules_to_save`, and biases that were trained.
        nbytes: the bytes of all tensors.
    """

    path: Path | str
    base: str
    adapter: str
    num_tensors: int
    num_merged: int
    num_replaced: int
    nbytes: int
