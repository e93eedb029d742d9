"""State saved at one world size comes back, bit for bit, at every other: uneven and empty shards, other units."""

from __future__ import annotations

import itertools
import unittest

import pytest
from kit.cases import case_name, expand
from kit.compare import check_value
from kit.setups import Full, Plain, Setup, Wrapped
from kit.trained import STEPS
from kit.training import HOWS, Pairs, Resume, gathered, resumed
from kit.units import WRAPPINGS
from parameterized import parameterized

from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

SETUPS = {
    "amsgrad in nested units": Setup(*WRAPPINGS["middle"], "adamw_amsgrad"),
    "momentum in one unit": Setup(*WRAPPINGS["one unit"], "sgd_momentum"),
    "sgd without state": Setup(*WRAPPINGS["first"], "sgd"),
    "nadam, flattened and not": Setup(*WRAPPINGS["deep, both"], "nadam"),
    "adam with fewer elements than ranks": Setup(*WRAPPINGS["tiny"], "adam"),
    "asgd with single elements": Setup(*WRAPPINGS["tiny, unflattened"], "asgd"),
    "adam with awkward sizes": Setup(*WRAPPINGS["odd"], "adam"),
    "peculiar with awkward sizes": Setup(*WRAPPINGS["odd, unflattened"], "peculiar"),
    "peculiar in one flat parameter": Setup(*WRAPPINGS["odd"], "peculiar"),
    "radam of scalars": Setup(*WRAPPINGS["scalars"], "radam"),
    "rprop of siblings": Setup(*WRAPPINGS["siblings"], "rprop"),
}


# State of every kind meets every pair of world sizes; the other optimizers meet one pair each, and `make test-long` has the rest.
AT_EVERY_PAIR = {"peculiar in one flat parameter"}

RESUMES = Pairs(SETUPS, AT_EVERY_PAIR)
OTHERS = RESUMES.others()


class PairsTest(unittest.TestCase):
    @parameterized.expand(RESUMES.cases(), name_func=case_name)
    def test_resume(self, name: str, saved: int, now: int) -> None:
        RESUMES.check(name, saved, now)

    @parameterized.expand([(how,) for how in HOWS], name_func=case_name)
    def test_there_and_back_through_every_world_size(self, how: str) -> None:
        """The dict of one world is loaded in the next world."""
        setups = [SETUPS["amsgrad in nested units"], SETUPS["adam with awkward sizes"]]
        first = fulls = gathered(setups, 3)
        for world_size in (4, 1, 2, 4, 3):
            resumes = [Resume(setup, full, how) for setup, full in zip(setups, fulls, strict=True)]
            fulls = run_on_ranks(pass_through, world_size, resumes)[0]
        check_value("after five worlds", fulls, first)


def pass_through(resumes: list[Resume]) -> list[Full | None]:
    """Load and gather the dict for the next world."""
    fulls = []
    with fairscale_on_cpu():
        for resume in resumes:
            wrapped = Wrapped(resume.setup, values=Plain(resume.setup, STEPS).values())
            wrapped.load_shard(wrapped.shard_by(resume.how, resume.full), resume.how)
            fulls.append(wrapped.gather(0))
    return fulls


@pytest.mark.slow
class OtherPairsTest(unittest.TestCase):
    @parameterized.expand(OTHERS.cases(), name_func=case_name)
    def test_resume(self, name: str, saved: int, now: int) -> None:
        OTHERS.check(name, saved, now)


OF_MLP = ("one unit", "first", "every layer", "unflattened", "unflattened in flat")
OF_DEEP = ("deep", "deep, no own", "deep, both")


class WrappingsTest(unittest.TestCase):
    """State saved under one wrapping comes back under another."""

    @parameterized.expand([(wrapping,) for wrapping in OF_MLP + OF_DEEP], name_func=case_name)
    def test_from_this_wrapping_into_all_others(self, wrapping: str) -> None:
        source = Setup(*WRAPPINGS[wrapping], "adamw_amsgrad")
        (full,) = gathered([source], 2)
        targets = [other for other in (OF_MLP if wrapping in OF_MLP else OF_DEEP) if other != wrapping]
        ways = itertools.cycle(HOWS)
        resumed([Resume(Setup(*WRAPPINGS[target], "adamw_amsgrad"), full, next(ways)) for target in targets], 3)


class PlainDictTest(unittest.TestCase):
    """The state_dict() of the unwrapped optimizer itself is a full dict."""

    @expand(soon=[1, 3], later=[2, 4])
    def test_resume_from_a_plain_optimizer(self, world_size: int) -> None:
        wrappings = ("first", "every layer", "deep", "deep, both", "odd", "tied", "siblings")
        setups = [Setup(*WRAPPINGS[wrapping], "nadam") for wrapping in wrappings]
        fulls = [Plain(setup, STEPS).optim.state_dict() for setup in setups]
        ways = itertools.cycle(HOWS[:3] + HOWS)
        resumed([Resume(setup, full, next(ways)) for setup, full in zip(setups, fulls, strict=True)], world_size)
