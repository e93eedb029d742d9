"""Find files that a page of the site would fetch from another host. Broken links are found when the site is made."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

# What a browser fetches by itself. `link` fetches for some values of `rel` only.
FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "srcset", "audio": "src", "video": "src"}
LINKS_THAT_FETCH = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch", "prefetch"}


class Page(HTMLParser):
    """The files that a page fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        name = "href" if tag == "link" and LINKS_THAT_FETCH & set(values.get("rel", "").split()) else FETCHED.get(tag)
        if name in values:
            self.fetched.append(values[name])


def problems(site: Path) -> list[str]:
    """One sentence for each file that a page fetches from another host."""
    pages = {file.relative_to(site).as_posix(): Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    return [
        f"{name}: the page fetches {target} from another host"
        for name, page in pages.items()
        for target in page.fetched
        if name != "404.html" and urlsplit(target).netloc  # whose links begin with the address of the site
    ]
