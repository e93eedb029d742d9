"""The options that several commands share. Each is a decorator, and gives its command the parameter that it names.

@click.command("name")
@click.argument("path", type=PATH)
@json_option                # as_json: bool
@memory_option              # memory: int, in bytes
@quiet_option               # quiet: bool; also keeps the log to warnings
@storage_options            # storage_options: dict[str, Any] | None
def command(path, as_json, memory, quiet, storage_options): ...
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from fsdp_optim.cli.units import size_of
from fsdp_optim.errors import LayoutError, wrong_use
from fsdp_optim.registry import format_names

if TYPE_CHECKING:
    from fsdp_optim.api import ConvertOptions

_OPTION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_MOST_CLOSE = 1
_INVERSE = ".inverse"
VIEWS_HELP = "Views of fused parameters, one a line as inspect shows them; with .inverse after it, of parts"

FunctionT = TypeVar("FunctionT", bound="Callable[..., Any] | click.Command")

DEFAULT_MEMORY, LEAST_MEMORY = 512 << 20, 16 << 20
"""Of `--memory`: the library's own `bucket_nbytes` of `convert`, and the least that it takes."""


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A number of bytes, as in 4GB, 512MiB or 1000000. `least`: the lowest that is allowed."""

    name = "size"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            nbytes = value if isinstance(value, int) else size_of(str(value))
        except ValueError as error:
            self.fail(f"{error}", param, ctx)
        if nbytes < self._least:
            self.fail(f"must be at least {self._least} bytes, not {nbytes}", param, ctx)
        return nbytes


class KeyValue(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """An option of a store: KEY=VALUE. A value that is a number, true or false becomes one."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        match = _OPTION.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        key, text = match.groups()
        words = {"true": True, "false": False}
        return key, int(text) if text.isdecimal() else words.get(text.lower(), text)


class FormatName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """The name of a format that is written: one of this package, or of an installed one."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        names = format_names()
        if value in names:
            return str(value)
        close = difflib.get_close_matches(str(value), names, n=_MOST_CLOSE)
        fix = f"did you mean {close[0]}?" if close else f"it must be one of {', '.join(names)}"
        return self.fail(f"there is no format {value!r}: {fix}", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in format_names() if name.startswith(incomplete)]


class AnyPath(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A path or a URL, as it is given. Shells complete it with the names of files and folders."""

    name = "path"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


PATH = AnyPath()
"""The type of every argument and option that is a path."""


def json_option(function: FunctionT) -> FunctionT:
    """Add `--json`: the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="print one JSON object, for programs")(function)


def names_option(function: FunctionT) -> FunctionT:
    """Add `--names FILE`: the parameter `names`, an open file of text."""
    return click.option(
        "--names",
        type=click.File(encoding="utf-8"),
        metavar="FILE",
        help="the names of parameters that have ids, one a line in order of the ids",
    )(function)


def memory_option(function: FunctionT) -> FunctionT:
    """Add `--memory SIZE`: the parameter `memory`, the most bytes of elements that a process holds at a time."""
    return click.option(
        "--memory",
        type=Size(LEAST_MEMORY),
        default=DEFAULT_MEMORY,
        metavar="SIZE",
        help="the most memory for elements (512MiB)",
    )(function)


def quiet_option(function: FunctionT) -> FunctionT:
    """Add `--quiet`: the parameter `quiet`. The library's log then has warnings only."""
    return click.option("--quiet", is_flag=True, callback=_log_warnings, help="no progress, only warnings and errors")(
        function
    )


def _log_warnings(ctx: click.Context, param: click.Parameter, is_given: bool) -> bool:
    if is_given:
        only_warnings()
    return is_given


def only_warnings() -> None:
    """Keep the library's log to warnings until this command ends."""
    logging.getLogger("fsdp_optim").setLevel(logging.WARNING)


def storage_options(function: FunctionT) -> FunctionT:
    """Add `--storage-option KEY=VALUE`: the parameter `storage_options`, a dict; None if none was given."""
    return click.option(
        "--storage-option",
        "storage_options",
        type=KeyValue(),
        multiple=True,
        metavar="KEY=VALUE",
        callback=lambda ctx, param, pairs: dict(pairs) or None,
        help="an option of the store of a URL, such as endpoint_url=...; can be given several times",
    )(function)


def writing_options(target: str) -> Callable[[FunctionT], FunctionT]:
    """Add the options of a command that writes a checkpoint at its argument `target`; `convert_options` reads them."""
    options = (
        click.option("--overwrite", is_flag=True, help=f"replace the checkpoint at {target}"),
        click.option("--not-durable", is_flag=True, help="do not wait until the bytes are on the disk"),
        click.option(
            "--max-file-size", type=Size(), default=4_000_000_000, metavar="SIZE", help="the most bytes of a file (4GB)"
        ),
        click.option("--allow-pickle", is_flag=True, help="unpickle values, which can run any code of their author"),
    )

    def decorate(function: FunctionT) -> FunctionT:
        for option in reversed(options):  # help lists the last one that is added first
            function = option(function)
        return function

    return decorate


def views_in(lines: Iterable[str]) -> list[Any]:
    """Return the Views of a file, one in each line, as `inspect` shows them. Lines that are empty or begin with # are none.

    Raises CheckpointError that names the line which is no View.
    """
    from fsdp_optim import api

    views: list[Any] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            view = api.View.from_text(text.removesuffix(_INVERSE))
        except LayoutError as error:
            raise wrong_use(f"line {number} of the file of views: {error}") from error
        views.append(view.inverse if text.endswith(_INVERSE) else view)
    return views


def convert_options(
    given: dict[str, Any],
    rank: int,
    *,
    param_names: list[str] | None = None,
    views: Sequence[Any] = (),
) -> ConvertOptions:
    """Return the options of a command with `writing_options`, `memory_option`, `quiet_option` and `storage_options`."""
    from fsdp_optim import api

    return api.ConvertOptions(
        bucket_nbytes=given["memory"],
        param_names=param_names,
        durable=not given["not_durable"],
        max_file_size=given["max_file_size"],
        allow_pickle=given["allow_pickle"],
        progress=progress_of(quiet=given["quiet"] or rank > 0),
        views=tuple(views),
        storage_options=given["storage_options"],
    )


def progress_of(*, quiet: bool) -> bool | None:
    """Return `progress` for the library's calls: a bar on a terminal for long work, none with `--quiet`."""
    return False if quiet else None
