"""Set-ups that are trained, gathered, resumed and compared on ranks."""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks
from kit.compare import Differs, check_value, storages
from kit.full_dicts import check_full, check_shard
from kit.setups import Full, Plain, Setup, Wrapped
from kit.trained import STEPS
from kit.wraps import WORLD_SIZES

T = TypeVar("T")
HOWS = ("method", "method with optim", "function", "scatter")


@dataclass(frozen=True)
class Resume:
    """A full dict that was gathered after `STEPS` steps of `setup` is given back in one of the `HOWS`, and trained on.

    `then`: what is trained from there on, when it is something else.
    """

    setup: Setup
    full: Full
    how: str
    then: Setup | None = None


def gather_all(setups: Sequence[Setup], recipient_rank: int | None) -> list[tuple[Full | None, str]]:
    """On one rank: train each set-up, gather and check it. Returns the full dicts and the differences."""
    with fairscale_on_cpu():
        return [_and_problem(_gather_one, setup, recipient_rank) for setup in setups]


def gather_problems(setups: Sequence[Setup], recipient_rank: int | None) -> list[str]:
    """As `gather_all`, without the full dicts."""
    return [text for _, text in gather_all(setups, recipient_rank)]


def _gather_one(setup: Setup, recipient_rank: int | None) -> tuple[Full | None, str]:
    wrapped = Wrapped(setup, STEPS)
    full = wrapped.gather(recipient_rank)
    if recipient_rank in (None, wrapped.rank):
        check_full(full, wrapped, Plain(setup, STEPS))
    elif full is not None:
        raise Differs(f"rank {wrapped.rank} is no recipient and got a {type(full).__name__}")
    return full, ""


def resume_all(resumes: Sequence[Resume]) -> list[str]:
    """On one rank: the differences of each set-up."""
    with fairscale_on_cpu():
        return [_and_problem(_resume_one, resume)[1] for resume in resumes]


def _resume_one(resume: Resume) -> tuple[None, str]:
    then = resume.then or resume.setup
    plain = Plain(resume.setup, STEPS)
    wrapped = Wrapped(then, values=plain.values())
    recipient = wrapped.world_size - 1
    before = copy.deepcopy(resume.full)
    shard = wrapped.shard_by(resume.how, resume.full)
    shared = storages(shard) & storages(resume.full)
    given = copy.deepcopy(shard)  # because the optimizer may train on in the shard's own tensors
    wrapped.load_shard(shard, resume.how)
    again = wrapped.gather(recipient)
    loaded = copy.deepcopy(wrapped.optim.state_dict())
    wrapped.step(range(STEPS, STEPS + 2))
    # Comparisons come after the last collective call, so that a rank with an error does not let the others wait.
    check_value("the input", resume.full, before)
    if shared:
        raise Differs(f"the shard shares {len(shared)} storages with the full dict")
    check_shard("the shard", given, wrapped, plain, with_names=resume.how != "method")
    check_shard("the optimizer after loading", loaded, wrapped, plain)
    if wrapped.rank == recipient:
        check_full(again, wrapped, plain)
    elif again is not None:
        raise Differs(f"rank {wrapped.rank} is no recipient and got a {type(again).__name__}")
    plain.go_on_as(then)
    plain.step(range(STEPS, STEPS + 2))
    check_shard("the optimizer, trained on", wrapped.optim.state_dict(), wrapped, plain, with_padding=False)
    values = plain.values()
    for position, (live, param) in enumerate(zip(wrapped.lives, wrapped.params, strict=True)):
        wanted = wrapped.part_of(position, {fqn: values[fqn] for fqn in live.fqns})
        check_value(f"parameter {live.fqns}, trained on", param.detach(), wanted)
    return None, ""


def _and_problem(check: Callable[..., tuple[T, str]], *args: Any) -> tuple[T | None, str]:
    try:
        return check(*args)
    except Exception:
        return None, traceback.format_exc()


def raise_problems(by_rank: Sequence[Sequence[str]], what: Sequence[object]) -> None:
    problems = [
        f"rank {rank} of {len(by_rank)}, {what[i]}:\n{text}"
        for rank, texts in enumerate(by_rank)
        for i, text in enumerate(texts)
        if text
    ]
    if problems:
        raise Differs("\n".join(problems))


