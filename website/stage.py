"""The pages of the site, made of the files that GitHub shows: README.md is the first page, docs/ has most of the others.

Links there lead to files of the repository. Those to pages lead to pages of the site, and all others to the repository on the
web. Notes that GitHub shows as such (`> [!NOTE]`) are notes of the site too, and each page says what it is about. What a code
block says to the tests (```python ranks=2) is left out; where it begins in the middle of a program (given=...), the beginning
from website/preludes/ follows it, folded. A link to no file is found here; the strict mode of the generator finds headings that
are not there.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A link or an image of Markdown, or an attribute of HTML; not inside `code`.
LINK = re.compile(
    r"`[^`\n]+`|(?P<before>\]\()(?P<to>[^)\s]+)(?=\))|(?P<attr>\b(?:src|href|srcset)=\")(?P<at>[^\"]+)(?=\")"
)
AT_THE_TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
ALERT = re.compile(r"^> \[!(?P<kind>NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]$")
ADMONITIONS = {"IMPORTANT": "info", "CAUTION": "danger"}
MOST_DESCRIPTION = 160  # characters, as search engines show
FENCE = re.compile(r"^(?P<indent> *)(?P<marks>```+)(?P<info>.*)$")


def repository() -> str:
    """Where links to other files lead: to the repository of the workflow that builds the site, or to the files here."""
    if "GITHUB_REPOSITORY" in os.environ:
        return f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    return f"file://{ROOT}"


def page_of(file: str) -> str | None:
    """The place among the pages of a file of the repository; None for a file that is no part of the site."""
    return file.removeprefix("docs/") if file.startswith("docs/") else AT_THE_TOP.get(file)


def moved(target: str, source: str, root: Path, web: str) -> str | None:
    """Where a link of the file `source` leads on the site; None for a link to no file."""
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return target
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (root / file).exists():
        return None
    page = page_of(file)
    if page is None:
        kind = "" if web.startswith("file:") else "tree/main/" if (root / file).is_dir() else "blob/main/"
        return f"{web}/{kind}{file}{mark}{anchor}"
    here = page_of(source)
    assert here is not None
    return posixpath.relpath(page, posixpath.dirname(here) or ".") + mark + anchor


def prelude(given: str, root: Path) -> list[str]:
    """What a block begins with that says `given=...`, folded; nothing where that is no program of its own."""
    file = root / "website" / "preludes" / f"{given}.py"
    if not given or not file.exists():
        return []
    code = file.read_text().rstrip().splitlines()
    head = ["<details markdown>", "<summary>What these lines begin with</summary>"]
    return ["", *head, "", "```python", *code, "```", "", "</details>"]


def with_admonitions(lines: list[str]) -> list[str]:
    """The lines with the notes of GitHub (`> [!NOTE]`, and lines that begin with `>`) as the generator knows them."""
    out: list[str] = []
    inside, marks = False, None
    for line in lines:
        fence = FENCE.match(line)
        alert = ALERT.match(line) if marks is None else None
        if fence and not inside:
            marks = fence["marks"] if marks is None else None if fence["marks"] == marks else marks
        if alert:
            out.append(f"!!! {ADMONITIONS.get(alert['kind'], alert['kind'].lower())}")
            out.append("")
        elif inside and line.startswith(">"):
            out.append(f"    {line.removeprefix('>').removeprefix(' ')}".rstrip())
        else:
            out.append(line)
        inside = alert is not None or (inside and line.startswith(">"))
    return out


def description(text: str) -> str:
    """What the first paragraph of a page says, without marks, cut at the end of a word; nothing where code comes first."""
    paragraphs = (
        part.strip() for part in re.sub(r"<!--.*?-->", "", text.partition("\n```")[0], flags=re.DOTALL).split("\n\n")
    )
    words = next((part for part in paragraphs if part and re.match(r"[A-Za-z`*]|\[(?!!)", part)), "")
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(words.split())).replace("`", "").replace("*", "")
    if len(plain) <= MOST_DESCRIPTION:
        return plain
    return plain[: MOST_DESCRIPTION - 1].rpartition(" ")[0].rstrip(",;:. ") + "…"


def described(text: str) -> str:
    """The page with its description, in the way of the generator."""
    says = description(text)
    return f"---\ndescription: {json.dumps(says, ensure_ascii=False)}\n---\n{text}" if says else text


def site_url() -> str:
    """Where the site will be, if a workflow of GitHub builds it: pictures of links to it need the address; else nothing."""
    owner, _, name = os.environ.get("GITHUB_REPOSITORY", "").partition("/")
    return os.environ.get("SITE_URL", f"https://{owner}.github.io/{name}/" if name else "")


def for_the_site(text: str, source: str, root: Path, web: str) -> tuple[str, list[str]]:
    """The Markdown of a page of the site, and its faults."""
    faults: list[str] = []

    def link(match: re.Match[str]) -> str:
        target = match["to"] or match["at"]
        if target is None:
            return match[0]
        place = moved(target, source, root, web)
        if place is None:
            faults.append(f"{source}: the link {target} leads to no file")
        return (match["before"] or match["attr"]) + (place or target)

    lines, marks, given, shown = [], None, "", set[str]()
    for line in text.splitlines():
        fence = FENCE.match(line)
        after: list[str] = []
        if marks is None and fence:
            marks, given = fence["marks"], fence["info"].partition(" given=")[2].strip()
            line = fence["indent"] + marks + (fence["info"].split() or [""])[0]
        elif marks is not None:
            if fence and fence["marks"] == marks and not fence["info"].strip():
                marks = None
                after = [] if given in shown else prelude(given, root)
                shown.add(given)
        else:
            line = LINK.sub(link, line)
        lines += [line, *after]
    return "\n".join(with_admonitions(lines)) + "\n", faults


def stage(to: Path, root: Path = ROOT) -> list[str]:
    """Write the sources of the site into the folder `to`, which is emptied first. Returns the faults of the sources."""
    shutil.rmtree(to, ignore_errors=True)
    pages = to / "pages"
    (pages / "reference").mkdir(parents=True)
    web = repository()
    written, faults = [], list[str]()
    for own in (root / "website" / "reference").glob("*.md"):
        (pages / "reference" / own.name).write_text(own.read_text().replace("REPOSITORY", web))
        written.append(f"reference/{own.name}")
    for file in [*(root / name for name in AT_THE_TOP), *(root / "docs").rglob("*")]:
        source = file.relative_to(root).as_posix()
        page = page_of(source)
        if page is None or file.is_dir():
            continue
        (pages / page).parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            written.append(page)
            text, broken = for_the_site(file.read_text(), source, root, web)
            (pages / page).write_text(described(text))
            faults += broken
        else:
            shutil.copy(file, pages / page)
    for name in ("extra.css", "favicon.svg", "card.png"):
        shutil.copy(root / "website" / name, pages)
    shutil.copytree(root / "website" / "overrides", to / "overrides")
    settings = (root / "website" / "mkdocs.yml").read_text()
    if web.startswith("file:"):
        settings = "".join(line for line in settings.splitlines(keepends=True) if "REPOSITORY" not in line)
    if site_url():
        settings += f"site_url: {site_url()}\n"
    (to / "mkdocs.yml").write_text(settings.replace("REPOSITORY", web))
    missing = [page for page in written if f" {page}\n" not in settings]
    return faults + [f"{page} is not in the nav of website/mkdocs.yml" for page in missing]
