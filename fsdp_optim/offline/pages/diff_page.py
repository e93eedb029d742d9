"""A page about the differences of two checkpoints: a strip of colours for each layer, and the numbers. It needs no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TypeVar

from fsdp_optim.errors import counted_noun
from fsdp_optim.results.differences import DiffResult, ValueDiff

T = TypeVar("T")

_MOST_ROWS = 5000  # of a table, so that a browser can show it
_COLOURS = 9
_LEAST_POWER, _POWERS_EACH = -8, 1  # the first colour ends at 1e-8, each next one at ten times more
_WEIGHT = "weight"

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --faint: #5d6670; --line: #d9dee3; --equal: #eceff2;
  --c0: #e3eefb; --c1: #c6dcf5; --c2: #a3c6ee; --c3: #7dade4; --c4: #5792d8; --c5: #3a77c4; --c6: #265da6; --c7: #174684;
  --c8: #0c2f5f; --odd: #c2410c }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --text: #e4e8ec; --faint: #98a2ad; --line: #303841;
  --equal: #222930; --c0: #16283f; --c1: #183556; --c2: #1d4671; --c3: #27598e; --c4: #366fac; --c5: #4d88c8;
  --c6: #70a5de; --c7: #9dc4ee; --c8: #d3e6fb; --odd: #fb923c } }
body { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem } p { margin: .4rem 0 }
code { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere }
.faint { color: var(--faint) } .wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { padding: .15rem .8rem .15rem 0; text-align: left;
  vertical-align: top } th { color: var(--faint); font-weight: 500; white-space: nowrap } .number { text-align: right }
tbody tr { border-top: 1px solid var(--line) }
.strip { display: inline-flex; gap: 1px; vertical-align: middle } .strip i { width: 12px; height: 18px; background: var(--equal) }
.strip i.odd, .legend i.odd { background: var(--odd) }
.legend { color: var(--faint) } .legend i { display: inline-block; width: 22px; height: 12px; background: var(--equal) }
summary { cursor: pointer; margin: .6rem 0 }
"""


def page_of(result: DiffResult) -> str:
    """Return the page as text in HTML."""
    colours = "".join(f"i.c{index} {{ background: var(--c{index}) !important }}\n" for index in range(_COLOURS))
    body = "\n".join([*_head(result), *_strips(result.values), *_lists(result), *_tables(result)])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Differences of two checkpoints</title>\n'
        f"<style>{_STYLE}{colours}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _head(result: DiffResult) -> Iterator[str]:
    differing = result.differing
    if result.equal:
        verdict = f"Equal, bit by bit: {counted_noun(len(result.values), 'value')}"
    else:
        verdict = f"{len(differing)} of {counted_noun(len(result.values), 'value')} differ"
        if result.tolerance is not None:
            verdict += f", {len(result.within)} of them within {result.tolerance:g}"
    yield f"<h1>{escape(verdict)}</h1>"
    for side, path, step in zip("ab", (result.a, result.b), result.steps, strict=True):
        of = f" <span class=faint>step {step}</span>" if step is not None else ""
        yield f"<p>{side}: <code>{escape(path)}</code>{of}</p>"
    yield from (f"<p class=faint>{escape(note)}.</p>" for note in result.notes)


# ------------------------------------------------------------------------------------------- strips


def _strips(values: Sequence[ValueDiff]) -> Iterator[str]:
    """Yield a table with a row for each layer and a column for the weights and for each name of state values."""
    cells: dict[str, dict[str, list[ValueDiff]]] = {}
    for value in values:
        fqn, kind = _split(value.name)
        if value.numel > 1 or value.a.shape:  # steps and other numbers have no strip
            cells.setdefault(layer_of(fqn), {}).setdefault(kind, []).append(value)
    kinds = list(dict.fromkeys(kind for by_kind in cells.values() for kind in by_kind))
    if not cells:
        return
    yield "<h2>Layers</h2>"
    yield '<p class="faint">‖a - b‖ / ‖a‖: the number of a layer, and a field for each of its parameters.</p>'
    yield _legend()
    yield from table_of_layers(cells, kinds, lambda by_kind, kind: _strip(by_kind.get(kind, [])))


def table_of_layers(
    cells: Mapping[str, Mapping[str, T]], kinds: Sequence[str], shown: Callable[[Mapping[str, T], str], str]
) -> Iterator[str]:
    """Yield a table with a row for each layer and a column for each kind. `shown`: a field, as HTML."""
    yield "<div class=wide><table><thead><tr><th>layer</th>"
    yield "".join(f"<th>{escape(kind)}</th>" for kind in kinds) + "</tr></thead><tbody>"
    for layer, by_kind in cells.items():
        columns = "".join(f"<td>{shown(by_kind, kind)}</td>" for kind in kinds)
        yield f"<tr><td><code>{escape(layer)}</code></td>{columns}</tr>"
    yield "</tbody></table></div>"


