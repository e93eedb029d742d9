"""Every (wrapper, world size) -> (wrapper, world size): gather there, shard here, gather again; all to the bit.

The oracle is the same optimizer on the unwrapped model. One run gathers all sources of a world size, and one run loads all
sources into one target. `make test-all` loads all sources into each wrapper at one world size, `make test-long` at every one, and
compares the table of docs/wrappers.md with what ran.
"""

from __future__ import annotations

import functools
import itertools
import traceback
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from kit.compare import Differs, check_same, differences
from kit.local_parts import local_of
from kit.optimizers import adam, sgd
from kit.trained import Oracle, Trained
from kit.wrapping import check_full, cpu
from kit.wraps import WORLD_SIZES, WRAPPERS
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

OPTIMIZERS = {"Adam": adam, "SGD with momentum": sgd}
DOCS = Path(__file__).parents[2] / "docs" / "wrappers.md"
QUICK = [("fairscale flat", 3), ("FSDP1 flat", 4), ("FSDP2", 2), ("plain", 1)]

Source = tuple[str, int]

TORCH_REFUSES: Mapping[Source, str] = {}
"""(wrapper, world size) -> torch's words, where torch itself does not build the wrapper. Anything else must run."""


def build(wrapper: str, optimizer: str, steps: int) -> Trained | str:
    """The trained wrapper, or torch's words."""
    if (wrapper, dist.get_world_size()) not in TORCH_REFUSES:
        return Trained(wrapper, OPTIMIZERS[optimizer], steps)
    try:
        return Trained(wrapper, OPTIMIZERS[optimizer], steps)
    except Exception as error:
        return str(error)


def gather_everything() -> dict[tuple[str, str], Any]:
    """On one rank: (wrapper, optimizer) -> full dict, torch's words, or what went wrong."""
    fulls: dict[tuple[str, str], Any] = {}
    recipient = dist.get_world_size() - 1
    with cpu():
        for wrapper, optimizer in itertools.product(WRAPPERS, OPTIMIZERS):
            try:
                trained = build(wrapper, optimizer, 3)
                full = trained if isinstance(trained, str) else trained.gather(recipient)
            except Exception:
                full = traceback.format_exc()
            if full is not None and dist.get_rank() != recipient and not isinstance(full, str):
                full = f"rank {dist.get_rank()} is no recipient and got a {type(full).__name__}"
            fulls[wrapper, optimizer] = full
    return fulls


@functools.cache
def gathered(world_size: int) -> dict[tuple[str, str], Any]:
    """(wrapper, optimizer) -> the recipient's full dict, or the first rank's words."""
    by_rank = run_on_ranks(gather_everything, world_size, timeout=300.0)
    return {
        key: next((fulls[key] for fulls in by_rank if isinstance(fulls[key], str)), by_rank[-1][key])
        for key in by_rank[0]
    }


@functools.cache
def wanted(optimizer: str) -> dict[str, Any]:
    return Oracle(OPTIMIZERS[optimizer]).full()


def load_everything(wrapper: str, sources: Mapping[tuple[Source, str], Any]) -> dict[tuple[Source, str], str]:
    """On one rank: shard, load and gather again every source; "" or what was wrong."""
    problems: dict[tuple[Source, str], str] = {}
    with cpu():
        trained_on = {optimizer: Trained(wrapper, make) for optimizer, make in OPTIMIZERS.items()}
        targets = {optimizer: Trained(wrapper, make, steps=0) for optimizer, make in OPTIMIZERS.items()}
        for number, ((source, optimizer), full) in enumerate(sources.items()):
            try:
                _load_one(targets[optimizer], trained_on[optimizer], full, number, wanted(optimizer))
                problems[source, optimizer] = ""
            except Exception:
                problems[source, optimizer] = traceback.format_exc()
    return problems


