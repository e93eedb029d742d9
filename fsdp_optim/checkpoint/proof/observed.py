"""Digests of what a step sees on one rank: its batch, random states, hyperparameters, modes of modules, other trees."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy
import torch
import xxhash
from torch import nn

from fsdp_optim.checkpoint.common.random_states import random_states
from fsdp_optim.checkpoint.proof.bounds import rounding_of
from fsdp_optim.checkpoint.proof.record import Batch
from fsdp_optim.state.values.same import Incomparable, fingerprint_of, key_of
from fsdp_optim.tensors.elements import MOST_DEEP
from fsdp_optim.tensors.memory import is_plain

_MOST_ROWS = 1 << 16  # samples of one rank; each has a digest of 16 letters
_MOST_NODES = 1_000_000  # of the graph of one forward pass
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MOST_LETTERS, _SHOWN = 160, 80  # of a value in a message
_PLAIN = (bool, int, float, complex, str, bytes)


def batch_of(value: object) -> Batch:
    """Return the digests of a batch: any tree of tensors, arrays and plain values. Other objects in it do not count."""
    leaves = list(_leaves(value, "", 0))
    digest = xxhash.xxh3_128()
    for path, leaf in leaves:
        digest.update(f"{path}={_text_of(leaf)};".encode())
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    rows: tuple[str, ...] = ()
    if tensors and len({len(tensor) for tensor in tensors}) == 1 and 0 < len(tensors[0]) <= _MOST_ROWS:
        rows = _rows_of(tensors)
    shapes = [f"{leaf.dtype} {list(leaf.shape[1:])}" for leaf in tensors] if rows else []
    return Batch(digest.hexdigest(), rows, ", ".join(shapes))


def _rows_of(tensors: list[torch.Tensor]) -> tuple[str, ...]:
    """Return one digest for each index of the first dimension, over all tensors."""
    digests = [xxhash.xxh3_64() for _ in range(len(tensors[0]))]
    for tensor in tensors:
        raw = tensor.detach().cpu().contiguous().view(len(tensor), -1)
        table = raw.view(torch.uint8).numpy() if raw.numel() else numpy.empty((len(tensor), 0), numpy.uint8)
        for digest, row in zip(digests, table, strict=True):
            digest.update(row.tobytes())
    return tuple(digest.hexdigest() for digest in digests)


def _leaves(value: object, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a tree, each with its path."""
    if depth > MOST_DEEP:
        return
    if isinstance(value, torch.Tensor):
        held = value.to_local() if hasattr(value, "to_local") else value
        if is_plain(held) and held.layout == torch.strided and not held.is_meta:
            yield path, held
    elif isinstance(value, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(value)
        if array.dtype.kind in "biufc":
            yield path, torch.from_numpy(numpy.ascontiguousarray(array)) if array.ndim else array.item()
    elif value is None or isinstance(value, _PLAIN):
        yield path, value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}" if path else field.name, depth + 1)


def _text_of(leaf: Any) -> str:
    return fingerprint_of(leaf) if isinstance(leaf, torch.Tensor) else key_of(leaf)


def random_digests() -> dict[str, str]:
    """Return a digest of each global generator's state on this rank."""
    return {name: fingerprint_of(state) for name, state in random_states().items()}


def texts_of(value: object) -> dict[str, str]:
    """Return path -> the value there as text, of the state of an object: numbers as they are, tensors as digests.

    Objects that cannot be compared do not count, and bytes neither: two pickles of one state may differ.
    """
    texts: dict[str, str] = {}
    for path, leaf in _leaves_of_state(value, "", 0):
        if isinstance(leaf, (bytes, bytearray)):
            continue
        with contextlib.suppress(Incomparable):
            texts[path] = _shortened(key_of(leaf))
    return texts


def _shortened(text: str) -> str:
    """Return a text of at most some hundred letters, which is equal for equal texts only."""
    return text if len(text) <= _MOST_LETTERS else f"{text[:_SHOWN]}... ({fingerprint_of(text)})"


def _leaves_of_state(value: object, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the values of a state, each with its path; objects of other classes count too."""
    if depth <= MOST_DEEP and isinstance(value, Mapping):
        for key in value:
            yield from _leaves_of_state(value[key], f"{path}.{key}" if path else str(key), depth + 1)
    elif depth <= MOST_DEEP and type(value) in (list, tuple) and len(value) <= _MOST_ROWS:  # type: ignore[arg-type]
        for index, item in enumerate(value):  # type: ignore[arg-type, var-annotated]
            yield from _leaves_of_state(item, f"{path}[{index}]", depth + 1)
    else:
        yield path, value


def hyperparameters_of(groups: list[dict[str, Any]]) -> tuple[dict[str, str], ...]:
    """Return the hyperparameters of each param group as text."""
    return tuple(
        texts_of({key: group[key] for key in group if key not in ("params", "param_names")}) for group in groups
    )


def evaluated_in(model: nn.Module, wrapper_parts: Collection[str]) -> tuple[str, ...]:
    """Return the names of the modules in eval mode, without the names that wrappers insert: of whole subtrees, the top alone."""
    tops: list[str] = []
    for name, module in model.named_modules():  # a parent comes before its children
        clean = ".".join(part for part in name.split(".") if part and part not in wrapper_parts)
        if not module.training and clean not in tops and not any(_is_below(clean, top) for top in tops[-1:]):
            tops.append(clean)
    return tuple(tops)


def _is_below(name: str, top: str) -> bool:
    return not top or name.startswith(f"{top}.")


def why_ranks_matter(model: nn.Module) -> str:
    """Return why another number of ranks makes another step of a model; empty where it does not."""
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS) and not isinstance(module, nn.SyncBatchNorm) and module.training:
            return f"{type(module).__name__} takes the statistics of each rank's own batch"
    return ""


def digest_of(value: object) -> str:
    """Return a digest of a tree that a user shows: of its tensors, arrays and plain values."""
    return batch_of(value).digest


def number_of(value: object) -> float | None:
    """Return a number, or a tensor or array with one, as a float; None for anything else."""
    if isinstance(value, torch.Tensor):
        held = value.full_tensor() if hasattr(value, "full_tensor") and not value.dim() else value
        is_one = held.numel() == 1 and not held.is_meta and not held.dtype.is_complex
        return float(held.detach().double()) if is_one else None
    if isinstance(value, (int, float, numpy.generic)) and not isinstance(value, bool):
        return float(value)
    return None


def rounding_behind(output: object) -> float:
    """Return the coarsest rounding of the floating dtypes in the graph that led to an output."""
    nodes = [
        leaf.grad_fn
        for _, leaf in _leaves(output, "", 0)
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    seen, dtypes = set(nodes), set[torch.dtype]()
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop()
        dtypes.update(about.dtype for about in node._input_metadata)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return max((rounding_of(dtype) for dtype in dtypes), default=0.0)