def layer_of(fqn: str) -> str:
    """Return the layer of a parameter: its name up to the first number, or its module where there is none."""
    parts = fqn.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or fqn


def _split(name: str) -> tuple[str, str]:
    fqn, colon, key = name.rpartition(":")
    return (fqn, key) if colon else (name, _WEIGHT)


def _strip(values: Sequence[ValueDiff]) -> str:
    if not values:
        return ""
    fields = "".join(
        f'<i{_class_of(value)} title="{escape(value.name)}: {escape(_number(value.relative))}"></i>' for value in values
    )
    norm = math.sqrt(math.fsum(value.norm**2 for value in values))
    apart = math.sqrt(math.fsum(value.norm_of_difference**2 for value in values))
    relative = 0.0 if not apart else apart / norm if norm else math.inf
    return f"<span class=strip>{fields}</span> {_number(relative)}"


def _class_of(value: ValueDiff) -> str:
    """Return the class of a field: none for equal values, `odd` where no finite number says how far they are apart."""
    if value.equal:
        return ""
    if not math.isfinite(value.relative):
        return " class=odd"
    power = math.log10(value.relative) if value.relative else -math.inf
    steps = 0 if power == -math.inf else math.ceil((power - _LEAST_POWER) / _POWERS_EACH)
    return f" class=c{min(max(steps, 0), _COLOURS - 1)}"


def _legend() -> str:
    last = _LEAST_POWER + (_COLOURS - 1) * _POWERS_EACH
    fields = "".join(f"<i class=c{index}></i>" for index in range(_COLOURS))
    return (
        f'<p class="legend">equal <i></i> &nbsp; up to 1e{_LEAST_POWER} {fields} up to 1e{last} and more &nbsp; '
        "NaN, infinity or from zero <i class=odd></i></p>"
    )


# ------------------------------------------------------------------------------------------- the numbers


def _lists(result: DiffResult) -> Iterator[str]:
    if result.steps_differ:
        yield f"<h2>Steps</h2><p>{result.steps[0]} and {result.steps[1]}</p>"
    hyper = [
        (item.name, item.a, item.b, counted_noun(len(item.params), "parameter")) for item in result.hyperparameters
    ]
    yield from _table("Hyperparameters", ("name", "a", "b", "of"), hyper)
    shapes = [(item.name, str(item.a.shape), str(item.b.shape)) for item in result.shapes]
    yield from _table("Different shapes", ("name", "a", "b"), shapes)
    yield from _table("Only in a", ("name",), [(name,) for name in result.only_in_a])
    yield from _table("Only in b", ("name",), [(name,) for name in result.only_in_b])
    yield from _table("Other values", ("name", "a", "b"), [(item.name, item.a, item.b) for item in result.objects])


def _tables(result: DiffResult) -> Iterator[str]:
    columns = ("name", "‖a - b‖ / ‖a‖", "max |a - b|", "differing", "of", "dtype", "shape", "NaN", "infinite")
    yield from _table("Values that differ", columns, map(_row, result.differing))
    equal = [value for value in result.values if value.equal]
    if equal:
        yield f"<details><summary>{counted_noun(len(equal), 'equal value')}</summary>"
        rows = ((v.name, v.a.dtype, str(v.a.shape), f"{v.norm:.6g}") for v in equal)
        yield from _table("", ("name", "dtype", "shape", "‖a‖"), rows)
        yield "</details>"


def _row(value: ValueDiff) -> tuple[str, ...]:
    dtypes = value.a.dtype if value.a.dtype == value.b.dtype else f"{value.a.dtype}, {value.b.dtype}"
    special = (f"{counts[0]}, {counts[1]}" if any(counts) else "" for counts in (value.nans, value.infinities))
    return (
        value.name,
        _number(value.relative),
        _number(value.max_abs),
        f"{value.num_differing:,}",
        f"{value.numel:,}",
        dtypes,
        str(value.a.shape),
        *special,
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    listed = list(rows)
    if not listed:
        return
    yield f"<h2>{title}</h2>" if title else ""
    yield "<div class=wide><table><thead><tr>" + "".join(f"<th>{column}</th>" for column in columns)
    yield "</tr></thead><tbody>"
    for row in listed[:_MOST_ROWS]:
        first, *others = (escape(cell) for cell in row)
        yield f"<tr><td><code>{first}</code></td>{''.join(f'<td>{cell}</td>' for cell in others)}</tr>"
    yield "</tbody></table></div>"
    if len(listed) > _MOST_ROWS:
        yield f"<p class=faint>and {len(listed) - _MOST_ROWS:,} more</p>"


def _number(number: float) -> str:
    return "∞" if number == math.inf else f"{number:.3g}"
