"""Public calls have few arguments, every option is documented once, and the other doors to options have the same defaults."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, options
from fsdp_optim.checkpoint import fingerprinting, model_dict
from fsdp_optim.checkpoint.load import restore
from fsdp_optim.checkpoint.run import resuming
from fsdp_optim.checkpoint.save import background
from fsdp_optim.checkpoint.save import foreground as save
from fsdp_optim.cli.app import main
from fsdp_optim.errors import StateError
from fsdp_optim.integrations.hugging_face.settings import Settings
from fsdp_optim.offline.conversion import convert
from fsdp_optim.verbs import gather, iterate, scatter, shard, transfer

MOST_ARGUMENTS = 12
KINDS = ("CallOptions", "SaveOptions", "LoadOptions", "ConvertOptions", "ManagerOptions")

# Public function, module and name of its implementation, and its arguments that are no options.
CALLS: list[tuple[str, Any, str, set[str]]] = [
    ("gather_full_optim_state_dict", gather, "gather", {"model", "optim"}),
    ("iter_full_optim_state", iterate, "iterate", {"model", "optim"}),
    ("scatter_full_optim_state_dict", scatter, "scatter", {"model", "optim", "full"}),
    ("get_shard_from_optim_state_dict", shard, "shard", {"model", "optim", "full"}),
    ("reshard_optim_state_dict", shard, "reshard", {"model", "optim", "sharded"}),
    ("transfer_optim_state", transfer, "transfer", {"src_model", "src_optim", "dst_model", "dst_optim"}),
    ("fingerprint", fingerprinting, "fingerprint", {"model", "optim"}),
    ("save", save, "save", {"path", "model", "optim"}),
    ("async_save", background, "async_save", {"path", "model", "optim"}),
    ("load", restore, "restore", {"path", "model", "optim"}),
    ("resume", resuming, "resume", {"root", "model", "optim"}),
    ("convert", convert, "convert", {"src", "dst", "model"}),
    ("gather_full_model_state_dict", model_dict, "gather_model", {"model"}),
    ("scatter_full_model_state_dict", model_dict, "scatter_model", {"model", "full", "source_rank"}),
]
GIVEN_AS: dict[str, Any] = {"state": lambda given: given.given}
"""The fields that have an argument inside a record."""


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, and the public methods of public classes, by name."""
    for name in fsdp_optim.__all__:
        public = getattr(fsdp_optim, name)
        if inspect.isfunction(public):
            yield name, public
        elif inspect.isclass(public) and not dataclasses.is_dataclass(public) and not issubclass(public, Exception):
            for method, function in vars(public).items():
                if inspect.isfunction(function) and (
                    not method.startswith("_") or function is fsdp_optim.CheckpointManager.__init__
                ):
                    yield f"{name}.{method}", function


def documented(docstring: str, section: str) -> list[str]:
    """The names that a section of a docstring describes, as often as it does."""
    text = re.split(rf"^ *{section}:\n", docstring, flags=re.MULTILINE)[1]
    indent = re.match(r" *", text)[0]  # type: ignore[index]
    lines = lines_inside(text.splitlines(), indent)
    entries = [line[len(indent) :] for line in lines if re.match(rf"{indent}\w[\w, ]*:", line)]
    return [word.strip() for line in entries for word in line.partition(":")[0].split(",")]


def lines_inside(lines: list[str], indent: str) -> list[str]:
    """The lines up to the first one that is less indented, without those that continue an entry."""
    inside = []
    for line in lines:
        if line.strip() and not line.startswith(indent):
            break
        inside.append(line)
    return inside


