"""An argument that is wrong, or another one, on one rank only: every rank raises, soon, and the group works afterwards."""

from __future__ import annotations

import dataclasses
import tempfile
import unittest
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.compare import check_refused, error_text
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Trained
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fsdp_optim
import fsdp_optim.fairscale
from fsdp_optim import FsdpOptimError, per_rank
from fsdp_optim.checkpoint.common.arguments import LoadArguments, ResumeArguments, SaveArguments
from fsdp_optim.checkpoint.common.run_state import RunState
from fsdp_optim.options import (
    Arguments,
    CallArguments,
    GatherArguments,
    ManagerOptions,
    ScatterArguments,
)
from fsdp_optim.testing import run_on_ranks
from fsdp_optim.transport import meeting

WORLD = 2
Errors = list[tuple[str, str]]

EVERY_CALL: dict[str, list[Any]] = {
    "name_of": ["experts"],
    "process_group": ["world", -100],
    "timeout": ["5", 0, -1.0, float("inf"), float("nan"), timedelta(0)],
}
MOVES = {"bucket_nbytes": [0, 1.5, "64 MiB"]}
COLLECTS: dict[str, list[Any]] = {
    "collect": ["everything", ["all"]],
    "recipient_rank": [1.5, "0", True, 7],
    "on_replica_mismatch": ["ignore"],
}
WRITES: dict[str, list[Any]] = {
    "path": [object()],
    "strategy": ["fast"],
    "max_file_size": [0, 1.5],
}
WRONG: dict[str, dict[str, list[Any]]] = {
    "gather": {**EVERY_CALL, **MOVES, **COLLECTS, "key_by": ["names", None]},
    "iterate": {**EVERY_CALL, **MOVES, **COLLECTS},
    "scatter": {**EVERY_CALL, **MOVES, "source_rank": [None, "0", 7], "param_groups": ["mine"]},
    "transfer": {**EVERY_CALL, **MOVES, "param_groups": ["mine"]},
    "reshard": {**EVERY_CALL, "param_groups": ["mine"]},
    "fingerprint": {
        **EVERY_CALL,
        **MOVES,
        "projections": [-1, 1.5, 1000],
        "state": [[1]],
        "on_replica_mismatch": ["ignore"],
    },
    "save": {**EVERY_CALL, **MOVES, **WRITES, "fingerprint": ["yes"]},
    "async_save": {**EVERY_CALL, **MOVES, **WRITES},
    "load": {
        **EVERY_CALL,
        **MOVES,
        "path": [object()],
        "compare": ["bits"],
        "fingerprint": ["bits"],
        "param_groups": ["mine"],
        "keep_hyperparameters": ["lr", 3, [3]],
    },
    "resume": {"timeout": ["5"], "root": [object()], "compare": ["bits"], "on_damage": ["ignore", None]},
}
OTHER: dict[str, dict[str, tuple[Any, Any]]] = {
    "gather": {"key_by": ("id", "name"), "collect": ("wrapper", "all"), "recipient_rank": (0, 1)},
    "iterate": {"bucket_nbytes": (64, 128)},
    "scatter": {"strict": (True, False)},
    "transfer": {"bucket_nbytes": (64, 128)},
    "reshard": {"strict": (True, False)},
    "fingerprint": {"projections": (0, 2), "bucket_nbytes": (4096, 8192), "state": (None, {"a": 1})},
    "save": {
        **dict.fromkeys(("overwrite", "checksums", "fingerprint", "durable", "allow_pickle"), (False, True)),
        "strategy": ("auto", "in_place"),
        "max_file_size": (1000, 2000),
        "state": (None, {"a": per_rank(1)}),
    },
    "async_save": {"durable": (False, True)},
    "load": {
        **dict.fromkeys(("strict", "verify", "allow_pickle"), (False, True)),
        "keep_hyperparameters": ((), ("lr",)),
    },
    "resume": {"on_damage": ("error", "previous"), "verify": (False, True)},
}
MAY_DIFFER: dict[str, dict[str, tuple[Any, Any]]] = {
    "gather": {
        "timeout": (30, timedelta(seconds=40)),
        "name_of": (None, lambda fqn, rank: fqn),
        "bucket_nbytes": (99, 99),
    },
    "save": {"extra": (1, 2), "per_rank_extra": (1, 2), "progress": (False, None)},
    "load": {"progress": (False, None), "keep_hyperparameters": (["lr"], ("lr",))},
}


