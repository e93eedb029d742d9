"""The badges at the top of README.md, from setup.cfg: `python -m demo.badges` writes docs/badges.svg."""

from __future__ import annotations

import configparser
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "badges.svg"
_HEIGHT, _LETTER, _PAD, _GAP = 20, 6.6, 8, 6  # pixels
_LABEL, _BLUE, _GREEN = "#555", "#2f6db5", "#3f7f4c"


def badges() -> list[tuple[str, str]]:
    """Return the label and the text of each badge."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    metadata, options = setup["metadata"], setup["options"]
    init = (ROOT / "fsdp_optim" / "__init__.py").read_text(encoding="utf-8")
    version = _found(r'^__version__ = "(.+)"', init)
    state = _found(r"Development Status :: \d - (\w+)", metadata["classifiers"]).lower()
    return [
        ("version", f"{version} {state}"),
        ("Python", f"{_found(r'>=([0-9.]+)', options['python_requires'])} or newer"),
        ("torch", f"{_found(r'^torch>=([0-9.]+)', options['install_requires'])} or newer"),
        ("system", _found(r"Operating System :: POSIX :: (\w+)", metadata["classifiers"])),
        ("license", metadata["license_expression"]),
    ]


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError(f"setup.cfg: has nothing like {pattern}")
    return match[1]


def drawn(pairs: list[tuple[str, str]]) -> str:
    """Return the picture: a dark half with the label and a coloured half with the text for each, readable on any page."""
    parts, left = [], 0.0
    for number, (label, text) in enumerate(pairs):
        first, second = len(label) * _LETTER + 2 * _PAD, len(text) * _LETTER + 2 * _PAD
        colour, at, width = _BLUE if number else _GREEN, left + first, second - 4
        parts += [
            f'  <rect x="{left:.1f}" width="{first + second:.1f}" height="{_HEIGHT}" rx="4" fill="{_LABEL}"/>',
            f'  <path d="M{at:.1f} 0h{width:.1f}a4 4 0 0 1 4 4v12a4 4 0 0 1 -4 4h-{width:.1f}z" fill="{colour}"/>',
            f'  <text x="{left + first / 2:.1f}" y="14">{escape(label)}</text>',
            f'  <text x="{left + first + second / 2:.1f}" y="14">{escape(text)}</text>',
        ]
        left += first + second + _GAP
    width = left - _GAP
    title = ", ".join(f"{label} {text}" for label, text in pairs)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.1f} {_HEIGHT}" width="{width:.0f}" height="{_HEIGHT}" '
        'font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" fill="#fff" text-anchor="middle" role="img">'
    )
    return "\n".join([head, f"  <title>{escape(title)}</title>", *parts, "</svg>", ""])


def main() -> None:
    FILE.write_text(drawn(badges()), encoding="utf-8")


if __name__ == "__main__":
    main()
