"""Two jobs of two processes each that save to one place of a server at one moment: one wins, and the other one raises."""

from __future__ import annotations

import random
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import Differs, check_same, error_text
from kit.models import Net
from kit.optimizers import adam
from kit.options import as_options
from kit.servers import new_bucket, shared
from kit.wraps import in_fsdp2
from torch import nn

import fsdp_optim
from fsdp_optim.buckets.objects import ObjectStaging
from fsdp_optim.buckets.s3 import S3Bucket
from fsdp_optim.testing import RankPool

Options = dict[str, Any]
Outcome = tuple[str, str]  # the class of the error and its text; empty without an error


def filled(model: nn.Module, number: float) -> nn.Module:
    """The model with one number in all parameters."""
    for param in model.parameters():
        nn.init.constant_(param, number)
    return model


def race(job: int, port: int, root: str, options: Options, rounds: int) -> list[tuple[Outcome, Outcome]]:
    """Each round: both jobs save to a place where nothing is, then both replace what is there."""
    model = in_fsdp2(filled(Net(), job))
    optim, moments = adam(model.parameters()), random.Random(job)
    starts = dist.TCPStore("127.0.0.1", port, is_master=False)
    outcomes = []

    def save(number: int, overwrite: bool) -> Outcome:
        asked: Options = {"overwrite": overwrite, "storage_options": options, "progress": False}
        place = f"{root}/step-{number}"
        meet(starts, f"{number} {overwrite}", 4)
        pause = moments.uniform(0, 0.1)
        time.sleep(pause if dist.get_rank() == 0 else 0)

        def commit(*args: Any, **kwargs: Any) -> None:
            if not overwrite:  # nothing was there when either job has begun
                meet(starts, f"{number} committed", 2)
                time.sleep(pause)
            real(*args, **kwargs)

        real = ObjectStaging.commit
        with mock.patch.object(ObjectStaging, "commit", commit):
            return error_text(
                lambda: fsdp_optim.save(
                    place, model, optim, state={"job": job}, **as_options(fsdp_optim.SaveOptions, **asked)
                )
            )

    for number in range(rounds):
        outcomes.append((save(number, False), save(number, True)))
    return outcomes


def meet(starts: dist.Store, name: str, num_processes: int) -> None:
    """Wait for processes of both jobs."""
    if starts.add(name, 1) == num_processes:
        starts.set(f"{name}: go", b"")
    starts.wait([f"{name}: go"])


class TwoJobsTest(unittest.TestCase):
    @expand(soon=[(1,)], later=[(12,)])
    def test_one_wins(self, rounds: int) -> None:
        with ExitStack() as held:
            options = shared("moto")
            name, starts = new_bucket(options), dist.TCPStore("127.0.0.1", 0, is_master=True)
            pools = [held.enter_context(RankPool()) for _ in range(2)]
            threads = held.enter_context(ThreadPoolExecutor(2))
            jobs = [
                threads.submit(pool.run, race, 2, job, starts.port, f"s3://{name}/run", options, rounds)
                for job, pool in enumerate(pools)
            ]
            of_first_job, of_second_job = (job.result() for job in jobs)
            for by_rank in (of_first_job, of_second_job):
                check_same("both ranks of a job have the same outcome", by_rank[0], by_rank[1])
            for number in range(rounds):
                place = f"s3://{name}/run/step-{number}"
                first, again = zip(of_first_job[0][number], of_second_job[0][number], strict=True)
                self.assertEqual(len([error for error, _ in first if not error]), 1, f"one save is the first: {first}")
                self.check_error(next(outcome for outcome in first if outcome[0]), place)
                for outcome in again:
                    if outcome[0]:
                        self.check_error(outcome, place)
                self.assertIn(("", ""), again, "one save is the last")
                self.check_place(place, name, number, options)

    def check_error(self, outcome: Outcome, place: str) -> None:
        self.assertEqual(outcome[0], "CheckpointError", outcome[1])
        self.assertIn(f"{place}: cannot be put in place: another save to this path was faster", outcome[1])

    def check_place(self, place: str, name: str, number: int, options: Options) -> None:
        """One job's checkpoint, whole, and nothing of the other job's once the next save has ended."""
        model = filled(Net(), -1.0)
        restored = fsdp_optim.load(
            place, model, options=fsdp_optim.LoadOptions(storage_options=options, progress=False)
        )
        job = restored.state["job"]
        for fqn, param in model.named_parameters():
            if not torch.equal(param, torch.full_like(param, job)):
                raise Differs(f"{place}: {fqn} is not that of job {job}")
        fsdp_optim.save(
            place,
            model,
            adam(model.parameters()),
            overwrite=True,
            options=fsdp_optim.SaveOptions(storage_options=options, progress=False),
        )
        bucket = S3Bucket(name, options)
        keys = [entry.key for entry in bucket.list(f"run/step-{number}/")]
        self.assertEqual(len({key.split("/")[2] for key in keys}), 2, f"a manifest and one folder: {keys}")
        self.assertEqual(list(bucket.uploads(f"run/step-{number}/")), [])


if __name__ == "__main__":
    unittest.main()
