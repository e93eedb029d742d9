"""A page about the content of a checkpoint: an area for each layer and each kind of value, as large as its bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fsdp_optim.checkpoint.common.stores import StorageOptions
from fsdp_optim.errors import counted_noun
from fsdp_optim.offline.pages.diff_page import layer_of, table_of_layers
from fsdp_optim.offline.pages.output_file import write_output
from fsdp_optim.offline.pages.rank_page import rank_map
from fsdp_optim.offline.pages.rank_page import style as rank_style
from fsdp_optim.results.contents import CheckpointSummary, TensorInfo
from fsdp_optim.results.rank_maps import PlacementResult
from fsdp_optim.saying import sized

_KINDS = 6  # colours
_WEIGHT = "weights"

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --faint: #5d6670; --line: #d9dee3;
  --k0: #9ec5f4; --k1: #a7dcb0; --k2: #f4cd8b; --k3: #d9b8ef; --k4: #f2b3ad; --k5: #c9d0d8 }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --text: #e4e8ec; --faint: #98a2ad; --line: #303841;
  --k0: #1f4b80; --k1: #23613a; --k2: #7a5415; --k3: #5b3a78; --k4: #7c3630; --k5: #46505a } }
body { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem } p { margin: .4rem 0 }
code { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere } .faint { color: var(--faint) }
.map { position: relative; overflow: hidden; width: 100%; height: 36rem }
.map div { position: absolute; overflow: hidden; box-sizing: border-box;
  border: 1px solid var(--page); font-size: 12px; line-height: 1.3; padding: 2px 4px; white-space: nowrap }
.legend { line-height: 2 } .legend span { padding: .1rem .6rem; margin-right: .6rem; white-space: nowrap }
.wide { overflow-x: auto } td code { white-space: nowrap }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { padding: .15rem 1rem .15rem 0; text-align: left }
th { color: var(--faint); font-weight: 500 } tbody tr { border-top: 1px solid var(--line) }
"""


@dataclass(frozen=True)
class Area:
    """A rectangle of the map, in hundredths of its width and height."""

    left: float
    top: float
    width: float
    height: float


def write_page(
    summary: CheckpointSummary,
    file: str | os.PathLike[str],
    placement: PlacementResult | None = None,
    storage_options: StorageOptions = None,
) -> None:
    """Write the page about a checkpoint into a file, which it replaces. `placement`: the map of ranks, if it is wanted."""
    write_output(file, page_of_summary(summary, placement), storage_options)


def page_of_summary(summary: CheckpointSummary, placement: PlacementResult | None = None) -> str:
    """Return the page as text in HTML."""
    nbytes = nbytes_by_layer(summary)
    kinds = list(dict.fromkeys(kind for by_kind in nbytes.values() for kind in by_kind))
    colours = "".join(f".k{number} {{ background: var(--k{number}) }}\n" for number in range(_KINDS))
    ranks = list(rank_map(placement)) if placement is not None else []
    colours += rank_style() if ranks else ""
    body = "\n".join([*_head(summary), _legend(kinds), *_map(nbytes, kinds), *ranks, *_table(nbytes, kinds)])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>A checkpoint</title>\n'
        f"<style>{_STYLE}{colours}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def nbytes_by_layer(summary: CheckpointSummary) -> dict[str, dict[str, int]]:
    """Return the bytes of each layer: of its weights and buffers, and of each name of values of the optimizer's state."""
    nbytes: dict[str, dict[str, int]] = {}
    for fqn, tensor in summary.model.items():
        by_kind = nbytes.setdefault(layer_of(fqn), {})
        by_kind[_WEIGHT] = by_kind.get(_WEIGHT, 0) + tensor.nbytes
    for key, values in summary.state.items():
        by_kind = nbytes.setdefault(layer_of(str(key)), {})
        for name, value in values.items():
            if isinstance(value, TensorInfo):
                by_kind[str(name)] = by_kind.get(str(name), 0) + value.nbytes
    return nbytes


