"""kill -9 in the middle of a save to an object store.

What `latest` gives is always a complete checkpoint, and the next save leaves nothing but checkpoints behind, also in the places
beside its own. The processes that are killed are those of tests/soak/ranks.py.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import unittest
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kit.compare import Differs, check_same
from kit.interrupted import STRANGERS, left_over
from kit.servers import Options, Server, new_bucket, serving
from soak.ranks import LIMIT, WORLD, Ranks, check_values, fill, plain, read_notes, wait_for

import fsdp_optim
from fsdp_optim.buckets.s3 import S3Bucket
from fsdp_optim.formats.own import OURS

SEED = 20251122
MODES = ("steps", "managed steps", "overwrite", "async overwrite")
FEW_MOMENTS, MOMENTS = 1, 50
ONE_DIES = (2, 3)  # of every five moments; otherwise all die
PATIENCE = 3.0  # seconds that a rank waits for one that is dead, at least
MANY = 10  # times what an undisturbed save takes, which counts for a rank that does not come, and for a hang
DEAD_AFTER = 1.5
PART_NBYTES = 32 << 10


class Place:
    """A prefix of a bucket in which the ranks save in one way."""

    def __init__(self, mode: str, options: Options) -> None:
        self.options = {**options, "part_nbytes": PART_NBYTES, "dead_after": DEAD_AFTER}
        self.bucket = S3Bucket(new_bucket(options), options)
        self.root, self.newest = f"{self.bucket.name}/run", 0
        self.order: dict[str, Any] = {"root": self.root, "storage_options": self.options}
        self.order["mode"] = mode
        for name in STRANGERS:
            self.bucket.put(f"run/current/{name}", b"of a user")

    def check(self, at_least: int, at_most: int) -> None:
        """Raise unless the latest checkpoint is complete, and of one of these saves."""
        newest = fsdp_optim.latest(self.root, storage_options=self.options)
        if newest is None:
            if at_least:
                raise Differs(f"no checkpoint, but save {at_least} had ended")
            return
        target = plain()
        fill(target, 12345)
        loaded = fsdp_optim.load(
            newest,
            target.model,
            target.optim,
            options=fsdp_optim.LoadOptions(compare=True, storage_options=self.options, progress=False),
        )
        check_values(newest, target, loaded.state["number"])
        if not at_least <= loaded.state["number"] <= at_most:
            raise Differs(f"{newest} is save {loaded.state['number']}: {at_least} had ended, {at_most} was not over")
        self.newest = loaded.state["number"]

    def check_clean(self) -> None:
        """Raise unless there are checkpoints and strangers' objects only."""
        check_same("left", left_over(self.bucket, "run/", OURS.probe), [])
        contents = {self.bucket.read(f"run/current/{name}")[0] for name in STRANGERS}
        check_same("strangers", contents, {b"of a user"})


class KillTest(unittest.TestCase):
    ranks: Ranks
    folder: Path
    held: ExitStack

    @classmethod
    def setUpClass(cls) -> None:
        held = cls.held = ExitStack()
        cls.addClassCleanup(held.close)
        cls.folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="fsdp_optim_kill_")))
        cls.ranks = Ranks(cls.folder, "boto3")
        held.callback(cls.ranks.close)

    @pytest.mark.slow  # test_object_races.py lets saves die before each of their requests in `make test-all`
    def test_at_random_moments(self) -> None:
        self.die_and_live_on("rclone", FEW_MOMENTS)

    @pytest.mark.slow
    def test_at_many_random_moments(self) -> None:
        self.die_and_live_on("rclone", MOMENTS)

    @pytest.mark.slow
    def test_with_uploads_that_are_listed(self) -> None:
        self.die_and_live_on("moto", MOMENTS // 2)

    def die_and_live_on(self, kind: Server, moments: int) -> None:
        """Some ways of saving in turn, each in a place of its own, in which life continues after each death."""
        rng = random.Random(SEED)
        options = self.held.enter_context(serving(kind))
        places = {mode: Place(mode, options) for mode in MODES}
        lasts: dict[str, float] = {}
        in_the_middle = 0
        for moment in range(moments):
            mode = MODES[moment % len(MODES)]
            place = places[mode]
            if mode not in lasts:
                lasts[mode] = self.save(place)
            victims = [rng.randrange(WORLD)] if moment % 5 in ONE_DIES else list(range(WORLD))
            try:
                ended, begun = self.die(place, victims, rng.uniform(0.0, 1.0) * lasts[mode], lasts[mode])
                in_the_middle += begun > ended
                place.check(ended, begun)
                place.newest = max(place.newest, begun)
                time.sleep(1.2 * DEAD_AFTER + 1)  # the clock of the store counts whole seconds
                lasts[mode] = self.save(place, lasts[mode])  # the machine may have more to do than before
                place.check_clean()
            except Exception as error:
                raise Differs(f"moment {moment}, {mode}, ranks {victims} died: {error}") from error
        if in_the_middle < moments // 2:
            raise Differs(f"only {in_the_middle} of {moments} ranks died in the middle of a save")

    def save(self, place: Place, last: float = LIMIT) -> float:
        """All ranks save once, in how many seconds. `last`: the seconds of the save before."""
        number, limit = place.newest + 1, LIMIT + MANY * last
        notes = self.ranks.run(limit, **place.order, first=number, count=1, patience=limit)
        place.check(number, number)
        times = {what: at for rank, what, _, at in notes if rank == 0}
        return float(times["end"] - times["begin"])

    def die(self, place: Place, victims: Sequence[int], delay: float, last: float) -> tuple[int, int]:
        """The ranks save until some are killed. The last save that had ended for all, and the last that any had begun."""
        first, patience = place.newest + 1, PATIENCE + MANY * last if len(victims) < WORLD else LIMIT + MANY * last
        pids, notes = self.ranks.start(**place.order, first=first, patience=patience)
        try:
            wait_for(notes, victims[0], "begin", first)
            time.sleep(delay)
        finally:
            for rank in victims:
                os.kill(pids[rank], signal.SIGKILL)
            codes = self.ranks.collect(pids, 4 * patience + 30)
        lines = read_notes(notes)
        wanted = [-signal.SIGKILL if rank in victims else 3 for rank in range(WORLD)]  # 3: with an error of the library
        check_same(f"exit codes, {[line for line in lines if line[2] == -1]}", codes, wanted)
        ended = max((number for _, what, number, _ in lines if what == "end"), default=first - 1)
        return ended, max(number for _, what, number, _ in lines if what == "begin")


if __name__ == "__main__":
    unittest.main()
