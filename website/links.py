"""Read the pages that were built, and find links that lead nowhere, and files that a page would fetch from another host."""

from __future__ import annotations

import posixpath
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself. `link` fetches for some values of `rel` only.
FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "srcset", "audio": "src", "video": "src"}
LINKS_THAT_FETCH = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch", "prefetch"}


class Page(HTMLParser):
    """The ids of a page, the targets of its links, and the files that it fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and LINKS_THAT_FETCH & set(found.get("rel", "").split()):
            self.fetched.append(found["href"])
        if FETCHED.get(tag) in found:
            self.fetched.append(found[FETCHED[tag]])


def problems(site: Path) -> list[str]:
    """One sentence for each broken link and each thing that a page fetches from another host."""
    pages = {file.relative_to(site).as_posix(): Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    found = []
    for name, page in pages.items():
        if name == "404.html":  # its links are absolute, below the address of the site
            continue
        for target in page.fetched:
            if urlsplit(target).netloc:
                found.append(f"{name}: the page fetches {target} from another host")
        for target in [*page.links, *page.fetched]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            to = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
            )
            if (site / to).is_dir():
                to = posixpath.normpath(posixpath.join(to, "index.html"))
            if not (site / to).is_file():
                found.append(f"{name}: the link {target} leads to no file")
            elif parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].ids | {"__top"}:
                found.append(f"{name}: the link {target} leads to no heading")
    return found
