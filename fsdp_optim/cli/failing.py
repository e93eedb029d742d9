"""An error of the library for the shell: its exit code, and one line in which arguments of Python are options of the command."""

from __future__ import annotations

import re

import click

from fsdp_optim.errors import FsdpOptimError, one_line

FINE, BROKEN, WRONG = 0, 1, 2
"""The exit codes: fine; differs, damaged or unfinished; wrong use, or nothing is there."""

_CALLED = {"bucket_nbytes": "memory", "param_names": "names", "durable": "not_durable"}
"""Parameters of the library that the commands call otherwise."""

_GIVEN = re.compile(
    r"(?:(?<=[\s(`,])|\A)(?P<name>[a-z_]+)=(?P<value>\.\.\.|\[\.\.\.\]|'[^']*'|\"[^\"]*\"|[A-Za-z0-9_.]+(\(\.\.\.\))?|(?=[\s{]))"
)
_NAMED = re.compile(
    r"\b(?P<name>[a-z]+_[a-z_]+|format|step)(?= must be | are for | needs )|\b(?P<own>bucket_nbytes|param_names)\b"
    r"|\A(?P<first>[a-z_]+)(?= (must be|is a|has|are for|needs) )"
)
_ONLY_IN_PYTHON = re.compile(r", or model=, a model [^)]*\)| \(verify=False [^)]*\)")


def exit_code_of(error: FsdpOptimError) -> int:
    """Return the exit code of an error."""
    return WRONG if error.is_wrong_use else BROKEN


def line_of(error: FsdpOptimError, command: click.Command | None) -> str:
    """Return the message of an error on one line, with the options of the command in the place of Python's arguments."""
    return with_flags(_ONLY_IN_PYTHON.sub("", one_line(error)), command)


def with_flags(text: str, command: click.Command | None) -> str:
    """Write `overwrite=True` as `--overwrite` where the command has that option; what it does not have stays as it is."""
    flags = {
        option.name: option
        for option in (command.params if command is not None else ())
        if isinstance(option, click.Option)
    }

    def flag_of(match: re.Match[str]) -> str:
        groups = match.groupdict()
        name = groups.get("name") or groups.get("own") or groups.get("first") or ""
        option = flags.get(_CALLED.get(name, name))
        if option is None:
            return match[0]
        value = groups.get("value") or "..."
        has_value = not option.is_flag and value != "..." and value not in ("", "[...]", "True", "False")
        if match.string[match.end() :].startswith("{"):  # what the file of the option has
            return f"{option.opts[0]} with "
        return f"{option.opts[0]} {value}" if has_value else option.opts[0]

    return _NAMED.sub(flag_of, _GIVEN.sub(flag_of, text))