def _load_one(target: Trained, alike: Trained, full: Any, number: int, oracle: Mapping[str, Any]) -> None:
    """`alike`: the same wrapper, that has trained itself."""
    world_size = dist.get_world_size()
    recipient = number % world_size
    target.fresh_optimizer()
    if target.optim.state:
        raise Differs("the optimizer was to be new, and has state")
    # both ways to get a shard, in turn
    shard = target.shard(full) if number % 2 else target.scatter(full, (number // 2) % world_size)
    fsdp_optim.load_optim_state_dict(target.optim, shard)
    again = target.gather(recipient)
    # Comparisons come after the last collective call, so that a rank that finds something leaves nobody waiting.
    check_same("this rank's state", local_state(target), local_state(alike))
    if dist.get_rank() == recipient:
        check_full("gathered again", again, oracle)
    elif again is not None:
        raise Differs(f"rank {dist.get_rank()} is no recipient and got a {type(again).__name__}")


def local_state(trained: Trained) -> list[dict[str, Any]]:
    """This rank's elements of every live parameter's state; elements of padding count as nothing."""
    states = []
    for param, index in zip(trained.params, trained.index, strict=True):
        real = index >= min(trained.numbers.start.values())
        values = {}
        for name, value in trained.optim.state[param].items():
            local = local_of(value)
            values[name] = local.reshape(-1)[real] if local.numel() == index.numel() and local.dim() else local
        states.append({name: values[name] for name in sorted(values)})
    return states


@functools.cache
def distinct() -> tuple[dict[tuple[Source, str], Any], dict[tuple[Source, str], tuple[Source, str]]]:
    """The full dicts that differ in anything, and for every source the one that is equal to its own, to the bit."""
    unlike: dict[tuple[Source, str], Any] = {}
    stands_for: dict[tuple[Source, str], tuple[Source, str]] = {}
    for size in WORLD_SIZES:
        for (wrapper, optimizer), full in gathered(size).items():
            key = ((wrapper, size), optimizer)
            if isinstance(full, str):
                continue
            equal = (k for k, other in unlike.items() if k[1] == optimizer and not any(differences(full, other)))
            stands_for[key] = next(equal, key)
            unlike.setdefault(stands_for[key], full)
    return unlike, stands_for


@functools.cache
def loaded(wrapper: str, world_size: int) -> dict[tuple[Source, str], str]:
    """By source and optimizer: "" or what was wrong with it, of the first rank that found something.

    Dicts that are equal in every key, type and bit are one input, and are loaded once.
    """
    unlike, stands_for = distinct()
    by_rank = run_on_ranks(load_everything, world_size, wrapper, unlike, timeout=300.0)
    return {
        key: next((problems[stand_in] for problems in by_rank if problems[stand_in]), "")
        for key, stand_in in stands_for.items()
    }


class GatherTest(unittest.TestCase):
    @parameterized.expand(list(itertools.product(WRAPPERS, WORLD_SIZES, OPTIMIZERS)))
    def test_gathered_state_is_the_unwrapped_optimizers(self, wrapper: str, world_size: int, optimizer: str) -> None:
        full = gathered(world_size)[wrapper, optimizer]
        _skip_if_refused(self, wrapper, world_size, full)
        if isinstance(full, str):
            raise Differs(full)
        check_full(f"{wrapper} on {world_size} ranks", full, wanted(optimizer))


def check_target(test: unittest.TestCase, wrapper: str, world_size: int) -> None:
    """All sources into this one."""
    _skip_if_refused(test, wrapper, world_size, gathered(world_size)[wrapper, "Adam"])
    problems = loaded(wrapper, world_size)
    wrong = [f"{source}, {optimizer}:\n{text}" for (source, optimizer), text in problems.items() if text]
    if wrong:
        raise Differs(f"{len(wrong)} of {len(problems)} sources into {wrapper} on {world_size} ranks\n{wrong[0]}")
    missing = {
        ((source, size), optimizer)
        for source, size, optimizer in itertools.product(WRAPPERS, WORLD_SIZES, OPTIMIZERS)
        if (source, size) not in TORCH_REFUSES
    } - set(problems)
    if missing:
        raise Differs(f"{len(missing)} sources were not there to be loaded: {sorted(missing)[:5]}")


class SomePairsTest(unittest.TestCase):
    @parameterized.expand(QUICK)
    def test_every_source_is_restored_exactly(self, wrapper: str, world_size: int) -> None:
        check_target(self, wrapper, world_size)


@pytest.mark.slow
class AllPairsTest(unittest.TestCase):
    @parameterized.expand([target for target in itertools.product(WRAPPERS, WORLD_SIZES) if target not in QUICK])
    def test_every_source_is_restored_exactly(self, wrapper: str, world_size: int) -> None:
        check_target(self, wrapper, world_size)

    def test_the_docs_have_the_table_of_what_ran(self) -> None:
        text = DOCS.read_text(encoding="utf-8").split("<!-- matrix -->\n")[1].split("<!-- /matrix -->")[0]
        self.assertEqual(text, table(run_all()))


Ran = dict[tuple[Source, Source], bool]
"""(source, target) -> whether the state came back bit for bit, with every optimizer."""


def run_all() -> Ran:
    ran: Ran = {}
    for target in itertools.product(WRAPPERS, WORLD_SIZES):
        if target in TORCH_REFUSES:
            continue
        for (source, _), text in loaded(*target).items():
            ran[source, target] = ran.get((source, target), True) and not text
    return ran


def table(ran: Ran) -> str:
    """Rows: from; columns: to; each cell: the pairs of world sizes that were exact, of those that ran."""
    lines = [f"| | {' | '.join(WRAPPERS)} |", f"|---|{'---|' * len(WRAPPERS)}"]
    for source in WRAPPERS:
        cells = []
        for target in WRAPPERS:
            results = [exact for ((s, _), (t, _)), exact in ran.items() if (s, t) == (source, target)]
            cells.append(f"{sum(results)}" if all(results) else f"{sum(results)} of {len(results)}")
        lines.append(f"| **{source}** | {' | '.join(cells)} |")
    lines += ["", f"{len(ran)} pairs ran, {sum(ran.values())} of them exact."]
    lines += [f"torch refuses {w} on {n} ranks: {words}" for (w, n), words in TORCH_REFUSES.items()]
    return "\n".join(lines) + "\n"


def _skip_if_refused(test: unittest.TestCase, wrapper: str, world_size: int, full: Any) -> None:
    words = TORCH_REFUSES.get((wrapper, world_size))
    if words is not None:
        if not isinstance(full, str) or words not in full:
            raise Differs(f"torch was to refuse {wrapper} on {world_size} ranks with {words!r}: {full!r}")
        test.skipTest(f"torch refuses {wrapper} on {world_size} ranks: {words}")


if __name__ == "__main__":
    print(table(run_all()))
