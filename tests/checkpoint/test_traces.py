"""The timeline of a save: a file that Perfetto opens, with what each rank did in the order of its clock."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kit.optimizers import adam
from kit.trained import Trained
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

WORLD = 3


def save(folder: str, verb: str, trace: str | None) -> None:
    trained = Trained("FSDP2", adam, 1)
    options = fsdp_optim.SaveOptions(durable=False, trace=trace if trace is None else Path(folder, trace))
    if verb == "save":
        fsdp_optim.save(f"{folder}/step", trained.model, trained.optim, options=options)
    else:
        fsdp_optim.async_save(f"{folder}/step", trained.model, trained.optim, options=options).wait()
    dist.barrier()


def refused(folder: str) -> list[str]:
    trained, errors = Trained("FSDP2", adam, 1), []
    for wrong in ("", 7):
        options: Any = {"trace": wrong}
        try:
            fsdp_optim.save(f"{folder}/step", trained.model, options=fsdp_optim.SaveOptions(**options))
        except fsdp_optim.CheckpointError as error:
            errors.append(str(error))
    return errors


class TraceTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def events(self, verb: str) -> list[dict[str, Any]]:
        run_on_ranks(save, WORLD, self.folder, verb, "trace.json")
        return list(json.loads(Path(self.folder, "trace.json").read_text())["traceEvents"])

    def spans(self, events: list[dict[str, Any]], rank: int) -> dict[str, list[tuple[int, int, int]]]:
        """The (begin, end, track) of the spans of a rank, by name."""
        spans: dict[str, list[tuple[int, int, int]]] = {}
        for event in events:
            if event["ph"] == "X" and event["pid"] == rank:
                self.assertGreaterEqual(event["dur"], 0)
                spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"], event["tid"]))
        return spans

    @parameterized.expand([("save", "transfer"), ("async_save", "copy")])
    def test_every_rank_has_its_line(self, verb: str, moving: str) -> None:
        events = self.events(verb)
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        self.assertEqual(names, {rank: f"rank {rank}" for rank in range(WORLD)})
        [commit] = self.spans(events, 0)["commit"]
        for rank in range(WORLD):
            spans = self.spans(events, rank)
            self.assertLessEqual({"plan", moving, "write", "flush"}, set(spans))
            self.assertEqual("commit" in spans, rank == 0)
            [plan], [move], [flush] = spans["plan"], spans[moving], spans["flush"]
            self.assertLessEqual(plan[1], move[0])
            self.assertLessEqual(move[0], spans["write"][0][0])
            self.assertLessEqual(spans["write"][-1][1], flush[0])
            for begin, end, _ in spans.get("wait", []):
                self.assertEqual((begin, end), (max(flush[1], move[1]), commit[0]))
            self.assertEqual({track for *_, track in spans["write"]}, {0 if verb == "save" else 1})

    def test_the_stall_has_what_the_training_waited_for(self) -> None:
        events = self.events("async_save")
        for rank in range(WORLD):
            spans = self.spans(events, rank)
            [stall], [plan], [copy] = spans["stall"], spans["plan"], spans["copy"]
            self.assertLessEqual((stall[0], copy[1]), (plan[0], stall[1]))
            self.assertEqual(stall[2], 0)

    def test_no_file_without_the_option(self) -> None:
        run_on_ranks(save, WORLD, self.folder, "save", None)
        self.assertEqual([path.name for path in Path(self.folder).iterdir()], ["step"])

    def test_a_file_that_cannot_be_written_does_not_fail_the_save(self) -> None:
        run_on_ranks(save, WORLD, self.folder, "save", "no/such/folder/trace.json")
        self.assertEqual(fsdp_optim.verify(f"{self.folder}/step").has_checksums, True)

    def test_what_is_no_path_is_refused_on_all_ranks(self) -> None:
        errors = run_on_ranks(refused, 2, self.folder)
        self.assertEqual(errors[0], errors[1])
        self.assertEqual(len(errors[0]), 2)
        for error in errors[0]:
            self.assertIn("trace must be the path of a file", error)


if __name__ == "__main__":
    unittest.main()