class Calls:
    """Every collective call, on a trained model and a fresh one."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.trained, self.fresh = (Trained("FSDP2", adam, steps) for steps in (1, 0))
        self.full = self.trained.gather(None)
        self.sharded = get_optimizer_state_dict(self.trained.model, self.trained.optim)
        self.saved = self.folder / "all" / "saved"
        fsdp_optim.save(self.saved, self.trained.model, self.trained.optim)
        self.number = 0

    def run(self, verb: str, timeout: Any = 60.0, **given: Any) -> Any:
        """One call, with other arguments than usual."""
        given["timeout"] = timeout
        self.number += 1
        model, optim = self.trained.model, self.trained.optim
        match verb:
            case "gather":
                return fsdp_optim.fairscale.gather_full_optim_state_dict(
                    model, optim, **as_options(fsdp_optim.CallOptions, **given)
                )
            case "iterate":
                return dict(
                    fsdp_optim.fairscale.iter_full_optim_state(
                        model, optim, **as_options(fsdp_optim.CallOptions, **given)
                    )
                )
            case "scatter":
                return fsdp_optim.scatter_full_optim_state_dict(
                    model, optim, self.full, **as_options(fsdp_optim.CallOptions, **given)
                )
            case "transfer":
                return fsdp_optim.transfer_optim_state(
                    model, optim, self.fresh.model, self.fresh.optim, **as_options(fsdp_optim.CallOptions, **given)
                )
            case "reshard":
                return fsdp_optim.reshard_optim_state_dict(
                    model, optim, self.sharded, **as_options(fsdp_optim.CallOptions, **given)
                )
            case "fingerprint":
                return fsdp_optim.fingerprint(model, optim, **as_options(fsdp_optim.CallOptions, **given))
            case "save" | "async_save":
                call: Any = getattr(fsdp_optim, verb)
                path = given.pop("path", self.folder / str(self.number))
                done = call(path, model, optim, **as_options(fsdp_optim.SaveOptions, **given))
                return done.wait() if verb == "async_save" else done
            case "load":
                return fsdp_optim.load(
                    given.pop("path", self.saved),
                    self.fresh.model,
                    self.fresh.optim,
                    **as_options(fsdp_optim.LoadOptions, **given),
                )
            case "resume":
                root = given.pop("root", self.saved.parent)
                return fsdp_optim.resume(
                    root, self.fresh.model, self.fresh.optim, **as_options(fsdp_optim.LoadOptions, **given)
                )
        raise AssertionError(verb)


def on_one_rank(table: dict[str, dict[str, list[Any]]], folder: str) -> dict[str, Errors]:
    """The result of each wrong value on rank 0 or rank 1 on this rank, by case."""
    calls, errors = Calls(folder), {}
    for verb, arguments in table.items():
        for index, (name, values) in enumerate(arguments.items()):
            for number, value in enumerate(values):
                odd = (index + number) % WORLD
                given = {name: value} if dist.get_rank() == odd else {}
                label = f"{verb}({name}={value if type(value) is not object else 'object()'!r}) on rank {odd}"
                errors[label] = [error_text(lambda: calls.run(verb, **given))]  # noqa: B023
        calls.run(verb)  # all is well again
    return errors


def with_others(table: dict[str, dict[str, tuple[Any, Any]]], folder: str) -> dict[str, Errors]:
    """The results of two values on two ranks."""
    calls, errors = Calls(folder), {}
    for verb, arguments in table.items():
        for name, values in arguments.items():
            given = {name: values[dist.get_rank()]}
            errors[f"{verb}({name}={values})"] = [error_text(lambda: calls.run(verb, **given))]  # noqa: B023
        calls.run(verb)
    return errors


def may_differ(folder: str) -> None:
    calls = Calls(folder)
    for verb, arguments in MAY_DIFFER.items():
        calls.run(verb, **{name: values[dist.get_rank()] for name, values in arguments.items()})


def groups_on_one_rank() -> list[Errors]:
    """A process group that only one rank gives: the same ranks, some of them, or others."""
    trained = Trained("FSDP2", adam, 1)
    everyone, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    errors = []
    with mock.patch.object(meeting, "_QUIET", 0.2):
        for odd, group in ((0, everyone), (2, everyone), (0, pair), (1, pair)):
            given = group if dist.get_rank() == odd else None
            errors.append([error_text(lambda: trained.gather(0, process_group=given, timeout=60.0))])  # noqa: B023
            dist.barrier()  # a rank that comes to a call when the others have raised must not meet them in the next one
            trained.gather(
                0, process_group=None if dist.get_rank() else dist.group.WORLD
            )  # the same group by another name
            trained.gather(0, process_group=everyone)
    return errors


class ArgumentsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def check(self, function: Callable[..., Any], table: Any, kinds: set[str]) -> None:
        by_rank = run_on_ranks(function, WORLD, table, self.folder)
        for label in by_rank[0]:
            name = label[label.index("(") + 1 : label.index("=")]
            with self.subTest(label):
                errors = [errors_of_rank[label][0] for errors_of_rank in by_rank]
                self.assertIn(errors[0][0], kinds)
                check_refused(label, errors, errors[0][0], "rank", *(() if name in ("path", "root") else (name,)))

    def test_wrong_on_one_rank_only(self) -> None:
        self.check(on_one_rank, WRONG, {"StateError", "CheckpointError", "WrapperError", "RankError"})

    def test_different_on_two_ranks(self) -> None:
        self.check(with_others, OTHER, {"RankError"})

    def test_what_may_differ(self) -> None:
        run_on_ranks(may_differ, WORLD, self.folder)

    def test_a_process_group_on_one_rank_only(self) -> None:
        by_rank = run_on_ranks(groups_on_one_rank, 3)
        for number in range(len(by_rank[0])):
            errors = [errors_of_rank[number][0] for errors_of_rank in by_rank]
            check_refused(f"case {number}", errors, "RankError", "process_group=")


class AskedTest(unittest.TestCase):
    """How a call's arguments are compared follows from their fields."""

    options = (
        GatherArguments(CallArguments()),
        ScatterArguments(CallArguments()),
        SaveArguments(),
        LoadArguments(),
        ResumeArguments(),
    )

    def test_every_field_is_compared_or_may_differ_by_name(self) -> None:
        for asked in self.options:
            differs = {
                "name_of",
                "timeout",
                "progress",
                "storage_options",
                "local_cache",
                "wrong_options",
                "fused",
                "trace",
                "silent",
            }
            if not isinstance(asked, SaveArguments):  # a save compares the names that it makes, if any rank renames
                differs.add("rename")
            records = (asked, asked.call) if "call" in vars(asked) else (asked,)
            names = {f.name for record in records for f in dataclasses.fields(record)} - {"call"}
            said = {part.split("=")[0] for part in asked.compared_text().split(", ") if "=" in part}
            self.assertEqual(names - said, names & differs, type(asked))

    def test_fields_with_comparisons_of_their_own(self) -> None:
        """The names of `keep_hyperparameters` in any order; of values that may differ, whether there is one."""
        keeps: tuple[Any, ...] = (["lr", "betas"], ("betas", "lr"), {"lr", "betas"}, ["lr"], ["eps"], [])
        said = [LoadArguments(keep_hyperparameters=keep).compared_text() for keep in keeps]
        self.assertEqual([said.index(text) for text in said], [0, 0, 0, 3, 4, 5])
        states = [
            RunState(given)
            for given in ({"a": 1, "b": per_rank(2)}, {"b": per_rank(3), "a": 4}, {"a": 1, "b": 2}, None)
        ]
        renames: list[Any] = [{"a": "b"}, {"c": "d"}, None, None]
        for name, values in (("state", states), ("rename", renames)):
            first, same, other, none = (SaveArguments(**{name: value}).compared_text() for value in values)
            self.assertEqual((first == same, first == other, first == none), (True, False, False), name)

    def test_a_new_field_is_compared_without_another_line(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class More(Arguments):
            call: CallArguments
            sort: str = "saved"

        self.assertIn("sort='live'", More(CallArguments(), "live").compared_text())
        self.assertNotEqual(More(CallArguments()).compared_text(), More(CallArguments(strict=False)).compared_text())

    def test_no_options_raise_when_they_are_made(self) -> None:
        """Else a rank would raise before the others can hear of it."""
        for asked in (CallArguments(), ManagerOptions(), *self.options):
            self.assertFalse(hasattr(type(asked), "__post_init__"), type(asked))

    def test_a_single_process_raises_at_once(self) -> None:
        model = torch.nn.Linear(2, 2)
        optim = torch.optim.Adam(model.parameters())
        for call in (
            lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, key_by="names"),  # type: ignore[arg-type]
            lambda: fsdp_optim.fairscale.iter_full_optim_state(model, optim, collect="none"),  # type: ignore[arg-type]
            lambda: fsdp_optim.save("never-made", model, optim, options=fsdp_optim.SaveOptions(max_file_size=0)),
            lambda: fsdp_optim.load("not-there", options=fsdp_optim.LoadOptions(keep_hyperparameters="lr")),
        ):
            with self.assertRaises(FsdpOptimError):
                call()
        self.assertFalse(Path("never-made").exists())