def _head(summary: CheckpointSummary) -> Iterator[str]:
    yield f"<h1>{escape(sized(summary.nbytes))} in {counted_noun(len(summary.model), 'weight')} and their state</h1>"
    facts = [f"format {summary.format}"]
    facts += [f"step {summary.step}"] if summary.step is not None else []
    facts += [f"saved by {counted_noun(summary.world_size, 'rank')}"] if summary.world_size else []
    facts += summary.optimizer_class
    yield f"<p><code>{escape(summary.path)}</code></p><p class=faint>{escape(', '.join(facts))}</p>"


def _legend(kinds: Sequence[str]) -> str:
    fields = (f'<span class="k{_colour(kinds, kind)}">{escape(kind)}</span>' for kind in kinds)
    return f'<p class="legend">{"".join(fields)}</p>'


def _colour(kinds: Sequence[str], kind: str) -> int:
    return min(kinds.index(kind), _KINDS - 1)


def _map(nbytes: Mapping[str, Mapping[str, int]], kinds: Sequence[str]) -> Iterator[str]:
    layers = sorted(nbytes, key=lambda layer: -sum(nbytes[layer].values()))
    areas = squares([sum(nbytes[layer].values()) for layer in layers], Area(0, 0, 100, 100))
    yield '<div class="map">'
    for layer, area in zip(layers, areas, strict=True):
        by_size = sorted(nbytes[layer], key=lambda kind: -nbytes[layer][kind])
        for kind, part in zip(by_size, squares([nbytes[layer][kind] for kind in by_size], area), strict=True):
            if nbytes[layer][kind]:
                text = f"{layer}: {kind}, {sized(nbytes[layer][kind])}"
                place = f"left:{part.left:.3f}%;top:{part.top:.3f}%;width:{part.width:.3f}%;height:{part.height:.3f}%"
                yield (
                    f'<div class="k{_colour(kinds, kind)}" style="{place}" title="{escape(text)}">{escape(layer)}<br>'
                    f"{escape(kind)}</div>"
                )
    yield "</div>"


def squares(sizes: Sequence[int], area: Area) -> list[Area]:
    """Cut an area into areas of these relative sizes, which must not increase, that are as close to squares as rows allow."""
    total, areas, left, first = sum(sizes), list[Area](), area, 0
    while first < len(sizes):
        if not total:
            return [*areas, *[Area(left.left, left.top, 0, 0)] * (len(sizes) - first)]
        last = first + 1
        while last < len(sizes) and _worst(sizes[first : last + 1], left, total) <= _worst(
            sizes[first:last], left, total
        ):
            last += 1
        row = sizes[first:last]
        areas += _row(row, left, total)
        left = _without(left, sum(row) / total)
        total -= sum(row)
        first = last
    return areas


def _worst(row: Sequence[int], area: Area, total: int) -> float:
    """Return how far from a square the worst area of a row is: at least 1."""
    short, long = min(area.width, area.height), max(area.width, area.height)
    thick = long * sum(row) / total
    sides = [(short * size / sum(row), thick) for size in row if size]
    return max((max(a / b, b / a) for a, b in sides if a and b), default=1.0)


def _row(row: Sequence[int], area: Area, total: int) -> Iterator[Area]:
    """Yield the areas of a row, along the shorter side."""
    share, at = sum(row) / total, 0.0
    for size in row:
        part = size / sum(row) if sum(row) else 0.0
        if area.width < area.height:
            yield Area(area.left + at * area.width, area.top, part * area.width, share * area.height)
        else:
            yield Area(area.left, area.top + at * area.height, share * area.width, part * area.height)
        at += part


def _without(area: Area, share: float) -> Area:
    """Return what a row leaves of an area."""
    if area.width < area.height:
        return Area(area.left, area.top + share * area.height, area.width, (1 - share) * area.height)
    return Area(area.left + share * area.width, area.top, (1 - share) * area.width, area.height)


def _table(nbytes: Mapping[str, Mapping[str, int]], kinds: Sequence[str]) -> Iterator[str]:
    yield "<h2>Bytes</h2>"
    yield from table_of_layers(nbytes, kinds, lambda by_kind, kind: sized(by_kind[kind]) if kind in by_kind else "")
