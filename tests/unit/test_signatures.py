"""The signatures, docstrings and options of the public calls cannot drift apart."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from kit.options import as_options
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.checkpoint import model_dict
from fsdp_optim.checkpoint.load import restore
from fsdp_optim.checkpoint.run import resuming
from fsdp_optim.checkpoint.save import background
from fsdp_optim.checkpoint.save import foreground as save
from fsdp_optim.checkpoint.trainers.folder import Settings
from fsdp_optim.cli import main as cli
from fsdp_optim.errors import CheckpointError
from fsdp_optim.offline import convert
from fsdp_optim.options import (
    BUCKET_NBYTES,
    ConvertOptions,
    GatherOptions,
    LoadOptions,
    Options,
    ResumeOptions,
    SaveOptions,
    ScatterOptions,
)
from fsdp_optim.verbs import gather, iterate, scatter, shard, transfer

# Public function, module and name of its implementation, its options, and its arguments that are not options.
CALLS: list[tuple[str, Any, str, type, set[str]]] = [
    ("gather_full_optim_state_dict", gather, "gather", GatherOptions, {"model", "optim"}),
    ("iter_full_optim_state", iterate, "iterate", GatherOptions, {"model", "optim"}),
    ("scatter_full_optim_state_dict", scatter, "scatter", ScatterOptions, {"model", "optim", "full"}),
    ("get_shard_from_optim_state_dict", shard, "shard", Options, {"model", "optim", "full"}),
    ("transfer_optim_state", transfer, "transfer", Options, {"src_model", "src_optim", "dst_model", "dst_optim"}),
    ("save", save, "save", SaveOptions, {"path", "model", "optim"}),
    ("async_save", background, "async_save", SaveOptions, {"path", "model", "optim"}),
    ("load", restore, "restore", LoadOptions, {"path", "model", "optim"}),
    ("resume", resuming, "resume", ResumeOptions, {"root", "model", "optim"}),
    ("convert", convert, "convert", ConvertOptions, {"src", "dst", "model"}),
    ("gather_full_model_state_dict", model_dict, "gather_model", GatherOptions, {"model"}),
    ("scatter_full_model_state_dict", model_dict, "scatter_model", LoadOptions, {"model", "full", "source_rank"}),
]
ALWAYS = {"iter_full_optim_state": {"key_by"}, "gather_full_model_state_dict": {"key_by"}}
"""Options that have one value in a call, and are no arguments."""
TAKEN = {"scatter_full_model_state_dict": {"cast", "rename"}}
"""The options of its own that a call takes, where these are some of the options of another call."""
AS = {  # the function whose docstring describes the arguments that this function's docstring does not
    "iter_full_optim_state": "gather_full_optim_state_dict",
    "scatter_full_optim_state_dict": "get_shard_from_optim_state_dict",
    "transfer_optim_state": "gather_full_optim_state_dict",
    "get_shard_from_optim_state_dict": "gather_full_optim_state_dict",
    "async_save": "save",
    "save": "gather_full_optim_state_dict",
    "load": "gather_full_optim_state_dict",
    "resume": "load",
    "convert": "save",
    "gather_full_model_state_dict": "gather_full_optim_state_dict",
    "scatter_full_model_state_dict": "load",
}


def options_of(kind: type) -> dict[str, Any]:
    """The options of a call with their defaults, including the options of all calls."""
    kinds = (kind,) if kind is Options else (kind, Options)
    return {field.name: field.default for one in kinds for field in dataclasses.fields(one) if field.name != "call"}


def arguments_of(name: str, others: set[str]) -> dict[str, inspect.Parameter]:
    function: Callable[..., Any] = getattr(fsdp_optim, name)
    return {key: one for key, one in inspect.signature(function).parameters.items() if key not in others}


def described(name: str) -> set[str]:
    """The names of arguments in a docstring, and in the docstrings that it refers to."""
    text = getattr(fsdp_optim, name).__doc__
    args = {word.strip() for line in re.findall(r"^ +([a-z_, ]+): ", text, re.MULTILINE) for word in line.split(",")}
    args |= set(re.findall(r"`([a-z_]+)`", text))
    return args | (described(AS[name]) if name in AS else set())


class SignaturesTest(unittest.TestCase):
    @parameterized.expand(CALLS)
    def test_every_argument_reaches_its_option(
        self, name: str, module: Any, verb: str, kind: type, others: set[str]
    ) -> None:
        """Every argument is passed with a unique value, and found in the field of its name; the others have the same default."""
        arguments, defaults = arguments_of(name, others), options_of(kind)
        for key, one in arguments.items():
            self.assertIn(key, defaults)
            self.assertEqual(one.default, defaults[key], key)
        given = {key: object() for key in arguments}
        model, path = nn.Linear(1, 1), "/somewhere"
        needed = {key: path if key in ("path", "root", "src", "dst") else model for key in others}
        with mock.patch.object(module, verb) as called:
            getattr(fsdp_optim, name)(**needed, **given)
        (asked,) = [one for one in called.call_args.args if isinstance(one, kind)]
        found = {
            field.name: getattr(one, field.name)
            for one in (asked, getattr(asked, "call", asked))
            for field in dataclasses.fields(one)
        }
        for key, value in given.items():
            self.assertIs(found[key], value, key)

    @parameterized.expand(CALLS)
    def test_every_own_option_is_an_argument(
        self, name: str, module: Any, verb: str, kind: type, others: set[str]
    ) -> None:
        own = {field.name for field in dataclasses.fields(kind)} - {"call"}
        if kind is Options:  # each call takes some of these
            return
        lacking = own - set(arguments_of(name, others))
        self.assertEqual(lacking, own - TAKEN[name] if name in TAKEN else ALWAYS.get(name, set()))

    @parameterized.expand([(name, others) for name, *_, others in CALLS])
    def test_every_argument_is_described(self, name: str, others: set[str]) -> None:
        words = described(name)
        self.assertEqual({key for key in arguments_of(name, others) if key not in words}, set())

    def test_every_call_with_options_is_in_the_table(self) -> None:
        known = {field.name for field in dataclasses.fields(Options)} - {"strict"}
        public = {name: getattr(fsdp_optim, name) for name in fsdp_optim.__all__}
        functions = {name: one for name, one in public.items() if inspect.isfunction(one)}
        taking = {name for name, one in functions.items() if known & set(inspect.signature(one).parameters)}
        self.assertEqual(taking - WITHOUT_OPTIONS, {name for name, *_ in CALLS})

    def test_save_and_async_save_take_the_same(self) -> None:
        first, second = (inspect.signature(getattr(fsdp_optim, name)).parameters for name in ("save", "async_save"))
        self.assertEqual(dict(first), dict(second))


class OtherDoorsTest(unittest.TestCase):
    """The command line, and the settings of the plug-in for Accelerate, repeat options with their defaults."""

    def test_convert_on_the_command_line(self) -> None:
        with mock.patch.object(cli.api, "convert", side_effect=CheckpointError("enough")) as called:
            self.assertEqual(cli.main(["convert", "a", "b"]), 1)
        parameters = inspect.signature(fsdp_optim.convert).parameters
        self.assertEqual(called.call_args.args, ("a", "b"))
        for key, value in called.call_args.kwargs.items():
            self.assertEqual(value or None, parameters[key].default or None, key)
        not_there = {"src", "dst", "model", "process_group", "timeout"}
        self.assertEqual(set(called.call_args.kwargs), set(parameters) - not_there)

    def test_settings_of_trainers(self) -> None:
        known = {**options_of(LoadOptions), **options_of(SaveOptions)}
        settings = {field.name: field.default for field in dataclasses.fields(Settings)}
        self.assertEqual(settings.pop("background"), False)
        for name, default in settings.items():
            self.assertEqual(default, known[name], name)

    def test_enable_takes_the_settings(self) -> None:
        """Read, not imported: the module imports Accelerate."""
        file = Path(fsdp_optim.__file__).parent / "integrations" / "accelerate.py"
        tree = ast.parse(file.read_text())
        enable = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "enable")
        given = dict(zip((one.arg for one in enable.args.kwonlyargs), enable.args.kw_defaults, strict=True))
        found = {
            name: eval(ast.unparse(value), {"BUCKET_NBYTES": BUCKET_NBYTES}) for name, value in given.items() if value
        }
        self.assertEqual(found, {field.name: field.default for field in dataclasses.fields(Settings)})


WITHOUT_OPTIONS = {"wait"}  # its `timeout` is no option of a collective call

SET_BY_MANAGER = {"step", "extra", "per_rank_extra", "overwrite", "keep_last", "upload_to"}
NOT_OF_MANAGER = {"format", "rename", "weights_dtype"}  # a manager's checkpoints are for its own resume


class ManagerTest(unittest.TestCase):
    """`CheckpointManager` has the options of save and resume again, in two methods."""

    def arguments(self, method: Any, kind: type) -> dict[str, inspect.Parameter]:
        known = options_of(kind)
        return {key: one for key, one in inspect.signature(method).parameters.items() if key in known}

    @parameterized.expand([("__init__", SaveOptions, {"keep_last"}), ("resume", ResumeOptions, set())])
    def test_defaults_are_those_of_the_options(self, name: str, kind: type, its_own: set[str]) -> None:
        for key, one in self.arguments(getattr(fsdp_optim.CheckpointManager, name), kind).items():
            self.assertEqual(one.default, options_of(kind)[key], key)
        self.assertLessEqual(its_own, set(options_of(kind)))

    def test_every_option_of_save_is_an_argument_or_the_managers_own(self) -> None:
        own = {field.name for field in dataclasses.fields(SaveOptions)} - {"call"}
        taken = set(self.arguments(fsdp_optim.CheckpointManager.__init__, SaveOptions))
        self.assertEqual(own - taken - SET_BY_MANAGER, NOT_OF_MANAGER)

    def test_every_option_of_resume_is_an_argument_of_one_of_the_two(self) -> None:
        own = {field.name for field in dataclasses.fields(ResumeOptions)} - {"call"}
        methods = fsdp_optim.CheckpointManager.__init__, fsdp_optim.CheckpointManager.resume
        taken = {key for method in methods for key in self.arguments(method, ResumeOptions)}
        self.assertEqual(own - taken, set())

    def test_rollback_takes_what_resume_takes(self) -> None:
        resume, rollback = (
            dict(inspect.signature(getattr(fsdp_optim.CheckpointManager, name)).parameters)
            for name in ("resume", "rollback")
        )
        self.assertEqual({**rollback, "on_damage": resume["on_damage"]}, {**resume, "to": rollback["to"]})

    def test_every_argument_reaches_its_option(self) -> None:
        """By unique values, which no rank has checked yet."""
        module = importlib.import_module("fsdp_optim.checkpoint.run.manager")
        with mock.patch.object(module, "ManagedRun") as run, mock.patch.object(module, "TrainerState"):
            method = fsdp_optim.CheckpointManager.__init__
            keys = set(self.arguments(method, SaveOptions)) - {"keep_last"}
            given: dict[str, Any] = {key: object() for key in keys}
            manager = fsdp_optim.CheckpointManager(
                "/somewhere", nn.Linear(1, 1), **as_options(fsdp_optim.ManagerOptions, **given)
            )
            saving = run.call_args.args[-1].saving
            for key, value in given.items():
                self.assertIs(getattr(saving.call if hasattr(saving.call, key) else saving, key), value, key)
            later: dict[str, Any] = {key: object() for key in self.arguments(manager.resume, ResumeOptions)}
            manager.resume(**as_options(fsdp_optim.LoadOptions, **later))
            asked = run.return_value.load.call_args.args[-1]
            shared = {key: value for key, value in given.items() if hasattr(asked, key)}
            for key, value in {**shared, **later}.items():
                self.assertIs(getattr(asked.call if hasattr(asked.call, key) else asked, key), value, key)
