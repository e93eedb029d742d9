"""The facts about this suite that pytest needs: which tests need GPUs, which files take long, and how hypothesis searches."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from kit import quick
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# No deadline: the ranks of another test may have the cores. In CI the same examples are tried every time,
# but where many times more are asked for.
settings.register_profile(
    "fsdp_optim", deadline=None, derandomize="CI" in os.environ and "EXAMPLES" not in os.environ, print_blob=True
)
settings.load_profile("fsdp_optim")

LONGEST = Path(__file__).parent / "data" / "longest.txt"
"""The files that take longest. They come first: one that began last would let the other processes wait for it."""


class ByFileOrPackage(LoadFileScheduling):
    """Processes take a file at a time; one of them takes all files of a trainer's package, which it imports once.

    One takes the files that look at the source tree, too, which it parses once.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        path = self.config.rootpath / file
        return loaded_by(path) or ("the source tree" if path.parent == LONGEST.parents[1] else file)


@functools.cache
def loaded_by(file: Path) -> str:
    """The modules that the ranks of a file find imported (`kit.forked`), as the file has them; empty for most files."""
    match = re.search(r"^LOADED = (.*kit\.loaded\..*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help=f"leave out what tests/data/{quick.LIST.name} lists")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what is left out, where the quick tests are asked for."""
    return True if config.getoption("--quick") and quick.is_left_out(collection_path) else None


def pytest_configure(config: pytest.Config) -> None:
    """The processes of `make test-all` share the servers that ranks are forked from, and each computes with one thread.

    The threads of several processes would wait for each other on few cores, in loops that take their time.
    """
    # torch looks up the name of each address that it connects to: a lost answer of a name server then takes 1 s, not 5.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
    if config.getoption("--quick"):
        os.environ[quick.ASKED] = "1"
    from kit.forked import shared_servers

    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        shared_servers()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return ByFileOrPackage(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True, scope="session")
def ranks_without_imports() -> Iterator[None]:
    """Servers of ranks are forked from one that has torch, which would take each of them seconds to import."""
    from kit.forked import forked_ranks

    with forked_ranks():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imported modules and collected tests stay: looking for garbage among them would take a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST.read_text().split())}
    if config.getoption("--quick"):
        stays = [quick.is_quick(item.path, item.nodeid) for item in items]
        config.hook.pytest_deselected(items=[item for item, stay in zip(items, stays, strict=True) if not stay])
        items[:] = itertools.compress(items, stays)
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for_gpus = [item for item in items if item.get_closest_marker("nccl")]
    if not for_gpus:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in for_gpus:
        item.add_marker(pytest.mark.skip(reason="nccl: needs a GPU, and torch sees none"))
