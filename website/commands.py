"""docs/cli.md, made of the commands themselves: `python -m website.commands` writes it, where this package is installed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from fsdp_optim.cli.app import COMMANDS, PROGRAM, group
from website.stage import ROOT

PAGE = ROOT / "docs" / "cli.md"

_BEGIN = f"""# The command line

<!-- `python -m website.commands` writes this page. -->

`{PROGRAM}` comes with the package; `python -m fsdp_optim` is the same. Paths of checkpoints and of
their folders may be URLs, and so may files that a command writes (`--html`, `extract -o`)
([storage](storage.md)). What a command writes is complete or absent, whenever it is killed.

```sh
{PROGRAM} ls run                                # what is there: steps, sizes, metrics, damage
{PROGRAM} doctor run/step-00000040              # what is it, is it complete, which line loads it
{PROGRAM} verify run                            # every byte of every checkpoint
{PROGRAM} prune run --keep-last 3 --dry-run     # what would go
{PROGRAM} copy "$({PROGRAM} latest run)" s3://bucket/run/best
```

| exit code | meaning |
|---|---|
| 0 | fine |
| 1 | something differs, is damaged or is unfinished |
| 2 | wrong use, or nothing is there |

An error is one line on the standard error, and names the options of the command. `--json` prints one JSON object, with
the fields of the result of the Python function.
"""


def page() -> str:
    """Return the text of the page."""
    context = click.Context(group, info_name=PROGRAM)
    lines = [_BEGIN.rstrip(), ""]
    lines += ["| command | |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {text} |" for name, (_, text) in sorted(COMMANDS.items())]
    for name in sorted(COMMANDS):
        command = group.get_command(context, name)
        assert command is not None
        lines += ["", *_section(name, command, context)]
    return "\n".join(lines) + "\n"


def _section(name: str, command: click.Command, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent)
    yield f"## {name}"
    yield ""
    yield "```text"
    yield command.get_usage(context).removeprefix("Usage: ")
    yield "```"
    yield ""
    yield _text(command)
    options = [param for param in command.params if isinstance(param, click.Option)]
    if options:
        yield ""
        yield "| option | |"
        yield "|---|---|"
        for option in options:
            flags = ", ".join(option.opts)
            value = "" if option.is_flag else f" {option.make_metavar(context)}"
            cells = [f"`{flags}{value.replace('[', '').replace(']', '')}`", option.help or ""]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _text(command: click.Command) -> str:
    """Return the help of a command, with lines that must not be filled as a block."""
    text = inspect.cleandoc(command.help or "")
    return re.sub(r"\x08\n((?:.+\n?)+)", lambda match: f"```text\n{match[1].rstrip()}\n```", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
