"""The group of all commands: a table of names, so that `--help` imports no command, and none imports torch until it runs."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

import click
from click.shell_completion import shell_complete

import fsdp_optim
from fsdp_optim.cli.failing import FINE, WRONG, exit_code_of, line_of
from fsdp_optim.errors import FsdpOptimError

PROGRAM = "fsdp-optim"
COMPLETION_VARIABLE = f"_{PROGRAM}_complete".replace("-", "_").upper()

_ROOM = "fsdp_optim.cli.commands"

COMMANDS: dict[str, tuple[str, str]] = {
    "average": (f"{_ROOM}.average", "average the weights of several checkpoints into a new one"),
    "completion": (f"{_ROOM}.completion", "print the script that completes commands in a shell"),
    "convert": (f"{_ROOM}.convert", "write a checkpoint again, in another format or in other files"),
    "copy": (f"{_ROOM}.copy", "copy a checkpoint byte for byte, and verify it meanwhile"),
    "diff": (f"{_ROOM}.diff", "compare two checkpoints, value by value"),
    "doctor": (f"{_ROOM}.doctor", "say what a path is, what is missing there, and the line that loads it"),
    "extract": (f"{_ROOM}.extract", "write values as a file of numpy, safetensors or torch"),
    "inspect": (f"{_ROOM}.inspect", "show what a checkpoint has"),
    "latest": (f"{_ROOM}.latest", "print the path of the newest complete checkpoint"),
    "ls": (f"{_ROOM}.ls", "list the checkpoints in a folder"),
    "merge-adapter": (f"{_ROOM}.merge_adapter", "merge a LoRA adapter into the weights of a checkpoint, as a new one"),
    "prune": (f"{_ROOM}.prune", "remove the checkpoints that no rule keeps"),
    "show": (f"{_ROOM}.show", "describe one value: range, mean, norm, NaNs, a histogram"),
    "thin": (f"{_ROOM}.thin", "remove the optimizer of a checkpoint, in place"),
    "verify": (f"{_ROOM}.verify", "read every byte and compare it with its checksum"),
}
"""By name, the module whose `command` it is, and the line of `fsdp-optim --help` about it."""


class Commands(click.Group):
    """The commands of the table. A module is imported when its command is called, or when its own help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
            fix = f"did you mean {close[0]}?" if close else f"commands: {', '.join(sorted(COMMANDS))}"
            raise click.UsageError(f"there is no command {name!r}: {fix}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


group = Commands(
    name=PROGRAM,
    help="List, look at, verify, convert and keep checkpoints of this and other libraries. Paths may be URLs.",
    epilog="Exit codes: 0 fine; 1 differs, damaged or unfinished; 2 wrong use, or nothing is there.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            help="show the version",
            callback=lambda ctx, _, is_given: _show_version(ctx) if is_given else None,
        )
    ],
)


def _show_version(ctx: click.Context) -> None:
    click.echo(f"{PROGRAM} {fsdp_optim.__version__}")
    ctx.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        return shell_complete(group, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
    context = None
    try:
        with library_log():
            if not given:
                click.echo(group.get_help(click.Context(group, info_name=PROGRAM)), err=True)
                return WRONG
            with group.make_context(PROGRAM, given) as context:
                group.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else PROGRAM
        return _failed(f"{error.format_message()} (`{path} --help` shows what there is)", WRONG)
    except click.ClickException as error:
        return _failed(error.format_message(), error.exit_code)
    except FsdpOptimError as error:
        if not error.on_all_ranks or int(os.environ.get("RANK", "0")) == 0:
            return _failed(line_of(error, _command_in(context)), exit_code_of(error))
        return exit_code_of(error)
    except BrokenPipeError:  # `| head` has read enough
        sys.stderr.close()  # else Python complains of the pipe at its exit
    except (KeyboardInterrupt, click.Abort):
        return _failed("interrupted", 1)
    return FINE


def _command_in(context: click.Context | None) -> click.Command | None:
    """Return the command that was called."""
    name = context.invoked_subcommand if context is not None else None
    return group.get_command(context, name) if context is not None and name is not None else None


def _failed(why: str, code: int) -> int:
    print(f"{PROGRAM}: {' '.join(why.split())}", file=sys.stderr)
    return code


@contextmanager
def library_log() -> Iterator[None]:
    """Show the library's log on the standard error inside the block. `--quiet` leaves only its warnings."""
    log, handler = logging.getLogger("fsdp_optim"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
