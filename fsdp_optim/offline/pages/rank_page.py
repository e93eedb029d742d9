"""The part of a page about a checkpoint that shows which rank would hold what: a bar for each rank, a strip for each layer."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from html import escape

from fsdp_optim.errors import counted_noun, shortened
from fsdp_optim.offline.pages.diff_page import layer_of
from fsdp_optim.results.rank_maps import PlacementResult, RankRun, runs_of
from fsdp_optim.saying import sized

_MOST_COLUMNS = 64  # bars, and fields of a strip
_MOST_ROWS = 300  # strips
_MOST_EMPTY = 12
_SHADES = 8
_NUMBERED = re.compile(r"\d+")
_STEP = "step"
_PARTS = ("weights", "state", "padding")

STYLE = """
:root { --s0: #eceff2; --s1: #dbe8f8; --s2: #c6dcf5; --s3: #a9caf0; --s4: #86b3e7; --s5: #6299db; --s6: #417fca; --s7: #2a65ae;
  --s8: #1a4b8c; --pweights: #417fca; --pstate: #4f9d69; --ppadding: #d99a2b }
@media (prefers-color-scheme: dark) { :root { --s0: #222930; --s1: #16283f; --s2: #183556; --s3: #1d4671; --s4: #27598e;
  --s5: #366fac; --s6: #4d88c8; --s7: #70a5de; --s8: #9dc4ee; --pweights: #4d88c8; --pstate: #3f8758; --ppadding: #b97f1f } }
.bars { display: flex; gap: 1px; height: 9rem; align-items: flex-end; margin: .6rem 0 0 } .bars span { flex: 1; display: flex;
  flex-direction: column-reverse; height: 100%; max-width: 5rem } .ends { display: flex; justify-content: space-between }
.bars i.weights, .legend i.weights { background: var(--pweights) } .bars i.state, .legend i.state { background: var(--pstate) }
.bars i.padding, .legend i.padding { background: var(--ppadding) }
.legend i { display: inline-block; width: 1rem; height: .8rem; margin-right: .4rem }
.legend b { font-weight: 400; margin-right: 1rem; white-space: nowrap }
.ranks { display: flex; gap: 1px; height: 1.1rem; width: 100%; min-width: 11rem } .ranks i { display: block }
td.strip { width: 60%; padding-right: .6rem } .on td { white-space: nowrap }
@media (max-width: 40rem) { .on thead { display: none } .on tr { display: flex; flex-wrap: wrap; padding: .3rem 0 }
  .on td.strip { width: 100%; padding: .1rem 0 } }
"""


def style() -> str:
    """Return the style of this part."""
    return STYLE + "".join(f"i.s{shade} {{ background: var(--s{shade}) }}\n" for shade in range(_SHADES + 1))


def rank_map(placement: PlacementResult) -> Iterator[str]:
    """Yield this part of the page."""
    num, nbytes = placement.num_ranks, placement.nbytes
    yield f"<h2>On {counted_noun(num, 'rank')} under {escape(placement.wrapper)}</h2>"
    yield (
        f"<p>Most: rank {placement.largest}, {sized(max(nbytes))}. Fewest: rank {placement.smallest}, {sized(min(nbytes))}. "
        f"Mean: {sized(placement.mean)}. Imbalance (most / mean): {placement.imbalance:.4g}.</p>"
    )
    yield f"<p class=faint>Assumed: {escape('; '.join(placement.rules))}.</p>"
    sums = [(part, sum(getattr(placement, part))) for part in _PARTS]
    legend = "".join(f"<b><i class={part}></i>{part} {sized(total)}</b> " for part, total in sums)
    yield f'<p class="legend">{legend}over all ranks</p>'
    yield from _bars(placement)
    yield from _empty(placement)
    yield from _strips(placement)


def _bars(placement: PlacementResult) -> Iterator[str]:
    """Yield a bar for each rank; for several neighbours, that of the rank among them with the most bytes."""
    nbytes, most = placement.nbytes, max(max(placement.nbytes), 1)
    yield '<div class="bars">'
    for first, stop in bins_of(placement.num_ranks):
        rank = max(range(first, stop), key=nbytes.__getitem__)
        parts = [(part, getattr(placement, part)[rank]) for part in _PARTS]
        text = ", ".join(f"{part} {sized(held)}" for part, held in parts)
        fields = "".join(
            f'<i class={part} style="height:{100 * held / most:.4g}%"></i>' for part, held in parts if held
        )
        of = f" (most of {first}..{stop - 1})" if stop - first > 1 else ""
        yield f'<span title="rank {rank}{of}: {sized(nbytes[rank])}: {text}">{fields}</span>'
    yield f'</div><p class="ends faint"><span>rank 0</span><span>rank {placement.num_ranks - 1}</span></p>'


def bins_of(num_ranks: int) -> list[tuple[int, int]]:
    """Return the ranks [first, stop) of each column: one rank, or as many as make few enough columns."""
    num = min(num_ranks, _MOST_COLUMNS)
    edges = [index * num_ranks // num for index in range(num + 1)]
    return list(itertools.pairwise(edges))


def _empty(placement: PlacementResult) -> Iterator[str]:
    if placement.empty:
        lines = (f"ranks {text}" for text in placement.describe_empty())
        yield f"<p>Empty: {escape(shortened(lines, _MOST_EMPTY, '; '))}.</p>"


def _strips(placement: PlacementResult) -> Iterator[str]:
    """Yield a table with a strip for each layer and kind of value. Layers that are equal on all ranks come as one."""
    nbytes_by_key = bytes_by_layer(placement)
    rows = folded({key: nbytes for key, nbytes in nbytes_by_key.items() if key[1] != _STEP})
    yield "<h3>Layers</h3><p class=faint>The stronger the colour, the more bytes on a rank, as a share of the most in the row; "
    yield "grey: none. Padding and steps are left out.</p><div class=wide><table class=on>"
    yield "<thead><tr><th>layer</th><th>value</th><th>on a rank</th><th>ranks</th></tr></thead><tbody>"
    for label, kind, nbytes in rows[:_MOST_ROWS]:
        least, most = sized(min(nbytes)), sized(max(nbytes))
        text = most if least == most else f"{least} to {most}"
        empty = nbytes.count(0)
        text += f", none on {empty}" if empty else ""
        yield (
            f"<tr><td><code>{escape(label)}</code></td><td>{escape(kind)}</td><td>{text}</td>"
            f'<td class=strip><div class="ranks">{_strip(nbytes)}</div></td></tr>'
        )
    yield "</tbody></table></div>"
    if len(rows) > _MOST_ROWS:
        yield f"<p class=faint>and {len(rows) - _MOST_ROWS} more</p>"


def _strip(nbytes: Sequence[int]) -> str:
    """Return a field for each run of columns with equal bytes."""
    most = max(nbytes)
    bins = bins_of(len(nbytes))
    columns = [max(nbytes[first:stop]) for first, stop in bins]
    fields = []
    for run in runs_of(columns):
        ranks = RankRun(bins[run.first][0], bins[run.last][1] - 1, 0).ranks
        shade = -(-_SHADES * run.nbytes // most) if most else 0
        width = run.last - run.first + 1
        fields.append(f'<i class=s{shade} style="flex:{width}" title="{ranks}: {sized(run.nbytes)}"></i>')
    return "".join(fields)


def bytes_by_layer(placement: PlacementResult) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the bytes of each layer and kind of value, by rank."""
    nbytes: dict[tuple[str, str], list[int]] = {}
    for tensor in placement.tensors:
        fqn = tensor.name if tensor.kind == _PARTS[0] else tensor.name.rpartition(":")[0]
        row = nbytes.setdefault((layer_of(fqn), tensor.kind), [0] * placement.num_ranks)
        for run in tensor.runs:
            if run.nbytes:
                for rank in range(run.first, run.last + 1):
                    row[rank] += run.nbytes
    return {key: tuple(row) for key, row in nbytes.items()}


def folded(rows: Mapping[tuple[str, str], tuple[int, ...]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return rows of (layers, kind, bytes of each by rank). Layers that differ in their number alone come as one."""
    groups: dict[Hashable, list[str]] = {}
    for (layer, kind), nbytes in rows.items():
        groups.setdefault((_NUMBERED.sub("*", layer), kind, nbytes), []).append(layer)
    return [(_label(layers), key[1], key[2]) for key, layers in groups.items()]  # type: ignore[index]


def _label(layers: Sequence[str]) -> str:
    if len(layers) == 1:
        return layers[0]
    return f"{layers[0]} to {layers[-1].rpartition('.')[2]}, each of {len(layers)}"