def fields_in(asked: Any) -> dict[str, Any]:
    """All fields of arguments, including those of the records in them."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(asked):
        value = getattr(asked, field.name)
        if dataclasses.is_dataclass(value) and field.name == "call":
            values |= fields_in(value)
        values[field.name] = value
    return values


class SignaturesTest(unittest.TestCase):
    def test_calls_have_few_arguments(self) -> None:
        numbers = {
            name: len([key for key in inspect.signature(function).parameters if key != "self"])
            for name, function in public_functions()
        }
        self.assertGreater(len(numbers), 25)
        self.assertEqual({name: num for name, num in numbers.items() if num > MOST_ARGUMENTS}, {})

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_every_option_is_documented_once(self, kind: str) -> None:
        """In the class that has it, and in no class that inherits it."""
        of = getattr(fsdp_optim, kind)
        parents = [parent for parent in of.__mro__[1:] if dataclasses.is_dataclass(parent)]
        inherited = {field.name for parent in parents for field in dataclasses.fields(parent)}
        own = [field.name for field in dataclasses.fields(of) if field.name not in inherited]
        self.assertEqual(documented(of.__doc__, "Attributes"), own)

    @parameterized.expand([(name,) for name, *_ in CALLS])
    def test_no_call_repeats_an_option(self, name: str) -> None:
        """An option is a field, and no argument of the call too."""
        parameters = inspect.signature(getattr(fsdp_optim, name)).parameters
        kind = type(parameters["options"].default)
        self.assertIn(kind.__name__, KINDS)
        self.assertEqual(set(parameters) & {field.name for field in dataclasses.fields(kind)}, set())

    @parameterized.expand(
        [(name, public) for name, public in public_functions() if name != "CheckpointManager.__init__"]
    )
    def test_every_argument_is_described(self, name: str, function: Callable[..., Any]) -> None:
        words = set(re.findall(r"`([a-z_]+)`", function.__doc__ or ""))
        has_list = "Args:" in (function.__doc__ or "")
        words |= set(documented(function.__doc__ or "", "Args")) if has_list else set()
        arguments = {key for key in inspect.signature(function).parameters if key != "self"}
        self.assertEqual(arguments - words, set())

    def test_every_argument_of_the_manager_is_described(self) -> None:
        arguments = {key for key in inspect.signature(fsdp_optim.CheckpointManager).parameters if key != "self"}
        self.assertEqual(arguments - set(documented(fsdp_optim.CheckpointManager.__doc__ or "", "Args")), set())

    @parameterized.expand(CALLS)
    def test_every_argument_and_option_arrives(self, name: str, module: Any, verb: str, others: set[str]) -> None:
        """Each is given with a unique value, and found in the field of its name."""
        function = getattr(fsdp_optim, name)
        parameters = inspect.signature(function).parameters
        kind = type(parameters["options"].default)
        own = {field.name: object() for field in dataclasses.fields(kind)}
        given = {key: object() for key in parameters if key not in {*others, "options"}}
        model, path = nn.Linear(1, 1), "/somewhere"
        needed = {key: path if key in ("path", "root", "src", "dst") else model for key in others}
        with mock.patch.object(module, verb) as called:
            function(**needed, **given, options=kind(**own))
        (asked,) = [argument for argument in called.call_args.args if dataclasses.is_dataclass(argument)]
        fields = fields_in(asked)
        for key, value in {**own, **given}.items():
            self.assertIs(GIVEN_AS.get(key, lambda same: same)(fields[key]), value, key)

    @parameterized.expand([(name, others) for name, _, _, others in CALLS])
    def test_options_of_another_kind_are_refused(self, name: str, others: set[str]) -> None:
        """By the call, not by the constructor, so that all ranks hear of it."""
        function = getattr(fsdp_optim, name)
        model = nn.Linear(1, 1)
        optim = torch.optim.SGD(model.parameters(), 0.1)
        values: dict[str, Any] = {"path": "/somewhere", "root": "/somewhere", "src": "/somewhere", "dst": "/elsewhere"}
        needed = {key: values.get(key, optim if "optim" in key else model if "model" in key else {}) for key in others}
        needed |= {"source_rank": 0} if "source_rank" in others else {}
        kind = type(inspect.signature(function).parameters["options"].default).__name__
        with self.assertRaisesRegex(StateError, rf"options must be a {kind}, as in options={kind}\(...\), not dict"):
            result = function(**needed, options={"timeout": 60})
            if name.startswith("iter"):
                list(result)

    def test_save_and_async_save_take_the_same(self) -> None:
        first, second = (inspect.signature(getattr(fsdp_optim, name)).parameters for name in ("save", "async_save"))
        self.assertEqual(dict(first), dict(second))

    def test_the_types_of_arguments_can_be_imported(self) -> None:
        for name in ("Model", "Strategy", "KeyBy", "WhichWeights", "NameOf", "Rename", "OnDamage", "ParamGroups"):
            self.assertTrue(hasattr(options, name), name)


class OtherDoorsTest(unittest.TestCase):
    """The command line, and the settings of the plug-in for Accelerate, repeat options with their defaults."""

    def test_convert_on_the_command_line(self) -> None:
        with mock.patch("fsdp_optim.api.convert", side_effect=CheckpointError("enough")) as called:
            self.assertEqual(main(["convert", "a", "b"]), 1)
        parameters = inspect.signature(fsdp_optim.convert).parameters
        self.assertEqual(called.call_args.args, ("a", "b"))
        given = dict(called.call_args.kwargs)
        self.assertEqual(given.pop("options"), fsdp_optim.ConvertOptions())
        for key, value in given.items():
            self.assertEqual(value or None, parameters[key].default or None, key)
        self.assertEqual(set(called.call_args.kwargs), set(parameters) - {"src", "dst", "model"})

    def test_enable_takes_the_settings(self) -> None:
        """Read, not imported: the module imports Accelerate."""
        file = Path(fsdp_optim.__file__).parent / "integrations" / "accelerate.py"
        tree = ast.parse(file.read_text())
        enable = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "enable")
        given = dict(zip((argument.arg for argument in enable.args.kwonlyargs), enable.args.kw_defaults, strict=True))
        names = {"_SAVE": fsdp_optim.SaveOptions(), "_LOAD": fsdp_optim.LoadOptions()}
        defaults = {name: eval(ast.unparse(value), names) for name, value in given.items() if value}
        self.assertEqual(defaults, {field.name: field.default for field in dataclasses.fields(Settings)})


class ManagerTest(unittest.TestCase):
    def run_of(self, options: Any) -> tuple[Any, Any]:
        """A manager whose run is a stand-in, and that stand-in."""
        module = importlib.import_module("fsdp_optim.checkpoint.run.manager")
        with mock.patch.object(module, "ManagedRun") as run:
            return fsdp_optim.CheckpointManager("/somewhere", nn.Linear(1, 1), options=options), run

    def test_every_option_of_a_save_arrives(self) -> None:
        given = {field.name: object() for field in dataclasses.fields(fsdp_optim.SaveOptions)}
        _, run = self.run_of(fsdp_optim.ManagerOptions(**given))  # type: ignore[arg-type]
        saving = run.call_args.args[-1].saving
        for key, value in given.items():
            self.assertIs(getattr(saving, key), value, key)

    def test_a_load_takes_its_own_options_and_the_managers_for_the_rest(self) -> None:
        shared = {field.name for field in dataclasses.fields(fsdp_optim.SaveOptions)} - {"rename"}
        loads = {field.name for field in dataclasses.fields(fsdp_optim.LoadOptions)}
        of_manager = {name: object() for name in shared}
        manager, run = self.run_of(fsdp_optim.ManagerOptions(**of_manager))  # type: ignore[arg-type]
        own = {name: object() for name in (loads - shared) | {"timeout"}}
        manager.resume(options=fsdp_optim.LoadOptions(**own))
        asked = run.return_value.load.call_args.args[-1]
        for key in loads:
            self.assertIs(getattr(asked, key), own.get(key, of_manager.get(key)), key)

    def test_export_options_are_refused(self) -> None:
        for name, value in {"rename": {"": "model."}, "weights_dtype": torch.bfloat16}.items():
            with self.assertRaisesRegex(StateError, f"{name}=.*cannot be an option of a CheckpointManager"):
                fsdp_optim.ManagerOptions(**{"rename": None, name: value}).validate()
