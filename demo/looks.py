"""The pictures of docs/looking.md, from a real run: `python -m demo.looks` writes docs/look-*.svg.

A small model is trained on 4 ranks and saved four times. The terminals show what the commands print on a terminal; the others
are parts of the pages that `diff` and `inspect` write, as they are, in a frame of SVG. No picture fetches anything.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 460  # pixels of a page: read on a phone too
TERMINAL_WIDTH, COLUMNS = 640, 78  # website/extra.css lets it scroll on a phone
RANKS, STEPS, EVERY = 4, 40, 10
EMPTY_TAGS = {"br", "meta", "hr", "img"}
FRAME = "body { margin: 0; padding: 1rem; font-size: 14px; border-radius: 8px } h2 { margin: 0 0 .5rem } .map { height: 24rem }"


class Block(nn.Module):
    """Two layers of a network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Words in, words out."""

    def __init__(self, words: int = 600, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def train(root: Path) -> None:
    """Train on all ranks under FSDP2, and save every few steps with the loss as a metric."""
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = fsdp_optim.CheckpointManager(root, model, optim, every=EVERY)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 600, (8, 17), generator=torch.Generator().manual_seed(step * RANKS + dist.get_rank()))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        manager.step(step, metric=mean.item() / RANKS)
    manager.close()


# ------------------------------------------------------------------------------------------- terminals


def printed(command: list[str], folder: Path, columns: int) -> str:
    """What a command prints on a terminal of so many columns, with its escapes."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", "PYTHONPATH": str(DOCS.parent)}
    arguments = [sys.executable, "-m", "fsdp_optim", *command]
    process = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    pieces = []
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # on Linux, the end of a terminal that nobody holds any more
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(ours)
    process.wait()
    return b"".join(pieces).decode().replace("\r\n", "\n")


def terminal(command: list[str], folder: Path, columns: int = COLUMNS) -> str:
    """A picture of a command and what it printed."""
    shown = printed(command, folder, columns)
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True)
    console.print(Text("$ fsdp-optim " + " ".join(command), style="bold"))
    console.print(Text.from_ansi(shown.rstrip("\n")))
    drawn = console.export_svg(title="fsdp-optim", unique_id="look")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # they would fetch a font from another host
    drawn = re.sub(r"<!--.*?-->\s*", "", drawn)
    drawn = drawn.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace")
    return drawn.replace("<svg ", f'<svg width="{TERMINAL_WIDTH}" ', 1)


# ------------------------------------------------------------------------------------------- pages


class Rewritten(HTMLParser):
    """HTML as XML, which SVG needs: every tag closed, every attribute in quotes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        quoted = "".join(f' {name}="{escape(value or "")}"' for name, value in attrs)
        self.pieces.append(f"<{tag}{quoted}{'/' if tag in EMPTY_TAGS else ''}>")

    def handle_endtag(self, tag: str) -> None:
        self.pieces.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self.pieces.append(escape(data, quote=False))


def framed(page: str, start: str, stop: str, height: int) -> str:
    """The part of a page from one text to another, as a picture that is light or dark as its reader likes it."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    first = page.index(start)
    part = "".join(Rewritten(page[first : page.index(stop, first + 1)]).pieces)
    style = re.sub(r"\bbody\b", ".body", style) + FRAME.replace("body", ".body")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
        f'<foreignObject width="{WIDTH}" height="{height}"><div xmlns="http://www.w3.org/1999/xhtml" class="body" '
        f'style="max-width:none;box-sizing:border-box;height:{height}px;overflow:hidden">'
        f"<style>{escape(style, quote=False)}</style>{part}</div></foreignObject></svg>\n"
    )


def pictures(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each picture. `folder` gets the run."""
    run_on_ranks(train, RANKS, folder / "run", timeout=300)
    damaged = sorted((folder / "run" / "step-00000020").glob("optim*.safetensors"))[0]
    os.truncate(damaged, damaged.stat().st_size // 2)
    yield "ls", terminal(["ls", "run"], folder)
    steps = ["run/step-00000030", "run/step-00000040"]
    yield "diff", terminal(["diff", *steps, "--match", "*.weight"], folder)
    last = folder / steps[1]
    fsdp_optim.placement(last, ranks=24, html=folder / "bytes.html")
    page = (folder / "bytes.html").read_text().replace(str(folder) + "/", "")
    yield "bytes", framed(page, "<h1>", "<h2>On", 556)
    yield "ranks", framed(page, "<h2>On", "<h2>Bytes", 1126)
    fsdp_optim.diff(folder / steps[0], last, html=folder / "diff.html")
    yield "strips", framed((folder / "diff.html").read_text(), "<h2>Layers", "<h2>", 402)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in pictures(Path(folder)):
            (DOCS / f"look-{name}.svg").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
