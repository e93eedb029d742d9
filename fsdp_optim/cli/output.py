"""The output of commands: lines, a table, or one JSON object. `rich` is imported for a table on a terminal only."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import click

from fsdp_optim.cli.failing import BROKEN


def print_json(value: Any) -> None:
    """Print a result as one JSON object: the fields of a dataclass, paths as texts; NaN and infinity as null."""
    click.echo(json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False))


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they come."""
    for line in lines:
        click.echo(line)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows: a table on a terminal, else aligned columns without a frame. `right`: the columns that end at the right."""
    if sys.stdout.isatty():
        _print_rich(columns, rows, right)
        return
    widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
    for row in (columns, *rows):
        cells = [
            text.rjust(width) if name in right else text.ljust(width)
            for name, text, width in zip(columns, row, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def end_broken() -> NoReturn:
    """End the command with exit code 1: something differs, is damaged or is unfinished."""
    raise click.exceptions.Exit(BROKEN)