def gathered(setups: Sequence[Setup], world_size: int, recipient_rank: int | None = 0) -> list[Full]:
    """The recipient's full dicts, each compared with the unwrapped optimizer's."""
    by_rank = run_on_ranks(gather_all, world_size, setups, recipient_rank)
    raise_problems([[text for _, text in results] for results in by_rank], setups)
    return [full for full, _ in by_rank[recipient_rank or 0] if full is not None]


def resumed(resumes: Sequence[Resume], world_size: int) -> None:
    """Each compared with the unwrapped training: the shards, the loaded optimizer, gathered again, trained on."""
    by_rank = run_on_ranks(resume_all, world_size, resumes)
    raise_problems(by_rank, [f"{resume.how}, {resume.setup}" for resume in resumes])


PAIRS = tuple(itertools.product(WORLD_SIZES, WORLD_SIZES))


class Pairs:
    """Named set-ups that are saved at one world size and resumed at another, each pair in one of the `HOWS`.

    Those in `at_every_pair` meet all pairs; the others, or every n-th of them, meet one pair each, another one than its
    neighbours, so that sixteen set-ups meet all of them. `others()` has the rest of the product, for tests that are marked
    slow. All set-ups of a world size share one call, because a call costs more than what it does.
    """

    def __init__(
        self, setups: Mapping[str, Setup], at_every_pair: Iterable[str] = (), every: int = 1, inverse: bool = False
    ) -> None:
        self._setups = dict(setups)
        self._at_every_pair = frozenset(at_every_pair)
        self._every = every
        self._inverse = inverse
        self._saved: dict[int, dict[str, tuple[Full | None, str]]] = {}
        self._resumed: dict[tuple[int, int], dict[str, str]] = {}

    def others(self) -> Pairs:
        return Pairs(self._setups, self._at_every_pair, self._every, not self._inverse)

    def cases(self, names: Iterable[str] | None = None) -> list[tuple[str, int, int]]:
        return [(name, *pair) for name in names or self._setups for pair in PAIRS if self._meets(name, *pair)]

    def check(self, name: str, saved: int, now: int) -> None:
        """Raises Differs with the differences of this one case."""
        if (saved, now) not in self._resumed:
            self._resumed[saved, now] = self._resume(saved, now)
        if problem := self._resumed[saved, now][name]:
            raise Differs(f"{name}, {self._how(name, saved, now)}, {saved} -> {now}:\n{problem}")

    def _meets(self, name: str, saved: int, now: int) -> bool:
        place = list(self._setups).index(name)
        is_near = (place + saved + now) % 4 == 0 and (place // 4 + saved) % 4 == 0
        return (name in self._at_every_pair or (is_near and place % self._every == 0)) != self._inverse

    def _how(self, name: str, saved: int, now: int) -> str:
        return HOWS[(list(self._setups).index(name) + saved + 2 * now) % 4]

    def _save(self, world_size: int) -> dict[str, tuple[Full | None, str]]:
        names = [name for name in self._setups if any(self._meets(name, world_size, now) for now in WORLD_SIZES)]
        by_rank = run_on_ranks(gather_all, world_size, [self._setups[name] for name in names], 0)
        return {name: (by_rank[0][i][0], "".join(results[i][1] for results in by_rank)) for i, name in enumerate(names)}

    def _resume(self, saved: int, now: int) -> dict[str, str]:
        if saved not in self._saved:
            self._saved[saved] = self._save(saved)
        problems = {name: f"when saved: {problem}" for name, (_, problem) in self._saved[saved].items() if problem}
        fulls = {name: full for name, (full, _) in self._saved[saved].items() if full is not None}
        names = [name for name in fulls if name not in problems and self._meets(name, saved, now)]
        resumes = [Resume(self._setups[name], fulls[name], self._how(name, saved, now)) for name in names]
        by_rank = run_on_ranks(resume_all, now, resumes)
        for i, name in enumerate(names):
            problems[name] = "".join(f"rank {rank}: {texts[i]}" for rank, texts in enumerate(by_rank) if texts[i])
        return problems
