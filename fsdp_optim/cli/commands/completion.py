"""`fsdp-optim completion`: the script that lets a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from fsdp_optim.cli.app import COMPLETION_VARIABLE, PROGRAM


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that completes the commands and options of fsdp-optim.

    \b
    bash: eval "$(fsdp-optim completion bash)" in ~/.bashrc
    zsh:  eval "$(fsdp-optim completion zsh)" in ~/.zshrc
    fish: fsdp-optim completion fish > ~/.config/fish/completions/fsdp-optim.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"this version of click has no completion for {shell}")
    group = click.get_current_context().find_root().command
    click.echo(kind(group, {}, PROGRAM, COMPLETION_VARIABLE).source())
