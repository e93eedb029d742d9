"""Arguments of a wrong kind, in a wrong place, or misspelt: an error in the caller's words, the same from every function."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit.compare import check_refused, check_same, error_text
from kit.trained import Trained
from kit.wrapping import cpu, snapshot
from torch import nn

import fsdp_optim as F
import fsdp_optim.fairscale
from fsdp_optim.testing import run_on_ranks

INTERNAL = ("_modules", "unhashable", "has no attribute", "not iterable", "subscriptable", "positional argument")


class MyLBFGS(torch.optim.LBFGS):
    pass


class Setting:
    """A model, an optimizer that has stepped, and what belongs to them."""

    def __init__(self, folder: Path) -> None:
        self.model = nn.Linear(3, 2)
        self.optim = torch.optim.Adam(self.model.parameters())
        self.model(torch.ones(3)).sum().backward()
        self.optim.step()
        self.full = F.gather_full_optim_state_dict(self.model, self.optim)
        self.shard = F.get_shard_from_optim_state_dict(self.model, self.optim, self.full)
        self.saved, self.new = folder / "saved", folder / "new"
        F.save(self.saved, self.model, self.optim)
        self.file = folder / "file"
        self.file.write_text("a file")


Case = tuple[str, Callable[[Setting], Any], str, tuple[str, ...]]

MODEL_WANTED = "model must be a torch.nn.Module, not"
OPTIM_WANTED = "optim must be an optimizer, or a list of them, not"

CASES: list[Case] = [
    (
        "save(model, path)",
        lambda s: F.save(s.model, str(s.new)),
        "WrapperError",
        (MODEL_WANTED, "a str", "the path comes first"),
    ),
    (
        "async_save(model, path)",
        lambda s: F.async_save(s.model, s.new),
        "WrapperError",
        (MODEL_WANTED, "the path comes first"),
    ),
    ("load(model, path)", lambda s: F.load(s.model, s.saved), "WrapperError", (MODEL_WANTED, "the path comes first")),
    (
        "save a state dict",
        lambda s: F.save(s.new, s.model.state_dict()),
        "WrapperError",
        (MODEL_WANTED, "OrderedDict", "state_dict()"),
    ),
    (
        "load a state dict",
        lambda s: F.load(s.saved, s.model.state_dict()),
        "WrapperError",
        (MODEL_WANTED, "state_dict()"),
    ),
    (
        "save an optimizer's",
        lambda s: F.save(s.new, s.model, s.optim.state_dict()),
        "WrapperError",
        (OPTIM_WANTED, "state_dict()"),
    ),
    ("save no optimizers", lambda s: F.save(s.new, s.model, []), "WrapperError", ("empty list", "None")),
    ("load no optimizers", lambda s: F.load(s.saved, s.model, []), "WrapperError", ("empty list", "None")),
    ("gather no optimizers", lambda s: F.gather_full_optim_state_dict(s.model, []), "WrapperError", ("empty list",)),
    (
        "save a dict of them",
        lambda s: F.save(s.new, s.model, {"a": s.optim}),
        "WrapperError",
        (OPTIM_WANTED, "list(optims.values())"),
    ),
    (
        "load(path, optim, model)",
        lambda s: F.load(s.saved, s.optim, s.model),
        "WrapperError",
        (MODEL_WANTED, "an Adam", "before the optimizer"),
    ),
    ("load(None)", lambda s: F.load(None), "CheckpointError", ("path", "str", "None")),
    ("load without a model", lambda s: F.load(s.saved, None, s.optim), "StateError", ("model=",)),
    ("latest(None)", lambda s: F.latest(None), "CheckpointError", ("path", "None")),
    (
        "gather swapped",
        lambda s: F.gather_full_optim_state_dict(s.optim, s.model),
        "WrapperError",
        (MODEL_WANTED, "before the optimizer"),
    ),
    ("iterate swapped", lambda s: list(F.iter_full_optim_state(s.optim, s.model)), "WrapperError", (MODEL_WANTED,)),
    (
        "gather of a state dict",
        lambda s: F.gather_full_optim_state_dict(s.model.state_dict(), s.optim),
        "WrapperError",
        (MODEL_WANTED,),
    ),
    ("gather of None", lambda s: F.gather_full_optim_state_dict(None, s.optim), "WrapperError", (MODEL_WANTED, "None")),
    (
        "gather without optim",
        lambda s: F.gather_full_optim_state_dict(s.model, None),
        "WrapperError",
        (OPTIM_WANTED, "None"),
    ),
    (
        "gather a dict",
        lambda s: F.gather_full_optim_state_dict(s.model, {"a": s.optim}),
        "WrapperError",
        ("list(optims.values())",),
    ),
    (
        "gather a class",
        lambda s: F.gather_full_optim_state_dict(s.model, torch.optim.Adam),
        "WrapperError",
        (OPTIM_WANTED, "the class Adam"),
    ),
    (
        "gather parameters",
        lambda s: F.gather_full_optim_state_dict(s.model, s.model.parameters()),
        "WrapperError",
        (OPTIM_WANTED, "generator"),
    ),
    (
        "gather a scheduler",
        lambda s: F.gather_full_optim_state_dict(s.model, torch.optim.lr_scheduler.StepLR(s.optim, 1)),
        "WrapperError",
        (OPTIM_WANTED, "StepLR"),
    ),
    (
        "gather LBFGS",
        lambda s: F.gather_full_optim_state_dict(s.model, MyLBFGS(s.model.parameters())),
        "WrapperError",
        ("MyLBFGS", "history"),
    ),
    (
        "one optimizer twice",
        lambda s: F.gather_full_optim_state_dict(s.model, [s.optim, s.optim]),
        "WrapperError",
        ("weight", "two"),
    ),
    (
        "shard swapped",
        lambda s: F.get_shard_from_optim_state_dict(s.optim, s.model, s.full),
        "WrapperError",
        (MODEL_WANTED,),
    ),
    (
        "shard, the dict second",
        lambda s: F.get_shard_from_optim_state_dict(s.model, s.full, s.optim),
        "WrapperError",
        (OPTIM_WANTED, "a full dict comes after"),
    ),
    (
        "shard of a path",
        lambda s: F.get_shard_from_optim_state_dict(s.model, s.optim, str(s.saved)),
        "StateError",
        ("full optimizer state dict", "str"),
    ),
    (
        "shard, groups",
        lambda s: F.get_shard_from_optim_state_dict(s.model, s.optim, s.full, param_groups="lives"),
        "StateError",
        ("'saved' or 'live'", "'lives'"),
    ),
    (
        "scatter, the dict second",
        lambda s: F.scatter_full_optim_state_dict(s.model, s.full, s.optim),
        "WrapperError",
        (OPTIM_WANTED,),
    ),
    (
        "transfer swapped",
        lambda s: F.transfer_optim_state(s.model, s.model, s.optim, s.optim),
        "WrapperError",
        (MODEL_WANTED,),
    ),
    ("load_optim swapped", lambda s: F.load_optim_state_dict(s.shard, s.optim), "WrapperError", (OPTIM_WANTED, "dict")),
    (
        "load_optim a model",
        lambda s: F.load_optim_state_dict(s.model, s.shard),
        "WrapperError",
        (OPTIM_WANTED, "Linear"),
    ),
    (
        "load_optim a path",
        lambda s: F.load_optim_state_dict(s.optim, "optim.pt"),
        "StateError",
        ("a shard must be a dict", "'optim.pt'"),
    ),
    (
        "load_optim the state only",
        lambda s: F.load_optim_state_dict(s.optim, s.shard["state"]),
        "StateError",
        ("no state and no param_groups",),
    ),
    (
        "load_optim, keep",
        lambda s: F.load_optim_state_dict(s.optim, s.shard, keep_hyperparameters="lr"),
        "StateError",
        ("keep_hyperparameters=['lr']", "'lr'"),
    ),
    (
        "rekey by names",
        lambda s: F.rekey_optim_state_dict(s.full, s.model, key_by="names"),
        "StateError",
        ("'id' or 'name'", "'names'"),
    ),
    ("rekey swapped", lambda s: F.rekey_optim_state_dict(s.model, s.full, "name"), "WrapperError", (MODEL_WANTED,)),
    (
        "for_fairscale of a model",
        lambda s: F.fairscale.for_fairscale(s.model),
        "StateError",
        ("full optimizer state dict", "Linear"),
    ),
    ("for_fairscale of nothing", lambda s: F.fairscale.for_fairscale({}), "StateError", ("no state",)),
    (
        "timeout",
        lambda s: F.gather_full_optim_state_dict(s.model, s.optim, options=F.CallOptions(timeout="5")),
        "StateError",
        ("timeout", "'5'"),
    ),
    ("a missing folder", lambda s: F.load(s.new, s.model), "CheckpointError", ("no such folder",)),
    (
        "a file for a parent",
        lambda s: F.save(s.file / "new", s.model),
        "CheckpointError",
        ("is a file", "another path"),
    ),
]


class WrongArgumentsTest(unittest.TestCase):
    def test_every_function_says_what_is_wrong(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(Path(folder))
            before = sorted(path.name for path in Path(folder).iterdir())
            for label, call, kind, words in CASES:
                with self.subTest(label):
                    got, text = error_text(lambda: call(setting))  # noqa: B023
                    self.assertEqual(got, kind, text)
                    for word in words:
                        self.assertIn(word, text)
                    for word in (*INTERNAL, "was faster"):
                        self.assertNotIn(word, text)
            self.assertEqual(sorted(path.name for path in Path(folder).iterdir()), before)

    def test_frozen_layers_have_a_way_out(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        saved, live = torch.optim.SGD(model.parameters()), torch.optim.SGD(model[1].parameters())
        fulls = [F.gather_full_optim_state_dict(model, optimizer, key_by="name") for optimizer in (saved, live)]
        for optim, full in ((live, fulls[0]), (saved, fulls[1])):
            kind, text = error_text(lambda: F.get_shard_from_optim_state_dict(model, optim, full))  # noqa: B023
            self.assertEqual(kind, "StateError")
            self.assertIn("0.weight", text)
            self.assertIn("strict=False", text)

    def test_one_rank_with_a_wrong_argument_is_heard_by_all(self) -> None:
        for errors in zip(*run_on_ranks(on_one_rank, 2), strict=True):
            check_refused("on one rank", errors, "WrapperError", "rank 1", "must be")


def on_one_rank() -> list[tuple[str, str]]:
    with cpu():
        made = Trained("FSDP2")
        before = snapshot(made)
        wrong = torch.distributed.get_rank() == 1
        errors = [
            error_text(
                lambda: F.gather_full_optim_state_dict(
                    "model" if wrong else made.model, made.optim, options=F.CallOptions(timeout=60)
                )
            ),
            error_text(
                lambda: F.gather_full_optim_state_dict(
                    made.model, {} if wrong else made.optim, options=F.CallOptions(timeout=60)
                )
            ),
            error_text(
                lambda: list(
                    F.iter_full_optim_state(
                        made.model, made.model if wrong else made.optim, options=F.CallOptions(timeout=60)
                    )
                )
            ),
        ]
        check_same("nothing is changed", snapshot(made), before)
        made.gather(None)
        return errors
