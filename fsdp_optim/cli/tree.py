"""The output of `inspect`: facts, the tree of modules in which equal layers are one entry, and the optimizer."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from fsdp_optim.api import CheckpointSummary, TensorInfo
from fsdp_optim.cli.units import counted, sized
from fsdp_optim.errors import shortened

_NUMBERED = re.compile(r"(.*?)(\d+)")
_MOST_RANGES = 4  # of numbers in one entry
_WIDTH = 100  # of the text of one value


def shown(inspected: CheckpointSummary, *, folds: bool) -> Iterator[str]:
    """Yield the lines about a checkpoint. `folds`: equal layers are one entry, and the state is summed up."""
    yield inspected.path
    yield from _aligned("", [[f"{name}:", text] for name, text in _facts(inspected)])
    yield ""
    yield f"model: {_sum(inspected.model.values())}"
    yield from _tree(inspected.model, folds=folds)
    if inspected.aliases:
        yield f"  other names: {shortened(f'{alias} = {fqn}' for alias, fqn in inspected.aliases.items())}"
    if inspected.trees:
        yield from ("", f"state: {_sum(inspected.trees.values())}", *_tree(inspected.trees, folds=folds))
    yield ""
    if not inspected.has_optim:
        yield "no optimizer"
        return
    yield from _optimizer(inspected, folds=folds)


def _facts(inspected: CheckpointSummary) -> Iterator[tuple[str, str]]:
    yield "format", inspected.format
    yield from inspected.about.items()
    if inspected.world_size:
        yield "ranks", str(inspected.world_size)
    if inspected.step is not None:
        yield "step", str(inspected.step)
    ranks = sum(name.startswith("rank-") for name in inspected.extras)
    words = {"common": "of the trainer", "model": "of modules"}
    extras = [words.get(name, name) for name in inspected.extras if not name.startswith("rank-")]
    if ranks:
        extras.append(f"of {counted(ranks, 'rank')}")
    if extras:
        yield "other values", ", ".join(extras)
    yield "bytes", sized(inspected.nbytes)


def _sum(tensors: Any) -> str:
    tensors = list(tensors)
    if not tensors:
        return "no tensors"
    numel, nbytes = sum(prod(tensor.shape) for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
    return f"{counted(len(tensors), 'tensor')}, {counted(numel, 'element')}, {sized(nbytes)}"


# ------------------------------------------------------------------------------------------- the tree


@dataclass
class _Node:
    """A module, or a tensor. `children`: by the next part of the name."""

    tensor: TensorInfo | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    @cached_property
    def signature(self) -> Hashable:
        """Equal for two modules with the same tensors under the same names."""
        return self.tensor, tuple((name, child.signature) for name, child in self.children.items())

    @cached_property
    def nbytes(self) -> int:
        own = self.tensor.nbytes if self.tensor is not None else 0
        return own + sum(child.nbytes for child in self.children.values())


def _tree(tensors: Mapping[str, TensorInfo], *, folds: bool) -> Iterator[str]:
    root = _Node()
    for name, tensor in tensors.items():
        node = root
        for part in name.split("."):
            node = node.children.setdefault(part, _Node())
        node.tensor = tensor
    rows = list(_rows(root, 1, folds=folds))
    width = max((len(label) for label, _ in rows), default=0)
    yield from _aligned("", [[label.ljust(width), *columns] for label, columns in rows])


def _rows(node: _Node, depth: int, *, folds: bool) -> Iterator[tuple[str, list[str]]]:
    for names, child in _folded(node, folds=folds):
        label, num = _label(names), len(names)
        while child.tensor is None and len(child.children) == 1:  # a module with one entry needs no line of its own
            ((name, child),) = child.children.items()
            label = f"{label}.{name}"
        if folds and child.tensor is None and num == 1:
            inner = list(_folded(child, folds=True))
            if len(inner) == 1 and len(inner[0][0]) > 1:  # the layers of `layers` are `layers.0..31`
                names, child = inner[0]
                label, num = f"{label}.{_label(names)}", len(names)
        text = f"{'  ' * depth}{label}"
        if child.tensor is not None:
            yield text, [*_columns(child.tensor), f"each of {num}" if num > 1 else ""]
        elif num > 1:
            yield text, ["", "", sized(child.nbytes * num), f"{sized(child.nbytes)} each of {num}"]
        else:
            yield text, ["", "", sized(child.nbytes), ""]
        yield from _rows(child, depth + 1, folds=folds)


def _columns(tensor: TensorInfo) -> list[str]:
    return [str(list(tensor.shape)), tensor.dtype, sized(tensor.nbytes)]


def _folded(node: _Node, *, folds: bool) -> Iterator[tuple[list[str], _Node]]:
    """Return the children of a module; numbered children that are equal come together."""
    groups: dict[Hashable, tuple[list[str], _Node]] = {}
    for name, child in node.children.items():
        match = _NUMBERED.fullmatch(name)
        key = (match[1], child.signature) if folds and match is not None else name
        groups.setdefault(key, ([], child))[0].append(name)
    return iter(groups.values())


def _label(names: Sequence[str]) -> str:
    """Return one name, or `layer_0..31` for several that are numbered."""
    if len(names) == 1:
        return names[0]
    matches = [_NUMBERED.fullmatch(name) for name in names]
    numbers = sorted(int(match[2]) for match in matches if match is not None)
    first = matches[0]
    prefix = first[1] if first is not None else ""
    ranges = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        listed = [number for _, number in run]
        ranges.append(str(listed[0]) if len(listed) == 1 else f"{listed[0]}..{listed[-1]}")
    if len(ranges) > _MOST_RANGES:
        ranges = [*ranges[: _MOST_RANGES - 1], "...", ranges[-1]]
    return f"{prefix}{','.join(ranges)}"


# ------------------------------------------------------------------------------------------- the optimizer


def _optimizer(inspected: CheckpointSummary, *, folds: bool) -> Iterator[str]:
    tensors = [v for values in inspected.state.values() for v in values.values() if not isinstance(v, str)]
    name = ", ".join(dict.fromkeys(inspected.optimizer_class))
    num, num_with = sum(len(group.params) for group in inspected.groups), len(inspected.state)
    of_all = f" of {num:,}" if num > num_with else ""
    state = f"state of {counted(num_with, 'parameter')}{of_all}: {_sum(tensors)}" if num_with else "no state yet"
    yield f"optimizer{f' {name}' if name else ''}: {state}"
    yield from _aligned("  ", list(_summed(inspected) if folds else _listed_state(inspected)))
    for index, group in enumerate(inspected.groups):
        given = {key: value for key, value in group.hyperparameters.items() if not folds or not _is_off(value)}
        values = ", ".join(f"{key}={_text(value)}" for key, value in given.items())
        yield f"  group {index}: {counted(len(group.params), 'parameter')}{f'; {values}' if values else ''}"
        if not folds or len(inspected.groups) > 1:
            params = [str(param) for param in group.params]
            yield f"    {', '.join(params) if not folds else shortened(_patterns(params))}"


def _is_off(value: object) -> bool:
    """Return whether a hyperparameter is a switch that is off, or not set."""
    return value is None or value is False


def _patterns(names: Sequence[str]) -> list[str]:
    """Return names with a star in the place of the numbers of layers, each once."""
    starred = (".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names)
    by_pattern: dict[str, list[str]] = {}
    for pattern, name in zip(starred, names, strict=True):
        by_pattern.setdefault(pattern, []).append(name)
    return [matches[0] if len(matches) == 1 else pattern for pattern, matches in by_pattern.items()]


def _listed_state(inspected: CheckpointSummary) -> Iterator[list[str]]:
    for key, values in inspected.state.items():
        for name, value in values.items():
            columns = [_text_of(value)] if isinstance(value, str) else _columns(value)
            yield [f"{key}: {name}", *columns]


def _summed(inspected: CheckpointSummary) -> Iterator[list[str]]:
    """Yield one row for each name of a value, its dtype, and whether it has the shape of its parameter."""
    rows: Counter[tuple[str, str, str]] = Counter()
    nbytes: Counter[tuple[str, str, str]] = Counter()
    for key, values in inspected.state.items():
        weight = inspected.model.get(key)
        for name, value in values.items():
            if not isinstance(value, str):
                own = weight is not None and value.shape == weight.shape
                shape = "like the parameter" if own and value.shape else str(list(value.shape))
                row = str(name), value.dtype, shape if weight is not None or not value.shape else "a tensor"
                nbytes[row] += value.nbytes
            else:
                row = str(name), "", _text_of(value)
            rows[row] += 1
    for (name, dtype, shape), number in rows.items():
        size = sized(nbytes[name, dtype, shape]) if dtype else ""
        yield [name, shape, dtype, size, f"of {counted(number, 'parameter')}"]


# ------------------------------------------------------------------------------------------- text


def _text(value: object) -> str:
    return _text_of(repr(value))


def _text_of(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def _aligned(indent: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows with their columns one below the other."""
    num = max((len(row) for row in rows), default=0)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(num)]
    for row in rows:
        yield f"{indent}{'  '.join(text.ljust(width) for text, width in zip(row, widths, strict=False))}".rstrip()
