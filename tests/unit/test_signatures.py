"""The signatures, docstrings and options of the public calls cannot drift apart."""

from __future__ import annotations

import dataclasses
import inspect
import re
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.checkpoint import background, restore, resuming, save
from fsdp_optim.options import GatherOptions, LoadOptions, Options, ResumeOptions, SaveOptions, ScatterOptions
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
]
AS = {  # the function whose docstring describes the arguments that this function's docstring does not
    "iter_full_optim_state": "gather_full_optim_state_dict",
    "scatter_full_optim_state_dict": "get_shard_from_optim_state_dict",
    "transfer_optim_state": "gather_full_optim_state_dict",
    "get_shard_from_optim_state_dict": "gather_full_optim_state_dict",
    "async_save": "save",
    "save": "gather_full_optim_state_dict",
    "load": "gather_full_optim_state_dict",
    "resume": "load",
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
        positional = [
            path if key in ("path", "root") else model
            for key in inspect.signature(getattr(fsdp_optim, name)).parameters
            if key in others
        ]
        with mock.patch.object(module, verb) as called:
            getattr(fsdp_optim, name)(*positional, **given)
        asked = called.call_args.args[-1]
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
        self.assertEqual(lacking, {"key_by"} if name == "iter_full_optim_state" else set())

    @parameterized.expand([(name, others) for name, *_, others in CALLS])
    def test_every_argument_is_described(self, name: str, others: set[str]) -> None:
        words = described(name)
        self.assertEqual({key for key in arguments_of(name, others) if key not in words}, set())

    def test_save_and_async_save_take_the_same(self) -> None:
        first, second = (inspect.signature(getattr(fsdp_optim, name)).parameters for name in ("save", "async_save"))
        self.assertEqual(dict(first), dict(second))
