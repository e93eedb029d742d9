"""Values in an optimizer's state that cannot be copied or pickled: errors of the library that name them."""

from __future__ import annotations

import math
import tempfile
import threading
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from kit.compare import check_same, error_text
from parameterized import parameterized
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

VALUES: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "generator": lambda: (number for number in ()),
    "module": lambda: math,
    "mappingproxy": lambda: MappingProxyType({}),
    "list": lambda: [1, threading.Lock()],
}


def given(value: Any, *, in_group: bool = False) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    if in_group:
        optim.param_groups[0]["value"] = value
    else:
        optim.state[model.weight]["value"] = value
    return model, optim


def on_ranks(path: str) -> list[tuple[str, str]]:
    """Each rank has a lock in its part of the state."""
    model = fully_shard(torch.nn.Linear(2, 2))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.state[next(model.parameters())]["value"] = threading.Lock()
    calls = (
        partial(fsdp_optim.save, path, model, optim),
        partial(fsdp_optim.gather_full_optim_state_dict, model, optim),
    )
    return [error_text(call) for call in calls]


class UncopiedTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name, "a")

    @parameterized.expand(VALUES.items())
    def test_in_the_state(self, name: str, make: Callable[[], Any]) -> None:
        model, optim = given(make())
        calls = {
            "save": partial(fsdp_optim.save, self.path, model, optim),
            "gather": partial(fsdp_optim.gather_full_optim_state_dict, model, optim),
        }
        for what, call in calls.items():
            kind, text = error_text(call)
            is_named = f"weight: 'value' of its state: is a {name}" in text
            check_same(what, (kind, is_named, self.path.exists()), ("StateError", True, False))

    def test_in_a_group(self) -> None:
        kind, text = error_text(
            partial(fsdp_optim.gather_full_optim_state_dict, *given(threading.Lock(), in_group=True))
        )
        check_same("gather", (kind, "param group 0: value: is a lock" in text), ("StateError", True))

    def test_on_ranks(self) -> None:
        for of_rank in run_on_ranks(on_ranks, 2, str(self.path)):
            for kind, text in of_rank:
                is_named = "weight: 'value' of its state: cannot be sent" in text and "lock" in text
                check_same("error", (kind, is_named), ("StateError", True))

    @parameterized.expand(["safetensors", "dcp"])
    def test_pickled(self, format: str) -> None:
        """Functions without a name can be copied, but not pickled."""
        options = fsdp_optim.SaveOptions(allow_pickle=True)
        for place, where in {
            "tree": "state['value'][0]" if format == "safetensors" else "state['value']",
            "group": "param group 0: value",
            "state": "weight: 'value' of its state",
        }.items():
            value = [lambda: None]
            model, optim = given(1 if place == "tree" else value, in_group=place == "group")
            tree = {"value": value if place == "tree" else 1}
            kind, text = error_text(
                partial(fsdp_optim.save, self.path, model, optim, state=tree, format=format, options=options)
            )
            check_same(place, (kind, where in text, "cannot be" in text), ("CheckpointError", True, True))


if __name__ == "__main__":
    unittest.main()
